package tftp

import (
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"
)

// wire is a network in memory, which loses packets as it is told to.
type wire struct {
	mu    sync.Mutex
	ports map[netip.AddrPort]*port
	last  uint16
	lose  func() bool // called under mu
	count int         // packets that were put on it
}

type datagram struct {
	from netip.AddrPort
	data []byte
}

// port is one socket on a wire: a Socket to the server, a net.PacketConn to
// clients.
type port struct {
	*wire
	addr, peer netip.AddrPort
	in         chan datagram
	closed     chan struct{}
	once       sync.Once
	deadline   time.Time
}

func newWire(lose func() bool) *wire {
	return &wire{ports: make(map[netip.AddrPort]*port), last: 40000, lose: lose}
}

// losing loses one packet in n, the same ones each time.
func losing(n int) func() bool {
	dice := rand.New(rand.NewPCG(7, uint64(n)))
	return func() bool { return dice.IntN(n) == 0 }
}

func never() bool { return false }

func (w *wire) open(addr netip.AddrPort) *port {
	w.mu.Lock()
	defer w.mu.Unlock()
	if addr.Port() == 0 {
		w.last++
		addr = netip.AddrPortFrom(addr.Addr(), w.last)
	}
	p := &port{wire: w, addr: addr, in: make(chan datagram, 256), closed: make(chan struct{})}
	w.ports[addr] = p
	return p
}

func (p *port) put(data []byte, to netip.AddrPort) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count++
	target := p.ports[to]
	if target == nil || p.lose() || target.peer.IsValid() && target.peer != p.addr {
		return
	}
	select {
	case target.in <- datagram{p.addr, append([]byte(nil), data...)}:
	default:
	}
}

func (p *port) Receive(b []byte, deadline time.Time) (int, netip.AddrPort, Arrival, error) {
	var expired <-chan time.Time
	if !deadline.IsZero() {
		timer := time.NewTimer(time.Until(deadline))
		defer timer.Stop()
		expired = timer.C
	}
	select {
	case d := <-p.in:
		return copy(b, d.data), d.from, Arrival{Local: p.addr.Addr()}, nil
	case <-expired:
		return 0, netip.AddrPort{}, Arrival{}, os.ErrDeadlineExceeded
	case <-p.closed:
		return 0, netip.AddrPort{}, Arrival{}, net.ErrClosed
	}
}

func (p *port) Send(run []byte, size int, to netip.AddrPort, _ Arrival) error {
	for len(run) > 0 {
		n := min(size, len(run))
		p.put(run[:n], to)
		run = run[n:]
	}
	return nil
}

func (p *port) Dial(peer netip.AddrPort, at Arrival) (Socket, error) {
	own := p.open(netip.AddrPortFrom(at.Local, 0))
	own.peer = peer
	return own, nil
}

func (p *port) MaxData(Arrival) int { return 1468 }

func (p *port) Close() error {
	p.once.Do(func() {
		close(p.closed)
		p.mu.Lock()
		delete(p.ports, p.addr)
		p.mu.Unlock()
	})
	return nil
}

// The rest of a net.PacketConn.

func (p *port) ReadFrom(b []byte) (int, net.Addr, error) {
	n, from, _, err := p.Receive(b, p.deadline)
	return n, net.UDPAddrFromAddrPort(from), err
}

func (p *port) WriteTo(b []byte, to net.Addr) (int, error) {
	p.put(b, to.(*net.UDPAddr).AddrPort())
	return len(b), nil
}

func (p *port) SetReadDeadline(t time.Time) error { p.deadline = t; return nil }
func (p *port) SetDeadline(t time.Time) error     { return p.SetReadDeadline(t) }
func (p *port) SetWriteDeadline(time.Time) error  { return nil }
func (p *port) LocalAddr() net.Addr               { return net.UDPAddrFromAddrPort(p.addr) }
