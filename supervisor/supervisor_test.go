package supervisor

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// fixed is a back-off without jitter, so that tests can name exact times.
var fixed = Backoff{Initial: time.Second, Max: 8 * time.Second, Jitter: -1, StableAfter: 30 * time.Second}

// world is a supervisor in a synctest bubble.
type world struct {
	t      *testing.T
	s      *Supervisor
	cancel context.CancelFunc
	ended  chan error
}

func start(t *testing.T, s *Supervisor) *world {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	w := &world{t: t, s: s, cancel: cancel, ended: make(chan error, 1)}
	go func() { w.ended <- s.Run(ctx) }()
	synctest.Wait()
	return w
}

func (w *world) stop() error {
	w.cancel()
	return <-w.ended
}

func (w *world) status(name string) Status {
	w.t.Helper()
	for _, st := range w.s.Snapshot() {
		if st.Name == name {
			return st
		}
	}
	w.t.Fatalf("no status for %q", name)
	return Status{}
}

func (w *world) want(name string, state State) {
	w.t.Helper()
	synctest.Wait()
	if st := w.status(name); st.State != state {
		w.t.Fatalf("%s is %s (%s), want %s", name, st.State, st.LastError, state)
	}
}

func add(t *testing.T, s *Supervisor, svc Service, opts ...Option) {
	t.Helper()
	if err := s.Add(svc, opts...); err != nil {
		t.Fatal(err)
	}
}

func untilDone(ctx context.Context) error { <-ctx.Done(); return nil }

func TestPolicies(t *testing.T) {
	boom := errors.New("boom")
	for _, c := range []struct {
		policy Policy
		result error
		starts int // in the first 2 s: at 0 s and, when restarted, at 1 s
		state  State
	}{
		{Always, nil, 2, Backoffs},
		{Always, boom, 2, Backoffs},
		{OnFailure, nil, 1, Done},
		{OnFailure, boom, 2, Backoffs},
		{Once, nil, 1, Done},
		{Once, boom, 1, Failed},
	} {
		name := c.policy.String() + " nil"
		if c.result != nil {
			name = c.policy.String() + " error"
		}
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := New(Options{Log: quiet()})
				add(t, s, Func("x", func(context.Context) error { return c.result }), Restart(c.policy), WithBackoff(fixed))
				w := start(t, s)
				time.Sleep(2 * time.Second)
				w.want("x", c.state)
				if st := w.status("x"); st.Starts != c.starts {
					t.Errorf("%d starts, want %d", st.Starts, c.starts)
				}
				if err := w.stop(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// A counter that is reset when a run starts is a restart storm (rook#352).
func TestBackoffGrowsAndIsForgottenOnlyAfterStability(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var starts []time.Duration
		s := New(Options{Log: quiet()})
		add(t, s, Func("x", func(ctx context.Context) error {
			starts = append(starts, time.Since(began))
			if len(starts) == 6 {
				// Longer than the back-off, shorter than stability.
				time.Sleep(29 * time.Second)
			}
			if len(starts) == 7 {
				time.Sleep(31 * time.Second)
			}
			return errors.New("boom")
		}), WithBackoff(fixed))
		w := start(t, s)
		time.Sleep(105 * time.Second)
		w.stop()
		sec := time.Second
		want := []time.Duration{0, sec, 3 * sec, 7 * sec, 15 * sec, 23 * sec, 60 * sec, 92 * sec, 94 * sec, 98 * sec}
		if !slices.Equal(starts, want) {
			t.Errorf("starts at %v, want %v", starts, want)
		}
	})
}

func TestBackoffJitterStaysWithinItsBounds(t *testing.T) {
	for _, r := range []float64{0, 0.25, 0.5, 0.999} {
		b := Backoff{Initial: time.Second, Max: time.Minute, Jitter: 0.2, Rand: func() float64 { return r }}
		for failures := range 80 {
			_, wait := b.Next(failures, 0)
			if wait < 800*time.Millisecond || wait > 72*time.Second {
				t.Errorf("rand %v, %d failures: wait %s", r, failures, wait)
			}
		}
	}
}

func TestPanicIsAFailureWithItsStack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var buf strings.Builder
		var mu sync.Mutex
		log := slog.New(slog.NewTextHandler(writerFunc(func(p []byte) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			return buf.Write(p)
		}), nil))
		s := New(Options{Log: log})
		runs := 0
		add(t, s, Func("x", func(ctx context.Context) error {
			if runs++; runs == 1 {
				var none []int
				none[runs]++
			}
			return untilDone(ctx)
		}), WithBackoff(fixed))
		w := start(t, s)
		w.want("x", Backoffs)
		if st := w.status("x"); !strings.Contains(st.LastError, "out of range") {
			t.Errorf("last error %q", st.LastError)
		}
		time.Sleep(time.Second)
		w.want("x", Running)
		w.stop()
		mu.Lock()
		defer mu.Unlock()
		if !strings.Contains(buf.String(), "supervisor_test.go") {
			t.Errorf("the log has no stack:\n%s", buf.String())
		}
	})
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestGoexitIsAFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{Log: quiet()})
		add(t, s, Func("x", func(context.Context) error { runtime.Goexit(); return nil }), Restart(OnFailure), WithBackoff(fixed))
		w := start(t, s)
		w.want("x", Backoffs)
		w.stop()
	})
}

// talos#3034: a crash-looping service blocked the reset of the machine.
func TestStopEndsABackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{Log: quiet()})
		b := fixed
		b.Initial, b.Max = time.Hour, time.Hour
		add(t, s, Func("x", func(context.Context) error { return errors.New("boom") }), WithBackoff(b))
		w := start(t, s)
		w.want("x", Backoffs)
		began := time.Now()
		if err := w.stop(); err != nil {
			t.Error(err)
		}
		if d := time.Since(began); d != 0 {
			t.Errorf("the stop took %s", d)
		}
	})
}

// talos#8423: a service was started with a context that was already cancelled.
func TestEachStartHasAContextOfItsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{Log: quiet()})
		seen := map[context.Context]bool{}
		add(t, s, Func("x", func(ctx context.Context) error {
			if ctx.Err() != nil {
				t.Error("started with a cancelled context")
			}
			if seen[ctx] {
				t.Error("started with a context of an earlier run")
			}
			seen[ctx] = true
			if len(seen) < 3 {
				return errors.New("boom")
			}
			return untilDone(ctx)
		}), WithBackoff(fixed))
		w := start(t, s)
		time.Sleep(5 * time.Second)
		w.want("x", Running)
		for range 3 {
			if err := s.Stop("x"); err != nil {
				t.Fatal(err)
			}
			w.want("x", Stopped)
			if err := s.Start("x"); err != nil {
				t.Fatal(err)
			}
			w.want("x", Running)
		}
		w.stop()
		if len(seen) != 6 {
			t.Errorf("%d runs, want 6", len(seen))
		}
	})
}

// talos PR#6746: "stopped" was published before the state was gone, so that a
// start in answer to it did nothing.
func TestStartFromTheStoppedEventStarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s *Supervisor
		restarted := false
		s = New(Options{Log: quiet(), OnChange: func(st Status) {
			if st.State == Stopped && !restarted {
				restarted = true
				if err := s.Start("x"); err != nil {
					t.Error(err)
				}
			}
		}})
		add(t, s, Func("x", untilDone))
		w := start(t, s)
		if err := s.Stop("x"); err != nil {
			t.Fatal(err)
		}
		w.want("x", Running)
		if st := w.status("x"); st.Starts != 2 {
			t.Errorf("%d starts, want 2", st.Starts)
		}
		w.stop()
	})
}

func TestOrderOfStartAndStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var story []string
		tell := func(s string) { mu.Lock(); defer mu.Unlock(); story = append(story, s) }
		slow := func(name string, readyAfter, stopTakes time.Duration) Service {
			return Func(name, func(ctx context.Context) error {
				tell(name + " starts")
				time.Sleep(readyAfter)
				NotifyReady(ctx)
				<-ctx.Done()
				time.Sleep(stopTakes)
				tell(name + " ends")
				return nil
			})
		}
		s := New(Options{Log: quiet()})
		add(t, s, slow("modules", 3*time.Second, time.Second), SignalsReady())
		add(t, s, slow("network", 2*time.Second, time.Second), SignalsReady(), Needs("modules"))
		add(t, s, slow("agent", 0, time.Second), Needs("network"))
		w := start(t, s)
		w.want("agent", Waiting)
		time.Sleep(6 * time.Second)
		w.want("agent", Running)
		if err := w.stop(); err != nil {
			t.Error(err)
		}
		want := []string{"modules starts", "network starts", "agent starts", "agent ends", "network ends", "modules ends"}
		if !slices.Equal(story, want) {
			t.Errorf("got %v\nwant %v", story, want)
		}
	})
}

func TestOnceIsReadyWhenDone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{Log: quiet()})
		add(t, s, Func("setup", func(context.Context) error { time.Sleep(time.Second); return nil }), Restart(Once))
		add(t, s, Func("after", untilDone), Needs("setup"))
		w := start(t, s)
		w.want("after", Waiting)
		time.Sleep(time.Second)
		w.want("after", Running)
		w.want("setup", Done)
		w.stop()
	})
}

func TestHealth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var sick bool
		var mu sync.Mutex
		check := Check{Every: time.Second, Failures: 3, Probe: func(context.Context) error {
			mu.Lock()
			defer mu.Unlock()
			if sick {
				return errors.New("no answer")
			}
			return nil
		}}
		s := New(Options{Log: quiet()})
		add(t, s, Func("x", untilDone), Health(check), WithBackoff(fixed))
		w := start(t, s)
		w.want("x", Running)
		if !w.status("x").Ready {
			t.Error("not ready after its first good check")
		}
		mu.Lock()
		sick = true
		mu.Unlock()
		time.Sleep(2500 * time.Millisecond)
		w.want("x", Running) // two failures are not three
		time.Sleep(time.Second)
		w.want("x", Backoffs)
		if st := w.status("x"); !strings.Contains(st.LastError, "no answer") || st.Ready {
			t.Errorf("%+v", st)
		}
		mu.Lock()
		sick = false
		mu.Unlock()
		time.Sleep(2 * time.Second)
		w.want("x", Running)
		w.stop()
	})
}

func TestAPanickingHealthCheckIsAFailedCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{Log: quiet()})
		add(t, s, Func("x", untilDone), WithBackoff(fixed),
			Health(Check{Every: time.Second, Failures: 1, Probe: func(context.Context) error { panic("probe") }}))
		w := start(t, s)
		w.want("x", Backoffs)
		w.stop()
	})
}

// A run that is unhealthy and ignores its context must not get a twin; the
// supervisor becomes unhealthy instead, and the watchdog does the rest.
func TestUnhealthyAndStuckMakesTheSupervisorUnhealthy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		s := New(Options{Log: quiet()})
		add(t, s, Func("x", func(context.Context) error { <-release; return nil }), WithBackoff(fixed),
			StopWithin(5*time.Second),
			Health(Check{Every: time.Second, Failures: 1, Probe: func(context.Context) error { return errors.New("sick") }}))
		w := start(t, s)
		w.want("x", Stopping)
		if err := s.Healthy(); err != nil {
			t.Error(err)
		}
		time.Sleep(6 * time.Second)
		w.want("x", Stuck)
		if err := s.Healthy(); err == nil || !strings.Contains(err.Error(), "x") {
			t.Errorf("healthy: %v", err)
		}
		if st := w.status("x"); st.Starts != 1 {
			t.Errorf("%d starts", st.Starts)
		}
		close(release)
		w.want("x", Backoffs)
		if err := s.Healthy(); err != nil {
			t.Error(err)
		}
		w.stop()
	})
}

// talos#14404: the last wait of a shutdown had no deadline.
func TestStopIsBoundedAndNamesWhoDidNotStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		s := New(Options{Log: quiet()})
		add(t, s, Func("good", untilDone))
		add(t, s, Func("deaf", func(context.Context) error { <-release; return nil }), StopWithin(7*time.Second), Needs("good"))
		w := start(t, s)
		began := time.Now()
		err := w.stop()
		if err == nil || !strings.Contains(err.Error(), `"deaf"`) || strings.Contains(err.Error(), `"good"`) {
			t.Errorf("error %v", err)
		}
		if d := time.Since(began); d != 7*time.Second {
			t.Errorf("took %s", d)
		}
		w.want("good", Stopped)
		w.want("deaf", Stuck)
		close(release)
		w.want("deaf", Stopped)
	})
}

func TestAStuckServiceIsNotStartedTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		s := New(Options{Log: quiet()})
		add(t, s, Func("deaf", func(context.Context) error { <-release; return nil }), StopWithin(time.Second))
		w := start(t, s)
		if err := s.Stop("deaf"); err == nil {
			t.Error("no error")
		}
		if err := s.Start("deaf"); err == nil {
			t.Error("a second run was started beside the first")
		}
		close(release)
		w.want("deaf", Stopped)
		if err := s.Start("deaf"); err != nil {
			t.Error(err)
		}
		w.stop()
	})
}

func TestAddRefusals(t *testing.T) {
	s := New(Options{Log: quiet()})
	add(t, s, Func("a", untilDone))
	for _, c := range []struct {
		svc  Service
		opts []Option
		want string
	}{
		{Func("a", untilDone), nil, "taken"},
		{Func("", untilDone), nil, "no name"},
		{Func("b", untilDone), []Option{Needs("z")}, `needs "z"`},
		{Func("b", untilDone), []Option{Needs("b")}, `needs "b"`},
	} {
		if err := s.Add(c.svc, c.opts...); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want something with %q", c.svc.Name(), err, c.want)
		}
	}
}

func TestAddWhileRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{Log: quiet()})
		w := start(t, s)
		add(t, s, Func("late", untilDone))
		w.want("late", Running)
		w.stop()
		w.want("late", Stopped)
		if err := s.Add(Func("later", untilDone)); err == nil {
			t.Error("added to a supervisor that has ended")
		}
	})
}
