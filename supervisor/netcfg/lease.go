package netcfg

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

const (
	// defaultLength stands for a lease time that the server left out, although
	// RFC 2131 section 4.3.1 demands one.
	defaultLength = time.Hour
	// minLength is the shortest lease that is taken at its word; a shorter one
	// would mean more renewals than work.
	minLength = 30 * time.Second
	// Infinite is a lease without end (RFC 2131 section 3.3), and the length of
	// a static configuration.
	Infinite = time.Duration(1<<63 - 1)
	// minMTU is the least that IPv4 must carry (RFC 791); maxMTU is what jumbo
	// frames have.
	minMTU, maxMTU = 576, 9216
	// Bounds for lists in an answer; resolv.conf(5) takes three servers.
	maxServers, maxRoutes, maxSearch = 4, 32, 6
)

// Route is a destination and its router; a router that is not valid means that
// the destination is on the link.
type Route struct {
	To  netip.Prefix `json:"to"`
	Via netip.Addr   `json:"via"`
}

// Lease is an IPv4 configuration, from a DHCP server or static.
type Lease struct {
	Address  netip.Prefix `json:"address"` // with the length of its network
	Routes   []Route      `json:"routes"`
	DNS      []netip.Addr `json:"dns"`
	Search   []string     `json:"search"`
	NTP      []netip.Addr `json:"ntp"`
	MTU      int          `json:"mtu"`    // 0: leave it
	Server   netip.Addr   `json:"server"` // not valid for a static one
	Hostname string       `json:"hostname,omitempty"`

	Acquired time.Time     `json:"acquired"`
	T1       time.Duration `json:"t1_ns"` // after Acquired: renew
	T2       time.Duration `json:"t2_ns"` // rebind
	Length   time.Duration `json:"length_ns"`
}

// Expires is when the lease ends; the zero time for an infinite one.
func (l *Lease) Expires() time.Time {
	if l.Length == Infinite {
		return time.Time{}
	}
	return l.Acquired.Add(l.Length)
}

var defaultRoute = netip.MustParsePrefix("0.0.0.0/0")

// leaseFrom reads an acknowledgement that came at a time. It takes what it can
// use and leaves out what makes no sense; without a usable address it fails.
func leaseFrom(ack *dhcpv4.DHCPv4, now time.Time) (Lease, error) {
	l := Lease{Acquired: now}
	addr, ok := ip4(ack.YourIPAddr)
	if !ok || !addr.IsGlobalUnicast() {
		return l, fmt.Errorf("dhcp answer gives the address %s, which no machine can have", ack.YourIPAddr)
	}
	l.Address = netip.PrefixFrom(addr, prefixLength(addr, ack.SubnetMask()))
	l.Server, _ = ip4(ack.ServerIdentifier())
	if !l.Server.IsValid() {
		return l, errors.New("dhcp answer names no server (option 54)")
	}
	l.Routes = routes(ack, l.Address)
	l.DNS = addresses(ack.DNS())
	l.NTP = addresses(ack.NTPServers())
	if m, err := dhcpv4.GetUint16(dhcpv4.OptionInterfaceMTU, ack.Options); err == nil && m >= minMTU && m <= maxMTU {
		l.MTU = int(m)
	}
	l.Search = search(ack)
	if h := ack.HostName(); validName(h) {
		l.Hostname = h
	}
	l.Length, l.T1, l.T2 = times(ack)
	return l, nil
}

// prefixLength is the mask's, or else that of the address's class (RFC 2131
// section 4.4.1 leaves it to the client).
func prefixLength(addr netip.Addr, mask net.IPMask) int {
	if ones, bits := mask.Size(); bits == 32 && ones > 0 {
		return ones
	}
	ones, _ := net.IP(addr.AsSlice()).DefaultMask().Size()
	return ones
}

// routes takes option 121, which replaces option 3 (RFC 3442), or the first
// router of option 3.
func routes(ack *dhcpv4.DHCPv4, self netip.Prefix) []Route {
	var out []Route
	for _, r := range ack.ClasslessStaticRoute() {
		if r == nil || r.Dest == nil || len(out) == maxRoutes {
			continue
		}
		to, ok := ip4(r.Dest.IP)
		ones, bits := r.Dest.Mask.Size()
		via, ok2 := ip4(r.Router)
		if !ok || bits != 32 {
			continue
		}
		if !ok2 || via.IsUnspecified() {
			via = netip.Addr{} // on the link
		}
		out = append(out, Route{netip.PrefixFrom(to, ones).Masked(), via})
	}
	if len(out) > 0 {
		return out
	}
	for _, r := range addresses(ack.Router()) {
		if r != self.Addr() {
			return []Route{{defaultRoute, r}}
		}
	}
	return nil
}

// times gives the lease's length and when to renew and to rebind, with RFC 2131
// section 4.4.5's defaults where the server's make no sense.
func times(ack *dhcpv4.DHCPv4) (length, t1, t2 time.Duration) {
	const forever = 0xffffffff * time.Second
	length = ack.IPAddressLeaseTime(defaultLength)
	if length == forever {
		return Infinite, Infinite, Infinite
	}
	length = max(length, minLength)
	t1 = ack.IPAddressRenewalTime(0)
	t2 = ack.IPAddressRebindingTime(0)
	if t2 <= 0 || t2 >= length {
		t2 = length / 8 * 7
	}
	if t1 <= 0 || t1 >= t2 {
		if t1 = length / 2; t1 >= t2 {
			t1 = t2 / 2
		}
	}
	return length, t1, t2
}

// search takes option 119 (RFC 3397), or option 15.
func search(ack *dhcpv4.DHCPv4) []string {
	var names []string
	if labels := ack.DomainSearch(); labels != nil {
		names = labels.Labels
	}
	if len(names) == 0 {
		names = strings.Fields(ack.DomainName())
	}
	var out []string
	for _, n := range names {
		if n = strings.TrimSuffix(n, "."); validName(n) && !slices.Contains(out, n) && len(out) < maxSearch {
			out = append(out, n)
		}
	}
	return out
}

// validName is true for a host or domain name (RFC 1123), and so for nothing
// that could add a line to a file.
func validName(s string) bool {
	if s == "" || len(s) > 253 || s[0] == '-' || s[0] == '.' {
		return false
	}
	for _, c := range []byte(s) {
		if c != '-' && c != '.' && c != '_' && (c < '0' || c > '9') && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') {
			return false
		}
	}
	return !strings.Contains(s, "..")
}

func ip4(ip net.IP) (netip.Addr, bool) {
	a, ok := netip.AddrFromSlice(ip.To4())
	return a, ok
}

func addresses(ips []net.IP) []netip.Addr {
	var out []netip.Addr
	for _, ip := range ips {
		a, ok := ip4(ip)
		if ok && !a.IsUnspecified() && !a.IsMulticast() && !slices.Contains(out, a) && len(out) < maxServers {
			out = append(out, a)
		}
	}
	return out
}
