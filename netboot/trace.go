package netboot

import (
	"container/list"
	"net/netip"
	"slices"
	"sync"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// maxTraces is how many machines are remembered, those heard last: what a
	// site powers on in an evening, and 20 MiB at most whatever MACs are made
	// up on its network.
	maxTraces = 1024
	// maxSteps of one trace are kept, as BootTrace has it; the first keepFirst
	// always, because how it began is what is asked first.
	maxSteps  = 64
	keepFirst = 16
	// maxStepMessage is in bytes.
	maxStepMessage = 256
	// newBootAfter is how long a machine is silent before its next packet
	// begins another trace: longer than a firmware pauses between its tries.
	newBootAfter = 5 * time.Minute
	// maxWaiting and maxTracesAtOnce are SyncRequest's.
	maxWaiting      = 256
	maxTracesAtOnce = 64
)

// Event types that are made here, beside those of the protocol rooms.
const (
	// EventScript: an iPXE script was fetched.
	EventScript = "script"
	// EventBootConfig: a ramdisk asked for its boot config and got it.
	EventBootConfig = "boot-config"
	// EventBootConfigRefused: it asked and did not get it, and why.
	EventBootConfigRefused = "boot-config.refused"
	// ramdiskPrefix is put before the type of what a ramdisk sends: its packets
	// say that a kernel runs, not that a firmware tries again.
	ramdiskPrefix = "ramdisk."
)

// Event is one packet or fetch.
type Event struct {
	Time          time.Time
	Type, Message string
	// MAC names the machine; an event without one is in no trace.
	MAC, UUID string
	// Architecture is as Go has it. Firmware is a word of BootTrace, or
	// "ramdisk".
	Architecture, Firmware string
	// Address is the machine's, where the packet says.
	Address netip.Addr
	// Action is what was decided, where something was.
	Action    bcdv1.BootAction
	MachineID string
}

// Traces remembers how each machine fared. It is safe for concurrent use and
// quick: it is called for each packet.
type Traces struct {
	Site string

	mu        sync.Mutex
	byMAC     map[string]*list.Element // of *trace
	recent    list.List                // the one heard last in front
	byAddress map[netip.Addr]string
}

type trace struct {
	t    *bcdv1.BootTrace
	last time.Time
	// version counts changes, sent is the one that the gateway has, verdict the
	// word that went with it: a verdict changes with the time alone.
	version, sent int64
	verdict       string
}

// Observe takes one event in.
func (s *Traces) Observe(e Event) {
	if e.MAC == "" || e.Type == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	ramdisk := e.Firmware == "ramdisk"
	kind := e.Type
	if ramdisk {
		kind = ramdiskPrefix + kind
	}
	t := s.get(e.MAC)
	begins := kind == "dhcp.discover" && (t.t.GetBootedMs() != 0 || has(t.t, EventBootConfig)) || e.Time.Sub(t.last) > newBootAfter
	if t.t == nil || begins {
		t.t = &bcdv1.BootTrace{Mac: e.MAC, Site: s.Site, StartedMs: e.Time.UnixMilli()}
	}
	t.last = e.Time
	t.version++
	if e.UUID != "" {
		t.t.SystemUuid = e.UUID
	}
	if e.Architecture != "" && !ramdisk {
		t.t.Architecture = e.Architecture
	}
	if e.Firmware != "" && !ramdisk {
		t.t.Firmware = e.Firmware
	}
	if e.Action != bcdv1.BootAction_BOOT_ACTION_UNSPECIFIED {
		t.t.Action = e.Action
	}
	if e.MachineID != "" {
		t.t.MachineId = e.MachineID
	}
	if e.Address.IsValid() {
		s.learn(e.Address, e.MAC)
	}
	addStep(t.t, &bcdv1.BootStep{TimeMs: e.Time.UnixMilli(), Type: kind, Message: cutText(e.Message, maxStepMessage), Count: 1})
}

// get finds or makes the trace of a MAC, and forgets the one that was silent
// longest when there are too many.
func (s *Traces) get(mac string) *trace {
	if e, ok := s.byMAC[mac]; ok {
		s.recent.MoveToFront(e)
		return e.Value.(*trace)
	}
	if s.byMAC == nil {
		s.byMAC, s.byAddress = map[string]*list.Element{}, map[netip.Addr]string{}
	}
	if len(s.byMAC) >= maxTraces {
		delete(s.byMAC, s.recent.Remove(s.recent.Back()).(*trace).t.GetMac())
	}
	t := &trace{}
	s.byMAC[mac] = s.recent.PushFront(t)
	return t
}

// learn remembers whose an address is, so that a fetch finds its trace.
func (s *Traces) learn(address netip.Addr, mac string) {
	if _, ok := s.byAddress[address]; !ok && len(s.byAddress) >= 2*maxTraces {
		for other := range s.byAddress { // any one: it is learned again
			delete(s.byAddress, other)
			break
		}
	}
	s.byAddress[address] = mac
}

// MACOf gives the machine that has an address, "" when it is not known.
func (s *Traces) MACOf(address netip.Addr) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byAddress[address.Unmap()]
}

func addStep(t *bcdv1.BootTrace, step *bcdv1.BootStep) {
	if n := len(t.Steps); n > 0 && t.Steps[n-1].GetType() == step.Type && t.Steps[n-1].GetMessage() == step.Message {
		t.Steps[n-1].Count++
		return
	}
	if len(t.Steps) == maxSteps {
		t.Steps = slices.Delete(t.Steps, keepFirst, keepFirst+1)
	}
	t.Steps = append(t.Steps, step)
}

// cutText keeps at most n bytes and whole characters.
func cutText(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// Booted takes the gateway's word that a machine's ramdisk has a session: the
// one proof there is.
func (s *Traces) Booted(machines []*bcdv1.BootedMachine) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range machines {
		if e, ok := s.byMAC[m.GetMac()]; ok {
			t := e.Value.(*trace)
			// A session of before this boot proves nothing about it.
			if t.t.GetBootedMs() == 0 && m.GetTimeMs() >= t.t.GetStartedMs() {
				t.t.BootedMs, t.t.MachineId = m.GetTimeMs(), m.GetMachineId()
				t.version++
			}
		}
	}
}

// Waiting are the MACs that were given something to boot and have not been
// seen to join, those heard last first.
func (s *Traces) Waiting() (out []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for e := s.recent.Front(); e != nil && len(out) < maxWaiting; e = e.Next() {
		t := e.Value.(*trace).t
		if t.GetBootedMs() == 0 && t.GetAction() == bcdv1.BootAction_BOOT_ACTION_RAMDISK {
			out = append(out, t.GetMac())
		}
	}
	return out
}

// All gives a copy of every trace with its verdict at now, the one heard last
// first.
func (s *Traces) All(now time.Time) (out []*bcdv1.BootTrace) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for e := s.recent.Front(); e != nil; e = e.Next() {
		out = append(out, e.Value.(*trace).judged(now))
	}
	return out
}

func (t *trace) judged(now time.Time) *bcdv1.BootTrace {
	c := proto.CloneOf(t.t)
	c.VerdictCode, c.Verdict = Judge(c, now)
	return c
}

// Report is what the gateway does not have yet.
type Report struct {
	Traces   []*bcdv1.BootTrace
	versions map[string]int64
}

// Changed gives the traces, or verdicts, that changed since they were last
// acknowledged: at most 64, those that wait longest first.
func (s *Traces) Changed(now time.Time) Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := Report{versions: map[string]int64{}}
	for e := s.recent.Back(); e != nil && len(r.Traces) < maxTracesAtOnce; e = e.Prev() {
		t := e.Value.(*trace)
		c := t.judged(now)
		if t.sent != t.version || t.verdict != c.GetVerdictCode() {
			r.Traces = append(r.Traces, c)
			r.versions[c.GetMac()] = t.version
		}
	}
	return r
}

// Acknowledge says that the gateway has what a report holds.
func (s *Traces) Acknowledge(r Report) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range r.Traces {
		if e, ok := s.byMAC[c.GetMac()]; ok {
			t := e.Value.(*trace)
			t.sent, t.verdict = r.versions[c.GetMac()], c.GetVerdictCode()
		}
	}
}

// actionOf is what was last decided about a machine.
func (s *Traces) actionOf(mac string) bcdv1.BootAction {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e, ok := s.byMAC[mac]; ok {
		return e.Value.(*trace).t.GetAction()
	}
	return bcdv1.BootAction_BOOT_ACTION_UNSPECIFIED
}
