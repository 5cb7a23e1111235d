package dhcp

import (
	"net/netip"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

func seeds(f *testing.F, t byte) {
	for _, opts := range [][]opt{ovmf(t, 7), ovmf(t, 11, raw(82, "0104 0a0b0c0d")), ovmfHTTP(t), ipxeBIOS(t, "iPXE"),
		ipxeBIOS(t, "\x03bcd"), intelROM(t, raw(43, "47 04 0001 0000 ff")), uboot(t), ramdisk(t), {typ(t)}} {
		f.Add(sent{opts: opts}.bytes(), "boot/file", "http://10.77.0.2/file", byte(1), true)
		f.Add(sent{ciaddr: "10.77.0.7", giaddr: "10.99.0.1", flags: 0x8000, opts: opts}.bytes(), "", "http://10.77.0.2/f", byte(3), false)
	}
}

// realSeeds are what firmware sent.
func realSeeds(f *testing.F) {
	for _, file := range captures(f) {
		for _, p := range readPcap(f, file) {
			if toServer(p) {
				f.Add(p.payload, "boot/file", "http://10.77.0.2/file", byte(1), false)
			}
		}
	}
}

// fuzz wants no panic, and of each answer what holds for all.
func fuzz(t *testing.T, at Arrival, b []byte, name, url string, kind byte, withLease bool) {
	Foreign(b)
	udpPayload(b)
	c, err := Parse(b, at)
	if err != nil {
		return
	}
	boot := Boot{Kind: Kind(kind % 4), Name: name, URL: url}
	if withLease {
		boot.Lease = testLease()
	}
	_, _ = c.String(), c.Architecture()
	r, err := Answer(c, boot)
	if err != nil {
		return
	}
	if len(r.Packet) < 300 || len(r.Packet) > maxMessageSize-headers {
		t.Errorf("an answer of %d bytes", len(r.Packet))
	}
	m, err := dhcpv4.FromBytes(r.Packet)
	if err != nil {
		t.Fatalf("our own answer cannot be read: %v", err)
	}
	if m.OpCode != dhcpv4.OpcodeBootReply || m.TransactionID != c.packet.TransactionID || m.ClientHWAddr.String() != c.MAC ||
		ip4(m.GetOneOption(dhcpv4.OptionServerIdentifier)) != at.Local {
		t.Errorf("answer %s", m.Summary())
	}
	if a := r.To.Addr(); !a.Is4() || a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() && at.Port == ServerPort || r.To.Port() == 0 {
		t.Errorf("to %s", r.To)
	}
	if (!withLease || at.Port == BINLPort) && (!m.YourIPAddr.IsUnspecified() || m.Options.Has(dhcpv4.OptionIPAddressLeaseTime) ||
		m.Options.Has(dhcpv4.OptionSubnetMask) || m.Options.Has(dhcpv4.OptionRouter)) {
		t.Errorf("a proxy gives an address: %s", m.Summary())
	}
}

func FuzzDHCP67(f *testing.F) {
	for _, t := range []byte{discover, request, inform, decline} {
		seeds(f, t)
	}
	realSeeds(f)
	f.Fuzz(func(t *testing.T, b []byte, name, url string, kind byte, withLease bool) {
		fuzz(t, on67(nobody), b, name, url, kind, withLease)
	})
}

func FuzzDHCP4011(f *testing.F) {
	seeds(f, request)
	realSeeds(f)
	f.Fuzz(func(t *testing.T, b []byte, name, url string, kind byte, withLease bool) {
		fuzz(t, on4011(netip.MustParseAddrPort("10.77.0.55:4011")), b, name, url, kind, withLease)
	})
}
