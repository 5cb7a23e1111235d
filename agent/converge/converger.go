package converge

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/durable"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	specFile = "spec.bin"
	// stateFile keeps what must not go back even when spec.bin is lost.
	stateFile = "spec-state.json"
	// maxSpec bounds a spec: 4 MiB, and its signatures.
	maxSpec     = 4 << 20
	maxSpecFile = maxSpec + 256<<10
	maxState    = 4 << 10
	// sectionTimeout bounds one run of a section, so that one that hangs does
	// not stop the others for ever.
	sectionTimeout = 10 * time.Minute
)

func protoName(name string) protoreflect.Name { return protoreflect.Name(name) }

// Verifier checks a signed spec at a server time; *intent.Roots is one.
type Verifier interface {
	NodeSpec(signed *bcdv1.Signed, now time.Time) (*bcdv1.NodeSpec, error)
}

// Options is what a Converger needs.
type Options struct {
	// NodeID is this node's; a spec for another is refused.
	NodeID   string
	Verifier Verifier
	// DataDir holds spec.bin and spec-state.json.
	DataDir string
	// Sections are those that this daemon has; the order is fixed, whatever
	// theirs.
	Sections []Section
	Clock    clock.Clock
	// ServerTime is the best known server time, for signatures.
	ServerTime func() time.Time
	Log        *slog.Logger
	// OnChange, when not nil, is told of each new status. It must not block
	// for long, nor call the Converger.
	OnChange func(*bcdv1.SpecStatus)
	// Writer is for tests that crash it; the zero value is right.
	Writer durable.Writer
}

// Converger holds the last accepted spec and brings the machine to it, with or
// without a gateway.
type Converger struct {
	o        Options
	sections map[string]Section
	wake     chan struct{} // capacity 1

	// offers are taken one at a time: verifying and writing are slow.
	offering sync.Mutex
	// saving serialises writers of spec-state.json.
	saving sync.Mutex

	mu       sync.Mutex
	core     *core
	payload  []byte // of the accepted spec
	reported *bcdv1.SpecStatus
	saved    savedState
}

// savedState is spec-state.json.
type savedState struct {
	// Floor is the newest generation ever accepted.
	Floor    int64 `json:"floor_generation"`
	Observed int64 `json:"observed_generation"`
}

// Refusal is why a spec changed nothing.
type Refusal struct {
	Generation int64
	Reason     string
	Err        error
}

func (r *Refusal) Error() string { return "spec refused: " + r.Reason }
func (r *Refusal) Unwrap() error { return r.Err }

// New reads the last spec from disk. A damaged file is logged and shows in the
// status; the generations that it had reached still count.
func New(o Options) (*Converger, error) {
	c := &Converger{o: o, sections: map[string]Section{}, wake: make(chan struct{}, 1)}
	for _, s := range o.Sections {
		if c.sections[s.Name()] != nil {
			return nil, fmt.Errorf("converge: two sections are called %q", s.Name())
		}
		c.sections[s.Name()] = s
	}
	for name := range c.sections {
		if !known(name) {
			return nil, fmt.Errorf("converge: there is no section %q; there are %v", name, Order)
		}
	}
	stateErr := c.readState()
	c.core = newCore(o.Sections, c.saved.Observed)
	spec, payload, err := c.readSpec()
	now := o.Clock.Now()
	switch err = errors.Join(stateErr, err); {
	case err != nil:
		o.Log.Error("the last spec cannot be used; waiting for the gateway to send it again", "error", err)
		c.core.step(now, refused{"the spec on disk cannot be used: " + err.Error()})
	case spec != nil:
		c.payload = payload
		c.core.step(now, offered{spec})
	}
	c.reported = c.core.status()
	return c, nil
}

func known(name string) bool {
	for _, n := range Order {
		if n == name {
			return true
		}
	}
	return false
}

// Offer takes a signed spec from the gateway. It returns nil once the spec is
// durable, or when it is the one already held; a *Refusal when it is not
// taken; another error when it could not be stored.
func (c *Converger) Offer(signed *bcdv1.Signed) error {
	c.offering.Lock()
	defer c.offering.Unlock()
	spec, err := c.judge(signed)
	var refusal *Refusal
	switch {
	case errors.As(err, &refusal):
		c.o.Log.Warn("spec refused", "generation", refusal.Generation, "error", refusal.Reason)
		c.input(refused{refusal.Reason})
		return err
	case err != nil:
		return err
	case spec == nil:
		return nil
	}
	data, err := proto.Marshal(signed)
	if err != nil {
		return fmt.Errorf("store spec: %w", err)
	}
	if err := c.o.Writer.WriteFile(c.path(specFile), data, 0o600); err != nil {
		return fmt.Errorf("store spec: %w", err)
	}
	// The floor is for the day when spec.bin is lost; until then the file is
	// its own.
	if err := c.saveState(func(s *savedState) { s.Floor = max(s.Floor, spec.GetGeneration()) }); err != nil {
		return fmt.Errorf("store spec: %w", err)
	}
	c.mu.Lock()
	c.payload = bytes.Clone(signed.GetPayload())
	c.mu.Unlock()
	c.o.Log.Info("spec accepted", "generation", spec.GetGeneration())
	c.input(offered{spec})
	c.poke()
	return nil
}

// judge gives the spec when it is new, nil when it is the one held, or a
// *Refusal.
func (c *Converger) judge(signed *bcdv1.Signed) (*bcdv1.NodeSpec, error) {
	if n := len(signed.GetPayload()); n > maxSpec {
		return nil, &Refusal{Reason: fmt.Sprintf("it has %d bytes; at most %d are allowed", n, maxSpec)}
	}
	spec, err := c.o.Verifier.NodeSpec(signed, c.o.ServerTime())
	if err != nil {
		return nil, &Refusal{Reason: err.Error(), Err: err}
	}
	generation := spec.GetGeneration()
	if spec.GetNodeId() != c.o.NodeID {
		return nil, &Refusal{Generation: generation, Reason: fmt.Sprintf("it is for node %.80q, this is %s", spec.GetNodeId(), c.o.NodeID)}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	have := max(c.saved.Floor, c.core.spec.GetGeneration())
	switch {
	case generation <= 0:
		return nil, &Refusal{Generation: generation, Reason: fmt.Sprintf("generation %d is not above 0", generation)}
	case generation < have:
		return nil, &Refusal{Generation: generation, Reason: fmt.Sprintf("generation %d is older than %d, which was accepted already", generation, have)}
	case c.core.spec != nil && generation == c.core.spec.GetGeneration():
		if bytes.Equal(c.payload, signed.GetPayload()) {
			return nil, nil
		}
		return nil, &Refusal{Generation: generation, Reason: fmt.Sprintf("generation %d was accepted already with another content; a change needs a higher one", generation)}
	}
	return spec, nil
}

// Status is a snapshot.
func (c *Converger) Status() *bcdv1.SpecStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.core.status()
}

// Spec is the accepted spec, nil for none; it must not be changed.
func (c *Converger) Spec() *bcdv1.NodeSpec {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.core.spec
}

// CheckNow makes every section due, for a local "look at it now".
func (c *Converger) CheckNow() {
	c.mu.Lock()
	now := c.o.Clock.Now()
	for _, s := range c.core.sections {
		if s.due && s.at.After(now) {
			s.at = now
		}
	}
	c.mu.Unlock()
	c.poke()
}

// Run converges until ctx ends, whose error it returns. One section runs at a
// time. Call it once.
func (c *Converger) Run(ctx context.Context) error {
	var in any = tick{}
	for {
		out := c.input(in)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if out.run != "" {
			steps, err := c.runSection(ctx, c.sections[out.run], out.spec)
			if ctx.Err() != nil {
				return ctx.Err() // its error is our own ending, not the section's
			}
			if err != nil {
				c.o.Log.Warn("section failed", "section", out.run, "generation", out.spec.GetGeneration(), "terminal", IsTerminal(err), "error", err)
			}
			in = finished{out.run, steps, err}
			continue
		}
		in = tick{}
		if err := c.wait(ctx, out.wake); err != nil {
			return err
		}
	}
}

func (c *Converger) wait(ctx context.Context, until time.Time) error {
	var timeout <-chan time.Time
	if !until.IsZero() {
		timer := c.o.Clock.NewTimer(max(until.Sub(c.o.Clock.Now()), 0))
		defer timer.Stop()
		timeout = timer.C()
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timeout:
	case <-c.wake:
	}
	return nil
}

// input feeds the core and reports what changed.
func (c *Converger) input(in any) output {
	c.mu.Lock()
	out := c.core.step(c.o.Clock.Now(), in)
	status := c.core.status()
	changed := !same(status, c.reported)
	if changed {
		c.reported = status
	}
	c.mu.Unlock()
	observed := status.GetObservedGeneration()
	if err := c.saveState(func(s *savedState) { s.Observed = max(s.Observed, observed) }); err != nil {
		c.o.Log.Error("the observed generation could not be stored", "generation", observed, "error", err)
	}
	if changed && c.o.OnChange != nil {
		c.o.OnChange(status)
	}
	return out
}

func (c *Converger) poke() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// runSection plans, applies, and plans again: a section that is still not
// there after its own steps has failed, whatever they said.
func (c *Converger) runSection(ctx context.Context, s Section, spec *bcdv1.NodeSpec) (applied int, err error) {
	ctx, cancel := context.WithTimeout(ctx, sectionTimeout)
	defer cancel()
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("section %s panicked: %v", s.Name(), r)
		}
	}()
	steps, err := s.Plan(ctx, spec)
	if err != nil {
		return 0, err
	}
	for _, step := range steps {
		c.o.Log.Info("converging", "section", s.Name(), "generation", spec.GetGeneration(), "action", step.Action, "target", step.Target)
		if err := s.Apply(ctx, step); err != nil {
			return applied, fmt.Errorf("%s %s: %w", step.Action, step.Target, err)
		}
		applied++
	}
	if applied == 0 {
		return 0, nil
	}
	left, err := s.Plan(ctx, spec)
	if err != nil {
		return applied, err
	}
	if len(left) > 0 {
		return applied, fmt.Errorf("%s %s is needed again right after it was done; something else changes it back", left[0].Action, left[0].Target)
	}
	return applied, nil
}

func (c *Converger) path(name string) string { return filepath.Join(c.o.DataDir, name) }

// readSpec gives the spec on disk, nil for none. Its signature is checked
// again, at its time of issue: the signer's certificate may have ended since,
// which does not make an accepted spec wrong.
func (c *Converger) readSpec() (*bcdv1.NodeSpec, []byte, error) {
	data, err := durable.ReadFile(c.path(specFile), maxSpecFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	signed, unverified := &bcdv1.Signed{}, &bcdv1.NodeSpec{}
	if err := proto.Unmarshal(data, signed); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", specFile, err)
	}
	if err := proto.Unmarshal(signed.GetPayload(), unverified); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", specFile, err)
	}
	spec, err := c.o.Verifier.NodeSpec(signed, time.UnixMilli(unverified.GetIssuedMs()))
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", specFile, err)
	}
	if spec.GetNodeId() != c.o.NodeID {
		return nil, nil, fmt.Errorf("%s is for node %.80q, this is %s", specFile, spec.GetNodeId(), c.o.NodeID)
	}
	return spec, signed.GetPayload(), nil
}

func (c *Converger) readState() error {
	data, err := durable.ReadFile(c.path(stateFile), maxState)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, &c.saved); err != nil {
		return fmt.Errorf("%s: %w", stateFile, err)
	}
	return nil
}

// saveState is called by Offer and by Run.
func (c *Converger) saveState(change func(*savedState)) error {
	c.saving.Lock()
	defer c.saving.Unlock()
	c.mu.Lock()
	next := c.saved
	c.mu.Unlock()
	before := next
	if change(&next); next == before {
		return nil
	}
	data, err := json.Marshal(next)
	if err != nil {
		return err
	}
	if err := c.o.Writer.WriteFile(c.path(stateFile), append(data, '\n'), 0o600); err != nil {
		return err
	}
	c.mu.Lock()
	c.saved = next
	c.mu.Unlock()
	return nil
}
