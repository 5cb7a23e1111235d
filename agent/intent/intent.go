// Package intent makes and checks signed intent: commands, specs and join
// records that nobody between the control plane and a node can forge or bend.
//
// A bcd.v1.Signed carries the payload's bytes as they were signed, and
// signatures over their DSSE pre-authentication encoding, each with the
// certificate chain of its signer. Nothing outside the signature counts.
package intent

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// The payload types.
const (
	TypeCommand    = "bcd.v1.Command"
	TypeNodeSpec   = "bcd.v1.NodeSpec"
	TypeJoinRecord = "bcd.v1.JoinRecord"
	TypeBootTable  = "bcd.v1.BootTable"
	TypeBootConfig = "bcd.v1.BootConfig"
)

const (
	// MaxPayload is the largest payload: a NodeSpec or a BootTable of 4 MiB.
	MaxPayload = 4 << 20
	// maxSignatures and pki.MaxChain bound the work that a forged envelope
	// can cause.
	maxSignatures     = 8
	maxSignatureBytes = 128
	// maxDigests bounds a set of pins.
	maxDigests = 32
)

// Reasons that Verify wraps. The reasons of package pki (ErrUntrusted,
// ErrExpired, ErrNotYetValid, ErrWrongPurpose) are wrapped too.
var (
	ErrMalformed    = errors.New("malformed")
	ErrTooLarge     = errors.New("too large")
	ErrWrongType    = errors.New("payload is of another type")
	ErrUnsigned     = errors.New("not signed")
	ErrBadSignature = errors.New("signature does not match")
	ErrNoRoots      = errors.New("no command-signing root is pinned")
)

// PAE is DSSE's pre-authentication encoding, version 1
// (https://github.com/secure-systems-lab/dsse, protocol.md): what is signed.
func PAE(payloadType string, payload []byte) []byte {
	out := make([]byte, 0, 32+len(payloadType)+len(payload))
	out = append(out, "DSSEv1 "...)
	out = strconv.AppendInt(out, int64(len(payloadType)), 10)
	out = append(out, ' ')
	out = append(out, payloadType...)
	out = append(out, ' ')
	out = strconv.AppendInt(out, int64(len(payload)), 10)
	out = append(out, ' ')
	return append(out, payload...)
}

// Signer signs for the control plane.
type Signer struct {
	// Key is ECDSA P-256.
	Key crypto.Signer
	// Chain is DER, the signer's own certificate first.
	Chain [][]byte
}

// Sign marshals m once and signs those bytes as a payload of payloadType.
func (s *Signer) Sign(payloadType string, m proto.Message) (*bcdv1.Signed, error) {
	payload, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("sign %s: %w", payloadType, err)
	}
	return s.SignBytes(payloadType, payload)
}

// SignBytes signs payload as it is.
func (s *Signer) SignBytes(payloadType string, payload []byte) (*bcdv1.Signed, error) {
	if len(payload) > MaxPayload {
		return nil, fmt.Errorf("sign %s: %w: %d bytes; at most %d are allowed", payloadType, ErrTooLarge, len(payload), MaxPayload)
	}
	digest := sha256.Sum256(PAE(payloadType, payload))
	signature, err := s.Key.Sign(rand.Reader, digest[:], crypto.SHA256)
	if err != nil {
		return nil, fmt.Errorf("sign %s: %w", payloadType, err)
	}
	return &bcdv1.Signed{
		PayloadType: payloadType,
		Payload:     payload,
		Signatures:  []*bcdv1.Signature{{Signature: signature, Chain: s.Chain}},
	}, nil
}

// Roots are the pins: signatures count only under one of them. Several at
// once let roots rotate. The zero value trusts nothing.
type Roots struct {
	digests map[[sha256.Size]byte]bool
	// known are certificates of pinned roots, or candidates for it: a chain
	// may leave its root out.
	known []*x509.Certificate
}

// FromRoots pins every root of a roots.pem.
func FromRoots(roots *pki.Roots) *Roots {
	r := &Roots{digests: map[[sha256.Size]byte]bool{}, known: roots.Certificates()}
	for _, cert := range r.known {
		r.digests[pki.Digest(cert)] = true
	}
	return r
}

// FromPEM pins every root of data.
func FromPEM(data []byte) (*Roots, error) {
	roots, err := pki.ParseRoots(data)
	if err != nil {
		return nil, err
	}
	return FromRoots(roots), nil
}

// FromDigests pins roots by the SHA-256 of their DER, as a join record names
// them. known are certificates that may be those roots (roots.pem); a pinned
// root that is not among them is still found when the chain carries it.
func FromDigests(digests [][]byte, known *pki.Roots) (*Roots, error) {
	if len(digests) == 0 {
		return nil, ErrNoRoots
	}
	if len(digests) > maxDigests {
		return nil, fmt.Errorf("%d command-signing roots; at most %d are allowed", len(digests), maxDigests)
	}
	r := &Roots{digests: map[[sha256.Size]byte]bool{}, known: known.Certificates()}
	for _, digest := range digests {
		if len(digest) != sha256.Size {
			return nil, fmt.Errorf("command-signing root digest of %d bytes, want %d", len(digest), sha256.Size)
		}
		r.digests[[sha256.Size]byte(digest)] = true
	}
	return r, nil
}

// FromHex is FromDigests for command_root_sha256 of the config file.
func FromHex(digests []string, known *pki.Roots) (*Roots, error) {
	raw := make([][]byte, len(digests))
	for i, digest := range digests {
		var err error
		if raw[i], err = hex.DecodeString(digest); err != nil {
			return nil, fmt.Errorf("command-signing root digest %.80q is not hex", digest)
		}
	}
	return FromDigests(raw, known)
}

// Verify checks that signed holds a payload of wantType under at least one
// signature, by a command signer, that ends in a pinned root at time now
// (server time). The payload is returned as it was signed, and only then.
// Without a valid signature the error is that of the last one tried.
func (r *Roots) Verify(signed *bcdv1.Signed, wantType string, now time.Time) (payload []byte, err error) {
	if signed == nil {
		return nil, fmt.Errorf("verify %s: %w: there is nothing", wantType, ErrMalformed)
	}
	if signed.GetPayloadType() != wantType {
		return nil, fmt.Errorf("verify %s: %w: %.80q", wantType, ErrWrongType, signed.GetPayloadType())
	}
	if n := len(signed.GetPayload()); n > MaxPayload {
		return nil, fmt.Errorf("verify %s: %w: %d bytes; at most %d are allowed", wantType, ErrTooLarge, n, MaxPayload)
	}
	signatures := signed.GetSignatures()
	if len(signatures) == 0 {
		return nil, fmt.Errorf("verify %s: %w", wantType, ErrUnsigned)
	}
	if len(signatures) > maxSignatures {
		return nil, fmt.Errorf("verify %s: %w: %d signatures; at most %d are allowed", wantType, ErrMalformed, len(signatures), maxSignatures)
	}
	if r == nil || len(r.digests) == 0 {
		return nil, fmt.Errorf("verify %s: %w", wantType, ErrNoRoots)
	}
	digest := sha256.Sum256(PAE(wantType, signed.GetPayload()))
	for _, signature := range signatures {
		if err = r.verifyOne(signature, digest[:], now); err == nil {
			return signed.GetPayload(), nil
		}
	}
	return nil, fmt.Errorf("verify %s: %w", wantType, err)
}

func (r *Roots) verifyOne(signature *bcdv1.Signature, digest []byte, now time.Time) error {
	if n := len(signature.GetSignature()); n == 0 || n > maxSignatureBytes {
		return fmt.Errorf("%w: a signature of %d bytes", ErrMalformed, n)
	}
	chain, err := pki.ParseChain(signature.GetChain())
	if err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	pinned, err := r.pinned(chain)
	if err != nil {
		return err
	}
	if _, err := pki.VerifyCommandSigner(pinned, chain, now); err != nil {
		return err
	}
	// VerifyCommandSigner has made sure of the key's type.
	if !ecdsa.VerifyASN1(chain[0].PublicKey.(*ecdsa.PublicKey), digest, signature.GetSignature()) {
		return ErrBadSignature
	}
	return nil
}

// pinned gives the pinned roots that can matter for chain: those known here,
// and the last of the chain when its digest is pinned.
func (r *Roots) pinned(chain []*x509.Certificate) (*pki.Roots, error) {
	var certs []*x509.Certificate
	for _, cert := range r.known {
		if r.digests[pki.Digest(cert)] {
			certs = append(certs, cert)
		}
	}
	if last := chain[len(chain)-1]; r.digests[pki.Digest(last)] {
		certs = append(certs, last)
	}
	if len(certs) == 0 {
		return nil, fmt.Errorf("%w: the chain does not carry a pinned root, and none is in roots.pem", pki.ErrUntrusted)
	}
	return pki.NewRoots(certs...)
}

// Command verifies a signed command and reads it.
func (r *Roots) Command(signed *bcdv1.Signed, now time.Time) (*bcdv1.Command, error) {
	return read(r, signed, TypeCommand, now, &bcdv1.Command{})
}

// NodeSpec verifies a signed spec and reads it.
func (r *Roots) NodeSpec(signed *bcdv1.Signed, now time.Time) (*bcdv1.NodeSpec, error) {
	return read(r, signed, TypeNodeSpec, now, &bcdv1.NodeSpec{})
}

// JoinRecord verifies a signed join record and reads it.
func (r *Roots) JoinRecord(signed *bcdv1.Signed, now time.Time) (*bcdv1.JoinRecord, error) {
	return read(r, signed, TypeJoinRecord, now, &bcdv1.JoinRecord{})
}

// BootTable verifies a signed boot table and reads it.
func (r *Roots) BootTable(signed *bcdv1.Signed, now time.Time) (*bcdv1.BootTable, error) {
	return read(r, signed, TypeBootTable, now, &bcdv1.BootTable{})
}

// BootConfig verifies a signed boot config and reads it. Whether it answers
// the reader's own question is the reader's to check (BootConfig.ask_sha256).
func (r *Roots) BootConfig(signed *bcdv1.Signed, now time.Time) (*bcdv1.BootConfig, error) {
	return read(r, signed, TypeBootConfig, now, &bcdv1.BootConfig{})
}

func read[M proto.Message](r *Roots, signed *bcdv1.Signed, wantType string, now time.Time, m M) (M, error) {
	var none M
	payload, err := r.Verify(signed, wantType, now)
	if err != nil {
		return none, err
	}
	if err := proto.Unmarshal(payload, m); err != nil {
		return none, fmt.Errorf("verify %s: %w: %w", wantType, ErrMalformed, err)
	}
	return m, nil
}
