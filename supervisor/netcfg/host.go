package netcfg

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// metricBase is the metric of the first interface's routes; the others follow
// by their index. High enough for a route added by hand to win.
const metricBase = 1000

// link is an interface as the kernel reports it.
type link struct {
	nic
	carrier bool
	gone    bool
}

// host is the machine's network configuration.
type host interface {
	// links reports every Ethernet interface now and each change later, until
	// ctx ends; it closes the channel if it fails.
	links(ctx context.Context) (<-chan link, error)
	// up switches an interface on, IPv6 autoconfiguration included.
	up(n nic) error
	configure(n nic, l Lease) error
	deconfigure(n nic, l Lease) error
	// global6 is true if an interface has a global IPv6 address.
	global6(n nic) bool
}

// kernel is the host by netlink.
type kernel struct{}

// eligible is true for the interfaces that get an address of their own: hardware
// NICs (and veth, which stands for one in a container), not bridges, bonds'
// members, tunnels or dummies.
func eligible(l netlink.Link) bool {
	a := l.Attrs()
	if a.EncapType != "ether" || a.Flags&net.FlagLoopback != 0 || a.MasterIndex != 0 || len(a.HardwareAddr) != 6 {
		return false
	}
	switch l.Type() {
	case "device", "veth":
		return true
	}
	return false
}

func linkOf(l netlink.Link) link {
	a := l.Attrs()
	return link{
		nic:     nic{a.Index, a.Name, slices.Clone(a.HardwareAddr)},
		carrier: a.RawFlags&unix.IFF_RUNNING != 0 && a.RawFlags&unix.IFF_UP != 0,
	}
}

func (kernel) links(ctx context.Context) (<-chan link, error) {
	updates := make(chan netlink.LinkUpdate, 64)
	done := make(chan struct{})
	failed := make(chan error, 1)
	err := netlink.LinkSubscribeWithOptions(updates, done, netlink.LinkSubscribeOptions{
		ListExisting: true,
		ErrorCallback: func(err error) {
			select {
			case failed <- err:
			default:
			}
		},
	})
	if err != nil {
		return nil, fmt.Errorf("watch links: %w", err)
	}
	out := make(chan link)
	go func() {
		defer close(out)
		defer func() {
			close(done)
			for range updates { // until the subscription has seen it
			}
		}()
		for {
			var l link
			select {
			case <-ctx.Done():
				return
			case <-failed:
				return
			case u, ok := <-updates:
				if !ok {
					return
				}
				l = linkOf(u.Link)
				// One that was enslaved is no longer ours.
				l.gone = u.Header.Type == unix.RTM_DELLINK || !eligible(u.Link)
			}
			select {
			case <-ctx.Done():
				return
			case out <- l:
			}
		}
	}()
	return out, nil
}

func (kernel) up(n nic) error {
	// accept_ra=2: also where something has switched forwarding on.
	for name, value := range map[string]string{"disable_ipv6": "0", "accept_ra": "2", "autoconf": "1"} {
		path := "/proc/sys/net/ipv6/conf/" + n.name + "/" + name
		if err := os.WriteFile(path, []byte(value), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("set up %s: %w", n.name, err)
		}
	}
	l, err := netlink.LinkByIndex(n.index)
	if err != nil {
		return fmt.Errorf("set up %s: %w", n.name, err)
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return fmt.Errorf("set up %s: %w", n.name, err)
	}
	return nil
}

// seconds is a lifetime for the kernel, which then takes the address away by
// itself, even if this process is dead by then; 0 means for ever.
func seconds(l Lease, now time.Time) int {
	if l.Length == Infinite {
		return 0
	}
	return max(1, int(l.Expires().Sub(now)/time.Second))
}

func ipnet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func (k kernel) configure(n nic, l Lease) error {
	lnk, err := netlink.LinkByIndex(n.index)
	if err != nil {
		return fmt.Errorf("configure %s: %w", n.name, err)
	}
	if l.MTU != 0 && lnk.Attrs().MTU != l.MTU {
		if err := netlink.LinkSetMTU(lnk, l.MTU); err != nil {
			return fmt.Errorf("set the mtu of %s to %d: %w", n.name, l.MTU, err)
		}
	}
	// Before the new address is there: in the same network that would be a
	// secondary one, which the kernel removes with its primary.
	if err := k.dropOthers(lnk, l.Address); err != nil {
		return err
	}
	lifetime := seconds(l, time.Now())
	addr := &netlink.Addr{
		IPNet: ipnet(l.Address),
		// The route to its network is made below, with a metric: two NICs may
		// be in the same one.
		Flags:       unix.IFA_F_NOPREFIXROUTE,
		ValidLft:    lifetime,
		PreferedLft: lifetime,
	}
	if err := netlink.AddrReplace(lnk, addr); err != nil {
		return fmt.Errorf("give %s the address %s: %w", n.name, l.Address, err)
	}
	return k.setRoutes(n, l)
}

// dropOthers removes addresses with a lifetime that an earlier lease, perhaps of
// an earlier process, has left.
func (kernel) dropOthers(lnk netlink.Link, keep netip.Prefix) error {
	addrs, err := netlink.AddrList(lnk, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("list the addresses of %s: %w", lnk.Attrs().Name, err)
	}
	for _, a := range addrs {
		have, _ := ip4(a.IP)
		if a.Flags&unix.IFA_F_PERMANENT != 0 || have == keep.Addr() {
			continue
		}
		if err := netlink.AddrDel(lnk, &a); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("take the address %s from %s: %w", a.IPNet, lnk.Attrs().Name, err)
		}
	}
	return nil
}

// setRoutes replaces the routes that DHCP has made on an interface.
func (kernel) setRoutes(n nic, l Lease) error {
	var want []netlink.Route
	add := func(to netip.Prefix, via netip.Addr, onLink bool) {
		r := netlink.Route{
			LinkIndex: n.index, Dst: ipnet(to), Protocol: unix.RTPROT_DHCP,
			Priority: metricBase + n.index, Src: l.Address.Addr().AsSlice(),
		}
		if via.IsValid() {
			r.Gw = via.AsSlice()
			if onLink {
				r.SetFlag(netlink.FLAG_ONLINK)
			}
		} else {
			r.Scope = netlink.SCOPE_LINK
		}
		want = append(want, r)
	}
	if l.Address.Bits() < 32 {
		add(l.Address.Masked(), netip.Addr{}, false)
	}
	// Those on the link first: others may go through them.
	for _, direct := range []bool{true, false} {
		for _, r := range l.Routes {
			if r.Via.IsValid() != direct {
				// A router outside of the network is on the link nevertheless;
				// cloud providers hand out /32 addresses so.
				add(r.To, r.Via, r.Via.IsValid() && !l.Address.Contains(r.Via))
			}
		}
	}
	for _, r := range want {
		if err := netlink.RouteReplace(&r); err != nil {
			return fmt.Errorf("route to %s on %s: %w", r.Dst, n.name, err)
		}
	}
	have, err := dhcpRoutes(n)
	if err != nil {
		return err
	}
	for _, r := range have {
		if slices.ContainsFunc(want, func(w netlink.Route) bool { return sameRoute(r, w) }) {
			continue
		}
		if err := netlink.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("remove the route to %s on %s: %w", r.Dst, n.name, err)
		}
	}
	return nil
}

func dhcpRoutes(n nic) ([]netlink.Route, error) {
	have, err := netlink.RouteListFiltered(netlink.FAMILY_V4,
		&netlink.Route{LinkIndex: n.index, Protocol: unix.RTPROT_DHCP}, netlink.RT_FILTER_OIF|netlink.RT_FILTER_PROTOCOL)
	if err != nil {
		return nil, fmt.Errorf("list the routes of %s: %w", n.name, err)
	}
	return have, nil
}

func sameRoute(a, b netlink.Route) bool {
	text := func(n *net.IPNet) string {
		if n == nil {
			return defaultRoute.String() // as some versions of the library report it
		}
		return n.String()
	}
	return text(a.Dst) == text(b.Dst) && a.Gw.Equal(b.Gw) && a.Priority == b.Priority
}

func (kernel) deconfigure(n nic, l Lease) error {
	lnk, err := netlink.LinkByIndex(n.index)
	if err != nil {
		return nil // it is gone, and everything with it
	}
	routes, err := dhcpRoutes(n)
	if err != nil {
		return err
	}
	for _, r := range routes {
		if err := netlink.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("remove the route to %s on %s: %w", r.Dst, n.name, err)
		}
	}
	err = netlink.AddrDel(lnk, &netlink.Addr{IPNet: ipnet(l.Address)})
	if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) { // the kernel may have been first
		return fmt.Errorf("take the address %s from %s: %w", l.Address, n.name, err)
	}
	return nil
}

func (kernel) global6(n nic) bool {
	lnk, err := netlink.LinkByIndex(n.index)
	if err != nil {
		return false
	}
	addrs, err := netlink.AddrList(lnk, netlink.FAMILY_V6)
	if err != nil {
		return false
	}
	return slices.ContainsFunc(addrs, func(a netlink.Addr) bool {
		return a.IP.IsGlobalUnicast() && a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) == 0
	})
}

// loopbackUp switches lo on, which the kernel leaves off.
func loopbackUp() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("set up lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set up lo: %w", err)
	}
	return nil
}
