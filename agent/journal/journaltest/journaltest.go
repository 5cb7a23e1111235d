// Package journaltest is what every journal must do: one suite for the file
// and for its twin in memory.
package journaltest

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/better-compute/bcd/agent/journal"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Maker makes the journals under test.
type Maker struct {
	New func(t *testing.T) *journal.Journal
	// Reopen closes a journal and opens it again; the twin returns itself.
	Reopen func(t *testing.T, j *journal.Journal) *journal.Journal
}

// Run runs the suite.
func Run(t *testing.T, m Maker) {
	t.Run("Life", m.life)
	t.Run("Steps", m.steps)
	t.Run("After", m.after)
	t.Run("Forget", m.forget)
	t.Run("Events", m.events)
	t.Run("Gap", m.gap)
	t.Run("Full", m.full)
	t.Run("Loss", m.loss)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantErr(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("got %v, want %v", err, want)
	}
}

func wantState(t *testing.T, j *journal.Journal, id string, want journal.State) {
	t.Helper()
	if e, _ := j.Entry(id); e.State != want {
		t.Fatalf("%s is %s, want %s", id, e.State, want)
	}
}

func (m Maker) life(t *testing.T) {
	j := m.New(t)
	signed, outcome := []byte("signed bytes \x00\xff"), []byte("outcome bytes \x00\xfe")
	must(t, j.Accept(journal.Entry{ID: "cmd_a", Kind: "diag.ping", Lane: 1, DeadlineMS: 9000, AcceptedMS: 1000}, signed))
	j = m.Reopen(t, j)
	wantState(t, j, "cmd_a", journal.Accepted)
	if got, err := j.Signed("cmd_a"); err != nil || !bytes.Equal(got, signed) {
		t.Fatalf("signed is %q, %v", got, err)
	}
	must(t, j.Start("cmd_a", 2000, "boot-1"))
	j = m.Reopen(t, j)
	wantState(t, j, "cmd_a", journal.Started)
	if e, _ := j.Entry("cmd_a"); e.BootID != "boot-1" || e.StartedMS != 2000 || e.Kind != "diag.ping" {
		t.Fatalf("entry is %+v", e)
	}
	must(t, j.Finish("cmd_a", journal.Finish{Outcome: outcome, Status: 1, FinishedMS: 3000}))
	j = m.Reopen(t, j)
	wantState(t, j, "cmd_a", journal.Finished)
	if got, err := j.Outcome("cmd_a"); err != nil || !bytes.Equal(got, outcome) {
		t.Fatalf("outcome is %q, %v", got, err)
	}
	if _, err := j.Signed("cmd_a"); !errors.Is(err, journal.ErrUnknown) {
		t.Fatalf("the signed command is kept after it finished: %v", err)
	}
	if len(j.Open()) != 1 {
		t.Fatalf("open commands: %v", j.Open())
	}
	must(t, j.Acknowledge("cmd_a"))
	must(t, j.Acknowledge("cmd_a"))
	j = m.Reopen(t, j)
	wantState(t, j, "cmd_a", journal.Acknowledged)
	if got, err := j.Outcome("cmd_a"); err != nil || !bytes.Equal(got, outcome) {
		t.Fatalf("after acknowledgement outcome is %q, %v", got, err)
	}
	if len(j.Open()) != 0 || j.LatestMS() != 3000 {
		t.Fatalf("open %v, latest %d", j.Open(), j.LatestMS())
	}
}

// steps: no step but the next one is possible.
func (m Maker) steps(t *testing.T) {
	j := m.New(t)
	finish := journal.Finish{Outcome: []byte("x")}
	wantErr(t, j.Start("cmd_a", 1, ""), journal.ErrUnknown)
	wantErr(t, j.Finish("cmd_a", finish), journal.ErrUnknown)
	wantErr(t, j.Acknowledge("cmd_a"), journal.ErrUnknown)
	must(t, j.Accept(journal.Entry{ID: "cmd_a"}, []byte("s")))
	wantErr(t, j.Accept(journal.Entry{ID: "cmd_a"}, []byte("s")), journal.ErrKnown)
	wantErr(t, j.Refuse(journal.Entry{ID: "cmd_a"}, []byte("s")), journal.ErrKnown)
	wantErr(t, j.Acknowledge("cmd_a"), journal.ErrState)
	must(t, j.Start("cmd_a", 1, ""))
	wantErr(t, j.Start("cmd_a", 1, ""), journal.ErrState)
	wantErr(t, j.Finish("cmd_a", journal.Finish{Outcome: make([]byte, journal.MaxOutcomeBytes+1)}), journal.ErrTooLarge)
	must(t, j.Finish("cmd_a", finish))
	wantErr(t, j.Finish("cmd_a", finish), journal.ErrState)
	wantErr(t, j.Start("cmd_a", 1, ""), journal.ErrState)
	wantErr(t, j.BeginAfter("cmd_a"), journal.ErrState)
	must(t, j.Accept(journal.Entry{ID: "cmd_b"}, []byte("s")))
	must(t, j.Finish("cmd_b", finish)) // expired or cancelled while queued
	must(t, j.Refuse(journal.Entry{ID: "cmd_c"}, []byte("refused")))
	wantState(t, j, "cmd_c", journal.Finished)
	wantErr(t, j.Accept(journal.Entry{ID: "cmd_d"}, make([]byte, journal.MaxSignedBytes+1)), journal.ErrTooLarge)
}

func (m Maker) after(t *testing.T) {
	j := m.New(t)
	must(t, j.Accept(journal.Entry{ID: "cmd_a"}, []byte("s")))
	must(t, j.Start("cmd_a", 1, "boot-1"))
	must(t, j.Finish("cmd_a", journal.Finish{Outcome: []byte("o"), After: "reboot", BootID: "boot-1"}))
	wantErr(t, j.BeginAfter("cmd_a"), journal.ErrState)
	must(t, j.Acknowledge("cmd_a"))
	j = m.Reopen(t, j)
	if open := j.Open(); len(open) != 1 || open[0].After != "reboot" || open[0].AfterState != journal.AfterPending || open[0].BootID != "boot-1" {
		t.Fatalf("open commands: %+v", open)
	}
	must(t, j.BeginAfter("cmd_a"))
	j = m.Reopen(t, j)
	wantErr(t, j.BeginAfter("cmd_a"), journal.ErrState)
	if open := j.Open(); len(open) != 1 || open[0].AfterState != journal.AfterBegun {
		t.Fatalf("open commands: %+v", open)
	}
	must(t, j.EndAfter("cmd_a"))
	must(t, j.EndAfter("cmd_a"))
	j = m.Reopen(t, j)
	wantErr(t, j.BeginAfter("cmd_a"), journal.ErrState)
	if len(j.Open()) != 0 {
		t.Fatalf("open commands: %+v", j.Open())
	}
}

// forget: an id is known until its deadline has passed, and then goes when
// something else is written.
func (m Maker) forget(t *testing.T) {
	j := m.New(t)
	for _, e := range []journal.Entry{{ID: "cmd_early", DeadlineMS: 5000, AcceptedMS: 1000}, {ID: "cmd_late", DeadlineMS: 50000, AcceptedMS: 1000}, {ID: "cmd_unacked", DeadlineMS: 5000, AcceptedMS: 1000}} {
		must(t, j.Accept(e, []byte("s")))
		must(t, j.Finish(e.ID, journal.Finish{Outcome: []byte("o"), FinishedMS: 2000}))
		if e.ID != "cmd_unacked" {
			must(t, j.Acknowledge(e.ID))
		}
	}
	must(t, j.Accept(journal.Entry{ID: "cmd_x", DeadlineMS: 9e6, AcceptedMS: 5000}, []byte("s")))
	wantState(t, j, "cmd_early", journal.Acknowledged)
	must(t, j.Accept(journal.Entry{ID: "cmd_y", DeadlineMS: 9e6, AcceptedMS: 5001}, []byte("s")))
	j = m.Reopen(t, j)
	wantState(t, j, "cmd_early", journal.Unknown)
	wantState(t, j, "cmd_late", journal.Acknowledged)
	wantState(t, j, "cmd_unacked", journal.Finished)
}

func event(n int) *bcdv1.Event {
	return &bcdv1.Event{Type: "test", Json: fmt.Appendf(nil, `{"n":%d}`, n), TimeMs: int64(n)}
}

func (m Maker) events(t *testing.T) {
	j := m.New(t)
	if got, err := j.Events(0, 10, 1<<20); err != nil || len(got) != 0 {
		t.Fatalf("events of a new journal: %v, %v", got, err)
	}
	for n := 1; n <= 5; n++ {
		sequence, err := j.Append(journal.Durable, event(n))
		must(t, err)
		if sequence != int64(n) {
			t.Fatalf("event %d got the sequence %d", n, sequence)
		}
	}
	j = m.Reopen(t, j)
	wantErr(t, j.AckEvents(6), journal.ErrUnknown)
	must(t, j.AckEvents(2))
	must(t, j.AckEvents(1))
	j = m.Reopen(t, j)
	got, err := j.Events(0, 2, 1<<20)
	must(t, err)
	if len(got) != 2 || got[0].GetSequence() != 3 || got[1].GetSequence() != 4 || string(got[0].GetJson()) != `{"n":3}` {
		t.Fatalf("events after 2: %v", got)
	}
	got, err = j.Events(3, 10, 1)
	must(t, err)
	if len(got) != 1 || got[0].GetSequence() != 4 {
		t.Fatalf("with room for less than one: %v", got)
	}
	must(t, j.AckEvents(5))
	j = m.Reopen(t, j)
	if sequence, err := j.Append(journal.Durable, event(6)); err != nil || sequence != 6 {
		t.Fatalf("after everything was acknowledged: %d, %v", sequence, err)
	}
	_, err = j.Append(journal.Durable, &bcdv1.Event{Json: make([]byte, journal.MaxEventBytes)})
	wantErr(t, err, journal.ErrTooLarge)
}

// gap: at the bound telemetry is dropped and counted, what is durable is not.
func (m Maker) gap(t *testing.T) {
	j := m.New(t)
	big := strings.Repeat("x", 8000)
	var stored, dropped int64
	for dropped < 20 {
		sequence, err := j.Append(journal.Telemetry, &bcdv1.Event{Type: "t", Message: big})
		must(t, err)
		if sequence == 0 {
			dropped++
		} else if dropped > 0 {
			t.Fatal("telemetry after a gap and before its marker")
		} else {
			stored++
		}
	}
	if sequence, err := j.Append(journal.Durable, event(1)); err != nil || sequence != stored+1 {
		t.Fatalf("a durable event at telemetry's bound: %d, %v", sequence, err)
	}
	j = m.Reopen(t, j)
	if got := j.Stats().DroppedEvents; got != dropped {
		t.Fatalf("%d dropped events are counted, want %d", got, dropped)
	}
	must(t, j.AckEvents(stored))
	got, err := j.Events(0, 10, 1<<20)
	must(t, err)
	if len(got) != 2 || got[1].GetClass() != bcdv1.EventClass_EVENT_CLASS_GAP || string(got[1].GetJson()) != fmt.Sprintf(`{"dropped":%d}`, dropped) {
		t.Fatalf("after the gap: %v", got)
	}
	if sequence, err := j.Append(journal.Telemetry, event(2)); err != nil || sequence != stored+3 {
		t.Fatalf("telemetry after the marker: %d, %v", sequence, err)
	}
}

// full: acceptance stops, and every outcome that was accepted still fits,
// whatever events do at the same time.
func (m Maker) full(t *testing.T) {
	j := m.New(t)
	big := strings.Repeat("x", 8000)
	body := bytes.Repeat([]byte("b"), 20<<10)
	var ids []string
	for n := 0; ; n++ {
		id := fmt.Sprintf("cmd_%04d", n)
		err := j.Accept(journal.Entry{ID: id, DeadlineMS: 1 << 50, AcceptedMS: 1}, body)
		if errors.Is(err, journal.ErrFull) {
			wantErr(t, j.CanAccept(len(body)), journal.ErrFull)
			break
		}
		must(t, err)
		ids = append(ids, id)
	}
	if len(ids) < 100 {
		t.Fatalf("only %d commands fit", len(ids))
	}
	for {
		sequence, err := j.Append(journal.Telemetry, &bcdv1.Event{Type: "t", Message: big})
		must(t, err)
		if sequence == 0 {
			break
		}
	}
	for {
		_, err := j.Append(journal.Durable, &bcdv1.Event{Type: "d", Message: big})
		if errors.Is(err, journal.ErrFull) {
			break
		}
		must(t, err)
	}
	for _, id := range ids {
		must(t, j.Start(id, 1, "b"))
		must(t, j.Finish(id, journal.Finish{Outcome: bytes.Repeat([]byte(id[4:5]), journal.MaxOutcomeBytes), FinishedMS: 2}))
	}
	j = m.Reopen(t, j)
	if s := j.Stats(); s.FileBytes > journal.MaxBytes || s.Unacknowledged != len(ids) {
		t.Fatalf("stats: %+v", s)
	}
	for _, id := range ids {
		must(t, j.Acknowledge(id))
	}
	must(t, j.AckEvents(j.Sequence()))
	// Acknowledged outcomes are reduced as commands come, and there is room.
	for n := range 20 {
		must(t, j.Accept(journal.Entry{ID: fmt.Sprintf("cmd_new%d", n), DeadlineMS: 1 << 50, AcceptedMS: 3}, body))
	}
	wantState(t, j, ids[0], journal.Acknowledged)
}

func (m Maker) loss(t *testing.T) {
	j := m.New(t)
	if id, _ := j.Lost(); id != "" || j.Loss() != nil || j.IssuedFloorMS() != 0 {
		t.Fatalf("a new journal says that %q was lost", id)
	}
	must(t, j.SettleLoss(5000)) // nothing to settle
	if j.IssuedFloorMS() != 0 {
		t.Fatal("a floor without a loss")
	}
	must(t, j.SetEpoch(7))
	must(t, j.SetEpoch(3))
	j = m.Reopen(t, j)
	if j.Epoch() != 7 {
		t.Fatalf("epoch %d, want 7", j.Epoch())
	}
}
