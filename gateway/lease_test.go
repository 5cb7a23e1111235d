package gateway

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	isStanding = bcdv1.LeaseKind_LEASE_KIND_STANDING
	isExpiring = bcdv1.LeaseKind_LEASE_KIND_EXPIRING
	isNone     = bcdv1.LeaseKind_LEASE_KIND_NONE
)

// TestLeaseStep is every transition: a state, the agents, an input, and what
// becomes of it.
func TestLeaseStep(t *testing.T) {
	now := time.Date(2026, 12, 1, 8, 0, 0, 0, time.UTC)
	pass := now.Add(passFor).UnixMilli()
	one, two := []string{"a"}, []string{"a", "b"}
	standing := func(change func(*leaseState)) leaseState {
		s := leaseState{BootLease: BootLease{Fence: 3, Kind: isStanding, Holder: "a"}}
		if change != nil {
			change(&s)
		}
		return s
	}
	expiring := func(until time.Time, change func(*leaseState)) leaseState {
		s := leaseState{BootLease: BootLease{Fence: 3, Kind: isExpiring, Holder: "a"}, Until: until}
		if change != nil {
			change(&s)
		}
		return s
	}
	free := func(change func(*leaseState)) leaseState {
		s := leaseState{BootLease: BootLease{Fence: 3, Kind: isNone}}
		if change != nil {
			change(&s)
		}
		return s
	}
	operator := func(s *leaseState) { s.Asked = askedByOperator }
	convert := func(s *leaseState) { s.Asked = askedToConvert }
	sync := func(node string) leaseSync { return leaseSync{Node: node, Received: now} }
	releases := func(node string, fence int64) leaseSync {
		return leaseSync{Node: node, Received: now, Released: fence}
	}
	for _, test := range []struct {
		name   string
		state  leaseState
		agents []string
		in     leaseInput
		want   leaseState
		// kind, fence and release of the lease that is told; a move tells none.
		kind    bcdv1.LeaseKind
		fence   int64
		release bool
	}{
		{"the first of one agent", leaseState{}, one, sync("a"),
			leaseState{BootLease: BootLease{Fence: 1, Kind: isStanding, Holder: "a"}}, isStanding, 1, false},
		{"the first of two", leaseState{}, two, sync("b"),
			leaseState{BootLease: BootLease{Fence: 1, Kind: isExpiring, Holder: "b"}, Until: now.Add(leaseTTL)}, isExpiring, 1, false},
		{"standing stays", standing(nil), one, sync("a"), standing(nil), isStanding, 3, false},
		{"standing, a restart lost the fence", standing(nil), one, leaseSync{Node: "a", Received: now, Fence: 0}, standing(nil), isStanding, 3, false},
		{"a second agent asks", standing(nil), two, sync("b"), standing(convert), isNone, 3, false},
		{"the holder meets a second agent", standing(nil), two, sync("a"), standing(convert), isStanding, 3, true},
		{"the holder converts", standing(convert), two, releases("a", 3),
			leaseState{BootLease: BootLease{Fence: 4, Kind: isExpiring, Holder: "a"}, Until: now.Add(leaseTTL)}, isExpiring, 4, false},
		{"a release of an older fence", standing(convert), two, releases("a", 2), standing(convert), isStanding, 3, true},
		{"a release by who does not hold", standing(convert), two, releases("b", 3), standing(convert), isNone, 3, false},
		{"the second agent is gone before", standing(convert), one, sync("a"), standing(nil), isStanding, 3, false},
		{"a fence from before the store was restored", standing(nil), one, leaseSync{Node: "a", Received: now, Fence: 9},
			standing(func(s *leaseState) { s.Fence = 9 }), isStanding, 9, false},
		{"a fence that nobody could have", standing(nil), one, leaseSync{Node: "a", Received: now, Fence: 1 << 62}, standing(nil), isStanding, 3, false},

		{"expiring is renewed", expiring(now.Add(time.Second), nil), two, sync("a"), expiring(now.Add(leaseTTL), nil), isExpiring, 3, false},
		{"an older request renews nothing", expiring(now.Add(leaseTTL), nil), two, leaseSync{Node: "a", Received: now.Add(-5 * time.Second)}, expiring(now.Add(leaseTTL), nil), isExpiring, 3, false},
		{"expired, and nobody took it", expiring(now.Add(-time.Hour), nil), two, sync("a"), expiring(now.Add(leaseTTL), nil), isExpiring, 3, false},
		{"its other agent is gone", expiring(now.Add(time.Second), nil), one, sync("a"), standing(nil), isStanding, 3, false},
		{"another asks too soon", expiring(now.Add(-leaseGrace+1), nil), two, sync("b"), expiring(now.Add(-leaseGrace+1), nil), isNone, 3, false},
		{"another asks in time", expiring(now.Add(-leaseGrace), nil), two, sync("b"),
			leaseState{BootLease: BootLease{Fence: 4, Kind: isExpiring, Holder: "b"}, Until: now.Add(leaseTTL)}, isExpiring, 4, false},
		{"a request that came long ago takes it over", expiring(now.Add(-leaseGrace), nil), two, leaseSync{Node: "b", Received: now.Add(-5 * time.Second)},
			leaseState{BootLease: BootLease{Fence: 4, Kind: isExpiring, Holder: "b"}, Until: now.Add(leaseTTL - 5*time.Second)}, isExpiring, 4, false},

		{"release asked of a standing one", standing(nil), one, leaseMove{}, standing(operator), 0, 0, false},
		{"the holder is told", standing(operator), one, sync("a"), standing(operator), isStanding, 3, true},
		{"and gives it back", standing(operator), one, releases("a", 3),
			free(func(s *leaseState) { s.Passing, s.PassUntilMS = "a", pass }), isNone, 3, false},
		{"it does not get it again", free(func(s *leaseState) { s.Passing, s.PassUntilMS = "a", pass }), one, sync("a"),
			free(func(s *leaseState) { s.Passing, s.PassUntilMS = "a", pass }), isNone, 3, false},
		{"until the minute is over", free(func(s *leaseState) { s.Passing, s.PassUntilMS = "a", now.UnixMilli() }), one, sync("a"),
			leaseState{BootLease: BootLease{Fence: 4, Kind: isStanding, Holder: "a"}}, isStanding, 4, false},
		{"the other gets it at once", free(func(s *leaseState) { s.Passing, s.PassUntilMS = "a", pass }), two, sync("b"),
			leaseState{BootLease: BootLease{Fence: 4, Kind: isExpiring, Holder: "b"}, Until: now.Add(leaseTTL)}, isExpiring, 4, false},
		{"release asked of an expiring one", expiring(now.Add(time.Second), operator), two, sync("a"), expiring(now.Add(time.Second), operator), isExpiring, 3, true},
		{"it ran out unanswered", expiring(now.Add(-leaseGrace), operator), two, sync("a"),
			free(func(s *leaseState) { s.Passing, s.PassUntilMS = "a", pass }), isNone, 3, false},
		{"move to another", standing(nil), two, leaseMove{To: "b"}, standing(func(s *leaseState) { s.Asked, s.Next = askedByOperator, "b" }), 0, 0, false},
		{"the successor waits for it", standing(func(s *leaseState) { s.Asked, s.Next = askedByOperator, "b" }), two, sync("b"),
			standing(func(s *leaseState) { s.Asked, s.Next = askedByOperator, "b" }), isNone, 3, false},
		{"it is kept for the successor", free(func(s *leaseState) { s.Next, s.PassUntilMS = "b", pass }), []string{"a", "b", "c"}, sync("c"),
			free(func(s *leaseState) { s.Next, s.PassUntilMS = "b", pass }), isNone, 3, false},
		{"a successor that is gone keeps nothing", free(func(s *leaseState) { s.Next, s.PassUntilMS = "b", pass }), one, sync("a"),
			leaseState{BootLease: BootLease{Fence: 4, Kind: isStanding, Holder: "a"}}, isStanding, 4, false},
		{"moved while nobody has it", free(nil), two, leaseMove{To: "b"}, free(func(s *leaseState) { s.Next, s.PassUntilMS = "b", pass }), 0, 0, false},
		{"taken by force", standing(nil), two, leaseMove{To: "b", Force: true},
			leaseState{BootLease: BootLease{Fence: 4, Kind: isNone, Next: "b", PassUntilMS: pass}}, 0, 0, false},
		{"the one that was forced out", leaseState{BootLease: BootLease{Fence: 4, Kind: isNone, Next: "b", PassUntilMS: pass}}, two, sync("a"),
			leaseState{BootLease: BootLease{Fence: 4, Kind: isNone, Next: "b", PassUntilMS: pass}}, isNone, 4, false},

		{"the standing holder is revoked", standing(nil), []string{"b"}, sync("b"), expiring(now.Add(leaseTTL), nil), isNone, 3, false},
		{"and its time is over", expiring(now.Add(-leaseGrace), nil), []string{"b"}, sync("b"),
			leaseState{BootLease: BootLease{Fence: 4, Kind: isStanding, Holder: "b"}}, isStanding, 4, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, lease := leaseStep(now, test.state, test.agents, test.in)
			if got != test.want {
				t.Errorf("state\n%+v, want\n%+v", got, test.want)
			}
			if (lease != nil) != (test.kind != 0) || lease.GetKind() != test.kind || lease.GetFence() != test.fence || lease.GetRelease() != test.release {
				t.Errorf("told %v; want %v, fence %d, release %v", lease, test.kind, test.fence, test.release)
			}
			if lease != nil && lease.GetMessage() == "" || got.sentence() == "" {
				t.Error("no sentence for people")
			}
			if ttl := time.Duration(lease.GetTtlMs()) * time.Millisecond; lease.GetKind() == isExpiring && (ttl <= 0 || ttl > got.Until.Sub(test.in.(leaseSync).Received)) || lease.GetKind() != isExpiring && ttl != 0 {
				t.Errorf("a %v lease for %v", lease.GetKind(), ttl)
			}
		})
	}
}

// simAgent is a site agent as the contract wants it, in a made-up world: its
// own clock runs at its own rate, and while it is stalled it does nothing.
type simAgent struct {
	id   string
	rate float64
	// Its clock goes on in a stall, as CLOCK_BOOTTIME does: one that stands
	// still is the thing that no expiring lease survives.
	stalledUntil time.Duration
	nextSync     time.Duration

	kind  bcdv1.LeaseKind
	fence int64
	until float64 // by its own clock
	// released is the fence it gave back: it never acts on that one again.
	released int64
	// latest is its newest request; an answer to an older one is none.
	latest int
}

// simMessage is a request or an answer on its way.
type simMessage struct {
	at      time.Duration
	agent   int
	number  int
	request *leaseSync
	sentAt  float64
	answer  *bcdv1.Lease
}

// answers says whether the agent would answer a machine at the real time now.
// It stops a little before its time is over.
func (a *simAgent) answers(now time.Duration) bool {
	if now < a.stalledUntil {
		return false
	}
	switch a.kind {
	case isStanding:
		return true
	case isExpiring:
		return a.clock(now) < a.until-0.25
	}
	return false
}

func (a *simAgent) clock(now time.Duration) float64 { return now.Seconds() * a.rate }

// TestLeaseHasOneHolder: whatever is lost, late, stalled, restarted or cut
// off, no two agents would answer a machine at once; and when the faults stop,
// one of them does.
func TestLeaseHasOneHolder(t *testing.T) {
	var conversions, takeovers, releases, restarts, none int
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 7))
		start := time.Date(2026, 12, 1, 8, 0, 0, 0, time.UTC)
		agents := make([]*simAgent, 2+r.IntN(2))
		for i := range agents {
			agents[i] = &simAgent{id: fmt.Sprint("node-", i), rate: 0.98 + 0.04*r.Float64(), nextSync: time.Duration(r.IntN(40)) * time.Second}
		}
		var kept BootLease
		var known []string
		state := leaseState{}
		started := start
		var mail []simMessage
		faulty := true
		const step, faults, end = 200 * time.Millisecond, 8 * time.Minute, 12 * time.Minute
		quiet := 0
		for now := time.Duration(0); now < end; now += step {
			faulty = now < faults
			at := start.Add(now)
			if faulty && r.IntN(400) == 0 {
				// The gateway restarts: only what is kept is left.
				restarts++
				started, state = at, leaseState{BootLease: kept}
				if state.Kind == isExpiring {
					state.Until = started.Add(leaseTTL)
				}
			}
			if faulty && r.IntN(300) == 0 && len(known) > 0 {
				state, _ = leaseStep(at, state, known, leaseMove{To: []string{"", known[r.IntN(len(known))]}[r.IntN(2)]})
				kept = state.BootLease
			}
			var later []simMessage
			for _, m := range mail {
				switch {
				case m.at > now:
					later = append(later, m)
				case m.request != nil:
					in := *m.request
					in.Received = at
					if !contains(known, in.Node) {
						known = append(known, in.Node)
					}
					before := state
					var lease *bcdv1.Lease
					state, lease = leaseStep(at, state, known, in)
					if state.Fence < before.Fence {
						t.Fatalf("seed %d: the fence went back", seed)
					}
					if state.Holder != before.Holder && state.Holder != "" && state.Fence <= before.Fence {
						t.Fatalf("seed %d: a new holder with an old fence", seed)
					}
					if before.Holder != "" && state.Holder != "" && state.Holder != before.Holder {
						takeovers++
					}
					if before.Kind == isStanding && state.Kind == isExpiring {
						conversions++
					}
					kept = state.BootLease
					if faulty && r.IntN(5) == 0 {
						continue
					}
					later = append(later, simMessage{at: now + delay(r, faulty), agent: m.agent, number: m.number, sentAt: m.sentAt, answer: lease})
				default:
					a := agents[m.agent]
					if now < a.stalledUntil {
						m.at = a.stalledUntil
						later = append(later, m)
						continue
					}
					if m.number != a.latest || m.answer.GetKind() != isNone && m.answer.GetFence() <= a.released && !m.answer.GetRelease() {
						continue
					}
					a.kind, a.fence = m.answer.GetKind(), m.answer.GetFence()
					a.until = m.sentAt + float64(m.answer.GetTtlMs())/1000
					if m.answer.GetRelease() {
						// It stops first, and says so with the next request.
						releases++
						a.released, a.kind = a.fence, isNone
						a.nextSync = now
					}
				}
			}
			mail = later
			answering := 0
			for i, a := range agents {
				if faulty && r.IntN(600) == 0 {
					a.stalledUntil = now + time.Duration(r.IntN(60))*time.Second
				}
				if faulty && r.IntN(900) == 0 {
					// A standing lease is kept over a restart, an expiring one is not.
					a.latest++
					if a.kind == isExpiring {
						a.kind, a.fence = isNone, 0
					}
				}
				if a.answers(now) {
					answering++
				}
				if now < a.stalledUntil || now < a.nextSync {
					continue
				}
				a.nextSync = now + 4*time.Second
				lost := faulty && r.IntN(5) == 0
				fence := a.fence
				if a.kind == isNone {
					fence = 0
				}
				a.latest++
				if lost {
					continue
				}
				mail = append(mail, simMessage{at: now + delay(r, faulty), agent: i, number: a.latest, sentAt: a.clock(now),
					request: &leaseSync{Node: a.id, Fence: fence, Released: a.released}})
			}
			if answering > 1 {
				t.Fatalf("seed %d: %d agents answer at %v: %+v", seed, answering, now, state)
			}
			if answering == 0 && now > faults+3*time.Minute {
				quiet++
			}
			if answering == 0 {
				none++
			}
		}
		if quiet > 0 {
			t.Errorf("seed %d: nobody answered for %v after the faults were over; %+v", seed, time.Duration(quiet)*step, state)
		}
	}
	// A run that met none of these has shown nothing.
	for what, count := range map[string]int{"conversions": conversions, "takeovers": takeovers, "releases": releases, "restarts of the gateway": restarts, "moments without a holder": none} {
		if count == 0 {
			t.Errorf("no %s happened", what)
		}
	}
}

func contains(list []string, s string) bool {
	for _, e := range list {
		if e == s {
			return true
		}
	}
	return false
}

// delay is how long a message is on its way; with faults up to longer than a
// lease lives.
func delay(r *rand.Rand, faulty bool) time.Duration {
	if faulty && r.IntN(10) == 0 {
		return time.Duration(r.IntN(30000)) * time.Millisecond
	}
	return time.Duration(r.IntN(300)) * time.Millisecond
}
