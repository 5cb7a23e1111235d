package builtin

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/dispatch"
	"github.com/better-compute/bcd/agent/host"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/api/kinds"
)

type fakeNode struct{ err error }

func (fakeNode) Version() string       { return "1.2.3" }
func (fakeNode) BootID() string        { return "boot-2" }
func (fakeNode) Uptime() time.Duration { return 90 * time.Second }
func (f fakeNode) RefreshInventory(_ context.Context, all bool) ([]host.Section, []string, error) {
	if f.err != nil {
		return nil, nil, f.err
	}
	changed := []string{"cpu"}
	if all {
		changed = append(changed, "board")
	}
	return []host.Section{{Name: "cpu"}, {Name: "board", Error: "no SMBIOS"}}, changed, nil
}

func run(t *testing.T, e dispatch.Executor, m proto.Message) (dispatch.Result, error) {
	t.Helper()
	raw, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return e.Run(context.Background(), dispatch.Command{Kind: e.Kind(), Body: raw}, nil)
}

func TestKindsExist(t *testing.T) {
	for _, e := range Executors(fakeNode{}) {
		if _, ok := kinds.ByName(e.Kind()); !ok {
			t.Errorf("%s is not in the table of kinds", e.Kind())
		}
	}
}

func TestPing(t *testing.T) {
	r, err := run(t, &Ping{fakeNode{}}, &bcdv1.DiagPing{Payload: []byte("hello")})
	if err != nil {
		t.Fatal(err)
	}
	want := &bcdv1.DiagPingResult{Payload: []byte("hello"), Version: "1.2.3", BootId: "boot-2", UptimeMs: 90000}
	if !proto.Equal(r.Body, want) {
		t.Fatalf("got %v, want %v", r.Body, want)
	}
	var f *dispatch.Failure
	if _, err := run(t, &Ping{fakeNode{}}, &bcdv1.DiagPing{Payload: make([]byte, 4097)}); !errors.As(err, &f) || f.Code != "TOO_LARGE" {
		t.Fatalf("a large payload: %v", err)
	}
}

func TestRefresh(t *testing.T) {
	r, err := run(t, &Refresh{fakeNode{}}, &bcdv1.InventoryRefresh{All: true})
	if err != nil {
		t.Fatal(err)
	}
	m := r.Body.(*bcdv1.InventoryRefreshResult)
	if !slices.Equal(m.GetChanged(), []string{"board", "cpu"}) || !slices.Equal(m.GetUnreadable(), []string{"board"}) || len(m.GetSha256()) != 2 {
		t.Fatalf("result %v", m)
	}
	if _, err := run(t, &Refresh{fakeNode{errors.New("no")}}, &bcdv1.InventoryRefresh{}); err == nil {
		t.Fatal("an unreadable machine is a success")
	}
}

func TestReboot(t *testing.T) {
	r, err := run(t, &Reboot{fakeNode{}}, &bcdv1.NodeReboot{Reason: "kernel"})
	if err != nil || r.After != dispatch.AfterReboot {
		t.Fatalf("%+v, %v", r, err)
	}
	for boot, want := range map[string]dispatch.RecoveryAction{"boot-1": dispatch.Done, "boot-2": dispatch.Resume, "": dispatch.Resume} {
		rec, err := (&Reboot{fakeNode{}}).Recover(context.Background(), dispatch.Command{BootID: boot})
		if err != nil || rec.Action != want {
			t.Errorf("started in %q: %v, %v; want %v", boot, rec.Action, err, want)
		}
	}
}
