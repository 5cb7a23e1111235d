package converge

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

var t0 = time.Date(2026, 12, 1, 8, 0, 0, 0, time.UTC)

// named is a section for the core, which never runs it.
type named struct {
	name string
	deps []string
}

func (n named) Name() string                                          { return n.name }
func (n named) DependsOn() []string                                   { return n.deps }
func (n named) Plan(context.Context, *bcdv1.NodeSpec) ([]Step, error) { return nil, nil }
func (n named) Apply(context.Context, Step) error                     { return nil }
func spec(generation int64) *bcdv1.NodeSpec                           { return &bcdv1.NodeSpec{Generation: generation} }
func states(c *core) (out map[string]bcdv1.SectionState) {
	out = map[string]bcdv1.SectionState{}
	for _, s := range c.status().GetSections() {
		out[s.GetName()] = s.GetState()
	}
	return out
}

const (
	converged   = bcdv1.SectionState_SECTION_STATE_CONVERGED
	failed      = bcdv1.SectionState_SECTION_STATE_FAILED
	terminally  = bcdv1.SectionState_SECTION_STATE_FAILED_TERMINALLY
	unsupported = bcdv1.SectionState_SECTION_STATE_UNSUPPORTED
	blocked     = bcdv1.SectionState_SECTION_STATE_BLOCKED
)

func TestCoreOrderAndUnsupported(t *testing.T) {
	c := newCore([]Section{named{name: "daemon"}, named{name: "host"}}, 0)
	s := spec(3)
	s.Access = &bcdv1.AccessSpec{}
	c.step(t0, offered{s})
	out := c.step(t0, tick{})
	if out.run != "host" {
		t.Fatalf("first %q", out.run)
	}
	if again := c.step(t0, tick{}); again.run != "" {
		t.Fatalf("two at a time: %q", again.run)
	}
	if out = c.step(t0, finished{name: "host", steps: 2}); out.run != "daemon" {
		t.Fatalf("second %q", out.run)
	}
	if c.observed != 0 {
		t.Error("observed before every section ended")
	}
	out = c.step(t0, finished{name: "daemon"})
	if c.observed != 3 || out.run != "" || !out.wake.Equal(t0.Add(defaultInterval)) {
		t.Errorf("observed %d, run %q, wake %v", c.observed, out.run, out.wake)
	}
	if got := states(c); len(got) != 3 || got["access"] != unsupported || got["host"] != converged {
		t.Errorf("%v", got)
	}
}

func TestCoreFailures(t *testing.T) {
	c := newCore([]Section{named{name: "host"}, named{name: "devices", deps: []string{"host"}}, named{name: "daemon"}}, 0)
	c.step(t0, offered{spec(1)})
	c.step(t0, tick{})
	out := c.step(t0, finished{name: "host", err: errors.New("boom")})
	if out.run != "daemon" {
		t.Errorf("a failure must block only what depends on it; next is %q", out.run)
	}
	now := t0
	for wait := retryBase; wait < retryCap; wait *= 2 {
		out = c.step(now, finished{name: "daemon"})
		if got := states(c); got["host"] != failed || got["devices"] != blocked || c.observed != 0 {
			t.Fatalf("%v, observed %d", got, c.observed)
		}
		if got := out.wake.Sub(now); got != wait {
			t.Fatalf("retry after %v, want %v", got, wait)
		}
		now = out.wake
		for out = c.step(now, tick{}); out.run != "host"; out = c.step(now, finished{name: out.run}) {
			if out.run == "" {
				t.Fatal("no retry")
			}
		}
		out = c.step(now, finished{name: "host", err: errors.New("boom")})
	}
	now = out.wake
	c.step(now, tick{})
	for out = c.step(now, finished{name: "host", err: Terminal(fmt.Errorf("never"))}); out.run != ""; {
		out = c.step(now, finished{name: out.run})
	}
	if got := states(c); got["host"] != terminally || got["devices"] != terminally || c.observed != 1 {
		t.Errorf("%v, observed %d", got, c.observed)
	}
	for range 3 {
		now = now.Add(maxInterval)
		if out := c.step(now, tick{}); out.run == "host" || out.run == "devices" {
			t.Errorf("%s is tried again after it failed for good", out.run)
		} else if out.run != "" {
			c.step(now, finished{name: out.run})
		}
	}
	c.step(now, offered{spec(2)})
	if out := c.step(now, tick{}); out.run != "host" {
		t.Errorf("a new generation starts anew; runs %q", out.run)
	}
}

// TestCoreInvariants drives the core with anything at all.
func TestCoreInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		deps := map[string][]string{"devices": {"host"}, "instances": {"devices"}, "access": {"telemetry"}}
		var sections []Section
		for _, name := range Order {
			if rapid.Bool().Draw(t, "has "+name) {
				sections = append(sections, named{name, deps[name]})
			}
		}
		c := newCore(sections, 0)
		now, generation, running := t0, int64(0), ""
		endedFor := map[string]int64{}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			before := c.observed
			var out output
			switch rapid.IntRange(0, 3).Draw(t, "input") {
			case 0:
				generation++
				s := spec(generation)
				if rapid.Bool().Draw(t, "access set") {
					s.Access = &bcdv1.AccessSpec{}
				}
				out = c.step(now, offered{s})
			case 1:
				out = c.step(now, refused{"no"})
			case 2:
				now = now.Add(time.Duration(rapid.IntRange(0, 600).Draw(t, "s")) * time.Second)
				out = c.step(now, tick{})
			case 3:
				if running == "" {
					continue
				}
				err := []error{nil, nil, errors.New("x"), Terminal(errors.New("y"))}[rapid.IntRange(0, 3).Draw(t, "end")]
				name, ranFor := running, c.runningGeneration
				running = ""
				if err == nil || IsTerminal(err) {
					endedFor[name] = ranFor
				}
				out = c.step(now, finished{name: name, err: err})
			}
			if out.run != "" {
				if running != "" {
					t.Fatalf("%s begins while %s runs", out.run, running)
				}
				running = out.run
				if out.spec.GetGeneration() != generation {
					t.Fatalf("runs for generation %d, newest is %d", out.spec.GetGeneration(), generation)
				}
				for _, d := range deps[out.run] {
					if s := c.find(d); (s.present || isSet(c.spec, d)) && s.state != converged {
						t.Fatalf("%s runs although %s is %v", out.run, d, s.state)
					}
				}
			}
			if c.observed < before || c.observed > generation {
				t.Fatalf("observed went from %d to %d at generation %d", before, c.observed, generation)
			}
			if c.observed > before {
				for name, state := range states(c) {
					if !ended(state) {
						t.Fatalf("observed %d while %s is %v", c.observed, name, state)
					}
					present := slices.ContainsFunc(sections, func(s Section) bool { return s.Name() == name })
					if present && state == converged && endedFor[name] != c.observed {
						t.Fatalf("observed %d, but %s ended for %d", c.observed, name, endedFor[name])
					}
				}
			}
		}
	})
}
