package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/journal"
	"github.com/better-compute/bcd/agent/session"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// maxEventJSON and maxEventMessage are the contract's bounds.
	maxEventJSON    = 4 << 10
	maxEventMessage = 1 << 10
	// eventBatch and eventBatchBytes bound one frame of events; one is on its
	// way at a time.
	eventBatch      = 256
	eventBatchBytes = 256 << 10
	// maxHeldEvents bounds the durable events that wait in memory while the
	// journal takes none. Acceptance has stopped long before.
	maxHeldEvents = 1000
)

// events sends the journal's events, one batch at a time.
type events struct {
	mu   sync.Mutex
	sent int64 // highest sequence on its way
	held []*bcdv1.Event
}

// Event records an event and sends it. details, which may be nil, is encoded
// as JSON. It never blocks on the network.
func (a *Agent) Event(class journal.EventClass, eventType, commandID, message string, details any) {
	event := &bcdv1.Event{
		Type: eventType, CommandId: commandID, Message: clip(message, maxEventMessage), TimeMs: a.nowMS(),
	}
	if details != nil {
		body, err := json.Marshal(details)
		switch {
		case err != nil:
			a.deps.Log.Error("event", "kind", eventType, "error", err)
		case len(body) > maxEventJSON:
			event.Json = fmt.Appendf(nil, `{"omitted_bytes":%d}`, len(body))
		default:
			event.Json = body
		}
	}
	a.events.mu.Lock()
	defer a.events.mu.Unlock()
	if class == journal.Durable && len(a.events.held) > 0 {
		a.hold(event) // in order behind those that wait
		return
	}
	_, err := a.deps.Journal.Append(class, event)
	switch {
	case err == nil:
		a.pumpLocked()
	case class == journal.Durable && !errors.Is(err, journal.ErrTooLarge):
		a.hold(event)
		a.deps.Log.Error("event waits in memory", "kind", eventType, "error", err)
	default:
		a.deps.Log.Error("event", "kind", eventType, "error", err)
	}
}

// hold keeps a durable event in memory. The newest of a type and command wins
// at the bound: what is durable here is a change of a level.
func (a *Agent) hold(event *bcdv1.Event) {
	if len(a.events.held) >= maxHeldEvents {
		for n, old := range a.events.held {
			if old.GetType() == event.GetType() {
				a.events.held = append(a.events.held[:n], a.events.held[n+1:]...)
				break
			}
		}
	}
	a.events.held = append(a.events.held, event)
}

// note is the dispatcher's way to Event.
func (a *Agent) note(eventType, commandID, message string) {
	a.Event(journal.Durable, eventType, commandID, message, nil)
}

// resume begins anew on a session: the gateway has everything up to sequence.
func (a *Agent) resume(sequence int64) {
	a.events.mu.Lock()
	defer a.events.mu.Unlock()
	if sequence > a.deps.Journal.AckedSequence() {
		if err := a.deps.Journal.AckEvents(sequence); err != nil {
			// The gateway remembers a longer journal. It says so to its
			// operator; here the events go on under their numbers.
			a.deps.Log.Error("the gateway knows more events than this journal", "error", err)
		}
	}
	a.events.sent = a.deps.Journal.AckedSequence()
	a.pumpLocked()
}

// unsent: what was on its way may not have arrived.
func (a *Agent) unsent() {
	a.events.mu.Lock()
	defer a.events.mu.Unlock()
	a.events.sent = 0
}

func (a *Agent) eventsAcked(ack *bcdv1.EventAck) {
	if ack.GetJournalId() != a.deps.Journal.ID() {
		a.deps.Log.Warn("events of another journal were acknowledged", "journal", ack.GetJournalId())
		return
	}
	a.events.mu.Lock()
	defer a.events.mu.Unlock()
	if err := a.deps.Journal.AckEvents(ack.GetSequence()); err != nil {
		a.deps.Log.Error("events", "error", err)
		return
	}
	a.pumpLocked()
}

// pump sends the next batch when none is on its way.
func (a *Agent) pump() {
	a.events.mu.Lock()
	defer a.events.mu.Unlock()
	a.pumpLocked()
}

func (a *Agent) pumpLocked() {
	e, j := &a.events, a.deps.Journal
	for len(e.held) > 0 {
		if _, err := j.Append(journal.Durable, e.held[0]); err != nil && !errors.Is(err, journal.ErrTooLarge) {
			break
		}
		e.held = e.held[1:]
	}
	if e.sent > j.AckedSequence() || j.Sequence() == j.AckedSequence() {
		return
	}
	list, err := j.Events(j.AckedSequence(), eventBatch, eventBatchBytes)
	if err != nil {
		a.deps.Log.Error("events", "error", err)
		return
	}
	if len(list) == 0 {
		return
	}
	frame := &bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Events{Events: &bcdv1.EventBatch{JournalId: j.ID(), Events: list}}}
	if a.session.Send(session.Events, frame) {
		e.sent = list[len(list)-1].GetSequence()
	}
}

// SetCondition reports a level: its type is its key. Only a change is an
// event; since is kept here.
func (a *Agent) SetCondition(c *bcdv1.Condition) {
	c = proto.CloneOf(c)
	c.Message = clip(c.GetMessage(), maxEventMessage)
	a.mu.Lock()
	old := a.conditions[c.GetType()]
	c.SinceMs = a.nowMS()
	if old != nil && old.GetStatus() == c.GetStatus() {
		c.SinceMs = old.GetSinceMs()
	}
	if old != nil && proto.Equal(old, c) {
		a.mu.Unlock()
		return
	}
	a.conditions[c.GetType()] = c
	a.mu.Unlock()
	a.Event(journal.Durable, "condition.changed", "", c.GetType()+" is "+statusWord(c.GetStatus())+": "+c.GetMessage(), conditionEvent{
		Type: c.GetType(), Status: statusWord(c.GetStatus()), Reason: c.GetReason(), Severe: c.GetSevere(),
	})
	a.sendConditions()
}

// ClearCondition takes a condition away.
func (a *Agent) ClearCondition(conditionType string) {
	a.mu.Lock()
	_, had := a.conditions[conditionType]
	delete(a.conditions, conditionType)
	a.mu.Unlock()
	if !had {
		return
	}
	a.Event(journal.Durable, "condition.changed", "", conditionType+" is gone", conditionEvent{Type: conditionType, Status: "gone"})
	a.sendConditions()
}

type conditionEvent struct {
	Type   string `json:"type"`
	Status string `json:"status"`
	Reason string `json:"reason,omitempty"`
	Severe bool   `json:"severe,omitempty"`
}

func statusWord(s bcdv1.ConditionStatus) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "CONDITION_STATUS_"))
}

// sendConditions reports all of them: a condition that is not named is gone.
func (a *Agent) sendConditions() {
	a.session.Send(session.Events, &bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Conditions{
		Conditions: &bcdv1.ConditionReport{Conditions: a.Conditions()}}})
}

// checkJournal turns the journal's state into a condition.
func (a *Agent) checkJournal(stats journal.Stats) {
	full := a.deps.Journal.CanAccept(0)
	switch {
	case stats.WriteError != "":
		a.SetCondition(&bcdv1.Condition{Type: "JournalFull", Status: bcdv1.ConditionStatus_CONDITION_STATUS_TRUE, Severe: true,
			Reason: "WriteFailed", Message: "the journal cannot be written, so no command is accepted: " + stats.WriteError})
	case full != nil:
		a.SetCondition(&bcdv1.Condition{Type: "JournalFull", Status: bcdv1.ConditionStatus_CONDITION_STATUS_TRUE, Severe: true,
			Reason: "Bound", Message: "no command is accepted: " + full.Error()})
	default:
		a.ClearCondition("JournalFull")
	}
}

// clip shortens to n bytes of valid UTF-8.
func clip(s string, n int) string {
	s = strings.ToValidUTF8(s, "�")
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n-len("…")], "") + "…"
}
