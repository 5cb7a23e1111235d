package converge

import (
	"time"

	"google.golang.org/protobuf/proto"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Order is the fixed order of the sections.
var Order = []string{"host", "devices", "instances", "access", "telemetry", "daemon"}

const (
	retryBase = time.Second
	retryCap  = 5 * time.Minute
	// defaultInterval is the time between drift checks; the spec may ask for
	// another between the two bounds.
	defaultInterval = 300 * time.Second
	minInterval     = 10 * time.Second
	maxInterval     = 24 * time.Hour
)

// isSet says whether spec has the part of that name.
func isSet(spec *bcdv1.NodeSpec, name string) bool {
	m := spec.ProtoReflect()
	field := m.Descriptor().Fields().ByName(protoName(name))
	return field != nil && m.Has(field)
}

// section is what the core knows of one.
type section struct {
	name      string
	dependsOn []string
	// present: this daemon has the section.
	present bool

	state   bcdv1.SectionState
	message string
	time    time.Time
	steps   int
	// due: it is to run, at or after the time.
	due      bool
	at       time.Time
	failures int
}

// ended says whether a state is an end for a generation.
func ended(s bcdv1.SectionState) bool {
	switch s {
	case bcdv1.SectionState_SECTION_STATE_CONVERGED, bcdv1.SectionState_SECTION_STATE_FAILED_TERMINALLY, bcdv1.SectionState_SECTION_STATE_UNSUPPORTED:
		return true
	}
	return false
}

// core decides what runs when. It is a step function: no goroutine, no clock,
// no I/O.
type core struct {
	sections []*section
	spec     *bcdv1.NodeSpec
	// observed only grows.
	observed int64
	refused  string
	// running is the section that runs, and the generation it runs for.
	running           string
	runningGeneration int64
}

// Inputs of step.
type (
	// offered is a spec that was verified and is on disk.
	offered struct{ spec *bcdv1.NodeSpec }
	// refused is why a spec was not taken.
	refused struct{ reason string }
	// finished is the end of a run.
	finished struct {
		name  string
		steps int
		err   error
	}
	// tick is a look at the clock.
	tick struct{}
)

// output is what the shell does next.
type output struct {
	// run names the section to run now for spec; "" for none.
	run  string
	spec *bcdv1.NodeSpec
	// wake is when to tick again; zero for never.
	wake time.Time
}

func newCore(sections []Section, observed int64) *core {
	c := &core{observed: observed}
	have := map[string]Section{}
	for _, s := range sections {
		have[s.Name()] = s
	}
	for _, name := range Order {
		s := &section{name: name}
		if impl, ok := have[name]; ok {
			s.present, s.dependsOn = true, impl.DependsOn()
		}
		c.sections = append(c.sections, s)
	}
	return c
}

// step takes one input. Only a finished or a tick hands out a run: they come
// from the loop that can run it.
func (c *core) step(now time.Time, in any) output {
	switch in := in.(type) {
	case offered:
		c.refused = ""
		c.take(now, in.spec)
		return output{}
	case refused:
		c.refused = in.reason
		return output{}
	case finished:
		c.finish(now, in)
	}
	return c.schedule(now)
}

func (c *core) take(now time.Time, spec *bcdv1.NodeSpec) {
	c.spec = spec
	for _, s := range c.sections {
		s.failures, s.steps, s.message, s.time = 0, 0, "", now
		s.due, s.at = s.present, now
		switch {
		case s.present:
			s.state = bcdv1.SectionState_SECTION_STATE_PROGRESSING
		case isSet(spec, s.name):
			s.state, s.message = bcdv1.SectionState_SECTION_STATE_UNSUPPORTED, "this version of bcd has no section "+s.name
		default:
			s.state = bcdv1.SectionState_SECTION_STATE_UNSPECIFIED
		}
	}
}

func (c *core) finish(now time.Time, in finished) {
	stale := c.runningGeneration != c.spec.GetGeneration()
	c.running = ""
	s := c.find(in.name)
	if s == nil || stale {
		return // the section is due again, for the newer spec
	}
	s.time, s.steps = now, in.steps
	switch {
	case in.err == nil:
		s.state, s.message, s.failures = bcdv1.SectionState_SECTION_STATE_CONVERGED, "", 0
		s.due, s.at = true, now.Add(interval(c.spec))
	case IsTerminal(in.err):
		s.state, s.message, s.due = bcdv1.SectionState_SECTION_STATE_FAILED_TERMINALLY, in.err.Error(), false
	default:
		s.state, s.message = bcdv1.SectionState_SECTION_STATE_FAILED, in.err.Error()
		s.due, s.at = true, now.Add(min(retryCap, retryBase<<min(s.failures, 16)))
		s.failures++
	}
}

// schedule settles what needs no run, and picks what runs next.
func (c *core) schedule(now time.Time) (out output) {
	if c.spec == nil {
		return out
	}
	for _, s := range c.sections {
		if !s.due {
			continue
		}
		if s.at.After(now) {
			if out.wake.IsZero() || s.at.Before(out.wake) {
				out.wake = s.at
			}
			continue
		}
		blocker, state := c.blocker(s)
		switch {
		case blocker == "":
			if c.running == "" {
				c.running, c.runningGeneration = s.name, c.spec.GetGeneration()
				out.run, out.spec = s.name, c.spec
				if !ended(s.state) {
					s.state = bcdv1.SectionState_SECTION_STATE_PROGRESSING
				}
			}
		case ended(state):
			// It cannot run for this generation any more.
			s.set(now, bcdv1.SectionState_SECTION_STATE_FAILED_TERMINALLY, "not tried: it needs section "+blocker+", which has failed for good")
			s.due = false
		default:
			s.set(now, bcdv1.SectionState_SECTION_STATE_BLOCKED, "waits for section "+blocker)
		}
	}
	if out.run != "" {
		out.wake = time.Time{} // the end of the run asks again
	}
	all := true
	for _, s := range c.sections {
		all = all && (ended(s.state) || !s.present && s.state == bcdv1.SectionState_SECTION_STATE_UNSPECIFIED)
	}
	if all {
		c.observed = max(c.observed, c.spec.GetGeneration())
	}
	return out
}

func (s *section) set(now time.Time, state bcdv1.SectionState, message string) {
	if s.state != state || s.message != message {
		s.state, s.message, s.time = state, message, now
	}
}

// blocker gives the first section that s needs and that has not converged, and
// that one's state.
func (c *core) blocker(s *section) (string, bcdv1.SectionState) {
	for _, name := range s.dependsOn {
		d := c.find(name)
		if d == nil || d.state == bcdv1.SectionState_SECTION_STATE_CONVERGED {
			continue
		}
		if !d.present && !isSet(c.spec, name) {
			continue // nothing is asked of it
		}
		return name, d.state
	}
	return "", 0
}

func (c *core) find(name string) *section {
	for _, s := range c.sections {
		if s.name == name {
			return s
		}
	}
	return nil
}

func (c *core) status() *bcdv1.SpecStatus {
	out := &bcdv1.SpecStatus{AcceptedGeneration: c.spec.GetGeneration(), ObservedGeneration: c.observed, Refused: c.refused}
	for _, s := range c.sections {
		if s.state == bcdv1.SectionState_SECTION_STATE_UNSPECIFIED {
			continue
		}
		out.Sections = append(out.Sections, &bcdv1.SectionStatus{
			Name: s.name, State: s.state, Message: s.message, TimeMs: s.time.UnixMilli(), Steps: int32(s.steps),
		})
	}
	return out
}

// interval is how often drift is looked for.
func interval(spec *bcdv1.NodeSpec) time.Duration {
	seconds := spec.GetDaemon().GetConvergeIntervalSeconds()
	if seconds <= 0 {
		return defaultInterval
	}
	return min(max(time.Duration(seconds)*time.Second, minInterval), maxInterval)
}

// same says whether two statuses say the same, times and step counts of quiet
// drift checks aside: only then there is nothing to report.
func same(a, b *bcdv1.SpecStatus) bool {
	strip := func(s *bcdv1.SpecStatus) *bcdv1.SpecStatus {
		out := proto.CloneOf(s)
		for _, section := range out.GetSections() {
			section.TimeMs = 0
		}
		return out
	}
	return proto.Equal(strip(a), strip(b))
}
