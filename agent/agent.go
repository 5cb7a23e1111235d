// Package agent is what every mode of bcd runs: it holds the session with the
// gateway, takes commands into the journal, runs them in their lanes, offers
// specs to the converger, and reports what the machine is and how it fares.
//
// The whole story is [Agent.Run]. Nothing in here reads the wall clock, opens
// a socket or starts a process: the mode that assembles an agent hands in
// everything that does ([Deps]), and so do tests and the simulator.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/dispatch"
	"github.com/better-compute/bcd/agent/host"
	"github.com/better-compute/bcd/agent/journal"
	"github.com/better-compute/bcd/agent/secret"
	"github.com/better-compute/bcd/agent/session"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Journal is what the agent needs of one; *journal.Journal is it.
type Journal interface {
	dispatch.Journal
	ID() string
	Epoch() int64
	SetEpoch(epoch int64) error
	LatestMS() int64
	Lost() (id, reason string)
	SettleLoss(ms int64) error
	Append(class journal.EventClass, event *bcdv1.Event) (int64, error)
	Events(after int64, count, maxBytes int) ([]*bcdv1.Event, error)
	AckEvents(sequence int64) error
	AckedSequence() int64
	Sequence() int64
	Stats() journal.Stats
}

// Converger takes specs; *converge.Converger is one.
type Converger interface {
	Offer(signed *bcdv1.Signed) error
	Status() *bcdv1.SpecStatus
	Run(ctx context.Context) error
}

// Config is who this daemon is.
type Config struct {
	NodeID  string
	Role    bcdv1.Role
	Version string
	// BootID names this boot of the machine: random, and another after each
	// restart.
	BootID          string
	HardwareKeyHash []byte
	Capabilities    []string
	// Fallback: the dialer knows the WebSocket.
	Fallback bool
}

// Deps are the agent's surroundings. Those marked optional may be nil.
type Deps struct {
	Clock clock.Clock
	// Random gives numbers in [0, 1), for jitter.
	Random  func() float64
	Dialer  session.Dialer
	Journal Journal
	// Verifier checks signed commands; *intent.Roots is one.
	Verifier dispatch.Verifier
	// Executors makes the executors of this mode; they may use the agent they
	// get, for secrets, inventory and events.
	Executors func(*Agent) []dispatch.Executor
	// Inventory reads the machine; optional.
	Inventory func(context.Context) ([]host.Section, error)
	// Converger; optional: a mode without one refuses specs.
	Converger Converger
	// Secrets fetches secret values; optional. Its Send is set by New.
	Secrets *secret.Requester
	// Prove signs a gateway's challenge where TLS ended in between; optional.
	Prove func(*bcdv1.IdentityChallenge) (*bcdv1.IdentityProof, error)
	// After restarts the machine, or kexecs; a nil error means that it is
	// going down.
	After func(ctx context.Context, action dispatch.After, commandID string) error
	// OnSession, optional, is told when the session comes and goes: a first
	// Welcome settles a join, an update, a boot slot.
	OnSession func(up bool)
	Log       *slog.Logger
}

// Agent is a running daemon. Make it with New; Run it once.
type Agent struct {
	config     Config
	deps       Deps
	session    *session.Session
	dispatcher *dispatch.Dispatcher
	started    time.Time

	mu         sync.Mutex
	ctx        context.Context // Run's
	connected  chan struct{}   // closed while there is a session
	lost       chan struct{}   // closed while there is none
	machine    machine
	revoked    string
	refusal    string
	conditions map[string]*bcdv1.Condition
	inventory  inventory
	background sync.WaitGroup

	events events
}

// machine is what Welcome tells of this machine.
type machine struct{ id, name, site string }

// New puts an agent together.
func New(config Config, deps Deps) (*Agent, error) {
	switch {
	case config.NodeID == "" || config.BootID == "" || config.Role == bcdv1.Role_ROLE_UNSPECIFIED:
		return nil, errors.New("agent: node id, boot id and role are needed")
	case deps.Clock == nil || deps.Random == nil || deps.Dialer == nil || deps.Journal == nil || deps.Verifier == nil || deps.After == nil || deps.Log == nil:
		return nil, errors.New("agent: clock, random, dialer, journal, verifier, after and log are needed")
	}
	a := &Agent{
		config: config, deps: deps, started: deps.Clock.Now(),
		connected: make(chan struct{}), lost: make(chan struct{}), conditions: map[string]*bcdv1.Condition{},
	}
	close(a.lost)
	a.deps.Log = deps.Log.With("node", config.NodeID)
	if deps.Secrets != nil {
		deps.Secrets.Send = a.sendSecretRequest
	}
	var executors []dispatch.Executor
	if deps.Executors != nil {
		executors = deps.Executors(a)
	}
	var floor time.Time
	if ms := deps.Journal.LatestMS(); ms > 0 {
		floor = time.UnixMilli(ms)
	}
	a.session = session.New(session.Deps{
		Config:  session.Config{Random: deps.Random, LastEpoch: deps.Journal.Epoch(), TimeFloor: floor, Fallback: config.Fallback},
		Dialer:  deps.Dialer,
		Handler: handler{a},
		Clock:   deps.Clock,
		Log:     a.deps.Log,
	})
	var err error
	a.dispatcher, err = dispatch.New(
		dispatch.Config{NodeID: config.NodeID, Role: config.Role, BootID: config.BootID, Verifier: deps.Verifier},
		executors,
		dispatch.Deps{
			Journal: deps.Journal, Clock: deps.Clock, ServerTime: a.session.ServerTime,
			Send: a.send, After: deps.After, Note: a.note, Log: a.deps.Log,
		})
	return a, err
}

// Run is the life of a daemon, until ctx ends or a part of it fails. What the
// journal holds is taken up first: accepted commands wait for server time,
// interrupted ones are judged by their executors. Then the session is held for
// ever; on each Welcome everything unacknowledged is sent again.
func (a *Agent) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	a.mu.Lock()
	a.ctx = ctx
	a.mu.Unlock()

	a.reportLoss()
	parts := map[string]func(context.Context) error{
		"dispatch": a.dispatcher.Run,
		"session":  a.session.Run,
	}
	if a.deps.Converger != nil {
		parts["converge"] = a.deps.Converger.Run
	}
	var group sync.WaitGroup
	for name, run := range parts {
		group.Go(func() {
			err := run(ctx)
			if ctx.Err() == nil {
				cancel(fmt.Errorf("agent: %s ended: %w", name, err))
			}
		})
	}
	a.goInventory(func(ctx context.Context) { a.collectInventory(ctx, false) })
	group.Wait()
	a.background.Wait()
	return context.Cause(ctx)
}

// reportLoss makes the loss of an earlier journal loud.
func (a *Agent) reportLoss() {
	id, reason := a.deps.Journal.Lost()
	if id == "" {
		return
	}
	a.deps.Log.Error("the journal was lost: commands in flight may have run, and are never run again", "journal", id, "reason", reason)
	a.SetCondition(&bcdv1.Condition{
		Type: "JournalDamaged", Status: bcdv1.ConditionStatus_CONDITION_STATUS_TRUE, Reason: "JournalLost", Severe: true,
		Message: "an earlier journal was lost: " + reason,
	})
	a.Event(journal.Durable, "journal.lost", "", "journal "+id+" was lost: "+reason, nil)
}

// IdentityChanged says that a new certificate is in use: a revocation of the
// old one no longer counts, and the session may be tried at once.
func (a *Agent) IdentityChanged(ctx context.Context) {
	a.mu.Lock()
	revoked := a.revoked != ""
	a.revoked = ""
	a.mu.Unlock()
	if revoked {
		a.dispatcher.SetRevoked(false)
	}
	a.session.IdentityChanged(ctx)
}

// ServerTime is the best known server time; false before the first mark.
func (a *Agent) ServerTime() (time.Time, bool) { return a.session.ServerTime() }

// BootID names this boot of the machine.
func (a *Agent) BootID() string { return a.config.BootID }

// Version is the daemon's.
func (a *Agent) Version() string { return a.config.Version }

// Uptime is how long this agent has been there.
func (a *Agent) Uptime() time.Duration { return a.deps.Clock.Now().Sub(a.started) }

// nowMS is server time in milliseconds, 0 before the first mark.
func (a *Agent) nowMS() int64 {
	now, ok := a.session.ServerTime()
	if !ok {
		return 0
	}
	return now.UnixMilli()
}

// send hands the dispatcher's frames to the session.
func (a *Agent) send(frame *bcdv1.ClientFrame) {
	priority := session.Control
	switch frame.GetBody().(type) {
	case *bcdv1.ClientFrame_Outcome:
		priority = session.Outcomes
	case *bcdv1.ClientFrame_Progress:
		priority = session.Bulk
	}
	a.session.Send(priority, frame)
}
