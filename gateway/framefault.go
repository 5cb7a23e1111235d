package gateway

import (
	"crypto/sha256"
	"fmt"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// frameFault says what is wrong with a frame that decodes: a bound that it
// breaks, a hash that does not fit. "" is nothing.
func frameFault(frame *bcdv1.ClientFrame) string {
	switch body := frame.GetBody().(type) {
	case *bcdv1.ClientFrame_Accepted:
		if !idLike(body.Accepted.GetCommandId()) || len(body.Accepted.GetMessage()) > maxMessageBytes {
			return "accepted frame without a sound command id or with too long a message"
		}
	case *bcdv1.ClientFrame_Started:
		if !idLike(body.Started.GetCommandId()) {
			return "started frame without a sound command id"
		}
	case *bcdv1.ClientFrame_Outcome:
		o := body.Outcome
		switch {
		case !idLike(o.GetCommandId()):
			return "outcome without a sound command id"
		case o.GetStatus() == bcdv1.OutcomeStatus_OUTCOME_STATUS_UNSPECIFIED:
			return "outcome without a status"
		case len(o.GetResult()) > maxResultBytes:
			return fmt.Sprintf("outcome with a result of %d bytes; at most %d are allowed", len(o.GetResult()), maxResultBytes)
		case len(o.GetMessage()) > maxMessageBytes || len(o.GetCode()) > maxNameBytes || len(o.GetAfterAcknowledgement()) > maxNameBytes:
			return "outcome with too long a message, code or action"
		}
	case *bcdv1.ClientFrame_Progress:
		if !idLike(body.Progress.GetCommandId()) || len(body.Progress.GetBody()) > maxProgressBytes {
			return fmt.Sprintf("progress without a sound command id or with more than %d bytes", maxProgressBytes)
		}
	case *bcdv1.ClientFrame_Events:
		if !idLike(body.Events.GetJournalId()) || len(body.Events.GetEvents()) > maxEventsInBatch {
			return fmt.Sprintf("event batch without a journal id or with more than %d events", maxEventsInBatch)
		}
		last := int64(0)
		for _, e := range body.Events.GetEvents() {
			if e.GetSequence() <= last {
				return fmt.Sprintf("event batch goes from sequence %d to %d; they must grow", last, e.GetSequence())
			}
			last = e.GetSequence()
			if len(e.GetJson()) > maxEventBytes || len(e.GetMessage()) > maxMessageBytes || len(e.GetType()) > maxNameBytes || len(e.GetCommandId()) > maxNameBytes {
				return fmt.Sprintf("event %d is larger than allowed (%d bytes of JSON)", last, maxEventBytes)
			}
		}
	case *bcdv1.ClientFrame_Inventory:
		if len(body.Inventory.GetSections()) > maxSections {
			return fmt.Sprintf("inventory of more than %d sections", maxSections)
		}
		for _, section := range body.Inventory.GetSections() {
			sum := sha256.Sum256(section.GetCanonicalJson())
			switch {
			case !idLike(section.GetName()):
				return "inventory section without a name"
			case len(section.GetCanonicalJson()) > maxSectionBytes || len(section.GetError()) > maxMessageBytes:
				return fmt.Sprintf("inventory section %s is larger than %d bytes", section.GetName(), maxSectionBytes)
			case !sameHash(sum[:], section.GetSha256()):
				return fmt.Sprintf("inventory section %s does not have the hash it names", section.GetName())
			}
		}
	case *bcdv1.ClientFrame_Conditions:
		if len(body.Conditions.GetConditions()) > maxConditions {
			return fmt.Sprintf("more than %d conditions", maxConditions)
		}
		for _, c := range body.Conditions.GetConditions() {
			if !idLike(c.GetType()) || len(c.GetReason()) > maxNameBytes || len(c.GetMessage()) > maxMessageBytes {
				return "condition without a type or with too long a reason or message"
			}
		}
	case *bcdv1.ClientFrame_SpecStatus:
		if len(body.SpecStatus.GetSections()) > maxSections || len(body.SpecStatus.GetRefused()) > maxMessageBytes {
			return "spec status with too many sections or too long a reason"
		}
		for _, section := range body.SpecStatus.GetSections() {
			if len(section.GetName()) > maxNameBytes || len(section.GetMessage()) > maxMessageBytes {
				return "spec status with too long a name or message"
			}
		}
	}
	return ""
}

// clip cuts a text that came from outside; it stays valid UTF-8.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && s[n]&0xC0 == 0x80 {
		n--
	}
	return s[:n]
}
