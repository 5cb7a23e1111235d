package host

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"
)

// Neighbour is what a switch port says about itself by LLDP (IEEE 802.1AB).
type Neighbour struct {
	ChassisID   string `json:"chassis_id"`
	PortID      string `json:"port_id"`
	SystemName  string `json:"system_name,omitempty"`
	Description string `json:"port_description,omitempty"`
	VLAN        int    `json:"vlan,omitempty"` // port VLAN id, 0: not said
}

// EtherTypeLLDP is the Ethernet type of an LLDP data unit (IEEE 802.1AB
// section 8.3).
const EtherTypeLLDP = 0x88cc

// Bounds of an LLDP data unit: it is one Ethernet frame, and each TLV takes
// at least two bytes.
const (
	maxLLDPDU   = 9216
	maxLLDPTLVs = 256
)

// TLV types (IEEE 802.1AB table 8-1).
const (
	tlvEnd         = 0
	tlvChassisID   = 1
	tlvPortID      = 2
	tlvTTL         = 3
	tlvPortDesc    = 4
	tlvSystemName  = 5
	tlvOrgSpecific = 127
)

// ErrLLDP is wrapped by each refusal of a data unit.
var ErrLLDP = errors.New("not an LLDP data unit")

// ParseLLDP reads an LLDP data unit, the payload of an Ethernet frame. The
// first three TLVs must be chassis id, port id and time to live (IEEE 802.1AB
// section 9.2.7.7.1); a time to live of 0 means that the neighbour says
// goodbye.
func ParseLLDP(pdu []byte) (n Neighbour, ttl time.Duration, err error) {
	if len(pdu) > maxLLDPDU {
		return n, 0, fmt.Errorf("%w: %d bytes, more than %d", ErrLLDP, len(pdu), maxLLDPDU)
	}
	for i := range maxLLDPTLVs {
		if len(pdu) == 0 {
			if i < 3 {
				return n, 0, fmt.Errorf("%w: ends after %d elements", ErrLLDP, i)
			}
			return n, ttl, nil // the end TLV is optional since the 2009 edition
		}
		if len(pdu) < 2 {
			return n, 0, fmt.Errorf("%w: half an element header", ErrLLDP)
		}
		header := binary.BigEndian.Uint16(pdu)
		kind, length := int(header>>9), int(header&0x1ff)
		if len(pdu) < 2+length {
			return n, 0, fmt.Errorf("%w: element of type %d says it has %d bytes, %d are left", ErrLLDP, kind, length, len(pdu)-2)
		}
		value := pdu[2 : 2+length]
		pdu = pdu[2+length:]
		if i < 3 && kind != i+1 {
			return n, 0, fmt.Errorf("%w: element %d has type %d", ErrLLDP, i+1, kind)
		}
		switch kind {
		case tlvEnd:
			return n, ttl, nil
		case tlvChassisID:
			if i != 0 || length < 2 {
				return n, 0, fmt.Errorf("%w: bad chassis id", ErrLLDP)
			}
			n.ChassisID = lldpID(value[0], value[1:], 4, 5)
		case tlvPortID:
			if i != 1 || length < 2 {
				return n, 0, fmt.Errorf("%w: bad port id", ErrLLDP)
			}
			n.PortID = lldpID(value[0], value[1:], 3, 4)
		case tlvTTL:
			if i != 2 || length < 2 {
				return n, 0, fmt.Errorf("%w: bad time to live", ErrLLDP)
			}
			ttl = time.Duration(binary.BigEndian.Uint16(value)) * time.Second
		case tlvPortDesc:
			n.Description = clean(string(value))
		case tlvSystemName:
			n.SystemName = clean(string(value))
		case tlvOrgSpecific:
			// IEEE 802.1 (00-80-C2), subtype 1: port VLAN id.
			if length == 6 && value[0] == 0x00 && value[1] == 0x80 && value[2] == 0xc2 && value[3] == 1 {
				n.VLAN = int(binary.BigEndian.Uint16(value[4:]) & 0xfff)
			}
		}
	}
	return n, 0, fmt.Errorf("%w: more than %d elements", ErrLLDP, maxLLDPTLVs)
}

// lldpID prints a chassis or port id; the subtypes of MAC and network
// address differ between the two (IEEE 802.1AB tables 8-2 and 8-3).
func lldpID(subtype byte, id []byte, mac, address byte) string {
	switch {
	case subtype == mac && len(id) == 6:
		return net.HardwareAddr(id).String()
	case subtype == address && len(id) >= 1:
		// One byte of address family (1 is IPv4, 2 is IPv6), then the address.
		if ip, ok := netip.AddrFromSlice(id[1:]); ok && (id[0] == 1 && ip.Is4() || id[0] == 2 && ip.Is6()) {
			return ip.String()
		}
	}
	for _, c := range id {
		if c < 0x20 || c > 0x7e {
			return fmt.Sprintf("%x", id)
		}
	}
	return clean(string(id))
}
