package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"time"
)

// Domain keeps the statements of a node key apart: a signature made for one
// purpose never passes for another. It ends in a newline.
type Domain string

// What a node key signs, next to the TLS handshake.
const (
	DomainRenew     Domain = "bcd renew v1\n"
	DomainSecret    Domain = "bcd secret request v1\n"
	DomainInnerAuth Domain = "bcd inner auth v1\n"
)

// SignStatement signs domain + message: ECDSA, SHA-256, ASN.1.
func SignStatement(key crypto.Signer, domain Domain, message []byte) ([]byte, error) {
	digest := statementDigest(domain, message)
	signature, err := key.Sign(rand.Reader, digest[:], crypto.SHA256)
	if err != nil {
		return nil, fmt.Errorf("sign statement %q: %w", string(domain), err)
	}
	return signature, nil
}

// VerifyStatement checks what SignStatement made.
func VerifyStatement(pub crypto.PublicKey, domain Domain, message, signature []byte) bool {
	key, err := p256(pub)
	if err != nil {
		return false
	}
	digest := statementDigest(domain, message)
	return ecdsa.VerifyASN1(key, digest[:], signature)
}

func statementDigest(domain Domain, message []byte) [sha256.Size]byte {
	return sha256.Sum256(append([]byte(domain), message...))
}

// RenewMessage is what the proof of a RenewRequest signs under DomainRenew:
// SHA-256(csr) and proof_time_ms as 8 bytes, big-endian.
func RenewMessage(csr []byte, at time.Time) []byte {
	digest := sha256.Sum256(csr)
	return binary.BigEndian.AppendUint64(digest[:], uint64(at.UnixMilli()))
}
