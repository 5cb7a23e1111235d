package session

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/servertime"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Link is one connection. Send and Receive are each used by one goroutine;
// Close may come at any time from another, and ends both.
type Link interface {
	Send(*bcdv1.ClientFrame) error
	// Receive returns io.EOF when the gateway ended the link.
	Receive() (*bcdv1.ServerFrame, error)
	Close()
}

// Dialer makes links. A *DialError says more than another error.
type Dialer interface {
	Dial(ctx context.Context, t Transport) (Link, error)
}

// Handler is the agent's side of a session.
//
// Hello, Heartbeat and Prove are called by the session's own goroutine and
// must be quick. Up, Down, Refused and Frame are called by one other goroutine, in the
// order of things; they may write to disk.
type Handler interface {
	// Hello returns what the node says of itself. Protocol range and last
	// epoch are filled in here.
	Hello() *bcdv1.Hello
	// Heartbeat returns what a heartbeat says; its sequence is filled in here.
	Heartbeat() *bcdv1.Heartbeat
	// Prove signs a gateway's challenge, on a link whose TLS ended in between.
	Prove(*bcdv1.IdentityChallenge) (*bcdv1.IdentityProof, error)
	Up(*bcdv1.Welcome)
	Down(error)
	// Refused tells of each Reject.
	Refused(*bcdv1.Reject)
	Frame(*bcdv1.ServerFrame)
}

// Deps are a session's surroundings.
type Deps struct {
	Config
	Dialer  Dialer
	Handler Handler
	Clock   clock.Clock
	Log     *slog.Logger
}

const (
	// maxWaiting bounds the frames that the handler has not yet taken; beyond
	// it nothing more is read, and flow control holds the gateway back.
	maxWaiting = 256
	// flushTimeout bounds the sending of what is queued when a link is closed.
	flushTimeout = time.Second
)

// Session is the shell of [Core]. Make it with New; Run it once.
type Session struct {
	deps   Deps
	inputs chan Input

	mu       sync.Mutex
	core     *Core
	outboxes map[int]*outbox
	current  int
	epoch    int64
	status   Status
}

// Status is a snapshot for people.
type Status struct {
	Connected bool      `json:"connected"`
	Transport string    `json:"transport,omitempty"`
	Gateway   string    `json:"gateway,omitempty"`
	Epoch     int64     `json:"epoch,omitempty"`
	Since     time.Time `json:"since,omitzero"`
	// ServerTimeKnown and MarkAge tell of the server-time mark.
	ServerTimeKnown bool          `json:"server_time_known"`
	MarkAge         time.Duration `json:"mark_age_ns,omitempty"`
	// LastError is why there is no session, with its back-off class and when
	// the next try comes.
	LastError string    `json:"last_error,omitempty"`
	Class     string    `json:"class,omitempty"`
	NextTry   time.Time `json:"next_try,omitzero"`
	// UnknownFrames and StaleFrames were ignored.
	UnknownFrames int64 `json:"unknown_frames,omitempty"`
	StaleFrames   int64 `json:"stale_frames,omitempty"`
}

// New returns a session that does nothing until Run.
func New(deps Deps) *Session {
	return &Session{deps: deps, core: NewCore(deps.Config), inputs: make(chan Input, 8), outboxes: map[int]*outbox{}}
}

// running is what Run alone uses.
type running struct {
	*Session
	ctx      context.Context
	links    map[int]*runningLink
	received chan Received
	group    sync.WaitGroup // readers, writers, dials
	waiting  []func()       // calls of the handler, in order
}

type runningLink struct {
	cancel context.CancelFunc
	outbox *outbox
}

// Run holds the session until ctx ends, and returns when every goroutine and
// every link of it has ended.
func (s *Session) Run(ctx context.Context) error {
	r := &running{Session: s, ctx: ctx, links: map[int]*runningLink{}, received: make(chan Received)}
	calls, handled := make(chan func()), make(chan struct{})
	go func() {
		defer close(handled)
		for call := range calls {
			call()
		}
	}()
	timer := s.deps.Clock.NewTimer(time.Hour)
	defer timer.Stop()
	r.step(Start{})
	for ctx.Err() == nil {
		timer.Reset(r.wait())
		received := r.received
		var next chan func()
		var call func()
		if len(r.waiting) > 0 {
			next, call = calls, r.waiting[0]
		}
		if len(r.waiting) >= maxWaiting {
			received = nil
		}
		select {
		case <-ctx.Done():
		case next <- call:
			r.waiting = r.waiting[1:]
		case in := <-received:
			r.step(in)
		case in := <-s.inputs:
			r.step(in)
		case <-timer.C():
			r.step(Tick{})
		}
	}
	r.step(Stop{})
	r.drain()
	for _, call := range r.waiting {
		calls <- call
	}
	close(calls)
	<-handled
	return context.Cause(ctx)
}

// drain waits for the goroutines of links, swallowing what they still say.
func (r *running) drain() {
	done := make(chan struct{})
	go func() {
		r.group.Wait()
		close(done)
	}()
	for {
		select {
		case <-done:
			return
		case <-r.received:
		case <-r.inputs:
		}
	}
}

func (r *running) wait() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	next, ok := r.core.Next()
	if !ok {
		return time.Hour
	}
	return max(0, next.Sub(r.deps.Clock.Now()))
}

func (r *running) step(in Input) {
	r.mu.Lock()
	out := r.core.Step(r.deps.Clock.Now(), in)
	r.mu.Unlock()
	for _, o := range out {
		r.do(o)
	}
}

func (r *running) do(out Output) {
	switch out := out.(type) {
	case Dial:
		r.dial(out)
	case SayHello:
		hello := r.deps.Handler.Hello()
		hello.ProtocolMin, hello.ProtocolMax = Protocol, Protocol
		r.mu.Lock()
		hello.LastEpoch = r.core.lastEpoch
		r.mu.Unlock()
		r.push(out.Link, Control, &bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Hello{Hello: hello}})
	case Beat:
		beat := r.deps.Handler.Heartbeat()
		beat.Sequence = out.Sequence
		r.push(out.Link, Control, &bcdv1.ClientFrame{Epoch: out.Epoch, Body: &bcdv1.ClientFrame_Heartbeat{Heartbeat: beat}})
	case SendFrame:
		r.push(out.Link, Control, out.Frame)
	case Prove:
		proof, err := r.deps.Handler.Prove(out.Challenge)
		if err != nil {
			r.deps.Log.Error("cannot prove this node's identity to the gateway", "error", err)
			return
		}
		r.push(out.Link, Control, &bcdv1.ClientFrame{Epoch: out.Epoch, Body: &bcdv1.ClientFrame_IdentityProof{IdentityProof: proof}})
	case Close:
		r.close(out)
	case Up:
		r.up(out)
	case Down:
		r.mu.Lock()
		r.current, r.epoch = 0, 0
		r.status.Connected, r.status.Since = false, r.deps.Clock.Now()
		r.mu.Unlock()
		r.deps.Log.Warn("session lost", "error", out.Err)
		r.call(func() { r.deps.Handler.Down(out.Err) })
	case Deliver:
		r.call(func() { r.deps.Handler.Frame(out.Frame) })
	case Failed:
		r.mu.Lock()
		r.status.LastError, r.status.Class = out.Err.Error(), out.Class.String()
		r.status.NextTry = r.deps.Clock.Now().Add(out.Retry)
		r.mu.Unlock()
		var refusal *RejectError
		if errors.As(out.Err, &refusal) {
			r.call(func() { r.deps.Handler.Refused(refusal.Reject) })
		}
		r.deps.Log.Warn("no session", "error", out.Err, "class", out.Class, "retry_in", out.Retry.Round(time.Millisecond))
	}
}

func (r *running) call(f func()) { r.waiting = append(r.waiting, f) }

func (r *running) up(out Up) {
	r.mu.Lock()
	l := r.core.links[out.Link]
	r.current, r.epoch = out.Link, out.Welcome.GetEpoch()
	r.status = Status{
		Connected: true, Transport: l.transport.String(), Gateway: out.Welcome.GetGateway(), Epoch: r.epoch,
		Since: r.deps.Clock.Now(),
	}
	r.mu.Unlock()
	r.deps.Log.Info("session up", "session", out.Welcome.GetEpoch(), "gateway", out.Welcome.GetGateway(), "transport", l.transport)
	r.call(func() { r.deps.Handler.Up(out.Welcome) })
}

// dial makes a link in a goroutine of its own, which then is its reader.
func (r *running) dial(out Dial) {
	ctx, cancel := context.WithCancel(r.ctx)
	l := &runningLink{cancel: cancel, outbox: newOutbox()}
	r.links[out.Link] = l
	r.mu.Lock()
	r.outboxes[out.Link] = l.outbox
	r.mu.Unlock()
	r.group.Go(func() {
		made, err := r.deps.Dialer.Dial(ctx, out.Transport)
		if err != nil {
			cancel()
			r.inputs <- Lost{out.Link, err}
			return
		}
		// The writer and the closer are joined with everything else in drain.
		written := make(chan struct{})
		r.group.Go(func() { defer close(written); r.write(made, l.outbox) })
		r.group.Go(func() { r.closer(ctx, made, l.outbox, written) })
		r.inputs <- Dialed{out.Link}
		err = r.read(ctx, out.Link, made)
		if ctx.Err() == nil {
			l.outbox.drop() // the link failed: nothing can be sent any more
		}
		cancel()
		r.inputs <- Lost{out.Link, err}
	})
}

// closer ends a link once its context has ended: what is queued is sent first,
// for a bounded time, unless the outbox was dropped.
func (r *running) closer(ctx context.Context, l Link, o *outbox, written <-chan struct{}) {
	<-ctx.Done()
	o.finish()
	timer := r.deps.Clock.NewTimer(flushTimeout)
	defer timer.Stop()
	select {
	case <-timer.C():
	case <-written:
	}
	o.drop()
	l.Close()
}

// read is a link's reader.
func (r *running) read(ctx context.Context, number int, l Link) error {
	for {
		frame, err := l.Receive()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = errors.New("the gateway closed the session")
			}
			return err
		}
		select {
		case r.received <- Received{number, frame}:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// write is a link's writer. When it fails it ends the link, and so the reader.
func (r *running) write(l Link, o *outbox) {
	for {
		frame, more := o.pop()
		switch {
		case frame != nil:
			if l.Send(frame) != nil {
				o.drop()
				l.Close()
				return
			}
		case !more:
			return
		default:
			<-o.signal
		}
	}
}

func (r *running) close(out Close) {
	l := r.links[out.Link]
	if l == nil {
		return
	}
	delete(r.links, out.Link)
	r.mu.Lock()
	delete(r.outboxes, out.Link)
	r.mu.Unlock()
	if !out.Flush {
		l.outbox.drop()
	}
	l.cancel()
}

func (s *Session) push(number int, p Priority, frame *bcdv1.ClientFrame) bool {
	s.mu.Lock()
	o := s.outboxes[number]
	s.mu.Unlock()
	return o != nil && o.push(p, frame)
}

// Send queues a frame on the session, with its epoch. False: there is no
// session, or no place; what matters is sent again on the next one. A queue of
// outcomes that is full ends the session for that.
func (s *Session) Send(p Priority, frame *bcdv1.ClientFrame) bool {
	s.mu.Lock()
	number, epoch := s.current, s.epoch
	s.mu.Unlock()
	if number == 0 {
		return false
	}
	frame.Epoch = epoch
	if s.push(number, p, frame) {
		return true
	}
	if p <= Outcomes {
		s.mu.Lock()
		o := s.outboxes[number]
		s.mu.Unlock()
		if o != nil {
			o.drop() // the writer ends; see overflow
			s.overflow(number)
		}
	}
	return false
}

// overflow ends a link whose urgent queue is full: the gateway reads too
// slowly, and a new session sends again what matters.
func (s *Session) overflow(number int) {
	select {
	case s.inputs <- Lost{number, errors.New("the gateway does not read fast enough: too much waits to be sent")}:
	default: // the loop is busy with the end of it already
	}
}

// IdentityChanged says that a new certificate is in use: back-off begins anew.
func (s *Session) IdentityChanged(ctx context.Context) {
	select {
	case s.inputs <- IdentityChanged{}:
	case <-ctx.Done():
	}
}

// ServerTime is mark + elapsed; false before the first mark.
func (s *Session) ServerTime() (time.Time, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.core.ServerTime(s.deps.Clock.Now())
}

// Clock is a copy of the server-time clock.
func (s *Session) Clock() servertime.Clock {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.core.Clock()
}

// Status is a snapshot.
func (s *Session) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := s.status
	clock := s.core.Clock()
	status.MarkAge, status.ServerTimeKnown = clock.Age(s.deps.Clock.Now())
	if !status.ServerTimeKnown {
		status.MarkAge = 0
	}
	status.UnknownFrames, status.StaleFrames = s.core.unknown, s.core.stale
	return status
}
