package netboot

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	noLease  = bcdv1.LeaseKind_LEASE_KIND_NONE
	standing = bcdv1.LeaseKind_LEASE_KIND_STANDING
	expiring = bcdv1.LeaseKind_LEASE_KIND_EXPIRING
)

// leaseStep is one event and what is to be so after it.
type leaseStep struct {
	at      time.Duration
	answer  *bcdv1.Lease
	sent    time.Duration
	stopped bool
	do      Do
	holding bool
	state   string
}

func TestLease(t *testing.T) {
	grant := func(kind bcdv1.LeaseKind, fence int64) *bcdv1.Lease {
		return &bcdv1.Lease{Kind: kind, Fence: fence, TtlMs: 10_000}
	}
	release := func(kind bcdv1.LeaseKind, fence int64) *bcdv1.Lease {
		l := grant(kind, fence)
		l.Release = true
		return l
	}
	const s = time.Second
	for _, test := range []struct {
		name    string
		restore int64
		steps   []leaseStep
	}{
		{"nothing was said", 0, []leaseStep{{state: "none"}}},
		{"standing outlives everything", 0, []leaseStep{
			{answer: grant(standing, 3), do: Do{Keep: 3}, holding: true, state: "standing"},
			{at: 1000 * time.Hour, holding: true, state: "standing"},
			{at: 1000 * time.Hour, answer: grant(standing, 3), holding: true, state: "standing"},
		}},
		{"standing from the last run, never connected", 3, []leaseStep{{at: time.Hour, holding: true, state: "standing"}}},
		{"expiring runs out by when the request left", 0, []leaseStep{
			{at: 2 * s, sent: 0, answer: grant(expiring, 3), holding: true, state: "expiring"},
			{at: 9*s - 1, holding: true, state: "expiring"},
			{at: 9 * s, state: "expired"},
			{at: 12 * s, sent: 11 * s, answer: grant(expiring, 3), holding: true, state: "expiring"},
		}},
		{"an answer that was under way too long is none", 0, []leaseStep{
			{at: 20 * s, sent: s, answer: grant(expiring, 3), state: "expired"},
		}},
		{"answers that overtook each other", 0, []leaseStep{
			{at: 5 * s, sent: 4 * s, answer: grant(expiring, 3), holding: true, state: "expiring"},
			{at: 6 * s, sent: 1 * s, answer: grant(expiring, 3), holding: true, state: "expiring"},
			{at: 12 * s, holding: true, state: "expiring"},
		}},
		{"released only after answering stopped", 0, []leaseStep{
			{answer: grant(standing, 3), do: Do{Keep: 3}, holding: true, state: "standing"},
			{answer: release(standing, 3), do: Do{Forget: true, Stop: true}, state: "releasing"},
			{answer: release(standing, 3), state: "releasing"},
			{stopped: true, state: "none"},
			{answer: grant(standing, 3), state: "none"},
			{answer: grant(noLease, 4), state: "none"},
			{answer: grant(expiring, 3), state: "none"},
			{at: s, sent: s, answer: grant(expiring, 5), holding: true, state: "expiring"},
		}},
		{"an older fence is void", 0, []leaseStep{
			{answer: grant(noLease, 7), state: "none"},
			{answer: grant(standing, 6), state: "none"},
			{answer: grant(expiring, 6), state: "none"},
		}},
		{"taken by force", 0, []leaseStep{
			{answer: grant(standing, 3), do: Do{Keep: 3}, holding: true, state: "standing"},
			{answer: grant(noLease, 4), do: Do{Forget: true, Stop: true}, state: "none"},
			{stopped: true, state: "none"},
		}},
		{"standing becomes expiring", 0, []leaseStep{
			{answer: grant(standing, 3), do: Do{Keep: 3}, holding: true, state: "standing"},
			{answer: grant(expiring, 4), do: Do{Forget: true}, holding: true, state: "expiring"},
			{at: 10 * s, state: "expired"},
		}},
		{"fence 0 grants nothing", 0, []leaseStep{{answer: grant(standing, 0), state: "none"}}},
		{"a ttl of years is cut", 0, []leaseStep{
			{answer: &bcdv1.Lease{Kind: expiring, Fence: 1, TtlMs: 1 << 30}, holding: true, state: "expiring"},
			{at: time.Hour, state: "expired"},
		}},
		{"a ttl below zero", 0, []leaseStep{{answer: &bcdv1.Lease{Kind: expiring, Fence: 1, TtlMs: -5}, state: "expired"}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var l Lease
			l.Restore(test.restore)
			for i, step := range test.steps {
				now := t0.Add(step.at)
				var do Do
				if step.answer != nil {
					do = l.Answered(t0.Add(step.sent), step.answer)
				}
				if step.stopped {
					l.Stopped()
				}
				state := l.State(now)
				if do != step.do || l.Holding(now) != step.holding || state.Kind != step.state || state.Message == "" {
					t.Fatalf("step %d: do %+v, state %+v", i, do, state)
				}
			}
		})
	}
}

func TestReleaseIsSaidAfterTheStop(t *testing.T) {
	var l Lease
	l.Answered(t0, &bcdv1.Lease{Kind: standing, Fence: 3})
	l.Answered(t0, &bcdv1.Lease{Kind: standing, Fence: 3, Release: true})
	var request bcdv1.SyncRequest
	if l.Ask(t0, &request); request.ReleasedFence != 0 || request.Fence != 0 {
		t.Errorf("said before the answering stopped: %v", &request)
	}
	l.Stopped()
	for range 2 { // until the gateway has heard it
		request.Reset()
		if l.Ask(t0, &request); request.ReleasedFence != 3 || request.Fence != 0 {
			t.Errorf("not said: %v", &request)
		}
	}
	l.Answered(t0, &bcdv1.Lease{Kind: noLease, Fence: 4})
	request.Reset()
	if l.Ask(t0, &request); request.ReleasedFence != 0 {
		t.Errorf("said again although it was heard: %v", &request)
	}
}

// leaseGateway is the gateway as the contract has it: it gives the lease to
// one agent at a time, counts from when it answers, and moves a standing one
// only after it was acknowledged.
type leaseGateway struct {
	agents  map[int]bool
	holder  int
	kind    bcdv1.LeaseKind
	fence   int64
	expires time.Duration
}

const modelTTL = 10 * time.Second

func (g *leaseGateway) sync(now time.Duration, agent int, request *bcdv1.SyncRequest) *bcdv1.Lease {
	g.agents[agent] = true
	if g.kind == standing && g.holder >= 0 && request.ReleasedFence == g.fence && agent == g.holder {
		g.holder, g.kind = -1, noLease
	}
	if g.kind == expiring && agent == g.holder && request.ReleasedFence == g.fence {
		g.holder, g.kind = -1, noLease
	}
	if g.kind == expiring && now >= g.expires {
		g.holder, g.kind = -1, noLease
	}
	if g.holder < 0 {
		g.fence++
		g.holder, g.kind = agent, standing
		if len(g.agents) > 1 {
			g.kind = expiring
		}
	}
	answer := &bcdv1.Lease{Kind: noLease, Fence: g.fence, Holder: fmt.Sprint(g.holder)}
	if g.holder == agent {
		answer.Kind, answer.TtlMs = g.kind, int32(modelTTL.Milliseconds())
		if g.kind == expiring {
			g.expires = now + modelTTL
		}
		answer.Release = g.kind == standing && len(g.agents) > 1
	}
	return answer
}

// modelAgent is a site agent whose clock runs at another speed than the
// gateway's, and whose disk outlives it.
type modelAgent struct {
	lease  Lease
	kept   int64
	speed  float64
	toStop bool
}

func (a *modelAgent) now(at time.Duration) time.Time {
	return t0.Add(time.Duration(float64(at) * a.speed))
}

type inFlight struct {
	agent  int
	sent   time.Time
	life   int
	answer *bcdv1.Lease
	ask    *bcdv1.SyncRequest
	due    time.Duration
}

// TestTwoNeverHold runs two and three agents against the gateway's model, over
// a network that delays, loses, doubles and reorders, with agents that stop,
// start again and are slow to stop, on clocks up to 4 % apart.
func TestTwoNeverHold(t *testing.T) {
	held := map[string]int{}
	for seed := range uint64(150) {
		random := rand.New(rand.NewPCG(seed, 1))
		gateway := &leaseGateway{agents: map[int]bool{}, holder: -1, kind: noLease}
		agents := make([]*modelAgent, 2+int(seed%2))
		lives := make([]int, len(agents))
		for i := range agents {
			agents[i] = &modelAgent{speed: 0.98 + 0.04*random.Float64()}
		}
		var network []inFlight
		for at := time.Duration(0); at < 3*time.Minute; at += 100 * time.Millisecond {
			for i, a := range agents {
				if i > 0 && at < 20*time.Second {
					continue // the first is alone for a while
				}
				switch random.IntN(40) {
				case 0, 1, 2, 3:
					m := inFlight{agent: i, sent: a.now(at), life: lives[i], ask: &bcdv1.SyncRequest{}, due: at + time.Duration(random.IntN(3000))*time.Millisecond}
					a.lease.Ask(a.now(at), m.ask)
					for range random.IntN(3) { // lost, once, or doubled
						network = append(network, m)
					}
				case 4:
					if random.IntN(6) == 0 { // the process starts again
						*a = modelAgent{kept: a.kept, speed: a.speed}
						a.lease.Restore(a.kept)
						lives[i]++
					}
				case 5, 6, 7, 8:
					if a.toStop {
						a.toStop = false
						a.lease.Stopped()
					}
				}
			}
			random.Shuffle(len(network), func(i, j int) { network[i], network[j] = network[j], network[i] })
			var later []inFlight
			for _, m := range network {
				switch {
				case m.due > at:
					later = append(later, m)
				case m.ask != nil:
					m.answer, m.ask = gateway.sync(at, m.agent, m.ask), nil
					m.due = at + time.Duration(random.IntN(3000))*time.Millisecond
					later = append(later, m)
				case m.life == lives[m.agent] && random.IntN(4) > 0:
					a := agents[m.agent]
					do := a.lease.Answered(m.sent, m.answer)
					if do.Forget {
						a.kept = 0
					}
					if do.Keep != 0 {
						a.kept = do.Keep
					}
					a.toStop = a.toStop || do.Stop
				}
			}
			network = later
			holders := 0
			for _, a := range agents {
				if a.lease.Holding(a.now(at)) {
					holders++
					held[a.lease.State(a.now(at)).Kind]++
				}
			}
			if holders > 1 {
				t.Fatalf("seed %d: %d agents hold the lease at %s", seed, holders, at)
			}
		}
		if !gateway.agents[1] || gateway.fence < 2 {
			t.Errorf("seed %d: the lease never moved", seed)
		}
	}
	if held["standing"] == 0 || held["expiring"] == 0 {
		t.Errorf("the model did not come to hold both kinds: %v", held)
	}
}
