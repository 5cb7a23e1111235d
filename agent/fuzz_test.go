package agent_test

import (
	"context"
	"io"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent"
	"github.com/better-compute/bcd/agent/builtin"
	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/dispatch"
	"github.com/better-compute/bcd/agent/journal"
	"github.com/better-compute/bcd/agent/session"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// once dials one link, and then no more.
type once struct{ link session.Link }

func (o *once) Dial(ctx context.Context, _ session.Transport) (session.Link, error) {
	if link := o.link; link != nil {
		o.link = nil
		return link, nil
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

// FuzzServerFrame: whatever a gateway sends after a Welcome, the agent neither
// crashes nor runs anything that is not signed.
func FuzzServerFrame(f *testing.F) {
	for _, frame := range []*bcdv1.ServerFrame{
		{Body: &bcdv1.ServerFrame_Command{Command: &bcdv1.Signed{PayloadType: "bcd.v1.Command", Payload: []byte{1, 2}}}},
		{Body: &bcdv1.ServerFrame_OutcomeAck{OutcomeAck: &bcdv1.OutcomeAck{CommandId: "cmd_a"}}},
		{Body: &bcdv1.ServerFrame_EventAck{EventAck: &bcdv1.EventAck{Sequence: 9}}},
		{Body: &bcdv1.ServerFrame_Cancel{Cancel: &bcdv1.Cancel{CommandId: "cmd_a"}}},
		{Body: &bcdv1.ServerFrame_Spec{}},
		{Body: &bcdv1.ServerFrame_Drain{Drain: &bcdv1.Drain{SpreadMs: -5}}},
		{Body: &bcdv1.ServerFrame_Revoked{}},
		{Body: &bcdv1.ServerFrame_SecretAnswer{}},
		{Body: &bcdv1.ServerFrame_IdentityChallenge{}},
		{Critical: true},
	} {
		raw, err := proto.Marshal(frame)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		frame := new(bcdv1.ServerFrame)
		if proto.Unmarshal(raw, frame) != nil {
			return
		}
		synctest.Test(t, func(t *testing.T) {
			j, err := journal.NewMemory(nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			link, end := session.Pipe()
			a, err := agent.New(agent.Config{NodeID: "node_f", Role: bcdv1.Role_ROLE_NODE, BootID: "boot"}, agent.Deps{
				Clock: clock.System(), Random: func() float64 { return 0.5 }, Dialer: &once{link}, Journal: j, Verifier: refusing{},
				Executors: func(a *agent.Agent) []dispatch.Executor { return builtin.Executors(a) },
				After: func(context.Context, dispatch.After, string) error {
					t.Error("an action began")
					return nil
				},
				Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
			})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan struct{})
			go func() { a.Run(ctx); close(done) }()
			go func() {
				for {
					if _, err := end.Receive(); err != nil {
						return
					}
				}
			}()
			end.Send(&bcdv1.ServerFrame{Epoch: 1, Body: &bcdv1.ServerFrame_Welcome{Welcome: &bcdv1.Welcome{Epoch: 1, ServerTimeMs: time.Now().UnixMilli()}}})
			frame.Epoch = 1
			end.Send(frame)
			synctest.Wait()
			for _, e := range j.Open() {
				if e.State != journal.Finished {
					t.Errorf("something unsigned was taken: %+v", e)
				}
			}
			cancel()
			<-done
			end.Close()
		})
	})
}
