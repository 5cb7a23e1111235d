// Package storetest is the conformance suite of gateway.Store: what holds for
// one implementation holds for all.
package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/gateway"
)

// Maker opens the same store again each time it is called; the suite closes
// what it opened before it opens it again.
type Maker func(t *testing.T) gateway.Store

// Run runs the suite. fresh gives a Maker for a new, empty store.
func Run(t *testing.T, fresh func(t *testing.T) Maker) {
	for _, test := range []struct {
		name string
		run  func(*testing.T, Maker)
	}{
		{"Records", records},
		{"NotFound", notFound},
		{"FailedUpdateChangesNothing", rollback},
		{"ViewDoesNotWrite", readOnly},
		{"MachineKeys", machineKeys},
		{"CommandsKeepTheirOrder", commandOrder},
		{"EventsAreStoredOnce", events},
		{"TimelineSequence", timeline},
		{"CompareAndSetHasOneWinner", compareAndSet},
		{"StateOutlivesTheProcess", durable},
		{"SitesAndBoots", sites},
		{"CancelledContext", cancelled},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, fresh(t)) })
	}
}

func open(t *testing.T, mk Maker) gateway.Store {
	t.Helper()
	s := mk(t)
	t.Cleanup(func() { s.Close() })
	return s
}

func update(t *testing.T, s gateway.Store, fn func(gateway.Tx) error) {
	t.Helper()
	if err := s.Update(t.Context(), fn); err != nil {
		t.Fatal(err)
	}
}

func view(t *testing.T, s gateway.Store, fn func(gateway.Tx) error) {
	t.Helper()
	if err := s.View(t.Context(), fn); err != nil {
		t.Fatal(err)
	}
}

func records(t *testing.T, mk Maker) {
	s := open(t, mk)
	update(t, s, func(tx gateway.Tx) error {
		return errors.Join(
			tx.PutToken(&gateway.Token{ID: "a", SecretSHA256: []byte{1, 2}, Uses: 3, Given: map[string]string{"h": "n"}}),
			tx.PutToken(&gateway.Token{ID: "b"}),
			tx.PutNode(&gateway.Node{ID: "n2", MachineID: "m", JoinedMS: 20}),
			tx.PutNode(&gateway.Node{ID: "n1", MachineID: "m", JoinedMS: 10}),
			tx.PutNode(&gateway.Node{ID: "n3", MachineID: "m2", JoinedMS: 5}),
			tx.PutCertificate(&gateway.Certificate{Serial: "0a", NodeID: "n1"}),
			tx.PutSpec(&gateway.Spec{NodeID: "n1", Generation: 4, Signed: []byte{9}}),
			tx.PutSecret(&gateway.Secret{Reference: "userdata/c", Value: []byte("v")}),
			tx.PutSection([]byte{1, 2, 3}, []byte(`{}`)),
			tx.PutBlob(&gateway.Blob{SHA256: "ff", Size: 7}),
		)
	})
	update(t, s, func(tx gateway.Tx) error {
		return errors.Join(tx.DeleteSecret("userdata/c"), tx.DeleteBlob("ff"), tx.PutSection([]byte{1, 2, 3}, []byte(`{}`)))
	})
	view(t, s, func(tx gateway.Tx) error {
		token, err := tx.Token("a")
		if err != nil || token.Uses != 3 || !bytes.Equal(token.SecretSHA256, []byte{1, 2}) || token.Given["h"] != "n" {
			t.Errorf("token a: %+v, %v", token, err)
		}
		count := 0
		err = tx.EachToken(func(*gateway.Token) error { count++; return nil })
		if count != 2 || err != nil {
			t.Errorf("%d tokens, %v; want 2", count, err)
		}
		nodes, err := tx.NodesOf("m")
		if err != nil || len(nodes) != 2 || nodes[0].ID != "n1" || nodes[1].ID != "n2" {
			t.Errorf("nodes of m: %v, %v; want n1, n2", nodes, err)
		}
		if c, err := tx.Certificate("0a"); err != nil || c.NodeID != "n1" {
			t.Errorf("certificate: %+v, %v", c, err)
		}
		if spec, err := tx.Spec("n1"); err != nil || spec.Generation != 4 {
			t.Errorf("spec: %+v, %v", spec, err)
		}
		if _, err := tx.Secret("userdata/c"); !errors.Is(err, gateway.ErrNotFound) {
			t.Errorf("deleted secret: %v", err)
		}
		if _, err := tx.Blob("ff"); !errors.Is(err, gateway.ErrNotFound) {
			t.Errorf("deleted blob: %v", err)
		}
		if section, err := tx.Section([]byte{1, 2, 3}); err != nil || string(section) != "{}" {
			t.Errorf("section: %q, %v", section, err)
		}
		return nil
	})
}

func notFound(t *testing.T, mk Maker) {
	s := open(t, mk)
	view(t, s, func(tx gateway.Tx) error {
		_, token := tx.Token("x")
		_, machine := tx.Machine("x")
		_, found := tx.FindMachine("name:x")
		_, node := tx.Node("")
		_, certificate := tx.Certificate("x")
		_, command := tx.Command("x")
		_, byKey := tx.CommandByKey("n", "x")
		_, section := tx.Section([]byte("x"))
		_, spec := tx.Spec("x")
		_, secret := tx.Secret("x")
		_, blob := tx.Blob("x")
		_, site := tx.Site("x")
		_, artefact := tx.Artefact(gateway.ArtefactName{Architecture: "x"})
		_, boots := tx.Boots("x", "x")
		_, grant := tx.BootGrant("x")
		for i, err := range []error{token, machine, found, node, certificate, command, byKey, section, spec, secret, blob, site, artefact, boots, grant} {
			if !errors.Is(err, gateway.ErrNotFound) {
				t.Errorf("lookup %d: %v, want ErrNotFound", i, err)
			}
		}
		open, err := tx.OpenCommands("x")
		if len(open) != 0 || err != nil {
			t.Errorf("open commands: %v, %v", open, err)
		}
		if last, err := tx.LastTimeline(); last != 0 || err != nil {
			t.Errorf("last timeline: %d, %v", last, err)
		}
		return nil
	})
}

func rollback(t *testing.T, mk Maker) {
	s := open(t, mk)
	boom := errors.New("boom")
	err := s.Update(t.Context(), func(tx gateway.Tx) error {
		if err := tx.PutToken(&gateway.Token{ID: "a"}); err != nil {
			return err
		}
		if err := tx.AppendTimeline(&gateway.TimelineEntry{Type: "x"}); err != nil {
			return err
		}
		return fmt.Errorf("wrapped: %w", boom)
	})
	if !errors.Is(err, boom) {
		t.Fatalf("error %v, want boom", err)
	}
	view(t, s, func(tx gateway.Tx) error {
		if _, err := tx.Token("a"); !errors.Is(err, gateway.ErrNotFound) {
			t.Errorf("token of a failed transaction: %v", err)
		}
		if list, _ := tx.Timeline("", 0, 10); len(list) != 0 {
			t.Errorf("timeline of a failed transaction: %v", list)
		}
		return nil
	})
}

func readOnly(t *testing.T, mk Maker) {
	s := open(t, mk)
	view(t, s, func(tx gateway.Tx) error {
		_, event := tx.PutEvent(&gateway.Event{NodeID: "n", JournalID: "j", Sequence: 1})
		for i, err := range []error{
			tx.PutToken(&gateway.Token{ID: "a"}), tx.PutMachine(&gateway.Machine{ID: "m"}), tx.PutNode(&gateway.Node{ID: "n"}),
			tx.PutCommand(&gateway.Command{ID: "c"}), tx.AppendTimeline(&gateway.TimelineEntry{}), tx.DeleteSecret("x"), event,
		} {
			if !errors.Is(err, gateway.ErrReadOnly) {
				t.Errorf("write %d in a view: %v, want ErrReadOnly", i, err)
			}
		}
		return nil
	})
}

func machineKeys(t *testing.T, mk Maker) {
	s := open(t, mk)
	update(t, s, func(tx gateway.Tx) error {
		return tx.PutMachine(&gateway.Machine{ID: "m1", Name: "rack1-u2", HardwareHash: "AB", MACs: []string{"52:54:00:00:00:01"}})
	})
	update(t, s, func(tx gateway.Tx) error {
		return tx.PutMachine(&gateway.Machine{ID: "m1", Name: "renamed", HardwareHash: "AB", MACs: []string{"52:54:00:00:00:02"}})
	})
	view(t, s, func(tx gateway.Tx) error {
		for name, there := range map[string]bool{
			"name:renamed": true, "name:RENAMED": true, "hardware:ab": true, "mac:52:54:00:00:00:02": true,
			"name:rack1-u2": false, "mac:52:54:00:00:00:01": false,
		} {
			m, err := tx.FindMachine(name)
			if there && (err != nil || m.ID != "m1") || !there && !errors.Is(err, gateway.ErrNotFound) {
				t.Errorf("%s: %+v, %v; want found %v", name, m, err, there)
			}
		}
		return nil
	})
}

func commandOrder(t *testing.T, mk Maker) {
	s := open(t, mk)
	for i, node := range []string{"n1", "n2", "n1", "n1"} {
		update(t, s, func(tx gateway.Tx) error {
			return tx.PutCommand(&gateway.Command{
				ID: fmt.Sprintf("c%d", i), NodeID: node, MachineID: "m" + node, IdempotencyKey: fmt.Sprintf("k%d", i),
				State: bcdv1.CommandState_COMMAND_STATE_QUEUED,
			})
		})
	}
	update(t, s, func(tx gateway.Tx) error {
		c, err := tx.Command("c0")
		if err != nil {
			return err
		}
		c.State = bcdv1.CommandState_COMMAND_STATE_ENDED
		return tx.PutCommand(c)
	})
	names := func(list []*gateway.Command, err error) string {
		if err != nil {
			t.Error(err)
		}
		out := ""
		for _, c := range list {
			out += c.ID + " "
		}
		return out
	}
	view(t, s, func(tx gateway.Tx) error {
		for _, check := range []struct{ what, got, want string }{
			{"open n1", names(tx.OpenCommands("n1")), "c2 c3 "},
			{"open n2", names(tx.OpenCommands("n2")), "c1 "},
			{"open", names(tx.OpenCommands("")), "c2 c3 c1 "},
			{"newest of mn1", names(tx.CommandsOf("mn1", 2)), "c3 c2 "},
			{"newest", names(tx.CommandsOf("", 10)), "c3 c2 c1 c0 "},
		} {
			if check.got != check.want {
				t.Errorf("%s: %q, want %q", check.what, check.got, check.want)
			}
		}
		if c, err := tx.CommandByKey("mn1", "k2"); err != nil || c.ID != "c2" {
			t.Errorf("by key: %+v, %v", c, err)
		}
		if _, err := tx.CommandByKey("mn2", "k2"); !errors.Is(err, gateway.ErrNotFound) {
			t.Errorf("another machine's key: %v", err)
		}
		return nil
	})
}

func events(t *testing.T, mk Maker) {
	s := open(t, mk)
	put := func(journal string, sequence int64) (isNew bool) {
		update(t, s, func(tx gateway.Tx) (err error) {
			isNew, err = tx.PutEvent(&gateway.Event{NodeID: "n", JournalID: journal, Sequence: sequence, Type: journal})
			return err
		})
		return isNew
	}
	for _, step := range []struct {
		journal  string
		sequence int64
		isNew    bool
	}{{"j1", 1, true}, {"j1", 2, true}, {"j1", 1, false}, {"j2", 1, true}, {"j1", 300, true}, {"j1", 300, false}} {
		if got := put(step.journal, step.sequence); got != step.isNew {
			t.Errorf("event %s/%d: new %v, want %v", step.journal, step.sequence, got, step.isNew)
		}
	}
	view(t, s, func(tx gateway.Tx) error {
		list, err := tx.Events("n", "j1", 1, 10)
		if err != nil || len(list) != 2 || list[0].Sequence != 2 || list[1].Sequence != 300 {
			t.Errorf("events after 1: %v, %v; want 2 and 300", list, err)
		}
		return nil
	})
}

func timeline(t *testing.T, mk Maker) {
	s := open(t, mk)
	for i := range 300 {
		update(t, s, func(tx gateway.Tx) error {
			return tx.AppendTimeline(&gateway.TimelineEntry{MachineID: fmt.Sprintf("m%d", i%3), Message: fmt.Sprint(i)})
		})
	}
	view(t, s, func(tx gateway.Tx) error {
		all, err := tx.Timeline("", 0, 1000)
		if err != nil || len(all) != 300 {
			t.Fatalf("%d entries, %v", len(all), err)
		}
		for i, e := range all {
			if e.Message != fmt.Sprint(i) || i > 0 && e.Sequence <= all[i-1].Sequence {
				t.Fatalf("entry %d is %+v", i, e)
			}
		}
		some, err := tx.Timeline("m1", all[150].Sequence, 2)
		if err != nil || len(some) != 2 || some[0].Message != "151" || some[1].Message != "154" {
			t.Errorf("m1 after 150: %v, %v", some, err)
		}
		tail, err := tx.TimelineTail("m2", 2)
		if err != nil || len(tail) != 2 || tail[0].Message != "296" || tail[1].Message != "299" {
			t.Errorf("tail of m2: %v, %v", tail, err)
		}
		if tail, _ := tx.TimelineTail("m", 2); len(tail) != 0 {
			t.Errorf("tail of a machine that is a prefix of others: %v", tail)
		}
		last, err := tx.LastTimeline()
		if err != nil || last != all[299].Sequence {
			t.Errorf("last %d, %v", last, err)
		}
		return nil
	})
}

func compareAndSet(t *testing.T, mk Maker) {
	s := open(t, mk)
	update(t, s, func(tx gateway.Tx) error { return tx.PutNode(&gateway.Node{ID: "n", MachineID: "m"}) })
	lost := errors.New("another one won")
	const rivals, rounds = 8, 20
	var group sync.WaitGroup
	wins := make([]int, rivals)
	for rival := range rivals {
		group.Go(func() {
			for round := range rounds {
				err := s.Update(t.Context(), func(tx gateway.Tx) error {
					n, err := tx.Node("n")
					if err != nil {
						return err
					}
					if n.Epoch != int64(round) {
						return lost
					}
					n.Epoch++
					return tx.PutNode(n)
				})
				switch {
				case err == nil:
					wins[rival]++
				case !errors.Is(err, lost):
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	total := 0
	for _, n := range wins {
		total += n
	}
	view(t, s, func(tx gateway.Tx) error {
		n, err := tx.Node("n")
		if err != nil || n.Epoch != int64(total) {
			t.Errorf("epoch %+v after %d wins, %v", n, total, err)
		}
		return nil
	})
}

func durable(t *testing.T, mk Maker) {
	s := mk(t)
	update(t, s, func(tx gateway.Tx) error {
		if err := tx.PutCommand(&gateway.Command{ID: "c1", NodeID: "n", MachineID: "m", State: bcdv1.CommandState_COMMAND_STATE_SENT}); err != nil {
			return err
		}
		return tx.AppendTimeline(&gateway.TimelineEntry{Message: "first"})
	})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.View(t.Context(), func(gateway.Tx) error { return nil }); err == nil {
		t.Error("a closed store answers")
	}
	s = open(t, mk)
	update(t, s, func(tx gateway.Tx) error {
		return errors.Join(
			tx.PutCommand(&gateway.Command{ID: "c2", NodeID: "n", MachineID: "m", State: bcdv1.CommandState_COMMAND_STATE_QUEUED}),
			tx.AppendTimeline(&gateway.TimelineEntry{Message: "second"}))
	})
	view(t, s, func(tx gateway.Tx) error {
		list, err := tx.OpenCommands("n")
		if err != nil || len(list) != 2 || list[0].ID != "c1" || list[0].State != bcdv1.CommandState_COMMAND_STATE_SENT || list[1].ID != "c2" {
			t.Errorf("commands after reopening: %v, %v", list, err)
		}
		entries, err := tx.Timeline("", 0, 10)
		if err != nil || len(entries) != 2 || entries[1].Sequence != 2 {
			t.Errorf("timeline after reopening: %v, %v", entries, err)
		}
		return nil
	})
}

func cancelled(t *testing.T, mk Maker) {
	s := open(t, mk)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := s.Update(ctx, func(tx gateway.Tx) error { return tx.PutToken(&gateway.Token{ID: "a"}) })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("update with a cancelled context: %v", err)
	}
}
