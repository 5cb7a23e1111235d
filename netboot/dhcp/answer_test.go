package dhcp

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

const local4 = "\x0a\x4d\x00\x02"

var bigURL = "http://10.77.0.2/" + strings.Repeat("u", 150)

// TestProxyAnswers is the packet facts, line by line, and the reported faults
// (by their number) that a packet can show.
func TestProxyAnswers(t *testing.T) {
	lastOpt := func(code byte) func(*testing.T, got) {
		return func(t *testing.T, g got) {
			if g.order[len(g.order)-1] != code {
				t.Errorf("options in the order %d; %d must be last", g.order, code)
			}
		}
	}
	tests := []struct {
		name   string
		packet sent
		at     Arrival
		boot   Boot
		to     string // "" is a refusal
		typ    byte
		file   string          // header
		opts   map[byte]string // exactly, besides 53 and 54
		also   func(*testing.T, got)
		refuse string
	}{
		{name: "fault 1: UEFI gets no option 43; fault 5: 54 is there", packet: sent{flags: 0x8000, opts: ovmf(discover, 7)}, at: on67(nobody), boot: ukiBoot,
			to: "255.255.255.255:68", typ: offer, file: "uki/amd64.efi",
			opts: map[byte]string{60: "PXEClient", 66: "10.77.0.2", 67: "uki/amd64.efi", 97: string(unhex(guid))}},
		{name: "fault 2 and 4: 4011 is answered to the packet's source", packet: sent{ciaddr: "10.77.0.55", opts: ovmf(request, 7)}, at: on4011(leased), boot: ukiBoot,
			to: "10.77.0.55:4011", typ: ack, file: "uki/amd64.efi",
			opts: map[byte]string{60: "PXEClient", 66: "10.77.0.2", 67: "uki/amd64.efi", 97: string(unhex(guid))}},
		{name: "4011 from a client on port 68", packet: sent{ciaddr: "10.77.0.55", opts: ipxeBIOS(request, "iPXE")}, at: on4011(netip.MustParseAddrPort("10.77.0.55:68")), boot: ipxeBoot,
			to: "10.77.0.55:68", typ: ack, file: ipxeBoot.URL,
			opts: map[byte]string{60: "PXEClient", 66: "10.77.0.2", 67: ipxeBoot.URL, 97: string(unhex(guid))}},
		{name: "fault 6: U-Boot reads the header", packet: sent{opts: uboot(discover)}, at: on67(nobody), boot: Boot{Kind: File, Name: "uki/arm64.efi"},
			to: "255.255.255.255:68", typ: offer, file: "uki/arm64.efi", opts: map[byte]string{60: "PXEClient", 66: "10.77.0.2", 67: "uki/arm64.efi"}},
		{name: "fault 8: a ROM without option 97 gets none back", packet: sent{opts: intelROM(discover)}, at: on67(nobody), boot: biosBoot,
			to: "255.255.255.255:68", typ: offer, file: biosBoot.Name,
			opts: map[byte]string{43: "\x06\x01\x08\xff", 60: "PXEClient", 66: "10.77.0.2", 67: biosBoot.Name}},
		{name: "fault 8: 4011 without a boot item", packet: sent{ciaddr: "10.77.0.55", opts: intelROM(request)}, at: on4011(leased), boot: biosBoot,
			to: "10.77.0.55:4011", typ: ack, file: biosBoot.Name,
			opts: map[byte]string{43: "\x06\x01\x08\xff", 60: "PXEClient", 66: "10.77.0.2", 67: biosBoot.Name}},
		{name: "4011 with a boot item gets it back", packet: sent{ciaddr: "10.77.0.55", opts: intelROM(request, raw(43, "47 04 0001 0000 ff"))}, at: on4011(leased), boot: biosBoot,
			to: "10.77.0.55:4011", typ: ack, file: biosBoot.Name,
			opts: map[byte]string{43: "\x06\x01\x08\x47\x04\x00\x01\x00\x00\xff", 60: "PXEClient", 66: "10.77.0.2", 67: biosBoot.Name}},
		{name: "a malformed 97 is not echoed", packet: sent{opts: append(intelROM(discover), raw(97, "01 33221100554477668899aabbccddeeff"))}, at: on67(nobody), boot: biosBoot,
			to: "255.255.255.255:68", typ: offer, file: biosBoot.Name,
			opts: map[byte]string{43: "\x06\x01\x08\xff", 60: "PXEClient", 66: "10.77.0.2", 67: biosBoot.Name}},
		{name: "an empty 97 is not echoed", packet: sent{opts: append(intelROM(discover), raw(97, ""))}, at: on67(nobody), boot: biosBoot,
			to: "255.255.255.255:68", typ: offer, file: biosBoot.Name,
			opts: map[byte]string{43: "\x06\x01\x08\xff", 60: "PXEClient", 66: "10.77.0.2", 67: biosBoot.Name}},
		{name: "fault 11: through a relay, to it", packet: sent{giaddr: "10.99.0.1", hops: 1, opts: ovmf(discover, 7)}, at: on67(netip.MustParseAddrPort("10.99.0.1:67")), boot: ukiBoot,
			to: "10.99.0.1:67", typ: offer, file: "uki/amd64.efi",
			opts: map[byte]string{60: "PXEClient", 66: "10.77.0.2", 67: "uki/amd64.efi", 97: string(unhex(guid))}},
		{name: "fault 13: option 82 comes back, last", packet: sent{giaddr: "10.99.0.1", opts: ovmf(discover, 7, raw(82, "0104 0a0b0c0d"))}, at: on67(netip.MustParseAddrPort("10.99.0.1:67")), boot: ukiBoot,
			to: "10.99.0.1:67", typ: offer, file: "uki/amd64.efi", also: lastOpt(82),
			opts: map[byte]string{60: "PXEClient", 66: "10.77.0.2", 67: "uki/amd64.efi", 82: "\x01\x04\x0a\x0b\x0c\x0d", 97: string(unhex(guid))}},
		{name: "UEFI HTTP boot", packet: sent{flags: 0x8000, opts: ovmfHTTP(discover)}, at: on67(nobody), boot: ukiBoot,
			to: "255.255.255.255:68", typ: offer, file: ukiBoot.URL, opts: map[byte]string{60: "HTTPClient", 67: ukiBoot.URL, 97: string(unhex(guid))}},
		{name: "a URL that the header cannot hold is only in 67", packet: sent{opts: ovmfHTTP(discover)}, at: on67(nobody), boot: Boot{Kind: File, URL: bigURL},
			to: "255.255.255.255:68", typ: offer, opts: map[byte]string{60: "HTTPClient", 67: bigURL, 97: string(unhex(guid))}},
		{name: "UEFI HTTP boot needs an address in the URL", packet: sent{opts: ovmfHTTP(discover)}, at: on67(nobody), boot: Boot{Kind: File, URL: "http://site.example/uki"}, refuse: "needs an address"},
		{name: "UEFI HTTP boot needs a URL", packet: sent{opts: ovmfHTTP(discover)}, at: on67(nobody), boot: biosBoot, refuse: "not an absolute http URL"},
		{name: "a name that the header would cut", packet: sent{opts: ovmf(discover, 7)}, at: on67(nobody), boot: Boot{Kind: File, Name: strings.Repeat("n", 128)}, refuse: "128 bytes long"},
		{name: "the longest name", packet: sent{opts: uboot(discover)}, at: on67(nobody), boot: Boot{Kind: File, Name: strings.Repeat("n", 127)},
			to: "255.255.255.255:68", typ: offer, file: strings.Repeat("n", 127), opts: map[byte]string{60: "PXEClient", 66: "10.77.0.2", 67: strings.Repeat("n", 127)}},
		{name: "iPXE by TFTP when there is no URL", packet: sent{opts: ipxeBIOS(discover, "iPXE")}, at: on67(nobody), boot: Boot{Kind: File, Name: "boot.ipxe"},
			to: "255.255.255.255:68", typ: offer, file: "boot.ipxe", opts: map[byte]string{60: "PXEClient", 66: "10.77.0.2", 67: "boot.ipxe", 97: string(unhex(guid))}},
		{name: "exit for iPXE", packet: sent{opts: ipxeBIOS(discover, "iPXE")}, at: on67(nobody), boot: Boot{Kind: Exit, URL: "http://10.77.0.2/exit.ipxe"},
			to: "255.255.255.255:68", typ: offer, file: "http://10.77.0.2/exit.ipxe", opts: map[byte]string{60: "PXEClient", 66: "10.77.0.2", 67: "http://10.77.0.2/exit.ipxe", 97: string(unhex(guid))}},
		{name: "no offer to UEFI that boots its disk", packet: sent{opts: ovmf(discover, 7)}, at: on67(nobody), boot: Boot{Kind: Exit, URL: "http://10.77.0.2/exit.ipxe"}, refuse: "boots its own disk"},
		{name: "nothing", packet: sent{opts: ovmf(discover, 7)}, at: on67(nobody), refuse: "nothing to boot"},
		{name: "nothing on 4011 either", packet: sent{ciaddr: "10.77.0.55", opts: ovmf(request, 7)}, at: on4011(leased), refuse: "nothing to boot"},
		{name: "a broadcast request is never ours", packet: sent{opts: ovmf(request, 7, raw(54, "0a4d0001"), raw(50, "0a4d0037"))}, at: on67(nobody), boot: ukiBoot, refuse: "network's DHCP server"},
		{name: "a discover on 4011", packet: sent{opts: ovmf(discover, 7)}, at: on4011(leased), boot: ukiBoot, refuse: "only requests"},
		{name: "4011 from no address", packet: sent{opts: ovmf(request, 7)}, at: on4011(nobody), boot: ukiBoot, refuse: "cannot be answered"},
		{name: "an ordinary client", packet: sent{opts: []opt{typ(discover), str(60, "MSFT 5.0")}}, at: on67(nobody), boot: ukiBoot, refuse: "not a client that boots"},
		{name: "an ordinary client's inform", packet: sent{ciaddr: "10.77.0.9", opts: []opt{typ(inform), str(60, "MSFT 5.0")}}, at: on67(nobody), boot: ukiBoot, refuse: "not for a proxy"},
		{name: "the ramdisk's discover", packet: sent{opts: ramdisk(discover)}, at: on67(nobody), boot: confBoot,
			to: "255.255.255.255:68", typ: offer, opts: map[byte]string{43: "\x01\x1c" + confBoot.URL, 60: "bcd"}},
		{name: "the ramdisk's inform", packet: sent{ciaddr: "10.77.0.55", opts: ramdisk(inform)}, at: on67(netip.MustParseAddrPort("10.77.0.55:68")), boot: confBoot,
			to: "10.77.0.55:68", typ: ack, opts: map[byte]string{43: "\x01\x1c" + confBoot.URL, 60: "bcd"}},
		{name: "a file is not for the ramdisk", packet: sent{opts: ramdisk(discover)}, at: on67(nobody), boot: ukiBoot, refuse: "not for"},
		{name: "a config is not for firmware", packet: sent{opts: ovmf(discover, 7)}, at: on67(nobody), boot: confBoot, refuse: "not for"},
		{name: "a broadcast address for a relay's is none to send to", packet: sent{giaddr: "239.1.1.1", opts: ovmf(discover, 7)}, at: on67(nobody), boot: ukiBoot, refuse: "no machine's"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r, err := Answer(mustParse(t, tt.packet.bytes(), tt.at), tt.boot)
			if tt.refuse != "" {
				if err == nil || !strings.Contains(err.Error(), tt.refuse) || r.Packet != nil {
					t.Fatalf("%+v, %v; want it refused because %q", r, err, tt.refuse)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if r.To.String() != tt.to || r.Hardware != nil || byte(r.Type) != tt.typ {
				t.Errorf("to %s, %s, %s", r.To, r.Hardware, r.Type)
			}
			g := read(t, r.Packet)
			if g.op != 2 || g.htype != 1 || g.xid != testXID || g.chaddr != "525400123456" || g.flags != tt.packet.flags ||
				g.giaddr != or(tt.packet.giaddr) || g.yiaddr != "0.0.0.0" {
				t.Errorf("header %+v", g)
			}
			if want := or(tt.packet.ciaddr); tt.typ == ack && g.ciaddr != want || tt.typ == offer && g.ciaddr != "0.0.0.0" {
				t.Errorf("ciaddr %s", g.ciaddr)
			}
			if g.siaddr != "10.77.0.2" || g.opts[54] != local4 {
				t.Errorf("siaddr %s and option 54 %x; fault 17 wants them the same", g.siaddr, g.opts[54])
			}
			if g.opts[53] != string(tt.typ) {
				t.Errorf("option 53 %x", g.opts[53])
			}
			if g.file != tt.file {
				t.Errorf("file %q in the header, want %q", g.file, tt.file)
			}
			for code, v := range g.opts {
				if want, ok := tt.opts[code]; code != 53 && code != 54 && (!ok || want != v) {
					t.Errorf("option %d is %q, want %q", code, v, want)
				}
			}
			for code := range tt.opts {
				if _, ok := g.opts[code]; !ok {
					t.Errorf("option %d is missing", code)
				}
			}
			if tt.also != nil {
				tt.also(t, g)
			}
		})
	}
}

func or(a string) string {
	if a == "" {
		return "0.0.0.0"
	}
	return a
}

// TestBroadcastFlag is fault 12: the flag is copied, and honoured.
func TestBroadcastFlag(t *testing.T) {
	lease := testLease()
	for _, tt := range []struct {
		name     string
		packet   sent
		boot     Boot
		to       string
		hardware string
	}{
		{"proxy, flag", sent{flags: 0x8000, opts: ovmf(discover, 7)}, ukiBoot, "255.255.255.255:68", ""},
		{"proxy, no flag and no address", sent{opts: ovmf(discover, 7)}, ukiBoot, "255.255.255.255:68", ""},
		{"proxy, a client with an address", sent{ciaddr: "10.77.0.55", opts: ovmf(discover, 7)}, ukiBoot, "10.77.0.55:68", ""},
		{"server, flag", sent{flags: 0x8000, opts: ovmf(discover, 7)}, Boot{Lease: lease}, "255.255.255.255:68", ""},
		{"server, no flag: to the address that it will have", sent{opts: ovmf(discover, 7)}, Boot{Lease: lease}, "10.77.0.7:68", testMAC},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := Answer(mustParse(t, tt.packet.bytes(), on67(nobody)), tt.boot)
			if err != nil {
				t.Fatal(err)
			}
			if r.To.String() != tt.to || r.Hardware.String() != tt.hardware {
				t.Errorf("to %s by %q, want %s by %q", r.To, r.Hardware, tt.to, tt.hardware)
			}
			if g := read(t, r.Packet); g.flags != tt.packet.flags {
				t.Errorf("flags %x, want %x", g.flags, tt.packet.flags)
			}
		})
	}
}

// TestSize: never more than the client takes, and in what order things are left out.
func TestSize(t *testing.T) {
	circuit := func(n int) opt { return opt{82, append([]byte{1, byte(n - 2)}, make([]byte, n-2)...)} }
	url := "http://10.77.0.2/" + strings.Repeat("u", 120) // not in the header
	name := strings.Repeat("n", 127)
	for _, tt := range []struct {
		name    string
		opts    []opt
		boot    Boot
		most    int
		without []byte
		refuse  bool
	}{
		{name: "all of it", opts: ovmf(discover, 7, circuit(200)), boot: Boot{Kind: File, Name: name}, most: 1444},
		{name: "no option 57: 66 goes first", opts: intelROM(discover, circuit(150)), boot: Boot{Kind: File, Name: name}, most: 548, without: []byte{66}},
		{name: "then 67, which the header has", opts: intelROM(discover, circuit(200)), boot: Boot{Kind: File, Name: name}, most: 548, without: []byte{66, 67}},
		{name: "but not when the header has it not", opts: append(ipxeBIOS(discover, "iPXE")[3:], typ(discover), circuit(253)), boot: Boot{Kind: File, URL: url}, refuse: true},
		{name: "an option 57 below the least is the least", opts: append(intelROM(discover), u16s(57, 300)), boot: biosBoot, most: 548},
		{name: "an option 57 that is more than a frame", opts: append(intelROM(discover), u16s(57, 65535)), boot: biosBoot, most: 1444},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := Answer(mustParse(t, sent{giaddr: "10.99.0.1", opts: tt.opts}.bytes(), on67(nobody)), tt.boot)
			if tt.refuse {
				if err == nil {
					t.Errorf("an answer of %d bytes", len(r.Packet))
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			g := read(t, r.Packet)
			if g.length > tt.most {
				t.Errorf("%d bytes, at most %d", g.length, tt.most)
			}
			for _, code := range []byte{66, 67} {
				_, has := g.opts[code]
				if want := !strings.Contains(string(tt.without), string(rune(code))); has != want {
					t.Errorf("option %d: %v, want %v", code, has, want)
				}
			}
			if g.file == "" {
				t.Error("no file in the header")
			}
		})
	}
}

func TestConfigURL(t *testing.T) {
	r, err := Answer(mustParse(t, sent{opts: ramdisk(discover)}.bytes(), on67(nobody)), confBoot)
	if err != nil {
		t.Fatal(err)
	}
	m, err := dhcpv4.FromBytes(r.Packet)
	if err != nil || ConfigURL(m) != confBoot.URL {
		t.Errorf("%q, %v", ConfigURL(m), err)
	}
	for name, opts := range map[string][]opt{
		"another class":  {typ(offer), str(60, "PXEClient"), str(43, "\x01\x1c"+confBoot.URL)},
		"no option":      {typ(offer), str(60, "bcd")},
		"cut":            {typ(offer), str(60, "bcd"), str(43, "\x01\x1chttp://10.77.0.2/")},
		"not a URL":      {typ(offer), str(60, "bcd"), str(43, "\x01\x04file")},
		"by name":        {typ(offer), str(60, "bcd"), str(43, "\x01\x0chttp://a.b/c")},
		"another scheme": {typ(offer), str(60, "bcd"), str(43, "\x01\x10ftp://10.77.0.2/")},
	} {
		m, err := dhcpv4.FromBytes(sent{op: 2, opts: opts}.bytes())
		if err != nil {
			t.Fatal(err)
		}
		if got := ConfigURL(m); got != "" {
			t.Errorf("%s: %q", name, got)
		}
	}
	long := Boot{Kind: Config, URL: "http://10.77.0.2/" + strings.Repeat("u", 237)}
	if _, err := Answer(mustParse(t, sent{opts: ramdisk(discover)}.bytes(), on67(nobody)), long); err == nil {
		t.Error("a URL that no option holds")
	}
}
