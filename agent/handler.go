package agent

import (
	"errors"
	"fmt"

	"github.com/better-compute/bcd/agent/journal"
	"github.com/better-compute/bcd/agent/session"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// handler is the agent as its session sees it.
type handler struct{ *Agent }

// Hello says what this node is and what it has.
func (h handler) Hello() *bcdv1.Hello {
	a := h.Agent
	lost, _ := a.deps.Journal.Lost()
	hello := &bcdv1.Hello{
		NodeId: a.config.NodeID, Role: a.config.Role, BootId: a.config.BootID, Version: a.config.Version,
		HardwareKeyHash: a.config.HardwareKeyHash, Kinds: a.dispatcher.Kinds(), Capabilities: a.config.Capabilities,
		JournalId: a.deps.Journal.ID(), JournalSequence: a.deps.Journal.Sequence(), JournalLost: lost,
		UnfinishedCommands: a.dispatcher.Unfinished(), InventoryHashes: a.inventoryHashes(),
		WallClockMs: a.deps.Clock.Now().UnixMilli(),
	}
	if a.deps.Converger != nil {
		status := a.deps.Converger.Status()
		hello.AcceptedGeneration, hello.ObservedGeneration = status.GetAcceptedGeneration(), status.GetObservedGeneration()
	}
	return hello
}

// Heartbeat says how full this node is.
func (h handler) Heartbeat() *bcdv1.Heartbeat {
	a := h.Agent
	stats := a.deps.Journal.Stats()
	a.checkJournal(stats)
	a.pump()
	beat := &bcdv1.Heartbeat{
		Free: a.dispatcher.Free(), JournalEvents: int64(stats.Events), JournalBytes: stats.Bytes,
		WallClockMs: a.deps.Clock.Now().UnixMilli(),
	}
	if a.deps.Converger != nil {
		beat.ObservedGeneration = a.deps.Converger.Status().GetObservedGeneration()
	}
	return beat
}

func (h handler) Prove(c *bcdv1.IdentityChallenge) (*bcdv1.IdentityProof, error) {
	if h.deps.Prove == nil {
		return nil, errors.New("this daemon was put together without a key for challenges")
	}
	return h.deps.Prove(c)
}

// Up takes a Welcome: the loss of a journal is settled before any command
// comes, and everything unacknowledged is sent again.
func (h handler) Up(w *bcdv1.Welcome) {
	a := h.Agent
	a.mu.Lock()
	select {
	case <-a.connected:
	default:
		close(a.connected)
		a.lost = make(chan struct{})
	}
	a.machine = machine{w.GetMachineId(), w.GetMachineName(), w.GetSite()}
	a.refusal = ""
	a.mu.Unlock()
	j := a.deps.Journal
	if err := j.SettleLoss(w.GetServerTimeMs()); err != nil {
		a.deps.Log.Error("journal", "error", err)
	}
	if err := j.SetEpoch(w.GetEpoch()); err != nil {
		a.deps.Log.Error("journal", "error", err)
	}
	if a.deps.OnSession != nil {
		a.deps.OnSession(true)
	}
	a.dispatcher.Connected()
	a.sendConditions()
	a.SpecChanged()
	a.resume(w.GetResumeSequence())
	a.wanted(w.GetWantInventory())
}

func (h handler) Down(error) {
	a := h.Agent
	a.mu.Lock()
	select {
	case <-a.lost:
	default:
		close(a.lost)
		a.connected = make(chan struct{})
	}
	a.mu.Unlock()
	a.unsent()
	if a.deps.OnSession != nil {
		a.deps.OnSession(false)
	}
}

func (h handler) Refused(r *bcdv1.Reject) {
	a := h.Agent
	a.mu.Lock()
	a.refusal = session.RejectWord(r.GetCode()) + ": " + r.GetDetail()
	a.mu.Unlock()
	if r.GetCode() == bcdv1.RejectCode_REJECT_CODE_REVOKED {
		a.revoke(r.GetDetail())
	}
}

// revoke: nothing new begins and no secret is asked for; what runs goes on.
func (a *Agent) revoke(reason string) {
	if reason == "" {
		reason = "no reason was given"
	}
	a.mu.Lock()
	already := a.revoked != ""
	a.revoked = reason
	a.mu.Unlock()
	if already {
		return
	}
	a.deps.Log.Error("this node's identity was revoked: nothing new begins", "reason", reason)
	a.dispatcher.SetRevoked(true)
	a.Event(journal.Durable, "identity.revoked", "", "the gateway revoked this node: "+reason, nil)
}

// Frame takes a frame of the session.
func (h handler) Frame(frame *bcdv1.ServerFrame) {
	a := h.Agent
	switch body := frame.GetBody().(type) {
	case *bcdv1.ServerFrame_Command:
		a.dispatcher.Offer(body.Command)
	case *bcdv1.ServerFrame_Cancel:
		a.dispatcher.Cancel(body.Cancel.GetCommandId(), body.Cancel.GetReason())
	case *bcdv1.ServerFrame_OutcomeAck:
		a.dispatcher.Acked(body.OutcomeAck.GetCommandId())
	case *bcdv1.ServerFrame_EventAck:
		a.eventsAcked(body.EventAck)
	case *bcdv1.ServerFrame_Spec:
		a.offerSpec(body.Spec)
	case *bcdv1.ServerFrame_SecretAnswer:
		if a.deps.Secrets != nil {
			if err := a.deps.Secrets.Answer(body.SecretAnswer); err != nil {
				a.deps.Log.Warn("secret answer", "error", err)
			}
		}
	case *bcdv1.ServerFrame_Revoked:
		a.revoke(body.Revoked.GetReason())
	default:
		a.deps.Log.Warn("ignored a frame", "error", fmt.Sprintf("%T is not for the agent", body))
	}
}

// offerSpec gives a spec to the converger, which makes it durable before it
// says so.
func (a *Agent) offerSpec(signed *bcdv1.Signed) {
	if a.deps.Converger == nil {
		a.session.Send(session.Events, &bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_SpecStatus{SpecStatus: &bcdv1.SpecStatus{
			Refused: "a daemon of this role converges to no spec",
		}}})
		return
	}
	if err := a.deps.Converger.Offer(signed); err != nil {
		a.deps.Log.Warn("spec", "error", err)
	}
	a.SpecChanged()
}

// SpecChanged reports the converger's status; the converger's OnChange calls
// it.
func (a *Agent) SpecChanged() {
	if a.deps.Converger == nil {
		return
	}
	if status := a.deps.Converger.Status(); status != nil {
		a.session.Send(session.Events, &bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_SpecStatus{SpecStatus: status}})
	}
}
