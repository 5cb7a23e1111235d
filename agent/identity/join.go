package identity

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/intent"
	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/api/bcd/v1/bcdv1connect"
)

const (
	// maxSealedClaims is the contract's bound on JoinRequest.sealed.
	maxSealedClaims = 256 << 10
	// maxAnswer bounds what a join or renewal server may send.
	maxAnswer = 1 << 20
)

// JoinOptions is what a join needs.
type JoinOptions struct {
	Store Store
	// GatewayURL is https://HOST[:PORT].
	GatewayURL string
	// Roots are what the gateway's certificate, the answer's and the join
	// record's signature must chain to.
	Roots *pki.Roots
	// JoinKey is the public key of join-encryption.jwk.
	JoinKeyJWK []byte
	Token      *Token
	// Claims is what the machine says of itself; token, CSR, role and time
	// are filled in here.
	Claims *bcdv1.JoinClaims
	Role   bcdv1.Role
	// HTTP reaches the gateway over pki.ClientTLS; see HTTPClient.
	HTTP connect.HTTPClient
	// Wall is the machine's own clock, for the skew message only. Floor is a
	// time that has certainly passed.
	Wall, Floor func() time.Time
}

// Join makes this machine a node and saves the identity. Where one is already
// that loads, its key is used again: the same node gets a new certificate.
// One that does not load is an error with the way back, never replaced.
//
// A refusal by the gateway is a *Refused; Retryable tells what may pass.
func Join(ctx context.Context, o JoinOptions) (*Identity, error) {
	var key Key
	switch existing, err := o.Store.Load(); {
	case err == nil:
		key = existing.Key
	case errors.Is(err, ErrNotJoined):
		if key, err = o.Store.pendingKey(); err != nil {
			return nil, fmt.Errorf("join: %w", err)
		}
	default:
		return nil, fmt.Errorf("join: %w", err)
	}
	request, err := o.request(key)
	if err != nil {
		return nil, fmt.Errorf("join: %w", err)
	}
	client := bcdv1connect.NewJoinServiceClient(o.HTTP, o.GatewayURL, connect.WithReadMaxBytes(maxAnswer))
	response, err := client.Join(ctx, connect.NewRequest(request))
	if err != nil {
		return nil, fmt.Errorf("join at %s: %w", o.GatewayURL, explain(err, o.Wall()))
	}
	i, err := o.accept(response.Msg, key)
	if err != nil {
		return nil, fmt.Errorf("join at %s: the answer is not acceptable: %w", o.GatewayURL, err)
	}
	if err := o.Store.Save(i); err != nil {
		return nil, fmt.Errorf("join: %w", err)
	}
	return i, nil
}

// request builds the claims and seals them. Everything that holds the token
// in clear is zeroed.
func (o *JoinOptions) request(key Key) (*bcdv1.JoinRequest, error) {
	pub, err := pki.ParseJWK(o.JoinKeyJWK)
	if err != nil {
		return nil, fmt.Errorf("join-encryption.jwk: %w", err)
	}
	thumbprint, err := pki.Thumbprint(pub)
	if err != nil {
		return nil, err
	}
	csr, err := pki.NewCSR(key)
	if err != nil {
		return nil, fmt.Errorf("certificate request: %w", err)
	}
	claims := &bcdv1.JoinClaims{}
	if o.Claims != nil {
		claims = proto.CloneOf(o.Claims)
	}
	claims.Csr, claims.Role, claims.WallClockMs = csr, o.Role, o.Wall().UnixMilli()
	claims.Token = string(o.Token.Reveal())
	plain, err := proto.Marshal(claims)
	claims.Token = ""
	if err != nil {
		return nil, fmt.Errorf("claims: %w", err)
	}
	defer clear(plain)
	sealed, err := pki.Seal(pub, plain, "")
	if err != nil {
		return nil, err
	}
	if len(sealed) > maxSealedClaims {
		return nil, fmt.Errorf("claims of %d bytes sealed; at most %d are allowed", len(sealed), maxSealedClaims)
	}
	return &bcdv1.JoinRequest{Sealed: sealed, KeyThumbprint: thumbprint}, nil
}

// accept checks the answer: a certificate for our key, in the role we asked
// for, under our roots, and a signed record that says the same.
func (o *JoinOptions) accept(m *bcdv1.JoinResponse, key Key) (*Identity, error) {
	if m.GetRole() != o.Role {
		return nil, fmt.Errorf("it is for role %q, asked was %q", pki.RoleWord(m.GetRole()), pki.RoleWord(o.Role))
	}
	i := &Identity{
		NodeID: m.GetNodeId(), MachineID: m.GetMachineId(), Role: m.GetRole(), Site: m.GetSite(),
		Joined: time.UnixMilli(m.GetServerTimeMs()), Key: key,
	}
	return i, i.take(m.GetCertificateChain(), m.GetJoinRecord(), o.Roots, latest(o.Floor(), i.Joined))
}

// take fills in and checks what a join and a renewal have in common.
func (i *Identity) take(chain [][]byte, record *bcdv1.Signed, roots *pki.Roots, at time.Time) error {
	var err error
	if i.Chain, err = pki.ParseChain(chain); err != nil {
		return err
	}
	// A root in the chain would be stored and sent for nothing.
	if last := len(i.Chain) - 1; last > 0 && roots.Contains(i.Chain[last]) {
		i.Chain = i.Chain[:last]
	}
	at = latest(at, i.Leaf().NotBefore)
	name, err := pki.VerifyNode(roots, i.Chain, at)
	if err != nil {
		return err
	}
	if want := (pki.NodeName{Role: i.Role, Site: i.Site, NodeID: i.NodeID}); name != want {
		return fmt.Errorf("the certificate names %s, the answer %s", pki.NodeURI(name), pki.NodeURI(want))
	}
	if _, err := pki.TLSCertificate(chain, i.Key); err != nil {
		return fmt.Errorf("it is not for this machine's key: %w", err)
	}
	if i.Record, err = intent.FromRoots(roots).JoinRecord(record, at); err != nil {
		return err
	}
	i.SignedRecord = record
	if i.Record.GetNodeId() != i.NodeID || i.Record.GetRole() != i.Role || i.Record.GetSite() != i.Site || i.Record.GetMachineId() != i.MachineID {
		return fmt.Errorf("the join record names node %.80q, role %q, site %.80q; the certificate %s",
			i.Record.GetNodeId(), pki.RoleWord(i.Record.GetRole()), i.Record.GetSite(), pki.NodeURI(name))
	}
	if _, err := intent.FromDigests(i.Record.GetCommandRootSha256(), roots); err != nil {
		return fmt.Errorf("the join record: %w", err)
	}
	return nil
}

func latest(times ...time.Time) time.Time {
	var out time.Time
	for _, t := range times {
		if t.After(out) {
			out = t
		}
	}
	return out
}
