package bmc

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/better-compute/bcd/agent/dispatch"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// simPassword is a canary that ipmi_sim's configuration can hold.
const simPassword = "cAnary-9&7xQ"

// simulator is OpenIPMI's ipmi_sim on a loopback port: a BMC that shares no
// code with ours. Its chassis is a script over files.
type simulator struct {
	t    *testing.T
	dir  string
	addr *net.UDPAddr
}

const chassisScript = `#!/bin/sh
cd %q || exit 1
op=$1; shift
echo "$op $*" >>log
case $op in
get) while [ $# -gt 0 ]; do echo "$1:$(cat "$1")"; shift; done;;
set) while [ $# -gt 1 ]; do
	case $1 in
	shutdown) echo 0 >power;;
	reset) ;;
	*) echo "$2" >"$1";;
	esac
	shift 2
done;;
esac
`

func newSimulator(t *testing.T) *simulator {
	probe, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	s := &simulator{t: t, dir: t.TempDir(), addr: probe.LocalAddr().(*net.UDPAddr)}
	probe.Close()
	auths := ""
	for _, level := range []string{"callback", "user", "operator", "admin"} {
		auths += "allowed_auths_" + level + " md5\n"
	}
	s.write("chassis", fmt.Sprintf(chassisScript, s.dir))
	s.write("power", "0\n")
	s.write("boot", "none\n")
	s.write("lan.conf", fmt.Sprintf("name \"t\"\nset_working_mc 0x20\nstartlan 1\naddr 127.0.0.1 %d\npriv_limit admin\n%sguid 0a0000000080004080003c8f5f6a0000\nendlan\nchassis_control \"%s\"\nuser 2 true \"root\" \"%s\" admin 10 md5\n",
		s.addr.Port, auths, filepath.Join(s.dir, "chassis"), simPassword))
	s.write("commands", "mc_setbmc 0x20\nmc_add 0x20 0 no-device-sdrs 0x23 9 8 0x9f 0x1291 0xf02 persist_sdr\nmc_add_fru_data 0x20 0 0x100 file 0 \""+filepath.Join(s.dir, "fru")+"\"\nmc_enable 0x20\n")
	s.write("fru", fru("Example", "M1", "S-1"))
	if err := os.Mkdir(filepath.Join(s.dir, "state"), 0o700); err != nil {
		t.Fatal(err)
	}
	sim := exec.Command("ipmi_sim", "-n", "-c", filepath.Join(s.dir, "lan.conf"), "-f", filepath.Join(s.dir, "commands"), "-s", filepath.Join(s.dir, "state"))
	output, err := os.Create(filepath.Join(s.dir, "output"))
	if err != nil {
		t.Fatal(err)
	}
	sim.Stdout, sim.Stderr = output, output
	if err := sim.Start(); err != nil {
		t.Fatalf("%v; scripts/setup installs it", err)
	}
	t.Cleanup(func() {
		_ = sim.Process.Kill()
		_ = sim.Wait()
		output.Close()
		if t.Failed() {
			text, _ := os.ReadFile(output.Name())
			t.Logf("ipmi_sim: %s", text)
		}
	})
	// It listens when it answers; there is no other sign.
	for try := 0; ; try++ {
		_, err := s.tool("power", "status")
		if err == nil {
			return s
		}
		if try == 10 {
			t.Fatalf("ipmi_sim does not come up: %v", err)
		}
	}
}

func (s *simulator) write(name, text string) {
	if err := os.WriteFile(filepath.Join(s.dir, name), []byte(text), 0o700); err != nil {
		s.t.Fatal(err)
	}
}

func (s *simulator) tool(args ...string) (string, error) {
	t := exec.Command("ipmitool", append([]string{"-I", "lanplus", "-C", "3", "-H", "127.0.0.1", "-p", fmt.Sprint(s.addr.Port), "-U", user, "-E", "-N", "2", "-R", "4"}, args...)...)
	t.Env = append(os.Environ(), "IPMI_PASSWORD="+simPassword)
	out, err := t.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("ipmitool %q: %w: %s", args, err, out)
	}
	return string(out), nil
}

func (s *simulator) mustTool(want string, args ...string) {
	s.t.Helper()
	out, err := s.tool(args...)
	if err != nil || !strings.Contains(out, want) {
		s.t.Errorf("ipmitool %q says %q, %v; want %q", args, out, err, want)
	}
}

// did says how often the chassis was told so.
func (s *simulator) did(what string) int {
	log, err := os.ReadFile(filepath.Join(s.dir, "log"))
	if err != nil {
		s.t.Fatal(err)
	}
	return strings.Count(string(log), what+"\n")
}

// fru is a FRU image with a product area (IPMI FRU specification 1.3, section
// 12).
func fru(manufacturer, name, serial string) string {
	area := []byte{1, 0, 25}
	for _, text := range []string{manufacturer, name, "", "", serial, "", ""} {
		area = append(area, 0xc0|byte(len(text)))
		area = append(area, text...)
	}
	area = append(area, 0xc1)
	for len(area)%8 != 7 {
		area = append(area, 0)
	}
	area[1] = byte(len(area)+1) / 8
	sum := func(b []byte) (c byte) {
		for _, x := range b {
			c -= x
		}
		return c
	}
	area = append(area, sum(area))
	head := []byte{1, 0, 0, 0, 1, 0, 0}
	return string(append(append(head, sum(head)), area...))
}

func ipmiWorld(t *testing.T, address string) (*world, *bcdv1.BmcTarget) {
	w := newWorld(t, nil)
	w.secrets.values["bmc/1"] = user + ":" + simPassword + "\n"
	return w, &bcdv1.BmcTarget{Address: address, Protocol: bcdv1.BmcProtocol_BMC_PROTOCOL_IPMI, CredentialsReference: "bmc/1"}
}

// TestIPMI drives a BMC that is not ours with a client that is and one that is
// not, each reading what the other has set.
func TestIPMI(t *testing.T) {
	s := newSimulator(t)
	w, target := ipmiWorld(t, s.addr.String())

	for _, c := range []struct {
		action bcdv1.BmcPowerAction
		told   string
		shows  string
	}{
		{actStatus, "", "is off"}, {actOn, "set power 1", "is on"}, {actReset, "set reset 1", "is on"},
		{actGraceful, "set shutdown 1", "is off"}, {actCycle, "set power 1", "is on"}, {actOff, "set power 0", "is off"},
	} {
		before := s.did(c.told)
		r, failure := w.power(target, c.action)
		if failure != nil {
			t.Fatalf("%s: %v", word(c.action), failure)
		}
		if c.told != "" && s.did(c.told) != before+1 {
			t.Errorf("%s: %q was said %d times", word(c.action), c.told, s.did(c.told)-before)
		}
		if r.GetProtocol() != bcdv1.BmcProtocol_BMC_PROTOCOL_IPMI || strings.HasSuffix(c.shows, "on") != (r.GetAfter() == on) {
			t.Errorf("%s: %v", word(c.action), r)
		}
		s.mustTool(c.shows, "power", "status")
	}
	s.mustTool("Up/On", "power", "on")
	if r, failure := w.power(target, actOn); failure != nil || r.GetChanged() {
		t.Errorf("ipmitool turned it on: %v, %v", r, failure)
	}

	result, failure := w.run(BootDeviceKind, &bcdv1.BmcBootDevice{Target: target, Source: pxe})
	if failure != nil {
		t.Fatal(failure)
	}
	s.mustTool("Force PXE", "chassis", "bootparam", "get", "5")
	// The simulator keeps nothing but the device; that is said, not hidden.
	if notes := strings.Join(result.Body.(*bcdv1.BmcBootDeviceResult).GetNotes(), "\n"); !strings.Contains(notes, "UEFI was asked for") || !strings.Contains(notes, "valid") {
		t.Errorf("notes %q", notes)
	}
	s.mustTool("Set Boot Device to none", "chassis", "bootdev", "none")
	if result, failure := w.run(BootDeviceKind, &bcdv1.BmcBootDevice{Target: target, Source: none}); failure != nil || result.Body.(*bcdv1.BmcBootDeviceResult).GetChanged() {
		t.Errorf("ipmitool took it back: %v, %v", result, failure)
	}
	_, failure = w.run(BootDeviceKind, &bcdv1.BmcBootDevice{Target: target, Source: uefi})
	wantCode(t, failure, "UNSUPPORTED", "Redfish")

	result, failure = w.run(InventoryKind, &bcdv1.BmcInventory{Target: target})
	if failure != nil {
		t.Fatal(failure)
	}
	r := result.Body.(*bcdv1.BmcInventoryResult)
	if r.GetManufacturer() != "Example" || r.GetModel() != "M1" || r.GetSerial() != "S-1" || r.GetBmcFirmware() != "9.08" || r.GetPower() != on {
		t.Errorf("%v", r)
	}
	s.mustTool("Product Serial        : S-1", "fru")
}

func TestIPMIFailures(t *testing.T) {
	s := newSimulator(t)
	w, target := ipmiWorld(t, s.addr.String())
	w.secrets.values["bmc/wrong"] = user + ":cAnary-wrong"
	w.secrets.values["bmc/long"] = user + ":" + strings.Repeat("p", maxIPMIPassword+1)
	before := sockets(t)
	t.Cleanup(func() {
		if after := sockets(t); after > before {
			t.Errorf("%d sockets before, %d after", before, after)
		}
	})
	for reference, words := range map[string]string{"bmc/wrong": "refuses user and password", "bmc/long": "at most 20"} {
		target.CredentialsReference = reference
		_, failure := w.power(target, actOn)
		if wantCode(t, failure, "LOGIN_REFUSED", words); strings.Contains(failure.Message, "cAnary-wrong") {
			t.Errorf("the password is in %q", failure.Message)
		}
	}
	target.CredentialsReference = "bmc/1"
	target.CertificateSha256 = make([]byte, 32)
	_, failure := w.power(target, actOn)
	wantCode(t, failure, "MALFORMED", "no certificate")
	if n := s.did("set power 1"); n != 0 {
		t.Errorf("turned on %d times", n)
	}
}

// sockets counts this process's.
func sockets(t *testing.T) (n int) {
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}

// TestIPMISilence: nobody there, somebody who never answers, somebody who
// answers nonsense.
func TestIPMISilence(t *testing.T) {
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	w, target := ipmiWorld(t, conn.LocalAddr().String())
	w.deadline = time.Now().Add(300 * time.Millisecond)
	if _, failure := w.power(target, actOn); failure == nil || failure.Indeterminate {
		t.Errorf("silence: %v", failure)
	}
	w.deadline = time.Now().Add(time.Second)
	answering := make(chan struct{})
	go func() {
		defer close(answering)
		buffer := make([]byte, 1500)
		for {
			n, from, err := conn.ReadFromUDPAddrPort(buffer)
			if err != nil {
				return
			}
			for _, nonsense := range strangers(buffer[:n]) {
				_, _ = conn.WriteToUDPAddrPort(nonsense, from)
			}
		}
	}()
	if _, failure := w.power(target, actOn); failure == nil || failure.Indeterminate {
		t.Errorf("nonsense: %v", failure)
	}
	conn.Close()
	<-answering
	w.deadline = time.Now().Add(20 * time.Second)
	if _, failure := w.power(target, actOn); failure == nil || failure.Indeterminate {
		t.Errorf("nobody: %v", failure)
	}
}

// strangers are datagrams that anybody on the LAN can send.
func strangers(request []byte) [][]byte {
	rmcpPlus := func(payloadType byte, payload ...byte) []byte {
		d := []byte{6, 0, 0xff, 7, 6, payloadType, 0xa3, 0xa2, 0xa1, 0xa0, 1, 0, 0, 0, byte(len(payload)), 0}
		return append(d, payload...)
	}
	all := [][]byte{
		{}, {6}, {6, 0, 0xff, 7}, {6, 0, 0xff, 7, 6}, {6, 0, 0xff, 7, 6, 0x80, 1},
		rmcpPlus(0xc0), rmcpPlus(0x80, 1, 2, 3), rmcpPlus(0xc0, make([]byte, 16)...), rmcpPlus(0xc0, make([]byte, 17)...),
		rmcpPlus(0x11, 1), rmcpPlus(0x13), rmcpPlus(0x15, 0), rmcpPlus(0x81, 1, 2),
		slices.Clone(request), request[:len(request)/2],
	}
	// Ciphertext whose last byte decrypts to any padding length.
	for i := range byte(32) {
		block := make([]byte, 32)
		block[31] = i
		all = append(all, rmcpPlus(0xc0, block...))
	}
	return all
}

// relay stands between a client and the simulator. answer turns each answer
// into the datagrams that the client gets, one call at a time.
func (s *simulator) relay(answer func(datagram []byte) [][]byte) (address string) {
	front, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		s.t.Fatal(err)
	}
	back, err := net.DialUDP("udp", nil, s.addr)
	if err != nil {
		s.t.Fatal(err)
	}
	var relays sync.WaitGroup
	s.t.Cleanup(func() { front.Close(); back.Close(); relays.Wait() })
	var client atomic.Value // netip.AddrPort
	relays.Go(func() {
		buffer := make([]byte, 4096)
		for {
			n, from, err := front.ReadFromUDPAddrPort(buffer)
			if err != nil {
				return
			}
			client.Store(from)
			if _, err := back.Write(buffer[:n]); err != nil {
				return
			}
		}
	})
	relays.Go(func() {
		buffer := make([]byte, 4096)
		for {
			n, err := back.Read(buffer)
			if err != nil {
				return
			}
			for _, d := range answer(buffer[:n]) {
				_, _ = front.WriteToUDPAddrPort(d, client.Load().(netip.AddrPort))
			}
		}
	})
	return front.LocalAddr().String()
}

// TestStrangersDatagrams: before every answer of an encrypted session come
// datagrams of somebody else. None ends the process.
func TestStrangersDatagrams(t *testing.T) {
	s := newSimulator(t)
	var injected atomic.Int32
	w, target := ipmiWorld(t, s.relay(func(d []byte) [][]byte {
		// Session set-up takes the first datagram for the answer.
		if len(d) <= 5 || d[4] != 6 || d[5]&0x3f != 0 {
			return [][]byte{d}
		}
		injected.Add(1)
		return append(strangers(d)[5:], d)
	}))
	if r, failure := w.power(target, actOn); failure != nil || r.GetAfter() != on {
		t.Errorf("%v, %v", r, failure)
	}
	if injected.Load() == 0 {
		t.Error("no stranger's datagram was sent; the test has shown nothing")
	}
}

// TestIPMILostAnswer: a request whose answer is lost is not sent again.
func TestIPMILostAnswer(t *testing.T) {
	s := newSimulator(t)
	var lose atomic.Value
	lose.Store("")
	var lost atomic.Int32
	w, target := ipmiWorld(t, s.relay(func(d []byte) [][]byte {
		// The script's log is written before the simulator answers.
		if told := lose.Load().(string); told != "" && s.did(told) > 0 && lost.Add(1) == 1 {
			return nil
		}
		return [][]byte{d}
	}))
	w.executors[PowerKind].(*executor).site.ipmiAskTime = time.Second
	lose.Store("set power 1")
	r, failure := w.power(target, actOn)
	if failure != nil || r.GetAfter() != on || len(r.GetNotes()) != 1 || s.did("set power 1") != 1 {
		t.Errorf("on: %v, %v", r, failure)
	}
	lost.Store(0)
	lose.Store("set reset 1")
	_, failure = w.power(target, actReset)
	if wantCode(t, failure, "NO_ANSWER", "unknown"); !failure.Indeterminate || s.did("set reset 1") != 1 {
		t.Errorf("reset: indeterminate %v, done %d times", failure.Indeterminate, s.did("set reset 1"))
	}
}

// TestAutoFallsBack: where nothing speaks Redfish, IPMI is tried; never with a
// pinned certificate, which would be a way around it.
func TestAutoFallsBack(t *testing.T) {
	s := newSimulator(t)
	w, target := ipmiWorld(t, "")
	site := w.executors[PowerKind].(*executor).site
	j := &job{hidden: new(hidden), Command: dispatch.Command{ID: "cmd_1"}}
	defer j.hidden.destroy()
	// 127.0.0.2 has nothing on port 443; nor on 623, so both are named.
	target.Address, target.Protocol = "127.0.0.2", bcdv1.BmcProtocol_BMC_PROTOCOL_AUTO
	_, err := site.open(t.Context(), j, target)
	if err == nil || !strings.Contains(err.Error(), "Redfish:") || !strings.Contains(err.Error(), "IPMI:") {
		t.Errorf("%v", err)
	}
	target.CertificateSha256 = make([]byte, 32)
	if _, err = site.open(t.Context(), j, target); err == nil || strings.Contains(err.Error(), "IPMI") {
		t.Errorf("with a pin: %v", err)
	}
	target.CertificateSha256, target.Address = nil, s.addr.String()
	if _, err = site.open(t.Context(), j, target); err == nil || strings.Contains(err.Error(), "IPMI") {
		t.Errorf("with a port: %v", err)
	}
}
