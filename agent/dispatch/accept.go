package dispatch

import (
	"fmt"
	"regexp"
	"time"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/journal"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/api/kinds"
)

// commandType is the payload type of a signed command.
const commandType = "bcd.v1.Command"

// Verifier checks signatures against the pinned roots; agent/intent's Roots is
// one.
type Verifier interface {
	// Verify returns the payload when signed carries a valid signature over it
	// under a pinned root at server time now.
	Verify(signed *bcdv1.Signed, wantType string, now time.Time) ([]byte, error)
}

// Ledger is what the core looks up in the journal; neither call does I/O.
type Ledger interface {
	Entry(id string) (journal.Entry, bool)
	// CanAccept says whether a signed command of size bytes has room.
	CanAccept(size int) error
	// IssuedFloorMS is the server time up to which a journal was lost.
	IssuedFloorMS() int64
}

// verdict is the answer of the acceptance checks.
type verdict struct {
	// rejection is UNSPECIFIED for a command to accept.
	rejection bcdv1.Rejection
	// indeterminate: an earlier journal may have run it.
	indeterminate bool
	message       string
	// command is nil when the payload cannot be read; its id is valid then
	// when idValid is.
	command *bcdv1.Command
	idValid bool
	// authentic: the signature is valid, so that a refusal may be recorded.
	authentic bool
	kind      kinds.Kind
}

var commandID = regexp.MustCompile(`^cmd_[a-z0-9]{1,60}$`)

// accept applies the acceptance checks in their order; the first that fails
// is the answer. now is server time.
func (c *Core) accept(now time.Time, signed *bcdv1.Signed) verdict {
	v := c.check(now, signed)
	if v.rejection != bcdv1.Rejection_REJECTION_UNSPECIFIED && v.idValid && !v.authentic {
		// A refusal of an early check: only behind a valid signature may it be
		// recorded, so that a forged frame cannot poison a real id.
		_, err := c.config.Verifier.Verify(signed, commandType, now)
		v.authentic = err == nil
	}
	return v
}

func (c *Core) check(now time.Time, signed *bcdv1.Signed) (v verdict) {
	refuse := func(r bcdv1.Rejection, format string, args ...any) verdict {
		v.rejection, v.message = r, fmt.Sprintf(format, args...)
		return v
	}
	const (
		malformed   = bcdv1.Rejection_REJECTION_MALFORMED
		tooLarge    = bcdv1.Rejection_REJECTION_TOO_LARGE
		wrongNode   = bcdv1.Rejection_REJECTION_WRONG_NODE
		unauthentic = bcdv1.Rejection_REJECTION_UNAUTHENTIC
		duplicate   = bcdv1.Rejection_REJECTION_DUPLICATE
		unsupported = bcdv1.Rejection_REJECTION_UNSUPPORTED
		expired     = bcdv1.Rejection_REJECTION_EXPIRED
		laneFull    = bcdv1.Rejection_REJECTION_LANE_FULL
	)

	command := new(bcdv1.Command)
	if err := proto.Unmarshal(signed.GetPayload(), command); err != nil {
		return refuse(malformed, "the payload is no bcd.v1.Command: %v", err)
	}
	v.command, v.idValid = command, commandID.MatchString(command.GetId())
	if t := signed.GetPayloadType(); t != commandType {
		return refuse(malformed, "payload type %.60q, want %q", t, commandType)
	}
	if problem := malformedField(command, now); problem != "" {
		return refuse(malformed, "%s", problem)
	}
	size := len(command.GetBody())
	if known, ok := kinds.ByName(command.GetKind()); ok {
		v.kind = known
		if size <= MaxBody {
			if err := proto.Unmarshal(command.GetBody(), known.Body.New().Interface()); err != nil {
				return refuse(malformed, "the body is no %s: %v", known.Body.Descriptor().FullName(), err)
			}
		}
		if l := command.GetLane(); l != bcdv1.Lane_LANE_UNSPECIFIED && l != known.GetLane() {
			return refuse(malformed, "lane %s, but %s runs in lane %s", LaneName(l), known.GetName(), LaneName(known.GetLane()))
		}
	}

	if size > MaxBody {
		return refuse(tooLarge, "the body has %d bytes, at most %d are allowed", size, MaxBody)
	}
	if command.GetNodeId() != c.config.NodeID {
		return refuse(wrongNode, "the command is for node %s, this is %s", command.GetNodeId(), c.config.NodeID)
	}
	if _, err := c.config.Verifier.Verify(signed, commandType, now); err != nil {
		return refuse(unauthentic, "%v", err)
	}
	v.authentic = true
	if _, known := c.config.Ledger.Entry(command.GetId()); known {
		return refuse(duplicate, "command %s is known here", command.GetId())
	}
	if v.kind.KindOptions == nil || !v.kind.Allows(c.config.Role) || c.config.Supported != nil && !c.config.Supported(command.GetKind()) {
		return refuse(unsupported, "a daemon of role %s does not accept %s; it accepts %v", roleName(c.config.Role), command.GetKind(), c.Kinds())
	}
	deadline := time.UnixMilli(command.GetDeadlineMs())
	past := !now.Before(deadline)
	if floor := c.config.Ledger.IssuedFloorMS(); floor > 0 && command.GetIssuedMs() <= floor && (past || !v.kind.GetResumable()) {
		v.indeterminate = true
		return refuse(expired, "this node lost its journal after the command was issued: whether it was run is unknown")
	}
	if past {
		return refuse(expired, "the deadline %s passed %s ago by server time", stamp(deadline), now.Sub(deadline).Round(time.Millisecond))
	}
	lane := c.lanes[v.kind.GetLane()]
	switch {
	case c.revoked:
		return refuse(laneFull, "this node's identity was revoked: it begins nothing new")
	case len(c.afters) > 0:
		return refuse(laneFull, "the machine is about to restart")
	case len(lane.queue) >= lane.size.Places && lane.running >= lane.size.Workers:
		return refuse(laneFull, "lane %s has %d commands waiting and %d running", LaneName(v.kind.GetLane()), len(lane.queue), lane.running)
	}
	if err := c.config.Ledger.CanAccept(proto.Size(signed)); err != nil {
		return refuse(laneFull, "%v", err)
	}
	return v
}

// malformedField says what is wrong with a field, "" when nothing is.
func malformedField(c *bcdv1.Command, now time.Time) string {
	for _, f := range []struct {
		name, value string
		max         int
		empty       bool
	}{
		{"id", c.GetId(), maxIDBytes, false},
		{"kind", c.GetKind(), maxNameBytes, false},
		{"node_id", c.GetNodeId(), maxNameBytes, false},
		{"idempotency_key", c.GetIdempotencyKey(), maxNameBytes, true},
		{"issued_by", c.GetIssuedBy(), maxNameBytes, true},
	} {
		switch {
		case f.value == "" && !f.empty:
			return f.name + " is empty"
		case len(f.value) > f.max:
			return fmt.Sprintf("%s has %d bytes, at most %d are allowed", f.name, len(f.value), f.max)
		case !printable(f.value):
			return f.name + " has characters that cannot be printed"
		}
	}
	deadline := time.UnixMilli(c.GetDeadlineMs())
	switch {
	case !commandID.MatchString(c.GetId()):
		return fmt.Sprintf("id %q does not look like cmd_ and lower-case letters and digits", c.GetId())
	case c.GetDeadlineMs() <= 0:
		return "deadline_ms is missing"
	case c.GetIssuedMs() < 0:
		return "issued_ms is negative"
	case deadline.Sub(now) > MaxAhead:
		return fmt.Sprintf("the deadline %s is more than %s ahead of server time %s", stamp(deadline), MaxAhead, stamp(now))
	}
	if _, ok := bcdv1.Lane_name[int32(c.GetLane())]; !ok {
		return fmt.Sprintf("lane %d is none", c.GetLane())
	}
	return ""
}

func printable(s string) bool {
	if !utf8.ValidString(s) {
		return false
	}
	for _, r := range s {
		if !unicode.IsPrint(r) {
			return false
		}
	}
	return true
}

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000Z") }

func roleName(r bcdv1.Role) string {
	switch r {
	case bcdv1.Role_ROLE_NODE:
		return "node"
	case bcdv1.Role_ROLE_SITE:
		return "site"
	case bcdv1.Role_ROLE_RAMDISK:
		return "ramdisk"
	}
	return "unknown"
}
