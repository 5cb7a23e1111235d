package dhcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

// Reply is a packet and where it goes.
type Reply struct {
	Packet []byte
	Type   dhcpv4.MessageType
	// To may be the broadcast address.
	To netip.AddrPort
	// Hardware is set when To is an address that the client has not yet taken,
	// so that the frame must go to this MAC without ARP (RFC 2131 section 4.1).
	Hardware net.HardwareAddr
	// About says what it offers, for the trace.
	About string
}

const (
	// maxHeaderFile is what the library writes of the header's file field, and
	// the field with its final zero.
	maxHeaderFile = 127
	// minMessageSize is what every client takes (RFC 2131 section 2); headers is
	// IP and UDP, which option 57 counts in for some and not for others.
	minMessageSize = 576
	headers        = 28
	// maxMessageSize is edk2's own buffer, and an Ethernet frame's worth.
	maxMessageSize = 1472
)

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// Answer makes the reply to a client's packet, or says in an error's words why
// there is none.
func Answer(c Client, b Boot) (Reply, error) {
	switch {
	case c.packet == nil:
		return Reply{}, errors.New("no packet")
	case c.Port == BINLPort:
		return answerBINL(c, b)
	case b.Lease != nil:
		return answerLeased(c, b)
	default:
		return answerProxy(c, b)
	}
}

func answerProxy(c Client, b Boot) (Reply, error) {
	switch {
	case c.Message == dhcpv4.MessageTypeDiscover:
		if c.Firmware == OtherClient {
			return Reply{}, errors.New("not a client that boots")
		}
		m := c.reply(dhcpv4.MessageTypeOffer)
		return c.withBoot(m, b)
	case c.Message == dhcpv4.MessageTypeInform && c.Firmware == Ramdisk:
		m := c.reply(dhcpv4.MessageTypeAck)
		m.ClientIPAddr = c.packet.ClientIPAddr
		return c.withBoot(m, b)
	case c.Message == dhcpv4.MessageTypeRequest:
		// Addressed to the real server by its option 54; an ACK of ours would
		// leave the client with no address.
		return Reply{}, errors.New("a request to the network's DHCP server")
	}
	return Reply{}, fmt.Errorf("a %s is not for a proxy", c.Message)
}

// answerBINL answers on port 4011. The client listens where it sent from, which
// is port 4011 for edk2 and 68 for others.
func answerBINL(c Client, b Boot) (Reply, error) {
	if c.Message != dhcpv4.MessageTypeRequest && c.Message != dhcpv4.MessageTypeInform {
		return Reply{}, fmt.Errorf("a %s on port %d; only requests are for it", c.Message, BINLPort)
	}
	if a := c.From.Addr(); !a.Is4() || a.IsUnspecified() || a.IsMulticast() || a == broadcast || c.From.Port() == 0 {
		return Reply{}, fmt.Errorf("a request on port %d from %s, which cannot be answered", BINLPort, c.From)
	}
	m := c.reply(dhcpv4.MessageTypeAck)
	m.ClientIPAddr = c.packet.ClientIPAddr
	r, err := c.withBoot(m, b)
	r.To, r.Hardware = c.From, nil
	return r, err
}

// reply is what all answers have: the fields of RFC 2131 table 3, and option 54,
// without which edk2 drops an offer.
func (c *Client) reply(t dhcpv4.MessageType) *dhcpv4.DHCPv4 {
	p := c.packet
	m := &dhcpv4.DHCPv4{
		OpCode: dhcpv4.OpcodeBootReply, HWType: p.HWType, ClientHWAddr: p.ClientHWAddr,
		TransactionID: p.TransactionID, Flags: p.Flags, GatewayIPAddr: p.GatewayIPAddr,
		Options: dhcpv4.Options{},
	}
	m.UpdateOption(dhcpv4.OptMessageType(t))
	m.UpdateOption(dhcpv4.OptServerIdentifier(c.Local.AsSlice()))
	if info, ok := p.Options[dhcpv4.OptionRelayAgentInformation.Code()]; ok {
		m.Options[dhcpv4.OptionRelayAgentInformation.Code()] = info // the library writes it last (RFC 3046 section 2.1)
	}
	return m
}

func (c *Client) withBoot(m *dhcpv4.DHCPv4, b Boot) (Reply, error) {
	about, err := c.addBoot(m, b)
	if err != nil {
		return Reply{}, err
	}
	return c.finish(m, about)
}

// addBoot adds what is to be booted. It says what that is.
func (c *Client) addBoot(m *dhcpv4.DHCPv4, b Boot) (about string, err error) {
	set := func(code dhcpv4.OptionCode, v []byte) { m.UpdateOption(dhcpv4.OptGeneric(code, v)) }
	m.ServerIPAddr = c.Local.AsSlice()
	if id := c.uuidOption(); id != nil {
		set(dhcpv4.OptionClientMachineIdentifier, id)
	}
	switch {
	case b.Kind == Nothing:
		return "", errNothing
	case b.Kind == Exit && c.Firmware != IPXE:
		return "", errors.New("the machine boots its own disk")
	case (b.Kind == Config) != (c.Firmware == Ramdisk):
		return "", fmt.Errorf("what was decided is not for %q", c.Firmware)
	case b.Kind == Config:
		if err := checkURL(b.URL); err != nil {
			return "", err
		}
		const room = 255 - 2
		if len(b.URL) > room {
			return "", fmt.Errorf("the ramdisk's URL is %d bytes long; at most %d", len(b.URL), room)
		}
		set(dhcpv4.OptionClassIdentifier, []byte(Marker))
		set(dhcpv4.OptionVendorSpecificInformation, append([]byte{configURL, byte(len(b.URL))}, b.URL...))
		return b.URL, nil
	}

	name := b.Name
	switch {
	case c.Firmware == UEFIHTTP || c.Firmware == IPXE && b.URL != "":
		if err := checkURL(b.URL); err != nil {
			return "", err
		}
		name = b.URL
	case name == "":
		return "", fmt.Errorf("no file name for %s", c.Firmware)
	case len(name) > maxHeaderFile:
		return "", fmt.Errorf("the file name is %d bytes long; at most %d", len(name), maxHeaderFile)
	}
	if len(name) <= maxHeaderFile {
		m.BootFileName = name // all that U-Boot reads
	}
	set(dhcpv4.OptionBootfileName, []byte(name))
	if c.Firmware == UEFIHTTP {
		set(dhcpv4.OptionClassIdentifier, []byte("HTTPClient"))
		return name, nil
	}
	set(dhcpv4.OptionClassIdentifier, []byte("PXEClient"))
	set(dhcpv4.OptionTFTPServerName, []byte(c.Local.String()))
	if c.Firmware == BIOS {
		// Discovery control: take the file, ask nobody, show no prompt (PXE 2.1
		// table 2-3). UEFI from before 2017 loses an offer that has it.
		v := []byte{6, 1, 8}
		if item, ok := subOption(c.packet.GetOneOption(dhcpv4.OptionVendorSpecificInformation), 71); ok && c.Port == BINLPort && len(item) == 4 {
			v = append(append(v, 71, 4), item...)
		}
		set(dhcpv4.OptionVendorSpecificInformation, append(v, 255))
	}
	return name, nil
}

// configURL is the sub-option of option 43 that holds the ramdisk's URL.
const configURL = 1

// ConfigURL reads the URL that an answer to vendor class "bcd" carries; "" when
// it carries none.
func ConfigURL(m *dhcpv4.DHCPv4) string {
	if m.ClassIdentifier() != Marker {
		return ""
	}
	v, _ := subOption(m.GetOneOption(dhcpv4.OptionVendorSpecificInformation), configURL)
	if checkURL(string(v)) != nil {
		return ""
	}
	return string(v)
}

// finish makes the bytes, no longer than the client takes, and finds where they
// go (RFC 2131 section 4.1).
func (c *Client) finish(m *dhcpv4.DHCPv4, about string) (Reply, error) {
	limit := minMessageSize
	if v := c.packet.GetOneOption(dhcpv4.OptionMaximumDHCPMessageSize); len(v) == 2 {
		limit = min(max(int(binary.BigEndian.Uint16(v)), minMessageSize), maxMessageSize)
	}
	limit -= headers
	b := m.ToBytes()
	if len(b) > limit {
		m.DeleteOption(dhcpv4.OptionTFTPServerName) // siaddr says the same
		b = m.ToBytes()
	}
	if len(b) > limit && m.BootFileName != "" {
		m.DeleteOption(dhcpv4.OptionBootfileName) // and so does the header
		b = m.ToBytes()
	}
	if len(b) > limit {
		return Reply{}, fmt.Errorf("the answer needs %d bytes and the client takes %d", len(b), limit)
	}
	r := Reply{Packet: b, Type: m.MessageType(), About: about}
	yours := ip4(m.YourIPAddr)
	switch has := ip4(c.packet.ClientIPAddr); {
	case c.Relay.IsValid():
		r.To = netip.AddrPortFrom(c.Relay, ServerPort)
	case r.Type == dhcpv4.MessageTypeNak:
		r.To = netip.AddrPortFrom(broadcast, clientPort)
	case has.IsValid():
		r.To = netip.AddrPortFrom(has, clientPort)
	case m.IsBroadcast() || !yours.IsValid():
		// A proxy's offer names no address that it could be sent to.
		r.To = netip.AddrPortFrom(broadcast, clientPort)
	default:
		r.To, r.Hardware = netip.AddrPortFrom(yours, clientPort), c.packet.ClientHWAddr
	}
	if a := r.To.Addr(); a != broadcast && (a.IsMulticast() || a.IsLoopback()) {
		return Reply{}, fmt.Errorf("the answer would go to %s, which is no machine's", a)
	}
	return r, nil
}
