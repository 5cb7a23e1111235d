package journal

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
)

// ledger is the index of a journal and its rules: a step function without
// I/O. Each method checks a step and returns the changes that make it durable
// and a function that applies it here; the caller commits in between.
type ledger struct {
	meta    meta
	entries map[string]*Entry
	// bodyBytes is what entries and their bodies take, reserved what the
	// outcomes of unfinished commands may come to take.
	bodyBytes, reserved int64
	// keptBytes is what outcomes take that are acknowledged already.
	keptBytes int64
	// eventSizes has the sizes of events AckedEvent+1 to NextEvent-1.
	eventSizes []int
	eventBytes int64
}

func newLedger(m meta) *ledger {
	return &ledger{meta: m, entries: make(map[string]*Entry)}
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// account adds (sign 1) or removes (sign -1) what e takes.
func (l *ledger) account(e *Entry, sign int64) {
	l.bodyBytes += sign * int64(entryBytes+e.SignedBytes+e.OutcomeBytes)
	if e.State < Finished {
		l.reserved += sign * MaxOutcomeBytes
	}
	if e.State == Acknowledged {
		l.keptBytes += sign * int64(e.OutcomeBytes)
	}
}

// put replaces an entry.
func (l *ledger) put(e Entry) {
	l.drop(e.ID)
	l.entries[e.ID] = &e
	l.account(&e, 1)
}

func (l *ledger) drop(id string) {
	if old := l.entries[id]; old != nil {
		l.account(old, -1)
		delete(l.entries, id)
	}
}

func (l *ledger) pushEvent(size int) {
	l.eventSizes = append(l.eventSizes, size)
	l.eventBytes += int64(size)
}

// find returns a copy of the entry, which must be in one of the states.
func (l *ledger) find(id string, states ...State) (Entry, error) {
	e := l.entries[id]
	if e == nil {
		return Entry{}, fmt.Errorf("command %s: %w", id, ErrUnknown)
	}
	if !slices.Contains(states, e.State) {
		return Entry{}, fmt.Errorf("command %s is %s, want %v: %w", id, e.State, states, ErrState)
	}
	return *e, nil
}

// canAccept says whether a command with a body of size bytes and its outcome
// have room.
func (l *ledger) canAccept(size int) error {
	if n := len(l.entries); n >= maxCommands {
		return fmt.Errorf("%d commands are known: %w", n, ErrFull)
	}
	if need := l.bodyBytes + l.reserved + int64(size) + entryBytes + MaxOutcomeBytes; need > maxCommandBytes {
		return fmt.Errorf("commands would take %d of %d bytes: %w", need, maxCommandBytes, ErrFull)
	}
	if n := len(l.eventSizes); n >= acceptEvents || l.eventBytes >= acceptEventBytes {
		return fmt.Errorf("%d events of %d bytes are not acknowledged: %w", n, l.eventBytes, ErrFull)
	}
	return nil
}

// tx collects what a step changes.
type tx struct {
	meta    meta
	changes []change
	apply   []func(*ledger)
}

func (l *ledger) begin() *tx { return &tx{meta: l.meta} }

func (t *tx) putEntry(e Entry) {
	t.changes = append(t.changes, change{bucketCommands, e.ID, encodeJSON(e.ID, e)})
	t.apply = append(t.apply, func(l *ledger) { l.put(e) })
}

func (t *tx) putBody(bucket, key string, body []byte) {
	t.changes = append(t.changes, change{bucket, key, seal(key, body)})
}

func (t *tx) delete(bucket, key string) {
	t.changes = append(t.changes, change{bucket, key, nil})
}

// latest remembers the latest server time that any record has.
func (t *tx) latest(ms int64) { t.meta.LatestMS = max(t.meta.LatestMS, ms) }

// all returns every change and the meta record with the next serial; nothing
// when nothing changed.
func (t *tx) all(before meta) []change {
	if t.meta == before && len(t.changes) == 0 {
		return nil
	}
	t.meta.Serial = before.Serial + 1
	return append(t.changes, change{bucketMeta, metaKey, encodeJSON(metaKey, t.meta)})
}

// pruneBatch bounds what one step forgets, so that no step is slow.
const pruneBatch = 64

// prune forgets acknowledged commands whose deadline has passed, and reduces
// the oldest kept outcomes to their status when they take too much.
func (l *ledger) prune(t *tx, nowMS int64) {
	if nowMS <= 0 {
		return
	}
	var acked []*Entry
	for _, e := range l.entries {
		if e.State == Acknowledged && e.AfterState != AfterPending {
			acked = append(acked, e)
		}
	}
	slices.SortFunc(acked, func(a, b *Entry) int {
		return cmp.Or(cmp.Compare(a.FinishedMS, b.FinishedMS), cmp.Compare(a.ID, b.ID))
	})
	kept, n := l.keptBytes, 0
	for _, e := range acked {
		if n == pruneBatch {
			return
		}
		switch {
		case e.DeadlineMS < nowMS:
			id := e.ID
			t.delete(bucketCommands, id)
			t.delete(bucketOutcomes, id)
			t.apply = append(t.apply, func(l *ledger) { l.drop(id) })
		case kept > maxKeptOutcomes && e.OutcomeBytes > 0:
			reduced := *e
			reduced.OutcomeBytes = 0
			t.delete(bucketOutcomes, e.ID)
			t.putEntry(reduced)
		default:
			continue
		}
		kept -= int64(e.OutcomeBytes)
		n++
	}
}

// gap appends the GAP marker when there are dropped events to report and
// telemetry has a quarter of its room again, so that a journal at its bound
// does not fill with markers. events and size are what will then be there.
// encode makes the marker for a count and a sequence.
func (l *ledger) gap(t *tx, events int, size int64, encode func(sequence, dropped int64) []byte) {
	if t.meta.Dropped == 0 || events > maxTelemetryEvents*3/4 || size > maxTelemetryBytes*3/4 {
		return
	}
	sequence := t.meta.NextEvent
	body := encode(sequence, t.meta.Dropped)
	t.meta.Dropped = 0
	t.pushEvent(sequence, body)
}

func (t *tx) pushEvent(sequence int64, body []byte) {
	t.putBody(bucketEvents, eventKey(sequence), body)
	t.meta.NextEvent = sequence + 1
	size := len(body)
	t.apply = append(t.apply, func(l *ledger) { l.pushEvent(size) })
}
