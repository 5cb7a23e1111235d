package dhcp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/mdlayher/packet"
	"golang.org/x/net/bpf"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

// link is one interface with its sockets. The UDP sockets are bound to the
// device, so that nothing is served elsewhere, and without SO_REUSEADDR, so
// that a second server on this machine is refused by the kernel, whichever of
// the two comes later.
type link struct {
	ifi   *net.Interface
	conns map[uint16]*ipv4.PacketConn
	// raw hears the broadcasts of other servers to clients, and sends to
	// addresses that a client has not taken yet.
	raw *packet.Conn

	mu     sync.Mutex
	looked time.Time
	addrs  []netip.Addr
}

// addressesAge is for how long an interface's addresses are taken as they were.
const addressesAge = time.Second

func openLink(ctx context.Context, name string) (*link, error) {
	ifi, err := net.InterfaceByName(name)
	if err != nil {
		return nil, fmt.Errorf("look for the interface: %w", err)
	}
	l := &link{ifi: ifi, conns: map[uint16]*ipv4.PacketConn{}}
	if !l.local(netip.Addr{}).IsValid() {
		return nil, errors.New("the interface has no IPv4 address; give it a fixed one")
	}
	for _, port := range []uint16{ServerPort, BINLPort} {
		conn, err := listen(ctx, name, port)
		if err != nil {
			l.close()
			return nil, err
		}
		l.conns[port] = conn
	}
	filter, err := bpf.Assemble(toClients)
	if err == nil {
		l.raw, err = packet.Listen(ifi, packet.Datagram, unix.ETH_P_IP, &packet.Config{Filter: filter})
	}
	if err != nil {
		l.close()
		return nil, fmt.Errorf("listen for other servers: %w", err)
	}
	return l, nil
}

// toClients takes unfragmented UDP to port 68, whole, from the IP header on.
var toClients = []bpf.Instruction{
	bpf.LoadAbsolute{Off: 9, Size: 1},
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_UDP, SkipTrue: 6},
	bpf.LoadAbsolute{Off: 6, Size: 2},
	bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: 0x3fff, SkipTrue: 4},
	bpf.LoadMemShift{Off: 0},
	bpf.LoadIndirect{Off: 2, Size: 2},
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: clientPort, SkipTrue: 1},
	bpf.RetConstant{Val: 1 << 16},
	bpf.RetConstant{Val: 0},
}

func listen(ctx context.Context, name string, port uint16) (*ipv4.PacketConn, error) {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var errs []error
		err := c.Control(func(fd uintptr) {
			errs = append(errs,
				unix.SetsockoptString(int(fd), unix.SOL_SOCKET, unix.SO_BINDTODEVICE, name),
				unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_BROADCAST, 1))
		})
		return errors.Join(append(errs, err)...)
	}}
	conn, err := lc.ListenPacket(ctx, "udp4", fmt.Sprintf("0.0.0.0:%d", port))
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("UDP port %d is taken by %s: stop it, or let it serve other interfaces: %w", port, holder(port), err)
	}
	if err != nil {
		return nil, fmt.Errorf("listen on UDP port %d: %w", port, err)
	}
	p := ipv4.NewPacketConn(conn)
	if err := p.SetControlMessage(ipv4.FlagDst, true); err != nil {
		return nil, errors.Join(fmt.Errorf("ask for destinations on UDP port %d: %w", port, err), conn.Close())
	}
	return p, nil
}

func (l *link) close() {
	for _, c := range l.conns {
		_ = c.Close()
	}
	if l.raw != nil {
		_ = l.raw.Close()
	}
}

// local is our address on the link: the one that the packet was sent to, or the
// first one.
func (l *link) local(dst netip.Addr) netip.Addr {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now := time.Now(); l.looked.IsZero() || now.Sub(l.looked) >= addressesAge {
		l.looked, l.addrs = now, nil
		addrs, err := l.ifi.Addrs()
		if err != nil {
			return netip.Addr{}
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() {
				l.addrs = append(l.addrs, p.Addr())
			}
		}
	}
	if len(l.addrs) == 0 {
		return netip.Addr{}
	}
	for _, a := range l.addrs {
		if a == dst {
			return a
		}
	}
	return l.addrs[0]
}

// serveLink opens an interface and serves it until ctx ends or a socket fails.
func (s *Server) serveLink(ctx context.Context, name string) error {
	l, err := openLink(ctx, name)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for port, conn := range l.conns {
		wg.Go(func() { cancel(s.readClients(l, port, conn)) })
	}
	wg.Go(func() { cancel(s.readServers(l)) })
	s.setServing(name, l.local(netip.Addr{}))
	<-ctx.Done()
	l.close()
	wg.Wait()
	return context.Cause(ctx)
}

func (s *Server) readClients(l *link, port uint16, conn *ipv4.PacketConn) error {
	b := make([]byte, maxPacket+1) // one more, to see what is too long
	for {
		n, cm, src, err := conn.ReadFrom(b)
		if err != nil {
			return fmt.Errorf("read UDP port %d: %w", port, err)
		}
		from, ok := src.(*net.UDPAddr)
		if !ok {
			continue
		}
		var dst netip.Addr
		if cm != nil {
			dst, _ = netip.AddrFromSlice(cm.Dst.To4())
		}
		ap := from.AddrPort()
		at := Arrival{From: netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), Port: port, Interface: l.ifi.Name, Local: l.local(dst)}
		s.take(b[:n], at, func(r Reply) error { return l.send(conn, at.Local, port, r) })
	}
}

func (s *Server) readServers(l *link) error {
	b := make([]byte, maxPacket+headers+1)
	for {
		n, from, err := l.raw.ReadFrom(b)
		if err != nil {
			return fmt.Errorf("listen for other servers: %w", err)
		}
		if a, ok := from.(*packet.Addr); ok && a.HardwareAddr.String() == l.ifi.HardwareAddr.String() {
			continue
		}
		if payload, ok := udpPayload(b[:n]); ok {
			s.overheard(payload, l.ifi.Name)
		}
	}
}

// send is from our own address and port in any case.
func (l *link) send(conn *ipv4.PacketConn, local netip.Addr, port uint16, r Reply) error {
	if r.Hardware != nil {
		b := udpPacket(netip.AddrPortFrom(local, port), r.To, r.Packet)
		_, err := l.raw.WriteTo(b, &packet.Addr{HardwareAddr: r.Hardware})
		return err
	}
	_, err := conn.WriteTo(r.Packet, &ipv4.ControlMessage{Src: local.AsSlice(), IfIndex: l.ifi.Index}, net.UDPAddrFromAddrPort(r.To))
	if errors.Is(err, os.ErrClosed) {
		return net.ErrClosed
	}
	return err
}

const (
	ipHeader  = 20 // without options (RFC 791 section 3.1)
	udpHeader = 8  // RFC 768
)

// udpPayload is what an IPv4 packet with UDP in it carries.
func udpPayload(b []byte) ([]byte, bool) {
	if len(b) < ipHeader+udpHeader || b[0]>>4 != 4 {
		return nil, false
	}
	total, head := int(binary.BigEndian.Uint16(b[2:])), int(b[0]&15)*4
	if head < ipHeader || total > len(b) || total < head+udpHeader {
		return nil, false
	}
	u := b[head:total]
	length := int(binary.BigEndian.Uint16(u[4:]))
	if length < udpHeader || length > len(u) {
		return nil, false
	}
	return u[udpHeader:length], true
}

// udpPacket makes an IPv4 packet; the kernel puts the frame around it.
func udpPacket(from, to netip.AddrPort, payload []byte) []byte {
	b := make([]byte, ipHeader+udpHeader, ipHeader+udpHeader+len(payload))
	b[0], b[8], b[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)+len(payload)))
	copy(b[12:16], from.Addr().AsSlice())
	copy(b[16:20], to.Addr().AsSlice())
	binary.BigEndian.PutUint16(b[10:], ^onesSum(0, b[:ipHeader]))

	u := b[ipHeader:]
	binary.BigEndian.PutUint16(u[0:], from.Port())
	binary.BigEndian.PutUint16(u[2:], to.Port())
	binary.BigEndian.PutUint16(u[4:], uint16(udpHeader+len(payload)))
	sum := onesSum(unix.IPPROTO_UDP+uint32(udpHeader+len(payload)), b[12:20]) // the pseudo header
	sum = onesSum(uint32(onesSum(uint32(sum), u)), payload)
	if sum = ^sum; sum == 0 {
		sum = 0xffff // zero would mean that there is none
	}
	binary.BigEndian.PutUint16(u[6:], sum)
	return append(b, payload...)
}

// onesSum is the Internet checksum before its complement (RFC 1071).
func onesSum(sum uint32, b []byte) uint16 {
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}
