package gateway

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// The figures of a session. Those with a counterpart on the daemon are in
// Welcome, so that there is one place to change them.
const (
	protocolVersion   = 1
	heartbeatInterval = 15 * time.Second
	// silenceLimit is how long a session may go without any frame: three
	// heartbeats. A dead path is noticed sooner, by the transport's pings.
	silenceLimit = 45 * time.Second
	// helloLimit is how long a caller may take for its first frame, and for
	// the proof of its identity.
	helloLimit = 10 * time.Second
	// probeLimit is the silence that makes an old session a ghost.
	probeLimit = 3 * time.Second
	// laneBlock is how long a lane that answered LANE_FULL gets no command.
	laneBlock = time.Second

	maxFrameBytes    = 5 << 20
	maxCommandBytes  = 1 << 20
	maxSpecBytes     = 4 << 20
	maxResultBytes   = 64 << 10
	maxEventBytes    = 4 << 10
	maxProgressBytes = 4 << 10
	maxMessageBytes  = 4 << 10
	maxSectionBytes  = 512 << 10
	maxSections      = 64
	maxConditions    = 256
	maxEventsInBatch = 1024
	maxNameBytes     = 256
	// maxSecretRequests bounds how many secrets a session may ask for in a
	// minute: a deploy needs two.
	maxSecretRequests = 60
)

// laneCredits is how many commands a node may have outstanding in each lane:
// its workers (4, 2, 1) and some that wait, so that a worker never idles for a
// round trip.
var laneCredits = map[bcdv1.Lane]int{
	bcdv1.Lane_LANE_CONTROL:   16,
	bcdv1.Lane_LANE_PROVISION: 4,
	bcdv1.Lane_LANE_BULK:      2,
}

// priority orders what waits to be sent.
type priority int

const (
	// urgent: acknowledgements and control.
	urgent priority = iota
	// work: commands, their cancels, specs. A cancel never overtakes the
	// command it is for.
	work
	// data: everything else.
	data
	priorities
)

type sessionPhase int

const (
	awaitHello sessionPhase = iota
	probing
	opening
	live
	over
)

// sessionCore is one session as a step function: no goroutine, no clock, no
// I/O. The shell in session.go does what the outputs ask and feeds the answers
// back.
type sessionCore struct {
	gateway string
	peer    *Peer
	spread  func() time.Duration

	phase     sessionPhase
	hello     *bcdv1.Hello
	epoch     int64
	lastFrame time.Time

	outstanding  map[string]bcdv1.Lane
	blockedUntil map[bcdv1.Lane]time.Time
	cancelled    map[string]bool
	specSent     int64
	draining     bool

	// stale counts frames of other epochs, unknown those without a known body.
	stale, unknown int
	secretWindow   time.Time
	secretCount    int
}

func newSessionCore(now time.Time, gateway string, peer *Peer, spread func() time.Duration) *sessionCore {
	return &sessionCore{
		gateway: gateway, peer: peer, spread: spread, lastFrame: now,
		outstanding: map[string]bcdv1.Lane{}, blockedUntil: map[bcdv1.Lane]time.Time{}, cancelled: map[string]bool{},
	}
}

// deadline is when Step wants a gotTick.
func (s *sessionCore) deadline() time.Time {
	switch s.phase {
	case awaitHello:
		return s.lastFrame.Add(helloLimit)
	case probing, opening, over:
		return time.Time{}
	}
	at := s.lastFrame.Add(silenceLimit)
	if s.peer.NotAfter.Before(at) {
		at = s.peer.NotAfter
	}
	for _, until := range s.blockedUntil {
		if until.Before(at) {
			at = until
		}
	}
	return at
}

// Step takes one input and says what is to be done.
func (s *sessionCore) Step(now time.Time, in sessionInput) []sessionOutput {
	if s.phase == over {
		return nil
	}
	switch in := in.(type) {
	case gotFrame:
		return s.frame(now, in.frame)
	case gotProbed:
		if s.phase != probing {
			return nil
		}
		if in.alive {
			reject := duplicate(s.peer.NodeID, "its session answered while this one asked to begin")
			return s.reject(now, reject)
		}
		s.phase = opening
		return []sessionOutput{askOpen{s.hello}}
	case gotOpened:
		if s.phase != opening {
			return nil
		}
		if in.reject != nil {
			return s.reject(now, in.reject)
		}
		return s.welcome(now, in.opened)
	case gotClaimed:
		return s.claimed(in)
	case gotCommitted:
		return s.committed(now, in)
	case gotTrust:
		if in.reject != nil && s.phase == live {
			return s.distrust(now, in.reject)
		}
	case gotSpec:
		if s.phase == live && in.spec != nil && in.spec.Generation > s.specSent {
			return s.sendSpec(in.spec)
		}
	case gotSecret:
		if s.phase == live {
			return []sessionOutput{s.send(data, &bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_SecretAnswer{SecretAnswer: in.answer}})}
		}
	case gotTick:
		return s.tick(now)
	case gotWake:
		if s.phase == live && !s.draining {
			return []sessionOutput{askClaim{s.room(now)}, askSpec{s.specSent}}
		}
	case gotProbe:
		if s.phase == live {
			return []sessionOutput{s.send(urgent, &bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_Probe{Probe: &bcdv1.Probe{Sequence: in.sequence}}})}
		}
	case gotDrain:
		if s.phase != live {
			return s.end("the gateway stops: " + in.reason)
		}
		if s.draining {
			return nil
		}
		s.draining = true
		return []sessionOutput{s.send(urgent, &bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_Drain{Drain: &bcdv1.Drain{SpreadMs: int32(in.spread.Milliseconds()), Reason: in.reason}}})}
	case gotRevoked:
		if s.phase == live {
			return s.distrust(now, &bcdv1.Reject{Code: bcdv1.RejectCode_REJECT_CODE_REVOKED, Detail: in.reason})
		}
	case gotReplaced:
		return s.end("a newer session of this node began")
	}
	return nil
}

func (s *sessionCore) send(p priority, frame *bcdv1.ServerFrame) sessionOutput {
	frame.Epoch = s.epoch
	return doSend{frame, p}
}

func (s *sessionCore) end(reason string) []sessionOutput {
	s.phase = over
	return []sessionOutput{doEnd{reason}}
}

func (s *sessionCore) reject(now time.Time, reject *bcdv1.Reject) []sessionOutput {
	reject.ServerTimeMs = now.UnixMilli()
	out := s.send(urgent, &bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_Reject{Reject: reject}, Critical: true})
	return append([]sessionOutput{out}, s.end(reject.GetDetail())...)
}

func (s *sessionCore) malformed(now time.Time, format string, args ...any) []sessionOutput {
	return s.reject(now, &bcdv1.Reject{Code: bcdv1.RejectCode_REJECT_CODE_MALFORMED, Detail: fmt.Sprintf(format, args...)})
}

// distrust ends a live session whose identity is no longer good.
func (s *sessionCore) distrust(now time.Time, reject *bcdv1.Reject) []sessionOutput {
	var out []sessionOutput
	if reject.GetCode() == bcdv1.RejectCode_REJECT_CODE_REVOKED {
		out = append(out, s.send(urgent, &bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_Revoked{Revoked: &bcdv1.Revoked{Reason: reject.GetDetail()}}}))
	}
	return append(out, s.reject(now, reject)...)
}

func (s *sessionCore) tick(now time.Time) []sessionOutput {
	if at := s.deadline(); at.IsZero() || now.Before(at) {
		return nil
	}
	if s.phase == awaitHello {
		return s.malformed(now, "no Hello within %v", helloLimit)
	}
	if !now.Before(s.peer.NotAfter) {
		return s.distrust(now, &bcdv1.Reject{
			Code:   bcdv1.RejectCode_REJECT_CODE_IDENTITY_EXPIRED,
			Detail: fmt.Sprintf("the certificate of %s ended at %s; renew it and connect again", s.peer.NodeID, s.peer.NotAfter.UTC().Format(time.RFC3339)),
		})
	}
	if silent := now.Sub(s.lastFrame); silent >= silenceLimit {
		return s.end(fmt.Sprintf("nothing heard for %v", silent.Round(time.Second)))
	}
	for lane, until := range s.blockedUntil {
		if !now.Before(until) {
			delete(s.blockedUntil, lane)
		}
	}
	if s.draining {
		return nil
	}
	return []sessionOutput{askClaim{s.room(now)}}
}

// room is how many commands each lane may still be sent.
func (s *sessionCore) room(now time.Time) map[bcdv1.Lane]int {
	room := map[bcdv1.Lane]int{}
	for lane, credits := range laneCredits {
		if now.Before(s.blockedUntil[lane]) {
			continue
		}
		room[lane] = credits
	}
	for _, lane := range s.outstanding {
		if room[lane] > 0 {
			room[lane]--
		}
	}
	return room
}

func (s *sessionCore) frame(now time.Time, frame *bcdv1.ClientFrame) []sessionOutput {
	switch s.phase {
	case awaitHello:
		s.lastFrame = now
		return s.greet(now, frame.GetHello())
	case live:
	default:
		return s.malformed(now, "a frame came before Welcome; wait for it after Hello")
	}
	if frame.GetHello() != nil {
		return s.malformed(now, "a second Hello on one session; open a new one instead")
	}
	if frame.GetEpoch() != s.epoch {
		// An older session's frame, on whatever way it came here.
		s.stale++
		return nil
	}
	s.lastFrame = now
	if reason := frameFault(frame); reason != "" {
		return s.malformed(now, "%s", reason)
	}
	switch body := frame.GetBody().(type) {
	case *bcdv1.ClientFrame_Heartbeat:
		answer := &bcdv1.HeartbeatAnswer{Sequence: body.Heartbeat.GetSequence(), ServerTimeMs: now.UnixMilli()}
		out := []sessionOutput{
			s.send(urgent, &bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_Heartbeat{Heartbeat: answer}}),
			askTrust{},
		}
		// Also how a command that another gateway queued, or whose wake was
		// lost, reaches the node.
		return append(out, s.Step(now, gotWake{})...)
	case *bcdv1.ClientFrame_Accepted, *bcdv1.ClientFrame_Started, *bcdv1.ClientFrame_Outcome, *bcdv1.ClientFrame_Events,
		*bcdv1.ClientFrame_SpecStatus, *bcdv1.ClientFrame_Inventory, *bcdv1.ClientFrame_Conditions:
		return []sessionOutput{askRecord{frame}}
	case *bcdv1.ClientFrame_Progress:
		if _, ok := s.outstanding[body.Progress.GetCommandId()]; ok {
			return []sessionOutput{doProgress{body.Progress}}
		}
		return nil
	case *bcdv1.ClientFrame_SecretRequest:
		if now.Sub(s.secretWindow) >= time.Minute {
			s.secretWindow, s.secretCount = now, 0
		}
		if s.secretCount++; s.secretCount > maxSecretRequests {
			return s.malformed(now, "more than %d secret requests in a minute", maxSecretRequests)
		}
		return []sessionOutput{askSecret{body.SecretRequest}}
	case *bcdv1.ClientFrame_ProbeAnswer:
		return []sessionOutput{doProbeAnswered{body.ProbeAnswer.GetSequence()}}
	case *bcdv1.ClientFrame_Goodbye:
		return s.end("the node said goodbye: " + clip(body.Goodbye.GetReason(), maxNameBytes))
	case nil:
		if frame.GetCritical() {
			return s.malformed(now, "a frame of a kind that this gateway does not know is marked critical; upgrade the gateway")
		}
	}
	s.unknown++
	return nil
}

func (s *sessionCore) greet(now time.Time, hello *bcdv1.Hello) []sessionOutput {
	switch {
	case hello == nil:
		return s.malformed(now, "the first frame must be Hello")
	case hello.GetProtocolMin() > protocolVersion || hello.GetProtocolMax() < protocolVersion:
		return s.reject(now, &bcdv1.Reject{
			Code:   bcdv1.RejectCode_REJECT_CODE_UPGRADE_REQUIRED,
			Detail: fmt.Sprintf("the daemon speaks protocol %d to %d, this gateway %d; upgrade the older of the two", hello.GetProtocolMin(), hello.GetProtocolMax(), protocolVersion),
		})
	case hello.GetNodeId() != s.peer.NodeID:
		return s.malformed(now, "Hello says node %.80q, the certificate %s", hello.GetNodeId(), s.peer.NodeID)
	case hello.GetRole() != s.peer.Role:
		return s.malformed(now, "Hello says role %s, the certificate %s", word(hello.GetRole()), word(s.peer.Role))
	case !idLike(hello.GetBootId()) || !idLike(hello.GetJournalId()):
		return s.malformed(now, "Hello needs a boot id and a journal id of 1 to %d characters", maxNameBytes)
	case len(hello.GetVersion()) > maxNameBytes || len(hello.GetKinds()) > 256 || len(hello.GetCapabilities()) > 256 ||
		len(hello.GetInventoryHashes()) > maxSections || len(hello.GetUnfinishedCommands()) > 10000 || len(hello.GetHardwareKeyHash()) > 64:
		return s.malformed(now, "Hello has more or longer entries than allowed")
	case hello.GetLastEpoch() < 0 || hello.GetLastEpoch() > 1<<53 || hello.GetJournalSequence() < 0:
		return s.malformed(now, "Hello has an epoch or a sequence that cannot be")
	}
	for _, kind := range hello.GetKinds() {
		if len(kind) > maxNameBytes {
			return s.malformed(now, "Hello has more or longer entries than allowed")
		}
	}
	s.hello, s.phase = hello, probing
	return []sessionOutput{askProbe{hello}}
}

func idLike(id string) bool {
	if id == "" || len(id) > maxNameBytes {
		return false
	}
	for _, r := range id {
		if r <= ' ' || r > '~' {
			return false
		}
	}
	return true
}

func (s *sessionCore) welcome(now time.Time, o *opened) []sessionOutput {
	s.phase, s.epoch, s.lastFrame = live, o.Epoch, now
	s.specSent = s.hello.GetAcceptedGeneration()
	out := []sessionOutput{s.send(urgent, &bcdv1.ServerFrame{Critical: true, Body: &bcdv1.ServerFrame_Welcome{Welcome: &bcdv1.Welcome{
		Epoch: o.Epoch, ServerTimeMs: now.UnixMilli(), HeartbeatIntervalMs: int32(heartbeatInterval.Milliseconds()),
		Credits: &bcdv1.LaneCounts{
			Control:   int32(laneCredits[bcdv1.Lane_LANE_CONTROL]),
			Provision: int32(laneCredits[bcdv1.Lane_LANE_PROVISION]),
			Bulk:      int32(laneCredits[bcdv1.Lane_LANE_BULK]),
		},
		ResumeSequence: o.Resume, ReconnectSpreadMs: int32(s.spread().Milliseconds()),
		Limits:  &bcdv1.Limits{CommandBytes: maxCommandBytes, SpecBytes: maxSpecBytes, ResultBytes: maxResultBytes, EventBytes: maxEventBytes},
		Gateway: s.gateway, Protocol: protocolVersion, MachineId: o.MachineID, MachineName: o.MachineName, WantInventory: o.Want, Site: o.Site,
	}}})}
	has := map[string]bool{}
	for _, id := range s.hello.GetUnfinishedCommands() {
		has[id] = true
	}
	for _, c := range o.Redeliver {
		s.outstanding[c.ID] = c.Lane
		// What the node has it answers for by itself; the rest may have been
		// lost on the way, and its journal tells a duplicate.
		if !has[c.ID] {
			out = append(out, s.command(c)...)
		}
		if c.Cancelled {
			out = append(out, s.cancel(c)...)
		}
	}
	if o.Spec != nil && o.Spec.Generation > s.specSent {
		out = append(out, s.sendSpec(o.Spec)...)
	}
	return append(out, askClaim{s.room(now)})
}

func (s *sessionCore) command(c *Command) []sessionOutput {
	signed := new(bcdv1.Signed)
	if err := proto.Unmarshal(c.Signed, signed); err != nil {
		return nil
	}
	return []sessionOutput{s.send(work, &bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_Command{Command: signed}})}
}

func (s *sessionCore) cancel(c *Command) []sessionOutput {
	if s.cancelled[c.ID] {
		return nil
	}
	s.cancelled[c.ID] = true
	return []sessionOutput{s.send(work, &bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_Cancel{Cancel: &bcdv1.Cancel{CommandId: c.ID, Reason: c.CancelReason}}})}
}

func (s *sessionCore) sendSpec(spec *Spec) []sessionOutput {
	signed := new(bcdv1.Signed)
	if err := proto.Unmarshal(spec.Signed, signed); err != nil {
		return nil
	}
	s.specSent = spec.Generation
	return []sessionOutput{s.send(work, &bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_Spec{Spec: signed}})}
}

func (s *sessionCore) claimed(in gotClaimed) []sessionOutput {
	if s.phase != live {
		return nil
	}
	var out []sessionOutput
	for _, c := range in.send {
		s.outstanding[c.ID] = c.Lane
		out = append(out, s.command(c)...)
	}
	for _, c := range in.cancel {
		out = append(out, s.cancel(c)...)
	}
	return out
}

// committed answers a frame that is durable now.
func (s *sessionCore) committed(now time.Time, in gotCommitted) []sessionOutput {
	if s.phase != live {
		return nil
	}
	switch body := in.frame.GetBody().(type) {
	case *bcdv1.ClientFrame_Accepted:
		id := body.Accepted.GetCommandId()
		if body.Accepted.GetUnknown() {
			delete(s.outstanding, id)
			delete(s.cancelled, id)
			break
		}
		if body.Accepted.GetRejection() != bcdv1.Rejection_REJECTION_LANE_FULL {
			return nil
		}
		if lane, ok := s.outstanding[id]; ok {
			delete(s.outstanding, id)
			s.blockedUntil[lane] = now.Add(laneBlock)
		}
	case *bcdv1.ClientFrame_Outcome:
		id := body.Outcome.GetCommandId()
		delete(s.outstanding, id)
		delete(s.cancelled, id)
		out := []sessionOutput{s.send(urgent, &bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_OutcomeAck{OutcomeAck: &bcdv1.OutcomeAck{CommandId: id}}})}
		if s.draining {
			return out
		}
		return append(out, askClaim{s.room(now)})
	case *bcdv1.ClientFrame_Events:
		if in.acknowledged == 0 {
			return nil
		}
		return []sessionOutput{s.send(urgent, &bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_EventAck{EventAck: &bcdv1.EventAck{JournalId: body.Events.GetJournalId(), Sequence: in.acknowledged}}})}
	default:
		return nil
	}
	if s.draining {
		return nil
	}
	return []sessionOutput{askClaim{s.room(now)}}
}
