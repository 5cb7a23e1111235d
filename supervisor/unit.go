package supervisor

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// State is where a service stands.
type State string

const (
	Waiting  State = "waiting"  // for the services it needs
	Running  State = "running"  //
	Backoffs State = "back-off" // it failed and will be started again
	Stopping State = "stopping" // its context is cancelled
	Stopped  State = "stopped"  // not started, or stopped on request
	Done     State = "done"     // returned nil and its policy says that is all
	Failed   State = "failed"   // returned an error and its policy says that is all
	Stuck    State = "stuck"    // ignores its cancelled context past the deadline
)

// Status is a copy of what is known about a service, for people and monitors.
type Status struct {
	Name      string    `json:"name"`
	State     State     `json:"state"`
	Ready     bool      `json:"ready"`
	Since     time.Time `json:"since"`      // when State began
	NextStart time.Time `json:"next_start"` // when in back-off, else zero
	Starts    int       `json:"starts"`
	Failures  int       `json:"failures"` // since it was last stable
	LastError string    `json:"last_error,omitempty"`
	Policy    string    `json:"policy"`
	Needs     []string  `json:"needs,omitempty"`
}

// unit is a service with its decorations and its loop.
type unit struct {
	sup          *Supervisor
	name         string
	svc          Service
	policy       Policy
	backoff      Backoff
	check        *Check
	signalsReady bool
	needs        []string
	deps         []*unit
	stopWithin   time.Duration

	// Below: guarded by sup.mu.
	status Status
	ready  chan struct{}      // closed once ready since the loop began
	cancel context.CancelFunc // ends the loop; nil when there is none
	loop   chan struct{}      // closed when the loop has ended
	orphan chan struct{}      // a stuck run left behind; nil when there is none
}

// errGoexit is the error of a run whose goroutine ended by runtime.Goexit, as a
// stray t.FailNow or a library does. It must not look like a clean end.
var errGoexit = errors.New("run ended by runtime.Goexit")

func (u *unit) startLocked(parent context.Context) {
	if u.cancel != nil || u.orphan != nil {
		return
	}
	ctx, cancel := context.WithCancel(parent)
	u.cancel, u.loop = cancel, make(chan struct{})
	u.ready = make(chan struct{})
	u.status.Ready, u.status.Failures = false, 0
	go u.run(ctx)
}

// stop ends the loop and waits for it. The loop itself keeps the deadline.
func (u *unit) stop() error {
	u.sup.mu.Lock()
	cancel, loop := u.cancel, u.loop
	u.sup.mu.Unlock()
	if cancel != nil {
		cancel()
		<-loop
	}
	u.sup.mu.Lock()
	defer u.sup.mu.Unlock()
	if u.orphan != nil {
		return fmt.Errorf("stop service %q: it did not end within %s", u.name, u.stopWithin)
	}
	return nil
}

// set changes the status and publishes it.
func (u *unit) set(change func(*Status)) {
	u.sup.mu.Lock()
	before := u.status.State
	change(&u.status)
	if u.status.State != before {
		u.status.Since = time.Now()
	}
	if u.status.State != Backoffs {
		u.status.NextStart = time.Time{}
	}
	st := u.status
	u.sup.mu.Unlock()
	u.sup.onChange(st)
}

func (u *unit) state(s State) { u.set(func(st *Status) { st.State = s }) }

// markReady is idempotent; it publishes only the change.
func (u *unit) markReady() {
	u.sup.mu.Lock()
	if u.status.Ready {
		u.sup.mu.Unlock()
		return
	}
	u.status.Ready = true
	select {
	case <-u.ready: // it was ready once before, in an earlier run of this loop
	default:
		close(u.ready)
	}
	st := u.status
	u.sup.mu.Unlock()
	u.sup.onChange(st)
}

// run is the loop: wait for what is needed, then run and restart by policy.
func (u *unit) run(ctx context.Context) {
	log := u.sup.log.With("service", u.name)
	final := u.cycle(ctx)

	// The loop is gone before its last state is published: whoever hears
	// "stopped" may start it again in the same breath.
	u.sup.mu.Lock()
	u.cancel()
	u.cancel = nil
	loop := u.loop
	if u.orphan != nil {
		final = Stuck
	}
	u.sup.mu.Unlock()
	u.set(func(st *Status) {
		st.State = final
		st.Ready = st.Ready && final == Done
	})
	if final == Stuck {
		log.Error("service did not stop, left behind", "within", u.stopWithin)
	}
	close(loop)
}

// cycle runs the service until its policy or ctx ends it, and says in which state.
func (u *unit) cycle(ctx context.Context) State {
	log := u.sup.log.With("service", u.name)
	for _, d := range u.deps {
		u.sup.mu.Lock()
		ready := d.ready
		u.sup.mu.Unlock()
		select {
		case <-ready:
			continue
		default:
		}
		u.state(Waiting)
		select {
		case <-ready:
		case <-ctx.Done():
			return Stopped
		}
	}
	failures := 0
	for ctx.Err() == nil {
		began := time.Now()
		err := u.once(ctx)
		if ctx.Err() != nil {
			return Stopped
		}
		lasted := time.Since(began)
		if err == nil && u.policy == Once && !u.signalsReady {
			u.markReady()
		}
		if err == nil && u.policy != Always {
			return Done
		}
		var wait time.Duration
		failures, wait = u.backoff.Next(failures, lasted)
		u.report(err, lasted, wait)
		if u.policy == Once {
			return Failed
		}
		u.set(func(st *Status) {
			st.State, st.Ready, st.Failures = Backoffs, false, failures
			st.NextStart = time.Now().Add(wait)
		})
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return Stopped
		case <-timer.C:
		}
		log.Debug("service starts again", "failures", failures)
	}
	return Stopped
}

// report logs how a run ended and keeps it for the snapshot.
func (u *unit) report(err error, lasted, wait time.Duration) {
	log := u.sup.log.With("service", u.name, "lasted", lasted.Round(time.Millisecond))
	if u.policy != Once {
		log = log.With("again_in", wait.Round(time.Millisecond))
	}
	text := "ended"
	var p *PanicError
	switch {
	case errors.As(err, &p):
		text = err.Error()
		log.Error("service panicked", "err", err, "stack", string(p.Stack))
	case err != nil:
		text = err.Error()
		log.Warn("service failed", "err", err)
	default:
		log.Info("service ended")
	}
	u.set(func(st *Status) { st.LastError = text })
}

// once makes one run and returns its error. It returns before the run has
// ended only when ctx was cancelled and the run outlived its deadline; the run
// is then the unit's orphan.
func (u *unit) once(ctx context.Context) error {
	runCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	ending := make(chan error, 1)
	runCtx = withHooks(runCtx, hooks{
		ready: u.markReady,
		ending: func(err error) {
			select {
			case ending <- err:
			default:
			}
		},
	})

	result := errGoexit
	ended := make(chan struct{})
	u.set(func(st *Status) { st.State = Running; st.Starts++ })
	go func() {
		defer close(ended)
		result = u.svc.Run(runCtx)
	}()
	if !u.signalsReady && u.policy != Once {
		u.markReady()
	}

	var overdue <-chan time.Time
	stopping := ctx.Done()
	for {
		select {
		case <-ended:
			return result
		case err := <-ending:
			u.set(func(st *Status) { st.State, st.Ready, st.LastError = Stopping, false, err.Error() })
			if overdue == nil {
				overdue = time.After(u.stopWithin)
			}
		case <-stopping:
			stopping = nil
			u.state(Stopping)
			overdue = time.After(u.stopWithin) // also when it was stuck: a stop gets its full time
		case <-overdue:
			overdue = nil
			if ctx.Err() == nil {
				// Unhealthy and does not end: starting another beside it would
				// make two. Say so and wait; Healthy now fails.
				u.state(Stuck)
				u.sup.log.Error("service is unhealthy and does not end", "service", u.name, "within", u.stopWithin)
				continue
			}
			u.abandon(ended)
			return context.Cause(ctx)
		}
	}
}

// abandon leaves a run behind and notices when it ends after all.
func (u *unit) abandon(ended chan struct{}) {
	u.sup.mu.Lock()
	u.orphan = ended
	u.sup.mu.Unlock()
	go func() {
		<-ended
		u.sup.mu.Lock()
		loop := u.loop
		u.sup.mu.Unlock()
		<-loop // the loop publishes Stuck first
		u.sup.mu.Lock()
		u.orphan = nil
		u.sup.mu.Unlock()
		u.state(Stopped)
	}()
}
