package netboot

import (
	"fmt"
	"strings"
	"time"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// quietFor is how long nothing must have come before an absence counts: edk2
// pauses up to 32 s between its discovers, and a UKI of 100 MiB unpacks on a
// slow machine.
const quietFor = 90 * time.Second

// The words of BootTrace.verdict_code.
const (
	VerdictBooted           = "booted"
	VerdictRunning          = "running"
	VerdictLocal            = "local"
	VerdictNothing          = "nothing"
	VerdictForeignDHCP      = "foreign-dhcp"
	VerdictNoAddress        = "no-address"
	VerdictNotHonoured      = "proxy-not-honoured"
	VerdictNo4011           = "no-4011"
	VerdictNoFetch          = "no-fetch"
	VerdictTFTPProbeOnly    = "tftp-probe-only"
	VerdictTFTPAborted      = "tftp-aborted"
	VerdictTFTPRefused      = "tftp-refused"
	VerdictHTTPHeadOnly     = "http-head-only"
	VerdictHTTPAborted      = "http-aborted"
	VerdictScriptOnly       = "script-only"
	VerdictNotStarted       = "not-started"
	VerdictNoNetwork        = "no-network-in-ramdisk"
	VerdictNoBootConfig     = "no-boot-config"
	VerdictBootConfigDenied = "boot-config-refused"
	VerdictNoJoin           = "no-join"
)

// seen is what a trace holds, of its newest try.
type seen struct {
	first, last map[string]int // the index of the first and last step of a type
	count       map[string]int
	message     map[string]string
}

func has(t *bcdv1.BootTrace, kind string) bool {
	for _, step := range t.GetSteps() {
		if step.GetType() == kind {
			return true
		}
	}
	return false
}

func look(t *bcdv1.BootTrace) seen {
	s := seen{map[string]int{}, map[string]int{}, map[string]int{}, map[string]string{}}
	for i, step := range t.GetSteps() {
		kind := step.GetType()
		if s.count[kind] == 0 {
			s.first[kind] = i
		}
		s.last[kind] = i
		s.count[kind] += int(step.GetCount())
		s.message[kind] = step.GetMessage()
	}
	return s
}

func (s seen) any(kinds ...string) bool {
	for _, kind := range kinds {
		if s.count[kind] > 0 {
			return true
		}
	}
	return false
}

// after says whether a step of kind came after the last one of what.
func (s seen) after(kind, what string) bool {
	return s.count[kind] > 0 && (s.count[what] == 0 || s.last[kind] > s.last[what])
}

// Judge names the hop at which a boot failed and the likely cause, at now. It
// goes along the path backwards: the last hop that was reached is followed by
// the one that failed. A script or file that was fetched is never a boot; only
// BootedMs is, which is the gateway's word.
func Judge(t *bcdv1.BootTrace, now time.Time) (code, sentence string) {
	steps := t.GetSteps()
	if t.GetBootedMs() != 0 {
		return VerdictBooted, "booted: its ramdisk has joined"
	}
	if len(steps) == 0 {
		return VerdictRunning, "nothing was heard of it yet"
	}
	s := look(t)
	quiet := now.Sub(time.UnixMilli(steps[len(steps)-1].GetTimeMs())) >= quietFor
	code, sentence = judge(t, s, quiet)
	if code == "" {
		return VerdictRunning, "under way: the last that was heard is " + steps[len(steps)-1].GetType()
	}
	return code, sentence
}

func judge(t *bcdv1.BootTrace, s seen, quiet bool) (code, sentence string) {
	uefi := strings.HasPrefix(t.GetFirmware(), "uefi")
	if s.any(EventBootConfig, EventBootConfigRefused, ramdiskPrefix+"dhcp.discover", ramdiskPrefix+"dhcp.inform", ramdiskPrefix+"dhcp.request") {
		return judgeRamdisk(s, quiet)
	}
	// A new discover after a whole file is the firmware again.
	again := func(done string) bool { return s.after("dhcp.discover", done) }
	switch {
	case s.any("http.done") && !s.after("http.aborted", "http.done"):
		if s.any(EventScript) || !uefi {
			if quiet || again("http.done") {
				return VerdictNotStarted, "iPXE fetched its files whole and nothing came of them: too little memory, or a kernel that does not start on this machine; its console says which"
			}
			return "", ""
		}
		return notStarted(quiet || again("http.done"))
	case s.any("http.aborted"):
		if quiet || again("http.aborted") {
			return VerdictHTTPAborted, "the fetch by HTTP ended before its end and was not taken up again: a bad link or cable, or too little memory: " + s.message["http.aborted"]
		}
		return "", ""
	case s.any("http.get") && !s.any("http.done"):
		if quiet || again("http.get") {
			return VerdictHTTPAborted, "the fetch by HTTP began and never ended: a bad link, or a firewall that drops what lasts long"
		}
		return "", ""
	case s.any("http.head"):
		if quiet || again("http.head") {
			return VerdictHTTPHeadOnly, "the firmware asked for the file's size by HTTP and never for the file: it has too little memory for it, or its policy forbids plain HTTP"
		}
		return "", ""
	case s.any(EventScript):
		if quiet || again(EventScript) {
			return VerdictScriptOnly, "iPXE fetched its script and none of the files in it: this iPXE cannot load them, or its console shows an error"
		}
		return "", ""
	case s.any("tftp.done") && !s.after("tftp.aborted", "tftp.done"):
		return notStartedTFTP(uefi, quiet || again("tftp.done"))
	case s.any("tftp.aborted"):
		if quiet || again("tftp.aborted") {
			return VerdictTFTPAborted, "the transfer by TFTP ended before its end: packet loss, a wrong MTU, or a firewall that does not follow TFTP's second port (try [boot] single_port): " + s.message["tftp.aborted"]
		}
		return "", ""
	case s.any("tftp.refused"):
		return VerdictTFTPRefused, "the firmware asked by TFTP for a file that is not ours; another DHCP server may have named it: " + s.message["tftp.refused"]
	case s.any("tftp.probed") && !s.after("tftp.request", "tftp.probed"):
		if quiet || again("tftp.probed") {
			return VerdictTFTPProbeOnly, "the firmware asked for the file's size by TFTP, ended that as it should, and did not ask a second time: the file is larger than it has room for"
		}
		return "", ""
	}
	return judgeDHCP(t, s, quiet, uefi)
}

func notStarted(over bool) (code, sentence string) {
	if !over {
		return "", ""
	}
	return VerdictNotStarted, "the UKI was fetched whole by HTTP and did not start: most likely Secure Boot refused it (is it signed, with a key that this machine has enrolled?), or there is too little memory"
}

func notStartedTFTP(uefi, over bool) (code, sentence string) {
	switch {
	case !over:
		return "", ""
	case uefi:
		return VerdictNotStarted, "the UKI was fetched whole by TFTP and did not start: most likely Secure Boot refused it (is it signed, with a key that this machine has enrolled?), or there is too little memory"
	}
	return VerdictNotStarted, "the iPXE was fetched whole by TFTP and did not come back for its script: it has no driver for this NIC, or no DHCP server answered it"
}

// judgeRamdisk: a kernel of ours runs.
func judgeRamdisk(s seen, quiet bool) (code, sentence string) {
	switch {
	case s.after(EventBootConfigRefused, EventBootConfig):
		return VerdictBootConfigDenied, "the ramdisk runs and did not get its boot config: " + s.message[EventBootConfigRefused]
	case !quiet:
		return "", ""
	case s.any(EventBootConfig):
		return VerdictNoJoin, "the ramdisk runs and has its boot config, and did not join: it cannot reach the gateway from this network, or was built with other trust roots; its console says which"
	case s.any(ramdiskPrefix+"dhcp.ack", ramdiskPrefix+"dhcp.offer"):
		return VerdictNoBootConfig, "the ramdisk runs and heard where this site is, and never asked for its boot config: it has no address on this network, or a firewall drops HTTP"
	}
	return VerdictNoNetwork, "the ramdisk runs and was not answered; see the steps for why"
}

// judgeDHCP: nothing was fetched.
func judgeDHCP(t *bcdv1.BootTrace, s seen, quiet, uefi bool) (code, sentence string) {
	switch {
	case t.GetAction() == bcdv1.BootAction_BOOT_ACTION_LOCAL:
		return VerdictLocal, "it was left to boot from its own disk, as it is to"
	case s.any("dhcp.foreign-offer"):
		return VerdictForeignDHCP, "another server takes the boot away: " + s.message["dhcp.foreign-offer"]
	case !s.any("dhcp.offer", "dhcp.ack") && s.any("dhcp.silent"):
		return VerdictNothing, "it was given nothing: " + s.message["dhcp.silent"]
	case s.any("dhcp.not-honoured"):
		return VerdictNotHonoured, s.message["dhcp.not-honoured"]
	case !quiet:
		return "", ""
	case s.any("dhcp.4011"):
		return VerdictNoFetch, "the firmware was told what to fetch, on port 4011, and fetched nothing: a firewall that drops UDP 69 or TCP 80, or an address from a DHCP server that cannot reach this site"
	case s.any("dhcp.offer") && !s.any("dhcp.request"):
		return VerdictNoAddress, fmt.Sprintf("it asked %d times and took no address: there is no DHCP server on this network that gives it one, or its answers do not arrive", s.count["dhcp.discover"])
	case s.any("dhcp.offer") && uefi:
		return VerdictNo4011, "it took an address and never asked on UDP port 4011: something between drops that port, or two DHCP servers answer and the other one won"
	case s.any("dhcp.offer", "dhcp.ack"):
		return VerdictNoFetch, "it was told what to fetch and fetched nothing: a firewall that drops UDP 69 or TCP 80, or another DHCP server won"
	}
	return VerdictNothing, "it asked and nothing was offered to it"
}
