package gateway

import (
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/better-compute/bcd/agent/intent"
	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	defaultTTL = 15 * time.Minute
	// deployTTL is when a deploy must have begun by default.
	deployTTL = time.Hour
	maxTTL    = 7 * 24 * time.Hour
	// maxKeyBytes bounds an idempotency key.
	maxKeyBytes = 128
)

// kinds is the table of command kinds, as the contract's options have it.
var kinds = readKinds()

type kind struct {
	*bcdv1.KindOptions
	body protoreflect.MessageDescriptor
}

func readKinds() map[string]kind {
	table := map[string]kind{}
	messages := bcdv1.File_bcd_v1_kinds_proto.Messages()
	for i := range messages.Len() {
		m := messages.Get(i)
		if options, ok := proto.GetExtension(m.Options(), bcdv1.E_Kind).(*bcdv1.KindOptions); ok && options.GetName() != "" {
			table[options.GetName()] = kind{options, m}
		}
	}
	return table
}

func kindNames() string {
	var names []string
	for name := range kinds {
		names = append(names, name)
	}
	sort.Strings(names)
	return strings.Join(names, ", ")
}

// ttlOf gives the time a command has to begin.
func ttlOf(seconds int64, otherwise time.Duration) (time.Duration, error) {
	if seconds == 0 {
		return otherwise, nil
	}
	if seconds < 0 || seconds > int64(maxTTL/time.Second) {
		return 0, invalid("a time to live of %d s; it must be between 1 s and %d s (7 days)", seconds, int64(maxTTL/time.Second))
	}
	return time.Duration(seconds) * time.Second, nil
}

// currentNode is whom a command for the machine goes to.
func currentNode(tx Tx, m *Machine) (*Node, error) {
	if m.CurrentNode == "" {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("machine %s has no node: it has not joined yet", m.Name))
	}
	n, err := tx.Node(m.CurrentNode)
	if err != nil {
		return nil, err
	}
	if n.Revoked {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("machine %s: its node %s was revoked (%s); it must join again first", m.Name, n.ID, n.RevokeReason))
	}
	return n, nil
}

// order is a command to be signed and queued.
type order struct {
	kind     string
	body     []byte
	ttl      time.Duration
	key      string
	issuedBy string
	// id is given where the body already names it.
	id string
}

// queue signs a command for the machine's current node and queues it. With a
// key that the machine has seen it returns that first command and false.
func (g *Gateway) queue(tx Tx, m *Machine, o order) (*Command, bool, error) {
	if len(o.key) > maxKeyBytes {
		return nil, false, invalid("an idempotency key of %d bytes; at most %d are allowed", len(o.key), maxKeyBytes)
	}
	k, ok := kinds[o.kind]
	if !ok {
		return nil, false, invalid("command kind %.80q is not known; the kinds are %s", o.kind, kindNames())
	}
	if o.key != "" {
		first, err := tx.CommandByKey(m.ID, o.key)
		if err == nil && first.Kind != o.kind {
			return nil, false, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("idempotency key %q was used for %s (%s)", o.key, first.Kind, first.ID))
		}
		if !errors.Is(err, ErrNotFound) {
			return first, false, err
		}
	}
	if len(o.body) > maxCommandBytes {
		return nil, false, invalid("a body of %d bytes; at most %d are allowed", len(o.body), maxCommandBytes)
	}
	if err := proto.Unmarshal(o.body, dynamicpb.NewMessage(k.body)); err != nil {
		return nil, false, invalid("the body is not a %s: %v", k.body.FullName(), err)
	}
	n, err := currentNode(tx, m)
	if err != nil {
		return nil, false, err
	}
	if !slices.Contains(k.GetRoles(), n.Role) {
		return nil, false, connect.NewError(connect.CodeFailedPrecondition,
			fmt.Errorf("machine %s runs as %s now, and %s is for %s", m.Name, pki.RoleWord(n.Role), o.kind, roleWords(k.GetRoles())))
	}
	if len(n.Kinds) > 0 && !slices.Contains(n.Kinds, o.kind) {
		return nil, false, connect.NewError(connect.CodeFailedPrecondition,
			fmt.Errorf("machine %s: its bcd %s does not know %s; update it first", m.Name, n.Version, o.kind))
	}
	now := g.now()
	if o.id == "" {
		o.id = newID("cmd")
	}
	command := &bcdv1.Command{
		Id: o.id, Kind: o.kind, NodeId: n.ID, Lane: k.GetLane(), DeadlineMs: now.Add(o.ttl).UnixMilli(),
		IdempotencyKey: reasonOr(o.key, o.id), Body: o.body, IssuedMs: now.UnixMilli(), IssuedBy: clip(o.issuedBy, maxKeyBytes),
	}
	signed, err := g.keys.Signer.Sign(intent.TypeCommand, command)
	if err != nil {
		return nil, false, err
	}
	encoded, err := proto.Marshal(signed)
	if err != nil {
		return nil, false, err
	}
	c := &Command{
		ID: o.id, NodeID: n.ID, MachineID: m.ID, Kind: o.kind, Lane: k.GetLane(), IdempotencyKey: o.key,
		State: bcdv1.CommandState_COMMAND_STATE_QUEUED, QueuedMS: now.UnixMilli(), DeadlineMS: command.DeadlineMs,
		IssuedBy: command.IssuedBy, Signed: encoded,
	}
	if err := tx.PutCommand(c); err != nil {
		return nil, false, err
	}
	return c, true, tx.AppendTimeline(c.line(now, "command.queued", "", fmt.Sprintf("%s queued by %s", o.kind, reasonOr(c.IssuedBy, "an operator"))))
}

func roleWords(roles []bcdv1.Role) string {
	words := make([]string, len(roles))
	for i, r := range roles {
		words[i] = pki.RoleWord(r)
	}
	return strings.Join(words, ", ")
}
