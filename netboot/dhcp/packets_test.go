package dhcp

import (
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"strings"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

// A client's packet is written here byte by byte, and not by the library that
// the code under test reads it with.

type opt struct {
	code byte
	v    []byte
}

func str(code byte, s string) opt          { return opt{code, []byte(s)} }
func raw(code byte, hexes string) opt      { return opt{code, unhex(hexes)} }
func u16s(code byte, values ...uint16) opt { return opt{code, be16(values...)} }

func be16(values ...uint16) (b []byte) {
	for _, v := range values {
		b = binary.BigEndian.AppendUint16(b, v)
	}
	return b
}

func unhex(s string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		panic(err)
	}
	return b
}

type sent struct {
	op       byte // 0: a request
	flags    uint16
	ciaddr   string
	yiaddr   string
	giaddr   string
	mac      string // hex; "" for the usual one
	noEnd    bool
	hops     byte
	htype    byte // 0: Ethernet
	hlen     byte // 0: 6
	opts     []opt
	noCookie bool
}

const testMAC = "52:54:00:12:34:56"

var testXID = dhcpv4.TransactionID{0xde, 0xad, 0xbe, 0xef}

func (s sent) bytes() []byte {
	b := make([]byte, 240)
	b[0], b[1], b[2], b[3] = max(s.op, 1), max(s.htype, 1), s.hlen, s.hops
	if s.hlen == 0 {
		b[2] = 6
	}
	copy(b[4:], testXID[:])
	b[9] = 4 // seconds
	binary.BigEndian.PutUint16(b[10:], s.flags)
	for i, a := range map[int]string{12: s.ciaddr, 16: s.yiaddr, 24: s.giaddr} {
		if a != "" {
			copy(b[i:], netip.MustParseAddr(a).AsSlice())
		}
	}
	mac := "525400123456"
	if s.mac != "" {
		mac = s.mac
	}
	copy(b[28:44], unhex(mac))
	if !s.noCookie {
		copy(b[236:], []byte{99, 130, 83, 99})
	}
	for _, o := range s.opts {
		b = append(append(b, o.code, byte(len(o.v))), o.v...)
	}
	if !s.noEnd {
		b = append(b, 255)
	}
	return b
}

const (
	discover = 1
	offer    = 2
	request  = 3
	decline  = 4
	ack      = 5
	nak      = 6
	release  = 7
	inform   = 8
)

func typ(t byte) opt { return opt{53, []byte{t}} }

// guid is 00 and 16 bytes.
const guid = "00 33221100 5544 7766 8899aabbccddeeff"

// What the firmware sends, after what edk2, iPXE and the ROMs have in their code.
func ovmf(t byte, arch uint16, more ...opt) []opt {
	return append([]opt{typ(t), u16s(57, 1472), raw(55, "01020304050607080b0c0d0f1112161c"), raw(97, guid),
		raw(94, "010310"), u16s(93, arch), str(60, "PXEClient:Arch:00007:UNDI:003016")}, more...)
}

func ovmfHTTP(t byte) []opt {
	return []opt{typ(t), u16s(57, 1472), raw(55, "0102030405060c0d0f111c28292a2b"), raw(97, guid),
		raw(94, "010310"), u16s(93, 16), str(60, "HTTPClient:Arch:00016:UNDI:003016")}
}

func ipxeBIOS(t byte, class string) []opt {
	return []opt{typ(t), u16s(57, 1472), u16s(93, 0), raw(94, "010201"),
		str(60, "PXEClient:Arch:00000:UNDI:002001"), str(77, class), raw(55, "010306070c0f111a2b3c4243778081828384858687af cb"),
		raw(175, "b1 05 01 8086100e eb 03 010000 17 01 01 22 01 01 13 01 01 11 01 01 15 01 01 18 01 01 12 01 01"),
		raw(61, "01525400123456"), raw(97, guid)}
}

// intelROM is an old ROM, which sends no option 97 and no option 57.
func intelROM(t byte, more ...opt) []opt {
	return append([]opt{typ(t), raw(55, "0102030506 0b0c0d0f"), u16s(93, 0), raw(94, "010201"), str(60, "PXEClient:Arch:00000:UNDI:002001")}, more...)
}

func uboot(t byte) []opt {
	return []opt{typ(t), u16s(57, 576), u16s(93, 22), raw(94, "010000"), str(60, "U-Boot.armv8"), raw(55, "0103060c1142")}
}

func ramdisk(t byte) []opt {
	return []opt{typ(t), u16s(57, 1500), str(60, "bcd"), raw(55, "0179030f0677")}
}

var (
	ourAddr  = netip.MustParseAddr("10.77.0.2")
	nobody   = netip.MustParseAddrPort("0.0.0.0:68")
	leased   = netip.MustParseAddrPort("10.77.0.55:4011")
	ukiBoot  = Boot{Kind: File, Name: "uki/amd64.efi", URL: "http://10.77.0.2/uki/amd64.efi"}
	biosBoot = Boot{Kind: File, Name: "ipxe/undionly.kpxe"}
	ipxeBoot = Boot{Kind: File, Name: "boot.ipxe", URL: "http://10.77.0.2/boot.ipxe?mac=52:54:00:12:34:56"}
	confBoot = Boot{Kind: Config, URL: "http://10.77.0.2/boot-config"}
)

func on67(from netip.AddrPort) Arrival {
	return Arrival{From: from, Port: ServerPort, Interface: "eth0", Local: ourAddr}
}

func on4011(from netip.AddrPort) Arrival {
	return Arrival{From: from, Port: BINLPort, Interface: "eth0", Local: ourAddr}
}

func mustParse(t testing.TB, b []byte, at Arrival) Client {
	t.Helper()
	c, err := Parse(b, at)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// got is a reply, read byte by byte.
type got struct {
	op, htype              byte
	xid                    [4]byte
	flags                  uint16
	ciaddr, yiaddr, siaddr string
	giaddr                 string
	chaddr                 string
	file                   string
	order                  []byte
	opts                   map[byte]string
	length                 int
}

func read(t testing.TB, b []byte) got {
	t.Helper()
	addr := func(i int) string { return netip.AddrFrom4([4]byte(b[i : i+4])).String() }
	if len(b) < 300 {
		t.Fatalf("a reply of %d bytes; at least 300", len(b))
	}
	g := got{op: b[0], htype: b[1], xid: [4]byte(b[4:8]), flags: binary.BigEndian.Uint16(b[10:]),
		ciaddr: addr(12), yiaddr: addr(16), siaddr: addr(20), giaddr: addr(24), chaddr: hex.EncodeToString(b[28 : 28+b[2]]),
		file: string(b[108:236]), opts: map[byte]string{}, length: len(b)}
	g.file, _, _ = strings.Cut(g.file, "\x00")
	if hex.EncodeToString(b[236:240]) != "63825363" {
		t.Fatalf("cookie %x", b[236:240])
	}
	for o := b[240:]; ; {
		if len(o) == 0 {
			t.Fatal("no end option")
		}
		if o[0] == 255 {
			break
		}
		n := int(o[1])
		if len(g.order) == 0 || g.order[len(g.order)-1] != o[0] {
			g.order = append(g.order, o[0])
		}
		g.opts[o[0]] += string(o[2 : 2+n])
		o = o[2+n:]
	}
	return g
}
