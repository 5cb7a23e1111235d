package dhcp

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
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

	t.Run("fault 11: through a real relay", func(t *testing.T) {
		relayNS := newNS(t)
		lan.plug(int(relayNS), "up0", "10.77.0.9/24")
		other.plug(int(relayNS), "down0", "10.78.0.1/24")
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			t.Fatal(err)
		}
		// eth1 has the relay's network too; what eth0 sends must not depend on it.
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: eth0.Attrs().Index, Gw: net.IP{10, 77, 0, 9},
			Dst: &net.IPNet{IP: net.IP{10, 78, 0, 1}, Mask: net.CIDRMask(32, 32)}}); err != nil {
			t.Fatal(err)
		}
		stop := runDnsmasq(t, relayNS, "--dhcp-relay=10.78.0.1,10.77.0.2")
		defer stop()
		s := startServer(t, always(ukiBoot))
		s.wait(t, EventServing)
		c := newClient(t, strangerNS)
		c.broadcast(t, sent{flags: 0x8000, opts: ovmf(discover, 7)})
		checkProxy(t, c.collect(t, "10.77.0.2")["10.77.0.2"], dhcpv4.MessageTypeOffer)
		if e := s.wait(t, EventOffer); !strings.Contains(e.Message, "to 10.78.0.1:67") {
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
