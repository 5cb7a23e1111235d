package pki

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"

	"github.com/better-compute/bcd/agent/durable"
)

const (
	// maxPEMBytes bounds a PEM file: a certificate has about 800 bytes.
	maxPEMBytes = 256 << 10
	// MaxRoots bounds a set of roots: one or two, three while they rotate.
	MaxRoots = 32
	// MaxChain bounds a certificate chain: leaf, issuer and root are three.
	MaxChain = 4
	// maxCertificateBytes bounds one DER certificate.
	maxCertificateBytes = 16 << 10
)

// EncodeCertificates gives the PEM form of DER certificates, in order.
func EncodeCertificates(chain [][]byte) []byte {
	var out bytes.Buffer
	for _, der := range chain {
		// Encoding into memory cannot fail for a block without headers.
		_ = pem.Encode(&out, &pem.Block{Type: "CERTIFICATE", Bytes: der})
	}
	return out.Bytes()
}

// DecodeCertificates reads PEM certificates, at most max of them. Text
// between the blocks is ignored, as RFC 7468, section 2 allows; a block of
// another type is an error.
func DecodeCertificates(data []byte, max int) ([]*x509.Certificate, error) {
	if len(data) > maxPEMBytes {
		return nil, fmt.Errorf("certificates: %d bytes of PEM; at most %d are allowed", len(data), maxPEMBytes)
	}
	var out []*x509.Certificate
	for rest := data; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("certificates: PEM block %d is a %.40q, want CERTIFICATE", len(out)+1, block.Type)
		}
		if len(out) == max {
			return nil, fmt.Errorf("certificates: more than %d in one file", max)
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("certificates: PEM block %d: %w", len(out)+1, err)
		}
		out = append(out, cert)
	}
	if len(out) == 0 {
		return nil, errors.New("certificates: there is no PEM block of type CERTIFICATE")
	}
	return out, nil
}

// ParseChain parses DER certificates, leaf first, 1 to MaxChain of them.
func ParseChain(chain [][]byte) ([]*x509.Certificate, error) {
	if len(chain) == 0 || len(chain) > MaxChain {
		return nil, fmt.Errorf("certificate chain: %d certificates, want 1 to %d", len(chain), MaxChain)
	}
	out := make([]*x509.Certificate, len(chain))
	for i, der := range chain {
		if len(der) > maxCertificateBytes {
			return nil, fmt.Errorf("certificate chain: number %d has %d bytes; at most %d are allowed", i+1, len(der), maxCertificateBytes)
		}
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, fmt.Errorf("certificate chain: number %d: %w", i+1, err)
		}
		out[i] = cert
	}
	return out, nil
}

// EncodeKey gives a private key as PKCS#8 PEM (RFC 5958).
func EncodeKey(key crypto.Signer) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode key: %w", err)
	}
	defer clear(der)
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// DecodeKey reads a PKCS#8 PEM with an ECDSA P-256 key. Its errors never hold
// what it read.
func DecodeKey(data []byte) (*ecdsa.PrivateKey, error) {
	if len(data) > maxPEMBytes {
		return nil, fmt.Errorf("key: %d bytes of PEM; at most %d are allowed", len(data), maxPEMBytes)
	}
	block, _ := pem.Decode(data)
	if block == nil || block.Type != "PRIVATE KEY" {
		return nil, errors.New("key: there is no PEM block of type PRIVATE KEY")
	}
	defer clear(block.Bytes)
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, errors.New("key: the PRIVATE KEY block is not PKCS#8")
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("key: it is %T, want ECDSA on P-256", parsed)
	}
	if _, err := p256(&key.PublicKey); err != nil {
		return nil, fmt.Errorf("key: %w", err)
	}
	return key, nil
}

// SaveKey writes key to path with mode 0600, whole or not at all.
func SaveKey(path string, key crypto.Signer) error {
	data, err := EncodeKey(key)
	if err != nil {
		return err
	}
	defer clear(data)
	return durable.WriteFile(path, data, 0o600)
}

// LoadKey reads what SaveKey wrote.
func LoadKey(path string) (*ecdsa.PrivateKey, error) {
	data, err := durable.ReadFile(path, maxPEMBytes)
	if err != nil {
		return nil, err
	}
	defer clear(data)
	key, err := DecodeKey(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return key, nil
}

// SaveCertificates writes DER certificates to path as PEM, mode 0644.
func SaveCertificates(path string, chain [][]byte) error {
	return durable.WriteFile(path, EncodeCertificates(chain), 0o644)
}

// LoadCertificates reads what SaveCertificates wrote, at most max of them.
func LoadCertificates(path string, max int) ([]*x509.Certificate, error) {
	data, err := durable.ReadFile(path, maxPEMBytes)
	if err != nil {
		return nil, err
	}
	certs, err := DecodeCertificates(data, max)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return certs, nil
}

// Save writes the authority's chain to certPath and its key to keyPath.
func (a *Authority) Save(certPath, keyPath string) error {
	if err := SaveKey(keyPath, a.Key); err != nil {
		return err
	}
	chain := [][]byte{a.Certificate.Raw}
	for _, parent := range a.Parents {
		chain = append(chain, parent.Raw)
	}
	return SaveCertificates(certPath, chain)
}

// LoadAuthority reads what Save wrote and checks that the two belong together.
func LoadAuthority(certPath, keyPath string) (*Authority, error) {
	certs, err := LoadCertificates(certPath, MaxChain)
	if err != nil {
		return nil, err
	}
	key, err := LoadKey(keyPath)
	if err != nil {
		return nil, err
	}
	if !key.PublicKey.Equal(certs[0].PublicKey) {
		return nil, fmt.Errorf("%s is not the key of %s", keyPath, certPath)
	}
	if !certs[0].IsCA {
		return nil, fmt.Errorf("%s is not an authority's certificate", certPath)
	}
	return &Authority{Certificate: certs[0], Key: key, Parents: certs[1:]}, nil
}
