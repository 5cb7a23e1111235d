package dispatch_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/dispatch"
	"github.com/better-compute/bcd/agent/journal"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const node = "node_test"

// verifier takes the word "good" for a signature.
type verifier struct{}

func (verifier) Verify(signed *bcdv1.Signed, wantType string, _ time.Time) ([]byte, error) {
	if len(signed.GetSignatures()) != 1 || string(signed.GetSignatures()[0].GetSignature()) != "good" || signed.GetPayloadType() != wantType {
		return nil, errors.New("the signature is not good")
	}
	return signed.GetPayload(), nil
}

func sign(t testing.TB, c *bcdv1.Command, word string) *bcdv1.Signed {
	t.Helper()
	payload, err := proto.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	return &bcdv1.Signed{PayloadType: "bcd.v1.Command", Payload: payload, Signatures: []*bcdv1.Signature{{Signature: []byte(word)}}}
}

func command(id, kind string, deadline time.Time) *bcdv1.Command {
	return &bcdv1.Command{Id: id, Kind: kind, NodeId: node, DeadlineMs: deadline.UnixMilli(), IssuedMs: deadline.Add(-time.Hour).UnixMilli(), IdempotencyKey: "key-" + id}
}

// executor is a kind whose work the test decides.
type executor struct {
	kind    string
	run     func(ctx context.Context, cmd dispatch.Command, progress dispatch.Progress) (dispatch.Result, error)
	recover func(ctx context.Context, cmd dispatch.Command) (dispatch.Recovery, error)
}

func (e *executor) Kind() string { return e.kind }

func (e *executor) Run(ctx context.Context, cmd dispatch.Command, p dispatch.Progress) (dispatch.Result, error) {
	if e.run == nil {
		return dispatch.Result{Message: "done"}, nil
	}
	return e.run(ctx, cmd, p)
}

func (e *executor) Recover(ctx context.Context, cmd dispatch.Command) (dispatch.Recovery, error) {
	if e.recover == nil {
		return dispatch.Recovery{}, nil
	}
	return e.recover(ctx, cmd)
}

// rig is a dispatcher in a bubble, with what it sent.
type rig struct {
	t       *testing.T
	d       *dispatch.Dispatcher
	journal *journal.Journal
	stop    func()

	mu     sync.Mutex
	frames []*bcdv1.ClientFrame
	notes  []string
	afters []string
	known  bool
}

type setup struct {
	journal   *journal.Journal
	executors []dispatch.Executor
	role      bcdv1.Role
	bootID    string
	noMark    bool
	wrap      func(dispatch.Journal) dispatch.Journal
	after     func() error
}

func newRig(t *testing.T, s setup) *rig {
	t.Helper()
	r := &rig{t: t, journal: s.journal, known: !s.noMark}
	if r.journal == nil {
		j, err := journal.NewMemory(nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.journal = j
	}
	var j dispatch.Journal = r.journal
	if s.wrap != nil {
		j = s.wrap(j)
	}
	if s.role == 0 {
		s.role = bcdv1.Role_ROLE_NODE
	}
	if s.bootID == "" {
		s.bootID = "boot-1"
	}
	d, err := dispatch.New(dispatch.Config{NodeID: node, Role: s.role, BootID: s.bootID, Verifier: verifier{}}, s.executors, dispatch.Deps{
		Journal: j,
		Clock:   clock.System(),
		ServerTime: func() (time.Time, bool) {
			r.mu.Lock()
			defer r.mu.Unlock()
			return time.Now(), r.known
		},
		Send: func(f *bcdv1.ClientFrame) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.frames = append(r.frames, f)
		},
		After: func(_ context.Context, action dispatch.After, id string) error {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.afters = append(r.afters, string(action)+" "+id)
			if s.after != nil {
				return s.after()
			}
			return nil
		},
		Note: func(eventType, _, _ string) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.notes = append(r.notes, eventType)
		},
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	r.d = d
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { d.Run(ctx); close(done) }()
	r.stop = func() { cancel(); <-done }
	t.Cleanup(r.stop)
	synctest.Wait()
	return r
}

func (r *rig) offer(c *bcdv1.Command) {
	r.t.Helper()
	r.d.Offer(sign(r.t, c, "good"))
	synctest.Wait()
}

// outcomes gives what was sent for an id.
func (r *rig) outcomes(id string) []*bcdv1.Outcome {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []*bcdv1.Outcome
	for _, f := range r.frames {
		if o := f.GetOutcome(); o.GetCommandId() == id && o != nil {
			list = append(list, o)
		}
	}
	return list
}

func (r *rig) wantStatus(id string, want bcdv1.OutcomeStatus) *bcdv1.Outcome {
	r.t.Helper()
	list := r.outcomes(id)
	if len(list) == 0 {
		r.t.Fatalf("no outcome of %s, want %s", id, want)
	}
	last := list[len(list)-1]
	if last.GetStatus() != want {
		r.t.Fatalf("%s ended as %s (%s), want %s", id, last.GetStatus(), last.GetMessage(), want)
	}
	return last
}

func (r *rig) progress(id string) (list []*bcdv1.Progress) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, f := range r.frames {
		if p := f.GetProgress(); p != nil && p.GetCommandId() == id {
			list = append(list, p)
		}
	}
	return list
}

func (r *rig) accepted(id string) (list []*bcdv1.CommandAccepted) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, f := range r.frames {
		if a := f.GetAccepted(); a != nil && a.GetCommandId() == id {
			list = append(list, a)
		}
	}
	return list
}
