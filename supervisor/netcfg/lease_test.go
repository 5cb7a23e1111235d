package netcfg

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/rfc1035label"
)

func ack(t testing.TB, mods ...dhcpv4.Modifier) *dhcpv4.DHCPv4 {
	t.Helper()
	m, err := dhcpv4.New(append([]dhcpv4.Modifier{
		dhcpv4.WithMessageType(dhcpv4.MessageTypeAck),
		dhcpv4.WithYourIP(net.IP{10, 1, 2, 3}),
		dhcpv4.WithServerIP(net.IP{10, 1, 2, 1}),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(net.IP{10, 1, 2, 1})),
		dhcpv4.WithNetmask(net.CIDRMask(24, 32)),
		dhcpv4.WithLeaseTime(3600),
	}, mods...)...)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestLeaseFromAnAcknowledgement(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	got, err := leaseFrom(ack(t,
		dhcpv4.WithOption(dhcpv4.OptRouter(net.IP{10, 1, 2, 1}, net.IP{10, 1, 2, 2})),
		dhcpv4.WithOption(dhcpv4.OptDNS(net.IP{10, 1, 2, 53}, net.IP{10, 1, 2, 53}, net.IP{0, 0, 0, 0}, net.IP{224, 0, 0, 1})),
		dhcpv4.WithOption(dhcpv4.OptNTPServers(net.IP{10, 1, 2, 123})),
		dhcpv4.WithOption(dhcpv4.OptDomainName("rack7.example.net")),
		dhcpv4.WithOption(dhcpv4.OptHostName("n1")),
		dhcpv4.WithGeneric(dhcpv4.OptionInterfaceMTU, []byte{0x23, 0x28}),
	), now)
	if err != nil {
		t.Fatal(err)
	}
	want := Lease{
		Address: netip.MustParsePrefix("10.1.2.3/24"),
		Routes:  []Route{{defaultRoute, netip.MustParseAddr("10.1.2.1")}},
		DNS:     []netip.Addr{netip.MustParseAddr("10.1.2.53")},
		NTP:     []netip.Addr{netip.MustParseAddr("10.1.2.123")},
		Search:  []string{"rack7.example.net"}, Hostname: "n1", MTU: 9000,
		Server: netip.MustParseAddr("10.1.2.1"), Acquired: now,
		Length: time.Hour, T1: 30 * time.Minute, T2: 52*time.Minute + 30*time.Second,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%+v\nwant\n%+v", got, want)
	}
}

func TestLeaseDetails(t *testing.T) {
	seconds := func(code dhcpv4.OptionCode, n byte) dhcpv4.Modifier {
		return dhcpv4.WithGeneric(code, []byte{0, 0, n, 0}) // n*256 s
	}
	for _, c := range []struct {
		name string
		mods []dhcpv4.Modifier
		ok   func(Lease) bool
	}{
		{"no mask: by class", []dhcpv4.Modifier{dhcpv4.WithoutOption(dhcpv4.OptionSubnetMask)},
			func(l Lease) bool { return l.Address.Bits() == 8 }},
		{"a mask with holes: by class", []dhcpv4.Modifier{dhcpv4.WithNetmask(net.IPMask{255, 0, 255, 0})},
			func(l Lease) bool { return l.Address.Bits() == 8 }},
		{"option 121 replaces option 3 (RFC 3442)", []dhcpv4.Modifier{
			dhcpv4.WithOption(dhcpv4.OptRouter(net.IP{10, 1, 2, 1})),
			dhcpv4.WithOption(dhcpv4.OptClasslessStaticRoute(
				&dhcpv4.Route{Dest: &net.IPNet{IP: net.IP{10, 9, 0, 0}, Mask: net.CIDRMask(16, 32)}, Router: net.IP{10, 1, 2, 9}},
				&dhcpv4.Route{Dest: &net.IPNet{IP: net.IP{10, 8, 0, 0}, Mask: net.CIDRMask(16, 32)}, Router: net.IP{0, 0, 0, 0}},
			))},
			func(l Lease) bool {
				return reflect.DeepEqual(l.Routes, []Route{
					{netip.MustParsePrefix("10.9.0.0/16"), netip.MustParseAddr("10.1.2.9")},
					{netip.MustParsePrefix("10.8.0.0/16"), netip.Addr{}},
				})
			}},
		{"our own address is no router", []dhcpv4.Modifier{dhcpv4.WithOption(dhcpv4.OptRouter(net.IP{10, 1, 2, 3}))},
			func(l Lease) bool { return len(l.Routes) == 0 }},
		{"infinite", []dhcpv4.Modifier{dhcpv4.WithLeaseTime(0xffffffff)},
			func(l Lease) bool { return l.Length == Infinite && l.Expires().IsZero() }},
		{"no time", []dhcpv4.Modifier{dhcpv4.WithoutOption(dhcpv4.OptionIPAddressLeaseTime)},
			func(l Lease) bool { return l.Length == defaultLength }},
		{"too short", []dhcpv4.Modifier{dhcpv4.WithLeaseTime(1)},
			func(l Lease) bool { return l.Length == minLength && l.T1 < l.T2 && l.T2 < l.Length }},
		{"the server's times", []dhcpv4.Modifier{seconds(dhcpv4.OptionRenewTimeValue, 2), seconds(dhcpv4.OptionRebindingTimeValue, 3)},
			func(l Lease) bool { return l.T1 == 512*time.Second && l.T2 == 768*time.Second }},
		{"the server's times in the wrong order", []dhcpv4.Modifier{seconds(dhcpv4.OptionRenewTimeValue, 3), seconds(dhcpv4.OptionRebindingTimeValue, 2)},
			func(l Lease) bool { return l.T1 == 256*time.Second && l.T2 == 512*time.Second }},
		{"a silly mtu", []dhcpv4.Modifier{dhcpv4.WithGeneric(dhcpv4.OptionInterfaceMTU, []byte{0, 68})},
			func(l Lease) bool { return l.MTU == 0 }},
		{"a domain that would add a line", []dhcpv4.Modifier{dhcpv4.WithOption(dhcpv4.OptDomainName("a\nnameserver 6.6.6.6"))},
			func(l Lease) bool { return reflect.DeepEqual(l.Search, []string{"a", "nameserver", "6.6.6.6"}) }},
		{"a host name that is none", []dhcpv4.Modifier{dhcpv4.WithOption(dhcpv4.OptHostName("a;reboot"))},
			func(l Lease) bool { return l.Hostname == "" }},
		{"option 119", []dhcpv4.Modifier{dhcpv4.WithOption(dhcpv4.OptDomainSearch(&rfc1035label.Labels{Labels: []string{"b.example", "c.example"}}))},
			func(l Lease) bool { return reflect.DeepEqual(l.Search, []string{"b.example", "c.example"}) }},
	} {
		l, err := leaseFrom(ack(t, c.mods...), time.Now())
		if err != nil || !c.ok(l) {
			t.Errorf("%s: %+v, %v", c.name, l, err)
		}
	}
	for name, mods := range map[string][]dhcpv4.Modifier{
		"no address":        {dhcpv4.WithYourIP(net.IPv4zero)},
		"broadcast address": {dhcpv4.WithYourIP(net.IPv4bcast)},
		"multicast address": {dhcpv4.WithYourIP(net.IP{224, 0, 0, 1})},
		"loopback address":  {dhcpv4.WithYourIP(net.IP{127, 0, 0, 1})},
		"no server":         {dhcpv4.WithoutOption(dhcpv4.OptionServerIdentifier)},
	} {
		if l, err := leaseFrom(ack(t, mods...), time.Now()); err == nil {
			t.Errorf("%s: %+v", name, l)
		}
	}
}

// A proxy DHCP server (our own site appliance, too) often answers first, and its
// offer holds no address.
func TestProxyOffersArePassedOver(t *testing.T) {
	offer := ack(t, dhcpv4.WithMessageType(dhcpv4.MessageTypeOffer))
	if !isRealOffer(offer) {
		t.Error("a real offer is not taken")
	}
	for name, mod := range map[string]dhcpv4.Modifier{
		"proxy":     dhcpv4.WithYourIP(net.IPv4zero),
		"no server": dhcpv4.WithoutOption(dhcpv4.OptionServerIdentifier),
		"no offer":  dhcpv4.WithMessageType(dhcpv4.MessageTypeAck),
	} {
		if isRealOffer(ack(t, dhcpv4.WithMessageType(dhcpv4.MessageTypeOffer), mod)) {
			t.Errorf("%s: taken", name)
		}
	}
}

// talos PR#3364: a short answer made the parser panic.
func FuzzLeaseFrom(f *testing.F) {
	f.Add(ack(f, dhcpv4.WithOption(dhcpv4.OptDNS(net.IP{1, 2, 3, 4}))).ToBytes())
	whole := ack(f, dhcpv4.WithOption(dhcpv4.OptDomainSearch(&rfc1035label.Labels{Labels: []string{"b.example"}}))).ToBytes()
	for n := 0; n < len(whole); n += 7 {
		f.Add(whole[:n])
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		m, err := dhcpv4.FromBytes(in)
		if err != nil {
			return
		}
		isRealOffer(m)
		isVerdict(m)
		l, err := leaseFrom(m, time.Unix(0, 0))
		if err != nil {
			return
		}
		if !l.Address.IsValid() || !(l.Length == Infinite || 0 < l.T1 && l.T1 <= l.T2 && l.T2 <= l.Length) {
			t.Fatalf("%+v", l)
		}
		for _, d := range l.Search {
			if !validName(d) {
				t.Fatalf("search domain %q", d)
			}
		}
	})
}

func TestResolvConf(t *testing.T) {
	a := netip.MustParseAddr
	got := string(resolvConf([]Lease{
		{DNS: []netip.Addr{a("10.0.0.1"), a("10.0.0.2")}, Search: []string{"a.example"}},
		{DNS: []netip.Addr{a("10.0.0.2"), a("10.0.0.3"), a("10.0.0.4")}, Search: []string{"a.example", "b.example"}},
	}))
	want := "# written by bcd from its DHCP leases\nsearch a.example b.example\nnameserver 10.0.0.1\nnameserver 10.0.0.2\nnameserver 10.0.0.3\n"
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestReplaceFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	for _, text := range []string{"a\n", "b\n", "b\n"} {
		if err := replaceFile(path, []byte(text)); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil || string(got) != text {
			t.Errorf("%q, %v", got, err)
		}
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o644 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
	if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}
