package gateway

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/secret"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	joinReference     = "join/"
	userDataReference = "userdata/"
	// deployedTokenTTL is how long an installed system has to join after its
	// material was handed out: the image is still to be written, and a large
	// server takes minutes to restart.
	deployedTokenTTL = 24 * time.Hour
)

// minted says whether a reference's value is made by the gateway itself.
func minted(reference string) bool { return strings.HasPrefix(reference, joinReference) }

// openSecret answers a request of the node's. The answer says why not in words
// that give nothing away about other nodes' references.
func (g *Gateway) openSecret(ctx context.Context, peer *Peer, request *bcdv1.SecretRequest) *bcdv1.SecretAnswer {
	verified, err := secret.VerifyRequest(peer.Key, peer.NodeID, request, g.now())
	if err != nil {
		g.log.Warn("secret refused", "node", peer.NodeID, "reason", err)
		// Whose request it was is known only from the unverified body.
		body := new(bcdv1.SecretRequestBody)
		_ = proto.Unmarshal(request.GetBody(), body)
		return &bcdv1.SecretAnswer{RequestId: clip(body.GetRequestId(), maxNameBytes), Error: err.Error()}
	}
	body := verified.Body
	log := g.log.With("node", peer.NodeID, "reference", body.GetReference(), "command", body.GetCommandId())
	value, err := g.secretValue(ctx, peer, body)
	if err != nil {
		log.Warn("secret refused", "reason", err)
		return verified.RefuseAnswer(err.Error())
	}
	defer clear(value)
	answer, err := verified.SealAnswer(value)
	if err != nil {
		log.Error("secret not sealed", "error", err)
		return verified.RefuseAnswer(err.Error())
	}
	log.Info("secret given")
	return answer
}

// secretValue gives the value of a reference that this node may have now. The
// caller zeroes it.
func (g *Gateway) secretValue(ctx context.Context, peer *Peer, body *bcdv1.SecretRequestBody) ([]byte, error) {
	reference := body.GetReference()
	denied := fmt.Errorf("node %s may not have %.80q now", peer.NodeID, reference)
	var value []byte
	err := g.update(ctx, func(tx Tx) error {
		value = nil
		node, err := tx.Node(peer.NodeID)
		if err != nil {
			return err
		}
		if reject, err := stillTrusted(tx, g.now(), peer, node); err != nil || reject != nil {
			return errors.Join(err, denied)
		}
		id := strings.TrimPrefix(strings.TrimPrefix(reference, joinReference), userDataReference)
		if id != reference {
			// What belongs to a command is given to the node that has it, while
			// it has not ended, and only for that command.
			c, err := tx.Command(id)
			if errors.Is(err, ErrNotFound) {
				return denied
			}
			if err != nil {
				return err
			}
			if c.NodeID != peer.NodeID || body.GetCommandId() != id || c.State == bcdv1.CommandState_COMMAND_STATE_ENDED || c.State == bcdv1.CommandState_COMMAND_STATE_QUEUED {
				return denied
			}
			if minted(reference) {
				value, err = g.joinMaterial(tx, c)
				return err
			}
		}
		record, err := tx.Secret(reference)
		if errors.Is(err, ErrNotFound) || err == nil && record.NodeID != "" && record.NodeID != peer.NodeID {
			return denied
		}
		if err != nil {
			return err
		}
		value = record.Value
		return nil
	})
	return value, err
}

// joinMaterial mints what the installed system joins with: a token for one use
// by this machine in role node. Asking again takes the one before out of use.
func (g *Gateway) joinMaterial(tx Tx, c *Command) ([]byte, error) {
	if c.Kind != deployKind {
		return nil, fmt.Errorf("command %s is %s, which has no join material", c.ID, c.Kind)
	}
	if c.JoinToken != "" {
		old, err := tx.Token(c.JoinToken)
		if err == nil && old.Used > 0 {
			return nil, fmt.Errorf("the join material of %s was used already", c.ID)
		}
		if err := revokeToken(tx, c.JoinToken); err != nil {
			return nil, err
		}
	}
	token, full, err := newToken(g.now(), bcdv1.Role_ROLE_NODE, c.DeploySite, 1, deployedTokenTTL)
	if err != nil {
		return nil, err
	}
	token.MachineID, token.CommandID, token.Note = c.MachineID, c.ID, "for the system that "+c.ID+" installs"
	if err := tx.PutToken(token); err != nil {
		return nil, err
	}
	c.JoinToken = token.ID
	if err := tx.PutCommand(c); err != nil {
		return nil, err
	}
	return proto.Marshal(&bcdv1.JoinMaterial{
		ConfigToml: nodeConfig(g.advertise, c.DeploySite), RootsPem: g.keys.Roots.PEM(),
		JoinEncryptionJwk: g.keys.JoinJWK, JoinToken: full,
	})
}

// nodeConfig is the installed node's config.toml; everything else has its
// default there.
func nodeConfig(url, site string) []byte {
	var out strings.Builder
	out.WriteString("# Written when this machine was deployed.\n")
	fmt.Fprintf(&out, "gateway_url = %s\n", tomlString(url))
	if site != "" {
		fmt.Fprintf(&out, "site = %s\n", tomlString(site))
	}
	return []byte(out.String())
}

// tomlString is a TOML basic string (TOML 1.0, "String").
func tomlString(s string) string {
	var out strings.Builder
	out.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			out.WriteByte('\\')
			out.WriteRune(r)
		case r < ' ' || r == 0x7f:
			fmt.Fprintf(&out, `\u%04X`, r)
		default:
			out.WriteRune(r)
		}
	}
	out.WriteByte('"')
	return out.String()
}
