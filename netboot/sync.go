package netboot

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/better-compute/bcd/agent/clock"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// syncWait is how long the gateway may wait for a change.
	syncWait = 20 * time.Second
	// syncSlack is more than an answer needs to arrive: after it the
	// connection is dead.
	syncSlack = 10 * time.Second
	// syncPace is the least time between two requests, and how long a change
	// here may wait until the gateway hears of it.
	syncPace = time.Second
	// syncRetryFirst and syncRetryMax bound the wait after a failure: short,
	// since an expiring lease is a matter of seconds.
	syncRetryFirst = time.Second
	syncRetryMax   = 10 * time.Second
	// maxProblems, maxServing and maxLine are SyncRequest's.
	maxProblems = 16
	maxServing  = 16
	maxLine     = 512
	// maxDigests is what the gateway takes of artefacts.
	maxDigests = 256
)

var errPoked = errors.New("there is news to tell")

// Sync carries lease, table, traces and problems between this agent and the
// gateway, by a long poll. It is a supervisor service.
type Sync struct {
	// Call is SiteService.Sync.
	Call func(ctx context.Context, request *bcdv1.SyncRequest) (*bcdv1.SyncResponse, error)

	Holder    *Holder
	Table     *Table
	Artefacts *Artefacts
	Traces    *Traces
	// Problems are sentences for the operator beside those of the parts above;
	// Serving the addresses that boot is served on. Both may be nil.
	Problems func() []string
	Serving  func() []string
	Clock    clock.Clock
	Log      *slog.Logger
	// Random gives numbers in [0, 1), to spread retries.
	Random func() float64

	mu      sync.Mutex
	poke    context.CancelCauseFunc
	status  SyncStatus
	problem string // of the last table that was not taken
}

// SyncStatus is how the sync stands.
type SyncStatus struct {
	Connected bool      `json:"connected"`
	Since     time.Time `json:"since"` // when Connected last changed
	LastError string    `json:"last_error,omitempty"`
}

// Name implements supervisor.Service.
func (s *Sync) Name() string { return "site-sync" }

// Status says how it stands.
func (s *Sync) Status() SyncStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status
}

// Poke says that there is something to tell the gateway: a request that waits
// is ended and made anew.
func (s *Sync) Poke() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.poke != nil {
		s.poke(errPoked)
	}
}

// AllProblems are the sentences that the operator is told, each once.
func (s *Sync) AllProblems() []string {
	all := s.Artefacts.Problems()
	if p := s.Holder.Problem(); p != "" {
		all = append(all, p)
	}
	s.mu.Lock()
	if s.problem != "" {
		all = append(all, s.problem)
	}
	s.mu.Unlock()
	if s.Problems != nil {
		all = append(all, s.Problems()...)
	}
	return lines(all, maxProblems)
}

// lines keeps at most n different lines, each within its bound.
func lines(all []string, n int) []string {
	var out []string
	for _, line := range all {
		line = cutText(line, maxLine)
		if line != "" && !slices.Contains(out, line) && len(out) < n {
			out = append(out, line)
		}
	}
	return out
}

// Run syncs until ctx ends. What was kept must have been loaded.
func (s *Sync) Run(ctx context.Context) error {
	s.Artefacts.Want(s.Table.Get().GetArtefacts())
	wait := syncRetryFirst
	poked := false
	for ctx.Err() == nil {
		began := s.Clock.Now()
		err := s.once(ctx, !poked)
		// The one after a poke is answered at once, and left alone until then:
		// a site with much to tell must not lose its lease over it.
		poked = errors.Is(err, errPoked)
		pause := syncPace - s.Clock.Now().Sub(began)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil || poked:
			wait = syncRetryFirst
		default:
			pause = time.Duration((0.5 + s.Random()/2) * float64(wait))
			wait = min(2*wait, syncRetryMax)
		}
		s.note(err)
		if pause > 0 && !sleep(ctx, s.Clock, pause) {
			return nil
		}
	}
	return nil
}

func sleep(ctx context.Context, c clock.Clock, d time.Duration) bool {
	timer := c.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C():
		return true
	case <-ctx.Done():
		return false
	}
}

func (s *Sync) note(err error) {
	if errors.Is(err, errPoked) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	connected := err == nil
	if connected != s.status.Connected || s.status.Since.IsZero() {
		s.status.Connected, s.status.Since = connected, s.Clock.Now()
		if connected {
			s.Log.Info("site sync is up")
		} else {
			s.Log.Warn("site sync failed; what is known is served on as far as the boot lease allows", "error", err)
		}
	}
	if s.status.LastError = ""; err != nil {
		s.status.LastError = err.Error()
	}
}

// once makes one request and takes its answer in. pokeable says that news may
// end it.
func (s *Sync) once(ctx context.Context, pokeable bool) error {
	call, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	timeout := s.Clock.NewTimer(syncWait + syncSlack)
	defer timer(timeout, call, func() { cancel(errors.New("the gateway did not answer in time")) })()

	request := &bcdv1.SyncRequest{
		TableGeneration: s.Table.Get().GetGeneration(),
		WaitingMacs:     s.Traces.Waiting(),
		WaitMs:          int32(syncWait.Milliseconds()),
		Artefacts:       s.Artefacts.Digests(),
		Problems:        s.AllProblems(),
	}
	request.Artefacts = request.Artefacts[:min(len(request.Artefacts), maxDigests)]
	if s.Serving != nil {
		request.Serving = lines(s.Serving(), maxServing)
	}
	if pokeable {
		// What comes from here on may not be in this request.
		s.mu.Lock()
		s.poke = cancel
		s.mu.Unlock()
	}
	report := s.Traces.Changed(s.Clock.Now())
	request.Traces = report.Traces
	sent := s.Clock.Now()
	s.Holder.ask(sent, request)
	response, err := s.Call(call, request)
	s.mu.Lock()
	s.poke = nil
	s.mu.Unlock()
	if err != nil {
		if cause := context.Cause(call); cause != nil && ctx.Err() == nil {
			return cause
		}
		return err
	}
	s.Traces.Acknowledge(report)
	s.Traces.Booted(response.GetBooted())
	s.takeTable(response)
	s.Holder.answered(ctx, sent, response.GetLease())
	return nil
}

// timer calls f when t fires before the function that it gives is called.
func timer(t clock.Timer, ctx context.Context, f func()) (stop func()) {
	done := make(chan struct{})
	go func() {
		select {
		case <-t.C():
			f()
		case <-ctx.Done():
		case <-done:
		}
	}()
	return func() {
		close(done)
		t.Stop()
	}
}

func (s *Sync) takeTable(response *bcdv1.SyncResponse) {
	if response.GetTable() == nil {
		return
	}
	// The gateway proved itself, so its clock counts.
	err := s.Table.Take(response.GetTable(), time.UnixMilli(response.GetServerTimeMs()))
	s.mu.Lock()
	s.problem = ""
	if err != nil {
		s.problem = "boot table: " + err.Error()
	}
	s.mu.Unlock()
	if err != nil {
		s.Log.Error("the gateway's boot table was not taken, or not kept", "error", err)
	} else {
		s.Log.Info("boot table", "generation", s.Table.Get().GetGeneration())
	}
	s.Artefacts.Want(s.Table.Get().GetArtefacts())
}
