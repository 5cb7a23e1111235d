// Package identity is who this node is: its key, its certificate, and the
// signed record of its join; how it gets them, keeps them over crashes, and
// renews them.
//
// Files, all 0600 in the 0700 data directory:
//
//	node.key         the key: PKCS#8 PEM (RFC 5958)
//	node.crt         the certificate chain: PEM, the node's own first
//	join-record.bin  a bcd.v1.Signed JoinRecord
//	identity.json    names the other three by digest; what it names is the identity
//
// A new identity is written beside the old one (NAME.next), identity.json.next
// last; from that moment on it is the identity, whatever a crash leaves
// behind. So there is no moment without one, and none with half of two.
package identity

import (
	"crypto"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/intent"
	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Key is the node's private key: a file, a TPM's, or the helper's. It signs
// SHA-256 digests with ECDSA on P-256.
type Key interface{ crypto.Signer }

// WayBack ends every message about an identity that does not load.
const WayBack = "join again as root: bcd join --reset --yes, then bcd join"

var (
	// ErrNotJoined: there is no identity here.
	ErrNotJoined = errors.New("this machine has not joined; run bcd join as root")
	// ErrUnloadable: there is one, and it cannot be used. It is never
	// replaced silently.
	ErrUnloadable = errors.New("identity does not load")
)

// Identity is one node's. It does not change; a renewal makes another.
type Identity struct {
	NodeID    string
	MachineID string
	Role      bcdv1.Role
	Site      string
	// Joined is server time.
	Joined time.Time
	Key    Key
	// Chain is the node's own certificate and what is above it.
	Chain []*x509.Certificate
	// SignedRecord and Record are the join record, as signed and as read. The
	// signature was checked when it was taken in; CommandRoots checks it again.
	SignedRecord *bcdv1.Signed
	Record       *bcdv1.JoinRecord
}

// Leaf is the node's own certificate.
func (i *Identity) Leaf() *x509.Certificate { return i.Chain[0] }

// NotAfter is when the certificate ends, in server time.
func (i *Identity) NotAfter() time.Time { return i.Leaf().NotAfter }

// Floor is a time that has certainly passed: when the certificate was issued.
func (i *Identity) Floor() time.Time { return i.Leaf().NotBefore.Add(pki.Backdate) }

// TLSCertificate is for the handshake.
func (i *Identity) TLSCertificate() *tls.Certificate {
	out := &tls.Certificate{PrivateKey: i.Key, Leaf: i.Leaf()}
	for _, cert := range i.Chain {
		out.Certificate = append(out.Certificate, cert.Raw)
	}
	return out
}

// CommandRoots gives the roots under which commands and specs count: the pins
// of the config file (command_root_sha256, hex) when there are any, else those
// that the join record names. The record's own signature is checked first
// under roots, at its time of issue: an old record stays true.
func (i *Identity) CommandRoots(roots *pki.Roots, pins []string) (*intent.Roots, error) {
	if len(pins) > 0 {
		return intent.FromHex(pins, roots)
	}
	record, err := intent.FromRoots(roots).JoinRecord(i.SignedRecord, time.UnixMilli(i.Record.GetIssuedMs()))
	if err != nil {
		return nil, fmt.Errorf("join record: %w; %s", err, WayBack)
	}
	return intent.FromDigests(record.GetCommandRootSha256(), roots)
}

// fileVersion is the version of identity.json.
const fileVersion = 1

// file is identity.json.
type file struct {
	Version           int    `json:"version"`
	NodeID            string `json:"node_id"`
	MachineID         string `json:"machine_id"`
	Role              string `json:"role"`
	Site              string `json:"site,omitempty"`
	JoinedMS          int64  `json:"joined_ms"`
	KeySHA256         []byte `json:"key_sha256"`
	CertificateSHA256 []byte `json:"certificate_sha256"`
	RecordSHA256      []byte `json:"join_record_sha256"`
}

// encode gives the contents of the four files.
func (i *Identity) encode() (key, crt, record, index []byte, err error) {
	if key, err = pki.EncodeKey(i.Key); err != nil {
		return nil, nil, nil, nil, err
	}
	var chain [][]byte
	for _, cert := range i.Chain {
		chain = append(chain, cert.Raw)
	}
	crt = pki.EncodeCertificates(chain)
	if record, err = proto.Marshal(i.SignedRecord); err != nil {
		return nil, nil, nil, nil, fmt.Errorf("encode join record: %w", err)
	}
	index, err = json.MarshalIndent(file{
		Version: fileVersion, NodeID: i.NodeID, MachineID: i.MachineID, Role: pki.RoleWord(i.Role), Site: i.Site,
		JoinedMS: i.Joined.UnixMilli(), KeySHA256: digest(key), CertificateSHA256: digest(crt), RecordSHA256: digest(record),
	}, "", "  ")
	return key, crt, record, append(index, '\n'), err
}

func digest(data []byte) []byte {
	sum := sha256.Sum256(data)
	return sum[:]
}

// decode makes an identity of the four files and checks that they belong
// together. It does not judge whether the certificate is valid now.
func decode(key, crt, record []byte, f *file) (*Identity, error) {
	k, err := pki.DecodeKey(key)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", nameKey, err)
	}
	chain, err := pki.DecodeCertificates(crt, pki.MaxChain)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", nameCertificate, err)
	}
	if !k.PublicKey.Equal(chain[0].PublicKey) {
		return nil, fmt.Errorf("%s is not the key of %s", nameKey, nameCertificate)
	}
	name, err := pki.ParseNodeURI(chain[0])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", nameCertificate, err)
	}
	if name.NodeID != f.NodeID || pki.RoleWord(name.Role) != f.Role || name.Site != f.Site {
		return nil, fmt.Errorf("%s names %s, %s is for %s", nameIndex, f.NodeID, nameCertificate, name.NodeID)
	}
	i := &Identity{
		NodeID: f.NodeID, MachineID: f.MachineID, Role: name.Role, Site: name.Site, Joined: time.UnixMilli(f.JoinedMS),
		Key: k, Chain: chain, SignedRecord: &bcdv1.Signed{}, Record: &bcdv1.JoinRecord{},
	}
	if err := proto.Unmarshal(record, i.SignedRecord); err != nil {
		return nil, fmt.Errorf("%s: %w", nameRecord, err)
	}
	if err := proto.Unmarshal(i.SignedRecord.GetPayload(), i.Record); err != nil {
		return nil, fmt.Errorf("%s: %w", nameRecord, err)
	}
	if i.Record.GetNodeId() != f.NodeID {
		return nil, fmt.Errorf("%s names another node, %.80q", nameRecord, i.Record.GetNodeId())
	}
	return i, nil
}

// Current is the identity in use. A renewal sets another; the next dial uses
// it. It is safe for concurrent use.
type Current struct{ value atomic.Pointer[Identity] }

// NewCurrent starts with i.
func NewCurrent(i *Identity) *Current {
	c := &Current{}
	c.Set(i)
	return c
}

// Get gives the identity, nil before the first Set.
func (c *Current) Get() *Identity { return c.value.Load() }

// Set replaces it.
func (c *Current) Set(i *Identity) { c.value.Store(i) }

// Certificate is for pki.ClientTLS.
func (c *Current) Certificate() (*tls.Certificate, error) {
	i := c.Get()
	if i == nil {
		return nil, ErrNotJoined
	}
	return i.TLSCertificate(), nil
}
