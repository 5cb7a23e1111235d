package supervisor

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"
)

// Service is one thing that runs. Run blocks until the work is done or ctx is
// cancelled; it may be called again after it has returned, each time with a new
// context. Returning nil means done, an error means failed; after ctx is
// cancelled either is a clean stop.
type Service interface {
	Name() string
	Run(ctx context.Context) error
}

// Func makes a Service of a name and a function.
func Func(name string, run func(context.Context) error) Service {
	return funcService{name, run}
}

type funcService struct {
	name string
	run  func(context.Context) error
}

func (f funcService) Name() string                  { return f.name }
func (f funcService) Run(ctx context.Context) error { return f.run(ctx) }

// Policy says what happens when a run has ended by itself.
type Policy int

const (
	// Always starts the service again, whatever Run returned.
	Always Policy = iota
	// OnFailure starts it again after an error; nil means done.
	OnFailure
	// Once never starts it again; an error is its final state.
	Once
)

func (p Policy) String() string {
	switch p {
	case Always:
		return "always"
	case OnFailure:
		return "on-failure"
	case Once:
		return "once"
	}
	return fmt.Sprintf("policy(%d)", int(p))
}

// PanicError is the error of a run that panicked.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// Unwrap gives the panic's value where that was an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// Recovered decorates s: a panic in Run is returned as a [*PanicError]. It
// cannot help where s starts goroutines of its own: those take the process with
// them, which is why pid 1 is another process.
func Recovered(s Service) Service {
	return Func(s.Name(), func(ctx context.Context) (err error) {
		defer func() {
			if v := recover(); v != nil {
				err = &PanicError{Value: v, Stack: debug.Stack()}
			}
		}()
		return s.Run(ctx)
	})
}

// Check is a health check: nil means healthy. It is given at most its period to
// answer.
type Check struct {
	// Probe is called every Every while the service runs.
	Probe func(ctx context.Context) error
	// Every is the period. Zero means 10 s.
	Every time.Duration
	// Failures in a row end the run. Zero means 3: one lost probe on a machine
	// under load is not a fault.
	Failures int
}

// UnhealthyError is the error of a run that its health check ended.
type UnhealthyError struct {
	Failures int
	Err      error
}

func (e *UnhealthyError) Error() string {
	return fmt.Sprintf("unhealthy: %d checks in a row failed, the last with: %v", e.Failures, e.Err)
}

func (e *UnhealthyError) Unwrap() error { return e.Err }

// Checked decorates s: while it runs, c is asked, and a run that fails its
// checks is cancelled and, once it has returned, ends with an
// [*UnhealthyError]. The first check that passes makes the run ready (see
// [NotifyReady]).
func Checked(s Service, c Check) Service {
	if c.Every <= 0 {
		c.Every = 10 * time.Second
	}
	if c.Failures <= 0 {
		c.Failures = 3
	}
	return Func(s.Name(), func(ctx context.Context) error {
		runCtx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		stopped := make(chan struct{})
		go func() {
			defer close(stopped)
			if err := watch(runCtx, c); err != nil {
				hooksOf(ctx).ending(err)
				cancel(err)
			}
		}()
		err := s.Run(runCtx)
		cancel(nil)
		<-stopped
		var unhealthy *UnhealthyError
		if ctx.Err() == nil && errors.As(context.Cause(runCtx), &unhealthy) {
			return unhealthy
		}
		return err
	})
}

// watch asks c until ctx ends (nil) or too many checks in a row failed.
func watch(ctx context.Context, c Check) error {
	ticker := time.NewTicker(c.Every)
	defer ticker.Stop()
	failures := 0
	for {
		err := probe(ctx, c)
		if ctx.Err() != nil {
			return nil
		}
		if err == nil {
			failures = 0
			NotifyReady(ctx)
		} else if failures++; failures >= c.Failures {
			return &UnhealthyError{Failures: failures, Err: err}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

func probe(ctx context.Context, c Check) (err error) {
	ctx, cancel := context.WithTimeout(ctx, c.Every)
	defer cancel()
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return c.Probe(ctx)
}

// NotifyReady tells the supervisor, from inside Run, that the service now does
// its work, and that services which need it may start. Only services added with
// [SignalsReady] or [Health] need it; outside a supervisor it does nothing.
func NotifyReady(ctx context.Context) { hooksOf(ctx).ready() }

// hooks are what a run may tell the supervisor that started it.
type hooks struct {
	ready  func()
	ending func(error) // the run was cancelled from within and must end soon
}

type hooksKey struct{}

func withHooks(ctx context.Context, h hooks) context.Context {
	return context.WithValue(ctx, hooksKey{}, h)
}

func hooksOf(ctx context.Context) hooks {
	if h, ok := ctx.Value(hooksKey{}).(hooks); ok {
		return h
	}
	return hooks{ready: func() {}, ending: func(error) {}}
}
