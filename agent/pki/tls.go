package pki

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"time"
)

// ClientTLS is how a daemon meets a gateway: TLS 1.3, the gateway proved by
// VerifyGateway under roots, whatever name or address it was reached by.
//
// certificate is asked once for each handshake, so that a renewed certificate
// is used from the next dial on; it may be nil, or give nil, for a client
// without one (join). floor gives a time that is certainly not in the future:
// the clock floor or, once there is one, the server-time mark. Chains are
// verified at the later of floor and the leaf's NotBefore, so that a machine
// whose clock stands at 1970, or at 2070, still finds its gateway; what an old
// certificate could be used for meanwhile is bounded by the floor.
func ClientTLS(roots *Roots, certificate func() (*tls.Certificate, error), floor func() time.Time) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		// Names are not used; VerifyConnection does what matters, on every
		// handshake. crypto/tls offers no other way to replace its check.
		InsecureSkipVerify:     true,
		SessionTicketsDisabled: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			if len(state.PeerCertificates) == 0 {
				return errors.New("gateway: it sent no certificate")
			}
			at := floor()
			if leaf := state.PeerCertificates[0]; at.Before(leaf.NotBefore) {
				at = leaf.NotBefore
			}
			_, err := VerifyGateway(roots, state.PeerCertificates, at)
			return err
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			if certificate == nil {
				return &tls.Certificate{}, nil
			}
			cert, err := certificate()
			if cert == nil && err == nil {
				cert = &tls.Certificate{}
			}
			return cert, err
		},
	}
}

// ServerTLS is the other side: TLS 1.3, a client certificate asked for and
// not demanded, because Join and late renewals come without one. The caller
// must judge the peer's certificates with VerifyNode for every request and,
// on a session, at every heartbeat: TLS proves possession of the key, no more.
func ServerTLS(certificate func() (*tls.Certificate, error)) *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		ClientAuth:             tls.RequestClientCert,
		SessionTicketsDisabled: true,
		GetCertificate:         func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return certificate() },
	}
}

// TLSCertificate joins a DER chain, leaf first, and the leaf's key.
func TLSCertificate(chain [][]byte, key crypto.Signer) (*tls.Certificate, error) {
	certs, err := ParseChain(chain)
	if err != nil {
		return nil, err
	}
	return tlsCertificate(certs, key)
}

func tlsCertificate(certs []*x509.Certificate, key crypto.Signer) (*tls.Certificate, error) {
	pub, err := p256(certs[0].PublicKey)
	if err != nil {
		return nil, err
	}
	if !pub.Equal(key.Public()) {
		return nil, fmt.Errorf("the key is not that of certificate %q", certs[0].Subject)
	}
	out := &tls.Certificate{PrivateKey: key, Leaf: certs[0]}
	for _, cert := range certs {
		out.Certificate = append(out.Certificate, cert.Raw)
	}
	return out, nil
}
