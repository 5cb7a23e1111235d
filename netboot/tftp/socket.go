package tftp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Port is where clients send their requests (RFC 1350 section 4).
const Port = 69

// Socket is where packets come from and go to. [Listen] makes the real one;
// tests make networks of their own.
type Socket interface {
	// Receive waits for a packet until the deadline, for ever when that is zero.
	// What does not fit the buffer is cut off. The error at the deadline is
	// os.ErrDeadlineExceeded, after Close net.ErrClosed.
	Receive(buffer []byte, deadline time.Time) (n int, peer netip.AddrPort, at Arrival, err error)
	// Send sends a run of packets of size bytes each, of which the last may be
	// shorter, to the peer, from the address of the Arrival.
	Send(run []byte, size int, peer netip.AddrPort, at Arrival) error
	// Dial makes a socket with a port of its own at the Arrival's address, which
	// hears only the peer.
	Dial(peer netip.AddrPort, at Arrival) (Socket, error)
	// MaxData is the most that fits a DATA packet on the Arrival's interface.
	MaxData(at Arrival) int
	Close() error
}

// Arrival is where a packet came in: its answer leaves from the same address,
// else clients of a host with several drop it.
type Arrival struct {
	Local     netip.Addr
	Interface int // its index
}

const (
	// Headers of IP and UDP, and the four bytes before the data, which a blksize
	// does not count (RFC 2348). Without these four, the customary bound of
	// MTU-28 makes two fragments of each full packet.
	overheadIPv4 = 20 + 8 + 4
	overheadIPv6 = 40 + 8 + 4
	// etherMTU is taken for an interface that cannot be asked.
	etherMTU = 1500
	// controlSize holds the control messages that are asked for.
	controlSize = 128
	// What the kernel cuts in one call: UDP_MAX_SEGMENTS of older kernels, and
	// what fits an IP packet.
	maxSegments = 64
	maxRun      = 65000
	// sendBuffer holds several windows of each of many clients.
	sendBuffer = 1 << 20
)

// UDP is a [Socket] of the kernel.
type UDP struct {
	conn      *net.UDPConn
	device    string
	v6        bool
	connected bool
	// segments is false once the kernel or the NIC has refused to cut a run
	// into packets by itself (UDP_SEGMENT).
	segments *atomic.Bool
	control  [controlSize]byte // Receive's; it is called by one goroutine
}

// Listen opens a UDP socket at address, for packets of the named interface only
// unless device is "". It needs CAP_NET_BIND_SERVICE for [Port], and CAP_NET_RAW
// for a device.
func Listen(address netip.AddrPort, device string) (*UDP, error) {
	return open4or6(address, netip.AddrPort{}, device)
}

func open4or6(local, peer netip.AddrPort, device string) (*UDP, error) {
	u := &UDP{device: device, v6: local.Addr().Is6(), connected: peer.IsValid(), segments: new(atomic.Bool)}
	u.segments.Store(true)
	network := "udp4"
	if u.v6 {
		network = "udp6"
	}
	control := func(_, _ string, raw syscall.RawConn) error {
		var err error
		if e := raw.Control(func(fd uintptr) { err = u.prepare(int(fd)) }); e != nil {
			return e
		}
		return err
	}
	if peer.IsValid() {
		dialer := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(local), Control: control}
		conn, err := dialer.Dial(network, peer.String())
		if err != nil {
			return nil, fmt.Errorf("a UDP socket from %s to %s: %w", local.Addr(), peer, err)
		}
		u.conn = conn.(*net.UDPConn)
		return u, nil
	}
	config := net.ListenConfig{Control: control}
	conn, err := config.ListenPacket(context.Background(), network, local.String())
	if err != nil {
		return nil, fmt.Errorf("listen for TFTP on UDP %s: %w; another TFTP server may be running", local, err)
	}
	u.conn = conn.(*net.UDPConn)
	return u, nil
}

func (u *UDP) prepare(fd int) error {
	var errs []error
	if u.device != "" {
		if err := unix.BindToDevice(fd, u.device); err != nil {
			errs = append(errs, fmt.Errorf("bind to the interface %s: %w", u.device, err))
		}
	}
	if !u.connected {
		var err error
		if u.v6 {
			err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
		} else {
			err = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("ask for the address that packets come to: %w", err))
		}
		// What the kernel grants of it is enough.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, sendBuffer)
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, sendBuffer)
	}
	return errors.Join(errs...)
}

// LocalAddr is the address and port that the socket has.
func (u *UDP) LocalAddr() netip.AddrPort { return u.conn.LocalAddr().(*net.UDPAddr).AddrPort() }

func (u *UDP) Close() error { return u.conn.Close() }

func (u *UDP) Receive(buffer []byte, deadline time.Time) (int, netip.AddrPort, Arrival, error) {
	if err := u.conn.SetReadDeadline(deadline); err != nil {
		return 0, netip.AddrPort{}, Arrival{}, err
	}
	if u.connected {
		n, err := u.conn.Read(buffer)
		return n, netip.AddrPort{}, Arrival{}, err
	}
	n, used, _, peer, err := u.conn.ReadMsgUDPAddrPort(buffer, u.control[:])
	if err != nil {
		return 0, netip.AddrPort{}, Arrival{}, err
	}
	return n, peer, arrival(u.control[:used]), nil
}

// arrival reads IP_PKTINFO (ip(7)) or IPV6_PKTINFO (RFC 3542 section 6).
func arrival(control []byte) Arrival {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return Arrival{}
	}
	for _, m := range messages {
		switch {
		case m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= unix.SizeofInet4Pktinfo:
			// The second field, not the third: for a broadcast it is the address
			// that an answer is to leave from.
			return Arrival{netip.AddrFrom4([4]byte(m.Data[4:8])), int(binary.NativeEndian.Uint32(m.Data))}
		case m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= unix.SizeofInet6Pktinfo:
			return Arrival{netip.AddrFrom16([16]byte(m.Data[:16])), int(binary.NativeEndian.Uint32(m.Data[16:]))}
		}
	}
	return Arrival{}
}

// source is the control message that makes a packet leave from at.
func source(at Arrival) []byte {
	switch {
	case at.Local.Is4():
		return unix.PktInfo4(&unix.Inet4Pktinfo{Ifindex: int32(at.Interface), Spec_dst: at.Local.As4()})
	case at.Local.Is6():
		return unix.PktInfo6(&unix.Inet6Pktinfo{Ifindex: uint32(at.Interface), Addr: at.Local.As16()})
	}
	return nil
}

func (u *UDP) Send(run []byte, size int, peer netip.AddrPort, at Arrival) error {
	var control []byte
	if u.connected {
		peer = netip.AddrPort{}
	} else {
		control = source(at)
	}
	many := min(maxSegments, maxRun/max(1, size))
	for len(run) > 0 {
		n := min(size, len(run))
		if len(run) > size && many > 1 && u.segments.Load() {
			n = min(many*size, len(run))
			_, _, err := u.write(run[:n], append(control[:len(control):len(control)], segmentation(size)...), peer)
			if errors.Is(err, unix.EIO) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EMSGSIZE) || errors.Is(err, unix.ENOPROTOOPT) {
				// An old kernel, or a NIC that cannot do checksums.
				u.segments.Store(false)
				continue
			}
			if err != nil {
				return err
			}
		} else if _, _, err := u.write(run[:n], control, peer); err != nil {
			return err
		}
		run = run[n:]
	}
	return nil
}

func (u *UDP) write(packet, control []byte, peer netip.AddrPort) (int, int, error) {
	if u.connected && control == nil {
		n, err := u.conn.Write(packet)
		return n, 0, err
	}
	return u.conn.WriteMsgUDPAddrPort(packet, control, peer)
}

// segmentation is the control message UDP_SEGMENT (udp(7)): the kernel cuts
// what is written into packets of size bytes.
func segmentation(size int) []byte {
	b := make([]byte, unix.CmsgSpace(2))
	h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
	h.Level, h.Type = unix.IPPROTO_UDP, unix.UDP_SEGMENT
	h.SetLen(unix.CmsgLen(2))
	binary.NativeEndian.PutUint16(b[unix.CmsgLen(0):], uint16(size))
	return b
}

func (u *UDP) Dial(peer netip.AddrPort, at Arrival) (Socket, error) {
	local := at.Local
	if local.Is6() && local.IsLinkLocalUnicast() {
		local = local.WithZone(peer.Addr().Zone())
	}
	own, err := open4or6(netip.AddrPortFrom(local, 0), peer, u.device)
	if err != nil {
		return nil, err
	}
	own.segments = u.segments
	return own, nil
}

func (u *UDP) MaxData(at Arrival) int {
	mtu := etherMTU
	if i, err := net.InterfaceByIndex(at.Interface); err == nil && i.MTU > 0 {
		mtu = i.MTU
	}
	if u.v6 {
		return mtu - overheadIPv6
	}
	return mtu - overheadIPv4
}
