package dispatch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/journal"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Journal is what the dispatcher writes to; *journal.Journal is one.
type Journal interface {
	Ledger
	Accept(e journal.Entry, signed []byte) error
	Refuse(e journal.Entry, outcome []byte) error
	Start(id string, startedMS int64, bootID string) error
	Finish(id string, f journal.Finish) error
	Acknowledge(id string) error
	BeginAfter(id string) error
	EndAfter(id string) error
	Open() []journal.Entry
	Signed(id string) ([]byte, error)
	Outcome(id string) ([]byte, error)
}

// Deps are the dispatcher's surroundings.
type Deps struct {
	Journal Journal
	Clock   clock.Clock
	// ServerTime is mark + elapsed; false before the first mark. It is called
	// from several goroutines.
	ServerTime func() (time.Time, bool)
	// Send hands a frame to the session, if there is one. It does not block.
	Send func(*bcdv1.ClientFrame)
	// After does an after-acknowledgement action. A nil error means that the
	// machine is going down.
	After func(ctx context.Context, action After, commandID string) error
	// Note records a durable event.
	Note func(eventType, commandID, message string)
	Log  *slog.Logger
}

// Dispatcher is the shell of [Core]: it owns the workers, the timer and the
// writes. Make it with New; Run it once.
type Dispatcher struct {
	deps      Deps
	executors map[string]Executor

	mu      sync.Mutex
	core    *Core
	cancels map[string]context.CancelCauseFunc
	wake    chan struct{}
	queues  map[bcdv1.Lane]chan Run
	revoked bool
	ready   chan struct{} // closed once the journal was restored
	afters  sync.WaitGroup
	ctx     context.Context
}

var (
	errCancelled = errors.New("cancelled by the gateway")
	errStopping  = errors.New("the daemon stops")
)

// New returns a dispatcher. Two executors of one kind are an error. The config's
// Supported and Ledger are set here.
func New(config Config, executors []Executor, deps Deps) (*Dispatcher, error) {
	d := &Dispatcher{
		deps: deps, executors: map[string]Executor{},
		cancels: map[string]context.CancelCauseFunc{}, wake: make(chan struct{}, 1),
		queues: map[bcdv1.Lane]chan Run{}, ready: make(chan struct{}),
	}
	for _, e := range executors {
		if d.executors[e.Kind()] != nil {
			return nil, fmt.Errorf("dispatch: two executors for %s", e.Kind())
		}
		d.executors[e.Kind()] = e
	}
	config.Supported = func(kind string) bool { return d.executors[kind] != nil }
	config.Ledger = deps.Journal
	d.core = NewCore(config)
	for id, size := range Lanes {
		d.queues[id] = make(chan Run, size.Workers) // the core hands out no more than there are workers
	}
	return d, nil
}

// Run restores what the journal holds, then works until ctx ends, and returns
// when every worker has returned. A run that ctx interrupts stays started in
// the journal.
func (d *Dispatcher) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(errStopping)
	d.mu.Lock()
	d.ctx = ctx
	d.mu.Unlock()
	for _, entry := range d.deps.Journal.Open() {
		d.step(Restore{Entry: entry, Command: d.load(entry)})
	}
	close(d.ready)
	d.step(Tick{})

	var workers sync.WaitGroup
	for _, id := range laneOrder {
		for range Lanes[id].Workers {
			workers.Go(func() { d.work(ctx, d.queues[id]) })
		}
	}
	timer := d.deps.Clock.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		timer.Reset(d.wait())
		select {
		case <-ctx.Done():
			workers.Wait()
			d.afters.Wait()
			return context.Cause(ctx)
		case <-d.wake:
		case <-timer.C():
			d.step(Tick{})
		}
	}
}

// load reads a journaled command's body back; nil when it cannot be read.
func (d *Dispatcher) load(e journal.Entry) *bcdv1.Command {
	if e.State >= journal.Finished {
		return nil
	}
	raw, err := d.deps.Journal.Signed(e.ID)
	signed, command := new(bcdv1.Signed), new(bcdv1.Command)
	if err == nil {
		err = proto.Unmarshal(raw, signed)
	}
	if err == nil {
		err = proto.Unmarshal(signed.GetPayload(), command)
	}
	if err == nil && command.GetId() != e.ID {
		err = fmt.Errorf("it is the body of %s", command.GetId())
	}
	if err != nil {
		d.deps.Log.Error("cannot read a command back from the journal", "command", e.ID, "error", err)
		return nil
	}
	return command
}

// wait is how long the timer may sleep.
func (d *Dispatcher) wait() time.Duration {
	const long = time.Hour
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.now()
	next, ok := d.core.Next(now)
	if !ok || now.IsZero() {
		return long
	}
	return min(max(next.Sub(now), time.Millisecond), long)
}

func (d *Dispatcher) now() time.Time {
	now, ok := d.deps.ServerTime()
	if !ok {
		return time.Time{}
	}
	return now
}

// Offer takes a signed command from the gateway.
func (d *Dispatcher) Offer(signed *bcdv1.Signed) { d.step(Offer{signed}) }

// Cancel stops a command.
func (d *Dispatcher) Cancel(id, reason string) { d.step(Cancel{id, reason}) }

// Acked takes the acknowledgement of an outcome.
func (d *Dispatcher) Acked(id string) { d.step(Acked{id}) }

// SetRevoked stops, or with false allows again, that anything new begins.
func (d *Dispatcher) SetRevoked(revoked bool) {
	d.mu.Lock()
	d.revoked = revoked
	d.mu.Unlock()
	d.step(Revoked{Not: !revoked})
}

// Connected sends everything again that the gateway has not acknowledged. It
// waits until Run has restored the journal.
func (d *Dispatcher) Connected() {
	<-d.ready
	for _, entry := range d.deps.Journal.Open() {
		if entry.State == journal.Finished {
			d.sendOutcome(entry.ID)
		}
	}
	d.step(Connected{})
}

// Unfinished are the ids whose outcome is not acknowledged, for Hello.
func (d *Dispatcher) Unfinished() []string {
	var ids []string
	for _, entry := range d.deps.Journal.Open() {
		if entry.State < journal.Acknowledged {
			ids = append(ids, entry.ID)
		}
	}
	return ids
}

// Free gives each lane's free workers and queue places.
func (d *Dispatcher) Free() *bcdv1.LaneCounts {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.core.Free()
}

// Kinds are the names of the kinds accepted here.
func (d *Dispatcher) Kinds() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.core.Kinds()
}

// step runs the core and does what it says, in order.
func (d *Dispatcher) step(in Input) {
	d.mu.Lock()
	defer d.mu.Unlock()
	work := d.core.Step(d.now(), in)
	for len(work) > 0 {
		effect := work[0]
		work = work[1:]
		if err := d.writeOne(effect.Write); err != nil {
			d.deps.Log.Error("journal", "error", err)
			work = append(work, d.core.Step(d.now(), Failed{effect.Write, err})...)
			continue
		}
		for _, out := range effect.Then {
			d.do(out)
		}
	}
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

func (d *Dispatcher) writeOne(w Write) error {
	j := d.deps.Journal
	switch w := w.(type) {
	case nil:
		return nil
	case WriteAccept:
		raw, err := proto.Marshal(w.Signed)
		if err != nil {
			return err
		}
		return j.Accept(w.Entry, raw)
	case WriteRefuse:
		return j.Refuse(w.Entry, w.Outcome)
	case WriteStart:
		return j.Start(w.ID, w.StartedMS, w.BootID)
	case WriteFinish:
		return j.Finish(w.ID, w.Finish)
	case WriteAck:
		return j.Acknowledge(w.ID)
	case WriteBeginAfter:
		return j.BeginAfter(w.ID)
	case WriteEndAfter:
		return j.EndAfter(w.ID)
	}
	return fmt.Errorf("dispatch: unknown write %T", w)
}

func (d *Dispatcher) do(out Output) {
	switch out := out.(type) {
	case Send:
		d.deps.Send(out.Frame)
	case SendOutcome:
		d.sendOutcome(out.ID)
	case Run:
		d.queues[out.Lane] <- out // never blocks: one place for each worker
	case Interrupt:
		if cancel := d.cancels[out.ID]; cancel != nil {
			cancel(errCancelled)
		}
	case DoAfter:
		d.afters.Go(func() {
			err := d.deps.After(d.ctx, out.Action, out.ID)
			if d.ctx.Err() == nil {
				d.step(AfterEnded{out.ID, err})
			}
		})
	case Complain:
		text := "command refused"
		if out.ID == "" {
			text = "the gateway sent a command that cannot be answered"
		}
		d.deps.Log.Warn(text, "command", out.ID, "kind", out.Kind, "error", out.Message)
	case Note:
		d.deps.Note(out.Type, out.ID, out.Message)
	}
}

// sendOutcome sends what the journal has. After the acknowledgement it may
// have the status alone.
func (d *Dispatcher) sendOutcome(id string) {
	outcome := new(bcdv1.Outcome)
	raw, err := d.deps.Journal.Outcome(id)
	if err == nil {
		err = proto.Unmarshal(raw, outcome)
	}
	if err != nil {
		entry, known := d.deps.Journal.Entry(id)
		if !known || !errors.Is(err, journal.ErrUnknown) {
			d.deps.Log.Error("cannot read an outcome back from the journal", "command", id, "error", err)
			return
		}
		outcome = &bcdv1.Outcome{
			CommandId: id, Status: bcdv1.OutcomeStatus(entry.Status), Rejection: bcdv1.Rejection(entry.Rejection),
			AcceptedMs: entry.AcceptedMS, StartedMs: entry.StartedMS, FinishedMs: entry.FinishedMS,
			AfterAcknowledgement: entry.After,
			Message:              "acknowledged before; the journal keeps the status alone",
		}
	}
	d.deps.Send(&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Outcome{Outcome: outcome}})
}

// work is one worker of a lane.
func (d *Dispatcher) work(ctx context.Context, queue <-chan Run) {
	for {
		select {
		case <-ctx.Done():
			return
		case run := <-queue:
			d.runOne(ctx, run)
		}
	}
}

func (d *Dispatcher) runOne(ctx context.Context, run Run) {
	id := run.Command.GetId()
	ctx, cancel := context.WithCancelCause(ctx)
	d.mu.Lock()
	d.cancels[id] = cancel
	d.mu.Unlock()
	defer func() {
		d.mu.Lock()
		delete(d.cancels, id)
		d.mu.Unlock()
		cancel(nil)
	}()
	log := d.deps.Log.With("command", id, "kind", run.Command.GetKind())
	cmd := d.command(run)
	executor := d.executors[run.Command.GetKind()]
	if run.Recover {
		recovery, err := guard(log, func() (Recovery, error) { return executor.Recover(ctx, cmd) })
		if d.stopping(ctx) && err != nil {
			return
		}
		log.Info("recovered an interrupted command", "action", int(recovery.Action), "error", err)
		d.step(Recovered{id, recovery, err})
		return
	}
	result, err := guard(log, func() (Result, error) {
		if err := cmd.StillDue(); err != nil {
			return Result{}, err
		}
		return executor.Run(ctx, cmd, d.progress(id))
	})
	if err != nil && d.stopping(ctx) {
		return // stays started: the next process asks the executor
	}
	if err != nil {
		log.Warn("command failed", "error", err)
	} else {
		log.Info("command succeeded")
	}
	d.step(Ended{id, result, err})
}

// stopping tells a daemon's end from a cancel.
func (d *Dispatcher) stopping(ctx context.Context) bool {
	return ctx.Err() != nil && !errors.Is(context.Cause(ctx), errCancelled)
}

func (d *Dispatcher) command(run Run) Command {
	c := run.Command
	deadline := time.UnixMilli(c.GetDeadlineMs())
	return Command{
		ID: c.GetId(), Kind: c.GetKind(), NodeID: c.GetNodeId(), IdempotencyKey: c.GetIdempotencyKey(),
		IssuedBy: c.GetIssuedBy(), Body: c.GetBody(), Deadline: deadline, BootID: run.BootID,
		StillDue: func() error {
			d.mu.Lock()
			revoked := d.revoked
			d.mu.Unlock()
			now, ok := d.deps.ServerTime()
			switch {
			case revoked:
				return fmt.Errorf("%w: this node's identity was revoked", ErrNotDue)
			case !ok:
				return fmt.Errorf("%w: server time is not known", ErrNotDue)
			case !now.Before(deadline):
				return fmt.Errorf("%w: the deadline %s passed %s ago by server time", ErrNotDue, stamp(deadline), now.Sub(deadline).Round(time.Millisecond))
			}
			return nil
		},
	}
}

func (d *Dispatcher) progress(id string) Progress {
	return func(m proto.Message) {
		if body := marshal(m); len(body) > 0 {
			d.step(Reported{id, body})
		}
	}
}

// guard turns a panic of an executor into a failure: it may have done anything
// by then.
func guard[T any](log *slog.Logger, f func() (T, error)) (value T, err error) {
	defer func() {
		if p := recover(); p != nil {
			log.Error("executor panicked", "panic", p, "stack", string(debug.Stack()))
			err = &Failure{Code: "PANIC", Message: fmt.Sprintf("the executor crashed: %v; what it had done by then is unknown", p), Indeterminate: true}
		}
	}()
	return f()
}
