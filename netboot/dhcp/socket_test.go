package dhcp

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"
)

// TestUDPPacket sums up as a receiver does (RFC 1071): all ones is right.
func TestUDPPacket(t *testing.T) {
	from, to := netip.MustParseAddrPort("10.77.0.2:67"), netip.MustParseAddrPort("10.77.0.7:68")
	for n := range 400 {
		payload := make([]byte, n)
		for i := range payload {
			payload[i] = byte(i*7 + n)
		}
		b := udpPacket(from, to, payload)
		if got := onesSum(0, b[:20]); got != 0xffff {
			t.Fatalf("%d bytes: the header sums up to %x", n, got)
		}
		pseudo := slices.Concat(b[12:20], []byte{0, 17}, b[24:26])
		if got := onesSum(0, slices.Concat(pseudo, b[20:])); got != 0xffff {
			t.Fatalf("%d bytes: the packet sums up to %x", n, got)
		}
		if got, ok := udpPayload(b); !ok || !bytes.Equal(got, payload) {
			t.Fatalf("%d bytes: read back %x, %v", n, got, ok)
		}
		if got, ok := udpPayload(append(b, 0, 0, 0)); !ok || !bytes.Equal(got, payload) {
			t.Fatalf("%d bytes and a frame's padding: read back %x, %v", n, got, ok)
		}
		if n > 0 {
			if got, ok := udpPayload(b[:len(b)-1]); ok {
				t.Fatalf("%d bytes, cut: read back %x", n, got)
			}
		}
	}
}

func TestUDPPayloadRefuses(t *testing.T) {
	good := udpPacket(nobody, netip.MustParseAddrPort("10.77.0.7:68"), []byte("payload"))
	for name, change := range map[string]func(b []byte) []byte{
		"empty":                   func([]byte) []byte { return nil },
		"IPv6":                    func(b []byte) []byte { b[0] = 0x65; return b },
		"a header of 16 bytes":    func(b []byte) []byte { b[0] = 0x44; return b },
		"a header past the end":   func(b []byte) []byte { b[0] = 0x4f; return b },
		"a UDP length of 7":       func(b []byte) []byte { b[25] = 7; return b },
		"a UDP length past it":    func(b []byte) []byte { b[25]++; return b },
		"a total length past it":  func(b []byte) []byte { b[3]++; return b },
		"a total length of three": func(b []byte) []byte { b[3] = 3; return b },
	} {
		if got, ok := udpPayload(change(slices.Clone(good))); ok {
			t.Errorf("%s: %x", name, got)
		}
	}
}
