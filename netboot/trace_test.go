package netboot

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// play observes events a second apart. A word is a type, with its message
// after a colon; a leading "ramdisk." makes the ramdisk the sender.
func play(s *Traces, firmware string, words ...string) (end time.Time) {
	at := t0
	for _, word := range words {
		at = at.Add(time.Second)
		kind, message, _ := strings.Cut(word, ":")
		e := Event{Time: at, Type: kind, Message: message, MAC: macA, Firmware: firmware, Architecture: "amd64", Action: ramdiskAction}
		if inner, ok := strings.CutPrefix(kind, ramdiskPrefix); ok {
			e.Type, e.Firmware = inner, "ramdisk"
		}
		s.Observe(e)
	}
	return at
}

func TestVerdicts(t *testing.T) {
	const d, o, r, b, a = "dhcp.discover", "dhcp.offer", "dhcp.request", "dhcp.4011", "dhcp.ack"
	for _, test := range []struct {
		name     string
		firmware string
		events   []string
		// soon and late are the codes right after and two minutes later.
		soon, late string
		words      string
	}{
		{"two DHCP servers", "uefi", []string{d, "dhcp.foreign-offer:the DHCP server 10.0.0.1 sends option 60", o, r}, "foreign-dhcp", "foreign-dhcp", "sends option 60"},
		{"no 4011", "uefi", []string{d, o, r}, "running", "no-4011", "UDP port 4011"},
		{"no address", "uefi", []string{d, o, d, o, d, o}, "running", "no-address", "asked 3 times"},
		{"told, and no fetch", "uefi", []string{d, o, r, b, a}, "running", "no-fetch", "UDP 69"},
		{"BIOS that was told, and no fetch", "bios", []string{d, o, r}, "running", "no-fetch", "UDP 69"},
		{"not honoured", "uefi", []string{d, o, d, o, "dhcp.not-honoured:proxy offers are not honoured: 5 of them"}, "proxy-not-honoured", "proxy-not-honoured", "5 of them"},
		{"not for this machine", "uefi", []string{d, "dhcp.silent:this machine is unknown"}, "nothing", "nothing", "this machine is unknown"},
		{"TFTP ended after tsize, no second ask", "uefi", []string{d, o, r, b, a, "tftp.request:x", "tftp.probed"}, "running", "tftp-probe-only", "did not ask a second time"},
		{"TFTP after tsize, and asked again", "uefi", []string{d, o, r, b, a, "tftp.request:x", "tftp.probed", "tftp.request:x", "tftp.done"}, "running", "not-started", "Secure Boot"},
		{"TFTP aborted", "uefi", []string{d, o, r, b, a, "tftp.request:x", "tftp.aborted:no answer after 1024 bytes"}, "running", "tftp-aborted", "1024 bytes"},
		{"TFTP aborted and tried again", "uefi", []string{d, "tftp.request:x", "tftp.aborted", d}, "tftp-aborted", "tftp-aborted", "packet loss"},
		{"TFTP aborted, then whole", "uefi", []string{"tftp.aborted", "tftp.done"}, "running", "not-started", "Secure Boot"},
		{"a name that is not ours", "uefi", []string{d, o, r, "tftp.refused:grubx64.efi"}, "tftp-refused", "tftp-refused", "grubx64.efi"},
		{"fetched whole, then the next try", "uefi", []string{d, o, r, b, a, "tftp.request:x", "tftp.done", d}, "not-started", "not-started", "Secure Boot"},
		{"iPXE fetched by BIOS, never back", "bios", []string{d, o, "tftp.done"}, "running", "not-started", "no driver for this NIC"},
		{"HTTP HEAD without GET", "uefi-http", []string{d, o, r, "http.head"}, "running", "http-head-only", "never for the file"},
		{"HTTP GET without an end", "uefi-http", []string{"http.head", "http.get"}, "running", "http-aborted", "never ended"},
		{"HTTP aborted", "uefi-http", []string{"http.head", "http.get", "http.aborted:at 5 of 9"}, "running", "http-aborted", "at 5 of 9"},
		{"HTTP whole, then nothing", "uefi-http", []string{"http.head", "http.get", "http.done"}, "running", "not-started", "Secure Boot"},
		{"HTTP whole, then the next try", "uefi-http", []string{"http.get", "http.done", d}, "not-started", "not-started", "Secure Boot"},
		{"script fetched and no join", "ipxe", []string{d, o, EventScript}, "running", "script-only", "none of the files"},
		{"kernel and initramfs, and no join", "ipxe", []string{d, o, EventScript, "http.get:k", "http.done:k", "http.get:i", "http.done:i"}, "running", "not-started", "does not start"},
		{"a ramdisk that nobody answered", "uefi", []string{"tftp.done", "ramdisk.dhcp.discover"}, "running", "no-network-in-ramdisk", "was not answered"},
		{"a ramdisk that never asked", "uefi", []string{"tftp.done", "ramdisk.dhcp.discover", "ramdisk.dhcp.offer"}, "running", "no-boot-config", "never asked"},
		{"boot config refused", "uefi", []string{"tftp.done", "ramdisk.dhcp.discover", EventBootConfigRefused + ":the gateway cannot be reached"}, "boot-config-refused", "boot-config-refused", "cannot be reached"},
		{"refused, then given", "uefi", []string{EventBootConfigRefused, EventBootConfig}, "running", "no-join", "cannot reach the gateway"},
		{"boot config and no join", "uefi", []string{"tftp.done", EventBootConfig}, "running", "no-join", "did not join"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := &Traces{}
			end := play(s, test.firmware, test.events...)
			soon, late := s.All(end)[0], s.All(end.Add(2 * time.Minute))[0]
			if soon.VerdictCode != test.soon || late.VerdictCode != test.late || !strings.Contains(late.Verdict, test.words) {
				t.Errorf("at once %s, later %s: %q", soon.VerdictCode, late.VerdictCode, late.Verdict)
			}
		})
	}
}

func TestOnlyTheGatewaySaysBooted(t *testing.T) {
	s := &Traces{}
	end := play(s, "uefi", "dhcp.discover", "dhcp.offer", "tftp.done", EventBootConfig)
	if got := s.Waiting(); len(got) != 1 || got[0] != macA {
		t.Fatalf("waiting %v", got)
	}
	s.Booted([]*bcdv1.BootedMachine{{Mac: macA, TimeMs: t0.Add(-time.Hour).UnixMilli()}, {Mac: macB, TimeMs: end.UnixMilli()}})
	if got := s.All(end)[0]; got.BootedMs != 0 || len(s.Waiting()) != 1 {
		t.Fatalf("a session of before the boot counts: %v", got)
	}
	s.Booted([]*bcdv1.BootedMachine{{Mac: macA, MachineId: "mach_a", TimeMs: end.UnixMilli()}})
	if got := s.All(end)[0]; got.VerdictCode != VerdictBooted || got.MachineId != "mach_a" || len(s.Waiting()) != 0 {
		t.Errorf("%v, waiting %v", got, s.Waiting())
	}
	s.Observe(Event{Time: end.Add(time.Second), Type: "dhcp.discover", MAC: macA, Firmware: "uefi"})
	if got := s.All(end)[0]; got.BootedMs != 0 || len(got.Steps) != 1 {
		t.Errorf("the next boot is no new trace: %v", got)
	}
}

func TestALocalMachineIsNoFault(t *testing.T) {
	s := &Traces{}
	s.Observe(Event{Time: t0, Type: "dhcp.silent", MAC: macA, Firmware: "uefi", Action: localAction})
	if got := s.All(t0.Add(time.Hour))[0]; got.VerdictCode != VerdictLocal || len(s.Waiting()) != 0 {
		t.Errorf("%v, waiting %v", got, s.Waiting())
	}
}

func TestTracesAreBounded(t *testing.T) {
	s := &Traces{}
	for i := range maxTraces + 50 {
		mac := fmt.Sprintf("52:54:00:00:%02x:%02x", i>>8, i&255)
		s.Observe(Event{Time: t0, Type: "dhcp.discover", MAC: mac, Action: ramdiskAction, Address: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})})
	}
	for i := range 5 * maxTraces {
		s.learn(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), macA)
	}
	if got := s.All(t0); len(got) != maxTraces || len(s.byMAC) != maxTraces || s.recent.Len() != maxTraces || len(s.byAddress) > 2*maxTraces {
		t.Errorf("%d traces, %d MACs, %d addresses", len(got), len(s.byMAC), len(s.byAddress))
	}
	if got := s.Waiting(); len(got) != maxWaiting {
		t.Errorf("%d wait", len(got))
	}
	for i := range 500 {
		s.Observe(Event{Time: t0, Type: "tftp.request", Message: fmt.Sprint(i) + strings.Repeat("ä", 300), MAC: macA})
	}
	got := s.All(t0)[0]
	if len(got.Steps) != maxSteps || !strings.HasPrefix(got.Steps[0].Message, "0ä") || !strings.HasPrefix(got.Steps[maxSteps-1].Message, "499ä") {
		t.Errorf("%d steps, from %q to %q", len(got.Steps), got.Steps[0].Message, got.Steps[len(got.Steps)-1].Message)
	}
	if m := got.Steps[9].Message; len(m) > maxStepMessage || !utf8.ValidString(m) {
		t.Errorf("message of %d bytes: %q", len(m), m)
	}
	for range 1000 {
		s.Observe(Event{Time: t0, Type: "dhcp.discover", MAC: macB})
	}
	if got := s.All(t0)[0]; len(got.Steps) != 1 || got.Steps[0].Count != 1000 {
		t.Errorf("the same again is not counted: %v", got.Steps)
	}
	s.Observe(Event{Time: t0, Type: "dhcp.malformed"})
	if got := s.All(t0); len(got) != maxTraces {
		t.Error("an event of no machine is in a trace")
	}
}

func TestTracesAreReportedUntilAcknowledged(t *testing.T) {
	s := &Traces{}
	end := play(s, "uefi", "dhcp.discover", "dhcp.offer", "dhcp.request")
	r := s.Changed(end)
	if len(r.Traces) != 1 || r.Traces[0].VerdictCode != VerdictRunning {
		t.Fatalf("%v", r.Traces)
	}
	if again := s.Changed(end); len(again.Traces) != 1 {
		t.Fatal("forgotten before it was acknowledged")
	}
	s.Observe(Event{Time: end, Type: "dhcp.4011", MAC: macA})
	s.Acknowledge(r)
	if r = s.Changed(end); len(r.Traces) != 1 {
		t.Fatal("a step that came while the report was on its way is lost")
	}
	s.Acknowledge(r)
	if r = s.Changed(end); len(r.Traces) != 0 {
		t.Fatalf("reported again: %v", r.Traces)
	}
	if r = s.Changed(end.Add(2 * time.Minute)); len(r.Traces) != 1 || r.Traces[0].VerdictCode != VerdictNoFetch {
		t.Errorf("a verdict that came with the time: %v", r.Traces)
	}
	for i := range 100 {
		s.Observe(Event{Time: end, Type: "dhcp.discover", MAC: fmt.Sprintf("52:54:00:00:01:%02x", i)})
	}
	if r = s.Changed(end); len(r.Traces) != maxTracesAtOnce {
		t.Errorf("%d at once", len(r.Traces))
	}
}

func TestAFetchFindsItsMachine(t *testing.T) {
	s := &Traces{}
	s.Observe(Event{Time: t0, Type: "dhcp.request", MAC: macA, Address: netip.MustParseAddr("10.0.0.7")})
	if got := s.MACOf(netip.MustParseAddr("::ffff:10.0.0.7")); got != macA {
		t.Errorf("got %q", got)
	}
	if got := s.MACOf(netip.MustParseAddr("10.0.0.8")); got != "" {
		t.Errorf("got %q", got)
	}
}

func nowT0() time.Time { return t0 }
