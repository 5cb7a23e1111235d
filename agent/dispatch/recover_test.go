package dispatch_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/dispatch"
	"github.com/better-compute/bcd/agent/journal"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// interrupted returns a journal in which a command was started in boot-1 and
// never finished.
func interrupted(t *testing.T, kind string, lane int32, deadline time.Time) *journal.Journal {
	t.Helper()
	j, err := journal.NewMemory(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := command("cmd_i", kind, deadline)
	raw, err := proto.Marshal(sign(t, c, "good"))
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Accept(journal.Entry{ID: "cmd_i", Kind: kind, Lane: lane, DeadlineMS: c.GetDeadlineMs(), AcceptedMS: 1}, raw); err != nil {
		t.Fatal(err)
	}
	if err := j.Start("cmd_i", 2, "boot-1"); err != nil {
		t.Fatal(err)
	}
	return j
}

func TestRecover(t *testing.T) {
	for name, c := range map[string]struct {
		recovery dispatch.Recovery
		err      error
		late     bool
		noKind   bool
		panics   bool
		want     bcdv1.OutcomeStatus
		runs     int
	}{
		"unknown":     {want: indeterminate},
		"error":       {err: errors.New("cannot tell"), want: indeterminate},
		"panic":       {panics: true, want: indeterminate},
		"done":        {recovery: dispatch.Recovery{Action: dispatch.Done}, want: succeeded},
		"resume":      {recovery: dispatch.Recovery{Action: dispatch.Resume}, want: succeeded, runs: 1},
		"resume late": {recovery: dispatch.Recovery{Action: dispatch.Resume}, late: true, want: indeterminate},
		"no executor": {noKind: true, want: indeterminate},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				deadline := hour()
				if c.late {
					deadline = time.Now().Add(-time.Second)
				}
				runs := 0
				e := &executor{kind: "logs.collect",
					recover: func(_ context.Context, cmd dispatch.Command) (dispatch.Recovery, error) {
						if c.panics {
							panic("boom")
						}
						if cmd.BootID != "boot-1" || cmd.IdempotencyKey != "key-cmd_i" {
							t.Errorf("recovers with %+v", cmd)
						}
						return c.recovery, c.err
					},
					run: func(context.Context, dispatch.Command, dispatch.Progress) (dispatch.Result, error) {
						runs++
						return dispatch.Result{}, nil
					}}
				if c.noKind {
					e.kind = "diag.ping"
				}
				r := newRig(t, setup{journal: interrupted(t, "logs.collect", 3, deadline), bootID: "boot-2", executors: []dispatch.Executor{e}})
				r.wantStatus("cmd_i", c.want)
				if runs != c.runs {
					t.Fatalf("%d runs, want %d", runs, c.runs)
				}
			})
		})
	}
}

// TestStop: a daemon that stops does not call its running commands failed.
func TestStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bulk, _, running := gate("logs.collect")
		r := newRig(t, setup{executors: []dispatch.Executor{bulk}})
		r.offer(command("cmd_a", "logs.collect", hour()))
		if running.Load() != 1 {
			t.Fatal("does not run")
		}
		r.stop()
		if e, _ := r.journal.Entry("cmd_a"); e.State != journal.Started {
			t.Fatalf("after a stop the command is %s", e.State)
		}
	})
}

func reboot() *executor {
	return &executor{kind: "node.reboot", run: func(context.Context, dispatch.Command, dispatch.Progress) (dispatch.Result, error) {
		return dispatch.Result{After: dispatch.AfterReboot}, nil
	}}
}

func (r *rig) wantAfters(want ...string) {
	r.t.Helper()
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	if !slices.Equal(r.afters, want) {
		r.t.Fatalf("actions begun: %v, want %v", r.afters, want)
	}
}

func (r *rig) wantNotes(want ...string) {
	r.t.Helper()
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	if !slices.Equal(r.notes, want) {
		r.t.Fatalf("notes: %v, want %v", r.notes, want)
	}
}

func TestAfterAcknowledgement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bulk, open, _ := gate("logs.collect")
		r := newRig(t, setup{executors: []dispatch.Executor{reboot(), bulk, &executor{kind: "diag.ping"}}})
		r.offer(command("cmd_r", "node.reboot", hour()))
		if o := r.wantStatus("cmd_r", succeeded); o.GetAfterAcknowledgement() != "reboot" {
			t.Fatalf("outcome: %v", o)
		}
		r.offer(command("cmd_b", "logs.collect", hour()))
		time.Sleep(10 * time.Minute)
		r.wantAfters() // without the acknowledgement the machine stays where it is
		r.d.Acked("cmd_r")
		r.wantAfters() // another command runs
		r.offer(command("cmd_p", "diag.ping", hour()))
		if a := r.accepted("cmd_p"); len(a) != 1 || a[0].GetRejection() != bcdv1.Rejection_REJECTION_LANE_FULL {
			t.Fatalf("a machine about to restart answered %v", a)
		}
		close(open)
		r.wantAfters("reboot cmd_r")
		r.d.Acked("cmd_r")
		r.wantAfters("reboot cmd_r")
		// It does not go down: said, and then it works again.
		time.Sleep(11 * time.Minute)
		r.wantNotes("after.unproven")
		r.offer(command("cmd_p", "diag.ping", hour()))
		r.wantStatus("cmd_p", succeeded)
	})
}

func TestAfterGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bulk, open, _ := gate("logs.collect")
		defer close(open)
		r := newRig(t, setup{executors: []dispatch.Executor{reboot(), bulk}, after: func() error { return errors.New("no permission") }})
		r.offer(command("cmd_b", "logs.collect", hour()))
		r.offer(command("cmd_r", "node.reboot", hour()))
		r.d.Acked("cmd_r")
		time.Sleep(29 * time.Second)
		r.wantAfters()
		time.Sleep(2 * time.Second)
		r.wantAfters("reboot cmd_r")
		r.wantNotes("after.failed")
	})
}

// TestRebootAfterDeadline: the reboot is the effect of node.reboot, and no
// effect begins after its deadline.
func TestRebootAfterDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		deploy := &executor{kind: "deploy.image", run: reboot().run}
		r := newRig(t, setup{executors: []dispatch.Executor{reboot(), deploy}, role: bcdv1.Role_ROLE_RAMDISK})
		r.offer(command("cmd_r", "node.reboot", time.Now().Add(time.Minute)))
		r.offer(command("cmd_d", "deploy.image", time.Now().Add(time.Minute)))
		time.Sleep(2 * time.Minute)
		r.d.Acked("cmd_r")
		r.wantAfters()
		r.wantNotes("after.expired")
		r.d.Acked("cmd_d") // its effect began long ago; the reboot completes it
		r.wantAfters("reboot cmd_d")
	})
}

func TestAfterCrash(t *testing.T) {
	for name, c := range map[string]struct {
		begun  bool
		bootID string
		afters []string
		notes  []string
	}{
		"acknowledged, not begun":              {bootID: "boot-1", afters: []string{"reboot cmd_r"}},
		"acknowledged, power was cut":          {bootID: "boot-2", notes: []string{"after.done"}},
		"begun, machine restarted":             {begun: true, bootID: "boot-2", notes: []string{"after.done"}},
		"begun, only the daemon was restarted": {begun: true, bootID: "boot-1", notes: []string{"after.unproven"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				first := newRig(t, setup{executors: []dispatch.Executor{reboot()}})
				first.offer(command("cmd_r", "node.reboot", hour()))
				first.stop()
				j := first.journal
				if err := j.Acknowledge("cmd_r"); err != nil {
					t.Fatal(err)
				}
				if c.begun {
					if err := j.BeginAfter("cmd_r"); err != nil {
						t.Fatal(err)
					}
				}
				r := newRig(t, setup{journal: j, bootID: c.bootID, executors: []dispatch.Executor{reboot()}})
				r.wantAfters(c.afters...)
				r.wantNotes(c.notes...)
				r.stop()
				again := newRig(t, setup{journal: j, bootID: c.bootID, executors: []dispatch.Executor{reboot()}})
				again.wantAfters()
			})
		})
	}
}

func TestLostJournal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lost := time.Now()
		floor := func(j dispatch.Journal) dispatch.Journal { return lostJournal{j, lost.UnixMilli()} }
		r := newRig(t, setup{wrap: floor, role: bcdv1.Role_ROLE_RAMDISK, executors: []dispatch.Executor{&executor{kind: "deploy.image"}, &executor{kind: "diag.ping"}}})
		before := command("cmd_before", "deploy.image", hour())
		before.IssuedMs = lost.UnixMilli()
		r.offer(before)
		if o := r.wantStatus("cmd_before", indeterminate); o.GetCode() != "JOURNAL_LOST" {
			t.Fatalf("outcome: %v", o)
		}
		resumable := command("cmd_ping", "diag.ping", hour())
		resumable.IssuedMs = lost.UnixMilli()
		r.offer(resumable)
		r.wantStatus("cmd_ping", succeeded)
		after := command("cmd_after", "deploy.image", hour())
		after.IssuedMs = lost.UnixMilli() + 1
		r.offer(after)
		r.wantStatus("cmd_after", succeeded)
	})
}

type lostJournal struct {
	dispatch.Journal
	floor int64
}

func (l lostJournal) IssuedFloorMS() int64 { return l.floor }
