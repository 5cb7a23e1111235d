package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/mdlayher/packet"
	"golang.org/x/sys/unix"
)

// FrameConn receives the payloads of Ethernet frames. [packet.Conn] is one.
type FrameConn interface {
	ReadFrom(p []byte) (n int, from net.Addr, err error)
	Close() error
}

// LLDPListener hears which switch port each NIC is plugged into. It only
// listens: switches announce themselves every 30 s. Its fields are set before
// Run; the zero value is ready to listen on the live machine.
type LLDPListener struct {
	// Interfaces names the interfaces to listen on; nil is all physical NICs.
	Interfaces func() ([]string, error)
	// Listen opens an interface; nil opens a packet socket, which needs
	// CAP_NET_RAW.
	Listen func(name string) (FrameConn, error)
	// Rescan is how often interfaces are looked for; 0 is 30 s.
	Rescan time.Duration
	// Changed, when set, is called after a neighbour came, changed or said
	// goodbye. It must not block.
	Changed func()
	Log     *slog.Logger

	mu    sync.Mutex
	heard map[string]heardNeighbour
}

type heardNeighbour struct {
	Neighbour
	until time.Time
}

// defaultRescan finds a NIC whose driver came up late within one round of
// announcements.
const defaultRescan = 30 * time.Second

// lldpGroups are the addresses LLDP is sent to (IEEE 802.1AB table 7-1):
// nearest bridge, nearest non-TPMR bridge, nearest customer bridge.
var lldpGroups = [][6]byte{
	{0x01, 0x80, 0xc2, 0, 0, 0x0e}, {0x01, 0x80, 0xc2, 0, 0, 0x03}, {0x01, 0x80, 0xc2, 0, 0, 0x00},
}

// Name is the listener's name as a service.
func (l *LLDPListener) Name() string { return "lldp" }

// Neighbours returns what is plugged into each interface, without those whose
// time to live has passed.
func (l *LLDPListener) Neighbours() map[string]Neighbour {
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[string]Neighbour{}
	for name, h := range l.heard {
		if now.Before(h.until) {
			out[name] = h.Neighbour
		}
	}
	return out
}

// Run listens until ctx ends and returns ctx's error. An interface that
// cannot be opened is logged once and tried again.
func (l *LLDPListener) Run(ctx context.Context) error {
	log := l.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	rescan := l.Rescan
	if rescan <= 0 {
		rescan = defaultRescan
	}
	var wait sync.WaitGroup
	defer wait.Wait()
	listening := map[string]bool{}
	refused := map[string]bool{}
	ended := make(chan string)
	tick := time.NewTicker(rescan)
	defer tick.Stop()
	for {
		names, err := l.interfaces()
		if err != nil {
			log.Warn("lldp: list interfaces", "error", err)
		}
		for _, name := range names {
			if listening[name] {
				continue
			}
			conn, err := l.open(name)
			if err != nil {
				if !refused[name] {
					log.Warn("lldp: cannot listen", "interface", name, "error", err)
				}
				refused[name] = true
				continue
			}
			refused[name] = false
			listening[name] = true
			wait.Go(func() {
				l.listen(ctx, name, conn)
				select {
				case ended <- name:
				case <-ctx.Done():
				}
			})
		}
		for waiting := true; waiting; {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case name := <-ended: // the interface went; the next scan looks again
				delete(listening, name)
			case <-tick.C:
				waiting = false
			}
		}
	}
}

// listen reads one interface until it fails or ctx ends.
func (l *LLDPListener) listen(ctx context.Context, name string, conn FrameConn) {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer func() {
		if stop() {
			// The interface failed, not the listener: what was plugged into
			// it is unknown now.
			conn.Close()
			l.forget(name)
		}
	}()
	buf := make([]byte, maxLLDPDU)
	for {
		n, _, err := conn.ReadFrom(buf)
		if err != nil {
			return
		}
		neighbour, ttl, err := ParseLLDP(buf[:n])
		if err != nil {
			continue // a stranger's frame changes nothing
		}
		if ttl == 0 {
			l.forget(name)
			continue
		}
		l.mu.Lock()
		if l.heard == nil {
			l.heard = map[string]heardNeighbour{}
		}
		now := time.Now()
		old := l.heard[name]
		changed := old.Neighbour != neighbour || !now.Before(old.until)
		l.heard[name] = heardNeighbour{neighbour, now.Add(ttl)}
		l.mu.Unlock()
		if changed && l.Changed != nil {
			l.Changed()
		}
	}
}

func (l *LLDPListener) forget(name string) {
	l.mu.Lock()
	_, had := l.heard[name]
	delete(l.heard, name)
	l.mu.Unlock()
	if had && l.Changed != nil {
		l.Changed()
	}
}

func (l *LLDPListener) interfaces() ([]string, error) {
	if l.Interfaces != nil {
		return l.Interfaces()
	}
	nics, _, err := Roots{Sys: "/sys"}.readNet()
	var names []string
	for _, n := range nics {
		names = append(names, n.Name)
	}
	return names, err
}

func (l *LLDPListener) open(name string) (FrameConn, error) {
	if l.Listen != nil {
		return l.Listen(name)
	}
	return listenLLDP(name)
}

// listenLLDP opens a packet socket that gets the payloads of LLDP frames and
// makes the NIC let the group addresses through.
func listenLLDP(name string) (FrameConn, error) {
	ifi, err := net.InterfaceByName(name)
	if err != nil {
		return nil, err
	}
	conn, err := packet.Listen(ifi, packet.Datagram, EtherTypeLLDP, nil)
	if err != nil {
		return nil, fmt.Errorf("packet socket on %s: %w", name, err)
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	var joined error
	err = raw.Control(func(fd uintptr) {
		for _, group := range lldpGroups {
			request := unix.PacketMreq{Ifindex: int32(ifi.Index), Type: unix.PACKET_MR_MULTICAST, Alen: 6}
			copy(request.Address[:], group[:])
			joined = errors.Join(joined, unix.SetsockoptPacketMreq(int(fd), unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, &request))
		}
	})
	if err = errors.Join(err, joined); err != nil {
		return nil, errors.Join(fmt.Errorf("join the LLDP groups on %s: %w", name, err), conn.Close())
	}
	return conn, nil
}
