package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"time"
)

const (
	// Backdate is how far before its time a certificate begins to be valid:
	// machines with a clock that is a few minutes slow are common.
	Backdate = 10 * time.Minute

	// The root is offline and outlives the hardware it is baked into.
	rootLifetime   = 20 * 365 * 24 * time.Hour
	issuerLifetime = 5 * 365 * 24 * time.Hour
	// MaxLeafLifetime bounds what an authority issues.
	MaxLeafLifetime = 2 * 365 * 24 * time.Hour

	// maxCSRBytes bounds a certificate request; a P-256 one has about 300.
	maxCSRBytes = 16 << 10
)

// Authority is a certificate that may sign others, and its key.
type Authority struct {
	Certificate *x509.Certificate
	Key         crypto.Signer
	// Parents are the certificates above, nearest first, without the root.
	// They go into the chains of what this authority issues.
	Parents []*x509.Certificate
}

// IsRoot says whether the authority is its own issuer.
func (a *Authority) IsRoot() bool {
	return string(a.Certificate.RawIssuer) == string(a.Certificate.RawSubject)
}

// NewKey makes an ECDSA P-256 key.
func NewKey() (*ecdsa.PrivateKey, error) {
	return ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
}

// NewRoot makes a self-signed root. Keep its key offline: it is needed for a
// new issuer or command signer only.
func NewRoot(name string, now time.Time) (*Authority, error) {
	if !namePattern.MatchString(name) {
		return nil, nameError("root", name)
	}
	key, err := NewKey()
	if err != nil {
		return nil, err
	}
	template, err := template("bcd root "+name, now, rootLifetime)
	if err != nil {
		return nil, err
	}
	template.IsCA = true
	template.MaxPathLen = 1
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
	cert, err := sign(template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make root %s: %w", name, err)
	}
	return &Authority{Certificate: cert, Key: key}, nil
}

// NewIssuer makes the authority that a gateway keeps online. Its name
// constraints let it issue nodes and gateways and nothing else.
func (a *Authority) NewIssuer(name string, now time.Time) (*Authority, error) {
	if !namePattern.MatchString(name) {
		return nil, nameError("issuer", name)
	}
	if !a.IsRoot() {
		return nil, errors.New("make issuer: only a root can; this authority is itself an issuer")
	}
	key, err := NewKey()
	if err != nil {
		return nil, err
	}
	template, err := template("bcd issuer "+name, now, issuerLifetime)
	if err != nil {
		return nil, err
	}
	template.IsCA = true
	template.MaxPathLenZero = true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
	template.PermittedDNSDomainsCritical = true
	template.PermittedURIDomains = []string{hostNode, hostGateway}
	cert, err := sign(template, a.Certificate, key.Public(), a.Key)
	if err != nil {
		return nil, fmt.Errorf("make issuer %s: %w", name, err)
	}
	return &Authority{Certificate: cert, Key: key, Parents: a.chain()}, nil
}

// IssueGateway makes a gateway's TLS certificate for the public key pub and
// gives its chain in DER, leaf first, root left out.
func (a *Authority) IssueGateway(name string, pub crypto.PublicKey, notBefore time.Time, lifetime time.Duration) ([][]byte, error) {
	if !namePattern.MatchString(name) {
		return nil, nameError("gateway", name)
	}
	return a.issue("gateway "+name, &url.URL{Scheme: uriScheme, Host: hostGateway, Path: "/" + name}, pub, notBefore, lifetime,
		// A gateway is also a client of its peers, hence both.
		x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth)
}

// IssueCommandSigner makes a certificate whose key signs commands and specs.
// Only a root can: an issuer's constraints forbid it.
func (a *Authority) IssueCommandSigner(name string, pub crypto.PublicKey, notBefore time.Time, lifetime time.Duration) ([][]byte, error) {
	if !namePattern.MatchString(name) {
		return nil, nameError("command signer", name)
	}
	if !a.IsRoot() {
		return nil, errors.New("issue command signer: only a root can; an issuing authority may make nodes and gateways only")
	}
	return a.issue("command signer "+name, &url.URL{Scheme: uriScheme, Host: hostSigner, Path: "/" + name}, pub, notBefore, lifetime)
}

// IssueNode makes a node's certificate for the key of csr (PKCS#10, DER),
// whose signature must prove possession of it. Nothing else of csr counts.
func (a *Authority) IssueNode(csr []byte, name NodeName, notBefore time.Time, lifetime time.Duration) ([][]byte, error) {
	pub, err := CheckCSR(csr)
	if err != nil {
		return nil, err
	}
	if err := name.Check(); err != nil {
		return nil, err
	}
	return a.issue(name.NodeID, NodeURI(name), pub, notBefore, lifetime, x509.ExtKeyUsageClientAuth)
}

// NewCSR makes a certificate request that proves possession of key. It names
// nothing: what the certificate says is the authority's to decide.
func NewCSR(key crypto.Signer) ([]byte, error) {
	return x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{SignatureAlgorithm: x509.ECDSAWithSHA256}, key)
}

// CheckCSR checks that csr proves possession of an ECDSA P-256 key, and gives
// its public half.
func CheckCSR(csr []byte) (*ecdsa.PublicKey, error) {
	if len(csr) > maxCSRBytes {
		return nil, fmt.Errorf("certificate request of %d bytes; at most %d are allowed", len(csr), maxCSRBytes)
	}
	request, err := x509.ParseCertificateRequest(csr)
	if err != nil {
		return nil, fmt.Errorf("certificate request: %w", err)
	}
	pub, err := p256(request.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("certificate request: %w", err)
	}
	if err := request.CheckSignature(); err != nil {
		return nil, fmt.Errorf("certificate request: it does not prove possession of its key: %w", err)
	}
	return pub, nil
}

func p256(key crypto.PublicKey) (*ecdsa.PublicKey, error) {
	pub, ok := key.(*ecdsa.PublicKey)
	if !ok || pub == nil || pub.Curve != elliptic.P256() {
		return nil, fmt.Errorf("key is %T, want ECDSA on P-256", key)
	}
	return pub, nil
}

func (a *Authority) issue(name string, uri *url.URL, key crypto.PublicKey, notBefore time.Time, lifetime time.Duration, usage ...x509.ExtKeyUsage) ([][]byte, error) {
	pub, err := p256(key)
	if err != nil {
		return nil, fmt.Errorf("issue %s: %w", uri, err)
	}
	if lifetime <= 0 || lifetime > MaxLeafLifetime {
		return nil, fmt.Errorf("issue %s: a lifetime of %v is not between 0 and %v", uri, lifetime, MaxLeafLifetime)
	}
	template, err := template(name, notBefore, lifetime)
	if err != nil {
		return nil, err
	}
	// A leaf that outlives its issuer would be refused one day without having
	// expired; let it end with it.
	if template.NotAfter.After(a.Certificate.NotAfter) {
		template.NotAfter = a.Certificate.NotAfter
	}
	if !template.NotAfter.After(notBefore) {
		return nil, fmt.Errorf("issue %s: the authority itself expired at %s; make a new one with bcd-gateway keys init",
			uri, a.Certificate.NotAfter.UTC().Format(time.RFC3339))
	}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = usage
	template.URIs = []*url.URL{uri}
	cert, err := sign(template, a.Certificate, pub, a.Key)
	if err != nil {
		return nil, fmt.Errorf("issue %s: %w", uri, err)
	}
	chain := [][]byte{cert.Raw}
	for _, parent := range a.chain() {
		chain = append(chain, parent.Raw)
	}
	return chain, nil
}

// chain is what stands between a root and what a issues.
func (a *Authority) chain() []*x509.Certificate {
	if a.IsRoot() {
		return nil
	}
	return append([]*x509.Certificate{a.Certificate}, a.Parents...)
}

func template(name string, notBefore time.Time, lifetime time.Duration) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 126))
	if err != nil {
		return nil, err
	}
	return &x509.Certificate{
		SerialNumber:          serial.Add(serial, big.NewInt(1)),
		Subject:               pkix.Name{CommonName: name},
		NotBefore:             notBefore.Add(-Backdate),
		NotAfter:              notBefore.Add(lifetime),
		SignatureAlgorithm:    x509.ECDSAWithSHA256,
		BasicConstraintsValid: true,
	}, nil
}

func sign(template, parent *x509.Certificate, pub crypto.PublicKey, key crypto.Signer) (*x509.Certificate, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, parent, pub, key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

func nameError(what, name string) error {
	return fmt.Errorf("%s name %.80q must be lower-case letters, digits, '.', '_' and '-', at most 63", what, name)
}

// Digest is how roots are pinned: the SHA-256 of the DER certificate.
func Digest(cert *x509.Certificate) [sha256.Size]byte { return sha256.Sum256(cert.Raw) }
