package session

import (
	"errors"
	"io"
	"sync"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// errPipeClosed is what Send returns on a closed pipe.
var errPipeClosed = errors.New("the link is closed")

// Pipe is a link in memory, for the simulator and for tests: what the client
// end sends the gateway end receives, and the other way round.
func Pipe() (Link, *GatewayEnd) {
	p := &pipe{up: make(chan *bcdv1.ClientFrame, 16), down: make(chan *bcdv1.ServerFrame, 16), done: make(chan struct{})}
	return (*clientEnd)(p), &GatewayEnd{p}
}

type pipe struct {
	up   chan *bcdv1.ClientFrame
	down chan *bcdv1.ServerFrame
	once sync.Once
	done chan struct{}
}

func (p *pipe) close() { p.once.Do(func() { close(p.done) }) }

type clientEnd pipe

func (c *clientEnd) Send(f *bcdv1.ClientFrame) error {
	select {
	case <-c.done:
		return errPipeClosed
	default:
	}
	select {
	case c.up <- f:
		return nil
	case <-c.done:
		return errPipeClosed
	}
}

func (c *clientEnd) Receive() (*bcdv1.ServerFrame, error) { return receive(c.down, c.done) }
func (c *clientEnd) Close()                               { (*pipe)(c).close() }

// GatewayEnd is the other end of a pipe.
type GatewayEnd struct{ p *pipe }

// Send hands a frame to the daemon; it blocks while 16 wait.
func (g *GatewayEnd) Send(f *bcdv1.ServerFrame) error {
	select {
	case g.p.down <- f:
		return nil
	case <-g.p.done:
		return errPipeClosed
	}
}

// Receive returns the next frame, or io.EOF when the link was closed and
// nothing is left.
func (g *GatewayEnd) Receive() (*bcdv1.ClientFrame, error) { return receive(g.p.up, g.p.done) }

// Close ends the link.
func (g *GatewayEnd) Close() { g.p.close() }

// receive prefers what was sent to the end of the link.
func receive[F any](frames <-chan F, done <-chan struct{}) (f F, err error) {
	select {
	case f = <-frames:
		return f, nil
	default:
	}
	select {
	case f = <-frames:
		return f, nil
	case <-done:
		select {
		case f = <-frames:
			return f, nil
		default:
			return f, io.EOF
		}
	}
}
