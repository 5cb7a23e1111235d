// Package tftp is a read-only TFTP server for firmware that boots from the
// network: RFC 1350 with the options of RFC 2347, 2348 (blksize), 2349 (tsize,
// timeout) and 7440 (windowsize).
//
// The parties:
//
//   - The client is the firmware of some machine: UEFI, a BIOS option ROM, iPXE,
//     U-Boot, or shim. It is not trusted, and neither is anybody else who can
//     send us a packet.
//   - The [Server] answers the requests that come to one [Socket].
//   - The caller says what a name stands for ([Config.Open]) and is told what
//     happens ([Config.Observe]). Nothing else is served, nothing is written.
//
// A session is one transfer to one client, with one goroutine and a buffer of
// one window. transfer.go is its pure core: what came and when it came in, what
// to send out. request.go reads requests and agrees on options.
//
// Why not the server of pin/tftp/v3, which the tests have as a client: v3.1.0
// drops windowsize and timeout, takes no option name in capitals, gives no
// tsize for an empty file, falls back to 512-byte blocks in its single-port
// mode, and its SetAnticipate sends windows that nobody negotiated. UEFI asks
// for a window of 4 today, and without it each block costs a round trip.
package tftp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"sync"
	"time"
)

const (
	// maxSessions is more machines than a provisioning LAN powers on at once;
	// further ones ask again, as each client does when it gets no answer.
	maxSessions = 512
	// maxSessionsPerPeer lets a machine probe with tsize and ask again while the
	// former session ends, and keeps one machine from taking all sessions.
	maxSessionsPerPeer = 8
	// inbox is how many packets wait for a session of a single-port server. A
	// client has one acknowledgement on its way, and doubles.
	inbox = 8
	// maxPacket is the most that is read of a client's packet: a request, or an
	// ERROR with its message.
	maxPacket = maxRequest + 1
	// maxMessage is the most of an Event's message, in bytes.
	maxMessage = 256
)

// File is what a name stands for. It is closed when its transfer has ended.
type File interface {
	io.ReaderAt
	io.Closer
	// Size is the exact length in bytes. It must not change.
	Size() int64
}

// Types of an [Event].
const (
	// EventRequest: a transfer begins.
	EventRequest = "tftp.request"
	// EventDone: the last block was acknowledged.
	EventDone = "tftp.done"
	// EventProbed: the client learned the size and ended the transfer, which is
	// how UEFI begins (it asks for tsize, sends ERROR 8 and asks again).
	EventProbed = "tftp.probed"
	// EventAborted: the transfer ended before its last block was acknowledged.
	EventAborted = "tftp.aborted"
	// EventRefused: the request was answered by an ERROR.
	EventRefused = "tftp.refused"
	// EventBusy: the request was dropped, because there are too many transfers.
	EventBusy = "tftp.busy"
)

// Event is something that happened to one transfer.
type Event struct {
	Type    string
	Message string // at most 256 bytes; what the client sent is quoted in it
	Peer    netip.AddrPort
	Local   netip.Addr // the address the request came to
	Name    string     // as Open was asked for it; "" when the request has none
	Size    int64      // of the file, in bytes
	Bytes   int64      // that the client acknowledged
	Resends int        // windows and OACKs that were sent more than once
}

// Config is what a [Server] works with.
type Config struct {
	// Open gives the file of a name, which has single slashes and no leading
	// one; a name in capitals that does not exist (fs.ErrNotExist) is asked for
	// once more in lower case. An error that is fs.ErrPermission says that this
	// client does not get it; others that it cannot be read now. Open is called
	// by the session's goroutine, by many at once.
	Open func(name string, peer netip.AddrPort) (File, error)
	// Observe is told of each Event, by many goroutines at once; it must be
	// quick. It may be nil.
	Observe func(Event)
	// SinglePort sends everything from the port that requests come to. Firewalls
	// that do not follow TFTP let such transfers through, and some firmware does
	// not: RFC 1350 section 4 has a port of its own for each transfer.
	SinglePort bool
}

// Server serves files. Use [New].
type Server struct {
	config Config

	mu       sync.Mutex
	sessions map[sessionKey]*session
	peers    map[netip.Addr]int // sessions of each
	running  sync.WaitGroup
}

type sessionKey struct {
	peer  netip.AddrPort
	local netip.Addr
}

// New makes a server.
func New(c Config) *Server {
	if c.Observe == nil {
		c.Observe = func(Event) {}
	}
	return &Server{config: c, sessions: make(map[sessionKey]*session), peers: make(map[netip.Addr]int)}
}

// Serve answers what comes to the socket until ctx ends, and closes it. It
// returns when the last of its sessions has ended, which is at once; the error
// is nil when ctx ended it.
func (s *Server) Serve(ctx context.Context, socket Socket) error {
	ctx, cancel := context.WithCancel(ctx)
	defer s.running.Wait()
	defer cancel()
	stop := context.AfterFunc(ctx, func() { socket.Close() })
	defer stop()
	defer socket.Close()
	buffer := make([]byte, maxPacket)
	for {
		n, peer, at, err := socket.Receive(buffer, time.Time{})
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("tftp: the socket was closed: %w", err)
		case err != nil:
			// An ICMP error that belongs to an earlier answer: that client's
			// session ends by itself.
			continue
		}
		s.packet(ctx, socket, buffer[:n], peer, at)
	}
}

// packet handles what came to the port of requests.
func (s *Server) packet(ctx context.Context, socket Socket, packet []byte, peer netip.AddrPort, at Arrival) {
	key := sessionKey{peer, at.Local}
	s.mu.Lock()
	old := s.sessions[key]
	s.mu.Unlock()
	request, err := parseRequest(packet)
	var refused *refusal
	switch {
	case err == nil:
	case errors.As(err, &refused):
		s.refuse(socket, peer, at, refused)
		return
	default:
		if old != nil && s.config.SinglePort {
			old.put(packet)
		}
		return
	}
	if old != nil {
		if old.request == string(packet) && !old.heard.Load() {
			return // the client is as impatient as our first answer is late
		}
		old.cancel(errReplaced) // restarted, with the port it had before
	}
	s.mu.Lock()
	if len(s.sessions) >= maxSessions || s.peers[peer.Addr()] >= maxSessionsPerPeer {
		all, ofPeer := len(s.sessions), s.peers[peer.Addr()]
		s.mu.Unlock()
		s.observe(Event{Type: EventBusy, Peer: peer, Local: at.Local, Name: request.name,
			Message: fmt.Sprintf("%d transfers are running, %d of them to this address; the client will ask again", all, ofPeer)})
		return
	}
	next := &session{server: s, key: key, request: string(packet)}
	next.ctx, next.cancel = context.WithCancelCause(ctx)
	if s.config.SinglePort {
		next.inbox = make(chan []byte, inbox)
	}
	// A replaced session is still counted with its address until it has ended.
	s.sessions[key] = next
	s.peers[peer.Addr()]++
	s.running.Add(1)
	s.mu.Unlock()
	go func() {
		defer s.running.Done()
		defer s.forget(next)
		next.run(socket, at, request)
	}()
}

var errReplaced = errors.New("the client asked again from the same port")

func (s *Server) forget(ended *session) {
	ended.cancel(nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sessions[ended.key] == ended {
		delete(s.sessions, ended.key)
	}
	peer := ended.key.peer.Addr()
	if s.peers[peer]--; s.peers[peer] <= 0 {
		delete(s.peers, peer)
	}
}

func (s *Server) refuse(socket Socket, peer netip.AddrPort, at Arrival, r *refusal) {
	packet := errorPacket(r.code, r.message)
	// One that is lost is asked for again.
	_ = socket.Send(packet, len(packet), peer, at)
	s.observe(Event{Type: EventRefused, Message: r.message, Peer: peer, Local: at.Local})
}

func (s *Server) observe(e Event) {
	e.Message = shorten(e.Message)
	s.config.Observe(e)
}

func shorten(message string) string { return message[:min(len(message), maxMessage)] }

// refusalFor words what Open returned for the client.
func refusalFor(err error) *refusal {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return &refusal{codeNotFound, "no such file"}
	case errors.Is(err, fs.ErrPermission):
		return &refusal{codeAccess, "not for this machine"}
	}
	return &refusal{codeUndefined, "the file cannot be read now"}
}
