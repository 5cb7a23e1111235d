package boltstore

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/better-compute/bcd/gateway"
)

func (t *txn) AppendTimeline(entry *gateway.TimelineEntry) error {
	if !t.tx.Writable() {
		return gateway.ErrReadOnly
	}
	sequence, err := t.bucket(timeline).NextSequence()
	if err != nil {
		return err
	}
	entry.Sequence = int64(sequence)
	if entry.MachineID != "" {
		if err := t.put(machineTimeline, key(entry.MachineID, number(entry.Sequence)), []byte{1}); err != nil {
			return err
		}
	}
	return putRecord(t, timeline, key(number(entry.Sequence)), entry)
}

func (t *txn) entry(sequence []byte) (*gateway.TimelineEntry, error) {
	return getRecord[gateway.TimelineEntry](t, timeline, sequence)
}

func (t *txn) Timeline(machineID string, after int64, limit int) ([]*gateway.TimelineEntry, error) {
	bucket, within, start := timeline, []byte(nil), key(number(after+1))
	if machineID != "" {
		bucket, within, start = machineTimeline, prefix(machineID), key(machineID, number(after+1))
	}
	var list []*gateway.TimelineEntry
	err := t.forward(bucket, start, within, func(k, _ []byte) (bool, error) {
		if len(list) >= limit {
			return false, nil
		}
		entry, err := t.entry(k[len(within):])
		if err == nil {
			list = append(list, entry)
		}
		return true, err
	})
	return list, err
}

func (t *txn) TimelineTail(machineID string, limit int) ([]*gateway.TimelineEntry, error) {
	bucket, within := timeline, []byte(nil)
	if machineID != "" {
		bucket, within = machineTimeline, prefix(machineID)
	}
	var list []*gateway.TimelineEntry
	err := t.backward(bucket, within, func(k, _ []byte) (bool, error) {
		if len(list) >= limit {
			return false, nil
		}
		entry, err := t.entry(k[len(within):])
		if err == nil {
			list = append(list, entry)
		}
		return true, err
	})
	slices.Reverse(list)
	return list, err
}

func (t *txn) LastTimeline() (int64, error) {
	k, _ := t.bucket(timeline).Cursor().Last()
	if len(k) != 8 {
		return 0, nil
	}
	return int64(binary.BigEndian.Uint64(k)), nil
}

func (t *txn) Section(sha256 []byte) ([]byte, error) {
	v := t.bucket(sections).Get(sha256)
	if v == nil {
		return nil, fmt.Errorf("inventory section %x: %w", sha256, gateway.ErrNotFound)
	}
	return bytes.Clone(v), nil
}

func (t *txn) PutSection(sha256, canonicalJSON []byte) error {
	if t.tx.Writable() && t.bucket(sections).Get(sha256) != nil {
		return nil
	}
	return t.put(sections, sha256, canonicalJSON)
}

func (t *txn) Spec(nodeID string) (*gateway.Spec, error) {
	return getRecord[gateway.Spec](t, specs, key(nodeID))
}

func (t *txn) PutSpec(spec *gateway.Spec) error { return putRecord(t, specs, key(spec.NodeID), spec) }

func (t *txn) Secret(reference string) (*gateway.Secret, error) {
	return getRecord[gateway.Secret](t, secrets, key(reference))
}

func (t *txn) PutSecret(secret *gateway.Secret) error {
	return putRecord(t, secrets, key(secret.Reference), secret)
}

func (t *txn) DeleteSecret(reference string) error { return t.remove(secrets, key(reference)) }

func (t *txn) Blob(sha256Hex string) (*gateway.Blob, error) {
	return getRecord[gateway.Blob](t, blobs, key(sha256Hex))
}

func (t *txn) PutBlob(blob *gateway.Blob) error { return putRecord(t, blobs, key(blob.SHA256), blob) }

func (t *txn) DeleteBlob(sha256Hex string) error { return t.remove(blobs, key(sha256Hex)) }

func (t *txn) EachBlob(fn func(*gateway.Blob) error) error { return eachRecord(t, blobs, fn) }
