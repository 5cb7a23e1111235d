package gateway_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/api/bcd/v1/bcdv1connect"
	"github.com/better-compute/bcd/gateway"
	"github.com/better-compute/bcd/gateway/boltstore"
	"github.com/better-compute/bcd/gateway/keys"
)

// A child process is a real gateway that kills itself, with SIGKILL, right
// before or right after the n-th commit of its store.
const (
	childDir   = "BCD_TEST_GATEWAY_DIR"
	childKill  = "BCD_TEST_GATEWAY_KILL"
	childReady = "ready "
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		if err := child(dir, os.Getenv(childKill)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// killer is a store that ends the process at a commit.
type killer struct {
	gateway.Store
	at    int
	after bool
	count int
	lock  chan struct{}
}

func (k *killer) Update(ctx context.Context, fn func(gateway.Tx) error) error {
	k.lock <- struct{}{}
	defer func() { <-k.lock }()
	k.count++
	if k.count == k.at && !k.after {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	err := k.Store.Update(ctx, fn)
	if k.count == k.at {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	return err
}

func child(dir, kill string) error {
	store, err := boltstore.Open(filepath.Join(dir, "state.db"))
	if err != nil {
		return err
	}
	k := &killer{Store: store, lock: make(chan struct{}, 1)}
	var when string
	if _, err := fmt.Sscanf(kill, "%s %d", &when, &k.at); err != nil {
		return fmt.Errorf("kill %q: %w", kill, err)
	}
	k.after = when == "after"
	set, _, err := keys.LoadOrInit(filepath.Join(dir, "keys"), time.Now())
	if err != nil {
		return err
	}
	network, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	local, err := gateway.ListenLocal(filepath.Join(dir, "operator.sock"))
	if err != nil {
		return err
	}
	url := "https://" + network.Addr().String()
	g, err := gateway.New(gateway.Config{Store: k, Keys: set, Advertise: url, BlobDir: filepath.Join(dir, "blobs")})
	if err != nil {
		return err
	}
	fmt.Println(childReady + url)
	return g.Serve(context.Background(), network, local)
}

// spawn starts a child on the world's state and waits until it listens.
func (w *world) spawn(kill string) (wait func()) {
	t := w.t
	t.Helper()
	executable, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(executable)
	cmd.Env = append(os.Environ(), childDir+"="+w.dir, childKill+"="+kill)
	cmd.Stderr = w.logs
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the child said %q: %v", line, err)
	}
	if _, err := fmt.Sscanf(line, childReady+"%s", &w.url); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(w.dir, "operator.sock")
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}
	w.op = bcdv1connect.NewOperatorServiceClient(&http.Client{Transport: transport}, "http://operator")
	return func() {
		_ = cmd.Process.Kill()
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait()
	}
}

// TestKilledAtEveryCommit: the gateway is killed before and after each of its
// commits while one command goes its way. Whatever it acknowledged holds, the
// command begins once on the node, and ends with the node's outcome.
func TestKilledAtEveryCommit(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	w.stop()
	for at := 1; at <= 7; at++ {
		for _, when := range []string{"before", "after"} {
			t.Run(fmt.Sprintf("%s commit %d", when, at), func(t *testing.T) { w.killedOnce(t, m, fmt.Sprintf("%s %d", when, at)) })
		}
	}
}

// dutiful is a node whose journal outlives the gateway: it runs a command once
// and repeats the outcome until it is acknowledged.
type dutiful struct {
	effects int
	acked   bool
	id      string
}

func (w *world) killedOnce(t *testing.T, m *member, kill string) {
	key := "once " + kill
	n := &dutiful{}
	for try := 0; !n.acked; try++ {
		if try == 10 {
			t.Fatal("the command does not end")
		}
		wait := w.spawn(kill)
		kill = "never 0"
		w.tryOnce(t, m, n, key)
		wait()
	}
	if n.effects != 1 {
		t.Errorf("the command ran %d times", n.effects)
	}
	wait := w.spawn("never 0")
	defer wait()
	got := w.get(n.id)
	if got.GetOutcome().GetStatus() != succeeded {
		t.Errorf("an acknowledged outcome is now %v", got)
	}
}

// tryOnce goes on until the command is acknowledged or the gateway is gone.
func (w *world) tryOnce(t *testing.T, m *member, n *dutiful, key string) {
	answer, err := w.op.SendCommand(t.Context(), connect.NewRequest(&bcdv1.SendCommandRequest{Machine: "a", Kind: "diag.ping", IdempotencyKey: key}))
	if err != nil {
		return
	}
	if n.id != "" && n.id != answer.Msg.GetCommand().GetId() {
		t.Errorf("the same key gave %s and %s", n.id, answer.Msg.GetCommand().GetId())
	}
	n.id = answer.Msg.GetCommand().GetId()
	d := m.dial()
	defer d.close()
	frame := m.helloFrame(func(h *bcdv1.Hello) {
		if n.effects > 0 {
			h.UnfinishedCommands = []string{n.id}
		}
	})
	if d.stream.Send(frame) != nil {
		return
	}
	go d.read()
	report := func() {
		d.accept(n.id)
		d.started(n.id)
		d.outcome(n.id, succeeded, "")
	}
	for f := range d.frames {
		switch {
		case f.GetWelcome() != nil:
			d.epoch = f.GetWelcome().GetEpoch()
			if n.effects > 0 {
				report()
			}
		case f.GetReject() != nil:
			t.Errorf("rejected: %v", f.GetReject())
			return
		case f.GetCommand() != nil:
			if n.effects == 0 {
				n.effects++
			}
			report()
		case f.GetOutcomeAck().GetCommandId() == n.id:
			n.acked = true
			return
		}
	}
	if d.err == nil {
		t.Error(errors.New("the session ended without an error"))
	}
}
