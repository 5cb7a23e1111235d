package gateway

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	queuedState   = bcdv1.CommandState_COMMAND_STATE_QUEUED
	sentState     = bcdv1.CommandState_COMMAND_STATE_SENT
	acceptedState = bcdv1.CommandState_COMMAND_STATE_ACCEPTED
	startedState  = bcdv1.CommandState_COMMAND_STATE_STARTED
	endedState    = bcdv1.CommandState_COMMAND_STATE_ENDED

	didSucceed    = bcdv1.OutcomeStatus_OUTCOME_STATUS_SUCCEEDED
	didFail       = bcdv1.OutcomeStatus_OUTCOME_STATUS_FAILED
	didExpire     = bcdv1.OutcomeStatus_OUTCOME_STATUS_EXPIRED
	wasCancelled  = bcdv1.OutcomeStatus_OUTCOME_STATUS_CANCELLED
	indeterminate = bcdv1.OutcomeStatus_OUTCOME_STATUS_INDETERMINATE
	noOutcome     = bcdv1.OutcomeStatus_OUTCOME_STATUS_UNSPECIFIED
)

var epochStart = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func TestLedger(t *testing.T) {
	deadline := epochStart.Add(time.Hour)
	late := deadline.Add(time.Minute)
	for _, test := range []struct {
		name    string
		state   bcdv1.CommandState
		now     time.Time
		in      ledgerInput
		want    bcdv1.CommandState
		outcome bcdv1.OutcomeStatus
	}{
		{"sent", queuedState, epochStart, inSent{"j"}, sentState, noOutcome},
		{"sent twice", sentState, epochStart, inSent{"j"}, sentState, noOutcome},
		{"accepted", sentState, epochStart, inAccepted{}, acceptedState, noOutcome},
		{"accepted after it started", startedState, epochStart, inAccepted{}, startedState, noOutcome},
		{"started", acceptedState, epochStart, inStarted{}, startedState, noOutcome},
		{"started, and the acceptance was lost", sentState, epochStart, inStarted{}, startedState, noOutcome},
		{"no room", sentState, epochStart, inReturned{}, queuedState, noOutcome},
		{"no room, but it had started", startedState, epochStart, inReturned{}, startedState, noOutcome},
		{"outcome", startedState, epochStart, inOutcome{&bcdv1.Outcome{Status: didSucceed}}, endedState, didSucceed},
		{"outcome of one that this store thinks unsent", queuedState, epochStart, inOutcome{&bcdv1.Outcome{Status: didFail}}, endedState, didFail},
		{"cancel before it was sent", queuedState, epochStart, inCancel{}, endedState, wasCancelled},
		{"cancel after", sentState, epochStart, inCancel{}, sentState, noOutcome},
		{"not known, without a cancel", sentState, epochStart, inNotKnown{}, sentState, noOutcome},
		{"journal lost, never sent", queuedState, epochStart, inJournalLost{}, queuedState, noOutcome},
		{"journal lost, sent", sentState, epochStart, inJournalLost{}, endedState, indeterminate},
		{"journal lost, accepted", acceptedState, epochStart, inJournalLost{}, endedState, indeterminate},
		{"journal lost, started", startedState, epochStart, inJournalLost{}, endedState, indeterminate},
		{"node gone, never sent", queuedState, epochStart, inNodeGone{}, endedState, wasCancelled},
		{"node gone, started", startedState, epochStart, inNodeGone{}, endedState, indeterminate},
		{"in time", queuedState, epochStart, inClock{}, queuedState, noOutcome},
		{"late, never sent", queuedState, late, inClock{}, endedState, didExpire},
		{"late, sent", sentState, late, inClock{}, sentState, noOutcome},
		{"silent for a day", sentState, late.Add(24 * time.Hour), inClock{}, endedState, indeterminate},
		{"silent for a day, but heard since", sentState, late.Add(24 * time.Hour), inClock{LastSeenMS: late.Add(time.Hour).UnixMilli()}, sentState, noOutcome},
		{"long running, and connected", startedState, late.Add(72 * time.Hour), inClock{Connected: true}, startedState, noOutcome},
	} {
		c := Command{ID: "cmd_1", Kind: "diag.ping", State: test.state, DeadlineMS: deadline.UnixMilli()}
		next, _, changed := ledgerStep(test.now, c, test.in)
		if next.State != test.want || next.outcome().GetStatus() != test.outcome {
			t.Errorf("%s: %v with %v, want %v with %v", test.name, next.State, next.outcome().GetStatus(), test.want, test.outcome)
		}
		if !changed && (next.State != test.state || len(next.Outcome) != 0) {
			t.Errorf("%s: changed, and says that it did not", test.name)
		}
	}
}

// TestOneOutcome: whatever happens in whatever order, a command ends once, and
// then nothing of it changes.
func TestOneOutcome(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := epochStart
		c := Command{ID: "cmd_1", Kind: "diag.ping", State: queuedState, DeadlineMS: epochStart.Add(time.Hour).UnixMilli()}
		var end []byte
		sent := false
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 7200).Draw(t, "seconds")) * time.Second)
			in := rapid.SampledFrom([]ledgerInput{
				inSent{"j"}, inAccepted{}, inStarted{}, inReturned{}, inOutcome{&bcdv1.Outcome{Status: didSucceed}}, inOutcome{&bcdv1.Outcome{Status: didFail}},
				inCancel{"x"}, inNotKnown{}, inJournalLost{"x"}, inNodeGone{"x"}, inClock{}, inClock{Connected: true},
			}).Draw(t, "input")
			next, _, changed := ledgerStep(now, c, in)
			if c.State == endedState && (changed || string(next.Outcome) != string(end)) {
				t.Fatalf("%T changed an ended command", in)
			}
			if next.State == endedState && c.State != endedState {
				end = next.Outcome
				status := next.outcome().GetStatus()
				_, byNode := in.(inOutcome)
				if sent && !byNode && (status == didExpire || status == wasCancelled) {
					if _, ok := in.(inNotKnown); !ok {
						t.Fatalf("%T ended a command that the node may be running as %v", in, status)
					}
				}
			}
			sent = next.State != queuedState && next.State != endedState
			c = next
		}
	})
}

func newTestCore(now time.Time) *sessionCore {
	peer := &Peer{NodeID: "node_1", Role: bcdv1.Role_ROLE_NODE, NotAfter: now.Add(24 * time.Hour)}
	return newSessionCore(now, "gw", peer, func() time.Duration { return time.Second })
}

func helloFrame() *bcdv1.ClientFrame {
	return &bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Hello{Hello: &bcdv1.Hello{
		ProtocolMin: 1, ProtocolMax: 1, NodeId: "node_1", Role: bcdv1.Role_ROLE_NODE, BootId: "b", JournalId: "j",
	}}}
}

// liveCore is a session that has sent its Welcome.
func liveCore(now time.Time) *sessionCore {
	s := newTestCore(now)
	s.Step(now, gotFrame{helloFrame()})
	s.Step(now, gotProbed{})
	s.Step(now, gotOpened{opened: &opened{Epoch: 7}})
	return s
}

func ended(outputs []sessionOutput) (reason string, reject *bcdv1.Reject) {
	for _, o := range outputs {
		switch o := o.(type) {
		case doEnd:
			reason = o.reason
		case doSend:
			if r := o.frame.GetReject(); r != nil {
				reject = r
			}
		}
	}
	return reason, reject
}

func TestSessionDeadlines(t *testing.T) {
	t.Run("no Hello", func(t *testing.T) {
		s := newTestCore(epochStart)
		if out := s.Step(epochStart.Add(helloLimit-time.Millisecond), gotTick{}); len(out) != 0 {
			t.Errorf("too early: %v", out)
		}
		if reason, _ := ended(s.Step(s.deadline(), gotTick{})); reason == "" {
			t.Error("a caller without a Hello is kept")
		}
	})
	t.Run("silence", func(t *testing.T) {
		s := liveCore(epochStart)
		if s.phase != live {
			t.Fatalf("phase %d", s.phase)
		}
		beat := &bcdv1.ClientFrame{Epoch: 7, Body: &bcdv1.ClientFrame_Heartbeat{Heartbeat: &bcdv1.Heartbeat{}}}
		at := epochStart
		for range 100 {
			at = at.Add(16500 * time.Millisecond)
			s.Step(at, gotTick{})
			s.Step(at, gotFrame{beat})
		}
		if s.phase != live {
			t.Fatal("a session with slow but regular heartbeats ended")
		}
		// Frames of an older epoch are no sign of life.
		s.Step(at.Add(silenceLimit-1), gotFrame{&bcdv1.ClientFrame{Epoch: 6, Body: beat.Body}})
		if reason, _ := ended(s.Step(at.Add(silenceLimit), gotTick{})); reason == "" || s.stale != 1 {
			t.Errorf("a silent session is kept; %d stale frames", s.stale)
		}
	})
	t.Run("certificate ends", func(t *testing.T) {
		s := liveCore(epochStart)
		beat := &bcdv1.ClientFrame{Epoch: 7, Body: &bcdv1.ClientFrame_Heartbeat{Heartbeat: &bcdv1.Heartbeat{}}}
		end := s.peer.NotAfter
		for at := epochStart; at.Before(end); at = at.Add(15 * time.Second) {
			s.Step(at, gotFrame{beat})
		}
		if !s.deadline().Equal(end) {
			t.Errorf("wants to be woken at %v, want %v", s.deadline(), end)
		}
		if _, reject := ended(s.Step(end, gotTick{})); reject.GetCode() != bcdv1.RejectCode_REJECT_CODE_IDENTITY_EXPIRED {
			t.Errorf("at NotAfter: %v", reject)
		}
	})
	t.Run("lane full", func(t *testing.T) {
		s := liveCore(epochStart)
		s.outstanding["c"] = bcdv1.Lane_LANE_CONTROL
		s.Step(epochStart, gotCommitted{frame: &bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Accepted{Accepted: &bcdv1.CommandAccepted{
			CommandId: "c", Rejection: bcdv1.Rejection_REJECTION_LANE_FULL,
		}}}})
		if n := s.room(epochStart)[bcdv1.Lane_LANE_CONTROL]; n != 0 {
			t.Errorf("room %d right after LANE_FULL", n)
		}
		if n := s.room(epochStart.Add(laneBlock))[bcdv1.Lane_LANE_CONTROL]; n == 0 {
			t.Error("no room a second later")
		}
	})
}

func TestUnknownFrames(t *testing.T) {
	s := liveCore(epochStart)
	if reason, _ := ended(s.Step(epochStart, gotFrame{&bcdv1.ClientFrame{Epoch: 7}})); reason != "" || s.unknown != 1 {
		t.Errorf("an unknown frame: ended with %q, %d counted", reason, s.unknown)
	}
	if _, reject := ended(s.Step(epochStart, gotFrame{&bcdv1.ClientFrame{Epoch: 7, Critical: true}})); reject.GetCode() != bcdv1.RejectCode_REJECT_CODE_MALFORMED {
		t.Errorf("a critical unknown frame: %v", reject)
	}
}

func TestNames(t *testing.T) {
	for in, want := range map[string]string{
		"Rack1_U2": "rack1-u2", "--x--": "x", "": "", "äöü": "", "a very long product name that goes on": "a-very-long-product-name",
	} {
		if got := shortName(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
	if got := tomlString("a\"b\\c\n"); got != `"a\"b\\c\u000A"` {
		t.Errorf("TOML string %s", got)
	}
	if got := fmt.Sprint(len(kinds) >= 5, kinds["deploy.image"].GetLane()); got != "true LANE_PROVISION" {
		t.Errorf("kinds: %s", got)
	}
}
