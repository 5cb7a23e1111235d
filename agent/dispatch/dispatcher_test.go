package dispatch_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/dispatch"
	"github.com/better-compute/bcd/agent/journal"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	succeeded     = bcdv1.OutcomeStatus_OUTCOME_STATUS_SUCCEEDED
	failedStatus  = bcdv1.OutcomeStatus_OUTCOME_STATUS_FAILED
	expired       = bcdv1.OutcomeStatus_OUTCOME_STATUS_EXPIRED
	cancelled     = bcdv1.OutcomeStatus_OUTCOME_STATUS_CANCELLED
	indeterminate = bcdv1.OutcomeStatus_OUTCOME_STATUS_INDETERMINATE
)

func hour() time.Time { return time.Now().Add(time.Hour) }

// gate is an executor that works until it is let go or interrupted.
func gate(kind string) (*executor, chan struct{}, *atomic.Int32) {
	open, running := make(chan struct{}), new(atomic.Int32)
	return &executor{kind: kind, run: func(ctx context.Context, _ dispatch.Command, _ dispatch.Progress) (dispatch.Result, error) {
		running.Add(1)
		defer running.Add(-1)
		select {
		case <-open:
			return dispatch.Result{}, nil
		case <-ctx.Done():
			return dispatch.Result{}, ctx.Err()
		}
	}}, open, running
}

func TestLanes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bulk, open, running := gate("logs.collect")
		r := newRig(t, setup{executors: []dispatch.Executor{bulk, &executor{kind: "diag.ping"}}})
		for n := range 6 {
			r.offer(command(fmt.Sprintf("cmd_b%d", n), "logs.collect", hour()))
		}
		if running.Load() != 1 {
			t.Fatalf("%d bulk commands run at once", running.Load())
		}
		if free := r.d.Free(); free.GetBulk() != 0 || free.GetControl() != 68 || free.GetProvision() != 18 {
			t.Fatalf("free: %v", free)
		}
		// The sixth found the lane full: retryable, never recorded.
		a := r.accepted("cmd_b5")
		if len(a) != 1 || a[0].GetRejection() != bcdv1.Rejection_REJECTION_LANE_FULL {
			t.Fatalf("the sixth was answered %v", a)
		}
		if _, known := r.journal.Entry("cmd_b5"); known {
			t.Fatal("LANE_FULL was recorded")
		}
		// A slow bulk command never delays a control command.
		r.offer(command("cmd_c", "diag.ping", hour()))
		r.wantStatus("cmd_c", succeeded)
		close(open)
		synctest.Wait()
		for n := range 5 {
			r.wantStatus(fmt.Sprintf("cmd_b%d", n), succeeded)
		}
		r.offer(command("cmd_b5", "logs.collect", hour()))
		r.wantStatus("cmd_b5", succeeded)
	})
}

func TestDeadlineInQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bulk, open, _ := gate("logs.collect")
		r := newRig(t, setup{executors: []dispatch.Executor{bulk}})
		r.offer(command("cmd_first", "logs.collect", hour()))
		r.offer(command("cmd_late", "logs.collect", time.Now().Add(time.Minute)))
		time.Sleep(59 * time.Second)
		synctest.Wait()
		if len(r.outcomes("cmd_late")) != 0 {
			t.Fatal("expired before its deadline")
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if o := r.wantStatus("cmd_late", expired); o.GetStartedMs() != 0 {
			t.Fatalf("expired and started: %v", o)
		}
		close(open)
	})
}

// TestDeadlineBeforeEffect: an executor that prepares for a while asks again.
func TestDeadlineBeforeEffect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := &executor{kind: "diag.ping", run: func(_ context.Context, cmd dispatch.Command, _ dispatch.Progress) (dispatch.Result, error) {
			time.Sleep(2 * time.Minute)
			if err := cmd.StillDue(); err != nil {
				return dispatch.Result{}, fmt.Errorf("before the effect: %w", err)
			}
			return dispatch.Result{}, nil
		}}
		r := newRig(t, setup{executors: []dispatch.Executor{slow}})
		r.offer(command("cmd_a", "diag.ping", time.Now().Add(time.Minute)))
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		r.wantStatus("cmd_a", expired)
	})
}

func TestNothingRunsBeforeTheFirstMark(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first := newRig(t, setup{executors: []dispatch.Executor{&executor{kind: "diag.ping"}}})
		late, due := command("cmd_late", "diag.ping", time.Now().Add(time.Minute)), command("cmd_due", "diag.ping", hour())
		for _, c := range []*bcdv1.Command{late, due} {
			raw, err := proto.Marshal(sign(t, c, "good"))
			if err != nil {
				t.Fatal(err)
			}
			if err := first.journal.Accept(journal.Entry{ID: c.GetId(), Kind: c.GetKind(), Lane: 1, DeadlineMS: c.GetDeadlineMs()}, raw); err != nil {
				t.Fatal(err)
			}
		}
		first.stop()
		r := newRig(t, setup{journal: first.journal, noMark: true, executors: []dispatch.Executor{&executor{kind: "diag.ping"}}})
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if len(r.outcomes("cmd_due"))+len(r.outcomes("cmd_late")) != 0 {
			t.Fatal("something ended before the first mark")
		}
		r.mu.Lock()
		r.known = true
		r.mu.Unlock()
		r.d.Connected()
		synctest.Wait()
		r.wantStatus("cmd_due", succeeded)
		r.wantStatus("cmd_late", expired)
	})
}

func TestCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bulk, _, _ := gate("logs.collect")
		prov, _, _ := gate("deploy.image")
		r := newRig(t, setup{executors: []dispatch.Executor{bulk, prov}, role: bcdv1.Role_ROLE_RAMDISK})
		r.offer(command("cmd_run", "logs.collect", hour()))
		r.offer(command("cmd_wait", "logs.collect", hour()))
		r.offer(command("cmd_deploy", "deploy.image", hour()))
		for _, id := range []string{"cmd_wait", "cmd_run", "cmd_deploy", "cmd_none"} {
			r.d.Cancel(id, "no longer wanted")
		}
		synctest.Wait()
		if o := r.wantStatus("cmd_wait", cancelled); o.GetStartedMs() != 0 {
			t.Fatalf("a queued command was started: %v", o)
		}
		r.wantStatus("cmd_run", cancelled)        // resumable: running it in part leaves nothing behind
		r.wantStatus("cmd_deploy", indeterminate) // how far it came cannot be known
		if a := r.accepted("cmd_none"); len(a) != 1 || !a[0].GetUnknown() {
			t.Fatalf("cancel of an unknown id: %v", a)
		}
	})
}

func TestFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var fail func() (dispatch.Result, error)
		e := &executor{kind: "diag.ping", run: func(context.Context, dispatch.Command, dispatch.Progress) (dispatch.Result, error) { return fail() }}
		r := newRig(t, setup{executors: []dispatch.Executor{e}})
		for n, c := range []struct {
			fail    func() (dispatch.Result, error)
			status  bcdv1.OutcomeStatus
			code    string
			message string
		}{
			{func() (dispatch.Result, error) { return dispatch.Result{}, errors.New("disk on fire") }, failedStatus, "FAILED", "disk on fire"},
			{func() (dispatch.Result, error) {
				return dispatch.Result{}, fmt.Errorf("x: %w", &dispatch.Failure{Code: "DIGEST_MISMATCH", Message: "digest is wrong"})
			}, failedStatus, "DIGEST_MISMATCH", "digest is wrong"},
			{func() (dispatch.Result, error) {
				return dispatch.Result{}, &dispatch.Failure{Code: "HALF", Message: "half done", Indeterminate: true}
			}, indeterminate, "HALF", "half done"},
			{func() (dispatch.Result, error) { panic("boom") }, indeterminate, "PANIC", "boom"},
			{func() (dispatch.Result, error) { return dispatch.Result{}, errors.New(strings.Repeat("ä", 9000)) }, failedStatus, "FAILED", "ä…"},
			{func() (dispatch.Result, error) { return dispatch.Result{}, errors.New("bad \xff utf8") }, failedStatus, "FAILED", "bad"},
			{func() (dispatch.Result, error) {
				return dispatch.Result{Body: &bcdv1.DiagPingResult{Payload: make([]byte, 9000)}}, nil
			}, succeeded, "RESULT_TOO_LARGE", "left out"},
		} {
			id := fmt.Sprintf("cmd_f%d", n)
			fail = c.fail
			r.offer(command(id, "diag.ping", hour()))
			o := r.wantStatus(id, c.status)
			if o.GetCode() != c.code || !strings.Contains(o.GetMessage(), c.message) || len(o.GetMessage()) > 4096 {
				t.Errorf("case %d: code %q, message %.80q", n, o.GetCode(), o.GetMessage())
			}
		}
	})
}

func TestProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &executor{kind: "logs.collect", run: func(_ context.Context, _ dispatch.Command, progress dispatch.Progress) (dispatch.Result, error) {
			for n := range 100 { // ten a second for ten seconds
				progress(&bcdv1.TransferProgress{BytesDone: int64(n + 1)})
				time.Sleep(100 * time.Millisecond)
			}
			return dispatch.Result{}, nil
		}}
		r := newRig(t, setup{executors: []dispatch.Executor{e}})
		r.offer(command("cmd_p", "logs.collect", hour()))
		time.Sleep(20 * time.Second)
		synctest.Wait()
		list := r.progress("cmd_p")
		if len(list) < 10 || len(list) > 12 {
			t.Fatalf("%d progress frames in ten seconds", len(list))
		}
		for n := 1; n < len(list)-1; n++ {
			if gap := list[n].GetTimeMs() - list[n-1].GetTimeMs(); gap < 1000 {
				t.Fatalf("progress %d came %d ms after the one before", n, gap)
			}
		}
		last := new(bcdv1.TransferProgress)
		if err := proto.Unmarshal(list[len(list)-1].GetBody(), last); err != nil || last.GetBytesDone() != 100 {
			t.Fatalf("the last progress is %v, %v", last, err)
		}
	})
}

func TestDuplicate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		runs := 0
		e := &executor{kind: "diag.ping", run: func(context.Context, dispatch.Command, dispatch.Progress) (dispatch.Result, error) {
			runs++
			return dispatch.Result{Message: fmt.Sprint("run ", runs)}, nil
		}}
		r := newRig(t, setup{executors: []dispatch.Executor{e}})
		c := command("cmd_a", "diag.ping", hour())
		r.offer(c)
		r.offer(c)
		r.d.Acked("cmd_a")
		time.Sleep(2 * time.Hour) // long after its deadline
		r.offer(c)
		list := r.outcomes("cmd_a")
		if runs != 1 || len(list) != 3 {
			t.Fatalf("%d runs, %d outcomes", runs, len(list))
		}
		for _, o := range list[1:] {
			if !proto.Equal(o, list[0]) {
				t.Fatalf("answered %v, first %v", o, list[0])
			}
		}
	})
}

func TestRevoked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, setup{executors: []dispatch.Executor{&executor{kind: "diag.ping"}}})
		r.d.SetRevoked(true)
		r.offer(command("cmd_a", "diag.ping", hour()))
		if a := r.accepted("cmd_a"); len(a) != 1 || a[0].GetRejection() != bcdv1.Rejection_REJECTION_LANE_FULL {
			t.Fatalf("after a revocation: %v", a)
		}
		r.d.SetRevoked(false)
		r.offer(command("cmd_a", "diag.ping", hour()))
		r.wantStatus("cmd_a", succeeded)
	})
}

// faulty fails writes as long as it is told to.
type faulty struct {
	dispatch.Journal
	accept, start, finish *atomic.Bool
}

func (f faulty) Accept(e journal.Entry, signed []byte) error {
	if f.accept.Load() {
		return journal.ErrFull
	}
	return f.Journal.Accept(e, signed)
}

func (f faulty) Start(id string, at int64, boot string) error {
	if f.start.Load() {
		return journal.ErrFull
	}
	return f.Journal.Start(id, at, boot)
}

func (f faulty) Finish(id string, end journal.Finish) error {
	if f.finish.Load() {
		return journal.ErrFull
	}
	return f.Journal.Finish(id, end)
}

func TestFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f faulty
		f.accept, f.start, f.finish = new(atomic.Bool), new(atomic.Bool), new(atomic.Bool)
		runs := 0
		e := &executor{kind: "diag.ping", run: func(context.Context, dispatch.Command, dispatch.Progress) (dispatch.Result, error) {
			runs++
			return dispatch.Result{}, nil
		}}
		r := newRig(t, setup{executors: []dispatch.Executor{e}, wrap: func(j dispatch.Journal) dispatch.Journal { f.Journal = j; return f }})
		f.accept.Store(true)
		r.offer(command("cmd_a", "diag.ping", hour()))
		if a := r.accepted("cmd_a"); len(a) != 1 || a[0].GetRejection() != bcdv1.Rejection_REJECTION_LANE_FULL || runs != 0 {
			t.Fatalf("acceptance that could not be written: %v, %d runs", a, runs)
		}
		if free := r.d.Free(); free.GetControl() != 68 {
			t.Fatalf("a refused command holds a place: %v", free)
		}
		f.accept.Store(false)
		f.start.Store(true)
		r.offer(command("cmd_a", "diag.ping", hour()))
		time.Sleep(time.Minute)
		synctest.Wait()
		if runs != 0 {
			t.Fatal("ran although its start was not on disk")
		}
		f.start.Store(false)
		f.finish.Store(true)
		time.Sleep(time.Minute)
		synctest.Wait()
		if runs != 1 || len(r.outcomes("cmd_a")) != 0 {
			t.Fatalf("%d runs, outcomes %v: sent before it was on disk", runs, r.outcomes("cmd_a"))
		}
		f.finish.Store(false)
		time.Sleep(time.Minute)
		synctest.Wait()
		r.wantStatus("cmd_a", succeeded)
		if free := r.d.Free(); free.GetControl() != 68 {
			t.Fatalf("free after all: %v", free)
		}
	})
}
