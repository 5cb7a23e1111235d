package agent_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent"
	"github.com/better-compute/bcd/agent/builtin"
	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/dispatch"
	"github.com/better-compute/bcd/agent/host"
	"github.com/better-compute/bcd/agent/journal"
	"github.com/better-compute/bcd/agent/session"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// refusing takes no signature.
type refusing struct{}

func (refusing) Verify(*bcdv1.Signed, string, time.Time) ([]byte, error) {
	return nil, errors.New("not signed")
}

// double is a gateway in memory. It acknowledges what it is told to.
type double struct {
	mu       sync.Mutex
	end      *session.GatewayEnd
	epoch    int64
	down     bool
	ack      bool
	want     []string
	hello    *bcdv1.Hello
	outcomes map[string][]*bcdv1.Outcome
	events   []*bcdv1.Event
	sections map[string]*bcdv1.InventorySection
	conds    []*bcdv1.Condition
	resume   int64
	// greeted, unless nil, is closed when Hello came, a second before Welcome.
	greeted chan struct{}
}

func newDouble() *double {
	return &double{ack: true, want: []string{"cpu"}, outcomes: map[string][]*bcdv1.Outcome{}, sections: map[string]*bcdv1.InventorySection{}}
}

func (g *double) Dial(context.Context, session.Transport) (session.Link, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.down {
		return nil, errors.New("connection refused")
	}
	link, end := session.Pipe()
	g.end = end
	go g.serve(end)
	return link, nil
}

func (g *double) serve(end *session.GatewayEnd) {
	for {
		f, err := end.Receive()
		if err != nil {
			return
		}
		g.mu.Lock()
		g.take(end, f)
		g.mu.Unlock()
	}
}

func (g *double) take(end *session.GatewayEnd, f *bcdv1.ClientFrame) {
	send := func(s *bcdv1.ServerFrame) { s.Epoch = g.epoch; end.Send(s) }
	switch body := f.GetBody().(type) {
	case *bcdv1.ClientFrame_Hello:
		g.hello = body.Hello
		if g.greeted != nil {
			close(g.greeted)
			g.mu.Unlock()
			time.Sleep(time.Second)
			g.mu.Lock()
		}
		g.epoch = max(g.epoch, body.Hello.GetLastEpoch()) + 1
		send(&bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_Welcome{Welcome: &bcdv1.Welcome{
			Epoch: g.epoch, ServerTimeMs: time.Now().UnixMilli(), MachineName: "m1", WantInventory: g.want, ResumeSequence: g.resume}}})
	case *bcdv1.ClientFrame_Heartbeat:
		send(&bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_Heartbeat{Heartbeat: &bcdv1.HeartbeatAnswer{ServerTimeMs: time.Now().UnixMilli()}}})
	case *bcdv1.ClientFrame_Outcome:
		g.outcomes[body.Outcome.GetCommandId()] = append(g.outcomes[body.Outcome.GetCommandId()], body.Outcome)
		if g.ack {
			send(&bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_OutcomeAck{OutcomeAck: &bcdv1.OutcomeAck{CommandId: body.Outcome.GetCommandId()}}})
		}
	case *bcdv1.ClientFrame_Events:
		list := body.Events.GetEvents()
		g.events = append(g.events, list...)
		if g.ack {
			g.resume = list[len(list)-1].GetSequence()
			send(&bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_EventAck{EventAck: &bcdv1.EventAck{JournalId: body.Events.GetJournalId(), Sequence: g.resume}}})
		}
	case *bcdv1.ClientFrame_Inventory:
		for _, s := range body.Inventory.GetSections() {
			g.sections[s.GetName()] = s
		}
	case *bcdv1.ClientFrame_Conditions:
		g.conds = body.Conditions.GetConditions()
	}
}

func (g *double) command(t *testing.T, id, kind string) {
	t.Helper()
	payload, err := proto.Marshal(&bcdv1.Command{Id: id, Kind: kind, NodeId: "node_a", DeadlineMs: time.Now().Add(time.Hour).UnixMilli(), IssuedMs: time.Now().UnixMilli()})
	if err != nil {
		t.Fatal(err)
	}
	g.push(&bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_Command{Command: &bcdv1.Signed{PayloadType: "bcd.v1.Command", Payload: payload, Signatures: []*bcdv1.Signature{{}}}}})
}

func (g *double) push(f *bcdv1.ServerFrame) {
	g.mu.Lock()
	f.Epoch = g.epoch
	g.end.Send(f)
	g.mu.Unlock()
	synctest.Wait()
}

// cut ends the session, and keeps the gateway away for d.
func (g *double) cut(d time.Duration) {
	g.mu.Lock()
	g.down = true
	g.end.Close()
	g.mu.Unlock()
	time.Sleep(d)
	g.mu.Lock()
	g.down = false
	g.mu.Unlock()
	time.Sleep(2 * time.Minute)
	synctest.Wait()
}

type world struct {
	*double
	a       *agent.Agent
	j       *journal.Journal
	reboots int
	cpu     string
}

func start(t *testing.T, j *journal.Journal, changes ...func(*world)) *world {
	t.Helper()
	w := &world{double: newDouble(), j: j, cpu: "{}"}
	for _, change := range changes {
		change(w)
	}
	a, err := agent.New(agent.Config{NodeID: "node_a", Role: bcdv1.Role_ROLE_NODE, Version: "v1", BootID: "boot-1"}, agent.Deps{
		Clock: clock.System(), Random: func() float64 { return 0.5 }, Dialer: w.double, Journal: j, Verifier: trusting{},
		Executors: func(a *agent.Agent) []dispatch.Executor { return builtin.Executors(a) },
		Inventory: func(context.Context) ([]host.Section, error) {
			if w.greeted != nil {
				<-w.greeted
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			return []host.Section{{Name: "cpu", JSON: []byte(w.cpu), SHA256: sha256.Sum256([]byte(w.cpu))}}, nil
		},
		After: func(context.Context, dispatch.After, string) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.reboots++
			return nil
		},
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	w.a = a
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { a.Run(ctx); close(done) }()
	t.Cleanup(func() {
		cancel()
		<-done
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.end != nil {
			w.end.Close()
		}
	})
	time.Sleep(time.Second)
	synctest.Wait()
	return w
}

func memory(t *testing.T) *journal.Journal {
	t.Helper()
	j, err := journal.NewMemory(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func TestStory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, memory(t))
		if w.hello.GetNodeId() != "node_a" || !slices.Equal(w.hello.GetKinds(), []string{"diag.ping", "inventory.refresh", "node.reboot"}) {
			t.Fatalf("hello: %v", w.hello)
		}
		if w.sections["cpu"] == nil {
			t.Fatal("the inventory did not reach the gateway")
		}
		w.command(t, "cmd_ping", "diag.ping")
		if got := w.outcomes["cmd_ping"]; len(got) != 1 || got[0].GetStatus() != bcdv1.OutcomeStatus_OUTCOME_STATUS_SUCCEEDED {
			t.Fatalf("outcomes: %v", got)
		}
		if e, _ := w.j.Entry("cmd_ping"); e.State != journal.Acknowledged {
			t.Fatalf("the command is %s", e.State)
		}
		w.mu.Lock()
		w.cpu = `{"n":2}`
		w.mu.Unlock()
		w.command(t, "cmd_inv", "inventory.refresh")
		if string(w.sections["cpu"].GetCanonicalJson()) != `{"n":2}` {
			t.Fatalf("after a refresh: %v", w.sections)
		}
		w.a.SetCondition(&bcdv1.Condition{Type: "HostPressure", Status: bcdv1.ConditionStatus_CONDITION_STATUS_TRUE, Reason: "Memory"})
		synctest.Wait()
		if len(w.conds) != 1 || len(w.events) != 1 || w.events[0].GetType() != "condition.changed" {
			t.Fatalf("conditions %v, events %v", w.conds, w.events)
		}
		status := w.a.Status()
		if !status.Session.Connected || status.MachineName != "m1" || len(status.Conditions) != 1 || len(status.Lanes) != 3 || status.Journal.Events != 0 {
			t.Fatalf("status: %+v", status)
		}
	})
}

// TestInventoryReadBetweenHelloAndWelcome: the gateway cannot ask for what the
// Hello did not name.
func TestInventoryReadBetweenHelloAndWelcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, memory(t), func(w *world) {
			w.want, w.greeted = nil, make(chan struct{})
		})
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if len(w.hello.GetInventoryHashes()) != 0 {
			t.Fatalf("the Hello has %v: the inventory was read before it", w.hello.GetInventoryHashes())
		}
		if w.sections["cpu"] == nil {
			t.Error("the inventory did not reach the gateway")
		}
	})
}

// TestPartition: what ended and what happened while the gateway was away is
// told once it is back, once.
func TestPartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, memory(t))
		w.mu.Lock()
		w.ack = false
		w.mu.Unlock()
		w.command(t, "cmd_a", "diag.ping")
		w.command(t, "cmd_r", "node.reboot")
		w.a.Event(journal.Durable, "test.one", "", "one", nil)
		synctest.Wait()
		w.mu.Lock()
		w.ack = true
		w.mu.Unlock()
		w.cut(30 * time.Minute)
		if w.reboots != 1 {
			t.Fatalf("%d reboots after the acknowledgement", w.reboots)
		}
		for _, id := range []string{"cmd_a", "cmd_r"} {
			got := w.outcomes[id]
			if len(got) != 2 || !proto.Equal(got[0], got[1]) {
				t.Fatalf("outcomes of %s: %v", id, got)
			}
		}
		if len(w.events) != 2 || w.events[0].GetSequence() != w.events[1].GetSequence() {
			t.Fatalf("events: %v", w.events)
		}
		if w.a.Status().Journal.Events != 0 || len(w.a.Status().Commands) != 1 {
			t.Fatalf("status: %+v", w.a.Status())
		}
	})
}

func TestRevocation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, memory(t))
		w.push(&bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_Revoked{Revoked: &bcdv1.Revoked{Reason: "stolen"}}})
		w.command(t, "cmd_a", "diag.ping")
		if len(w.outcomes["cmd_a"]) != 0 || w.a.Status().Revoked != "stolen" {
			t.Fatalf("outcomes %v, status %+v", w.outcomes, w.a.Status())
		}
		w.a.IdentityChanged(context.Background())
		<-time.After(time.Second) // the session on the new certificate is made
		w.command(t, "cmd_a", "diag.ping")
		if len(w.outcomes["cmd_a"]) != 1 {
			t.Fatalf("outcomes after a new identity: %v", w.outcomes)
		}
	})
}

// TestIdle: an hour of nothing writes nothing.
func TestIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		anchor := &countingAnchor{}
		j, err := journal.NewMemory(nil, anchor)
		if err != nil {
			t.Fatal(err)
		}
		start(t, j)
		before := anchor.saves
		time.Sleep(time.Hour)
		synctest.Wait()
		if anchor.saves != before {
			t.Fatalf("%d writes in an idle hour", anchor.saves-before)
		}
	})
}

// countingAnchor counts the journal's commits.
type countingAnchor struct {
	journal.MemoryAnchor
	saves int
}

func (c *countingAnchor) Save(p journal.Position) error {
	c.saves++
	return c.MemoryAnchor.Save(p)
}
