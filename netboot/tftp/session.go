package tftp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"time"
)

// session is the shell around a transfer: its goroutine, its socket, its file.
type session struct {
	server  *Server
	key     sessionKey
	request string // the packet
	ctx     context.Context
	cancel  context.CancelCauseFunc
	inbox   chan []byte // of a single-port server; nil otherwise
	heard   atomic.Bool // the client answered
}

// put hands a packet that came to the shared port to the session. It is lost
// when the session is behind.
func (s *session) put(packet []byte) {
	select {
	case s.inbox <- append([]byte(nil), packet...):
	default:
	}
}

// link is the session's way to its client.
type link interface {
	// receive waits until the deadline, and then fails with an error that is
	// os.ErrDeadlineExceeded. What it gives is good until the next call.
	receive(deadline time.Time) ([]byte, error)
	send(run []byte, size int) error
}

// ownPort is the link of RFC 1350: a port for this transfer alone.
type ownPort struct {
	socket Socket
	peer   netip.AddrPort
	at     Arrival
	buffer [maxPacket]byte
}

func (p *ownPort) receive(deadline time.Time) ([]byte, error) {
	n, _, _, err := p.socket.Receive(p.buffer[:], deadline)
	return p.buffer[:n], err
}

func (p *ownPort) send(run []byte, size int) error {
	return p.socket.Send(run, size, p.peer, p.at)
}

// sharedPort is the link of a single-port server.
type sharedPort struct {
	*session
	socket Socket
	at     Arrival
	timer  *time.Timer
}

func (p *sharedPort) receive(deadline time.Time) ([]byte, error) {
	p.timer.Reset(time.Until(deadline))
	select {
	case packet := <-p.inbox:
		return packet, nil
	case <-p.timer.C:
		return nil, os.ErrDeadlineExceeded
	case <-p.ctx.Done():
		return nil, context.Cause(p.ctx)
	}
}

func (p *sharedPort) send(run []byte, size int) error {
	return p.socket.Send(run, size, p.key.peer, p.at)
}

// run serves one request from its beginning to its end.
func (s *session) run(socket Socket, at Arrival, r request) {
	peer := s.key.peer
	event := Event{Peer: peer, Local: at.Local, Name: r.name}
	file, err := open(func(name string) (File, error) {
		event.Name = name
		return s.server.config.Open(name, peer)
	}, r.name)
	if err != nil {
		refused := refusalFor(err)
		packet := errorPacket(refused.code, refused.message)
		_ = socket.Send(packet, len(packet), peer, at)
		event.Type, event.Message = EventRefused, fmt.Sprintf("%s: %v", refused.message, err)
		s.server.observe(event)
		return
	}
	defer file.Close()
	event.Size = file.Size()

	var l link
	if s.inbox != nil {
		timer := time.NewTimer(firstWait)
		defer timer.Stop()
		l = &sharedPort{session: s, socket: socket, at: at, timer: timer}
	} else {
		own, err := socket.Dial(peer, at)
		if err != nil {
			event.Type, event.Message = EventAborted, fmt.Sprintf("no socket to answer from %s: %v", at.Local, err)
			s.server.observe(event)
			return
		}
		stop := context.AfterFunc(s.ctx, func() { own.Close() })
		defer stop()
		defer own.Close()
		l = &ownPort{socket: own, peer: peer, at: at}
	}

	t := newTransfer(file.Size(), negotiate(r.options, file.Size(), socket.MaxData(at)))
	event.Type, event.Message = EventRequest, fmt.Sprintf("blksize %d, windowsize %d", t.block, t.window)
	s.server.observe(event)
	last, err := s.exchange(l, t, file)
	event.Bytes, event.Resends, event.Message = t.bytes(file.Size()), t.resends, ""
	switch {
	case last.done:
		event.Type = EventDone
	case last.quiet && t.acked == 0:
		event.Type, event.Message = EventProbed, last.failed
	default:
		event.Type, event.Message = EventAborted, last.failed
		if err != nil {
			event.Message = err.Error()
		}
	}
	s.server.observe(event)
}

// exchange runs the transfer until it is done or failed, which the last step
// says, or cannot go on, which the error says.
func (s *session) exchange(l link, t *transfer, file File) (step, error) {
	buffer := make([]byte, t.window*(4+t.block))
	next := t.start(time.Now())
	for {
		switch {
		case next.done || next.failed != "":
			return next, nil
		case next.oack:
			if err := sendErr(l.send(t.oack, len(t.oack))); err != nil {
				return next, err
			}
		case next.from > 0:
			run, err := fill(buffer, file, t.block, next.from, next.to)
			if err != nil {
				packet := errorPacket(codeUndefined, "the file cannot be read")
				_ = l.send(packet, len(packet))
				return next, err
			}
			if err := sendErr(l.send(run, 4+t.block)); err != nil {
				return next, err
			}
		}
		packet, err := l.receive(t.deadline())
		switch {
		case err == nil:
			s.heard.Store(true)
			next = t.received(time.Now(), packet)
		case errors.Is(err, os.ErrDeadlineExceeded):
			next = t.expired(time.Now())
		case s.ctx.Err() != nil:
			return next, context.Cause(s.ctx)
		case errors.Is(err, syscall.ECONNREFUSED):
			// ICMP: nobody has the port any more.
			if t.agreed && t.sent == t.blocks {
				return next, errors.New(t.silence())
			}
			return next, fmt.Errorf("the client closed its port after block %d of %d", t.acked, t.blocks)
		default:
			next = t.expired(time.Now())
		}
	}
}

// sendErr lets the errors pass that a later try may not have: a full queue, a
// link that is down for a moment, an ICMP message that is read in its turn.
func sendErr(err error) error {
	for _, passing := range []error{syscall.ENOBUFS, syscall.EAGAIN, syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.ENETDOWN, syscall.ECONNREFUSED, syscall.EPERM} {
		if errors.Is(err, passing) {
			return nil
		}
	}
	return err
}

// fill puts the DATA packets of blocks from to to one behind the other into the
// buffer. All have 4+block bytes but a file's last.
func fill(buffer []byte, file File, block int, from, to int64) ([]byte, error) {
	used := 0
	size := file.Size()
	for n := from; n <= to; n++ {
		offset := (n - 1) * int64(block)
		length := int(min(int64(block), size-offset))
		packet := buffer[used : used+4+length]
		binary.BigEndian.PutUint16(packet, opData)
		binary.BigEndian.PutUint16(packet[2:], uint16(n))
		if got, err := file.ReadAt(packet[4:], offset); got < length {
			return nil, fmt.Errorf("read %d bytes at %d: %w", length, offset, errors.Join(err, io.ErrUnexpectedEOF))
		}
		used += len(packet)
	}
	return buffer[:used], nil
}
