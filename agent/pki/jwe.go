package pki

import (
	"crypto"
	"crypto/ecdsa"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/go-jose/go-jose/v4"
)

const (
	// MaxSealed bounds a compact JWE: join claims and user data fit well.
	MaxSealed = 2 << 20
	// maxJWKBytes bounds a JWK; a public P-256 one has about 150 bytes.
	maxJWKBytes = 4 << 10
	// maxRID bounds the request id in a protected header.
	maxRID = 128

	headerRID = "rid"
)

// ErrWrongRequest is wrapped by Open when the JWE answers another request.
var ErrWrongRequest = errors.New("sealed for another request")

// GenerateJoinKey makes the key that join claims are sealed to.
func GenerateJoinKey() (*ecdsa.PrivateKey, error) { return NewKey() }

// MarshalJWK gives the public key as a JWK (RFC 7517), ready to be
// join-encryption.jwk.
func MarshalJWK(pub *ecdsa.PublicKey) ([]byte, error) {
	if _, err := p256(pub); err != nil {
		return nil, fmt.Errorf("jwk: %w", err)
	}
	return json.Marshal(jose.JSONWebKey{Key: pub, Algorithm: string(jose.ECDH_ES_A256KW), Use: "enc"})
}

// ParseJWK reads a public P-256 JWK. A private one is an error: it has no
// place where this is read.
func ParseJWK(data []byte) (*ecdsa.PublicKey, error) {
	if len(data) > maxJWKBytes {
		return nil, fmt.Errorf("jwk: %d bytes; at most %d are allowed", len(data), maxJWKBytes)
	}
	var key jose.JSONWebKey
	if err := json.Unmarshal(data, &key); err != nil {
		// The library's error may quote what it read.
		return nil, errors.New("jwk: it is not a JSON web key (RFC 7517)")
	}
	if !key.IsPublic() {
		return nil, errors.New("jwk: it is not a public key")
	}
	pub, err := p256(key.Key)
	if err != nil {
		return nil, fmt.Errorf("jwk: %w", err)
	}
	if key.Algorithm != "" && key.Algorithm != string(jose.ECDH_ES_A256KW) {
		return nil, fmt.Errorf("jwk: it is for %.40q, want ECDH-ES+A256KW", key.Algorithm)
	}
	return pub, nil
}

// Thumbprint names a key: RFC 7638 with SHA-256, base64url without padding.
func Thumbprint(pub *ecdsa.PublicKey) (string, error) {
	if _, err := p256(pub); err != nil {
		return "", fmt.Errorf("thumbprint: %w", err)
	}
	sum, err := (&jose.JSONWebKey{Key: pub}).Thumbprint(crypto.SHA256)
	if err != nil {
		return "", fmt.Errorf("thumbprint: %w", err)
	}
	return base64.RawURLEncoding.EncodeToString(sum), nil
}

// Seal encrypts plaintext to pub: a compact JWE (RFC 7516), ECDH-ES+A256KW
// with A256GCM. rid, when not empty, goes into the protected header.
func Seal(pub *ecdsa.PublicKey, plaintext []byte, rid string) (string, error) {
	if _, err := p256(pub); err != nil {
		return "", fmt.Errorf("seal: %w", err)
	}
	if len(rid) > maxRID {
		return "", fmt.Errorf("seal: request id of %d bytes; at most %d are allowed", len(rid), maxRID)
	}
	options := &jose.EncrypterOptions{}
	if rid != "" {
		options.WithHeader(headerRID, rid)
	}
	encrypter, err := jose.NewEncrypter(jose.A256GCM, jose.Recipient{Algorithm: jose.ECDH_ES_A256KW, Key: pub}, options)
	if err != nil {
		return "", fmt.Errorf("seal: %w", err)
	}
	object, err := encrypter.Encrypt(plaintext)
	if err != nil {
		return "", fmt.Errorf("seal: %w", err)
	}
	compact, err := object.CompactSerialize()
	if err != nil {
		return "", fmt.Errorf("seal: %w", err)
	}
	if len(compact) > MaxSealed {
		return "", fmt.Errorf("seal: %d bytes sealed; at most %d are allowed", len(compact), MaxSealed)
	}
	return compact, nil
}

// Open decrypts what Seal made. The protected header must carry exactly rid;
// else the error wraps ErrWrongRequest. Its errors hold nothing of the
// plaintext. The caller zeroes the answer after use.
func Open(key *ecdsa.PrivateKey, compact, rid string) (plaintext []byte, err error) {
	if len(compact) > MaxSealed {
		return nil, fmt.Errorf("open: %d bytes; at most %d are allowed", len(compact), MaxSealed)
	}
	if err := checkHeader(compact, rid); err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	object, err := jose.ParseEncryptedCompact(compact, []jose.KeyAlgorithm{jose.ECDH_ES_A256KW}, []jose.ContentEncryption{jose.A256GCM})
	if err != nil {
		return nil, errors.New("open: it is not a compact JWE with ECDH-ES+A256KW and A256GCM")
	}
	plaintext, err = object.Decrypt(key)
	if err != nil {
		return nil, errors.New("open: it was sealed to another key, or changed on the way")
	}
	return plaintext, nil
}

// checkHeader looks at the protected header before anything is decrypted. In
// the compact form every header is protected.
func checkHeader(compact, rid string) error {
	encoded, _, ok := strings.Cut(compact, ".")
	if !ok || len(encoded) > maxJWKBytes {
		return errors.New("it is not a compact JWE")
	}
	raw, err := base64.RawURLEncoding.DecodeString(encoded)
	if err != nil {
		return errors.New("its header is not base64url")
	}
	var header struct {
		RID string `json:"rid"`
		Zip string `json:"zip"`
	}
	if err := json.Unmarshal(raw, &header); err != nil {
		return errors.New("its header is not JSON")
	}
	if header.Zip != "" {
		// Compression before encryption leaks lengths, and can be a bomb.
		return errors.New("it is compressed, which is not allowed here")
	}
	if header.RID != rid {
		return ErrWrongRequest
	}
	return nil
}
