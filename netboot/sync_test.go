package netboot

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/clock"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// siteWorld is a site agent with a gateway that is a function.
type siteWorld struct {
	*Sync
	mu     sync.Mutex
	asked  []*bcdv1.SyncRequest
	answer func(ctx context.Context, r *bcdv1.SyncRequest) (*bcdv1.SyncResponse, error)
}

func newSite(t *testing.T, c *control, dir, node string) *siteWorld {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	w := &siteWorld{}
	w.Sync = &Sync{
		Call: func(ctx context.Context, r *bcdv1.SyncRequest) (*bcdv1.SyncResponse, error) {
			w.mu.Lock()
			w.asked = append(w.asked, proto.CloneOf(r))
			answer := w.answer
			w.mu.Unlock()
			return answer(ctx, r)
		},
		Holder:    &Holder{Dir: dir, Node: node, Site: "fsn1", Clock: clock.System(), Log: log},
		Table:     &Table{Dir: dir, Site: "fsn1", Roots: c.roots},
		Artefacts: &Artefacts{Dir: filepath.Join(dir, "cache"), Fetch: (&blobs{}).fetch, Clock: clock.System(), Log: log},
		Traces:    &Traces{}, Clock: clock.System(), Log: log, Random: func() float64 { return 0.5 },
		Problems: func() []string { return []string{"port 67 is taken", "port 67 is taken", strings.Repeat("x", 1000)} },
		Serving:  func() []string { return []string{"10.0.0.2:67"} },
	}
	for _, err := range []error{w.Holder.Load(), w.Table.Load(), w.Artefacts.Load()} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return w
}

// says sets what the gateway answers from now on.
func (w *siteWorld) says(f func(ctx context.Context, r *bcdv1.SyncRequest) (*bcdv1.SyncResponse, error)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.answer = f
}

func (w *siteWorld) requests() []*bcdv1.SyncRequest {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]*bcdv1.SyncRequest(nil), w.asked...)
}

// waits is a gateway with nothing to say: it answers when the wait is over.
func waits(lease *bcdv1.Lease) func(context.Context, *bcdv1.SyncRequest) (*bcdv1.SyncResponse, error) {
	return func(ctx context.Context, r *bcdv1.SyncRequest) (*bcdv1.SyncResponse, error) {
		select {
		case <-time.After(time.Duration(r.WaitMs) * time.Millisecond):
			return &bcdv1.SyncResponse{Lease: lease, ServerTimeMs: t0.UnixMilli()}, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

var cutOff = func(context.Context, *bcdv1.SyncRequest) (*bcdv1.SyncResponse, error) {
	return nil, errors.New("no route to host")
}

func TestSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newControl(t)
		dir := t.TempDir()
		w := newSite(t, c, dir, "node_1")
		give := &bcdv1.Lease{Kind: standing, Fence: 3, Holder: "node_1"}
		w.says(func(ctx context.Context, r *bcdv1.SyncRequest) (*bcdv1.SyncResponse, error) {
			if r.TableGeneration == 0 {
				return &bcdv1.SyncResponse{Table: c.table(4), Lease: give, ServerTimeMs: t0.UnixMilli()}, nil
			}
			return waits(give)(ctx, r)
		})
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- w.Run(ctx) }()
		time.Sleep(90 * time.Second)
		synctest.Wait()
		if !w.Holder.Holding() || w.Table.Get().GetGeneration() != 4 || !w.Status().Connected {
			t.Fatalf("%+v, generation %d, %+v", w.Holder.State(), w.Table.Get().GetGeneration(), w.Status())
		}
		asked := w.requests()
		if n := len(asked); n < 4 || n > 8 {
			t.Errorf("%d requests in 90 s", n)
		}
		first, second := asked[0], asked[1]
		if first.Fence != 0 || first.Lease != noLease || second.Fence != 3 || second.Lease != standing || second.TableGeneration != 4 {
			t.Errorf("first %v, second %v", first, second)
		}
		if len(first.Problems) != 2 || len(first.Problems[1]) != maxLine || first.Serving[0] != "10.0.0.2:67" {
			t.Errorf("problems %q, serving %v", first.Problems, first.Serving)
		}

		// News does not wait for the end of a wait, and is told until heard.
		w.Traces.Observe(Event{Time: time.Now(), Type: "dhcp.discover", MAC: macA, Action: ramdiskAction})
		w.Poke()
		time.Sleep(syncPace + time.Second)
		synctest.Wait()
		last := w.requests()[len(w.requests())-1]
		if len(last.Traces) != 1 || len(last.WaitingMacs) != 1 {
			t.Errorf("the trace was not told: %v", last)
		}
		w.says(func(context.Context, *bcdv1.SyncRequest) (*bcdv1.SyncResponse, error) {
			return &bcdv1.SyncResponse{Lease: give, ServerTimeMs: t0.UnixMilli(), Booted: []*bcdv1.BootedMachine{{Mac: macA, TimeMs: time.Now().UnixMilli()}}}, nil
		})
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := w.Traces.All(time.Now())[0]; got.VerdictCode != VerdictBooted {
			t.Errorf("trace %v", got)
		}

		// Cut off: the standing lease and the table count on, over a restart.
		w.says(cutOff)
		before := len(w.requests())
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if n := len(w.requests()) - before; n < 50 || n > 130 {
			t.Errorf("%d tries in ten minutes", n)
		}
		if !w.Holder.Holding() || w.Status().Connected || w.Status().LastError == "" {
			t.Errorf("%+v, %+v", w.Holder.State(), w.Status())
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		again := newSite(t, c, dir, "node_1")
		if !again.Holder.Holding() || again.Table.Get().GetGeneration() != 4 {
			t.Errorf("after a restart: %+v, %v", again.Holder.State(), again.Table.Get())
		}
		if other := newSite(t, c, dir, "node_2"); other.Holder.Holding() {
			t.Error("another agent took the kept lease up")
		}
	})
}

func TestSyncGivesTheLeaseBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newControl(t)
		dir := t.TempDir()
		w := newSite(t, c, dir, "node_1")
		w.says(waits(nil))
		w.Holder.answered(context.Background(), time.Now(), &bcdv1.Lease{Kind: standing, Fence: 3})
		if _, err := os.Stat(w.Holder.path()); err != nil {
			t.Fatal(err)
		}
		released := make(chan time.Time, 1)
		stopped := time.Time{}
		w.says(func(ctx context.Context, r *bcdv1.SyncRequest) (*bcdv1.SyncResponse, error) {
			if r.ReleasedFence == 3 {
				if w.Holder.Holding() {
					t.Error("it gave back what it still holds")
				}
				if _, err := os.Stat(w.Holder.path()); !errors.Is(err, os.ErrNotExist) {
					t.Error("it gave back what is still on disk")
				}
				select {
				case released <- time.Now():
				default:
				}
				return &bcdv1.SyncResponse{Lease: &bcdv1.Lease{Kind: noLease, Fence: 4, Holder: "node_2"}}, nil
			}
			if r.Fence == 3 {
				stopped = time.Now()
				return &bcdv1.SyncResponse{Lease: &bcdv1.Lease{Kind: standing, Fence: 3, Release: true}}, nil
			}
			return waits(&bcdv1.Lease{Kind: noLease, Fence: 4, Holder: "node_2"})(ctx, r)
		})
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- w.Run(ctx) }()
		at := <-released
		if d := at.Sub(stopped); d < settleAfter || d > 5*time.Second {
			t.Errorf("given back %s after the stop", d)
		}
		if s := w.Holder.State(); s.Holding || s.Kind != "none" {
			t.Errorf("%+v", s)
		}
		cancel()
		<-done
	})
}

func TestALeaseThatCannotBeForgottenIsNotGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "d")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		w := newSite(t, newControl(t), dir, "node_1")
		w.Holder.answered(context.Background(), time.Now(), &bcdv1.Lease{Kind: standing, Fence: 3})
		// A folder that is not empty in the file's place cannot be unlinked.
		if err := errors.Join(os.Remove(w.Holder.path()), os.MkdirAll(filepath.Join(w.Holder.path(), "x"), 0o700)); err != nil {
			t.Fatal(err)
		}
		release := &bcdv1.Lease{Kind: standing, Fence: 3, Release: true}
		w.Holder.answered(context.Background(), time.Now(), release)
		var r bcdv1.SyncRequest
		w.Holder.ask(time.Now(), &r)
		if r.ReleasedFence != 0 || w.Holder.Holding() || w.Holder.Problem() == "" {
			t.Errorf("%v, %+v, %q", &r, w.Holder.State(), w.Holder.Problem())
		}
		if err := os.RemoveAll(w.Holder.path()); err != nil {
			t.Fatal(err)
		}
		w.Holder.answered(context.Background(), time.Now(), release)
		r.Reset()
		if w.Holder.ask(time.Now(), &r); r.ReleasedFence != 3 || w.Holder.Problem() != "" {
			t.Errorf("%v, %q", &r, w.Holder.Problem())
		}
	})
}

func TestADamagedKeptLeaseIsSaidAndDropped(t *testing.T) {
	dir := t.TempDir()
	h := &Holder{Dir: dir, Node: "node_1", Site: "fsn1", Clock: clock.System(), Log: slog.New(slog.DiscardHandler)}
	if err := os.WriteFile(h.path(), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := h.Load(); err == nil || h.Holding() {
		t.Errorf("%v, %+v", err, h.State())
	}
	if err := h.Load(); err != nil {
		t.Errorf("it is still there: %v", err)
	}
}

func TestMuchNewsDoesNotStarveTheSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newSite(t, newControl(t), t.TempDir(), "node_1")
		answered := 0
		w.says(func(ctx context.Context, r *bcdv1.SyncRequest) (*bcdv1.SyncResponse, error) {
			// A slow line: no answer comes within the pace.
			wait := 3 * time.Second
			if len(r.Traces) == 0 {
				wait = syncWait
			}
			select {
			case <-time.After(wait):
				answered++
				return &bcdv1.SyncResponse{Lease: &bcdv1.Lease{Kind: expiring, Fence: 1, TtlMs: 15_000}}, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		})
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		var chatter sync.WaitGroup
		chatter.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				w.Traces.Observe(Event{Time: time.Now(), Type: "tftp.request", Message: string(rune('a' + i%26)), MAC: macA})
				w.Poke()
				time.Sleep(50 * time.Millisecond)
			}
		})
		if err := w.Run(ctx); err != nil {
			t.Error(err)
		}
		if answered < 15 {
			t.Errorf("%d answers in two minutes", answered)
		}
		chatter.Wait()
	})
}

func TestABadTableIsAProblem(t *testing.T) {
	c, other := newControl(t), newControl(t)
	w := newSite(t, c, t.TempDir(), "node_1")
	w.takeTable(&bcdv1.SyncResponse{Table: other.table(4), ServerTimeMs: t0.UnixMilli()})
	if p := w.AllProblems(); !strings.Contains(strings.Join(p, "\n"), "boot table:") || w.Table.Get() != nil {
		t.Errorf("problems %q", p)
	}
	w.takeTable(&bcdv1.SyncResponse{Table: c.table(4), ServerTimeMs: t0.UnixMilli()})
	if p := w.AllProblems(); strings.Contains(strings.Join(p, "\n"), "boot table:") || w.Table.Get().GetGeneration() != 4 {
		t.Errorf("problems %q", p)
	}
}
