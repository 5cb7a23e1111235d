package netcfg

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/better-compute/bcd/supervisor"
)

const insideVariable = "BCD_NETCFG_TEST_INSIDE"

// TestRealNetwork configures a machine by a real DHCP server (dnsmasq), over a
// veth pair between two network namespaces. It needs root.
func TestRealNetwork(t *testing.T) {
	if os.Getenv(insideVariable) == "" {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, "/proc/self/exe", "-test.run=^TestRealNetwork$", "-test.v")
		cmd.Env = append(os.Environ(), insideVariable+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("in its namespace: %v\n%s", err, out)
		}
		return
	}
	dir := t.TempDir()
	startServer(t, dir, "eth0")
	addVeth(t, "eth1", -1) // a second NIC, whose network has no server

	resolv := filepath.Join(dir, "resolv.conf")
	s, sup, stop := startReal(t, resolv)
	waitFor(t, sup, func() bool { return sup.Snapshot()[0].Ready })

	leases := s.Leases()
	if len(leases) != 1 {
		t.Fatalf("leases %+v", leases)
	}
	l := leases[0]
	if !netip.MustParsePrefix("10.77.0.0/24").Contains(l.Address.Addr()) || l.Server != netip.MustParseAddr("10.77.0.1") || l.Length != 2*time.Minute {
		t.Errorf("lease %+v", l)
	}
	// dnsmasq gives this one only to the vendor class "bcd".
	if got := s.NTPServers(); !slices.Equal(got, []string{"10.77.0.9"}) {
		t.Errorf("ntp servers %q", got)
	}
	text, err := os.ReadFile(resolv)
	if err != nil || !strings.Contains(string(text), "nameserver 10.77.0.53\n") || !strings.Contains(string(text), "search rack.example\n") {
		t.Errorf("resolv.conf %q, %v", text, err)
	}
	eth0 := checkKernel(t, l)

	// Renewing, from the leased address to the server; rebinding, to everyone.
	n := linkOf(eth0).nic
	for _, everyone := range []bool{false, true} {
		again, err := dhcp{}.extend(t.Context(), n, l, everyone)
		if err != nil || again.Address != l.Address || again.Length != l.Length {
			t.Errorf("extend (everyone %v): %+v, %v", everyone, again, err)
		}
		if err := (kernel{}).configure(n, again); err != nil {
			t.Error(err)
		}
	}
	// An address that this server would not give is refused, by broadcast.
	other := l
	other.Address = netip.MustParsePrefix("10.77.0.150/24")
	if err := netlink.AddrAdd(eth0, &netlink.Addr{IPNet: ipnet(other.Address)}); err != nil {
		t.Fatal(err)
	}
	if got, err := (dhcp{}).extend(t.Context(), n, other, false); !errors.Is(err, errRefused) {
		t.Errorf("extend a wrong address: %+v, %v", got, err)
	}

	// Another lease leaves nothing of the first behind, and the end nothing of it.
	moved := l
	moved.Address = netip.MustParsePrefix("10.77.0.200/24")
	moved.Routes = []Route{{netip.MustParsePrefix("10.5.0.0/16"), netip.MustParseAddr("192.0.2.1")}} // a router elsewhere
	if err := (kernel{}).configure(n, moved); err != nil {
		t.Fatal(err)
	}
	addrs, err := netlink.AddrList(eth0, netlink.FAMILY_V4)
	if err != nil || slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.IP.Equal(l.Address.Addr().AsSlice()) }) {
		t.Errorf("addresses %v, %v", addrs, err)
	}
	if routes, err := dhcpRoutes(n); err != nil || len(routes) != 2 {
		t.Errorf("routes %v, %v; want the network and 10.5.0.0/16", routes, err)
	}
	if err := (kernel{}).deconfigure(n, moved); err != nil {
		t.Error(err)
	}
	if routes, err := dhcpRoutes(n); err != nil || len(routes) != 0 {
		t.Errorf("routes %v, %v", routes, err)
	}

	// A NIC that is pulled out is forgotten.
	if err := netlink.LinkDel(eth0); err != nil {
		t.Fatal(err)
	}
	deadline := time.After(30 * time.Second)
	for len(s.Status()) != 1 {
		select {
		case <-deadline:
			t.Fatalf("status %+v", s.Status())
		case <-tick(10 * time.Millisecond):
		}
	}
	stop()
}

func tick(d time.Duration) <-chan time.Time { return time.After(d) }

// startServer makes the NIC name, and at its other end a namespace with dnsmasq.
func startServer(t *testing.T, dir, name string) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	here, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	there, err := netns.New() // this thread is in it now
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	back := func() {
		if err := netns.Set(here); err != nil {
			t.Fatal(err)
		}
	}
	back()
	addVeth(t, name, int(there))
	if err := netns.Set(there); err != nil {
		t.Fatal(err)
	}
	defer back()
	peer, err := netlink.LinkByName(name + "p")
	if err != nil {
		t.Fatal(err)
	}
	addr, err := netlink.ParseAddr("10.77.0.1/24")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(netlink.AddrAdd(peer, addr), netlink.LinkSetUp(peer)); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(dir, "dnsmasq.log"))
	if err != nil {
		t.Fatal(err)
	}
	// Started from this thread, so it lives in the namespace.
	cmd := exec.Command("dnsmasq", "-k", "-C", os.DevNull, "--port=0", "--user=root", "--group=root", "--pid-file=",
		"--interface="+name+"p", "--bind-interfaces", "--except-interface=lo", "--no-ping", "--dhcp-authoritative",
		"--dhcp-range=10.77.0.50,10.77.0.99,255.255.255.0,2m", "--dhcp-leasefile="+filepath.Join(dir, "leases"),
		"--dhcp-vendorclass=set:ours,"+VendorClass, "--dhcp-option=tag:ours,42,10.77.0.9",
		"--dhcp-option=26,1400", "--dhcp-option=6,10.77.0.53", "--domain=rack.example", "--log-dhcp", "--log-facility=-")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatalf("dnsmasq (package dnsmasq-base): %v", err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("dnsmasq:\n%s", text)
		}
	})
}

// addVeth makes a veth pair; its other end, name+"p", goes into ns unless that
// is negative.
func addVeth(t *testing.T, name string, ns int) {
	t.Helper()
	v := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "p"}
	if ns >= 0 {
		v.PeerNamespace = netlink.NsFd(ns)
	}
	if err := netlink.LinkAdd(v); err != nil {
		t.Fatal(err)
	}
	if ns < 0 {
		// It must not be taken for a NIC of the machine.
		other := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br-" + name}}
		if err := netlink.LinkAdd(other); err != nil {
			t.Fatal(err)
		}
		peer, err := netlink.LinkByName(name + "p")
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(netlink.LinkSetMaster(peer, other), netlink.LinkSetUp(peer)); err != nil {
			t.Fatal(err)
		}
	}
}

func startReal(t *testing.T, resolv string) (s *Service, sup *watched, stop func()) {
	t.Helper()
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	s = NewService(Options{Log: log, ResolvConf: resolv})
	sup = &watched{changed: make(chan struct{}, 1)}
	sup.Supervisor = supervisor.New(supervisor.Options{Log: log, OnChange: func(supervisor.Status) {
		select {
		case sup.changed <- struct{}{}:
		default:
		}
	}})
	if err := sup.Add(s); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- sup.Run(ctx) }()
	return s, sup, func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

type watched struct {
	*supervisor.Supervisor
	changed chan struct{}
}

func waitFor(t *testing.T, w *watched, ok func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	for !ok() {
		select {
		case <-deadline:
			t.Fatalf("not within a minute: %+v", w.Snapshot())
		case <-w.changed:
		}
	}
}

// checkKernel looks at what the kernel was given for a lease.
func checkKernel(t *testing.T, l Lease) netlink.Link {
	t.Helper()
	eth0, err := netlink.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	if eth0.Attrs().MTU != 1400 {
		t.Errorf("mtu %d, want 1400", eth0.Attrs().MTU)
	}
	addrs, err := netlink.AddrList(eth0, netlink.FAMILY_V4)
	if err != nil || len(addrs) != 1 || addrs[0].IPNet.String() != l.Address.String() {
		t.Fatalf("addresses %v, %v, want %s", addrs, err, l.Address)
	}
	if v := addrs[0].ValidLft; v < 60 || v > 120 {
		t.Errorf("the kernel keeps the address for %d s, want what is left of the lease", v)
	}
	routes, err := netlink.RouteGet(net.IP{192, 0, 2, 7})
	if err != nil || len(routes) != 1 || !routes[0].Gw.Equal(net.IP{10, 77, 0, 1}) || !routes[0].Src.Equal(l.Address.Addr().AsSlice()) {
		t.Errorf("route to elsewhere: %v, %v", routes, err)
	}
	mine, err := dhcpRoutes(linkOf(eth0).nic)
	if err != nil || len(mine) != 2 {
		t.Errorf("routes %v, %v", mine, err)
	}
	for _, r := range mine {
		if r.Priority != metricBase+eth0.Attrs().Index {
			t.Errorf("route %v has the metric %d", r, r.Priority)
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil || lo.Attrs().RawFlags&unix.IFF_UP == 0 {
		t.Errorf("lo is not up: %v", err)
	}
	return eth0
}
