package journal

import (
	"fmt"
	"sync"
)

// The buckets of a journal.
const (
	bucketMeta     = "meta"
	bucketCommands = "commands" // id -> Entry
	bucketSigned   = "signed"   // id -> the signed command, until it finished
	bucketOutcomes = "outcomes" // id -> the outcome
	bucketEvents   = "events"   // sequence -> bcd.v1.Event

	metaKey = "journal"
)

var buckets = []string{bucketMeta, bucketCommands, bucketSigned, bucketOutcomes, bucketEvents}

// change is one key of a commit; a nil value deletes it.
type change struct {
	bucket, key string
	value       []byte
}

// store keeps sealed values. A commit is whole and durable, or it did not
// happen.
type store interface {
	commit([]change) error
	// get returns a copy, nil when there is none.
	get(bucket, key string) ([]byte, error)
	// each calls f in key order; value must not be kept.
	each(bucket string, f func(key, value []byte) error) error
	// reserve makes sure that room bytes more can be written.
	reserve(room int64) error
	fileBytes() int64
	close() error
}

// memory is the store of the twin.
type memory struct {
	mu     sync.Mutex
	values map[string]map[string][]byte
}

func newMemory() *memory {
	m := &memory{values: make(map[string]map[string][]byte)}
	for _, name := range buckets {
		m.values[name] = make(map[string][]byte)
	}
	return m
}

func (m *memory) commit(changes []change) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range changes {
		if c.value == nil {
			delete(m.values[c.bucket], c.key)
		} else {
			m.values[c.bucket][c.key] = c.value
		}
	}
	return nil
}

func (m *memory) get(bucket, key string) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]byte(nil), m.values[bucket][key]...), nil
}

func (m *memory) each(bucket string, f func(key, value []byte) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, key := range sortedKeys(m.values[bucket]) {
		if err := f([]byte(key), m.values[bucket][key]); err != nil {
			return err
		}
	}
	return nil
}

func (m *memory) reserve(int64) error { return nil }
func (m *memory) fileBytes() int64    { return 0 }
func (m *memory) close() error        { return nil }

// load reads a whole store: every record is decoded, so that what is damaged
// shows before anything is decided by it.
func load(s store) (*ledger, error) {
	raw, err := s.get(bucketMeta, metaKey)
	if err != nil {
		return nil, err
	}
	if len(raw) == 0 {
		return nil, fmt.Errorf("no meta record: not a journal, or an empty one")
	}
	m, err := decodeMeta(raw)
	if err != nil {
		return nil, err
	}
	l := newLedger(m)
	err = s.each(bucketCommands, func(key, value []byte) error {
		e, err := decodeEntry(string(key), value)
		if err != nil {
			return err
		}
		l.put(e)
		return nil
	})
	if err != nil {
		return nil, err
	}
	bodies := map[string]map[string]int{bucketSigned: {}, bucketOutcomes: {}}
	for name, sizes := range bodies {
		err := s.each(name, func(key, value []byte) error {
			body, err := open(string(key), value)
			if err != nil {
				return fmt.Errorf("%s %q: %w", name, key, err)
			}
			sizes[string(key)] = len(body)
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	for id, e := range l.entries {
		if bodies[bucketSigned][id] != e.SignedBytes || bodies[bucketOutcomes][id] != e.OutcomeBytes {
			return nil, fmt.Errorf("command %q: bodies of %d and %d bytes, its record says %d and %d", id,
				bodies[bucketSigned][id], bodies[bucketOutcomes][id], e.SignedBytes, e.OutcomeBytes)
		}
	}
	next := m.AckedEvent + 1
	err = s.each(bucketEvents, func(key, value []byte) error {
		sequence, err := eventSequence(key)
		if err != nil {
			return err
		}
		if sequence != next {
			return fmt.Errorf("event %d where %d should be", sequence, next)
		}
		body, err := open(string(key), value)
		if err != nil {
			return fmt.Errorf("event %d: %w", sequence, err)
		}
		l.pushEvent(len(body))
		next++
		return nil
	})
	if err != nil {
		return nil, err
	}
	if next != m.NextEvent {
		return nil, fmt.Errorf("events end before %d, the meta record says %d", next, m.NextEvent)
	}
	return l, nil
}
