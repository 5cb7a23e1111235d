// Package session holds a daemon's one connection to its gateway: it dials,
// says Hello, beats, notices silence, backs off, and keeps server time.
//
// [Core] is the daemon's end as a step function; [Session] is the shell around
// it, with one reader and one writer goroutine a link. How a link is made is
// the [Dialer]'s: HTTP/2 and, where that does not get through, a WebSocket
// (see [Net]); tests and the simulator use links in memory.
package session

import (
	"errors"
	"time"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// Protocol is the only version of the session there is.
	Protocol = 1
	// MaxFrame bounds a frame of either direction.
	MaxFrame = 5 << 20

	// defaultBeat is the heartbeat's interval until Welcome names one; what it
	// names is kept within minBeat and maxBeat.
	defaultBeat = 15 * time.Second
	minBeat     = time.Second
	maxBeat     = time.Minute
	// SilenceBound is how long a live session may hear nothing at a heartbeat
	// of 15 s, whether or not a Send is blocked: one beat at its latest
	// (16.5 s) and 8.5 s for the answer. It scales with the interval.
	SilenceBound = 25 * time.Second

	// dialTimeout bounds a dial with its handshake, welcomeTimeout the wait
	// for the answer to Hello: the gateway may probe an old session for 3 s.
	dialTimeout    = 20 * time.Second
	welcomeTimeout = 15 * time.Second

	backoffBase    = time.Second
	backoffCap     = time.Minute
	backoffCapAuth = 10 * time.Minute
	// healthyAfter is how long a session must live to be worth a fresh start
	// of the back-off.
	healthyAfter = time.Minute
	// maxRetryAfter bounds what a gateway may ask for, and maxSpread the
	// window of a reconnect or a drain.
	maxRetryAfter = time.Hour
	maxSpread     = 10 * time.Minute

	// fastFailure is how soon after it was dialled a link must fail to speak
	// for a middle box that breaks HTTP/2; fastFailures of them choose the
	// WebSocket.
	fastFailure  = 5 * time.Second
	fastFailures = 2
	// probeEvery is how often HTTP/2 is tried while the WebSocket is used.
	probeEvery = time.Hour
)

// Class is a kind of failure; each has its own back-off.
type Class int

// The classes.
const (
	// Network: nothing answered, or it stopped.
	Network Class = iota
	// Busy: a gateway that asks to come later.
	Busy
	// Auth: a gateway that refuses this node, or that this node refuses.
	// Trying soon does not help.
	Auth
	classes
)

func (c Class) String() string {
	return [...]string{"network", "busy", "auth"}[c]
}

// Transport is a way to the gateway.
type Transport int

// The transports.
const (
	HTTP2 Transport = iota
	WebSocket
)

func (t Transport) String() string {
	return [...]string{"http2", "websocket"}[t]
}

// DialError is a dial's failure with what it says about the way.
type DialError struct {
	Class Class
	// NoHTTP2: the way or the peer does not do HTTP/2 (ALPN is not h2, or the
	// handshake was cut), so that the WebSocket is worth a try at once.
	NoHTTP2 bool
	Err     error
}

func (e *DialError) Error() string { return e.Err.Error() }
func (e *DialError) Unwrap() error { return e.Err }

// RejectError is a gateway's refusal.
type RejectError struct{ Reject *bcdv1.Reject }

func (e *RejectError) Error() string {
	return "the gateway refused the session: " + RejectWord(e.Reject.GetCode()) + ": " + e.Reject.GetDetail()
}

// RejectWord is a code's short name, for example BUSY.
func RejectWord(c bcdv1.RejectCode) string {
	const prefix = len("REJECT_CODE_")
	if name := c.String(); len(name) > prefix {
		return name[prefix:]
	}
	return "UNSPECIFIED"
}

// classOf sorts a refusal.
func classOf(c bcdv1.RejectCode) Class {
	if c == bcdv1.RejectCode_REJECT_CODE_BUSY || c == bcdv1.RejectCode_REJECT_CODE_UNSPECIFIED {
		return Busy
	}
	return Auth
}

// Errors that end a link.
var (
	// ErrSilent: nothing was heard for too long.
	ErrSilent = errors.New("the gateway has gone silent")
	// ErrProtocol: the peer broke the protocol.
	ErrProtocol = errors.New("protocol error")
	errDrained  = errors.New("the gateway drained this connection, another one is in use")
	errStopped  = errors.New("the daemon stops")
)
