package gateway_test

import (
	"testing"

	"connectrpc.com/connect"

	"github.com/better-compute/bcd/agent/intent"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	succeeded     = bcdv1.OutcomeStatus_OUTCOME_STATUS_SUCCEEDED
	indeterminate = bcdv1.OutcomeStatus_OUTCOME_STATUS_INDETERMINATE
	cancelled     = bcdv1.OutcomeStatus_OUTCOME_STATUS_CANCELLED
	expired       = bcdv1.OutcomeStatus_OUTCOME_STATUS_EXPIRED
)

func TestCommandFromOperatorToNodeAndBack(t *testing.T) {
	w := newWorld(t)
	m := w.join("rack1-u1", node)
	d := m.connect(nil)
	if d.welcome.GetHeartbeatIntervalMs() != 15000 || d.welcome.GetCredits().GetControl() < 4 || d.welcome.GetMachineName() != "rack1-u1" || d.welcome.GetServerTimeMs() == 0 {
		t.Errorf("welcome: %v", d.welcome)
	}
	sent := w.ping("rack1-u1")
	signed := expect(d, "a command", func(f *bcdv1.ServerFrame) (*bcdv1.Signed, bool) { return f.GetCommand(), f.GetCommand() != nil })
	c, err := intent.FromRoots(w.keys.Roots).Command(signed, w.now())
	if err != nil || c.GetId() != sent.GetId() || c.GetNodeId() != m.nodeID || c.GetKind() != "diag.ping" {
		t.Fatalf("command %v, %v; want %s for %s, signed", c, err, sent.GetId(), m.nodeID)
	}
	d.accept(c.GetId())
	d.started(c.GetId())
	d.outcome(c.GetId(), succeeded, "pong")
	d.acked(c.GetId())
	got := w.get(c.GetId())
	if got.GetState() != bcdv1.CommandState_COMMAND_STATE_ENDED || got.GetOutcome().GetStatus() != succeeded || got.GetOutcome().GetMessage() != "pong" {
		t.Errorf("the operator sees %v", got)
	}
	// The first outcome is the only one.
	d.outcome(c.GetId(), bcdv1.OutcomeStatus_OUTCOME_STATUS_FAILED, "no, it failed")
	d.acked(c.GetId())
	if got := w.get(c.GetId()); got.GetOutcome().GetStatus() != succeeded {
		t.Errorf("a second outcome replaced the first: %v", got)
	}
	view := w.machine("SN-rack1-u1")
	if view.GetMachine().GetState() != "installed" || !hasEntry(view.GetTimeline(), "command.finished", "diag.ping succeeded", "pong") {
		t.Errorf("machine %v, timeline %s", view.GetMachine(), dump(view.GetTimeline()))
	}
}

func TestHelloIsRefused(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	for _, test := range []struct {
		name   string
		code   bcdv1.RejectCode
		change func(*bcdv1.Hello)
	}{
		{"newer protocol", bcdv1.RejectCode_REJECT_CODE_UPGRADE_REQUIRED, func(h *bcdv1.Hello) { h.ProtocolMin, h.ProtocolMax = 7, 9 }},
		{"another node", bcdv1.RejectCode_REJECT_CODE_MALFORMED, func(h *bcdv1.Hello) { h.NodeId = "node_other" }},
		{"another role", bcdv1.RejectCode_REJECT_CODE_MALFORMED, func(h *bcdv1.Hello) { h.Role = ramdisk }},
		{"no boot id", bcdv1.RejectCode_REJECT_CODE_MALFORMED, func(h *bcdv1.Hello) { h.BootId = "" }},
		{"no journal id", bcdv1.RejectCode_REJECT_CODE_MALFORMED, func(h *bcdv1.Hello) { h.JournalId = "" }},
		{"absurd epoch", bcdv1.RejectCode_REJECT_CODE_MALFORMED, func(h *bcdv1.Hello) { h.LastEpoch = -1 }},
	} {
		t.Run(test.name, func(t *testing.T) {
			first := m.dial().hello(test.change)
			if got := first.GetReject(); got.GetCode() != test.code || got.GetDetail() == "" || got.GetServerTimeMs() == 0 {
				t.Errorf("answer %v, want %v with a sentence and the time", first, test.code)
			}
		})
	}
	t.Run("not Hello", func(t *testing.T) {
		d := m.dial()
		if err := d.stream.Send(&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Heartbeat{Heartbeat: &bcdv1.Heartbeat{}}}); err != nil {
			t.Fatal(err)
		}
		go d.read()
		d.rejected(bcdv1.RejectCode_REJECT_CODE_MALFORMED)
	})
	t.Run("no certificate", func(t *testing.T) {
		d := m.dialOver(w.client(nil))
		_ = d.stream.Send(m.helloFrame(nil))
		if _, err := d.stream.Receive(); connect.CodeOf(err) != connect.CodeUnauthenticated {
			t.Errorf("session without a certificate: %v", err)
		}
	})
	t.Run("expired", func(t *testing.T) {
		old := w.join("b", node)
		w.advance(25 * 60 * 60 * 1e9)
		defer w.advance(-25 * 60 * 60 * 1e9)
		d := old.dial()
		_ = d.stream.Send(old.helloFrame(nil))
		go d.read()
		d.rejected(bcdv1.RejectCode_REJECT_CODE_IDENTITY_EXPIRED)
	})
	t.Run("revoked", func(t *testing.T) {
		d := m.connect(nil)
		if _, err := w.op.RevokeNode(t.Context(), connect.NewRequest(&bcdv1.RevokeNodeRequest{NodeId: m.nodeID, Reason: "stolen"})); err != nil {
			t.Fatal(err)
		}
		expect(d, "Revoked", func(f *bcdv1.ServerFrame) (bool, bool) { return true, f.GetRevoked() != nil })
		first := m.dial().hello(nil)
		if first.GetReject().GetCode() != bcdv1.RejectCode_REJECT_CODE_REVOKED {
			t.Errorf("a revoked node got %v", first)
		}
	})
}

// TestRedelivery: what was sent and not answered for is sent again to the same
// journal, and not what the node says it has.
func TestRedelivery(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	d := m.connect(nil)
	first, second := w.ping("a"), w.ping("a")
	for range 2 {
		d.command()
	}
	d.accept(second.GetId())
	d.started(second.GetId())
	d.heartbeat()
	d.close()

	d = m.connect(func(h *bcdv1.Hello) { h.UnfinishedCommands = []string{second.GetId()} })
	if c := d.command(); c.GetId() != first.GetId() {
		t.Errorf("redelivered %s, want %s", c.GetId(), first.GetId())
	}
	third := w.ping("a")
	if c := d.command(); c.GetId() != third.GetId() {
		t.Errorf("then came %s, want %s", c.GetId(), third.GetId())
	}
	for _, c := range []*bcdv1.CommandInfo{first, second, third} {
		d.outcome(c.GetId(), succeeded, "")
		d.acked(c.GetId())
	}
}

// TestJournalLost: what may have begun ends as INDETERMINATE and is never sent
// again; what was never sent goes to the new journal.
func TestJournalLost(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	d := m.connect(nil)
	sent, started := w.ping("a"), w.ping("a")
	for range 2 {
		d.command()
	}
	d.started(started.GetId())
	d.heartbeat()
	d.close()
	w.waitFor("lost", func(e *bcdv1.TimelineEntry) bool { return e.GetType() == "lost" })
	queued := w.ping("a")

	d = m.connect(func(h *bcdv1.Hello) { h.BootId, h.JournalId = "boot-2", "journal-2" })
	if c := d.command(); c.GetId() != queued.GetId() {
		t.Errorf("got %s after the journal was lost, want only %s", c.GetId(), queued.GetId())
	}
	for _, c := range []*bcdv1.CommandInfo{sent, started} {
		if got := w.get(c.GetId()); got.GetOutcome().GetStatus() != indeterminate {
			t.Errorf("%s: %v, want INDETERMINATE", c.GetId(), got)
		}
	}
	// The same identity with the old journal again: it is the clone now.
	if first := m.dial().hello(nil); first.GetReject().GetCode() != bcdv1.RejectCode_REJECT_CODE_DUPLICATE_IDENTITY {
		t.Errorf("a return to the earlier boot got %v", first)
	}
}

func TestOldEpochHasNoEffect(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	d := m.connect(nil)
	c := w.ping("a")
	d.command()
	d.sendRaw(&bcdv1.ClientFrame{Epoch: d.epoch - 1, Body: &bcdv1.ClientFrame_Outcome{Outcome: &bcdv1.Outcome{CommandId: c.GetId(), Status: succeeded}}})
	d.sendRaw(&bcdv1.ClientFrame{Epoch: d.epoch + 1, Body: &bcdv1.ClientFrame_Outcome{Outcome: &bcdv1.Outcome{CommandId: c.GetId(), Status: succeeded}}})
	d.heartbeat()
	if got := w.get(c.GetId()); got.GetState() != bcdv1.CommandState_COMMAND_STATE_SENT {
		t.Errorf("frames of other epochs had an effect: %v", got)
	}
	// The same daemon again: its first session ends, and its epoch with it.
	again := m.connect(func(h *bcdv1.Hello) { h.LastEpoch = 41 })
	if again.epoch != 42 {
		t.Errorf("epoch %d after the node had seen 41", again.epoch)
	}
	for d.next() != nil {
	}
}

func TestEventsAreStoredOnce(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	d := m.connect(nil)
	batch := func(journal string, from, to int64) {
		b := &bcdv1.EventBatch{JournalId: journal}
		for s := from; s <= to; s++ {
			b.Events = append(b.Events, &bcdv1.Event{Sequence: s, Type: "t", Message: "event of " + journal})
		}
		d.send(&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Events{Events: b}})
	}
	acked := func(want int64) {
		t.Helper()
		got := expect(d, "an event ack", func(f *bcdv1.ServerFrame) (int64, bool) {
			return f.GetEventAck().GetSequence(), f.GetEventAck() != nil
		})
		if got != want {
			t.Errorf("acknowledged up to %d, want %d", got, want)
		}
	}
	batch("journal-1", 1, 3)
	acked(3)
	batch("journal-1", 2, 5)
	acked(5)
	batch("journal-x", 1, 9)
	batch("journal-1", 8, 9) // 6 and 7 are still to come
	acked(5)
	d.close()
	d = m.connect(nil)
	if d.welcome.GetResumeSequence() != 5 {
		t.Errorf("resume from %d, want 5", d.welcome.GetResumeSequence())
	}
	batch("journal-1", 1, 7)
	acked(7)
	events := 0
	for _, e := range w.machine("a").GetTimeline() {
		if e.GetType() == "event" {
			events++
		}
	}
	if events != 7 {
		t.Errorf("%d events in the timeline, want 7", events)
	}
}

func TestLaneFullIsTriedAgain(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	d := m.connect(nil)
	c := w.ping("a")
	d.command()
	d.send(&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Accepted{Accepted: &bcdv1.CommandAccepted{CommandId: c.GetId(), Rejection: bcdv1.Rejection_REJECTION_LANE_FULL}}})
	if again := d.command(); again.GetId() != c.GetId() {
		t.Errorf("then came %s", again.GetId())
	}
}

func TestCreditsAreNeverExceeded(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	d := m.connect(nil)
	credits := int(d.welcome.GetCredits().GetControl())
	for range credits + 5 {
		w.ping("a")
	}
	var got []string
	for range credits {
		got = append(got, d.command().GetId())
	}
	d.heartbeat()
	select {
	case f := <-d.frames:
		t.Fatalf("beyond the credits came %v", f)
	default:
	}
	d.outcome(got[0], succeeded, "")
	d.command()
}

func TestCancel(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	cancel := func(id string) *bcdv1.CommandInfo {
		t.Helper()
		answer, err := w.op.CancelCommand(t.Context(), connect.NewRequest(&bcdv1.CancelCommandRequest{Id: id, Reason: "changed my mind"}))
		if err != nil {
			t.Fatal(err)
		}
		return answer.Msg.GetCommand()
	}
	// Before the node was ever there.
	m.connect(nil).close()
	w.waitFor("lost", func(e *bcdv1.TimelineEntry) bool { return e.GetType() == "lost" })
	if got := cancel(w.ping("a").GetId()); got.GetOutcome().GetStatus() != cancelled {
		t.Errorf("a queued command, cancelled: %v", got)
	}
	d := m.connect(nil)
	running := w.ping("a")
	d.command()
	d.accept(running.GetId())
	d.started(running.GetId())
	cancel(running.GetId())
	asked := expect(d, "a cancel", func(f *bcdv1.ServerFrame) (*bcdv1.Cancel, bool) { return f.GetCancel(), f.GetCancel() != nil })
	if asked.GetCommandId() != running.GetId() || asked.GetReason() != "changed my mind" {
		t.Errorf("cancel: %v", asked)
	}
	d.outcome(running.GetId(), cancelled, "interrupted")
	d.acked(running.GetId())

	unknown := w.ping("a")
	d.command()
	cancel(unknown.GetId())
	d.send(&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Accepted{Accepted: &bcdv1.CommandAccepted{CommandId: unknown.GetId(), Unknown: true}}})
	d.heartbeat()
	if got := w.get(unknown.GetId()); got.GetOutcome().GetStatus() != cancelled {
		t.Errorf("a cancelled command that the node never had: %v", got)
	}
}

func TestExpiry(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	d := m.connect(nil)
	sent := w.ping("a")
	d.command()
	d.close()
	w.waitFor("lost", func(e *bcdv1.TimelineEntry) bool { return e.GetType() == "lost" })
	queued := w.ping("a")
	w.advance(20 * 60 * 1e9)
	d = m.connect(nil)
	// Redelivered all the same: only the node knows whether it began.
	if c := d.command(); c.GetId() != sent.GetId() {
		t.Errorf("got %s, want %s", c.GetId(), sent.GetId())
	}
	d.heartbeat()
	if got := w.get(queued.GetId()); got.GetOutcome().GetStatus() != expired {
		t.Errorf("a command that was never sent in time: %v", got)
	}
	d.outcome(sent.GetId(), expired, "")
	d.acked(sent.GetId())
}

func TestSpec(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	apply := func(expected int64) (*bcdv1.NodeSpec, error) {
		answer, err := w.op.ApplySpec(t.Context(), connect.NewRequest(&bcdv1.ApplySpecRequest{
			Machine: "a", ExpectedGeneration: expected, Spec: &bcdv1.NodeSpec{NodeId: "forged", Generation: 99, Host: &bcdv1.HostSpec{Modules: []string{"vfio"}}},
		}))
		if err != nil {
			return nil, err
		}
		return answer.Msg.GetSpec(), nil
	}
	if s, err := apply(0); err != nil || s.GetGeneration() != 1 || s.GetNodeId() != m.nodeID {
		t.Fatalf("spec %v, %v", s, err)
	}
	d := m.connect(nil)
	spec := func() *bcdv1.NodeSpec {
		t.Helper()
		signed := expect(d, "a spec", func(f *bcdv1.ServerFrame) (*bcdv1.Signed, bool) { return f.GetSpec(), f.GetSpec() != nil })
		s, err := intent.FromRoots(w.keys.Roots).NodeSpec(signed, w.now())
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	if s := spec(); s.GetGeneration() != 1 || s.GetHost().GetModules()[0] != "vfio" {
		t.Errorf("spec at Welcome: %v", s)
	}
	if _, err := apply(7); connect.CodeOf(err) != connect.CodeAborted {
		t.Errorf("a wrong expected generation: %v", err)
	}
	if _, err := apply(1); err != nil {
		t.Fatal(err)
	}
	if s := spec(); s.GetGeneration() != 2 {
		t.Errorf("spec while connected: %v", s)
	}
	d.send(&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_SpecStatus{SpecStatus: &bcdv1.SpecStatus{AcceptedGeneration: 2, ObservedGeneration: 2}}})
	d.send(&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_SpecStatus{SpecStatus: &bcdv1.SpecStatus{AcceptedGeneration: 2, ObservedGeneration: 1, Sections: []*bcdv1.SectionStatus{
		{Name: "host", State: bcdv1.SectionState_SECTION_STATE_FAILED, Message: "no such module"},
	}}}})
	d.heartbeat()
	answer, err := w.op.GetSpec(t.Context(), connect.NewRequest(&bcdv1.GetSpecRequest{Machine: "a"}))
	if err != nil || answer.Msg.GetStatus().GetObservedGeneration() != 2 || answer.Msg.GetSpec().GetGeneration() != 2 {
		t.Errorf("spec %v, %v; the observed generation must not go back from 2", answer.Msg, err)
	}
	if timeline := w.machine("a").GetTimeline(); !hasEntry(timeline, "spec", "host", "no such module") || !hasEntry(timeline, "spec", "generation 2 is in effect") {
		t.Error(dump(timeline))
	}
}
