package session

import (
	"errors"
	"fmt"
	"time"

	"github.com/better-compute/bcd/agent/servertime"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Config is what a Core must know.
type Config struct {
	// Random gives numbers in [0, 1).
	Random func() float64
	// LastEpoch is the highest epoch this identity has seen.
	LastEpoch int64
	// TimeFloor is the latest server time that is remembered; zero is none.
	TimeFloor time.Time
	// Fallback: the dialer knows the WebSocket.
	Fallback bool
}

// Core is the daemon's end of the session. It is not safe for concurrent use.
// Times given to it are readings of the node's monotonic clock.
type Core struct {
	config  Config
	clock   servertime.Clock
	links   map[int]*link
	next    int // number of the next link
	current int // the session, 0 none
	pending int // being made, 0 none

	started, stopped bool
	dialAt           time.Time // zero: no dial is due
	attempts         [classes]int
	spread           time.Duration
	lastEpoch        int64

	transport   Transport
	fast        int
	probeAt     time.Time // of HTTP/2, while the WebSocket is used
	probing     bool
	unknown     int64
	stale       int64
	lastErr     error
	lastRefusal *bcdv1.Reject
}

type link struct {
	transport Transport
	phase     phase
	since     time.Time // of the phase
	dialed    time.Time
	heard     time.Time
	beatAt    time.Time
	beat      time.Duration
	sequence  int64
	epoch     int64
	draining  bool
}

type phase int

const (
	dialing phase = iota
	greeting
	live
)

// NewCore returns a core; the first input is Start.
func NewCore(config Config) *Core {
	return &Core{config: config, links: map[int]*link{}, next: 1, lastEpoch: config.LastEpoch, clock: servertime.New(config.TimeFloor)}
}

// ServerTime is mark + elapsed; false before the first mark.
func (c *Core) ServerTime(now time.Time) (time.Time, bool) { return c.clock.Now(now) }

// Clock is a copy of the server-time clock.
func (c *Core) Clock() servertime.Clock { return c.clock }

// Epoch is the live session's; 0 is none.
func (c *Core) Epoch() int64 {
	if l := c.links[c.current]; l != nil {
		return l.epoch
	}
	return 0
}

// Step takes one input at a monotonic time.
func (c *Core) Step(now time.Time, in Input) []Output {
	if c.stopped {
		return nil
	}
	switch in := in.(type) {
	case Start:
		c.started = true
		return c.dial(now, c.transport)
	case Dialed:
		return c.dialed(now, in.Link)
	case Lost:
		return c.lose(now, in.Link, in.Err)
	case Received:
		return c.received(now, in)
	case IdentityChanged:
		c.attempts = [classes]int{}
		if c.pending != 0 || !c.started {
			return nil
		}
		if l := c.links[c.current]; l != nil {
			// The live link stands on the old certificate: the gateway ends it
			// with that, and checks secret requests against its key. Make
			// before break, as after a Drain.
			l.draining = true
		}
		c.dialAt = now
		return c.tick(now)
	case Stop:
		c.stopped = true
		var out []Output
		for number, l := range c.links {
			if l.phase == live {
				out = append(out, c.goodbye(number, "the daemon stops"))
			}
			out = append(out, Close{Link: number, Flush: l.phase == live})
		}
		if c.current != 0 {
			out = append(out, Down{errStopped})
		}
		return out
	case Tick:
		return c.tick(now)
	}
	return nil
}

func (c *Core) dial(now time.Time, t Transport) []Output {
	number := c.next
	c.next++
	c.links[number] = &link{transport: t, phase: dialing, since: now, dialed: now}
	c.pending, c.dialAt = number, time.Time{}
	return []Output{Dial{number, t}}
}

func (c *Core) dialed(now time.Time, number int) []Output {
	l := c.links[number]
	if l == nil || l.phase != dialing {
		return []Output{Close{Link: number}}
	}
	l.phase, l.since, l.heard = greeting, now, now
	return []Output{SayHello{number}}
}

// lose handles the end of a link, for whatever reason.
func (c *Core) lose(now time.Time, number int, err error) []Output {
	return c.end(now, number, err, false)
}

func (c *Core) end(now time.Time, number int, err error, flush bool) []Output {
	l := c.links[number]
	if l == nil {
		return nil
	}
	delete(c.links, number)
	out := []Output{Close{Link: number, Flush: flush}}
	class, retryAfter := Network, time.Duration(0)
	var dialErr *DialError
	var reject *RejectError
	var skew *servertime.SkewError
	switch {
	case errors.As(err, &reject):
		class = classOf(reject.Reject.GetCode())
		retryAfter = min(time.Duration(reject.Reject.GetRetryAfterMs())*time.Millisecond, maxRetryAfter)
	case errors.As(err, &skew), errors.Is(err, ErrProtocol):
		class = Auth
	case errors.As(err, &dialErr):
		class = dialErr.Class
	}
	c.lastErr = err
	switched := c.judgeTransport(now, l, dialErr, reject != nil)
	if number == c.pending {
		c.pending = 0
		if c.probing {
			// A probe of HTTP/2 beside a WebSocket that works.
			c.probing = false
			return out
		}
	}
	wait := c.backoff(class, retryAfter)
	if number == c.current {
		c.current = 0
		out = append(out, Down{err})
		if now.Sub(l.since) >= healthyAfter {
			c.attempts = [classes]int{}
			wait = 0
		}
		// The connected-lost edge: whatever broke this session broke others.
		wait = max(wait, c.jitter(c.spread))
	}
	if switched {
		wait = 0
	}
	if c.pending != 0 {
		return out // the next one is being made already
	}
	if c.current != 0 {
		// The link that should take a drained one's place failed; try again
		// while the old one lives.
		c.dialAt = now.Add(wait)
		return append(out, Failed{err, class, wait})
	}
	if l.draining && !c.dialAt.IsZero() {
		return out // when to go elsewhere was settled by the drain
	}
	c.dialAt = now.Add(wait)
	return append(append(out, Failed{err, class, wait}), c.tick(now)...)
}

// judgeTransport learns from a link that failed; true means that the other
// transport shall be tried at once.
func (c *Core) judgeTransport(now time.Time, l *link, dialErr *DialError, rejected bool) bool {
	if !c.config.Fallback || l.transport != HTTP2 || l.phase == live || rejected || c.probing {
		return false
	}
	switch {
	case dialErr != nil && dialErr.NoHTTP2:
	case dialErr == nil && now.Sub(l.dialed) <= fastFailure:
		if c.fast++; c.fast < fastFailures {
			return false
		}
	default:
		return false
	}
	c.fast, c.transport, c.probeAt = 0, WebSocket, now.Add(probeEvery)
	return true
}

// backoff is full jitter: anything up to the doubled base, and never less than
// what the gateway asked for.
func (c *Core) backoff(class Class, retryAfter time.Duration) time.Duration {
	limit := backoffCap
	if class == Auth {
		limit = backoffCapAuth
	}
	ceiling := limit
	if n := c.attempts[class]; n < 20 {
		ceiling = min(limit, backoffBase<<n)
	}
	c.attempts[class]++
	wait := c.jitter(ceiling)
	if retryAfter > 0 {
		wait = max(wait, retryAfter+c.jitter(retryAfter/2))
	}
	return wait
}

func (c *Core) jitter(d time.Duration) time.Duration {
	return time.Duration(c.config.Random() * float64(d))
}

func (c *Core) received(now time.Time, in Received) []Output {
	l := c.links[in.Link]
	if l == nil || l.phase == dialing {
		return nil
	}
	l.heard = now
	frame := in.Frame
	if frame.GetBody() == nil {
		c.unknown++
		if frame.GetCritical() {
			return c.abort(now, in.Link, fmt.Errorf("%w: the gateway sent a critical frame that this version does not know", ErrProtocol))
		}
		return nil
	}
	if l.phase == greeting {
		return c.greeted(now, in.Link, l, frame)
	}
	if frame.GetEpoch() != l.epoch || in.Link != c.current && !l.draining {
		c.stale++
		return nil
	}
	switch body := frame.GetBody().(type) {
	case *bcdv1.ServerFrame_Welcome:
		return c.abort(now, in.Link, fmt.Errorf("%w: a second Welcome", ErrProtocol))
	case *bcdv1.ServerFrame_Reject:
		c.lastRefusal = body.Reject
		return c.abort(now, in.Link, &RejectError{body.Reject})
	case *bcdv1.ServerFrame_Heartbeat:
		if err := c.mark(now, body.Heartbeat.GetServerTimeMs()); err != nil {
			return c.abort(now, in.Link, err)
		}
		return nil
	case *bcdv1.ServerFrame_Probe:
		return []Output{SendFrame{in.Link, &bcdv1.ClientFrame{Epoch: l.epoch, Body: &bcdv1.ClientFrame_ProbeAnswer{
			ProbeAnswer: &bcdv1.ProbeAnswer{Sequence: body.Probe.GetSequence()}}}}}
	case *bcdv1.ServerFrame_IdentityChallenge:
		return []Output{Prove{in.Link, l.epoch, body.IdentityChallenge}}
	case *bcdv1.ServerFrame_Drain:
		// Make before break: the next link is made while this one lives.
		l.draining = true
		if c.pending == 0 && c.dialAt.IsZero() {
			spread := min(time.Duration(max(0, body.Drain.GetSpreadMs()))*time.Millisecond, maxSpread)
			c.dialAt = now.Add(c.jitter(spread))
		}
		return nil
	}
	return []Output{Deliver{frame}}
}

// greeted handles the frames between Hello and Welcome.
func (c *Core) greeted(now time.Time, number int, l *link, frame *bcdv1.ServerFrame) []Output {
	switch body := frame.GetBody().(type) {
	case *bcdv1.ServerFrame_Reject:
		c.lastRefusal = body.Reject
		return c.abort(now, number, &RejectError{body.Reject})
	case *bcdv1.ServerFrame_IdentityChallenge:
		return []Output{Prove{number, 0, body.IdentityChallenge}}
	case *bcdv1.ServerFrame_Probe:
		return []Output{SendFrame{number, &bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_ProbeAnswer{
			ProbeAnswer: &bcdv1.ProbeAnswer{Sequence: body.Probe.GetSequence()}}}}}
	case *bcdv1.ServerFrame_Welcome:
		return c.welcomed(now, number, l, body.Welcome)
	}
	return c.abort(now, number, fmt.Errorf("%w: %T before Welcome", ErrProtocol, frame.GetBody()))
}

func (c *Core) welcomed(now time.Time, number int, l *link, w *bcdv1.Welcome) []Output {
	switch {
	case w.GetEpoch() <= c.lastEpoch:
		return c.abort(now, number, fmt.Errorf("the gateway offers session epoch %d, this node has seen %d: it answers from an old state", w.GetEpoch(), c.lastEpoch))
	case w.GetServerTimeMs() <= 0:
		return c.abort(now, number, fmt.Errorf("%w: Welcome without server time", ErrProtocol))
	case w.GetProtocol() != 0 && w.GetProtocol() != Protocol:
		return c.abort(now, number, fmt.Errorf("%w: the gateway chose version %d, this daemon speaks %d", ErrProtocol, w.GetProtocol(), Protocol))
	}
	if err := c.mark(now, w.GetServerTimeMs()); err != nil {
		return c.abort(now, number, err)
	}
	l.beat = min(max(time.Duration(w.GetHeartbeatIntervalMs())*time.Millisecond, minBeat), maxBeat)
	if w.GetHeartbeatIntervalMs() == 0 {
		l.beat = defaultBeat
	}
	l.phase, l.since, l.epoch = live, now, w.GetEpoch()
	l.beatAt = now.Add(c.beatWait(l.beat))
	c.spread = min(time.Duration(max(0, w.GetReconnectSpreadMs()))*time.Millisecond, maxSpread)
	c.lastEpoch, c.pending, c.dialAt = w.GetEpoch(), 0, time.Time{}
	c.fast, c.lastErr, c.lastRefusal = 0, nil, nil
	old := c.current
	c.current = number
	c.probing = false
	if l.transport == HTTP2 {
		c.transport, c.probeAt = HTTP2, time.Time{}
	}
	var out []Output
	if old != 0 {
		delete(c.links, old)
		out = append(out, SendFrame{old, &bcdv1.ClientFrame{Epoch: 0, Body: &bcdv1.ClientFrame_Goodbye{
			Goodbye: &bcdv1.Goodbye{Reason: errDrained.Error()}}}}, Close{Link: old, Flush: true})
	}
	return append(out, Up{number, w})
}

// abort ends a link for a reason of our own, and says so to the gateway.
func (c *Core) abort(now time.Time, number int, err error) []Output {
	out := []Output{c.goodbye(number, err.Error())}
	return append(out, c.end(now, number, err, true)...)
}

func (c *Core) goodbye(number int, reason string) Output {
	var epoch int64
	if l := c.links[number]; l != nil {
		epoch = l.epoch
	}
	const longest = 512
	if len(reason) > longest {
		reason = reason[:longest]
	}
	return SendFrame{number, &bcdv1.ClientFrame{Epoch: epoch, Body: &bcdv1.ClientFrame_Goodbye{Goodbye: &bcdv1.Goodbye{Reason: reason}}}}
}

func (c *Core) mark(now time.Time, serverMS int64) error {
	if serverMS <= 0 {
		return nil
	}
	return c.clock.Mark(now, time.UnixMilli(serverMS))
}

// beatWait is the interval ±10 %, so that nodes that came together drift apart.
func (c *Core) beatWait(interval time.Duration) time.Duration {
	return interval*9/10 + c.jitter(interval/5)
}

// silence is the bound at an interval.
func silence(beat time.Duration) time.Duration {
	return time.Duration(float64(SilenceBound) * float64(beat) / float64(defaultBeat))
}

func (c *Core) tick(now time.Time) []Output {
	var out []Output
	for _, number := range c.numbers() {
		l := c.links[number]
		if l == nil {
			continue
		}
		switch {
		case l.phase == dialing && now.Sub(l.since) >= dialTimeout:
			out = append(out, c.lose(now, number, fmt.Errorf("no connection within %s: %w", dialTimeout, ErrSilent))...)
		case l.phase == greeting && now.Sub(l.since) >= welcomeTimeout:
			out = append(out, c.lose(now, number, fmt.Errorf("no answer to Hello within %s: %w", welcomeTimeout, ErrSilent))...)
		case l.phase == live && now.Sub(l.heard) >= silence(l.beat):
			out = append(out, c.lose(now, number, fmt.Errorf("nothing heard for %s: %w", now.Sub(l.heard).Round(time.Second), ErrSilent))...)
		case l.phase == live && !now.Before(l.beatAt):
			l.sequence++
			l.beatAt = now.Add(c.beatWait(l.beat))
			out = append(out, Beat{number, l.epoch, l.sequence})
		}
	}
	if c.pending == 0 && !c.dialAt.IsZero() && !now.Before(c.dialAt) {
		out = append(out, c.dial(now, c.transport)...)
	}
	if c.transport == WebSocket && !c.probeAt.IsZero() && !now.Before(c.probeAt) && c.pending == 0 && c.current != 0 {
		c.probeAt, c.probing = now.Add(probeEvery), true
		out = append(out, c.dial(now, HTTP2)...)
	}
	return out
}

func (c *Core) numbers() []int {
	list := make([]int, 0, 2)
	for n := max(1, c.next-8); n < c.next; n++ { // there are never more than two or three
		if c.links[n] != nil {
			list = append(list, n)
		}
	}
	return list
}

// Next is when Step wants a Tick at the latest; false when never.
func (c *Core) Next() (next time.Time, ok bool) {
	consider := func(t time.Time) {
		if !t.IsZero() && (next.IsZero() || t.Before(next)) {
			next = t
		}
	}
	if c.stopped {
		return next, false
	}
	for _, l := range c.links {
		switch l.phase {
		case dialing:
			consider(l.since.Add(dialTimeout))
		case greeting:
			consider(l.since.Add(welcomeTimeout))
		case live:
			consider(l.beatAt)
			consider(l.heard.Add(silence(l.beat)))
		}
	}
	if c.pending == 0 {
		consider(c.dialAt)
		if c.current != 0 && c.transport == WebSocket {
			consider(c.probeAt)
		}
	}
	return next, !next.IsZero()
}
