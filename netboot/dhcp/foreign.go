package dhcp

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

// Foreign looks at another server's packet to a client. ok says that it is one
// that takes the boot away from us, and why tells the operator what to change.
// Only broadcasts are overheard: edk2 asks for them, iPXE does not.
func Foreign(b []byte) (mac string, server netip.Addr, why string, ok bool) {
	if len(b) > maxPacket {
		return "", netip.Addr{}, "", false
	}
	p, err := dhcpv4.FromBytes(b)
	if err != nil || p.OpCode != dhcpv4.OpcodeBootReply || len(p.ClientHWAddr) != 6 {
		return "", netip.Addr{}, "", false
	}
	if t := p.MessageType(); t != dhcpv4.MessageTypeOffer && t != dhcpv4.MessageTypeAck {
		return "", netip.Addr{}, "", false
	}
	server = ip4(p.GetOneOption(dhcpv4.OptionServerIdentifier))
	if !server.IsValid() {
		server = ip4(p.ServerIPAddr)
	}
	class := p.ClassIdentifier()
	pxe := strings.HasPrefix(class, "PXEClient")
	_, control := subOption(p.GetOneOption(dhcpv4.OptionVendorSpecificInformation), 6)
	ignore, _ := subOption(p.GetOneOption(dhcpv4.OptionEtherboot), noPXEDHCP)
	addressed := ip4(p.YourIPAddr).IsValid()
	switch http := strings.HasPrefix(class, "HTTPClient"); {
	case (pxe || http) && !addressed && p.MessageType() == dhcpv4.MessageTypeOffer:
		why = fmt.Sprintf("a second proxy DHCP server, %s, answers with option 60 %.20q: stop one of the two", server, class)
	case pxe && addressed && !control:
		why = fmt.Sprintf("the DHCP server %s sends option 60 PXEClient without option 43, so machines ask it for their boot file and not us: take option 60 out of its configuration", server)
	case http && addressed:
		why = fmt.Sprintf("the DHCP server %s sends option 60 HTTPClient, so machines take its HTTP boot and not ours: take option 60 out of its configuration", server)
	case len(ignore) == 1 && ignore[0] == 1 && addressed:
		why = fmt.Sprintf("the DHCP server %s sends option 175.176 (no-pxedhcp), so iPXE does not listen to us: take it out of its configuration", server)
	default:
		return "", netip.Addr{}, "", false
	}
	return p.ClientHWAddr.String(), server, why, true
}
