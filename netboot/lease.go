package netboot

import (
	"fmt"
	"time"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// leaseMargin is the part of an expiring lease that its holder does not
	// use, so that two clocks that run at different speeds never overlap: a
	// quartz is off by 0.01 %, a guest whose hypervisor is busy by more.
	leaseMargin = 10
	// minLeaseMargin is for an answer that was decided on just before.
	minLeaseMargin = 250 * time.Millisecond
	// maxLeaseTTL bounds a mistake at the other end.
	maxLeaseTTL = time.Hour
)

// Lease is this agent's right to answer machines, as a step function: it
// decides and does nothing. now is always of this agent's monotonic clock; the
// zero value holds nothing.
//
// Its shell must do what Do says before it calls Lease again, and must count
// sent from before the request left: the gateway counts a lease from when it
// made it, which is later.
type Lease struct {
	kind  bcdv1.LeaseKind
	fence int64
	until time.Time
	// stopping is set while the answering ends, released when the gateway is
	// to be told.
	stopping bool
	released int64
	// newest is the highest fence seen: what an older one says is void.
	newest  int64
	holder  string
	message string
}

// Do is what Lease wants done, in this order.
type Do struct {
	// Forget the standing lease that was kept, durably.
	Forget bool
	// Keep this standing fence, durably.
	Keep int64
	// Stop answering: once no answer is on its way any more, call Stopped.
	Stop bool
}

// Restore takes the standing lease that the last run kept.
func (l *Lease) Restore(fence int64) {
	if fence > 0 {
		l.kind, l.fence, l.newest = bcdv1.LeaseKind_LEASE_KIND_STANDING, fence, fence
	}
}

// Holding says whether machines may be answered at now.
func (l *Lease) Holding(now time.Time) bool {
	switch {
	case l.stopping:
		return false
	case l.kind == bcdv1.LeaseKind_LEASE_KIND_STANDING:
		return true
	case l.kind == bcdv1.LeaseKind_LEASE_KIND_EXPIRING:
		return now.Before(l.until)
	}
	return false
}

// Ask fills in what the next request says of the lease.
func (l *Lease) Ask(now time.Time, request *bcdv1.SyncRequest) {
	request.ReleasedFence = l.released
	request.Lease = bcdv1.LeaseKind_LEASE_KIND_NONE
	if l.Holding(now) {
		request.Fence, request.Lease = l.fence, l.kind
	}
}

// Answered takes the answer to a request that left at sent. An answer that is
// older than what is known, by its fence, changes nothing.
func (l *Lease) Answered(sent time.Time, answer *bcdv1.Lease) Do {
	if answer == nil || answer.GetFence() < l.newest {
		return Do{}
	}
	l.holder, l.message = answer.GetHolder(), answer.GetMessage()
	l.newest = answer.GetFence()
	standing := l.kind == bcdv1.LeaseKind_LEASE_KIND_STANDING
	switch kind := answer.GetKind(); kind {
	case bcdv1.LeaseKind_LEASE_KIND_STANDING, bcdv1.LeaseKind_LEASE_KIND_EXPIRING:
		if answer.GetFence() <= 0 || answer.GetFence() == l.released {
			// What was given back is not taken again: only a new fence is.
			return Do{}
		}
		if answer.GetRelease() {
			return l.release(answer.GetFence())
		}
		if l.stopping && answer.GetFence() == l.fence {
			return Do{}
		}
		fresh := answer.GetFence() != l.fence || kind != l.kind
		l.kind, l.fence, l.stopping, l.released = kind, answer.GetFence(), false, 0
		if kind == bcdv1.LeaseKind_LEASE_KIND_STANDING {
			if fresh {
				return Do{Keep: l.fence}
			}
			return Do{}
		}
		ttl := min(time.Duration(answer.GetTtlMs())*time.Millisecond, maxLeaseTTL)
		until := sent.Add(ttl - max(ttl/leaseMargin, minLeaseMargin))
		// Answers may overtake each other; an earlier one takes nothing back.
		if fresh || until.After(l.until) {
			l.until = until
		}
		return Do{Forget: standing}
	default:
		if answer.GetRelease() && l.fence != 0 && answer.GetFence() == l.fence {
			return l.release(l.fence)
		}
		held := l.fence != 0 && l.kind != bcdv1.LeaseKind_LEASE_KIND_NONE
		l.kind, l.fence, l.stopping = bcdv1.LeaseKind_LEASE_KIND_NONE, 0, false
		if answer.GetFence() > l.released {
			l.released = 0
		}
		return Do{Forget: standing, Stop: held}
	}
}

// release begins to give the lease with this fence back. What was kept is
// forgotten before the gateway hears of it: an agent that starts again must
// not take up what another has by then.
func (l *Lease) release(fence int64) Do {
	if l.released == fence || l.stopping {
		return Do{}
	}
	standing := l.kind == bcdv1.LeaseKind_LEASE_KIND_STANDING
	l.fence, l.stopping = fence, true
	return Do{Forget: standing, Stop: true}
}

// Stopped says that the answering has stopped, and that what was kept is
// forgotten, as Do asked. Only now is the gateway told.
func (l *Lease) Stopped() {
	if !l.stopping {
		return
	}
	l.released = l.fence
	l.kind, l.fence, l.stopping = bcdv1.LeaseKind_LEASE_KIND_NONE, 0, false
}

// LeaseState is the lease for status.
type LeaseState struct {
	Holding bool   `json:"holding"`
	Kind    string `json:"kind"`
	Fence   int64  `json:"fence,omitempty"`
	// Holder is the node that has it by the gateway's last word.
	Holder string `json:"holder,omitempty"`
	// Message says in a sentence how it stands.
	Message string `json:"message"`
	// Left is how long an expiring lease still counts here.
	Left time.Duration `json:"left_ns,omitempty"`
}

// State says how it stands at now.
func (l *Lease) State(now time.Time) LeaseState {
	s := LeaseState{Holding: l.Holding(now), Kind: "none", Fence: l.fence, Holder: l.holder, Message: l.message}
	switch {
	case l.stopping:
		s.Kind, s.Message = "releasing", "the gateway asked for the boot lease back; answering has stopped"
	case l.kind == bcdv1.LeaseKind_LEASE_KIND_STANDING:
		s.Kind = "standing"
		if s.Message == "" {
			s.Message = "this is the site's only agent; it answers also while it is cut off"
		}
	case l.kind == bcdv1.LeaseKind_LEASE_KIND_EXPIRING && s.Holding:
		s.Kind, s.Left = "expiring", l.until.Sub(now)
		if s.Message == "" {
			s.Message = fmt.Sprintf("this agent answers for another %s, and longer while it reaches the gateway", s.Left.Round(time.Second))
		}
	case l.kind == bcdv1.LeaseKind_LEASE_KIND_EXPIRING:
		s.Kind = "expired"
		s.Message = "the boot lease ran out while the gateway could not be reached; no machine is answered until it can"
	case s.Message == "":
		s.Message = "this agent has not been given the boot lease; no machine is answered"
	}
	return s
}
