package dhcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

// answerLeased is a DHCP server's part for one client with a fixed address
// (RFC 2131 section 4.3), with what it boots in the same answer.
func answerLeased(c Client, b Boot) (Reply, error) {
	if err := b.Lease.check(); err != nil {
		return Reply{}, err
	}
	address := b.Lease.Address.Addr()
	has := ip4(c.packet.ClientIPAddr)
	switch c.Message {
	case dhcpv4.MessageTypeDiscover:
		m := c.reply(dhcpv4.MessageTypeOffer)
		return c.lease(m, b, true)

	case dhcpv4.MessageTypeRequest:
		if c.Server.IsValid() && c.Server != c.Local {
			return Reply{}, fmt.Errorf("it chose the server %s", c.Server)
		}
		asked := ip4(c.packet.GetOneOption(dhcpv4.OptionRequestedIPAddress))
		if !asked.IsValid() {
			asked = has // RENEWING and REBINDING
		}
		if !asked.IsValid() {
			return Reply{}, errors.New("a request for no address")
		}
		if asked != address || has.IsValid() && has != address {
			return c.refuse(fmt.Sprintf("%s is not yours; %s is", asked, address))
		}
		m := c.reply(dhcpv4.MessageTypeAck)
		m.ClientIPAddr = c.packet.ClientIPAddr
		return c.lease(m, b, true)

	case dhcpv4.MessageTypeInform:
		if !has.IsValid() {
			return Reply{}, errors.New("an inform without an address to answer to")
		}
		m := c.reply(dhcpv4.MessageTypeAck)
		m.ClientIPAddr = c.packet.ClientIPAddr
		return c.lease(m, b, false)

	case dhcpv4.MessageTypeDecline:
		return Reply{}, fmt.Errorf("the client found %s in use by another machine", address)
	case dhcpv4.MessageTypeRelease:
		return Reply{}, fmt.Errorf("the client gave %s back; it stays its own", address)
	}
	return Reply{}, fmt.Errorf("a %s is not for a server", c.Message)
}

// lease fills in the network's parameters, and with an address its times
// (table 3: an INFORM is answered without them).
func (c *Client) lease(m *dhcpv4.DHCPv4, b Boot, withAddress bool) (Reply, error) {
	l := b.Lease
	about := "for " + l.Address.String()
	if withAddress {
		m.YourIPAddr = l.Address.Addr().AsSlice()
		for _, o := range []struct {
			code dhcpv4.OptionCode
			s    uint32
		}{
			{dhcpv4.OptionIPAddressLeaseTime, l.seconds()},
			{dhcpv4.OptionRenewTimeValue, l.seconds() / 2},
			{dhcpv4.OptionRebindingTimeValue, l.seconds() / 8 * 7},
		} {
			m.UpdateOption(dhcpv4.OptGeneric(o.code, binary.BigEndian.AppendUint32(nil, o.s)))
		}
	}
	m.UpdateOption(dhcpv4.OptSubnetMask(net.CIDRMask(l.Address.Bits(), 32)))
	if l.Router.IsValid() {
		m.UpdateOption(dhcpv4.OptRouter(l.Router.AsSlice()))
	}
	if len(l.DNS) > 0 {
		var servers []net.IP
		for _, a := range l.DNS {
			servers = append(servers, a.AsSlice())
		}
		m.UpdateOption(dhcpv4.OptDNS(servers...))
	}
	if c.Firmware == IPXE {
		// no-pxedhcp: there is no proxy to wait for.
		m.UpdateOption(dhcpv4.OptGeneric(dhcpv4.OptionEtherboot, []byte{noPXEDHCP, 1, 1}))
	}
	if c.Firmware != OtherClient && b.Kind != Nothing && !(b.Kind == Exit && c.Firmware != IPXE) {
		if file, err := c.addBoot(m, b); err != nil {
			about += ", nothing to boot: " + err.Error() // an address is worth having all the same
		} else {
			about += ", " + file
		}
	}
	return c.finish(m, about)
}

// noPXEDHCP is the sub-option of iPXE's option 175 that makes it ignore proxies.
const noPXEDHCP = 176

// refuse is a DHCPNAK (section 4.3.2): by broadcast, and through a relay with
// the broadcast bit set, because the client's address is wrong.
func (c *Client) refuse(why string) (Reply, error) {
	m := c.reply(dhcpv4.MessageTypeNak)
	m.UpdateOption(dhcpv4.OptMessage(why))
	if c.Relay.IsValid() {
		m.SetBroadcast()
	}
	return c.finish(m, why)
}
