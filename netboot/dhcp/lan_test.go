package dhcp

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

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

// startDnsmasq starts a DHCP server that gives addresses of addr's network.
func startDnsmasq(t *testing.T, ns netns.NsHandle, nic, addr string, more ...string) (stop func()) {
	t.Helper()
	from, to := netip.MustParseAddr(addr).As4(), netip.MustParseAddr(addr).As4()
	from[3], to[3] = 50, 99
	return runDnsmasq(t, ns, append([]string{"--interface=" + nic, "--dhcp-authoritative",
		"--dhcp-range=" + netip.AddrFrom4(from).String() + "," + netip.AddrFrom4(to).String() + ",255.255.255.0,2m"}, more...)...)
}

// runDnsmasq returns when dnsmasq has its socket.
func runDnsmasq(t *testing.T, ns netns.NsHandle, args ...string) (stop func()) {
	t.Helper()
	dir := t.TempDir()
	log, err := os.Create(filepath.Join(dir, "dnsmasq.log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("dnsmasq", append([]string{"-k", "-C", os.DevNull, "--port=0", "--user=root", "--group=root", "--pid-file=",
		"--bind-interfaces", "--except-interface=lo", "--no-ping",
		"--dhcp-leasefile=" + filepath.Join(dir, "leases"), "--log-dhcp", "--log-facility=-"}, args...)...)
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
