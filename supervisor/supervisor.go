package supervisor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"
)

// DefaultStopWithin is how long a service has to return once its context is
// cancelled. Long enough to end a request in flight, short enough that a stack
// of services stops within the time pid 1 gives the whole process.
const DefaultStopWithin = 5 * time.Second

// Options for [New].
type Options struct {
	// Log gets a line for each start, failure and stop. Nil means slog.Default.
	Log *slog.Logger
	// OnChange, if not nil, is called with each new status, after it can be
	// seen in a snapshot and without a lock held. It must not block for long:
	// it runs on the service's own goroutine.
	OnChange func(Status)
}

// Supervisor runs services. Make one with [New], give it services with Add,
// and call Run once.
type Supervisor struct {
	log      *slog.Logger
	onChange func(Status)

	mu      sync.Mutex
	units   []*unit
	byName  map[string]*unit
	running context.Context // set while Run runs
	ended   bool
}

// New makes an empty supervisor.
func New(o Options) *Supervisor {
	s := &Supervisor{log: o.Log, onChange: o.OnChange, byName: map[string]*unit{}}
	if s.log == nil {
		s.log = slog.Default()
	}
	if s.onChange == nil {
		s.onChange = func(Status) {}
	}
	return s
}

// Option is one decoration of a service given to [Supervisor.Add].
type Option func(*unit)

// Restart sets the policy. The default is [Always].
func Restart(p Policy) Option { return func(u *unit) { u.policy = p } }

// WithBackoff sets the waits between failures.
func WithBackoff(b Backoff) Option { return func(u *unit) { u.backoff = b } }

// Health adds a health check; the service counts as ready once it first passes.
func Health(c Check) Option {
	return func(u *unit) { u.check, u.signalsReady = &c, true }
}

// SignalsReady says that the service calls [NotifyReady]; a service with a method
// SignalsReady() says so itself. Without either (and without [Health]) a service
// is ready as soon as it has been started, or, with policy [Once], when it has
// returned nil.
func SignalsReady() Option { return func(u *unit) { u.signalsReady = true } }

// Needs names services that must have been ready once before this one is
// started, and that are stopped only after it. They must have been added before.
func Needs(names ...string) Option {
	return func(u *unit) { u.needs = append(u.needs, names...) }
}

// StopWithin sets how long a run has to return after its cancellation.
func StopWithin(d time.Duration) Option { return func(u *unit) { u.stopWithin = d } }

// Add gives the supervisor a service. While Run runs, it is started at once.
// It is an error to add a name twice, to need a name that is not there (which
// also rules out cycles), or to add after Run has ended.
func (s *Supervisor) Add(svc Service, opts ...Option) error {
	u := &unit{sup: s, name: svc.Name(), stopWithin: DefaultStopWithin}
	for _, o := range opts {
		o(u)
	}
	if _, ok := svc.(interface{ SignalsReady() }); ok {
		u.signalsReady = true
	}
	u.svc = Recovered(svc)
	if u.check != nil {
		u.svc = Checked(u.svc, *u.check)
	}
	u.status = Status{Name: u.name, State: Stopped, Since: time.Now(), Policy: u.policy.String(), Needs: slices.Clone(u.needs)}
	u.ready = make(chan struct{})

	s.mu.Lock()
	defer s.mu.Unlock()
	if u.name == "" {
		return errors.New("add service: it has no name")
	}
	if s.ended {
		return fmt.Errorf("add service %q: the supervisor has ended", u.name)
	}
	if s.byName[u.name] != nil {
		return fmt.Errorf("add service %q: the name is taken", u.name)
	}
	for _, n := range u.needs {
		d := s.byName[n]
		if d == nil {
			return fmt.Errorf("add service %q: it needs %q, which has not been added", u.name, n)
		}
		u.deps = append(u.deps, d)
	}
	s.units = append(s.units, u)
	s.byName[u.name] = u
	if s.running != nil {
		u.startLocked(s.running)
	}
	return nil
}

// Run starts every service, waits for ctx to be cancelled, and stops them, each
// after those that need it and within its own deadline. The error names the
// services that did not stop; it is nil when all did.
func (s *Supervisor) Run(ctx context.Context) error {
	s.mu.Lock()
	if s.running != nil || s.ended {
		s.mu.Unlock()
		return errors.New("run supervisor: it has been run before")
	}
	// The loops are stopped one by one, in order, so they must not all see the
	// end of ctx at once.
	s.running = context.WithoutCancel(ctx)
	for _, u := range s.units {
		u.startLocked(s.running)
	}
	s.mu.Unlock()

	<-ctx.Done()

	s.mu.Lock()
	s.running, s.ended = nil, true
	units := slices.Clone(s.units)
	s.mu.Unlock()
	return stopAll(units)
}

// stopAll stops units, all at once but each after those that need it.
func stopAll(units []*unit) error {
	done := map[*unit]chan struct{}{}
	dependents := map[*unit][]*unit{}
	for _, u := range units {
		done[u] = make(chan struct{})
		for _, d := range u.deps {
			dependents[d] = append(dependents[d], u)
		}
	}
	errs := make([]error, len(units))
	var wg sync.WaitGroup
	for i, u := range units {
		wg.Go(func() {
			defer close(done[u])
			for _, d := range dependents[u] {
				<-done[d]
			}
			errs[i] = u.stop()
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Start starts a stopped, done or failed service. It does nothing when the
// service is already started, and fails for an unknown name, when Run is not
// running, and for a service whose last run is stuck.
func (s *Supervisor) Start(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	u := s.byName[name]
	if u == nil {
		return fmt.Errorf("start service %q: there is none of that name", name)
	}
	if s.running == nil {
		return fmt.Errorf("start service %q: the supervisor is not running", name)
	}
	if u.orphan != nil {
		return fmt.Errorf("start service %q: its last run has not ended yet", name)
	}
	u.startLocked(s.running)
	return nil
}

// Stop stops a service and waits for it, within its deadline. A back-off in
// progress ends at once. Services that need it are left alone.
func (s *Supervisor) Stop(name string) error {
	s.mu.Lock()
	u := s.byName[name]
	s.mu.Unlock()
	if u == nil {
		return fmt.Errorf("stop service %q: there is none of that name", name)
	}
	return u.stop()
}

// Snapshot gives the status of every service, in the order they were added.
func (s *Supervisor) Snapshot() []Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Status, len(s.units))
	for i, u := range s.units {
		out[i] = u.status
	}
	return out
}

// Healthy is nil unless a run is stuck: only then can nothing inside this
// process mend it. A service in back-off is not unhealthy; a gateway that
// cannot be reached must not reset the machine.
func (s *Supervisor) Healthy() error {
	var stuck []string
	for _, st := range s.Snapshot() {
		if st.State == Stuck {
			stuck = append(stuck, st.Name)
		}
	}
	if len(stuck) > 0 {
		return fmt.Errorf("stuck: %s", strings.Join(stuck, ", "))
	}
	return nil
}
