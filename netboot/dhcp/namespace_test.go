package dhcp

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const insideVariable = "BCD_DHCP_TEST_INSIDE"

// patience is for a loaded machine; nothing is asserted about how long it takes.
const patience = 30 * time.Second

// TestRealNetwork has our server, dnsmasq as the network's DHCP server, and a
// client, each in its own network namespace, on one bridge. It needs root.
func TestRealNetwork(t *testing.T) {
	if os.Getenv(insideVariable) == "" {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, "/proc/self/exe", "-test.run=^TestRealNetwork$", "-test.v")
		cmd.Env = append(os.Environ(), insideVariable+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("in its namespace: %v\n%s", err, out)
		}
		return
	}
	lan := newLAN(t)
	lan.plug(-1, "eth0", "10.77.0.2/24")
	dnsmasqNS, clientNS, strangerNS := newNS(t), newNS(t), newNS(t)
	other := newLAN(t) // a network that is not to be served
	other.plug(-1, "eth1", "10.78.0.2/24")
	other.plug(int(strangerNS), "cl0", "")
	lan.plug(int(dnsmasqNS), "lan0", "10.77.0.1/24")
	lan.plug(int(clientNS), "cl0", "")

	t.Run("port taken", func(t *testing.T) {
		here, err := netns.Get()
		if err != nil {
			t.Fatal(err)
		}
		defer here.Close()
		stop := startDnsmasq(t, here, "eth0", "10.77.0.2")
		s := startServer(t, always(ukiBoot))
		e := s.wait(t, EventTrouble)
		if !strings.Contains(e.Message, "UDP port 67 is taken by dnsmasq (pid ") {
			t.Errorf("%q", e.Message)
		}
		if p := s.Problems(); len(p) != 1 || len(s.Serving()) != 0 {
			t.Errorf("problems %q, serving %v", p, s.Serving())
		}
		stop()
		s.wait(t, EventServing) // without being told
		if p := s.Problems(); len(p) != 0 || len(s.Serving()) != 1 || s.Serving()[0] != ourAddr {
			t.Errorf("problems %q, serving %v", p, s.Serving())
		}
		// And a second server that would share the port is refused.
		for _, port := range []int{ServerPort, BINLPort} {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
				t.Fatal(err)
			}
			if err := unix.Bind(fd, &unix.SockaddrInet4{Port: port}); !errors.Is(err, unix.EADDRINUSE) {
				t.Errorf("a second server on port %d: %v", port, err)
			}
		}
	})

	t.Run("beside dnsmasq", func(t *testing.T) {
		stop := startDnsmasq(t, dnsmasqNS, "lan0", "10.77.0.1")
		defer stop()
		s := startServer(t, always(ukiBoot))
		s.wait(t, EventServing)
		newClient(t, strangerNS).broadcast(t, sent{flags: 0x8000, opts: ovmf(discover, 7)})
		c := newClient(t, clientNS)
		c.broadcast(t, sent{flags: 0x8000, opts: ovmf(discover, 7)})
		offers := c.collect(t, "10.77.0.1", "10.77.0.2")
		real, proxy := offers["10.77.0.1"], offers["10.77.0.2"]
		checkProxy(t, proxy, dhcpv4.MessageTypeOffer)

		address := real.YourIPAddr
		c.broadcast(t, sent{flags: 0x8000, opts: ovmf(request, 7, raw(54, "0a4d0001"), opt{50, address.To4()})})
		if m := c.collect(t, "10.77.0.1")["10.77.0.1"]; m.MessageType() != dhcpv4.MessageTypeAck {
			t.Fatalf("dnsmasq: %s", m.Summary())
		}
		s.wait(t, EventRequest)

		// On to port 4011, from port 4011 of the leased address, as edk2 does.
		inNS(t, clientNS, func() {
			link, err := netlink.LinkByName("cl0")
			if err != nil {
				t.Fatal(err)
			}
			mine := &netlink.Addr{IPNet: &net.IPNet{IP: address, Mask: net.CIDRMask(24, 32)}}
			if err := netlink.AddrAdd(link, mine); err != nil {
				t.Fatal(err)
			}
			c.onEnd(func() { inNS(t, clientNS, func() { _ = netlink.AddrDel(link, mine) }) })
		})
		m := c.binl(t, clientNS, address, sent{ciaddr: address.String(), opts: ovmf(request, 7)})
		checkProxy(t, m, dhcpv4.MessageTypeAck)
		s.wait(t, EventBINL)
		discovers := 0
		for _, e := range s.all() {
			if e.Type == EventDiscover {
				discovers++
			}
			if e.Type == EventForeign || e.Type == EventDropped || e.Interface != "eth0" {
				t.Errorf("event %+v", e)
			}
		}
		if discovers != 1 {
			t.Errorf("%d discovers; the one on eth1 is none of ours", discovers)
		}
		// Our offer was all that came from us to port 68.
		c.broadcast(t, sent{flags: 0x8000, opts: ovmf(discover, 7)})
		c.collect(t, "10.77.0.2")
		for _, m := range c.seen {
			if m.ServerIdentifier().Equal(ourAddr.AsSlice()) && m.MessageType() != dhcpv4.MessageTypeOffer {
				t.Errorf("we sent %s", m.Summary())
			}
		}
	})

	t.Run("fault 3: dnsmasq leaks option 60", func(t *testing.T) {
		stop := startDnsmasq(t, dnsmasqNS, "lan0", "10.77.0.1", "--dhcp-option-force=60,PXEClient")
		defer stop()
		s := startServer(t, always(ukiBoot))
		s.wait(t, EventServing)
		c := newClient(t, clientNS)
		c.broadcast(t, sent{flags: 0x8000, opts: ovmf(discover, 7)})
		c.collect(t, "10.77.0.1", "10.77.0.2")
		if e := s.wait(t, EventForeign); e.MAC != testMAC || !strings.Contains(e.Message, "10.77.0.1 sends option 60") {
			t.Errorf("%+v", e)
		}
	})

	t.Run("full DHCP by a real client", func(t *testing.T) {
		boot := ukiBoot
		boot.Lease = testLease()
		s := startServer(t, always(boot))
		s.wait(t, EventServing)
		c := newClient(t, clientNS)
		mac, err := net.ParseMAC(testMAC)
		if err != nil {
			t.Fatal(err)
		}
		client, err := nclient4.NewWithConn(c.conn, mac, nclient4.WithTimeout(patience), nclient4.WithRetry(1))
		if err != nil {
			t.Fatal(err)
		}
		// No broadcast flag: the frames go to the MAC and to the address to be.
		lease, err := client.Request(t.Context(), dhcpv4.WithBroadcast(false), dhcpv4.WithOption(dhcpv4.OptClassIdentifier("PXEClient:Arch:00007:UNDI:003016")))
		if err != nil {
			t.Fatal(err)
		}
		if a := lease.ACK; a.YourIPAddr.String() != "10.77.0.7" || a.BootFileNameOption() != ukiBoot.Name || len(a.DNS()) != 2 {
			t.Errorf("%s", a.Summary())
		}
		if e := s.wait(t, EventAck); !strings.Contains(e.Message, "10.77.0.7/24") {
			t.Errorf("%+v", e)
		}
	})

	t.Run("the link goes and comes", func(t *testing.T) {
		s := startServer(t, always(ukiBoot))
		s.wait(t, EventServing)
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			t.Fatal(err)
		}
		if err := netlink.LinkSetDown(link); err != nil {
			t.Fatal(err)
		}
		s.wait(t, EventTrouble)
		if err := netlink.LinkSetUp(link); err != nil {
			t.Fatal(err)
		}
		s.wait(t, EventServing)
		c := newClient(t, clientNS)
		c.broadcast(t, sent{flags: 0x8000, opts: ovmf(discover, 7)})
		checkProxy(t, c.collect(t, "10.77.0.2")["10.77.0.2"], dhcpv4.MessageTypeOffer)
	})
}

func checkProxy(t *testing.T, m *dhcpv4.DHCPv4, want dhcpv4.MessageType) {
	t.Helper()
	if m.MessageType() != want || !m.YourIPAddr.IsUnspecified() || !m.ServerIPAddr.Equal(ourAddr.AsSlice()) || m.ClassIdentifier() != "PXEClient" ||
		m.BootFileName != ukiBoot.Name || m.BootFileNameOption() != ukiBoot.Name || m.Options.Has(dhcpv4.OptionVendorSpecificInformation) {
		t.Errorf("ours: %s", m.Summary())
	}
}

// running is a server with its events.
type running struct {
	*Server
	events chan Event
	seen   []Event
}

func startServer(t testing.TB, decide func(Client) Boot) *running {
	t.Helper()
	r := &running{events: make(chan Event, 1000)}
	s, err := New(Options{Interfaces: []string{"eth0"}, Decide: decide, Holding: func() bool { return true }, Observe: func(e Event) { r.events <- e }})
	if err != nil {
		t.Fatal(err)
	}
	r.Server = s
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return r
}

func (r *running) wait(t testing.TB, kind string) Event {
	t.Helper()
	deadline := time.After(patience)
	for {
		select {
		case e := <-r.events:
			r.seen = append(r.seen, e)
			if e.Type == kind {
				return e
			}
		case <-deadline:
			t.Fatalf("no %s; %+v", kind, r.seen)
		}
	}
}

func (r *running) all() []Event {
	for {
		select {
		case e := <-r.events:
			r.seen = append(r.seen, e)
		default:
			return r.seen
		}
	}
}

func newNS(t testing.TB) netns.NsHandle {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	here, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	if err := netns.Set(here); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ns.Close() })
	return ns
}

// inNS runs f, on this goroutine's thread alone, in a namespace.
func inNS(t testing.TB, ns netns.NsHandle, f func()) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	here, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	if err := netns.Set(ns); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := netns.Set(here); err != nil {
			t.Fatal(err)
		}
	}()
	f()
}

// lan is a bridge in a namespace of its own.
type lan struct {
	t  testing.TB
	ns netns.NsHandle
}

func newLAN(t testing.TB) *lan {
	l := &lan{t, newNS(t)}
	inNS(t, l.ns, func() {
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}); err != nil {
			t.Fatal(err)
		}
		br, err := netlink.LinkByName("br0")
		if err != nil {
			t.Fatal(err)
		}
		if err := netlink.LinkSetUp(br); err != nil {
			t.Fatal(err)
		}
	})
	return l
}

// plug makes a NIC in ns (negative: this one) that is a port of the bridge.
func (l *lan) plug(ns int, name, addr string) {
	t := l.t
	t.Helper()
	here, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	if ns < 0 {
		ns = int(here)
	}
	inNS(t, l.ns, func() {
		port := "to-" + name
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: port}, PeerName: name, PeerNamespace: netlink.NsFd(ns)}); err != nil {
			t.Fatal(err)
		}
		p, err := netlink.LinkByName(port)
		if err != nil {
			t.Fatal(err)
		}
		br, err := netlink.LinkByName("br0")
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(netlink.LinkSetMaster(p, br), netlink.LinkSetUp(p)); err != nil {
			t.Fatal(err)
		}
	})
	inNS(t, netns.NsHandle(ns), func() {
		nic, err := netlink.LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		if addr != "" {
			a, err := netlink.ParseAddr(addr)
			if err != nil {
				t.Fatal(err)
			}
			if err := netlink.AddrAdd(nic, a); err != nil {
				t.Fatal(err)
			}
		} else {
			mac, err := net.ParseMAC(testMAC)
			if err != nil {
				t.Fatal(err)
			}
			if err := netlink.LinkSetHardwareAddr(nic, mac); err != nil {
				t.Fatal(err)
			}
		}
		if err := netlink.LinkSetUp(nic); err != nil {
			t.Fatal(err)
		}
	})
}

// startDnsmasq returns when dnsmasq has its socket.
func startDnsmasq(t *testing.T, ns netns.NsHandle, nic, addr string, more ...string) (stop func()) {
	t.Helper()
	dir := t.TempDir()
	log, err := os.Create(filepath.Join(dir, "dnsmasq.log"))
	if err != nil {
		t.Fatal(err)
	}
	base := netip.MustParseAddr(addr).As4()
	from, to := base, base
	from[3], to[3] = 50, 99
	cmd := exec.Command("dnsmasq", append([]string{"-k", "-C", os.DevNull, "--port=0", "--user=root", "--group=root", "--pid-file=",
		"--interface=" + nic, "--bind-interfaces", "--except-interface=lo", "--no-ping", "--dhcp-authoritative",
		"--dhcp-range=" + netip.AddrFrom4(from).String() + "," + netip.AddrFrom4(to).String() + ",255.255.255.0,2m",
		"--dhcp-leasefile=" + filepath.Join(dir, "leases"), "--log-dhcp", "--log-facility=-"}, more...)...)
	cmd.Stdout, cmd.Stderr = log, log
	inNS(t, ns, func() { err = cmd.Start() })
	if err != nil {
		t.Fatalf("dnsmasq (package dnsmasq-base): %v", err)
	}
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("dnsmasq:\n%s", text)
		}
		_ = log.Close()
	}
	t.Cleanup(stop)
	deadline := time.After(patience)
	for {
		text, err := os.ReadFile(log.Name())
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), "started") {
			return stop
		}
		select {
		case <-deadline:
			t.Fatalf("dnsmasq does not start: %s", text)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// client is a packet socket on the client's NIC.
type client struct {
	conn net.PacketConn
	seen []*dhcpv4.DHCPv4
	end  []func()
}

func newClient(t *testing.T, ns netns.NsHandle) *client {
	t.Helper()
	c := &client{}
	var err error
	inNS(t, ns, func() { c.conn, err = nclient4.NewRawUDPConn("cl0", nclient4.ClientPort) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.conn.Close()
		for _, f := range c.end {
			f()
		}
	})
	return c
}

func (c *client) onEnd(f func()) { c.end = append(c.end, f) }

func (c *client) broadcast(t *testing.T, p sent) {
	t.Helper()
	if _, err := c.conn.WriteTo(p.bytes(), &net.UDPAddr{IP: net.IPv4bcast, Port: ServerPort}); err != nil {
		t.Fatal(err)
	}
}

// collect reads until each of the servers has sent something.
func (c *client) collect(t *testing.T, servers ...string) map[string]*dhcpv4.DHCPv4 {
	t.Helper()
	found := map[string]*dhcpv4.DHCPv4{}
	if err := c.conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 2000)
	for {
		missing := false
		for _, s := range servers {
			missing = missing || found[s] == nil
		}
		if !missing {
			return found
		}
		n, _, err := c.conn.ReadFrom(b)
		if err != nil {
			t.Fatalf("%v; from %v", err, found)
		}
		m, err := dhcpv4.FromBytes(b[:n])
		if err != nil {
			t.Fatal(err)
		}
		c.seen = append(c.seen, m)
		found[m.ServerIdentifier().String()] = m
	}
}

// binl asks our port 4011 from port 4011 of addr.
func (c *client) binl(t *testing.T, ns netns.NsHandle, addr net.IP, p sent) *dhcpv4.DHCPv4 {
	t.Helper()
	var conn *net.UDPConn
	var err error
	inNS(t, ns, func() {
		conn, err = net.DialUDP("udp4", &net.UDPAddr{IP: addr, Port: BINLPort}, &net.UDPAddr{IP: ourAddr.AsSlice(), Port: BINLPort})
	})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write(p.bytes()); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 2000) // a connected socket: only what comes from 10.77.0.2:4011
	n, err := conn.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	m, err := dhcpv4.FromBytes(b[:n])
	if err != nil {
		t.Fatal(err)
	}
	return m
}
