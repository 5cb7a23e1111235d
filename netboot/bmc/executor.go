package bmc

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/dispatch"
	"github.com/better-compute/bcd/agent/secret"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// The kinds of this package.
const (
	PowerKind      = "bmc.power"
	BootDeviceKind = "bmc.boot-device"
	InventoryKind  = "bmc.inventory"
	HTTPProxyKind  = "site.httpProxy"
)

const (
	// maxRun bounds a command whatever its deadline: an operating system that
	// shuts down takes minutes, and the lane has two workers.
	maxRun = 10 * time.Minute
	// leaveTime is for ending the session with the BMC once the command's own
	// time is up: few BMCs have more than a dozen sessions.
	leaveTime = 5 * time.Second
)

// Secrets fetches what a command refers to; *secret.Requester is the real one.
type Secrets interface {
	Fetch(ctx context.Context, reference, commandID string) (*secret.Value, error)
}

// Options are what the executors need beside the command.
type Options struct {
	// Networks are the addresses that may be reached; none is none.
	Networks []netip.Prefix
	Secrets  Secrets
	// Registry gets to know the passwords, so that the daemon's log redactor
	// finds them too. May be nil.
	Registry *secret.Registry
	// Clock is for waiting between two looks at a BMC; nil is the system's.
	Clock clock.Clock
	// Now is server time, which deadlines are judged by.
	Now func() time.Time
	// Resolve gives the addresses of a name; nil is the system's resolver.
	Resolve func(ctx context.Context, name string) ([]netip.Addr, error)
}

// Executors returns bmc.power, bmc.boot-device, bmc.inventory and
// site.httpProxy.
func Executors(o Options) ([]dispatch.Executor, error) {
	if o.Secrets == nil || o.Now == nil {
		return nil, errors.New("BMC executors need secrets and server time")
	}
	if o.Registry == nil {
		o.Registry = new(secret.Registry)
	}
	if o.Clock == nil {
		o.Clock = clock.System()
	}
	if o.Resolve == nil {
		o.Resolve = systemResolver
	}
	s := &site{o: o, ipmiAskTime: ipmiAskTime}
	return []dispatch.Executor{
		&executor{site: s, kind: PowerKind, run: s.power},
		&executor{site: s, kind: BootDeviceKind, run: s.bootDevice},
		&executor{site: s, kind: InventoryKind, run: s.inventory},
		&executor{site: s, kind: HTTPProxyKind, run: s.httpProxy},
	}, nil
}

type site struct {
	o Options
	// ipmiAskTime is ipmiAskTime but in tests.
	ipmiAskTime time.Duration
}

// executor is the part that the kinds share: time, and what becomes of a run
// that was interrupted.
type executor struct {
	site *site
	kind string
	run  func(context.Context, *job) (dispatch.Result, error)

	mu sync.Mutex
	// interrupted has the ids of runs that may have had their effect in
	// another process: they look, and ask for nothing.
	interrupted map[string]bool
}

// job is one run.
type job struct {
	dispatch.Command
	progress dispatch.Progress
	// lookOnly: the effect may have happened already.
	lookOnly bool
	// hidden are the texts that must not leave.
	hidden *hidden
}

func (j *job) phase(format string, args ...any) {
	if j.progress != nil {
		j.progress(&bcdv1.BmcProgress{Phase: j.hidden.text(fmt.Sprintf(format, args...))})
	}
}

// due is asked right before an effect.
func (j *job) due() error {
	if j.StillDue == nil {
		return nil
	}
	return j.StillDue()
}

func (e *executor) Kind() string { return e.kind }

// Run implements dispatch.Executor. Its time ends with the command's deadline,
// at most 10 minutes from now.
func (e *executor) Run(ctx context.Context, cmd dispatch.Command, progress dispatch.Progress) (dispatch.Result, error) {
	e.mu.Lock()
	lookOnly := e.interrupted[cmd.ID]
	delete(e.interrupted, cmd.ID)
	e.mu.Unlock()
	budget := maxRun
	if !cmd.Deadline.IsZero() {
		budget = min(budget, cmd.Deadline.Sub(e.site.o.Now()))
	}
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	j := &job{Command: cmd, progress: progress, lookOnly: lookOnly, hidden: new(hidden)}
	defer j.hidden.destroy()
	result, err := e.run(ctx, j)
	j.hidden.message(result.Body)
	result.Message = j.hidden.text(result.Message)
	return result, j.hidden.failure(ctx, err)
}

// Recover implements dispatch.Executor. A run that changes nothing may be made
// again; every other is resumed only to look: what was asked for is there, or
// the outcome is INDETERMINATE. A cycle, a reset and a request that is not GET
// or HEAD leave nothing to look at.
func (e *executor) Recover(_ context.Context, cmd dispatch.Command) (dispatch.Recovery, error) {
	switch e.kind {
	case PowerKind:
		body := new(bcdv1.BmcPower)
		if err := decode(cmd, body); err != nil {
			return dispatch.Recovery{}, err
		}
		switch a := body.GetAction(); a {
		case bcdv1.BmcPowerAction_BMC_POWER_ACTION_CYCLE, bcdv1.BmcPowerAction_BMC_POWER_ACTION_RESET:
			return dispatch.Recovery{Message: "interrupted around a " + word(a) + ": whether the machine was restarted is unknown"}, nil
		}
	case HTTPProxyKind:
		body := new(bcdv1.SiteHttpProxy)
		if err := decode(cmd, body); err != nil {
			return dispatch.Recovery{}, err
		}
		if !readsOnly(body.GetMethod()) {
			return dispatch.Recovery{Message: "interrupted around a " + body.GetMethod() + ": whether the service has acted on it is unknown"}, nil
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.interrupted == nil {
		e.interrupted = map[string]bool{}
	}
	e.interrupted[cmd.ID] = true
	return dispatch.Recovery{Action: dispatch.Resume, Message: "the state is read again, and nothing is asked for a second time"}, nil
}

func decode(cmd dispatch.Command, m proto.Message) error {
	if err := proto.Unmarshal(cmd.Body, m); err != nil {
		return fail("MALFORMED", "the body of %s cannot be read: %w", cmd.Kind, err)
	}
	return nil
}

// fail makes a failure of a command; a %w in the format is kept.
func fail(code, format string, args ...any) *dispatch.Failure {
	err := fmt.Errorf(format, args...)
	return &dispatch.Failure{Code: code, Message: err.Error(), Err: err}
}

// unknown makes a failure of a command whose effect may have happened.
func unknown(code, format string, args ...any) *dispatch.Failure {
	f := fail(code, format, args...)
	f.Indeterminate = true
	return f
}

// wait waits for d, or until ctx ends.
func (s *site) wait(ctx context.Context, d time.Duration) error {
	timer := s.o.Clock.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
