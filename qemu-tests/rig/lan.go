package rig

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"
)

const (
	// maxAddresses bounds what the switch learns; a test has a handful.
	maxAddresses = 1024
	// queueLength is how many frames may wait for a port's reader. A window of
	// a bulk transfer fits; what comes on top is lost, as in any switch.
	queueLength = 1024
	// headerLength is an Ethernet frame's least: two addresses and a type.
	headerLength = 14
)

// LAN is an Ethernet switch in this process. Machines plug in by a socket
// (NIC.Socket), network namespaces by a TAP device. It learns where an address
// is, and does to a port's frames what its Faults say. What is sent is
// captured in lan.pcap in the LAN's folder, lost frames too.
type LAN struct {
	seed    uint64
	sockets string
	capture *capture

	mu        sync.Mutex
	ports     []*Port
	addresses map[[6]byte]*Port
	closed    bool
}

// Faults is what happens to each frame that passes a port, in either
// direction. The zero value is a good cable.
type Faults struct {
	// Loss and Duplicate are probabilities, 0 to 1.
	Loss, Duplicate float64
	// Delay comes before a frame leaves the switch; the order stays.
	Delay time.Duration
	// Cut loses everything: the cable is out, and neither end sees that its
	// link is down.
	Cut bool
}

// Counts is what a port has seen.
type Counts struct {
	// Sent is what came in from the port's device, Delivered what went out to
	// it, Lost what faults or a full queue took away in either direction.
	Sent, Delivered, Lost uint64
}

// wire carries frames between a port and its device.
type wire interface {
	// readFrame gives the next frame, which is good until the next call.
	readFrame() ([]byte, error)
	writeFrame(frame []byte) error
	Close() error
}

// Port is a place of a LAN where one device is plugged in.
type Port struct {
	lan    *LAN
	name   string
	socket string
	listen net.Listener
	queue  chan departure
	done   chan struct{}

	// All below is under lan.mu.
	wire   wire
	faults Faults
	counts Counts
	rand   *rand.Rand
}

// departure is a frame and when it leaves.
type departure struct {
	frame []byte
	at    time.Time
}

// NewLAN gives a switch whose losses repeat with the seed, as far as the order
// of frames at each port does. Its capture is in dir.
func NewLAN(dir string, seed uint64) (*LAN, error) {
	c, err := newCapture(filepath.Join(dir, LANCapture))
	if err != nil {
		return nil, fmt.Errorf("LAN: %w", err)
	}
	// As in VM: a socket's path has at most 107 bytes.
	sockets, err := os.MkdirTemp("", "bcd-lan-")
	if err != nil {
		return nil, errors.Join(fmt.Errorf("LAN: %w", err), c.Close())
	}
	return &LAN{seed: seed, sockets: sockets, capture: c, addresses: map[[6]byte]*Port{}}, nil
}

// RunLAN gives a switch for a test, which ends with it. Its capture stays with
// the folder dir.
func RunLAN(t testing.TB, dir string, seed uint64) *LAN {
	t.Helper()
	l, err := NewLAN(dir, seed)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// Port gives a port for a machine's network card.
func (l *LAN) Port(name string) (*Port, error) {
	l.mu.Lock()
	number := len(l.ports)
	l.mu.Unlock()
	socket := filepath.Join(l.sockets, fmt.Sprint(number))
	listen, err := net.Listen("unix", socket)
	if err != nil {
		return nil, fmt.Errorf("LAN port %s: %w", name, err)
	}
	p, err := l.add(name, nil)
	if err != nil {
		return nil, errors.Join(err, listen.Close())
	}
	p.socket, p.listen = socket, listen
	go p.accept()
	return p, nil
}

// add plugs in a port, with its device when that is there already.
func (l *LAN) add(name string, w wire) (*Port, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, fmt.Errorf("LAN port %s: the LAN is closed", name)
	}
	p := &Port{lan: l, name: name, queue: make(chan departure, queueLength), done: make(chan struct{}), wire: w,
		rand: rand.New(rand.NewPCG(l.seed, uint64(len(l.ports))))}
	l.ports = append(l.ports, p)
	go p.deliver()
	if w != nil {
		go p.read(w)
	}
	return p, nil
}

// Close unplugs everything.
func (l *LAN) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	l.closed = true
	ports := slices.Clone(l.ports)
	var wires []wire
	for _, p := range ports {
		close(p.done)
		if p.wire != nil {
			wires = append(wires, p.wire)
			p.wire = nil
		}
	}
	l.mu.Unlock()
	for _, w := range wires {
		w.Close()
	}
	for _, p := range ports {
		if p.listen != nil {
			p.listen.Close()
		}
	}
	return errors.Join(l.capture.Close(), os.RemoveAll(l.sockets))
}

// Socket is where QEMU connects, for NIC.Socket; empty for a TAP device's port.
func (p *Port) Socket() string { return p.socket }

// SetFaults says what happens to frames from now on.
func (p *Port) SetFaults(f Faults) {
	p.lan.mu.Lock()
	defer p.lan.mu.Unlock()
	p.faults = f
}

// Counts gives what the port has seen until now.
func (p *Port) Counts() Counts {
	p.lan.mu.Lock()
	defer p.lan.mu.Unlock()
	return p.counts
}

// accept takes QEMU's connection, and a new one when the machine was off.
func (p *Port) accept() {
	for {
		conn, err := p.listen.Accept()
		if err != nil {
			return
		}
		w := newStream(conn)
		p.lan.mu.Lock()
		old := p.wire
		if p.lan.closed {
			old = w
		} else {
			p.wire = w
		}
		p.lan.mu.Unlock()
		if old != nil {
			old.Close()
		}
		if old != wire(w) {
			go p.read(w)
		}
	}
}

// read forwards what the device sends, until it is unplugged.
func (p *Port) read(w wire) {
	for {
		frame, err := w.readFrame()
		if err != nil {
			break
		}
		p.lan.forward(p, slices.Clone(frame), time.Now())
	}
	w.Close()
	p.lan.mu.Lock()
	defer p.lan.mu.Unlock()
	if p.wire == w {
		p.wire = nil
	}
}

// deliver writes to the device what waits for it.
func (p *Port) deliver() {
	for {
		var d departure
		select {
		case <-p.done:
			return
		case d = <-p.queue:
		}
		if wait := time.Until(d.at); wait > 0 {
			select {
			case <-p.done:
				return
			case <-time.After(wait):
			}
		}
		p.lan.mu.Lock()
		w := p.wire
		p.lan.mu.Unlock()
		// A machine that is off has nothing plugged in.
		ok := w != nil && w.writeFrame(d.frame) == nil
		p.lan.mu.Lock()
		if ok {
			p.counts.Delivered++
		} else {
			p.counts.Lost++
		}
		p.lan.mu.Unlock()
	}
}

// forward takes a frame from a port to the one where its destination is, or to
// all others when that is unknown or a group.
func (l *LAN) forward(from *Port, frame []byte, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(frame) < headerLength || l.closed {
		return
	}
	from.counts.Sent++
	l.capture.add(frame, now)
	to, source := [6]byte(frame[:6]), [6]byte(frame[6:12])
	for range from.copies() {
		if _, known := l.addresses[source]; source[0]&1 == 0 && (known || len(l.addresses) < maxAddresses) {
			l.addresses[source] = from
		}
		if p := l.addresses[to]; p != nil {
			if p != from {
				p.enqueue(frame, now.Add(from.faults.Delay))
			}
			continue
		}
		for _, p := range l.ports {
			if p != from {
				p.enqueue(frame, now.Add(from.faults.Delay))
			}
		}
	}
}

// copies is how many of a frame come through a port's cable: 0 when it is
// lost. Both draws are made for each frame, so that a changed probability does
// not shift what happens to later ones.
func (p *Port) copies() int {
	lost, twice := p.rand.Float64() < p.faults.Loss, p.rand.Float64() < p.faults.Duplicate
	switch {
	case lost || p.faults.Cut:
		p.counts.Lost++
		return 0
	case twice:
		return 2
	}
	return 1
}

func (p *Port) enqueue(frame []byte, at time.Time) {
	for range p.copies() {
		select {
		case p.queue <- departure{frame, at.Add(p.faults.Delay)}:
		default:
			p.counts.Lost++
		}
	}
}
