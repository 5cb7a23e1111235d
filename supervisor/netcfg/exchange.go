package netcfg

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"golang.org/x/sys/unix"
)

const (
	// VendorClass is option 60 of every request of ours: a site appliance knows
	// its machines by it.
	VendorClass = "bcd"
	// A question is sent three times: after 2 s, and 4 s, and 8 s are waited for
	// the last answer.
	firstTimeout = 2 * time.Second
	tries        = 3
)

// errRefused is a DHCPNAK.
var errRefused = errors.New("the dhcp server refused (DHCPNAK)")

// nic names a network interface.
type nic struct {
	index int
	name  string
	mac   net.HardwareAddr
}

// exchanger has the conversations with DHCP servers.
type exchanger interface {
	acquire(ctx context.Context, n nic) (Lease, error)
	// extend asks the lease's server, or every one, to let it go on.
	extend(ctx context.Context, n nic, l Lease, everyone bool) (Lease, error)
}

// dhcp is the exchanger of real networks.
type dhcp struct{}

// ask adds to a request what every one of ours says.
func ask(m *dhcpv4.DHCPv4) {
	m.UpdateOption(dhcpv4.OptClassIdentifier(VendorClass))
	m.UpdateOption(dhcpv4.OptMaxMessageSize(nclient4.MaxMessageSize))
	m.UpdateOption(dhcpv4.OptParameterRequestList(
		dhcpv4.OptionSubnetMask, dhcpv4.OptionClasslessStaticRoute, dhcpv4.OptionRouter,
		dhcpv4.OptionDomainNameServer, dhcpv4.OptionDomainName, dhcpv4.OptionDNSDomainSearchList,
		dhcpv4.OptionHostName, dhcpv4.OptionInterfaceMTU, dhcpv4.OptionNTPServers,
		dhcpv4.OptionIPAddressLeaseTime, dhcpv4.OptionRenewTimeValue, dhcpv4.OptionRebindingTimeValue,
		dhcpv4.OptionServerIdentifier,
	))
}

func (dhcp) acquire(ctx context.Context, n nic) (Lease, error) {
	// A packet socket: there is no address yet, and the answer may come to the
	// one that is being offered.
	conn, err := nclient4.NewRawUDPConn(n.name, nclient4.ClientPort)
	if err != nil {
		return Lease{}, fmt.Errorf("dhcp on %s: %w", n.name, err)
	}
	client, err := nclient4.NewWithConn(conn, n.mac, nclient4.WithTimeout(firstTimeout), nclient4.WithRetry(tries))
	if err != nil {
		return Lease{}, errors.Join(fmt.Errorf("dhcp on %s: %w", n.name, err), conn.Close())
	}
	defer client.Close()

	discover, err := dhcpv4.NewDiscovery(n.mac, ask)
	if err != nil {
		return Lease{}, fmt.Errorf("dhcp on %s: make a discover: %w", n.name, err)
	}
	offer, err := client.SendAndRead(ctx, client.RemoteAddr(), discover, isRealOffer)
	if err != nil {
		return Lease{}, fmt.Errorf("dhcp on %s: discover: %w", n.name, err)
	}
	request, err := dhcpv4.NewRequestFromOffer(offer, ask)
	if err != nil {
		return Lease{}, fmt.Errorf("dhcp on %s: make a request: %w", n.name, err)
	}
	answer, err := client.SendAndRead(ctx, client.RemoteAddr(), request, nclient4.IsAll(
		nclient4.IsCorrectServer(offer.ServerIdentifier()), isVerdict))
	if err != nil {
		return Lease{}, fmt.Errorf("dhcp on %s: request %s from %s: %w", n.name, offer.YourIPAddr, offer.ServerIdentifier(), err)
	}
	return verdict(n, answer)
}

// isRealOffer passes over the offers of proxy DHCP servers, which name no
// address: a boot server may answer faster than the one that has the addresses.
func isRealOffer(m *dhcpv4.DHCPv4) bool {
	if m.MessageType() != dhcpv4.MessageTypeOffer {
		return false
	}
	addr, ok := ip4(m.YourIPAddr)
	return ok && addr.IsGlobalUnicast() && m.ServerIdentifier() != nil
}

// isVerdict takes an acknowledgement with an address, or a refusal.
func isVerdict(m *dhcpv4.DHCPv4) bool {
	switch m.MessageType() {
	case dhcpv4.MessageTypeNak:
		return true
	case dhcpv4.MessageTypeAck:
		addr, ok := ip4(m.YourIPAddr)
		return ok && !addr.IsUnspecified()
	}
	return false
}

func verdict(n nic, m *dhcpv4.DHCPv4) (Lease, error) {
	if m.MessageType() == dhcpv4.MessageTypeNak {
		return Lease{}, fmt.Errorf("dhcp on %s: %w: %.100q", n.name, errRefused, m.Message())
	}
	l, err := leaseFrom(m, time.Now())
	if err != nil {
		return l, fmt.Errorf("dhcp on %s: %w", n.name, err)
	}
	return l, nil
}

// extend uses an ordinary socket, so that a renewal is routed. It is bound to the
// NIC and not to the leased address: a refusal comes by broadcast (RFC 2131
// section 4.3.2), which a socket with an address does not hear.
func (dhcp) extend(ctx context.Context, n nic, l Lease, everyone bool) (Lease, error) {
	request, err := dhcpv4.New(ask, dhcpv4.WithHwAddr(n.mac),
		dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest), dhcpv4.WithClientIP(l.Address.Addr().AsSlice()))
	if err != nil {
		return Lease{}, fmt.Errorf("dhcp on %s: make a request: %w", n.name, err)
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var errs []error
		err := c.Control(func(fd uintptr) {
			errs = append(errs,
				unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
				unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_BROADCAST, 1),
				unix.SetsockoptString(int(fd), unix.SOL_SOCKET, unix.SO_BINDTODEVICE, n.name))
		})
		return errors.Join(append(errs, err)...)
	}}
	conn, err := lc.ListenPacket(ctx, "udp4", fmt.Sprintf("0.0.0.0:%d", nclient4.ClientPort))
	if err != nil {
		return Lease{}, fmt.Errorf("dhcp on %s: %w", n.name, err)
	}
	to := &net.UDPAddr{IP: l.Server.AsSlice(), Port: nclient4.ServerPort}
	match := nclient4.IsAll(nclient4.IsCorrectServer(l.Server.AsSlice()), isVerdict)
	if everyone {
		to.IP = net.IPv4bcast
		match = isVerdict
	}
	client, err := nclient4.NewWithConn(conn, n.mac, nclient4.WithTimeout(firstTimeout), nclient4.WithRetry(tries))
	if err != nil {
		return Lease{}, errors.Join(fmt.Errorf("dhcp on %s: %w", n.name, err), conn.Close())
	}
	defer client.Close()
	answer, err := client.SendAndRead(ctx, to, request, match)
	if err != nil {
		return Lease{}, fmt.Errorf("dhcp on %s: extend %s at %s: %w", n.name, l.Address, to.IP, err)
	}
	return verdict(n, answer)
}
