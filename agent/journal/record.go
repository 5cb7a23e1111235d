package journal

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
)

// recordVersion is the first byte of every value.
const recordVersion = 1

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// seal puts a version and a checksum over the key and the payload before it:
// bbolt checks its meta pages only, and a flipped bit in an outcome must not
// reach the gateway, nor one in an entry decide what runs.
func seal(key string, payload []byte) []byte {
	out := make([]byte, 5, 5+len(payload))
	out[0] = recordVersion
	binary.LittleEndian.PutUint32(out[1:], checksum(key, payload))
	return append(out, payload...)
}

// open checks a sealed value and returns its payload, which aliases it.
func open(key string, value []byte) ([]byte, error) {
	if len(value) < 5 {
		return nil, fmt.Errorf("record of %d bytes is too short", len(value))
	}
	if value[0] != recordVersion {
		return nil, fmt.Errorf("record version %d, this bcd reads %d", value[0], recordVersion)
	}
	if want, got := binary.LittleEndian.Uint32(value[1:]), checksum(key, value[5:]); want != got {
		return nil, fmt.Errorf("record checksum %08x, content has %08x", want, got)
	}
	return value[5:], nil
}

func checksum(key string, payload []byte) uint32 {
	sum := crc32.Update(0, castagnoli, []byte(key))
	return crc32.Update(sum, castagnoli, payload)
}

// meta is the journal's own record.
type meta struct {
	ID string `json:"id"`
	// Serial counts commits. bbolt silently goes back by one when its newer
	// meta page is damaged; the anchor's serial shows it.
	Serial int64 `json:"serial"`
	// NextEvent is the sequence of the next event; AckedEvent the highest one
	// that is acknowledged.
	NextEvent  int64 `json:"next_event"`
	AckedEvent int64 `json:"acked_event"`
	// Dropped counts telemetry that no GAP marker reports yet.
	Dropped int64 `json:"dropped,omitempty"`
	// Epoch is the highest session epoch seen.
	Epoch int64 `json:"epoch,omitempty"`
	// LatestMS is the latest server time in any record.
	LatestMS int64 `json:"latest_ms,omitempty"`
	// Lost is the id of an earlier journal whose loss the gateway has not yet
	// been told; LostReason says why.
	Lost       string `json:"lost,omitempty"`
	LostReason string `json:"lost_reason,omitempty"`
	// IssuedFloorMS: a command issued at or before it may have been run by a
	// journal that is lost.
	IssuedFloorMS int64 `json:"issued_floor_ms,omitempty"`
}

func encodeJSON(key string, v any) []byte {
	payload, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("journal: encode %s: %v", key, err)) // plain structs: cannot happen
	}
	return seal(key, payload)
}

func decodeEntry(key string, value []byte) (Entry, error) {
	payload, err := open(key, value)
	if err != nil {
		return Entry{}, fmt.Errorf("command %q: %w", key, err)
	}
	var e Entry
	if err := json.Unmarshal(payload, &e); err != nil {
		return Entry{}, fmt.Errorf("command %q: %w", key, err)
	}
	switch {
	case e.ID != key:
		return Entry{}, fmt.Errorf("command %q: record names %q", key, e.ID)
	case e.State < Accepted || e.State > Acknowledged:
		return Entry{}, fmt.Errorf("command %q: %v", key, e.State)
	case e.AfterState < AfterNone || e.AfterState > AfterDone:
		return Entry{}, fmt.Errorf("command %q: after state %d", key, int(e.AfterState))
	case e.SignedBytes < 0 || e.SignedBytes > MaxSignedBytes || e.OutcomeBytes < 0 || e.OutcomeBytes > MaxOutcomeBytes:
		return Entry{}, fmt.Errorf("command %q: sizes %d and %d", key, e.SignedBytes, e.OutcomeBytes)
	}
	return e, nil
}

func decodeMeta(value []byte) (meta, error) {
	payload, err := open(metaKey, value)
	if err != nil {
		return meta{}, fmt.Errorf("meta: %w", err)
	}
	var m meta
	if err := json.Unmarshal(payload, &m); err != nil {
		return meta{}, fmt.Errorf("meta: %w", err)
	}
	if m.ID == "" || m.NextEvent < 1 || m.AckedEvent < 0 || m.AckedEvent >= m.NextEvent || m.Serial < 0 || m.Dropped < 0 {
		return meta{}, errors.New("meta: impossible values")
	}
	return m, nil
}

// eventKey is big-endian, so that keys sort as sequences do.
func eventKey(sequence int64) string {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(sequence))
	return string(b[:])
}

func eventSequence(key []byte) (int64, error) {
	if len(key) != 8 {
		return 0, fmt.Errorf("event key of %d bytes", len(key))
	}
	return int64(binary.BigEndian.Uint64(key)), nil
}
