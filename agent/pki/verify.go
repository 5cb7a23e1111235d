package pki

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"time"
)

// Reasons that Verify functions wrap, next to ErrWrongPurpose.
var (
	// ErrUntrusted: the chain ends in no pinned root.
	ErrUntrusted = errors.New("certificate does not chain to a trusted root")
	// ErrExpired: the time that counts is after the end of the certificate.
	ErrExpired = errors.New("certificate has expired")
	// ErrNotYetValid: the time that counts is before its beginning.
	ErrNotYetValid = errors.New("certificate is not valid yet")
)

// Roots are the certificates that everything must chain to. The zero value
// trusts nothing.
type Roots struct{ certs []*x509.Certificate }

// NewRoots makes a set of roots. Each must be a certificate authority.
func NewRoots(certs ...*x509.Certificate) (*Roots, error) {
	if len(certs) == 0 || len(certs) > MaxRoots {
		return nil, fmt.Errorf("roots: %d certificates, want 1 to %d", len(certs), MaxRoots)
	}
	r := &Roots{}
	for _, cert := range certs {
		if !cert.IsCA || !cert.BasicConstraintsValid {
			return nil, fmt.Errorf("roots: %q is not an authority's certificate", cert.Subject)
		}
		if _, err := p256(cert.PublicKey); err != nil {
			return nil, fmt.Errorf("roots: %q: %w", cert.Subject, err)
		}
		if !r.Contains(cert) {
			r.certs = append(r.certs, cert)
		}
	}
	return r, nil
}

// ParseRoots reads roots from PEM.
func ParseRoots(data []byte) (*Roots, error) {
	certs, err := DecodeCertificates(data, MaxRoots)
	if err != nil {
		return nil, err
	}
	return NewRoots(certs...)
}

// LoadRoots reads roots.pem.
func LoadRoots(path string) (*Roots, error) {
	certs, err := LoadCertificates(path, MaxRoots)
	if err != nil {
		return nil, fmt.Errorf("trust roots: %w", err)
	}
	r, err := NewRoots(certs...)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return r, nil
}

// Certificates gives the roots; the slice must not be changed.
func (r *Roots) Certificates() []*x509.Certificate {
	if r == nil {
		return nil
	}
	return r.certs
}

// Contains says whether cert is one of the roots, byte for byte.
func (r *Roots) Contains(cert *x509.Certificate) bool {
	for _, c := range r.Certificates() {
		if bytes.Equal(c.Raw, cert.Raw) {
			return true
		}
	}
	return false
}

// PEM gives the roots as a roots.pem file.
func (r *Roots) PEM() []byte {
	var chain [][]byte
	for _, cert := range r.Certificates() {
		chain = append(chain, cert.Raw)
	}
	return EncodeCertificates(chain)
}

// VerifyGateway checks that chain (leaf first, root left out or last) is a
// gateway's at time now, and gives the gateway's name.
func VerifyGateway(roots *Roots, chain []*x509.Certificate, now time.Time) (name string, err error) {
	if err := verify(roots, chain, now, x509.ExtKeyUsageServerAuth); err != nil {
		return "", fmt.Errorf("gateway: %w", err)
	}
	if name, err = singleName(chain[0], hostGateway); err != nil {
		return "", fmt.Errorf("gateway: %w", err)
	}
	return name, nil
}

// VerifyNode checks that chain is a node's at time now, and gives the node's
// name. A chain that is sound but expired gives the name and an error that
// wraps ErrExpired, for the renewal within the grace period.
func VerifyNode(roots *Roots, chain []*x509.Certificate, now time.Time) (NodeName, error) {
	verifyErr := verify(roots, chain, now, x509.ExtKeyUsageClientAuth)
	if verifyErr != nil && !errors.Is(verifyErr, ErrExpired) {
		return NodeName{}, fmt.Errorf("node: %w", verifyErr)
	}
	name, err := ParseNodeURI(chain[0])
	if err != nil {
		return NodeName{}, fmt.Errorf("node: %w", err)
	}
	if verifyErr != nil {
		// Expired is the only flaw if the chain holds at its own last moment.
		if err := verify(roots, chain, chain[0].NotAfter, x509.ExtKeyUsageClientAuth); err != nil {
			return NodeName{}, fmt.Errorf("node: %w", err)
		}
		return name, fmt.Errorf("node %s: %w", name.NodeID, verifyErr)
	}
	return name, nil
}

// VerifyCommandSigner checks that chain is a command signer's at time now, and
// gives the signer's name.
func VerifyCommandSigner(roots *Roots, chain []*x509.Certificate, now time.Time) (name string, err error) {
	if err := verify(roots, chain, now, x509.ExtKeyUsageAny); err != nil {
		return "", fmt.Errorf("command signer: %w", err)
	}
	if name, err = singleName(chain[0], hostSigner); err != nil {
		return "", fmt.Errorf("command signer: %w", err)
	}
	return name, nil
}

// verify is RFC 5280 path validation at time now, with the bounds of this
// package: ECDSA P-256 everywhere, at most MaxChain certificates, a leaf that
// is not an authority.
func verify(roots *Roots, chain []*x509.Certificate, now time.Time, usage x509.ExtKeyUsage) error {
	if len(chain) == 0 || len(chain) > MaxChain {
		return fmt.Errorf("certificate chain: %d certificates, want 1 to %d", len(chain), MaxChain)
	}
	leaf := chain[0]
	if leaf.IsCA {
		return fmt.Errorf("%w: %q is an authority", ErrWrongPurpose, leaf.Subject)
	}
	for _, cert := range chain {
		if _, err := p256(cert.PublicKey); err != nil {
			return fmt.Errorf("certificate %q: %w", cert.Subject, err)
		}
	}
	// Time first: x509 reports an expired leaf and an unknown root in an order
	// of its own, and the remedy differs.
	for _, cert := range chain {
		if now.After(cert.NotAfter) {
			return fmt.Errorf("%w: %q ended at %s, and it is %s", ErrExpired, cert.Subject, stamp(cert.NotAfter), stamp(now))
		}
		if now.Before(cert.NotBefore) {
			return fmt.Errorf("%w: %q begins at %s, and it is %s", ErrNotYetValid, cert.Subject, stamp(cert.NotBefore), stamp(now))
		}
	}
	pool, intermediates := x509.NewCertPool(), x509.NewCertPool()
	for _, root := range roots.Certificates() {
		pool.AddCert(root)
	}
	for _, cert := range chain[1:] {
		intermediates.AddCert(cert)
	}
	_, err := leaf.Verify(x509.VerifyOptions{
		Roots:         pool,
		Intermediates: intermediates,
		CurrentTime:   now,
		KeyUsages:     []x509.ExtKeyUsage{usage},
	})
	var invalid x509.CertificateInvalidError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &invalid) && invalid.Reason == x509.IncompatibleUsage:
		return fmt.Errorf("%w: %q: %w", ErrWrongPurpose, leaf.Subject, err)
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		// What has expired, or not begun, is a root.
		return fmt.Errorf("%w: a trusted root itself is not valid at %s: %w", ErrExpired, stamp(now), err)
	default:
		last := chain[len(chain)-1]
		return fmt.Errorf("%w: it was issued by %q; compare roots.pem with the gateway's (%w)", ErrUntrusted, last.Issuer, err)
	}
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
