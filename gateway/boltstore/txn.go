package boltstore

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"strings"

	bolt "go.etcd.io/bbolt"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/gateway"
)

// The buckets. Those in the second half are indexes: their keys end in, or
// their values are, the key of a record, and PutX keeps them.
const (
	tokens       = "tokens"
	machines     = "machines"
	nodes        = "nodes"
	certificates = "certificates"
	commands     = "commands"
	events       = "events"
	timeline     = "timeline"
	sections     = "sections"
	specs        = "specs"
	secrets      = "secrets"
	blobs        = "blobs"
	sites        = "sites"
	artefacts    = "artefacts"
	boots        = "boots"
	grants       = "boot-grants"

	machineKeys     = "machine-keys"     // key -> machine id
	machineNodes    = "machine-nodes"    // machine id, joined, node id
	commandKeys     = "command-keys"     // machine id, idempotency key -> command id
	openCommands    = "open-commands"    // node id, sequence -> command id
	commandOrder    = "command-order"    // sequence -> command id
	machineCommands = "machine-commands" // machine id, sequence -> command id
	machineTimeline = "machine-timeline" // machine id, sequence
)

var buckets = []string{
	tokens, machines, nodes, certificates, commands, events, timeline, sections, specs, secrets, blobs,
	sites, artefacts, boots, grants,
	machineKeys, machineNodes, commandKeys, openCommands, commandOrder, machineCommands, machineTimeline,
}

type txn struct{ tx *bolt.Tx }

var _ gateway.Tx = (*txn)(nil)

// key joins parts with a zero byte, which no id has.
func key(parts ...string) []byte { return []byte(strings.Join(parts, "\x00")) }

// prefix is the key of everything below parts.
func prefix(parts ...string) []byte { return append(key(parts...), 0) }

func number(n int64) string {
	return string(binary.BigEndian.AppendUint64(nil, uint64(n)))
}

func (t *txn) bucket(name string) *bolt.Bucket { return t.tx.Bucket([]byte(name)) }

func (t *txn) put(bucket string, k, v []byte) error {
	if !t.tx.Writable() {
		return gateway.ErrReadOnly
	}
	if len(k) == 0 {
		return fmt.Errorf("%s: record without a key", bucket)
	}
	return t.bucket(bucket).Put(k, v)
}

func (t *txn) remove(bucket string, k []byte) error {
	if !t.tx.Writable() {
		return gateway.ErrReadOnly
	}
	return t.bucket(bucket).Delete(k)
}

func putRecord[T any](t *txn, bucket string, k []byte, record *T) error {
	encoded, err := json.Marshal(record)
	if err != nil {
		return fmt.Errorf("%s %q: %w", bucket, k, err)
	}
	return t.put(bucket, k, encoded)
}

func decode[T any](bucket string, k, v []byte) (*T, error) {
	record := new(T)
	if err := json.Unmarshal(v, record); err != nil {
		return nil, fmt.Errorf("%s %q is damaged: %w", bucket, k, err)
	}
	return record, nil
}

func getRecord[T any](t *txn, bucket string, k []byte) (*T, error) {
	if len(k) == 0 {
		return nil, fmt.Errorf("%s: %w", bucket, gateway.ErrNotFound)
	}
	v := t.bucket(bucket).Get(k)
	if v == nil {
		return nil, fmt.Errorf("%s %q: %w", bucket, k, gateway.ErrNotFound)
	}
	return decode[T](bucket, k, v)
}

func eachRecord[T any](t *txn, bucket string, fn func(*T) error) error {
	return t.bucket(bucket).ForEach(func(k, v []byte) error {
		record, err := decode[T](bucket, k, v)
		if err != nil {
			return err
		}
		return fn(record)
	})
}

// forward walks the keys from start on that begin with within.
func (t *txn) forward(bucket string, start, within []byte, fn func(k, v []byte) (more bool, err error)) error {
	cursor := t.bucket(bucket).Cursor()
	for k, v := cursor.Seek(start); k != nil && bytes.HasPrefix(k, within); k, v = cursor.Next() {
		if more, err := fn(k, v); err != nil || !more {
			return err
		}
	}
	return nil
}

// backward walks the keys that begin with within, last first.
func (t *txn) backward(bucket string, within []byte, fn func(k, v []byte) (more bool, err error)) error {
	cursor := t.bucket(bucket).Cursor()
	var k, v []byte
	if len(within) == 0 {
		k, v = cursor.Last()
	} else {
		// The first key after all of them; every prefix here ends in 0.
		after := bytes.Clone(within)
		after[len(after)-1]++
		if k, _ = cursor.Seek(after); k == nil {
			k, v = cursor.Last()
		} else {
			k, v = cursor.Prev()
		}
	}
	for ; k != nil && bytes.HasPrefix(k, within); k, v = cursor.Prev() {
		if more, err := fn(k, v); err != nil || !more {
			return err
		}
	}
	return nil
}

func (t *txn) Token(id string) (*gateway.Token, error) {
	return getRecord[gateway.Token](t, tokens, key(id))
}

func (t *txn) PutToken(token *gateway.Token) error {
	return putRecord(t, tokens, key(token.ID), token)
}

func (t *txn) EachToken(fn func(*gateway.Token) error) error { return eachRecord(t, tokens, fn) }

func (t *txn) DeleteToken(id string) error { return t.remove(tokens, key(id)) }

func (t *txn) Machine(id string) (*gateway.Machine, error) {
	return getRecord[gateway.Machine](t, machines, key(id))
}

func (t *txn) FindMachine(name string) (*gateway.Machine, error) {
	id := t.bucket(machineKeys).Get(key(strings.ToLower(name)))
	if id == nil {
		return nil, fmt.Errorf("machine with %s: %w", name, gateway.ErrNotFound)
	}
	return t.Machine(string(id))
}

func (t *txn) PutMachine(m *gateway.Machine) error {
	keys := map[string]bool{}
	for _, k := range m.Keys() {
		keys[k] = true
	}
	if old, err := t.Machine(m.ID); err == nil {
		for _, k := range old.Keys() {
			if owner := t.bucket(machineKeys).Get(key(k)); !keys[k] && string(owner) == m.ID {
				if err := t.remove(machineKeys, key(k)); err != nil {
					return err
				}
			}
		}
	}
	for k := range keys {
		if err := t.put(machineKeys, key(k), []byte(m.ID)); err != nil {
			return err
		}
	}
	return putRecord(t, machines, key(m.ID), m)
}

func (t *txn) EachMachine(fn func(*gateway.Machine) error) error {
	return eachRecord(t, machines, fn)
}

func (t *txn) Node(id string) (*gateway.Node, error) {
	return getRecord[gateway.Node](t, nodes, key(id))
}

func (t *txn) PutNode(n *gateway.Node) error {
	if err := putRecord(t, nodes, key(n.ID), n); err != nil {
		return err
	}
	return t.put(machineNodes, key(n.MachineID, number(n.JoinedMS), n.ID), []byte(n.ID))
}

func (t *txn) NodesOf(machineID string) ([]*gateway.Node, error) {
	var list []*gateway.Node
	within := prefix(machineID)
	seen := map[string]bool{}
	err := t.forward(machineNodes, within, within, func(_, id []byte) (bool, error) {
		if seen[string(id)] {
			return true, nil
		}
		seen[string(id)] = true
		node, err := t.Node(string(id))
		if err == nil {
			list = append(list, node)
		}
		return true, err
	})
	return list, err
}

func (t *txn) Certificate(serial string) (*gateway.Certificate, error) {
	return getRecord[gateway.Certificate](t, certificates, key(serial))
}

func (t *txn) PutCertificate(c *gateway.Certificate) error {
	return putRecord(t, certificates, key(c.Serial), c)
}

func (t *txn) Command(id string) (*gateway.Command, error) {
	return getRecord[gateway.Command](t, commands, key(id))
}

func (t *txn) CommandByKey(machineID, idempotencyKey string) (*gateway.Command, error) {
	id := t.bucket(commandKeys).Get(key(machineID, idempotencyKey))
	if id == nil {
		return nil, fmt.Errorf("command with idempotency key %q: %w", idempotencyKey, gateway.ErrNotFound)
	}
	return t.Command(string(id))
}

func (t *txn) PutCommand(c *gateway.Command) error {
	if c.Sequence == 0 {
		if !t.tx.Writable() {
			return gateway.ErrReadOnly
		}
		sequence, err := t.bucket(commands).NextSequence()
		if err != nil {
			return err
		}
		c.Sequence = int64(sequence)
		id := []byte(c.ID)
		if err := t.put(commandOrder, key(number(c.Sequence)), id); err != nil {
			return err
		}
		if err := t.put(machineCommands, key(c.MachineID, number(c.Sequence)), id); err != nil {
			return err
		}
		if c.IdempotencyKey != "" {
			if err := t.put(commandKeys, key(c.MachineID, c.IdempotencyKey), id); err != nil {
				return err
			}
		}
	}
	open := key(c.NodeID, number(c.Sequence))
	if c.State == bcdv1.CommandState_COMMAND_STATE_ENDED {
		if err := t.remove(openCommands, open); err != nil {
			return err
		}
	} else if err := t.put(openCommands, open, []byte(c.ID)); err != nil {
		return err
	}
	return putRecord(t, commands, key(c.ID), c)
}

func (t *txn) OpenCommands(nodeID string) ([]*gateway.Command, error) {
	var within []byte
	if nodeID != "" {
		within = prefix(nodeID)
	}
	var list []*gateway.Command
	err := t.forward(openCommands, within, within, func(_, id []byte) (bool, error) {
		command, err := t.Command(string(id))
		if err == nil {
			list = append(list, command)
		}
		return true, err
	})
	return list, err
}

func (t *txn) CommandsOf(machineID string, limit int) ([]*gateway.Command, error) {
	bucket, within := commandOrder, []byte(nil)
	if machineID != "" {
		bucket, within = machineCommands, prefix(machineID)
	}
	var list []*gateway.Command
	err := t.backward(bucket, within, func(_, id []byte) (bool, error) {
		if len(list) >= limit {
			return false, nil
		}
		command, err := t.Command(string(id))
		if err == nil {
			list = append(list, command)
		}
		return true, err
	})
	return list, err
}

func (t *txn) PutEvent(e *gateway.Event) (bool, error) {
	k := key(e.NodeID, e.JournalID, number(e.Sequence))
	if t.bucket(events).Get(k) != nil {
		return false, nil
	}
	return true, putRecord(t, events, k, e)
}

func (t *txn) Events(nodeID, journalID string, after int64, limit int) ([]*gateway.Event, error) {
	var list []*gateway.Event
	err := t.forward(events, key(nodeID, journalID, number(after+1)), prefix(nodeID, journalID), func(k, v []byte) (bool, error) {
		if len(list) >= limit {
			return false, nil
		}
		event, err := decode[gateway.Event](events, k, v)
		if err == nil {
			list = append(list, event)
		}
		return true, err
	})
	return list, err
}
