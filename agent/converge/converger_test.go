package converge

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/durable"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// plain takes payloads whose type is right and whose one signature says "ok".
type plain struct{}

func (plain) NodeSpec(s *bcdv1.Signed, _ time.Time) (*bcdv1.NodeSpec, error) {
	if len(s.GetSignatures()) != 1 || string(s.Signatures[0].Signature) != "ok" {
		return nil, errors.New("signature does not match")
	}
	out := &bcdv1.NodeSpec{}
	return out, proto.Unmarshal(s.GetPayload(), out)
}

func sign(m *bcdv1.NodeSpec) *bcdv1.Signed {
	payload, err := proto.Marshal(m)
	if err != nil {
		panic(err)
	}
	return &bcdv1.Signed{Payload: payload, Signatures: []*bcdv1.Signature{{Signature: []byte("ok")}}}
}

// disk is a section whose machine is a map: sysctl keys to values. It counts
// effects, and fails before the n-th one.
type disk struct {
	machine map[string]string
	effects atomic.Int32
	crashAt int32
}

func (d *disk) Name() string        { return "host" }
func (d *disk) DependsOn() []string { return nil }
func (d *disk) Plan(_ context.Context, spec *bcdv1.NodeSpec) (steps []Step, err error) {
	for key, value := range spec.GetHost().GetSysctl() {
		if d.machine[key] != value {
			steps = append(steps, Step{"set", key, [2]string{key, value}})
		}
	}
	for key := range d.machine {
		if _, ok := spec.GetHost().GetSysctl()[key]; !ok {
			steps = append(steps, Step{"remove", key, [2]string{key, ""}})
		}
	}
	return steps, nil
}

func (d *disk) Apply(_ context.Context, step Step) error {
	if d.effects.Add(1) == d.crashAt {
		return errors.New("power cut")
	}
	kv := step.Do.([2]string)
	if kv[1] == "" {
		delete(d.machine, kv[0])
	} else {
		d.machine[kv[0]] = kv[1]
	}
	return nil
}

func options(dir string, sections ...Section) Options {
	return Options{
		NodeID: "node_1", Verifier: plain{}, DataDir: dir, Sections: sections, Clock: clock.System(),
		ServerTime: time.Now, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
}

func hostSpec(generation int64, sysctl map[string]string) *bcdv1.NodeSpec {
	return &bcdv1.NodeSpec{NodeId: "node_1", Generation: generation, Host: &bcdv1.HostSpec{Sysctl: sysctl}}
}

// settle runs c for d of the bubble's time.
func settle(t *testing.T, c *Converger, d time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	if err := c.Run(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("run: %v", err)
	}
}

func newConverger(t *testing.T, o Options) *Converger {
	t.Helper()
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestConverge(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		d := &disk{machine: map[string]string{"old": "1"}}
		var changes atomic.Int32
		o := options(dir, d)
		o.OnChange = func(*bcdv1.SpecStatus) { changes.Add(1) }
		c := newConverger(t, o)
		if err := c.Offer(sign(hostSpec(7, map[string]string{"a": "1", "b": "2"}))); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(filepath.Join(dir, "spec.bin")); err != nil {
			t.Errorf("accepted before it is on disk: %v", err)
		}
		settle(t, c, time.Second)
		if s := c.Status(); s.GetObservedGeneration() != 7 || s.GetAcceptedGeneration() != 7 || s.GetSections()[0].GetSteps() != 3 {
			t.Errorf("%v", s)
		}
		if fmt.Sprint(d.machine) != "map[a:1 b:2]" {
			t.Errorf("%v", d.machine)
		}

		// Nothing to do is nothing done, and nothing reported.
		effects, reports := d.effects.Load(), changes.Load()
		c.CheckNow()
		settle(t, c, time.Second)
		if d.effects.Load() != effects {
			t.Error("a second pass had effects")
		}
		// The step count of the last apply went from 3 to 0.
		if got := changes.Load(); got > reports+1 {
			t.Errorf("%d reports of nothing", got-reports)
		}

		// Drift is repaired within the interval, without a gateway.
		d.machine["a"] = "changed by hand"
		settle(t, c, defaultInterval+time.Second)
		if d.machine["a"] != "1" {
			t.Error("drift is not repaired")
		}

		// So it is after a restart, from disk alone.
		d.machine = map[string]string{}
		c = newConverger(t, o)
		if c.Status().GetObservedGeneration() != 7 {
			t.Error("the observed generation went back over a restart")
		}
		settle(t, c, time.Second)
		if fmt.Sprint(d.machine) != "map[a:1 b:2]" {
			t.Errorf("after a restart: %v", d.machine)
		}
		// A spec without the part takes everything back.
		if err := c.Offer(sign(&bcdv1.NodeSpec{NodeId: "node_1", Generation: 8})); err != nil {
			t.Fatal(err)
		}
		settle(t, c, time.Second)
		if len(d.machine) != 0 || c.Status().GetObservedGeneration() != 8 {
			t.Errorf("%v, %v", d.machine, c.Status())
		}
	})
}

func TestRefusals(t *testing.T) {
	d := &disk{machine: map[string]string{}}
	c := newConverger(t, options(t.TempDir(), d))
	good := sign(hostSpec(5, map[string]string{"a": "1"}))
	if err := c.Offer(good); err != nil {
		t.Fatal(err)
	}
	forged := proto.CloneOf(good)
	forged.Signatures[0].Signature = []byte("forged")
	foreign := hostSpec(6, nil)
	foreign.NodeId = "node_2"
	for name, test := range map[string]struct {
		signed *bcdv1.Signed
		want   string
	}{
		"unsigned":        {&bcdv1.Signed{Payload: good.Payload}, "signature does not match"},
		"forged":          {forged, "signature does not match"},
		"older":           {sign(hostSpec(4, nil)), "generation 4 is older than 5"},
		"other node":      {sign(foreign), `for node "node_2", this is node_1`},
		"same, other":     {sign(hostSpec(5, nil)), "another content"},
		"generation zero": {sign(hostSpec(0, nil)), "not above 0"},
		"far too large":   {&bcdv1.Signed{Payload: make([]byte, maxSpec+1)}, "at most 4194304"},
		"nothing":         {nil, "signature does not match"},
	} {
		err := c.Offer(test.signed)
		var refusal *Refusal
		if !errors.As(err, &refusal) || !strings.Contains(refusal.Reason, test.want) {
			t.Errorf("%s: %v, want %q", name, err, test.want)
		}
		if s := c.Status(); s.GetAcceptedGeneration() != 5 || !strings.Contains(s.GetRefused(), test.want) {
			t.Errorf("%s: %v", name, s)
		}
	}
	if err := c.Offer(good); err != nil {
		t.Errorf("the spec already held: %v", err)
	}
	if err := c.Offer(sign(hostSpec(6, nil))); err != nil || c.Status().GetRefused() != "" {
		t.Errorf("%v, %v", err, c.Status())
	}
}

func TestLostSpecFile(t *testing.T) {
	for name, damage := range map[string]func(string) error{
		"gone":   os.Remove,
		"empty":  func(path string) error { return os.Truncate(path, 0) },
		"forged": func(path string) error { return os.WriteFile(path, []byte{10, 1, 'x'}, 0o600) },
		"huge":   func(path string) error { return os.Truncate(path, maxSpecFile+1) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			c := newConverger(t, options(dir, &disk{}))
			if err := c.Offer(sign(hostSpec(5, nil))); err != nil {
				t.Fatal(err)
			}
			if err := damage(filepath.Join(dir, specFile)); err != nil {
				t.Fatal(err)
			}
			c = newConverger(t, options(dir, &disk{}))
			if got := c.Status().GetAcceptedGeneration(); got != 0 {
				t.Errorf("accepted %d although it is lost: the gateway would not send it again", got)
			}
			var refusal *Refusal
			if err := c.Offer(sign(hostSpec(4, nil))); !errors.As(err, &refusal) {
				t.Errorf("an older spec after the loss: %v", err)
			}
			if err := c.Offer(sign(hostSpec(5, nil))); err != nil {
				t.Errorf("the lost spec again: %v", err)
			}
		})
	}
}

// TestCrashes cuts off the store at every step, and the section before every
// effect: afterwards the machine converges, with no effect more than needed.
func TestCrashes(t *testing.T) {
	boom := errors.New("power cut")
	for n := 1; ; n++ {
		dir := t.TempDir()
		o := options(dir, &disk{machine: map[string]string{}})
		if err := newConverger(t, o).Offer(sign(hostSpec(1, map[string]string{"a": "1"}))); err != nil {
			t.Fatal(err)
		}
		steps := 0
		o.Writer = durable.Writer{Before: func(string, string) error {
			if steps++; steps == n {
				return boom
			}
			return nil
		}}
		second := sign(hostSpec(2, map[string]string{"a": "2"}))
		offerErr := newConverger(t, o).Offer(second)
		o.Writer = durable.Writer{}
		c := newConverger(t, o)
		accepted := c.Status().GetAcceptedGeneration()
		if accepted != 1 && accepted != 2 || offerErr == nil && accepted != 2 {
			t.Fatalf("crash at step %d: holds generation %d, offer said %v", n, accepted, offerErr)
		}
		if err := c.Offer(second); err != nil || c.Status().GetAcceptedGeneration() != 2 {
			t.Fatalf("crash at step %d: the spec again: %v", n, err)
		}
		if offerErr == nil {
			if n < 10 {
				t.Errorf("only %d steps were cut", n)
			}
			break
		}
	}
	for n := int32(1); n <= 4; n++ {
		dir := t.TempDir()
		synctest.Test(t, func(t *testing.T) {
			d := &disk{machine: map[string]string{}, crashAt: n}
			c := newConverger(t, options(dir, d))
			if err := c.Offer(sign(hostSpec(1, map[string]string{"a": "1", "b": "2", "c": "3"}))); err != nil {
				t.Fatal(err)
			}
			settle(t, c, time.Minute)
			want := int32(4)
			if n > 3 {
				want = 3
			}
			if got := d.effects.Load(); got != want || len(d.machine) != 3 || c.Status().GetObservedGeneration() != 1 {
				t.Errorf("crash at effect %d: %d effects, %v, %v", n, got, d.machine, c.Status())
			}
		})
	}
}

// stubborn never gets there; panicky breaks.
type stubborn struct{ named }

func (stubborn) Plan(context.Context, *bcdv1.NodeSpec) ([]Step, error) {
	return []Step{{Action: "write", Target: "/x"}}, nil
}

type panicky struct{ named }

func (panicky) Plan(context.Context, *bcdv1.NodeSpec) ([]Step, error) { panic("oh") }

func TestBadSections(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		c := newConverger(t, options(dir, stubborn{named{name: "host"}}, panicky{named{name: "daemon"}}))
		if err := c.Offer(sign(hostSpec(1, nil))); err != nil {
			t.Fatal(err)
		}
		settle(t, c, time.Second/2)
		s := c.Status()
		if text := fmt.Sprint(s); !strings.Contains(text, "something else changes it back") || !strings.Contains(text, "panicked: oh") || s.GetObservedGeneration() != 0 {
			t.Error(text)
		}
	})
	if _, err := New(options(dir, named{name: "hots"})); err == nil {
		t.Error("a section that no spec has")
	}
	if _, err := New(options(dir, named{name: "host"}, named{name: "host"})); err == nil {
		t.Error("two of one name")
	}
}
