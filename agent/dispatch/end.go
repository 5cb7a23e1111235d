package dispatch

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/journal"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/api/kinds"
)

// ErrNotDue is what Command.StillDue returns once the deadline has passed or
// the identity was revoked. An executor that returns it says that no effect
// has begun.
var ErrNotDue = errors.New("the effect may not begin any more")

// ending is how a command ends, before it is an outcome.
type ending struct {
	status  bcdv1.OutcomeStatus
	code    string
	message string
	result  []byte
	after   After
}

// finish ends a job: the outcome is durable before it is sent.
func (c *Core) finish(now time.Time, j *job, e ending) []Effect {
	id := j.command.GetId()
	delete(c.jobs, id)
	if j.running {
		c.lanes[j.lane].running--
	}
	outcome := &bcdv1.Outcome{
		CommandId: id, Status: e.status, Message: clip(e.message, maxMessage), Code: clip(e.code, maxNameBytes),
		Result: e.result, AcceptedMs: j.accepted, StartedMs: j.started, FinishedMs: ms(now),
		AfterAcknowledgement: string(e.after),
	}
	return []Effect{{
		Write: WriteFinish{id, journal.Finish{
			Outcome: marshal(outcome), Status: int32(e.status), After: string(e.after),
			FinishedMS: ms(now), BootID: c.config.BootID,
		}},
		Then: []Output{SendOutcome{id}},
	}}
}

func (c *Core) ended(now time.Time, in Ended) []Effect {
	j := c.jobs[in.ID]
	if j == nil || !j.running {
		return nil
	}
	var out []Effect
	if j.progress != nil {
		out = append(out, c.sendProgress(now, in.ID, j)) // the last one is worth showing
	}
	kind, _ := kinds.ByName(j.command.GetKind())
	if in.Err == nil {
		return append(out, c.finish(now, j, succeeded(kind, in.Result))...)
	}
	return append(out, c.finish(now, j, c.failure(j, kind, in.Err))...)
}

func succeeded(kind kinds.Kind, r Result) ending {
	e := ending{status: bcdv1.OutcomeStatus_OUTCOME_STATUS_SUCCEEDED, message: r.Message, after: r.After}
	e.setResult(kind, r.Body)
	return e
}

// setResult marshals a result. One that is too large is left out rather than
// the outcome lost: the effect has happened.
func (e *ending) setResult(kind kinds.Kind, m proto.Message) {
	if m == nil {
		return
	}
	limit := MaxResult
	if n := int(kind.GetMaxResultBytes()); n > 0 && n < limit {
		limit = n
	}
	body := marshal(m)
	if len(body) > limit {
		e.code = "RESULT_TOO_LARGE"
		e.message = clip(fmt.Sprintf("%s (the result of %d bytes was left out, at most %d are allowed)", e.message, len(body), limit), maxMessage)
		return
	}
	e.result = body
}

func (c *Core) failure(j *job, kind kinds.Kind, err error) ending {
	e := ending{status: bcdv1.OutcomeStatus_OUTCOME_STATUS_FAILED, code: "FAILED", message: err.Error()}
	var f *Failure
	structured := errors.As(err, &f)
	if structured {
		e.message = f.Message
		if f.Code != "" {
			e.code = f.Code
		}
		e.setResult(kind, f.Body)
	}
	switch {
	case errors.Is(err, ErrNotDue) && j.mode == resuming:
		e.status, e.code = bcdv1.OutcomeStatus_OUTCOME_STATUS_INDETERMINATE, "INTERRUPTED"
	case errors.Is(err, ErrNotDue) && (!structured || !f.Indeterminate):
		e.status, e.code = bcdv1.OutcomeStatus_OUTCOME_STATUS_EXPIRED, ""
	case structured && f.Indeterminate:
		e.status = bcdv1.OutcomeStatus_OUTCOME_STATUS_INDETERMINATE
	case j.cancelled && (structured || kind.GetResumable()):
		// The executor says how far it came, or running it in part leaves
		// nothing behind.
		e.status, e.message = bcdv1.OutcomeStatus_OUTCOME_STATUS_CANCELLED, "cancelled while it ran"+because(j.reason)
		if structured {
			e.message += ": " + f.Message
		}
	case j.cancelled && errors.Is(err, context.Canceled):
		e.status, e.code = bcdv1.OutcomeStatus_OUTCOME_STATUS_INDETERMINATE, "CANCELLED"
		e.message = "cancelled while it ran" + because(j.reason) + "; how far it came is unknown"
	}
	return e
}

func (c *Core) recovered(now time.Time, in Recovered) []Effect {
	j := c.jobs[in.ID]
	if j == nil || !j.running || j.mode != recovering {
		return nil
	}
	kind, _ := kinds.ByName(j.command.GetKind())
	switch {
	case in.Err == nil && in.Recovery.Action == Done:
		e := succeeded(kind, in.Recovery.Result)
		if in.Recovery.Message != "" {
			e.message = in.Recovery.Message
		}
		return c.finish(now, j, e)
	case in.Err == nil && in.Recovery.Action == Resume:
		l := c.lanes[j.lane]
		l.running--
		j.running, j.mode = false, resuming
		l.queue = slices.Insert(l.queue, 0, in.ID)
		return nil
	}
	e := ending{status: bcdv1.OutcomeStatus_OUTCOME_STATUS_INDETERMINATE, code: "INTERRUPTED", message: in.Recovery.Message}
	if in.Err != nil {
		e.message = "the run was interrupted, and what became of it cannot be told: " + in.Err.Error()
	} else if e.message == "" {
		e.message = "the run was interrupted by a restart of the daemon or the machine; what became of it is unknown"
	}
	return c.finish(now, j, e)
}

// restore takes up an entry that the journal held at the start. Nothing runs
// before server time is known; see schedule.
func (c *Core) restore(now time.Time, in Restore) []Effect {
	e := in.Entry
	switch {
	case e.State >= journal.Acknowledged:
		return c.restoreAfter(e)
	case e.State >= journal.Finished:
		return nil // sent again once there is a session
	}
	j := &job{command: in.Command, lane: bcdv1.Lane(e.Lane), accepted: e.AcceptedMS, started: e.StartedMS, bootID: e.BootID}
	if e.State == journal.Started {
		j.mode = recovering
	}
	unreadable := j.command == nil || c.lanes[j.lane] == nil
	if unreadable {
		j.command = &bcdv1.Command{Id: e.ID, Kind: e.Kind, DeadlineMs: e.DeadlineMS}
		status := bcdv1.OutcomeStatus_OUTCOME_STATUS_FAILED
		if e.State == journal.Started {
			status = bcdv1.OutcomeStatus_OUTCOME_STATUS_INDETERMINATE
		}
		return c.finish(now, j, ending{status: status, code: "JOURNAL_DAMAGED", message: "the journal does not hold this command's body any more"})
	}
	if c.config.Supported != nil && !c.config.Supported(e.Kind) {
		status := bcdv1.OutcomeStatus_OUTCOME_STATUS_FAILED
		if e.State == journal.Started {
			status = bcdv1.OutcomeStatus_OUTCOME_STATUS_INDETERMINATE
		}
		return c.finish(now, j, ending{status: status, code: "UNSUPPORTED", message: "the daemon was restarted and has no executor for " + e.Kind + " any more"})
	}
	c.jobs[e.ID] = j
	l := c.lanes[j.lane]
	l.queue = append(l.queue, e.ID)
	return nil
}

// restoreAfter decides about an action that was not over. One that was begun
// is never begun again.
func (c *Core) restoreAfter(e journal.Entry) []Effect {
	rebooted := e.BootID != c.config.BootID
	switch {
	case e.AfterState == journal.AfterBegun && rebooted:
		return []Effect{{Write: WriteEndAfter{e.ID}, Then: []Output{Note{"after.done", e.ID, "the machine has restarted (" + e.After + ")"}}}}
	case e.AfterState == journal.AfterBegun:
		return []Effect{{Write: WriteEndAfter{e.ID}, Then: []Output{Note{"after.unproven", e.ID,
			unproven(After(e.After))}}}}
	case e.AfterState == journal.AfterPending && rebooted:
		return []Effect{{Write: WriteEndAfter{e.ID}, Then: []Output{Note{"after.done", e.ID, "the machine was restarted by other means before the " + e.After + " began"}}}}
	case e.AfterState == journal.AfterPending:
		c.afters = append(c.afters, c.newAfter(e))
	}
	return nil
}

func unproven(action After) string {
	return fmt.Sprintf("the %s was begun, and the machine has not restarted; it is not tried again: send node.reboot if it stays up", action)
}

func (c *Core) newAfter(e journal.Entry) *after {
	a := &after{id: e.ID, action: After(e.After)}
	if kind, ok := kinds.ByName(e.Kind); ok && kind.GetEffectAfterAcknowledgement() {
		a.deadline = time.UnixMilli(e.DeadlineMS)
	}
	return a
}

func (c *Core) acked(now time.Time, id string) []Effect {
	e, known := c.config.Ledger.Entry(id)
	if !known || e.State != journal.Finished {
		return nil
	}
	if e.AfterState == journal.AfterPending && !slices.ContainsFunc(c.afters, func(a *after) bool { return a.id == id }) {
		a := c.newAfter(e)
		a.since = now
		c.afters = append(c.afters, a)
	}
	return []Effect{{Write: WriteAck{id}}}
}

// beginAfter begins an action whose outcome is acknowledged, once nothing else
// runs or the grace is over. Its deadline, where it has one, is judged here:
// right before the effect.
func (c *Core) beginAfter(now time.Time) []Effect {
	if len(c.afters) == 0 || now.IsZero() || now.Before(c.retryAt) {
		return nil
	}
	a := c.afters[0]
	if !a.giveUp.IsZero() && !now.Before(a.giveUp) {
		c.dropAfter(a.id)
		return []Effect{{Write: WriteEndAfter{a.id}, Then: []Output{Note{"after.unproven", a.id, unproven(a.action)}}}}
	}
	if a.since.IsZero() {
		a.since = now // restored: the grace begins with the first mark
	}
	busy := 0
	for _, l := range c.lanes {
		busy += l.running
	}
	switch {
	case a.begun:
		return nil
	case c.revoked, !a.deadline.IsZero() && !now.Before(a.deadline):
		c.afters = c.afters[1:]
		return []Effect{{Write: WriteEndAfter{a.id}, Then: []Output{Note{"after.expired", a.id,
			fmt.Sprintf("the %s was not begun: the acknowledgement came after the deadline, or the identity was revoked", a.action)}}}}
	case busy > 0 && now.Sub(a.since) < afterGrace:
		return nil
	}
	a.begun = true
	return []Effect{{Write: WriteBeginAfter{a.id}, Then: []Output{DoAfter{a.id, a.action}}}}
}

// afterEnded: a reboot that works ends this process soon. Until then nothing
// else begins; the journal keeps it as begun, for the next boot to prove.
func (c *Core) afterEnded(now time.Time, in AfterEnded) []Effect {
	if in.Err == nil {
		for _, a := range c.afters {
			if a.id == in.ID {
				a.giveUp = now.Add(afterPatience)
			}
		}
		return nil
	}
	c.dropAfter(in.ID)
	return []Effect{{Write: WriteEndAfter{in.ID}, Then: []Output{Note{"after.failed", in.ID, "the after-acknowledgement action failed: " + in.Err.Error()}}}}
}

func (c *Core) dropAfter(id string) {
	c.afters = slices.DeleteFunc(c.afters, func(a *after) bool { return a.id == id })
}

func sortedIDs[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// marshal encodes deterministically: an outcome is stored once and sent as it
// was stored.
func marshal(m proto.Message) []byte {
	body, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		// Only text that is not UTF-8 can do that, and clip removes it from
		// all that comes from outside; an executor's result is left out.
		return nil
	}
	return body
}

// clip shortens a sentence to n bytes of valid UTF-8.
func clip(s string, n int) string {
	if !utf8.ValidString(s) {
		s = string([]rune(s)) // replaces what is not
	}
	if len(s) <= n {
		return s
	}
	const mark = "…"
	s = s[:n-len(mark)]
	for !utf8.ValidString(s) {
		s = s[:len(s)-1]
	}
	return s + mark
}
