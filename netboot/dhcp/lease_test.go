package dhcp

import (
	"net/netip"
	"strings"
	"testing"
	"time"
)

func testLease() *Lease {
	return &Lease{Address: netip.MustParsePrefix("10.77.0.7/24"), Router: netip.MustParseAddr("10.77.0.1"),
		DNS: []netip.Addr{netip.MustParseAddr("10.77.0.53"), netip.MustParseAddr("10.77.0.54")}}
}

// TestFullDHCP is RFC 2131 section 4.3 for a listed MAC, and fault 7: one answer
// has address and boot file, for firmware that never merges two.
func TestFullDHCP(t *testing.T) {
	yours, other := raw(50, "0a4d0007"), raw(50, "0a4d0063")
	us, them := raw(54, "0a4d0002"), raw(54, "0a4d0001")
	with := func(o []opt, more ...opt) []opt { return append(o, more...) }
	tests := []struct {
		name     string
		packet   sent
		boot     Boot
		typ      byte
		to       string
		yiaddr   string
		ciaddr   string
		leaseSec string
		file     string
		refuse   string
	}{
		{name: "fault 7: discover", packet: sent{opts: ovmf(discover, 7)}, boot: ukiBoot, typ: offer, to: "10.77.0.7:68", yiaddr: "10.77.0.7", leaseSec: "\x00\x00\x0e\x10", file: "uki/amd64.efi"},
		{name: "selecting us", packet: sent{flags: 0x8000, opts: with(ovmf(request, 7), us, yours)}, boot: ukiBoot, typ: ack, to: "255.255.255.255:68", yiaddr: "10.77.0.7", leaseSec: "\x00\x00\x0e\x10", file: "uki/amd64.efi"},
		{name: "selecting another server", packet: sent{opts: with(ovmf(request, 7), them, yours)}, refuse: "chose the server 10.77.0.1"},
		{name: "selecting another address", packet: sent{opts: with(ovmf(request, 7), us, other)}, typ: nak, to: "255.255.255.255:68", yiaddr: "0.0.0.0"},
		{name: "init-reboot", packet: sent{opts: with(ovmf(request, 7), yours)}, typ: ack, to: "10.77.0.7:68", yiaddr: "10.77.0.7", leaseSec: "\x00\x00\x0e\x10"},
		{name: "init-reboot with a wrong address", packet: sent{opts: with(ovmf(request, 7), other)}, typ: nak, to: "255.255.255.255:68", yiaddr: "0.0.0.0"},
		{name: "nak by a relay", packet: sent{giaddr: "10.99.0.1", opts: with(ovmf(request, 7), other)}, typ: nak, to: "10.99.0.1:67", yiaddr: "0.0.0.0"},
		{name: "renewing", packet: sent{ciaddr: "10.77.0.7", opts: ramdisk(request)}, typ: ack, to: "10.77.0.7:68", yiaddr: "10.77.0.7", ciaddr: "10.77.0.7", leaseSec: "\x00\x00\x0e\x10"},
		{name: "renewing a wrong address", packet: sent{ciaddr: "10.77.0.9", opts: ramdisk(request)}, typ: nak, to: "255.255.255.255:68", yiaddr: "0.0.0.0"},
		{name: "a request for nothing", packet: sent{opts: ramdisk(request)}, refuse: "no address"},
		{name: "inform", packet: sent{ciaddr: "10.77.0.7", opts: ramdisk(inform)}, typ: ack, to: "10.77.0.7:68", yiaddr: "0.0.0.0", ciaddr: "10.77.0.7"},
		{name: "inform from nowhere", packet: sent{opts: ramdisk(inform)}, refuse: "without an address"},
		{name: "decline", packet: sent{opts: with(ramdisk(decline), us, yours)}, refuse: "in use by another machine"},
		{name: "release", packet: sent{ciaddr: "10.77.0.7", opts: with(ramdisk(release), us)}, refuse: "gave 10.77.0.7 back"},
		{name: "an ordinary client that is listed", packet: sent{opts: []opt{typ(discover)}}, boot: ukiBoot, typ: offer, to: "10.77.0.7:68", yiaddr: "10.77.0.7", leaseSec: "\x00\x00\x0e\x10"},
		{name: "installed: an address and no file", packet: sent{opts: ovmf(discover, 7)}, boot: Boot{Kind: Exit}, typ: offer, to: "10.77.0.7:68", yiaddr: "10.77.0.7", leaseSec: "\x00\x00\x0e\x10"},
		{name: "a decision that is not for it: an address all the same", packet: sent{opts: ovmf(discover, 7)}, boot: confBoot, typ: offer, to: "10.77.0.7:68", yiaddr: "10.77.0.7", leaseSec: "\x00\x00\x0e\x10"},
		{name: "its own time", packet: sent{opts: ovmf(discover, 7)}, boot: Boot{Lease: &Lease{Address: netip.MustParsePrefix("10.77.0.7/24"), Time: 2 * time.Minute}}, typ: offer, to: "10.77.0.7:68", yiaddr: "10.77.0.7", leaseSec: "\x00\x00\x00\x78"},
		{name: "an address that is none", packet: sent{opts: ovmf(discover, 7)}, boot: Boot{Lease: &Lease{}}, refuse: "not an IPv4 host"},
		{name: "a router that is none", packet: sent{opts: ovmf(discover, 7)}, boot: Boot{Lease: &Lease{Address: netip.MustParsePrefix("10.77.0.7/24"), Router: netip.MustParseAddr("fe80::1")}}, refuse: "not IPv4"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			own := tt.boot.Lease != nil
			if !own {
				tt.boot.Lease = testLease()
			}
			r, err := Answer(mustParse(t, tt.packet.bytes(), on67(nobody)), tt.boot)
			if tt.refuse != "" {
				if err == nil || !strings.Contains(err.Error(), tt.refuse) {
					t.Fatalf("%+v, %v; want it refused because %q", r, err, tt.refuse)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			g := read(t, r.Packet)
			if byte(r.Type) != tt.typ || g.opts[53] != string(tt.typ) || r.To.String() != tt.to || g.opts[54] != local4 {
				t.Errorf("%s to %s, option 54 %x", r.Type, r.To, g.opts[54])
			}
			if g.yiaddr != tt.yiaddr || g.ciaddr != or(tt.ciaddr) || g.file != tt.file {
				t.Errorf("yiaddr %s, ciaddr %s, file %q", g.yiaddr, g.ciaddr, g.file)
			}
			if g.opts[51] != tt.leaseSec {
				t.Errorf("option 51 %x, want %x", g.opts[51], tt.leaseSec)
			}
			if tt.typ == nak {
				if g.opts[1] != "" || g.opts[56] == "" || (g.flags&0x8000 == 0) != (tt.packet.giaddr == "") {
					t.Errorf("a NAK with %v and the flags %x", g.order, g.flags)
				}
				return
			}
			if g.opts[1] != "\xff\xff\xff\x00" {
				t.Errorf("option 1 %x", g.opts[1])
			}
			if !own && (g.opts[3] != "\x0a\x4d\x00\x01" || g.opts[6] != "\x0a\x4d\x00\x35\x0a\x4d\x00\x36") {
				t.Errorf("options 3 %x and 6 %x", g.opts[3], g.opts[6])
			}
			if (g.opts[67] != "") != (tt.file != "") {
				t.Errorf("option 67 %q", g.opts[67])
			}
		})
	}
}

// TestFullDHCPToIPXE: iPXE need not wait for a proxy.
func TestFullDHCPToIPXE(t *testing.T) {
	boot := ipxeBoot
	boot.Lease = testLease()
	r, err := Answer(mustParse(t, sent{opts: ipxeBIOS(discover, "iPXE")}.bytes(), on67(nobody)), boot)
	if err != nil {
		t.Fatal(err)
	}
	if g := read(t, r.Packet); g.opts[175] != "\xb0\x01\x01" || g.opts[67] != ipxeBoot.URL || g.opts[60] != "PXEClient" {
		t.Errorf("options %q", g.opts)
	}
}
