package gateway

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/intent"
	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// maxSealedBytes bounds JoinRequest.sealed.
	maxSealedBytes = 256 << 10
	maxMACs        = 64
	// maxTokenGiven bounds how many machines one token remembers.
	maxTokenGiven = 100000
)

// joinRefusal is a join that is not to be: a code for programs, a sentence for
// the console and for the operator.
type joinRefusal struct {
	code    bcdv1.JoinErrorCode
	message string
}

func (r *joinRefusal) Error() string { return r.message }

func refuse(code bcdv1.JoinErrorCode, format string, args ...any) *joinRefusal {
	return &joinRefusal{code, fmt.Sprintf(format, args...)}
}

type joinService struct{ g *Gateway }

// Join turns a token into a certificate. Every refusal is in a timeline: the
// machine's where the claims match one, else the gateway's.
func (s joinService) Join(ctx context.Context, request *connect.Request[bcdv1.JoinRequest]) (*connect.Response[bcdv1.JoinResponse], error) {
	g := s.g
	if !g.joinLimit.AllowN(g.now(), 1) {
		return nil, g.joinError(refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_BUSY, "too many machines join at once; try again in a few seconds"))
	}
	claims, err := g.openClaims(request.Msg)
	if err != nil {
		return nil, g.refused(ctx, claims, callerOf(ctx).remote, err)
	}
	response, err := g.join(ctx, claims)
	if err != nil {
		return nil, g.refused(ctx, claims, callerOf(ctx).remote, err)
	}
	return connect.NewResponse(response), nil
}

// openClaims opens and bounds what a machine says of itself.
func (g *Gateway) openClaims(request *bcdv1.JoinRequest) (*bcdv1.JoinClaims, error) {
	const malformed = bcdv1.JoinErrorCode_JOIN_ERROR_CODE_MALFORMED
	if len(request.GetSealed()) > maxSealedBytes {
		return nil, refuse(malformed, "the join request is %d bytes; at most %d are allowed", len(request.GetSealed()), maxSealedBytes)
	}
	if t := request.GetKeyThumbprint(); t != "" && t != g.keys.JoinThumbprint {
		return nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_WRONG_JOIN_KEY,
			"the machine sealed its claims to join key %.64q, this gateway has %s; give it this gateway's join-encryption.jwk", t, g.keys.JoinThumbprint)
	}
	plain, err := pki.Open(g.keys.Join, request.GetSealed(), "")
	if err != nil {
		return nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_WRONG_JOIN_KEY,
			"the join request cannot be opened with this gateway's join key: %v", err)
	}
	defer clear(plain)
	claims := new(bcdv1.JoinClaims)
	if err := proto.Unmarshal(plain, claims); err != nil {
		return nil, refuse(malformed, "the sealed join request does not hold join claims")
	}
	if fault := claimsFault(claims); fault != "" {
		return claims, refuse(malformed, "%s", fault)
	}
	return claims, nil
}

// claimsFault says which bound the claims break. "" is none.
func claimsFault(c *bcdv1.JoinClaims) string {
	for name, value := range map[string]string{
		"hostname": c.GetHostname(), "serial": c.GetSystemSerial(), "uuid": c.GetSystemUuid(), "boot id": c.GetBootId(), "version": c.GetVersion(),
	} {
		if len(value) > maxNameBytes || strings.ContainsAny(value, "\x00\n\r") {
			return fmt.Sprintf("join claims: the %s is longer than %d bytes or has control characters", name, maxNameBytes)
		}
	}
	switch {
	case len(c.GetHardwareKeyHash()) != sha256.Size:
		return fmt.Sprintf("join claims: a hardware key hash of %d bytes, want %d: the machine has nothing that tells it from another", len(c.GetHardwareKeyHash()), sha256.Size)
	case len(c.GetMacs()) > maxMACs || len(c.GetInventoryHashes()) > maxSections:
		return "join claims: too many MAC addresses or inventory sections"
	case pki.RoleWord(c.GetRole()) == "":
		return fmt.Sprintf("join claims: role %d is not one of node, site, ramdisk", c.GetRole())
	}
	for _, mac := range c.GetMacs() {
		if len(mac) > 32 {
			return "join claims: a MAC address of more than 32 bytes"
		}
	}
	return ""
}

// join checks the token and makes the machine and node.
func (g *Gateway) join(ctx context.Context, claims *bcdv1.JoinClaims) (*bcdv1.JoinResponse, error) {
	if _, err := pki.CheckCSR(claims.GetCsr()); err != nil {
		return nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_MALFORMED, "%v", err)
	}
	var response *bcdv1.JoinResponse
	var gone []string
	err := g.update(ctx, func(tx Tx) error {
		response, gone = nil, nil
		now := g.now()
		token, machine, err := checkToken(tx, now, claims)
		if err != nil {
			return err
		}
		if machine == nil {
			if machine, err = newMachine(tx, now, claims); err != nil {
				return err
			}
		}
		node, fresh, err := nodeFor(tx, now, token, machine, claims)
		if err != nil {
			return err
		}
		hardware := hashHex(claims.GetHardwareKeyHash())
		if token.Given[hardware] == "" {
			token.Used++
		}
		if token.Given == nil {
			token.Given = map[string]string{}
		}
		if len(token.Given) < maxTokenGiven {
			token.Given[hardware] = node.ID
		}
		if err := tx.PutToken(token); err != nil {
			return err
		}
		if fresh && token.CommandID != "" {
			if gone, err = retire(tx, now, machine, node); err != nil {
				return err
			}
		}
		machine.Site = token.Site
		if len(claims.GetMacs()) > 0 {
			machine.MACs = claims.GetMacs()
		}
		if machine.CurrentNode == "" {
			machine.CurrentNode = node.ID
		}
		if err := tx.PutMachine(machine); err != nil {
			return err
		}
		chain, err := g.issue(tx, now, node, claims.GetCsr())
		if err != nil {
			return err
		}
		message := fmt.Sprintf("joined as %s, token %s", pki.RoleWord(node.Role), token.ID)
		if !fresh {
			message = fmt.Sprintf("joined again as the same %s, token %s", pki.RoleWord(node.Role), token.ID)
		}
		severity := ""
		if line := clockLine(now, claims.GetWallClockMs()); line != "" {
			message, severity = message+"; "+line, "warn"
		}
		if err := tx.AppendTimeline(&TimelineEntry{
			TimeMS: now.UnixMilli(), MachineID: machine.ID, NodeID: node.ID, Type: "joined", Severity: severity, Message: message,
		}); err != nil {
			return err
		}
		record, err := g.joinRecord(now, node)
		if err != nil {
			return err
		}
		response = &bcdv1.JoinResponse{
			NodeId: node.ID, MachineId: machine.ID, Role: node.Role, Site: node.Site, CertificateChain: chain,
			JoinRecord: record, ServerTimeMs: now.UnixMilli(),
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for _, id := range gone {
		g.kick(ctx, id, "the machine was installed anew")
	}
	g.log.Info("machine joined", "node", response.GetNodeId(), "role", pki.RoleWord(response.GetRole()))
	return response, nil
}

// checkToken finds the token and, if it is known, the machine. The order of
// the checks is that in which a person would mend them.
func checkToken(tx Tx, now time.Time, claims *bcdv1.JoinClaims) (*Token, *Machine, error) {
	id, secret, err := pki.SplitToken(strings.TrimSpace(claims.GetToken()))
	if err != nil {
		return nil, nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_UNKNOWN_TOKEN, "what was given is not a join token; one looks like bcjt_<id>_<secret>. Make one with: bcd-gateway token create")
	}
	token, err := tx.Token(id)
	unknown := errors.Is(err, ErrNotFound)
	if err != nil && !unknown {
		return nil, nil, err
	}
	if unknown {
		token = &Token{SecretSHA256: make([]byte, sha256.Size)}
	}
	sum := sha256.Sum256([]byte(secret))
	if subtle.ConstantTimeCompare(sum[:], token.SecretSHA256) != 1 || unknown {
		return nil, nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_UNKNOWN_TOKEN, "this gateway never made that join token; make one with: bcd-gateway token create")
	}
	hardware := hashHex(claims.GetHardwareKeyHash())
	machine, err := tx.FindMachine("hardware:" + hardware)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return nil, nil, err
	}
	stamp := func(ms int64) string { return time.UnixMilli(ms).UTC().Format(time.RFC3339) }
	switch {
	case token.Revoked:
		return nil, nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_TOKEN_REVOKED, "join token %s was revoked; make another one with: bcd-gateway token create", id)
	case now.UnixMilli() >= token.ExpiresMS:
		return nil, nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_TOKEN_EXPIRED, "join token %s ended at %s, and it is %s; make another one with: bcd-gateway token create", id, stamp(token.ExpiresMS), stamp(now.UnixMilli()))
	case token.Role != claims.GetRole():
		return nil, nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_WRONG_ROLE, "join token %s is for role %s, the machine joins as %s; make one with: bcd-gateway token create --role %s", id, pki.RoleWord(token.Role), pki.RoleWord(claims.GetRole()), pki.RoleWord(claims.GetRole()))
	case token.BootID != "" && token.BootID != claims.GetBootId():
		return nil, nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_WRONG_MACHINE, "join token %s is for boot %s, and this is another one (%s); a machine that restarted asks its site again", id, token.BootID, claims.GetBootId())
	case token.MachineID != "" && machine == nil:
		return nil, nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_WRONG_MACHINE, "join token %s is bound to machine %s, and this hardware is not known", id, token.MachineID)
	case token.MachineID != "" && token.MachineID != machine.ID:
		return nil, nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_WRONG_MACHINE, "join token %s is bound to machine %s, and this is %s (%s)", id, token.MachineID, machine.ID, machine.Name)
	case token.Given[hardware] == "" && token.Used >= token.Uses:
		return nil, nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_TOKEN_USED_UP, "join token %s was for %d and has been used; make another one with: bcd-gateway token create", id, token.Uses)
	}
	return token, machine, nil
}

// newToken makes a token and the one string that opens it.
func newToken(now time.Time, role bcdv1.Role, site string, uses int32, ttl time.Duration) (*Token, string, error) {
	id := strings.TrimPrefix(newID("t"), "t_")
	full, err := pki.NewToken(id)
	if err != nil {
		return nil, "", err
	}
	_, secret, err := pki.SplitToken(full)
	if err != nil {
		return nil, "", err
	}
	sum := sha256.Sum256([]byte(secret))
	return &Token{
		ID: id, SecretSHA256: sum[:], Role: role, Site: site, Uses: uses, CreatedMS: now.UnixMilli(), ExpiresMS: now.Add(ttl).UnixMilli(),
	}, full, nil
}

// nodeFor finds or makes the node that the machine is under this token. The
// same hardware in the same role stays the same node, boot after boot; only a
// deploy's own token makes a new one, because what it installed is new.
func nodeFor(tx Tx, now time.Time, token *Token, machine *Machine, claims *bcdv1.JoinClaims) (node *Node, fresh bool, err error) {
	hardware := hashHex(claims.GetHardwareKeyHash())
	if id := token.Given[hardware]; id != "" {
		node, err := tx.Node(id)
		if err != nil && !errors.Is(err, ErrNotFound) {
			return nil, false, err
		}
		if err == nil && !node.Revoked {
			node.Hostname, node.Version = claims.GetHostname(), claims.GetVersion()
			return node, false, nil
		}
	}
	if token.CommandID == "" {
		nodes, err := tx.NodesOf(machine.ID)
		if err != nil {
			return nil, false, err
		}
		for i := len(nodes) - 1; i >= 0; i-- {
			if n := nodes[i]; n.Role == claims.GetRole() && n.Site == token.Site && !n.Revoked {
				n.Hostname, n.Version = claims.GetHostname(), claims.GetVersion()
				return n, false, nil
			}
		}
	}
	return &Node{
		ID: newID("node"), MachineID: machine.ID, Role: claims.GetRole(), Site: token.Site, HardwareHash: hardware,
		Hostname: claims.GetHostname(), Version: claims.GetVersion(), JoinedMS: now.UnixMilli(),
	}, true, nil
}

// retire ends the earlier installations of a machine: their disk was
// overwritten, so whoever still speaks for them is not that machine's system.
func retire(tx Tx, now time.Time, machine *Machine, keep *Node) (gone []string, err error) {
	nodes, err := tx.NodesOf(machine.ID)
	if err != nil {
		return nil, err
	}
	for _, n := range nodes {
		if n.ID == keep.ID || n.Role != keep.Role || n.Revoked {
			continue
		}
		if err := revokeNode(tx, now, n, "replaced by a new installation, "+keep.ID); err != nil {
			return nil, err
		}
		gone = append(gone, n.ID)
	}
	return gone, nil
}

// revokeNode ends trust in a node, and its commands.
func revokeNode(tx Tx, now time.Time, node *Node, reason string) error {
	node.Revoked, node.RevokeReason = true, reason
	if err := tx.PutNode(node); err != nil {
		return err
	}
	commands, err := tx.OpenCommands(node.ID)
	if err != nil {
		return err
	}
	for _, c := range commands {
		if err := advance(tx, now, c, inNodeGone{Reason: "the node was revoked: " + reason}); err != nil {
			return err
		}
	}
	return tx.AppendTimeline(&TimelineEntry{TimeMS: now.UnixMilli(), MachineID: node.MachineID, NodeID: node.ID, Type: "revoked", Severity: "warn", Message: "revoked: " + reason})
}

// kick ends a node's session after its revocation.
func (g *Gateway) kick(ctx context.Context, nodeID, reason string) {
	if s := g.hub.session(nodeID); s != nil {
		s.post(ctx, gotRevoked{reason}, nil)
	}
}

// issue makes a certificate for a node and remembers it.
func (g *Gateway) issue(tx Tx, now time.Time, node *Node, csr []byte) ([][]byte, error) {
	chain, err := g.keys.Issuer.IssueNode(csr, pki.NodeName{Role: node.Role, Site: node.Site, NodeID: node.ID}, now, certificateLifetime)
	if err != nil {
		return nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_MALFORMED, "no certificate: %v", err)
	}
	parsed, err := pki.ParseChain(chain)
	if err != nil {
		return nil, err
	}
	leaf := parsed[0]
	key := sha256.Sum256(leaf.RawSubjectPublicKeyInfo)
	node.CertExpiresMS = leaf.NotAfter.UnixMilli()
	if err := tx.PutNode(node); err != nil {
		return nil, err
	}
	return chain, tx.PutCertificate(&Certificate{
		Serial: serialOf(leaf), NodeID: node.ID, IssuedMS: now.UnixMilli(), ExpiresMS: node.CertExpiresMS, KeySHA256: key[:],
	})
}

// joinRecord names the node and the roots under which it is commanded.
func (g *Gateway) joinRecord(now time.Time, node *Node) (*bcdv1.Signed, error) {
	record := &bcdv1.JoinRecord{NodeId: node.ID, MachineId: node.MachineID, Role: node.Role, Site: node.Site, IssuedMs: now.UnixMilli()}
	for _, root := range g.keys.Roots.Certificates() {
		digest := pki.Digest(root)
		record.CommandRootSha256 = append(record.CommandRootSha256, digest[:])
	}
	return g.keys.Signer.Sign(intent.TypeJoinRecord, record)
}

// refused writes a refusal down and dresses it for the caller.
func (g *Gateway) refused(ctx context.Context, claims *bcdv1.JoinClaims, remote string, cause error) error {
	var refusal *joinRefusal
	if !errors.As(cause, &refusal) {
		g.log.Error("join failed", "error", cause)
		return rpcError(cause)
	}
	message := fmt.Sprintf("join from %s refused: %s", remote, refusal.message)
	if line := clockLine(g.now(), claims.GetWallClockMs()); line != "" {
		message += "; " + line
	}
	g.log.Warn("join refused", "code", word(refusal.code), "reason", refusal.message, "remote", remote)
	if !g.refusedLimit.AllowN(g.now(), 1) {
		return g.joinError(refusal)
	}
	err := g.update(context.WithoutCancel(ctx), func(tx Tx) error {
		machineID := ""
		for _, k := range []string{"hardware:" + hashHex(claims.GetHardwareKeyHash()), "uuid:" + claims.GetSystemUuid(), "serial:" + claims.GetSystemSerial()} {
			if strings.HasSuffix(k, ":") {
				continue
			}
			machine, err := tx.FindMachine(k)
			if errors.Is(err, ErrNotFound) {
				continue
			}
			if err != nil {
				return err
			}
			machineID = machine.ID
			break
		}
		text := message
		if machineID == "" && claims != nil {
			text = fmt.Sprintf("%s (host %s, serial %s)", message, reasonOr(claims.GetHostname(), "unnamed"), reasonOr(claims.GetSystemSerial(), "unknown"))
		}
		return tx.AppendTimeline(&TimelineEntry{TimeMS: g.now().UnixMilli(), MachineID: machineID, Type: "join.refused", Severity: "error", Message: clip(text, maxMessageBytes)})
	})
	if err != nil {
		g.log.Error("refused join not recorded", "error", err)
	}
	return g.joinError(refusal)
}

func (g *Gateway) joinError(refusal *joinRefusal) error {
	code := connect.CodePermissionDenied
	switch refusal.code {
	case bcdv1.JoinErrorCode_JOIN_ERROR_CODE_MALFORMED:
		code = connect.CodeInvalidArgument
	case bcdv1.JoinErrorCode_JOIN_ERROR_CODE_UNKNOWN_TOKEN:
		code = connect.CodeUnauthenticated
	case bcdv1.JoinErrorCode_JOIN_ERROR_CODE_WRONG_JOIN_KEY:
		code = connect.CodeFailedPrecondition
	case bcdv1.JoinErrorCode_JOIN_ERROR_CODE_BUSY:
		code = connect.CodeResourceExhausted
	}
	out := connect.NewError(code, refusal)
	detail, err := connect.NewErrorDetail(&bcdv1.JoinError{Code: refusal.code, Message: refusal.message, ServerTimeMs: g.now().UnixMilli()})
	if err == nil {
		out.AddDetail(detail)
	}
	return out
}
