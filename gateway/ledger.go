package gateway

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// unheardGrace is how long after its deadline (and after the node was last
// heard) a command that was sent may still get an answer from the node. By then
// the node's certificate has ended, so its word could only come after a renewal
// within the grace period; the ledger does not wait for that.
const unheardGrace = 24 * time.Hour

// ledgerInput is something that happened to a command.
type ledgerInput interface{ ledgerInput() }

type (
	// inSent: it is about to be written to the session of this journal.
	inSent struct{ Journal string }
	// inAccepted: it is in the node's journal.
	inAccepted struct{}
	// inStarted: the node's journal says that the effect may begin.
	inStarted struct{ AtMS int64 }
	// inReturned: the node had no room (LANE_FULL) and does not know it.
	inReturned struct{}
	// inOutcome: the node says how it ended.
	inOutcome struct{ Outcome *bcdv1.Outcome }
	// inCancel: an operator wants it gone.
	inCancel struct{ Reason string }
	// inNotKnown: the node, asked to cancel it, does not know it.
	inNotKnown struct{}
	// inJournalLost: what the node knew of its commands is lost.
	inJournalLost struct{ Reason string }
	// inNodeGone: the node was revoked, or replaced by a new installation.
	inNodeGone struct{ Reason string }
	// inClock: time has passed; the node was last heard at LastSeenMS and holds
	// a session now if Connected.
	inClock struct {
		LastSeenMS int64
		Connected  bool
	}
)

func (inSent) ledgerInput()        {}
func (inAccepted) ledgerInput()    {}
func (inStarted) ledgerInput()     {}
func (inReturned) ledgerInput()    {}
func (inOutcome) ledgerInput()     {}
func (inCancel) ledgerInput()      {}
func (inNotKnown) ledgerInput()    {}
func (inJournalLost) ledgerInput() {}
func (inNodeGone) ledgerInput()    {}
func (inClock) ledgerInput()       {}

// ledgerStep is the whole life of a command: the record after the input, and
// the line for the timeline, if any. It changes nothing else and reads no
// clock. changed is false when the input has no effect, as any input has once
// the command ended: a command has exactly one outcome.
//
// Never sent: it may be cancelled, may expire, and outlives the loss of the
// node's journal. Once sent, only the node knows whether it began: it ends by
// the node's word, or as INDETERMINATE when that word can no longer come.
func ledgerStep(now time.Time, c Command, in ledgerInput) (next Command, entry *TimelineEntry, changed bool) {
	const (
		queued   = bcdv1.CommandState_COMMAND_STATE_QUEUED
		sent     = bcdv1.CommandState_COMMAND_STATE_SENT
		accepted = bcdv1.CommandState_COMMAND_STATE_ACCEPTED
		started  = bcdv1.CommandState_COMMAND_STATE_STARTED
		ended    = bcdv1.CommandState_COMMAND_STATE_ENDED
	)
	if c.State == ended {
		if in, ok := in.(inOutcome); ok {
			if had := c.outcome(); had.GetStatus() != in.Outcome.GetStatus() {
				return c, c.line(now, "command.late", "warn", fmt.Sprintf("%s: the node says %s now; the outcome stays %s", c.Kind, word(in.Outcome.GetStatus()), word(had.GetStatus()))), false
			}
		}
		return c, nil, false
	}
	end := func(status bcdv1.OutcomeStatus, code, message string) (Command, *TimelineEntry, bool) {
		return c.end(now, &bcdv1.Outcome{CommandId: c.ID, Status: status, Code: code, Message: message, FinishedMs: now.UnixMilli()})
	}
	switch in := in.(type) {
	case inSent:
		if c.State != queued {
			return c, nil, false
		}
		c.State, c.SentJournal, c.SentMS = sent, in.Journal, now.UnixMilli()
		return c, nil, true
	case inAccepted:
		if c.State != sent && c.State != queued {
			return c, nil, false
		}
		c.State = accepted
		return c, nil, true
	case inStarted:
		if c.State == started {
			return c, nil, false
		}
		c.State = started
		return c, c.line(now, "command.started", "", c.Kind+" started"), true
	case inReturned:
		if c.State != sent {
			return c, nil, false
		}
		c.State, c.SentJournal, c.SentMS = queued, "", 0
		return c, nil, true
	case inOutcome:
		return c.end(now, in.Outcome)
	case inCancel:
		if c.State == queued {
			return end(bcdv1.OutcomeStatus_OUTCOME_STATUS_CANCELLED, "CANCELLED", reasonOr(in.Reason, "cancelled before it was sent"))
		}
		if c.Cancelled {
			return c, nil, false
		}
		c.Cancelled, c.CancelReason = true, in.Reason
		return c, c.line(now, "command.cancel", "", c.Kind+": cancel asked for"), true
	case inNotKnown:
		if !c.Cancelled || c.State != sent {
			return c, nil, false
		}
		return end(bcdv1.OutcomeStatus_OUTCOME_STATUS_CANCELLED, "CANCELLED", reasonOr(c.CancelReason, "cancelled; the node never had it"))
	case inJournalLost:
		if c.State == queued {
			return c, nil, false
		}
		return end(bcdv1.OutcomeStatus_OUTCOME_STATUS_INDETERMINATE, "JOURNAL_LOST", in.Reason+"; whether the command took effect cannot be known. Check the machine, then send it again if it is still wanted")
	case inNodeGone:
		if c.State == queued {
			return end(bcdv1.OutcomeStatus_OUTCOME_STATUS_CANCELLED, "NODE_GONE", in.Reason+"; the command was never sent")
		}
		return end(bcdv1.OutcomeStatus_OUTCOME_STATUS_INDETERMINATE, "NODE_GONE", in.Reason+"; whether the command took effect cannot be known")
	case inClock:
		if now.UnixMilli() < c.DeadlineMS {
			return c, nil, false
		}
		if c.State == queued {
			return end(bcdv1.OutcomeStatus_OUTCOME_STATUS_EXPIRED, "EXPIRED", "the deadline passed before the node was there to get it")
		}
		silentSince := max(in.LastSeenMS, c.DeadlineMS)
		if in.Connected || now.UnixMilli() < silentSince+unheardGrace.Milliseconds() {
			return c, nil, false
		}
		return end(bcdv1.OutcomeStatus_OUTCOME_STATUS_INDETERMINATE, "NODE_SILENT", "the node got the command and was not heard of again; whether it took effect cannot be known")
	}
	return c, nil, false
}

func reasonOr(reason, otherwise string) string {
	if reason == "" {
		return otherwise
	}
	return reason
}

// word is an enum value for people: OUTCOME_STATUS_FAILED is "failed".
func word(v interface{ String() string }) string {
	s := v.String()
	for _, prefix := range []string{"OUTCOME_STATUS_", "COMMAND_STATE_", "CONDITION_STATUS_", "SECTION_STATE_", "REJECTION_", "ROLE_", "LANE_", "JOIN_ERROR_CODE_"} {
		s = strings.TrimPrefix(s, prefix)
	}
	return strings.ToLower(strings.ReplaceAll(s, "_", " "))
}

func (c Command) end(now time.Time, outcome *bcdv1.Outcome) (Command, *TimelineEntry, bool) {
	encoded, err := proto.Marshal(outcome)
	if err != nil {
		// Only invalid UTF-8 can do this, and frames with it do not decode.
		encoded, _ = proto.Marshal(&bcdv1.Outcome{CommandId: c.ID, Status: outcome.GetStatus(), Code: "MALFORMED"})
	}
	c.State, c.Outcome = bcdv1.CommandState_COMMAND_STATE_ENDED, encoded
	severity := "error"
	switch outcome.GetStatus() {
	case bcdv1.OutcomeStatus_OUTCOME_STATUS_SUCCEEDED:
		severity = ""
	case bcdv1.OutcomeStatus_OUTCOME_STATUS_CANCELLED:
		severity = "warn"
	}
	message := c.Kind + " " + word(outcome.GetStatus())
	if r := outcome.GetRejection(); r != bcdv1.Rejection_REJECTION_UNSPECIFIED {
		message += " (" + word(r) + ")"
	}
	if outcome.GetMessage() != "" {
		message += ": " + outcome.GetMessage()
	}
	return c, c.line(now, "command.finished", severity, message), true
}

func (c Command) line(now time.Time, kind, severity, message string) *TimelineEntry {
	return &TimelineEntry{TimeMS: now.UnixMilli(), MachineID: c.MachineID, NodeID: c.NodeID, CommandID: c.ID, Type: kind, Severity: severity, Message: message}
}

// outcome is nil until the command ended.
func (c Command) outcome() *bcdv1.Outcome {
	if len(c.Outcome) == 0 {
		return nil
	}
	o := new(bcdv1.Outcome)
	if proto.Unmarshal(c.Outcome, o) != nil {
		return nil
	}
	return o
}

// advance applies an input to a stored command and keeps what hangs on it: the
// user data goes with the command's end, and so does an unused join token
// unless the deploy succeeded.
func advance(tx Tx, now time.Time, c *Command, in ledgerInput) error {
	next, entry, changed := ledgerStep(now, *c, in)
	if entry != nil {
		if err := tx.AppendTimeline(entry); err != nil {
			return err
		}
	}
	if !changed {
		return nil
	}
	if next.State == bcdv1.CommandState_COMMAND_STATE_ENDED {
		if next.UserData {
			if err := tx.DeleteSecret("userdata/" + next.ID); err != nil {
				return err
			}
		}
		if next.JoinToken != "" && next.outcome().GetStatus() != bcdv1.OutcomeStatus_OUTCOME_STATUS_SUCCEEDED {
			if err := revokeToken(tx, next.JoinToken); err != nil {
				return err
			}
		}
	}
	*c = next
	return tx.PutCommand(&next)
}

func revokeToken(tx Tx, id string) error {
	token, err := tx.Token(id)
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	token.Revoked = true
	return tx.PutToken(token)
}
