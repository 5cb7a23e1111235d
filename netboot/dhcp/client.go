package dhcp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/iana"
)

const (
	// ServerPort and BINLPort are where we listen (RFC 2131 section 4.1, PXE 2.1
	// section 2.2.3).
	ServerPort = 67
	BINLPort   = 4011
	clientPort = 68

	// Marker is the user class of an iPXE that is ours, and the vendor class of
	// our ramdisk.
	Marker = "bcd"

	// maxPacket is an Ethernet frame's worth of UDP (1500-28); a client's packet
	// is never fragmented.
	maxPacket = 1472
	// maxArchitectures of option 93 are looked at; clients list one, or two.
	maxArchitectures = 16
)

// Firmware is what asks.
type Firmware string

const (
	// OtherClient is an ordinary DHCP client, which boots nothing.
	OtherClient Firmware = ""
	UEFI        Firmware = "uefi"
	UEFIHTTP    Firmware = "uefi-http"
	BIOS        Firmware = "bios"
	IPXE        Firmware = "ipxe"
	UBoot       Firmware = "u-boot"
	Ramdisk     Firmware = "ramdisk"
)

// Client is one packet of a client, read.
type Client struct {
	// MAC is lower case, with colons.
	MAC string
	// UUID is option 97 in the byte order of SMBIOS 2.6, as Linux prints it, and
	// UUIDAsSent without the swap: firmware differs. Lower case; both empty when
	// there is none or only a placeholder.
	UUID, UUIDAsSent string
	// Architectures is option 93 (RFC 4578 section 2.1), in the client's order;
	// of the vendor class when there is no such option.
	Architectures []uint16
	Firmware      Firmware
	// Ours: the iPXE that we handed out, by its user class.
	Ours bool
	// HTTP: the client says that it can fetch by HTTP.
	HTTP    bool
	Message dhcpv4.MessageType
	// Relay is the relay agent's address (giaddr), or the zero Addr.
	Relay netip.Addr
	// Address is what the client has (ciaddr) or asks for (option 50), or the
	// zero Addr; Server is the one it chose (option 54).
	Address, Server netip.Addr
	VendorClass     string

	Interface string
	// Local is our own address on that interface: what the URL of a Boot names.
	Local netip.Addr
	From  netip.AddrPort
	// Port is ServerPort or BINLPort.
	Port uint16
	// Notes are what was wrong with the packet and was passed over.
	Notes []string

	packet *dhcpv4.DHCPv4
}

// Arrival says where a packet came in.
type Arrival struct {
	From      netip.AddrPort
	Port      uint16 // ServerPort or BINLPort
	Interface string
	Local     netip.Addr
}

// Parse reads a client's packet (RFC 2131 section 2). It fails for anything that
// is not a request of an Ethernet client.
func Parse(b []byte, at Arrival) (Client, error) {
	if len(b) > maxPacket {
		return Client{}, fmt.Errorf("a packet of %d bytes; at most %d", len(b), maxPacket)
	}
	p, err := dhcpv4.FromBytes(b)
	if err != nil {
		return Client{}, fmt.Errorf("read a dhcp packet of %d bytes: %w", len(b), err)
	}
	if p.OpCode != dhcpv4.OpcodeBootRequest {
		return Client{}, errors.New("a dhcp packet that is not a request")
	}
	if p.HWType != iana.HWTypeEthernet || len(p.ClientHWAddr) != 6 {
		return Client{}, fmt.Errorf("a client with hardware type %d and an address of %d bytes; only Ethernet is served", p.HWType, len(p.ClientHWAddr))
	}
	if p.ClientHWAddr[0]&1 != 0 || bytes.Equal(p.ClientHWAddr, make([]byte, 6)) {
		return Client{}, fmt.Errorf("a client with the MAC %s, which is none of a machine", p.ClientHWAddr)
	}
	if !at.Local.Is4() || at.Local.IsUnspecified() {
		return Client{}, fmt.Errorf("no IPv4 address of our own on %s", at.Interface)
	}
	c := Client{
		MAC: p.ClientHWAddr.String(), Message: p.MessageType(), VendorClass: p.ClassIdentifier(),
		Relay: ip4(p.GatewayIPAddr), Address: ip4(p.ClientIPAddr), Server: ip4(p.GetOneOption(dhcpv4.OptionServerIdentifier)),
		Interface: at.Interface, Local: at.Local, From: at.From, Port: at.Port, packet: p,
	}
	if c.Message == dhcpv4.MessageTypeNone {
		return c, errors.New("a BOOTP packet without a DHCP message type")
	}
	if !c.Address.IsValid() {
		c.Address = ip4(p.GetOneOption(dhcpv4.OptionRequestedIPAddress))
	}
	c.readUUID()
	c.readArchitectures()
	c.readFirmware()
	return c, nil
}

// ip4 is the zero Addr for 0.0.0.0 and for what is not four bytes.
func ip4(b []byte) netip.Addr {
	a, ok := netip.AddrFromSlice(b)
	if !ok || !a.Is4() || a.IsUnspecified() {
		return netip.Addr{}
	}
	return a
}

// uuidOption is option 97 when it has the form of RFC 4578 section 2.3.
func (c *Client) uuidOption() []byte {
	v := c.packet.GetOneOption(dhcpv4.OptionClientMachineIdentifier)
	if len(v) != 17 || v[0] != 0 {
		return nil
	}
	return v
}

func (c *Client) readUUID() {
	v := c.uuidOption()
	if v == nil {
		if c.packet.Options.Has(dhcpv4.OptionClientMachineIdentifier) {
			n := len(c.packet.GetOneOption(dhcpv4.OptionClientMachineIdentifier))
			if n > 0 { // empty is allowed, and says nothing
				c.note("option 97 is malformed (%d bytes)", n)
			}
		}
		return
	}
	u := v[1:]
	if same := bytes.Count(u, u[:1]) == len(u); same && (u[0] == 0 || u[0] == 0xff) {
		c.note("option 97 is a placeholder")
		return
	}
	text := func(u []byte) string { return fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:]) }
	c.UUIDAsSent = text(u)
	s := slices.Clone(u)
	slices.Reverse(s[:4])
	slices.Reverse(s[4:6])
	slices.Reverse(s[6:8])
	c.UUID = text(s)
}

func (c *Client) readArchitectures() {
	v := c.packet.GetOneOption(dhcpv4.OptionClientSystemArchitectureType)
	if len(v)%2 != 0 || len(v) > 2*maxArchitectures {
		c.note("option 93 is malformed (%d bytes)", len(v))
		v = nil
	}
	for ; len(v) > 0; v = v[2:] {
		c.Architectures = append(c.Architectures, binary.BigEndian.Uint16(v))
	}
	// "PXEClient:Arch:00007:UNDI:003016"
	if fields := strings.Split(c.VendorClass, ":"); len(c.Architectures) == 0 && len(fields) >= 3 && fields[1] == "Arch" {
		if n, err := strconv.ParseUint(fields[2], 10, 16); err == nil {
			c.Architectures = []uint16{uint16(n)}
		}
	}
}

func (c *Client) readFirmware() {
	class := c.packet.GetOneOption(dhcpv4.OptionUserClassInformation)
	features, ipxe := c.packet.Options[dhcpv4.OptionEtherboot.Code()]
	c.Ours = hasUserClass(class, Marker)
	first := func(arch ...uint16) bool {
		return len(c.Architectures) > 0 && slices.Contains(arch, c.Architectures[0])
	}
	switch {
	case c.VendorClass == Marker:
		c.Firmware, c.Ours, c.HTTP = Ramdisk, false, true
	case ipxe, c.Ours, hasUserClass(class, "iPXE"):
		const featureHTTP = 19
		c.Firmware = IPXE
		_, c.HTTP = subOption(features, featureHTTP)
	case strings.HasPrefix(c.VendorClass, "HTTPClient"):
		c.Firmware, c.HTTP = UEFIHTTP, true
	case strings.HasPrefix(c.VendorClass, "U-Boot"), strings.HasPrefix(c.VendorClass, "PXEClient") && first(21, 22):
		c.Firmware = UBoot
	case !strings.HasPrefix(c.VendorClass, "PXEClient"):
		c.Firmware = OtherClient
	case len(c.Architectures) == 0, first(0, 20):
		c.Firmware = BIOS
	default:
		c.Firmware = UEFI
	}
}

// hasUserClass looks for a user class raw, as iPXE and Microsoft send it, and in
// the list of RFC 3004.
func hasUserClass(v []byte, want string) bool {
	if string(v) == want {
		return true
	}
	for len(v) > 0 {
		n := int(v[0])
		if n == 0 || n >= len(v) {
			return false
		}
		if string(v[1:1+n]) == want {
			return true
		}
		v = v[1+n:]
	}
	return false
}

// subOption finds one value in an encapsulated option (RFC 2132 section 8.4).
func subOption(v []byte, code byte) ([]byte, bool) {
	for len(v) > 0 {
		switch v[0] {
		case 0:
			v = v[1:]
			continue
		case 255:
			return nil, false
		}
		if len(v) < 2 || len(v) < 2+int(v[1]) {
			return nil, false
		}
		if v[0] == code {
			return v[2 : 2+int(v[1])], true
		}
		v = v[2+int(v[1]):]
	}
	return nil, false
}

// Architecture is Go's name for the first architecture of the list that has
// one, or "". 7 is EBC in RFC 4578, and x64 in all firmware that sends it. A
// Raspberry Pi 5 says 0, like a BIOS.
func (c *Client) Architecture() string {
	for _, a := range c.Architectures {
		switch a {
		case 0, 7, 9, 16, 20:
			return "amd64"
		case 6, 15:
			return "386"
		case 10, 18, 21:
			return "arm"
		case 11, 19, 22, 41:
			return "arm64"
		case 27, 28:
			return "riscv64"
		case 39, 40:
			return "loong64"
		}
	}
	return ""
}

func (c *Client) note(format string, args ...any) {
	c.Notes = append(c.Notes, fmt.Sprintf(format, args...))
}

// String is a line for a trace.
func (c *Client) String() string {
	var s strings.Builder
	fmt.Fprintf(&s, "%s, class %.48q, architectures %v", c.Message, c.VendorClass, c.Architectures)
	if c.Ours {
		s.WriteString(", our iPXE")
	}
	if c.Relay.IsValid() {
		fmt.Fprintf(&s, ", by relay %s", c.Relay)
	}
	if c.Server.IsValid() {
		fmt.Fprintf(&s, ", to server %s", c.Server)
	}
	for _, n := range c.Notes {
		s.WriteString("; " + n)
	}
	return s.String()
}
