package journal

import (
	"encoding/binary"
	"fmt"

	"google.golang.org/protobuf/proto"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Append records an event under the next sequence and returns that. The
// event's Sequence and Class are set here. Telemetry beyond the bound is
// dropped and counted: the sequence is then 0 and the error nil. A durable
// event beyond the bound is ErrFull: its maker keeps it and tries again after
// an acknowledgement.
func (j *Journal) Append(class EventClass, event *bcdv1.Event) (int64, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	l := j.ledger
	event = proto.CloneOf(event)
	event.Class = bcdv1.EventClass_EVENT_CLASS_DURABLE
	if class == Telemetry {
		event.Class = bcdv1.EventClass_EVENT_CLASS_TELEMETRY
	}
	t := l.begin()
	t.latest(event.GetTimeMs())
	l.gap(t, len(l.eventSizes), l.eventBytes, encodeGap(event.GetTimeMs()))
	event.Sequence = t.meta.NextEvent
	body, err := proto.Marshal(event)
	if err != nil {
		return 0, fmt.Errorf("event %s: %w", event.GetType(), err)
	}
	if len(body) > MaxEventBytes {
		return 0, fmt.Errorf("event %s: %d bytes: %w", event.GetType(), len(body), ErrTooLarge)
	}
	count, size := len(l.eventSizes)+int(event.Sequence-l.meta.NextEvent), l.eventBytes+int64(len(body))
	if class == Telemetry && (t.meta.Dropped > 0 || count >= maxTelemetryEvents || size > maxTelemetryBytes) {
		t := l.begin()
		t.meta.Dropped++
		return 0, j.commit(t)
	}
	if count >= MaxEvents || size > maxEventBytes {
		return 0, fmt.Errorf("event %s: %d events of %d bytes are not acknowledged: %w", event.GetType(), count, l.eventBytes, ErrFull)
	}
	t.pushEvent(event.Sequence, body)
	if err := j.commit(t); err != nil {
		return 0, err
	}
	return event.Sequence, nil
}

// encodeGap makes the marker that says how many events were dropped.
func encodeGap(timeMS int64) func(sequence, dropped int64) []byte {
	return func(sequence, dropped int64) []byte {
		body, err := proto.Marshal(&bcdv1.Event{
			Sequence: sequence,
			Class:    bcdv1.EventClass_EVENT_CLASS_GAP,
			Type:     "gap",
			Json:     fmt.Appendf(nil, `{"dropped":%d}`, dropped),
			TimeMs:   timeMS,
			Message:  fmt.Sprintf("%d telemetry events were dropped because the journal was at its bound", dropped),
		})
		if err != nil {
			panic(fmt.Sprintf("journal: encode gap: %v", err)) // valid UTF-8: cannot happen
		}
		return body
	}
}

// Sequence is the highest sequence given out, 0 when there was none.
func (j *Journal) Sequence() int64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.ledger.meta.NextEvent - 1
}

// AckedSequence is the highest acknowledged sequence.
func (j *Journal) AckedSequence() int64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.ledger.meta.AckedEvent
}

// Events returns the events after a sequence, in order: at most count, and
// about maxBytes, but always one when there is one.
func (j *Journal) Events(after int64, count, maxBytes int) ([]*bcdv1.Event, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return nil, ErrClosed
	}
	var list []*bcdv1.Event
	for sequence := max(after, j.ledger.meta.AckedEvent) + 1; sequence < j.ledger.meta.NextEvent && len(list) < count; sequence++ {
		key := eventKey(sequence)
		value, err := j.store.get(bucketEvents, key)
		if err != nil {
			return nil, fmt.Errorf("event %d: %w", sequence, err)
		}
		body, err := open(key, value)
		if err != nil {
			return nil, fmt.Errorf("event %d: %w", sequence, err)
		}
		event := new(bcdv1.Event)
		if err := proto.Unmarshal(body, event); err != nil {
			return nil, fmt.Errorf("event %d: %w", sequence, err)
		}
		if maxBytes -= len(body); maxBytes < 0 && len(list) > 0 {
			break
		}
		list = append(list, event)
	}
	return list, nil
}

// ackBatch bounds the events that one commit deletes.
const ackBatch = 1000

// AckEvents deletes the events up to sequence, which the gateway has durably.
// One beyond what was given out is an error and changes nothing: this journal
// is then younger than the gateway's memory of it.
func (j *Journal) AckEvents(sequence int64) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	l := j.ledger
	if sequence >= l.meta.NextEvent {
		return fmt.Errorf("events acknowledged up to %d, this journal gave out %d: %w", sequence, l.meta.NextEvent-1, ErrUnknown)
	}
	for l.meta.AckedEvent < sequence {
		t := l.begin()
		upTo := min(sequence, l.meta.AckedEvent+ackBatch)
		for s := l.meta.AckedEvent + 1; s <= upTo; s++ {
			t.delete(bucketEvents, eventKey(s))
		}
		n := int(upTo - l.meta.AckedEvent)
		var freed int64
		for _, size := range l.eventSizes[:n] {
			freed += int64(size)
		}
		t.meta.AckedEvent = upTo
		t.apply = append(t.apply, func(l *ledger) {
			l.eventBytes -= freed
			l.eventSizes = append([]int(nil), l.eventSizes[n:]...)
		})
		if upTo == sequence {
			l.gap(t, len(l.eventSizes)-n, l.eventBytes-freed, encodeGap(l.meta.LatestMS))
		}
		if err := j.commit(t); err != nil {
			return err
		}
	}
	return nil
}

// checkEvent decodes a stored event; the probe does so for each.
func checkEvent(key, body []byte) error {
	var event bcdv1.Event
	if err := proto.Unmarshal(body, &event); err != nil {
		return err
	}
	if want := int64(binary.BigEndian.Uint64(key)); event.GetSequence() != want {
		return fmt.Errorf("event %d says that it is %d", want, event.GetSequence())
	}
	return nil
}
