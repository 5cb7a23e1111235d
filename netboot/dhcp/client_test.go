package dhcp

import (
	"slices"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	tests := []struct {
		name string
		opts []opt
		firm Firmware
		arch string
		ours bool
		http bool
		uuid string
		note string
	}{
		{name: "OVMF", opts: ovmf(discover, 7), firm: UEFI, arch: "amd64", uuid: "00112233-4455-6677-8899-aabbccddeeff"},
		{name: "x64 as RFC 4578 has it", opts: ovmf(discover, 9), firm: UEFI, arch: "amd64", uuid: "00112233-4455-6677-8899-aabbccddeeff"},
		{name: "IA32", opts: ovmf(discover, 6), firm: UEFI, arch: "386", uuid: "00112233-4455-6677-8899-aabbccddeeff"},
		{name: "arm32", opts: ovmf(discover, 10), firm: UEFI, arch: "arm", uuid: "00112233-4455-6677-8899-aabbccddeeff"},
		{name: "arm64", opts: ovmf(discover, 11), firm: UEFI, arch: "arm64", uuid: "00112233-4455-6677-8899-aabbccddeeff"},
		{name: "RISC-V 64", opts: ovmf(discover, 27), firm: UEFI, arch: "riscv64", uuid: "00112233-4455-6677-8899-aabbccddeeff"},
		{name: "LoongArch64", opts: ovmf(discover, 39), firm: UEFI, arch: "loong64", uuid: "00112233-4455-6677-8899-aabbccddeeff"},
		{name: "OVMF HTTP", opts: ovmfHTTP(discover), firm: UEFIHTTP, arch: "amd64", http: true, uuid: "00112233-4455-6677-8899-aabbccddeeff"},
		{name: "arm64 HTTP", opts: []opt{typ(discover), u16s(93, 19), str(60, "HTTPClient:Arch:00019:UNDI:003000")}, firm: UEFIHTTP, arch: "arm64", http: true},
		{name: "fault 14: iPXE, raw user class", opts: ipxeBIOS(discover, "iPXE"), firm: IPXE, arch: "amd64", http: true, uuid: "00112233-4455-6677-8899-aabbccddeeff"},
		{name: "fault 14: iPXE, RFC 3004", opts: []opt{typ(discover), str(60, "PXEClient"), str(77, "\x04iPXE")}, firm: IPXE},
		{name: "fault 14: the second of a list", opts: []opt{typ(discover), str(60, "PXEClient"), str(77, "\x02ab\x03bcd")}, firm: IPXE, ours: true},
		{name: "fault 9: our iPXE, raw", opts: ipxeBIOS(discover, "bcd"), firm: IPXE, arch: "amd64", ours: true, http: true, uuid: "00112233-4455-6677-8899-aabbccddeeff"},
		{name: "fault 9: our iPXE, RFC 3004", opts: ipxeBIOS(discover, "\x03bcd"), firm: IPXE, arch: "amd64", ours: true, http: true, uuid: "00112233-4455-6677-8899-aabbccddeeff"},
		{name: "a user class that is cut", opts: []opt{typ(discover), str(60, "PXEClient"), str(77, "\x09bcd")}, firm: BIOS},
		{name: "iPXE on UEFI", opts: ovmf(discover, 7, str(77, "iPXE"), raw(175, "130101")), firm: IPXE, arch: "amd64", http: true, uuid: "00112233-4455-6677-8899-aabbccddeeff"},
		{name: "iPXE without HTTP", opts: ovmf(discover, 7, str(77, "iPXE"), raw(175, "120101")), firm: IPXE, arch: "amd64", uuid: "00112233-4455-6677-8899-aabbccddeeff"},
		{name: "fault 8: Intel ROM", opts: intelROM(discover), firm: BIOS, arch: "amd64"},
		{name: "U-Boot", opts: uboot(discover), firm: UBoot, arch: "arm64"},
		{name: "U-Boot that says PXEClient", opts: []opt{typ(discover), u16s(93, 22), str(60, "PXEClient:Arch:00022:UNDI:003000")}, firm: UBoot, arch: "arm64"},
		{name: "Raspberry Pi", opts: []opt{typ(discover), u16s(93, 41), str(60, "PXEClient")}, firm: UEFI, arch: "arm64"},
		{name: "our ramdisk", opts: ramdisk(discover), firm: Ramdisk, http: true},
		{name: "ordinary", opts: []opt{typ(discover), str(60, "MSFT 5.0")}},
		{name: "a list in 93, the first one unknown", opts: []opt{typ(discover), u16s(93, 300, 11), str(60, "PXEClient")}, firm: UEFI, arch: "arm64"},
		{name: "93 of odd length", opts: []opt{typ(discover), raw(93, "000700"), str(60, "PXEClient:Arch:00011:UNDI:003016")}, firm: UEFI, arch: "arm64", note: "option 93"},
		{name: "no 93, a class", opts: []opt{typ(discover), str(60, "PXEClient:Arch:00007:UNDI:003016")}, firm: UEFI, arch: "amd64"},
		{name: "97 too short", opts: append(intelROM(discover), raw(97, "0011")), firm: BIOS, arch: "amd64", note: "option 97 is malformed (2 bytes)"},
		{name: "97 twice", opts: append(intelROM(discover), raw(97, guid), raw(97, guid)), firm: BIOS, arch: "amd64", note: "option 97 is malformed (34 bytes)"},
		{name: "97 of another type", opts: append(intelROM(discover), raw(97, "ff 33221100554477668899aabbccddeeff")), firm: BIOS, arch: "amd64", note: "option 97"},
		{name: "97 all zero", opts: append(intelROM(discover), raw(97, "00 00000000000000000000000000000000")), firm: BIOS, arch: "amd64", note: "placeholder"},
		{name: "97 all ones", opts: append(intelROM(discover), raw(97, "00 ffffffffffffffffffffffffffffffff")), firm: BIOS, arch: "amd64", note: "placeholder"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := mustParse(t, sent{opts: tt.opts}.bytes(), on67(nobody))
			if c.MAC != testMAC || c.Firmware != tt.firm || c.Architecture() != tt.arch || c.Ours != tt.ours || c.HTTP != tt.http || c.UUID != tt.uuid {
				t.Errorf("%+v, architecture %q", c, c.Architecture())
			}
			if notes := strings.Join(c.Notes, ";"); (notes != "") != (tt.note != "") || !strings.Contains(notes, tt.note) {
				t.Errorf("notes %q, want %q", notes, tt.note)
			}
			if tt.uuid != "" && c.UUIDAsSent != "33221100-5544-7766-8899-aabbccddeeff" {
				t.Errorf("UUID as sent %q", c.UUIDAsSent)
			}
		})
	}
}

func TestParseRefuses(t *testing.T) {
	good := ovmf(discover, 7)
	for _, tt := range []struct {
		name string
		b    []byte
		want string
	}{
		{"empty", nil, "read a dhcp packet"},
		{"cut in the header", sent{opts: good}.bytes()[:200], "read a dhcp packet"},
		{"cut in an option", sent{opts: good, noEnd: true}.bytes()[:250], "read a dhcp packet"},
		{"no end", sent{opts: good, noEnd: true}.bytes(), "read a dhcp packet"},
		{"no cookie", sent{opts: good, noCookie: true}.bytes(), "cookie"},
		{"a reply", sent{op: 2, opts: good}.bytes(), "not a request"},
		{"InfiniBand", sent{htype: 32, opts: good}.bytes(), "hardware type 32"},
		{"a long address", sent{hlen: 16, opts: good}.bytes(), "16 bytes"},
		{"a group's MAC", sent{mac: "01005e000001", opts: good}.bytes(), "none of a machine"},
		{"no MAC", sent{mac: "000000000000", opts: good}.bytes(), "none of a machine"},
		{"BOOTP", sent{}.bytes(), "BOOTP"},
		{"too long", slices.Concat(sent{opts: good}.bytes(), make([]byte, 1472)), "at most 1472"},
	} {
		if _, err := Parse(tt.b, on67(nobody)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
	if _, err := Parse(sent{opts: good}.bytes(), Arrival{From: nobody, Port: ServerPort, Interface: "eth9"}); err == nil || !strings.Contains(err.Error(), "eth9") {
		t.Errorf("without an address of our own: %v", err)
	}
}

func TestForeign(t *testing.T) {
	server := raw(54, "0a4d0001")
	for _, tt := range []struct {
		name string
		p    sent
		want string // "" is nothing to say
	}{
		{"an ordinary offer", sent{op: 2, yiaddr: "10.77.0.55", opts: []opt{typ(offer), server, raw(51, "00000e10")}}, ""},
		{"fault 3: option 60 without 43", sent{op: 2, yiaddr: "10.77.0.55", opts: []opt{typ(offer), server, str(60, "PXEClient")}}, "10.77.0.1 sends option 60 PXEClient without option 43"},
		{"fault 3: in an ACK", sent{op: 2, yiaddr: "10.77.0.55", opts: []opt{typ(ack), server, str(60, "PXEClient")}}, "without option 43"},
		{"with 43.6 it does its own PXE", sent{op: 2, yiaddr: "10.77.0.55", opts: []opt{typ(offer), server, str(60, "PXEClient"), raw(43, "060108ff")}}, ""},
		{"43 without sub-option 6", sent{op: 2, yiaddr: "10.77.0.55", opts: []opt{typ(offer), server, str(60, "PXEClient"), raw(43, "0a0100ff")}}, "without option 43"},
		{"a second proxy", sent{op: 2, opts: []opt{typ(offer), server, str(60, "PXEClient"), raw(43, "060108ff")}}, "a second proxy DHCP server, 10.77.0.1"},
		{"a second HTTP proxy", sent{op: 2, opts: []opt{typ(offer), server, str(60, "HTTPClient")}}, "a second proxy"},
		{"HTTPClient leaks", sent{op: 2, yiaddr: "10.77.0.55", opts: []opt{typ(offer), server, str(60, "HTTPClient")}}, "option 60 HTTPClient"},
		{"no-pxedhcp", sent{op: 2, yiaddr: "10.77.0.55", opts: []opt{typ(offer), server, raw(175, "b00101")}}, "no-pxedhcp"},
		{"no-pxedhcp is off", sent{op: 2, yiaddr: "10.77.0.55", opts: []opt{typ(offer), server, raw(175, "b00100")}}, ""},
		{"an inform's ACK", sent{op: 2, opts: []opt{typ(ack), server, str(60, "PXEClient")}}, ""},
		{"a request", sent{opts: ovmf(discover, 7)}, ""},
		{"rubbish", sent{noCookie: true}, ""},
	} {
		mac, server, why, ok := Foreign(tt.p.bytes())
		if ok != (tt.want != "") || !strings.Contains(why, tt.want) || ok && (mac != testMAC || server.String() != "10.77.0.1") {
			t.Errorf("%s: %q, %q, %v; want %q", tt.name, mac, why, ok, tt.want)
		}
	}
}
