package dhcp

import (
	"encoding/binary"
	"encoding/hex"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write testdata/*.golden anew")

// frame is one UDP packet of a capture.
type frame struct {
	from, to netip.AddrPort
	payload  []byte
}

// readPcap reads the UDP packets of a little-endian Ethernet capture.
func readPcap(t testing.TB, path string) (all []frame) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if len(b) < 24 || binary.LittleEndian.Uint32(b) != 0xa1b2c3d4 || binary.LittleEndian.Uint32(b[20:]) != 1 {
		t.Fatalf("%s is not a little-endian Ethernet pcap", path)
	}
	for b = b[24:]; len(b) > 0; {
		if len(b) < 16 || len(b) < 16+int(binary.LittleEndian.Uint32(b[8:])) {
			t.Fatalf("%s is cut", path)
		}
		n := int(binary.LittleEndian.Uint32(b[8:]))
		packet := b[16 : 16+n]
		b = b[16+n:]
		if len(packet) < 34 || binary.BigEndian.Uint16(packet[12:]) != 0x0800 || packet[23] != 17 {
			continue
		}
		ip := packet[14:]
		payload, ok := udpPayload(ip)
		if !ok {
			t.Fatalf("%s has a UDP packet that cannot be read: %x", path, ip)
		}
		u := ip[int(ip[0]&15)*4:]
		all = append(all, frame{
			from:    netip.AddrPortFrom(netip.AddrFrom4([4]byte(ip[12:16])), binary.BigEndian.Uint16(u)),
			to:      netip.AddrPortFrom(netip.AddrFrom4([4]byte(ip[16:20])), binary.BigEndian.Uint16(u[2:])),
			payload: payload,
		})
	}
	return all
}

func captures(t testing.TB) []string {
	t.Helper()
	files, err := filepath.Glob("../testdata/*.pcap")
	if err != nil || len(files) == 0 {
		t.Fatalf("captures of real firmware are missing: %v, %v", files, err)
	}
	return files
}

func toServer(f frame) bool {
	return (f.to.Port() == ServerPort || f.to.Port() == BINLPort) && len(f.payload) > 0 && f.payload[0] == 1
}

// TestRealPackets answers what real firmware sent. What comes of it is in
// testdata, one golden file for each capture.
func TestRealPackets(t *testing.T) {
	for _, tt := range []struct {
		name     string
		firmware []Firmware // in the order in which they appear
		arch     string
		foreign  []string // what there is to say about the servers of the capture
	}{
		{"ovmf-pxe", []Firmware{UEFI, UEFIHTTP}, "amd64", nil},
		{"ovmf-pxe-proxy", []Firmware{UEFI, UEFIHTTP}, "amd64", []string{"a second proxy DHCP server, 10.77.0.2"}},
		{"ovmf-pxe-leak60", []Firmware{UEFI}, "amd64", []string{"10.77.0.1 sends option 60 PXEClient without option 43"}},
		{"ovmf-http", []Firmware{UEFIHTTP}, "amd64", []string{"option 60 HTTPClient"}},
		{"seabios-ipxe", []Firmware{IPXE}, "amd64", nil},
		{"seabios-ipxe-http", []Firmware{IPXE}, "amd64", nil},
		{"seabios-ipxe-proxy", []Firmware{IPXE}, "amd64", []string{"a second proxy DHCP server, 10.77.0.2"}},
		{"seabios-ipxe-leak60", []Firmware{IPXE}, "amd64", []string{"option 60 PXEClient without option 43"}},
		{"seabios-undionly", []Firmware{IPXE}, "amd64", nil},
		{"efi-ipxe-rom", []Firmware{IPXE}, "amd64", nil},
		{"efi-ipxe-rom-proxy", []Firmware{IPXE, UEFI}, "amd64", []string{"a second proxy DHCP server, 10.77.0.2"}},
		{"aavmf-pxe", []Firmware{UEFI, UEFIHTTP}, "arm64", nil},
		{"aavmf-pxe-leak60", []Firmware{UEFI}, "arm64", []string{"option 60 PXEClient without option 43"}},
		{"aavmf-http", []Firmware{UEFIHTTP}, "arm64", []string{"option 60 HTTPClient"}},
		// Then U-Boot's EFI loader asks, which takes what UEFI takes.
		{"uboot-arm64", []Firmware{UBoot, UEFI}, "arm64", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var text strings.Builder
			var firmware []Firmware
			var foreign []string
			told := map[string]bool{} // firmware repeats itself as often as it likes
			for _, f := range readPcap(t, "../testdata/"+tt.name+".pcap") {
				if _, _, why, ok := Foreign(f.payload); ok && f.from.Port() == ServerPort && !slices.Contains(foreign, why) {
					foreign = append(foreign, why)
				}
				if !toServer(f) {
					continue
				}
				c := mustParse(t, f.payload, Arrival{From: f.from, Port: f.to.Port(), Interface: "eth0", Local: ourAddr})
				if !slices.Contains(firmware, c.Firmware) {
					firmware = append(firmware, c.Firmware)
				}
				mac, uuid := testMAC, "01234567-89ab-4cde-8f01-23456789abcd"
				if tt.name == "uboot-arm64" {
					mac, uuid = "52:52:52:52:52:52", "" // fault 8 is not only of old ROMs
				}
				if c.MAC != mac || c.Architecture() != tt.arch || len(c.Notes) != 0 {
					t.Errorf("%+v", c)
				}
				if c.UUID != uuid {
					t.Errorf("UUID %s, as sent %s", c.UUID, c.UUIDAsSent)
				}
				var one strings.Builder
				fmt.Fprintf(&one, "%s to %s: %s\n\tfirmware %s, UUID %s, as sent %s, http %v\n", f.from, f.to, &c, c.Firmware, c.UUID, c.UUIDAsSent, c.HTTP)
				boot := ukiBoot
				if c.Firmware == IPXE {
					boot = ipxeBoot
				}
				writeAnswer(t, &one, "proxy", c, boot)
				boot.Lease = testLease()
				writeAnswer(t, &one, "full", c, boot)
				if !told[one.String()] {
					told[one.String()] = true
					text.WriteString(one.String())
				}
			}
			if !slices.Equal(firmware, tt.firmware) {
				t.Errorf("firmware %q, want %q", firmware, tt.firmware)
			}
			if !slices.EqualFunc(foreign, tt.foreign, strings.Contains) {
				t.Errorf("about the servers: %q, want %q", foreign, tt.foreign)
			}
			golden := "testdata/" + tt.name + ".golden"
			if *update {
				if err := os.WriteFile(golden, []byte(text.String()), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if string(want) != text.String() {
				t.Errorf("got:\n%s\nwant:\n%s", text.String(), want)
			}
		})
	}
}

func writeAnswer(t *testing.T, w *strings.Builder, mode string, c Client, boot Boot) {
	r, err := Answer(c, boot)
	if err != nil {
		fmt.Fprintf(w, "\t%s: none: %v\n", mode, err)
		return
	}
	g := read(t, r.Packet)
	fmt.Fprintf(w, "\t%s: %s to %s %s, %d bytes, flags %04x, ciaddr %s, yiaddr %s, siaddr %s, file %q\n",
		mode, r.Type, r.To, r.Hardware, g.length, g.flags, g.ciaddr, g.yiaddr, g.siaddr, g.file)
	for _, code := range g.order {
		fmt.Fprintf(w, "\t\t%d %s %q\n", code, hex.EncodeToString([]byte(g.opts[code])), g.opts[code])
	}
}

// TestEveryCapture: no packet of real firmware is malformed to us.
func TestEveryCapture(t *testing.T) {
	for _, file := range captures(t) {
		asked := 0
		for _, f := range readPcap(t, file) {
			if !toServer(f) {
				continue
			}
			asked++
			c, err := Parse(f.payload, Arrival{From: f.from, Port: f.to.Port(), Interface: "eth0", Local: ourAddr})
			if err != nil {
				t.Errorf("%s: %v", file, err)
			} else if c.Firmware == OtherClient {
				t.Errorf("%s: %s is taken for an ordinary client", file, &c)
			}
		}
		if asked == 0 {
			t.Errorf("%s has no question to a DHCP server", file)
		}
	}
}
