package agent_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protodelim"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent"
	"github.com/better-compute/bcd/agent/builtin"
	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/dispatch"
	"github.com/better-compute/bcd/agent/journal"
	"github.com/better-compute/bcd/agent/session"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// The kill test: this binary runs itself as an agent that SIGKILLs itself at
// one transition of its journal; the parent plays the gateway over the child's
// standard input and output, and starts it again. Effects are counted in files
// outside the agent.

const (
	childVerb    = "agent-kill-child"
	probeVerb    = "journal-probe-child"
	rebootedCode = 77
)

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == probeVerb {
		os.Exit(journal.ProbeMain(os.Args[2:], os.Stderr))
	}
	if len(os.Args) == 5 && os.Args[1] == childVerb {
		os.Exit(child(os.Args[2], os.Args[3], os.Args[4]))
	}
	os.Exit(m.Run())
}

// killer dies at one point of the journal: STEP:before:ID or STEP:after:ID.
type killer struct {
	agent.Journal
	point string
}

func die() { syscall.Kill(os.Getpid(), syscall.SIGKILL); select {} }

func (k killer) at(step, id string, do func() error) error {
	if k.point == step+":before:"+id {
		die()
	}
	err := do()
	if k.point == step+":after:"+id {
		die()
	}
	return err
}

func (k killer) Accept(e journal.Entry, signed []byte) error {
	return k.at("accept", e.ID, func() error { return k.Journal.Accept(e, signed) })
}
func (k killer) Start(id string, at int64, boot string) error {
	return k.at("start", id, func() error { return k.Journal.Start(id, at, boot) })
}
func (k killer) Finish(id string, f journal.Finish) error {
	return k.at("finish", id, func() error { return k.Journal.Finish(id, f) })
}
func (k killer) Acknowledge(id string) error {
	return k.at("acknowledge", id, func() error { return k.Journal.Acknowledge(id) })
}
func (k killer) BeginAfter(id string) error {
	return k.at("begin-after", id, func() error { return k.Journal.BeginAfter(id) })
}
func (k killer) EndAfter(id string) error {
	return k.at("end-after", id, func() error { return k.Journal.EndAfter(id) })
}

// effect is an executor whose effect is one more byte in a file. With resume
// it goes on under its key after an interruption: what it did is in the file.
type effect struct {
	kind, dir, point string
	resume           bool
}

func (e *effect) Kind() string { return e.kind }

func (e *effect) Run(_ context.Context, cmd dispatch.Command, _ dispatch.Progress) (dispatch.Result, error) {
	if e.point == "effect:before:"+cmd.ID {
		die()
	}
	file := filepath.Join(e.dir, cmd.ID)
	if info, err := os.Stat(file); e.resume && err == nil && info.Size() > 0 {
		return dispatch.Result{Message: "was done under this key"}, nil
	}
	if err := begin(file); err != nil {
		return dispatch.Result{}, err
	}
	if e.point == "effect:after:"+cmd.ID {
		die()
	}
	return dispatch.Result{Message: "done"}, nil
}

func (e *effect) Recover(context.Context, dispatch.Command) (dispatch.Recovery, error) {
	if e.resume {
		return dispatch.Recovery{Action: dispatch.Resume}, nil
	}
	return dispatch.Recovery{}, nil
}

// begin counts an effect.
func begin(file string) error {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write([]byte("x"))
	if e := f.Close(); err == nil {
		err = e
	}
	return err
}

// stdio is a link over the child's standard input and output.
type stdio struct {
	in  *bufio.Reader
	out io.Writer
}

func (s *stdio) Send(f *bcdv1.ClientFrame) error {
	_, err := protodelim.MarshalTo(s.out, f)
	return err
}

func (s *stdio) Receive() (*bcdv1.ServerFrame, error) {
	f := new(bcdv1.ServerFrame)
	return f, protodelim.UnmarshalFrom(s.in, f)
}

// Close does nothing: this link lives as long as the process.
func (s *stdio) Close() {}

func (s *stdio) Dial(context.Context, session.Transport) (session.Link, error) { return s, nil }

// child is one life of the agent.
func child(dir, bootID, point string) int {
	fail := func(err error) int { fmt.Fprintln(os.Stderr, err); return 1 }
	self, err := os.Executable()
	if err != nil {
		return fail(err)
	}
	j, err := journal.Open(context.Background(), journal.Options{
		Path: filepath.Join(dir, "journal.db"), Anchor: journal.AnchorIn(dir), Probe: journal.ExecProbe(self, probeVerb),
	})
	if err != nil {
		return fail(err)
	}
	if loss := j.Loss(); loss != nil {
		return fail(fmt.Errorf("journal lost: %+v", loss))
	}
	effects := filepath.Join(dir, "effects")
	a, err := agent.New(agent.Config{NodeID: "node_k", Role: bcdv1.Role_ROLE_RAMDISK, Version: "test", BootID: bootID}, agent.Deps{
		Clock: clock.System(), Random: func() float64 { return 0 }, Dialer: &stdio{bufio.NewReader(os.Stdin), os.Stdout},
		Journal: killer{j, point}, Verifier: trusting{},
		Executors: func(a *agent.Agent) []dispatch.Executor {
			return []dispatch.Executor{
				&effect{kind: "deploy.image", dir: effects, point: point},
				&effect{kind: "logs.collect", dir: effects, point: point, resume: true},
				&builtin.Reboot{Node: a},
			}
		},
		After: func(_ context.Context, _ dispatch.After, id string) error {
			if err := begin(filepath.Join(effects, id)); err != nil {
				return err
			}
			if point == "reboot:after:"+id {
				die()
			}
			os.Exit(rebootedCode) // as abrupt as a reboot
			return nil
		},
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		return fail(err)
	}
	return fail(a.Run(context.Background())) // lives until it is killed
}

// trusting takes everything.
type trusting struct{}

func (trusting) Verify(s *bcdv1.Signed, _ string, _ time.Time) ([]byte, error) {
	return s.GetPayload(), nil
}

// keeper is the gateway of the kill test, which outlives every agent.
type keeper struct {
	t        *testing.T
	epoch    int64
	commands map[string]*bcdv1.Signed
	outcomes map[string][]byte
	acks     map[string]int
}

func newKeeper(t *testing.T) *keeper {
	return &keeper{t: t, commands: map[string]*bcdv1.Signed{}, outcomes: map[string][]byte{}, acks: map[string]int{}}
}

func (k *keeper) queue(id, kind string) {
	payload, err := proto.Marshal(&bcdv1.Command{
		Id: id, Kind: kind, NodeId: "node_k", DeadlineMs: time.Now().Add(time.Hour).UnixMilli(),
		IssuedMs: time.Now().UnixMilli(), IdempotencyKey: "key-" + id,
	})
	if err != nil {
		k.t.Fatal(err)
	}
	k.commands[id] = &bcdv1.Signed{PayloadType: "bcd.v1.Command", Payload: payload, Signatures: []*bcdv1.Signature{{Signature: []byte("s")}}}
}

// serve plays one life of the agent, until its output ends or done.
func (k *keeper) serve(in io.Reader, out io.Writer, done func() bool) {
	send := func(f *bcdv1.ServerFrame) {
		f.Epoch = k.epoch
		protodelim.MarshalTo(out, f) // a dead child shows at the next read
	}
	reader := bufio.NewReader(in)
	for {
		f := new(bcdv1.ClientFrame)
		if protodelim.UnmarshalFrom(reader, f) != nil {
			return
		}
		switch body := f.GetBody().(type) {
		case *bcdv1.ClientFrame_Hello:
			k.epoch = max(k.epoch, body.Hello.GetLastEpoch()) + 1
			send(&bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_Welcome{Welcome: &bcdv1.Welcome{
				Epoch: k.epoch, ServerTimeMs: time.Now().UnixMilli(), HeartbeatIntervalMs: 15000}}})
			for id, signed := range k.commands {
				// The whole backlog again, whatever the node says it has.
				if k.outcomes[id] == nil && (id != "cmd_reboot" || len(k.outcomes) >= 2) {
					send(&bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_Command{Command: signed}})
				}
			}
		case *bcdv1.ClientFrame_Outcome:
			id := body.Outcome.GetCommandId()
			raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(body.Outcome)
			if err != nil {
				k.t.Error(err)
			}
			if before := k.outcomes[id]; before != nil && string(before) != string(raw) {
				k.t.Errorf("%s has two outcomes: %v", id, body.Outcome)
			}
			k.outcomes[id] = raw
			k.acks[id]++
			send(&bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_OutcomeAck{OutcomeAck: &bcdv1.OutcomeAck{CommandId: id}}})
			if len(k.outcomes) == 2 && k.outcomes["cmd_reboot"] == nil {
				send(&bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_Command{Command: k.commands["cmd_reboot"]}})
			}
		case *bcdv1.ClientFrame_Events:
			list := body.Events.GetEvents()
			send(&bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_EventAck{EventAck: &bcdv1.EventAck{
				JournalId: body.Events.GetJournalId(), Sequence: list[len(list)-1].GetSequence()}}})
		}
		if done() {
			return
		}
	}
}

// TestKill kills the agent at each transition and checks that nothing happens
// twice, and that every command has exactly one outcome.
func TestKill(t *testing.T) {
	var points []string
	for _, id := range []string{"cmd_deploy", "cmd_logs"} {
		for _, step := range []string{"accept", "start", "effect", "finish", "acknowledge"} {
			points = append(points, step+":before:"+id, step+":after:"+id)
		}
	}
	for _, step := range []string{"accept", "start", "finish", "acknowledge", "begin-after"} {
		points = append(points, step+":before:cmd_reboot", step+":after:cmd_reboot")
	}
	points = append(points, "reboot:after:cmd_reboot", "none")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, point := range points {
		t.Run(strings.ReplaceAll(point, ":", " "), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			effects := filepath.Join(dir, "effects")
			if err := os.Mkdir(effects, 0o700); err != nil {
				t.Fatal(err)
			}
			k := newKeeper(t)
			k.queue("cmd_deploy", "deploy.image")
			k.queue("cmd_logs", "logs.collect")
			k.queue("cmd_reboot", "node.reboot")
			bootID, killed, rebooted := "boot-1", false, false
			for life := 1; ; life++ {
				if life > 6 {
					t.Fatalf("not done after %d lives: outcomes of %d commands", life-1, len(k.outcomes))
				}
				arg := point
				if killed {
					arg = "none"
				}
				cmd := exec.Command(self, childVerb, dir, bootID, arg)
				var log strings.Builder
				cmd.Stderr = &log
				in, err := cmd.StdinPipe()
				if err != nil {
					t.Fatal(err)
				}
				out, err := cmd.StdoutPipe()
				if err != nil {
					t.Fatal(err)
				}
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				watchdog := time.AfterFunc(60*time.Second, func() { cmd.Process.Kill() })
				// The reboot ends the last life; one that was begun and not
				// finished is noted, which is the end too.
				settled := false
				k.serve(out, in, func() bool {
					settled = killed && len(k.outcomes) == 3 && strings.HasPrefix(point, "begin-after:after")
					return settled
				})
				if settled {
					cmd.Process.Kill()
				}
				in.Close()
				err = cmd.Wait()
				watchdog.Stop()
				var exit *exec.ExitError
				errors.As(err, &exit)
				switch {
				case settled:
				case exit != nil && exit.ExitCode() == rebootedCode:
					bootID, rebooted = "boot-2", true
				case exit != nil && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL && !killed:
					killed = true
					if strings.HasPrefix(point, "reboot:after") {
						bootID, rebooted = "boot-2", true // the machine went down at once
					}
					if !rebooted {
						continue
					}
				default:
					t.Fatalf("life %d of the agent ended with %v:\n%s", life, err, log.String())
				}
				break
			}
			if (point != "none") != killed {
				t.Fatalf("killed: %v", killed)
			}
			for id := range k.commands {
				raw := k.outcomes[id]
				if raw == nil {
					t.Fatalf("%s has no outcome", id)
				}
				outcome := new(bcdv1.Outcome)
				if err := proto.Unmarshal(raw, outcome); err != nil {
					t.Fatal(err)
				}
				count, _ := os.ReadFile(filepath.Join(effects, id))
				if len(count) > 1 {
					t.Errorf("%s had %d effects", id, len(count))
				}
				switch status := outcome.GetStatus(); {
				case id != "cmd_reboot" && status == bcdv1.OutcomeStatus_OUTCOME_STATUS_SUCCEEDED && len(count) != 1:
					t.Errorf("%s succeeded with %d effects", id, len(count))
				case status == bcdv1.OutcomeStatus_OUTCOME_STATUS_INDETERMINATE && id == "cmd_deploy":
				case status != bcdv1.OutcomeStatus_OUTCOME_STATUS_SUCCEEDED:
					t.Errorf("%s ended as %s: %s", id, status, outcome.GetMessage())
				}
			}
		})
	}
}
