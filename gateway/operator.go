package gateway

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
)

const (
	defaultTokenTTL = 24 * time.Hour
	maxTokenTTL     = 30 * 24 * time.Hour
	maxTokenUses    = 100000
	maxListed       = 1000
	defaultTimeline = 200
	maxSecretBytes  = 1 << 20
	maxNoteBytes    = 256
)

// operatorService is bcd.v1.OperatorService. Who may call it is decided by
// operatorOnly before.
type operatorService struct{ g *Gateway }

func (t *Token) proto() *bcdv1.Token {
	return &bcdv1.Token{
		Id: t.ID, Role: t.Role, Site: t.Site, Uses: t.Uses, Used: t.Used, CreatedMs: t.CreatedMS, ExpiresMs: t.ExpiresMS,
		Revoked: t.Revoked, MachineId: t.MachineID, Note: t.Note,
	}
}

func (o operatorService) CreateToken(ctx context.Context, request *connect.Request[bcdv1.CreateTokenRequest]) (*connect.Response[bcdv1.CreateTokenResponse], error) {
	token, full, err := o.g.CreateToken(ctx, request.Msg)
	if err != nil {
		return nil, rpcError(err)
	}
	return connect.NewResponse(&bcdv1.CreateTokenResponse{Token: full, Info: token.proto()}), nil
}

// CreateToken makes a join token; full is the only copy of its secret.
func (g *Gateway) CreateToken(ctx context.Context, in *bcdv1.CreateTokenRequest) (token *Token, full string, err error) {
	uses, ttl := in.GetUses(), time.Duration(in.GetTtlSeconds())*time.Second
	if uses == 0 {
		uses = 1
	}
	if in.GetTtlSeconds() == 0 {
		ttl = defaultTokenTTL
	}
	name := pki.NodeName{Role: in.GetRole(), Site: in.GetSite(), NodeID: "node"}
	switch {
	case name.Check() != nil:
		return nil, "", invalid("token: %v", name.Check())
	case in.GetRole() == bcdv1.Role_ROLE_SITE && in.GetSite() == "":
		return nil, "", invalid("a token of role site needs the site whose machines its agent boots: bcd-gateway token create --role site --site NAME")
	case uses < 0 || uses > maxTokenUses:
		return nil, "", invalid("a token for %d uses; it must be between 1 and %d", uses, maxTokenUses)
	case in.GetTtlSeconds() < 0 || in.GetTtlSeconds() > int64(maxTokenTTL/time.Second):
		return nil, "", invalid("a token for %d s; it must be between 1 s and %d s (30 days)", in.GetTtlSeconds(), int64(maxTokenTTL/time.Second))
	case len(in.GetNote()) > maxNoteBytes:
		return nil, "", invalid("a note of %d bytes; at most %d are allowed", len(in.GetNote()), maxNoteBytes)
	}
	token, full, err = newToken(g.now(), in.GetRole(), in.GetSite(), uses, ttl)
	if err != nil {
		return nil, "", err
	}
	token.Note = in.GetNote()
	err = g.update(ctx, func(tx Tx) error {
		if in.GetMachineId() != "" {
			m, err := findMachine(tx, in.GetMachineId())
			if err != nil {
				return err
			}
			token.MachineID = m.ID
		}
		if err := nameSite(tx, token.Site); err != nil {
			return err
		}
		return tx.PutToken(token)
	})
	return token, full, err
}

func (o operatorService) ListTokens(ctx context.Context, _ *connect.Request[bcdv1.ListTokensRequest]) (*connect.Response[bcdv1.ListTokensResponse], error) {
	out := &bcdv1.ListTokensResponse{}
	err := o.g.store.View(ctx, func(tx Tx) error {
		return tx.EachToken(func(t *Token) error {
			out.Tokens = append(out.Tokens, t.proto())
			return nil
		})
	})
	return connect.NewResponse(out), rpcError(err)
}

func (o operatorService) RevokeToken(ctx context.Context, request *connect.Request[bcdv1.RevokeTokenRequest]) (*connect.Response[bcdv1.RevokeTokenResponse], error) {
	out := &bcdv1.RevokeTokenResponse{}
	id := request.Msg.GetId()
	if whole, _, err := pki.SplitToken(id); err == nil {
		// Someone pasted the whole token.
		id = whole
	}
	err := o.g.update(ctx, func(tx Tx) error {
		token, err := tx.Token(id)
		if err != nil {
			return fmt.Errorf("token: %w; bcd-gateway token list shows those there are", ErrNotFound)
		}
		token.Revoked = true
		out.Info = token.proto()
		return tx.PutToken(token)
	})
	return connect.NewResponse(out), rpcError(err)
}

func (o operatorService) ListMachines(ctx context.Context, request *connect.Request[bcdv1.ListMachinesRequest]) (*connect.Response[bcdv1.ListMachinesResponse], error) {
	out := &bcdv1.ListMachinesResponse{}
	err := o.g.store.View(ctx, func(tx Tx) error {
		return tx.EachMachine(func(m *Machine) error {
			if site := request.Msg.GetSite(); site != "" && site != m.Site {
				return nil
			}
			described, err := o.g.describe(tx, m, false)
			out.Machines = append(out.Machines, described)
			return err
		})
	})
	return connect.NewResponse(out), rpcError(err)
}

func (o operatorService) GetMachine(ctx context.Context, request *connect.Request[bcdv1.GetMachineRequest]) (*connect.Response[bcdv1.GetMachineResponse], error) {
	out := &bcdv1.GetMachineResponse{}
	err := o.g.store.View(ctx, func(tx Tx) error {
		m, err := findMachine(tx, request.Msg.GetName())
		if err != nil {
			return err
		}
		if out.Machine, err = o.g.describe(tx, m, true); err != nil {
			return err
		}
		limit := int(request.Msg.GetTimelineEntries())
		if limit <= 0 {
			limit = defaultTimeline
		}
		if out.Boots, err = machineTraces(tx, m); err != nil {
			return err
		}
		entries, err := tx.TimelineTail(m.ID, min(limit, 10*maxListed))
		if err != nil {
			return err
		}
		for _, e := range entries {
			out.Timeline = append(out.Timeline, e.proto())
		}
		commands, err := tx.CommandsOf(m.ID, 50)
		if err != nil {
			return err
		}
		for _, c := range commands {
			described, err := o.g.describeCommand(c)
			if err != nil {
				return err
			}
			out.Commands = append(out.Commands, described)
		}
		if m.CurrentNode == "" {
			return nil
		}
		n, err := tx.Node(m.CurrentNode)
		if err != nil {
			return err
		}
		return inventoryOf(tx, n, out)
	})
	return connect.NewResponse(out), rpcError(err)
}

func inventoryOf(tx Tx, n *Node, out *bcdv1.GetMachineResponse) error {
	for _, name := range sortedKeys(n.Inventory) {
		canonical, err := tx.Section(n.Inventory[name])
		if errors.Is(err, ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		out.Inventory = append(out.Inventory, &bcdv1.InventorySection{Name: name, CanonicalJson: canonical, Sha256: n.Inventory[name], Error: n.Unreadable[name]})
	}
	for _, c := range n.Conditions {
		out.Conditions = append(out.Conditions, &bcdv1.Condition{Type: c.Type, Status: c.Status, Reason: c.Reason, Message: c.Message, SinceMs: c.SinceMS, Severe: c.Severe})
	}
	return nil
}

func (e *TimelineEntry) proto() *bcdv1.TimelineEntry {
	return &bcdv1.TimelineEntry{
		Sequence: e.Sequence, TimeMs: e.TimeMS, MachineId: e.MachineID, NodeId: e.NodeID, Type: e.Type, Message: e.Message,
		CommandId: e.CommandID, Severity: e.Severity,
	}
}

func (o operatorService) SendCommand(ctx context.Context, request *connect.Request[bcdv1.SendCommandRequest]) (*connect.Response[bcdv1.SendCommandResponse], error) {
	ttl, err := ttlOf(request.Msg.GetTtlSeconds(), defaultTTL)
	if err != nil {
		return nil, err
	}
	if request.Msg.GetKind() == deployKind {
		// Deploy binds machine, disk and digests; a body made by hand might not.
		if d := new(bcdv1.DeployImage); proto.Unmarshal(request.Msg.GetBody(), d) == nil && d.GetMachineId() == "" {
			return nil, invalid("a %s without a machine id would be refused by the machine; use deploy, which fills it in", deployKind)
		}
	}
	var c *Command
	err = o.g.update(ctx, func(tx Tx) error {
		m, err := findMachine(tx, request.Msg.GetMachine())
		if err != nil {
			return err
		}
		var fresh bool
		c, fresh, err = o.g.queue(tx, m, order{kind: request.Msg.GetKind(), body: request.Msg.GetBody(), ttl: ttl, key: request.Msg.GetIdempotencyKey(), issuedBy: "operator"})
		if err != nil || !fresh || c.Kind != deployKind {
			return err
		}
		m.LastDeploy = c.ID
		return tx.PutMachine(m)
	})
	if err != nil {
		return nil, rpcError(err)
	}
	o.g.hub.wake(c.NodeID)
	info, err := o.g.describeCommand(c)
	return connect.NewResponse(&bcdv1.SendCommandResponse{Command: info}), rpcError(err)
}

func (o operatorService) CancelCommand(ctx context.Context, request *connect.Request[bcdv1.CancelCommandRequest]) (*connect.Response[bcdv1.CancelCommandResponse], error) {
	var c *Command
	err := o.g.update(ctx, func(tx Tx) (err error) {
		if c, err = tx.Command(request.Msg.GetId()); err != nil {
			return err
		}
		return advance(tx, o.g.now(), c, inCancel{Reason: clip(request.Msg.GetReason(), maxNoteBytes)})
	})
	if err != nil {
		return nil, rpcError(err)
	}
	o.g.hub.wake(c.NodeID)
	info, err := o.g.describeCommand(c)
	return connect.NewResponse(&bcdv1.CancelCommandResponse{Command: info}), rpcError(err)
}

func (o operatorService) GetCommand(ctx context.Context, request *connect.Request[bcdv1.GetCommandRequest]) (*connect.Response[bcdv1.GetCommandResponse], error) {
	var c *Command
	err := o.g.store.View(ctx, func(tx Tx) (err error) {
		c, err = tx.Command(request.Msg.GetId())
		return err
	})
	if err != nil {
		return nil, rpcError(err)
	}
	info, err := o.g.describeCommand(c)
	return connect.NewResponse(&bcdv1.GetCommandResponse{Command: info}), rpcError(err)
}

func (o operatorService) ListCommands(ctx context.Context, request *connect.Request[bcdv1.ListCommandsRequest]) (*connect.Response[bcdv1.ListCommandsResponse], error) {
	out := &bcdv1.ListCommandsResponse{}
	err := o.g.store.View(ctx, func(tx Tx) error {
		machineID := ""
		if request.Msg.GetMachine() != "" {
			m, err := findMachine(tx, request.Msg.GetMachine())
			if err != nil {
				return err
			}
			machineID = m.ID
		}
		limit := int(request.Msg.GetLimit())
		if limit <= 0 || limit > maxListed {
			limit = maxListed
		}
		commands, err := tx.CommandsOf(machineID, limit)
		if err != nil {
			return err
		}
		for _, c := range commands {
			info, err := o.g.describeCommand(c)
			if err != nil {
				return err
			}
			out.Commands = append(out.Commands, info)
		}
		return nil
	})
	return connect.NewResponse(out), rpcError(err)
}

func (o operatorService) GetSpec(ctx context.Context, request *connect.Request[bcdv1.GetSpecRequest]) (*connect.Response[bcdv1.GetSpecResponse], error) {
	out := &bcdv1.GetSpecResponse{}
	err := o.g.store.View(ctx, func(tx Tx) error {
		m, err := findMachine(tx, request.Msg.GetMachine())
		if err != nil {
			return err
		}
		n, err := currentNode(tx, m)
		if err != nil {
			return err
		}
		spec, err := tx.Spec(n.ID)
		if errors.Is(err, ErrNotFound) {
			// Never set: the empty spec, of which generation 0 is in effect.
			out.Spec, out.Status = &bcdv1.NodeSpec{NodeId: n.ID}, &bcdv1.SpecStatus{}
			return nil
		}
		if err != nil {
			return err
		}
		out.Spec, out.Status, err = decodeSpec(spec)
		return err
	})
	return connect.NewResponse(out), rpcError(err)
}

func decodeSpec(s *Spec) (*bcdv1.NodeSpec, *bcdv1.SpecStatus, error) {
	signed, spec, status := new(bcdv1.Signed), new(bcdv1.NodeSpec), new(bcdv1.SpecStatus)
	for _, step := range []struct {
		raw  func() []byte
		into proto.Message
	}{
		{func() []byte { return s.Signed }, signed}, {func() []byte { return signed.GetPayload() }, spec}, {func() []byte { return s.Status }, status},
	} {
		if err := proto.Unmarshal(step.raw(), step.into); err != nil {
			return nil, nil, fmt.Errorf("spec of %s: %w", s.NodeID, err)
		}
	}
	return spec, status, nil
}

func (o operatorService) ApplySpec(ctx context.Context, request *connect.Request[bcdv1.ApplySpecRequest]) (*connect.Response[bcdv1.ApplySpecResponse], error) {
	g := o.g
	var applied *bcdv1.NodeSpec
	err := g.update(ctx, func(tx Tx) error {
		m, err := findMachine(tx, request.Msg.GetMachine())
		if err != nil {
			return err
		}
		n, err := currentNode(tx, m)
		if err != nil {
			return err
		}
		record, err := tx.Spec(n.ID)
		if errors.Is(err, ErrNotFound) {
			record = &Spec{NodeID: n.ID}
		} else if err != nil {
			return err
		}
		if want := request.Msg.GetExpectedGeneration(); want != 0 && want != record.Generation {
			return connect.NewError(connect.CodeAborted, fmt.Errorf("machine %s has spec generation %d, not %d: someone else changed it; get it again and apply your change to it", m.Name, record.Generation, want))
		}
		now := g.now()
		applied = &bcdv1.NodeSpec{}
		if request.Msg.GetSpec() != nil {
			applied = proto.CloneOf(request.Msg.GetSpec())
		}
		applied.NodeId, applied.Generation, applied.IssuedMs = n.ID, record.Generation+1, now.UnixMilli()
		if size := proto.Size(applied); size > maxSpecBytes {
			return invalid("a spec of %d bytes; at most %d are allowed", size, maxSpecBytes)
		}
		signed, err := g.keys.Signer.Sign(intent.TypeNodeSpec, applied)
		if err != nil {
			return err
		}
		if record.Signed, err = proto.Marshal(signed); err != nil {
			return err
		}
		record.Generation = applied.GetGeneration()
		n.SpecGeneration = record.Generation
		if err := errors.Join(tx.PutSpec(record), tx.PutNode(n)); err != nil {
			return err
		}
		return tx.AppendTimeline(&TimelineEntry{
			TimeMS: now.UnixMilli(), MachineID: m.ID, NodeID: n.ID, Type: "spec", Message: fmt.Sprintf("spec generation %d set", record.Generation),
		})
	})
	if err != nil {
		return nil, rpcError(err)
	}
	g.hub.wake(applied.GetNodeId())
	return connect.NewResponse(&bcdv1.ApplySpecResponse{Spec: applied}), nil
}

func (o operatorService) RevokeNode(ctx context.Context, request *connect.Request[bcdv1.RevokeNodeRequest]) (*connect.Response[bcdv1.RevokeNodeResponse], error) {
	g := o.g
	reason := clip(reasonOr(request.Msg.GetReason(), "by an operator"), maxNoteBytes)
	var n *Node
	err := g.update(ctx, func(tx Tx) (err error) {
		if n, err = tx.Node(request.Msg.GetNodeId()); err != nil || n.Revoked {
			return err
		}
		return revokeNode(tx, g.now(), n, reason)
	})
	if err != nil {
		return nil, rpcError(err)
	}
	g.kick(ctx, n.ID, fmt.Sprintf("node %s was revoked: %s", n.ID, reason))
	out := &bcdv1.RevokeNodeResponse{}
	err = g.store.View(ctx, func(tx Tx) (err error) {
		out.Node, err = g.describeNode(tx, n)
		return err
	})
	return connect.NewResponse(out), rpcError(err)
}

func (o operatorService) PutSecret(ctx context.Context, request *connect.Request[bcdv1.PutSecretRequest]) (*connect.Response[bcdv1.PutSecretResponse], error) {
	in := request.Msg
	switch {
	case !idLike(in.GetReference()) || minted(in.GetReference()):
		return nil, invalid("reference %.80q: it must be 1 to %d printable characters and not begin with join/", in.GetReference(), maxNameBytes)
	case len(in.GetValue()) > maxSecretBytes:
		return nil, invalid("a secret of %d bytes; at most %d are allowed", len(in.GetValue()), maxSecretBytes)
	}
	err := o.g.update(ctx, func(tx Tx) error {
		if in.GetNodeId() != "" {
			if _, err := tx.Node(in.GetNodeId()); err != nil {
				return err
			}
		}
		return tx.PutSecret(&Secret{Reference: in.GetReference(), NodeID: in.GetNodeId(), Value: in.GetValue(), CreatedMS: o.g.now().UnixMilli()})
	})
	return connect.NewResponse(&bcdv1.PutSecretResponse{}), rpcError(err)
}

// watchPage is how many entries a watcher is sent between two looks.
const watchPage = 500
