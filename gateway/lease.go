package gateway

import (
	"fmt"
	"slices"
	"time"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// The boot lease of a site: which one of its agents answers the machines.
//
// The promise is that two agents never answer at once, whatever is lost,
// delayed or cut off. A standing lease ends only with its holder's word, or by
// an operator who knows that the holder is off. An expiring one ends by time:
// the holder counts from before it sent the request that renewed it, the
// gateway from when that request came, so the gateway always counts longer.

const (
	// leaseTTL is how long an expiring lease is good for: a boot ROM asks for
	// about a minute (4, 8, 16 and 32 s), so a machine that is starting when
	// the holder dies still finds the one that takes over.
	leaseTTL = 20 * time.Second
	// leaseGrace is how much longer the gateway waits. It covers clocks that
	// run differently fast: 5 %, a hundred times what a broken one does.
	leaseGrace = time.Second
	// expiringWait bounds how long the holder of an expiring lease is kept
	// waiting for an answer, so that it renews four times before the end.
	expiringWait = 5 * time.Second
	// passFor is how long an agent that gave the lease back on an operator's
	// word does not get it again, and how long a successor that was named has
	// it kept free.
	passFor = time.Minute
	// maxFence bounds the fences that are believed; above it nobody counts.
	maxFence = 1 << 53
)

// BootLease is the part of a lease that outlives the gateway. When an expiring
// one ends is in memory only: a gateway that starts waits for a whole leaseTTL
// before it gives one away.
type BootLease struct {
	// Fence grows with each new holder and never goes back.
	Fence int64 `json:"fence,omitempty"`
	// Kind is NONE or unspecified while Holder is empty.
	Kind   bcdv1.LeaseKind `json:"kind,omitempty"`
	Holder string          `json:"holder,omitempty"`
	// Asked says why the holder is asked to give it back, if it is.
	Asked leaseAsk `json:"asked,omitempty"`
	// Next is the node that an operator wants to have it, Passing the one that
	// gave it back. Both count until PassUntilMS.
	Next        string `json:"next,omitempty"`
	Passing     string `json:"passing,omitempty"`
	PassUntilMS int64  `json:"pass_until_ms,omitempty"`
}

type leaseAsk string

const (
	// askedByOperator: release or move.
	askedByOperator leaseAsk = "operator"
	// askedToConvert: another agent came, so a standing lease has to become an
	// expiring one.
	askedToConvert leaseAsk = "convert"
)

// leaseState is a lease and the memory of it.
type leaseState struct {
	BootLease
	// Until is when an EXPIRING lease has surely ended for its holder, by this
	// process' clock, without leaseGrace.
	Until time.Time
}

// leaseInput is one of leaseSync and leaseMove.
type leaseInput interface{ leaseInput() }

// leaseSync: an agent asks, having been heard at Received.
type leaseSync struct {
	Node     string
	Received time.Time
	// Fence is what the agent acts on, Released what it gives back.
	Fence, Released int64
}

// leaseMove: an operator wants the lease elsewhere. To may be empty.
type leaseMove struct {
	To    string
	Force bool
}

func (leaseSync) leaseInput() {}
func (leaseMove) leaseInput() {}

// leaseStep is the lease as a step function. agents are the trusted agents of
// the site, by node id. The lease that is returned is for the node of a
// leaseSync, and nil otherwise.
func leaseStep(now time.Time, s leaseState, agents []string, in leaseInput) (leaseState, *bcdv1.Lease) {
	if s.Holder != "" && !slices.Contains(agents, s.Holder) && s.Kind == bcdv1.LeaseKind_LEASE_KIND_STANDING {
		// Revoked, or away for so long that it cannot come back: it gets no
		// more answers. It may still learn so, within a TTL.
		s.Kind, s.Until, s.Asked = bcdv1.LeaseKind_LEASE_KIND_EXPIRING, now.Add(leaseTTL), ""
	}
	if s.PassUntilMS != 0 && now.UnixMilli() >= s.PassUntilMS {
		s.Next, s.Passing, s.PassUntilMS = "", "", 0
	}
	switch in := in.(type) {
	case leaseMove:
		return leaseMoved(now, s, in), nil
	case leaseSync:
		if in.Fence > s.Fence && in.Fence < maxFence {
			// The store is an older copy of itself: a fence that was given out
			// is not given out again.
			s.Fence = in.Fence
		}
		if in.Released != 0 && in.Released == s.Fence && s.Holder == in.Node {
			s = leaseFreed(now, s)
		}
		s = leaseAsked(now, s, agents, in)
		return s, s.lease(now, in)
	}
	return s, nil
}

func leaseMoved(now time.Time, s leaseState, in leaseMove) leaseState {
	pass := now.Add(passFor).UnixMilli()
	switch {
	case in.Force:
		// The fence grows at once, so that what the old holder asks for from
		// now on is refused.
		s.Fence++
		s.Holder, s.Kind, s.Asked, s.Until = "", bcdv1.LeaseKind_LEASE_KIND_NONE, "", time.Time{}
		s.Next, s.Passing, s.PassUntilMS = in.To, "", pass
	case s.Holder == "":
		s.Next, s.Passing, s.PassUntilMS = in.To, "", pass
	default:
		s.Asked, s.Next, s.Passing, s.PassUntilMS = askedByOperator, in.To, "", 0
	}
	return s
}

// leaseFreed: the holder has stopped, and said so.
func leaseFreed(now time.Time, s leaseState) leaseState {
	if s.Asked == askedByOperator {
		s.Passing, s.PassUntilMS = s.Holder, now.Add(passFor).UnixMilli()
	}
	s.Holder, s.Kind, s.Asked, s.Until = "", bcdv1.LeaseKind_LEASE_KIND_NONE, "", time.Time{}
	return s
}

// leaseAsked decides whether the agent that asks holds the lease from now on.
func leaseAsked(now time.Time, s leaseState, agents []string, in leaseSync) leaseState {
	const standing, expiring = bcdv1.LeaseKind_LEASE_KIND_STANDING, bcdv1.LeaseKind_LEASE_KIND_EXPIRING
	alone := len(agents) == 1
	if s.Holder != "" && s.Kind == expiring && s.Holder != in.Node && !now.Before(s.Until.Add(leaseGrace)) {
		s = leaseFreed(now, s)
	}
	switch {
	case s.Holder == in.Node && s.Kind == standing:
		if !alone && s.Asked == "" {
			s.Asked = askedToConvert
		}
		if alone && s.Asked == askedToConvert {
			s.Asked = ""
		}
	case s.Holder == in.Node && s.Asked == askedByOperator:
		// It is not renewed any more, and given up by silence too.
		if !now.Before(s.Until.Add(leaseGrace)) {
			return leaseAsked(now, leaseFreed(now, s), agents, in)
		}
	case s.Holder == in.Node:
		if alone {
			s.Kind, s.Until = standing, time.Time{}
		} else if until := in.Received.Add(leaseTTL); until.After(s.Until) {
			s.Until = until
		}
	case s.Holder != "":
		if s.Kind == standing && s.Asked == "" {
			s.Asked = askedToConvert
		}
	case s.Next != "" && s.Next != in.Node && slices.Contains(agents, s.Next), s.Passing == in.Node:
		// Kept free for another one.
	default:
		s.Fence++
		s.Holder, s.Kind, s.Until = in.Node, standing, time.Time{}
		if !alone {
			s.Kind, s.Until = expiring, in.Received.Add(leaseTTL)
		}
		s.Next, s.Passing, s.PassUntilMS = "", "", 0
	}
	return s
}

// lease is what the agent that asked is told.
func (s leaseState) lease(now time.Time, in leaseSync) *bcdv1.Lease {
	out := &bcdv1.Lease{Kind: bcdv1.LeaseKind_LEASE_KIND_NONE, Fence: s.Fence, Holder: s.Holder}
	switch {
	case s.Holder == "" && s.Next != "" && s.Next != in.Node:
		out.Message = fmt.Sprintf("nobody holds the boot lease; it is kept for %s, as an operator wants it", s.Next)
	case s.Holder == "":
		out.Message = "nobody holds the boot lease; this agent gave it back and gets it again in a minute at the soonest"
	case s.Holder != in.Node && s.Asked != "":
		out.Message = fmt.Sprintf("%s holds the boot lease and is asked to give it back", s.Holder)
	case s.Holder != in.Node:
		out.Message = fmt.Sprintf("%s holds the boot lease", s.Holder)
	case s.Kind == bcdv1.LeaseKind_LEASE_KIND_STANDING:
		out.Kind, out.Release = s.Kind, s.Asked != ""
		out.Message = "this agent holds the boot lease, until it gives it back"
	default:
		// Counted from when the request was sent, which is before it came.
		left := s.Until.Sub(in.Received)
		if !now.Before(s.Until) || left <= 0 {
			out.Message = "the boot lease of this agent has ended; it is being moved"
			return out
		}
		out.Kind, out.Release, out.TtlMs = s.Kind, s.Asked != "", int32(left.Milliseconds())
		out.Message = "this agent holds the boot lease and renews it, because the site has more than one"
	}
	if out.GetRelease() {
		out.Message = "this agent is asked to stop answering and to give the boot lease back"
		if s.Asked == askedToConvert {
			out.Message += ": the site has another agent now, so it becomes one that expires"
		}
	}
	return out
}

// wake is when the lease may change for an agent that waits; zero for never.
func (s leaseState) wake() time.Time {
	var at time.Time
	if s.Holder != "" && s.Kind == bcdv1.LeaseKind_LEASE_KIND_EXPIRING {
		at = s.Until.Add(leaseGrace)
	}
	if pass := time.UnixMilli(s.PassUntilMS); s.PassUntilMS != 0 && (at.IsZero() || pass.Before(at)) {
		at = pass
	}
	return at
}

// sentence says for operators how the lease stands.
func (s leaseState) sentence() string {
	switch {
	case s.Holder == "" && s.Next != "":
		return "free; kept for " + s.Next
	case s.Holder == "":
		return "free; the first agent that asks gets it"
	case s.Asked == askedByOperator && s.Next != "":
		return fmt.Sprintf("%s is asked to give it back, for %s", s.Holder, s.Next)
	case s.Asked == askedByOperator:
		return s.Holder + " is asked to give it back"
	case s.Asked == askedToConvert:
		return s.Holder + " is asked to give it back once, because the site has more than one agent now"
	case s.Kind == bcdv1.LeaseKind_LEASE_KIND_STANDING:
		return "stands, also while its holder is cut off; move it with site release, or site takeover --force when the holder is off"
	}
	return fmt.Sprintf("moves by itself when its holder has been silent for %v", leaseTTL+leaseGrace)
}
