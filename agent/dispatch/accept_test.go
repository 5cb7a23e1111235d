package dispatch_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/better-compute/bcd/agent/dispatch"
	"github.com/better-compute/bcd/agent/journal"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

var start = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)

// flaws are the acceptance checks in their order, each with what makes a good
// command fail it.
var flaws = []struct {
	want bcdv1.Rejection
	do   func(c *bcdv1.Command, o *offerShape)
}{
	{bcdv1.Rejection_REJECTION_MALFORMED, func(c *bcdv1.Command, _ *offerShape) { c.DeadlineMs = start.Add(8 * 24 * time.Hour).UnixMilli() }},
	{bcdv1.Rejection_REJECTION_TOO_LARGE, func(c *bcdv1.Command, _ *offerShape) { c.Body = make([]byte, dispatch.MaxBody+1) }},
	{bcdv1.Rejection_REJECTION_WRONG_NODE, func(c *bcdv1.Command, _ *offerShape) { c.NodeId = "node_other" }},
	{bcdv1.Rejection_REJECTION_UNAUTHENTIC, func(_ *bcdv1.Command, o *offerShape) { o.word = "forged" }},
	{bcdv1.Rejection_REJECTION_DUPLICATE, func(c *bcdv1.Command, _ *offerShape) { c.Id = "cmd_known" }},
	{bcdv1.Rejection_REJECTION_UNSUPPORTED, func(c *bcdv1.Command, _ *offerShape) { c.Kind = "no.such" }},
	{bcdv1.Rejection_REJECTION_EXPIRED, func(c *bcdv1.Command, _ *offerShape) {
		if c.DeadlineMs < start.Add(7*24*time.Hour).UnixMilli() { // the first flaw also sets it
			c.DeadlineMs = start.Add(-time.Second).UnixMilli()
		}
	}},
	{bcdv1.Rejection_REJECTION_LANE_FULL, func(_ *bcdv1.Command, o *offerShape) { o.full = true }},
}

type offerShape struct {
	word string
	full bool
}

// TestAcceptanceOrder: whatever is wrong with a command, the answer is the
// first check that fails, and only what is behind a valid signature, and not
// LANE_FULL, is recorded.
func TestAcceptanceOrder(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		j, err := journal.NewMemory(nil, nil)
		if err != nil {
			rt.Fatal(err)
		}
		if err := j.Accept(journal.Entry{ID: "cmd_known", DeadlineMS: start.Add(time.Hour).UnixMilli()}, []byte("x")); err != nil {
			rt.Fatal(err)
		}
		core := dispatch.NewCore(dispatch.Config{NodeID: node, Role: bcdv1.Role_ROLE_NODE, Verifier: verifier{}, Ledger: j})
		shape := &offerShape{word: "good"}
		c := command("cmd_new", "diag.ping", start.Add(time.Hour))
		first := bcdv1.Rejection_REJECTION_UNSPECIFIED
		for n := len(flaws) - 1; n >= 0; n-- {
			if rapid.Bool().Draw(rt, flaws[n].want.String()) {
				first = flaws[n].want
			} else {
				continue
			}
			flaws[n].do(c, shape)
		}
		if shape.full {
			for n := range dispatch.Lanes[bcdv1.Lane_LANE_CONTROL].Places + dispatch.Lanes[bcdv1.Lane_LANE_CONTROL].Workers {
				core.Step(start, dispatch.Offer{Signed: sign(t, command(fmt.Sprintf("cmd_fill%d", n), "diag.ping", start.Add(time.Hour)), "good")})
			}
		}
		effects := core.Step(start, dispatch.Offer{Signed: sign(t, c, shape.word)})
		got, recorded := answer(rt, effects)
		if got != first {
			rt.Fatalf("answered %s, want %s", got, first)
		}
		wantRecorded := shape.word == "good" && c.GetId() != "cmd_known" && first != bcdv1.Rejection_REJECTION_LANE_FULL
		if recorded != wantRecorded {
			rt.Fatalf("%s recorded: %v, want %v", got, recorded, wantRecorded)
		}
	})
}

// answer reads the rejection out of what the core wants done.
func answer(t *rapid.T, effects []dispatch.Effect) (rejection bcdv1.Rejection, recorded bool) {
	if len(effects) == 0 {
		t.Fatal("no answer")
	}
	switch w := effects[0].Write.(type) {
	case dispatch.WriteAccept:
		return bcdv1.Rejection_REJECTION_UNSPECIFIED, true
	case dispatch.WriteRefuse:
		return bcdv1.Rejection(w.Entry.Rejection), true
	}
	send, ok := effects[0].Then[0].(dispatch.Send)
	if !ok {
		t.Fatalf("answer is %T", effects[0].Then[0])
	}
	if a := send.Frame.GetAccepted(); a != nil && a.GetRejection() == 0 {
		return bcdv1.Rejection_REJECTION_DUPLICATE, false // answered with the state it is in
	} else if a != nil {
		return a.GetRejection(), false
	}
	return send.Frame.GetOutcome().GetRejection(), false
}

func TestMalformed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, setup{executors: []dispatch.Executor{&executor{kind: "diag.ping"}}})
		good := func() *bcdv1.Command { return command("cmd_m", "diag.ping", time.Now().Add(time.Hour)) }
		for name, flaw := range map[string]func(c *bcdv1.Command){
			"no id":          func(c *bcdv1.Command) { c.Id = "" },
			"another id":     func(c *bcdv1.Command) { c.Id = "CMD_x" },
			"long id":        func(c *bcdv1.Command) { c.Id = "cmd_" + strings.Repeat("a", 61) },
			"no kind":        func(c *bcdv1.Command) { c.Kind = "" },
			"no deadline":    func(c *bcdv1.Command) { c.DeadlineMs = 0 },
			"far deadline":   func(c *bcdv1.Command) { c.DeadlineMs = time.Now().Add(7*24*time.Hour + time.Second).UnixMilli() },
			"long key":       func(c *bcdv1.Command) { c.IdempotencyKey = strings.Repeat("k", 129) },
			"control char":   func(c *bcdv1.Command) { c.IssuedBy = "a\x1b[31m" },
			"body":           func(c *bcdv1.Command) { c.Body = []byte{0xff, 0xff} },
			"another lane":   func(c *bcdv1.Command) { c.Lane = bcdv1.Lane_LANE_BULK },
			"no such lane":   func(c *bcdv1.Command) { c.Lane = 9 },
			"negative issue": func(c *bcdv1.Command) { c.IssuedMs = -1 },
		} {
			c := good()
			flaw(c)
			r.mu.Lock()
			r.frames = nil
			r.mu.Unlock()
			r.offer(c)
			r.mu.Lock()
			if name == "no id" || name == "long id" {
				if len(r.frames) != 0 {
					t.Errorf("%s: answered %v", name, r.frames)
				}
			} else if len(r.frames) != 1 || r.frames[0].GetOutcome().GetRejection() != bcdv1.Rejection_REJECTION_MALFORMED {
				t.Errorf("%s: answered %v", name, r.frames)
			}
			r.mu.Unlock()
			// Recorded behind the good signature where the id can be one, and
			// then known: forget it for the next case.
			if e, ok := r.journal.Entry(c.GetId()); ok && e.ID != "cmd_m" {
				t.Errorf("%s: recorded under %q", name, e.ID)
			}
		}
	})
}

func TestForgedFrameDoesNotPoison(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, setup{executors: []dispatch.Executor{&executor{kind: "diag.ping"}}})
		c := command("cmd_real", "diag.ping", time.Now().Add(time.Hour))
		r.d.Offer(sign(t, c, "forged"))
		if o := r.wantStatus("cmd_real", bcdv1.OutcomeStatus_OUTCOME_STATUS_REJECTED); o.GetRejection() != bcdv1.Rejection_REJECTION_UNAUTHENTIC {
			t.Fatalf("rejected as %s", o.GetRejection())
		}
		r.offer(c)
		r.wantStatus("cmd_real", bcdv1.OutcomeStatus_OUTCOME_STATUS_SUCCEEDED)
	})
}

func TestRoleAllowList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := []dispatch.Executor{&executor{kind: "diag.ping"}, &executor{kind: "deploy.image"}}
		r := newRig(t, setup{executors: all})
		c := command("cmd_d", "deploy.image", time.Now().Add(time.Hour))
		r.offer(c)
		if o := r.wantStatus("cmd_d", bcdv1.OutcomeStatus_OUTCOME_STATUS_REJECTED); o.GetRejection() != bcdv1.Rejection_REJECTION_UNSUPPORTED {
			t.Fatalf("a node answered deploy.image with %s", o.GetRejection())
		}
		if got := r.d.Kinds(); !slices.Equal(got, []string{"diag.ping"}) {
			t.Fatalf("kinds of a node: %v", got)
		}
		r = newRig(t, setup{executors: all, role: bcdv1.Role_ROLE_RAMDISK})
		r.offer(c)
		r.wantStatus("cmd_d", bcdv1.OutcomeStatus_OUTCOME_STATUS_SUCCEEDED)
	})
}
