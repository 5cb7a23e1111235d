package journal

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"slices"
	"sync"
)

// Journal is the daemon's journal. Its methods may be called from several
// goroutines. When one returns an error nothing has changed.
type Journal struct {
	mu       sync.Mutex
	ledger   *ledger
	store    store
	anchor   Anchor
	loss     *Loss
	writeErr error
	closed   bool
}

// NewMemory returns an empty journal that is lost with the process. anchor may
// be nil.
func NewMemory(random io.Reader, anchor Anchor) (*Journal, error) {
	s := newMemory()
	m, err := initialise(s, random, nil)
	if err != nil {
		return nil, err
	}
	j := &Journal{ledger: newLedger(m), store: s, anchor: anchor}
	return j, j.saveAnchor()
}

// newID makes a journal's id. random nil is crypto/rand.
func newID(random io.Reader) (string, error) {
	if random == nil {
		random = rand.Reader
	}
	var b [16]byte
	if _, err := io.ReadFull(random, b[:]); err != nil {
		return "", fmt.Errorf("journal id: %w", err)
	}
	return "jrnl_" + hex.EncodeToString(b[:]), nil
}

// initialise writes the meta record of a new journal.
func initialise(s store, random io.Reader, loss *Loss) (meta, error) {
	id, err := newID(random)
	if err != nil {
		return meta{}, err
	}
	m := meta{ID: id, NextEvent: 1}
	if loss != nil {
		m.Lost, m.LostReason = loss.JournalID, loss.Reason
	}
	return m, s.commit([]change{{bucketMeta, metaKey, encodeJSON(metaKey, m)}})
}

// commit makes t durable and then true. Whoever calls it holds the lock.
func (j *Journal) commit(t *tx) error {
	if j.closed {
		return ErrClosed
	}
	changes := t.all(j.ledger.meta)
	if len(changes) == 0 {
		return nil
	}
	if err := j.store.commit(changes); err != nil {
		j.writeErr = err
		return fmt.Errorf("write the journal: %w", err)
	}
	j.writeErr = nil
	j.ledger.meta = t.meta
	for _, f := range t.apply {
		f(j.ledger)
	}
	// The step is durable; an anchor that lags only makes a file that went
	// back harder to notice. So it is reported, and the step stands.
	if err := j.saveAnchor(); err != nil {
		j.writeErr = err
	}
	return nil
}

func (j *Journal) saveAnchor() error {
	if j.anchor == nil {
		return nil
	}
	m := j.ledger.meta
	if err := j.anchor.Save(Position{JournalID: m.ID, Serial: m.Serial, Event: m.NextEvent - 1, Epoch: m.Epoch}); err != nil {
		return fmt.Errorf("write the journal's anchor: %w", err)
	}
	return nil
}

// CanAccept says, without I/O, whether a signed command of size bytes and its
// outcome have room. The error is ErrFull.
func (j *Journal) CanAccept(size int) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.ledger.canAccept(size)
}

// Accept records a command as accepted, with its room for an outcome. It also
// forgets what may be forgotten by e.AcceptedMS. Errors: ErrKnown, ErrFull,
// ErrTooLarge, or the write's.
func (j *Journal) Accept(e Entry, signed []byte) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(signed) > MaxSignedBytes {
		return fmt.Errorf("command %s: %d bytes: %w", e.ID, len(signed), ErrTooLarge)
	}
	if j.ledger.entries[e.ID] != nil {
		return fmt.Errorf("command %s: %w", e.ID, ErrKnown)
	}
	if err := j.ledger.canAccept(len(signed)); err != nil {
		return fmt.Errorf("command %s: %w", e.ID, err)
	}
	room := j.ledger.reserved + MaxOutcomeBytes + int64(len(signed))
	if err := j.store.reserve(room); err != nil {
		j.writeErr = err
		return fmt.Errorf("command %s: no room on disk: %w: %w", e.ID, ErrFull, err)
	}
	t := j.ledger.begin()
	j.ledger.prune(t, e.AcceptedMS)
	e.State, e.SignedBytes, e.OutcomeBytes = Accepted, len(signed), 0
	t.putEntry(e)
	t.putBody(bucketSigned, e.ID, signed)
	t.latest(e.AcceptedMS)
	return j.commit(t)
}

// Refuse records a command that ended at acceptance: known from now on, and
// finished.
func (j *Journal) Refuse(e Entry, outcome []byte) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(outcome) > MaxOutcomeBytes {
		return fmt.Errorf("command %s: outcome of %d bytes: %w", e.ID, len(outcome), ErrTooLarge)
	}
	if j.ledger.entries[e.ID] != nil {
		return fmt.Errorf("command %s: %w", e.ID, ErrKnown)
	}
	if err := j.ledger.canAccept(0); err != nil {
		return fmt.Errorf("command %s: %w", e.ID, err)
	}
	t := j.ledger.begin()
	j.ledger.prune(t, e.FinishedMS)
	e.State, e.SignedBytes, e.OutcomeBytes = Finished, 0, len(outcome)
	t.putEntry(e)
	t.putBody(bucketOutcomes, e.ID, outcome)
	t.latest(e.FinishedMS)
	return j.commit(t)
}

// Start records that the side effect may begin from now on.
func (j *Journal) Start(id string, startedMS int64, bootID string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	e, err := j.ledger.find(id, Accepted)
	if err != nil {
		return err
	}
	t := j.ledger.begin()
	e.State, e.StartedMS, e.BootID = Started, startedMS, bootID
	t.putEntry(e)
	t.latest(startedMS)
	return j.commit(t)
}

// Finish records how an accepted or started command ended. The room for it
// was reserved when it was accepted.
func (j *Journal) Finish(id string, f Finish) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(f.Outcome) > MaxOutcomeBytes {
		return fmt.Errorf("command %s: outcome of %d bytes: %w", id, len(f.Outcome), ErrTooLarge)
	}
	e, err := j.ledger.find(id, Accepted, Started)
	if err != nil {
		return err
	}
	t := j.ledger.begin()
	e.State, e.Status, e.Rejection, e.FinishedMS = Finished, f.Status, f.Rejection, f.FinishedMS
	e.SignedBytes, e.OutcomeBytes = 0, len(f.Outcome)
	if f.BootID != "" {
		e.BootID = f.BootID
	}
	if f.After != "" {
		e.After, e.AfterState = f.After, AfterPending
	}
	t.delete(bucketSigned, id)
	t.putEntry(e)
	t.putBody(bucketOutcomes, id, f.Outcome)
	t.latest(f.FinishedMS)
	return j.commit(t)
}

// Acknowledge records that the gateway has the outcome durably. Doing it twice
// is no error.
func (j *Journal) Acknowledge(id string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	e, err := j.ledger.find(id, Finished, Acknowledged)
	if err != nil || e.State == Acknowledged {
		return err
	}
	t := j.ledger.begin()
	e.State = Acknowledged
	t.putEntry(e)
	return j.commit(t)
}

// BeginAfter records that the after-acknowledgement action begins. It succeeds
// once in a command's life.
func (j *Journal) BeginAfter(id string) error { return j.after(id, AfterPending, AfterBegun) }

// EndAfter records that the action happened or was given up.
func (j *Journal) EndAfter(id string) error {
	return j.after(id, AfterDone, AfterDone)
}

func (j *Journal) after(id string, from, to AfterState) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	e, err := j.ledger.find(id, Acknowledged)
	if err != nil {
		return err
	}
	if e.AfterState == to && to == AfterDone {
		return nil
	}
	if to == AfterBegun && e.AfterState != from {
		return fmt.Errorf("command %s: its action has begun already: %w", id, ErrState)
	}
	t := j.ledger.begin()
	e.AfterState = to
	t.putEntry(e)
	return j.commit(t)
}

// Entry returns what is known of a command, without I/O.
func (j *Journal) Entry(id string) (Entry, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	e := j.ledger.entries[id]
	if e == nil {
		return Entry{}, false
	}
	return *e, true
}

// Open returns, oldest first, the commands that are not over: unfinished, not
// acknowledged, or with an action that waits or was begun.
func (j *Journal) Open() []Entry {
	j.mu.Lock()
	defer j.mu.Unlock()
	var list []Entry
	for _, e := range j.ledger.entries {
		if e.State < Acknowledged || e.AfterState == AfterPending || e.AfterState == AfterBegun {
			list = append(list, *e)
		}
	}
	slices.SortFunc(list, func(a, b Entry) int {
		return cmp.Or(cmp.Compare(a.AcceptedMS, b.AcceptedMS), cmp.Compare(a.ID, b.ID))
	})
	return list
}

// Signed returns the signed command of an unfinished one.
func (j *Journal) Signed(id string) ([]byte, error) { return j.body(bucketSigned, id) }

// Outcome returns the outcome of a finished command, byte for byte as it was
// recorded. ErrUnknown: there is none, or it was reduced to its status after
// the acknowledgement, see [Journal.Entry].
func (j *Journal) Outcome(id string) ([]byte, error) { return j.body(bucketOutcomes, id) }

func (j *Journal) body(bucket, id string) ([]byte, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return nil, ErrClosed
	}
	value, err := j.store.get(bucket, id)
	if err != nil {
		return nil, fmt.Errorf("journal: %s of %s: %w", bucket, id, err)
	}
	if len(value) == 0 {
		return nil, fmt.Errorf("journal: %s of %s: %w", bucket, id, ErrUnknown)
	}
	body, err := open(id, value)
	if err != nil {
		return nil, fmt.Errorf("journal: %s of %s: %w", bucket, id, err)
	}
	return body, nil
}

// ID is the journal's id, made with the file.
func (j *Journal) ID() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.ledger.meta.ID
}

// Epoch is the highest session epoch that was recorded.
func (j *Journal) Epoch() int64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.ledger.meta.Epoch
}

// SetEpoch records a session epoch; a lower one changes nothing.
func (j *Journal) SetEpoch(epoch int64) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	t := j.ledger.begin()
	t.meta.Epoch = max(t.meta.Epoch, epoch)
	return j.commit(t)
}

// LatestMS is the latest server time in any record; 0 when there is none.
func (j *Journal) LatestMS() int64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.ledger.meta.LatestMS
}

// Loss is the loss that Open found, nil when there was none.
func (j *Journal) Loss() *Loss {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.loss
}

// Lost is the id of an earlier journal whose loss the gateway was not yet
// told, empty when there is none. It survives restarts until SettleLoss.
func (j *Journal) Lost() (id, reason string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.ledger.meta.Lost, j.ledger.meta.LostReason
}

// SettleLoss records that the gateway was told of the loss at server time ms.
// A command issued up to then may have been run by the lost journal, see
// [Journal.IssuedFloorMS].
func (j *Journal) SettleLoss(ms int64) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.ledger.meta.Lost == "" {
		return nil
	}
	t := j.ledger.begin()
	t.meta.Lost, t.meta.LostReason = "", ""
	t.meta.IssuedFloorMS = max(t.meta.IssuedFloorMS, ms)
	t.latest(ms)
	return j.commit(t)
}

// IssuedFloorMS is the server time up to which a journal may have been lost:
// that a command issued by then was never started cannot be proved. 0 when no
// journal was lost.
func (j *Journal) IssuedFloorMS() int64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.ledger.meta.IssuedFloorMS
}

// Stats says how full the journal is.
func (j *Journal) Stats() Stats {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := Stats{
		Known:         len(j.ledger.entries),
		Events:        len(j.ledger.eventSizes),
		EventBytes:    j.ledger.eventBytes,
		DroppedEvents: j.ledger.meta.Dropped,
		Bytes:         j.ledger.bodyBytes + j.ledger.reserved + j.ledger.eventBytes,
	}
	for _, e := range j.ledger.entries {
		switch e.State {
		case Accepted:
			s.Accepted++
		case Started:
			s.Started++
		case Finished:
			s.Unacknowledged++
		}
	}
	if j.writeErr != nil {
		s.WriteError = j.writeErr.Error()
	}
	if !j.closed {
		s.FileBytes = j.store.fileBytes()
	}
	return s
}

// Close closes the file. Everything is durable already.
func (j *Journal) Close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return nil
	}
	j.closed = true
	return j.store.close()
}
