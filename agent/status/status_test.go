package status

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var t0 = time.Date(2026, 12, 1, 8, 0, 0, 0, time.UTC)

func example() *Status {
	return &Status{
		Time: t0,
		Agent: Agent{State: "connected", Version: "1.2.3", Role: "node", NodeID: "node_1", Machine: "mach_1", Site: "fsn1", PID: 7,
			Started: t0.Add(-90 * time.Minute), NotAfter: t0.Add(14*time.Hour + 12*time.Minute)},
		Session: Session{Gateway: "https://gw", Connected: true, Since: t0.Add(-65 * time.Second), Epoch: 4},
		Spec: Spec{Accepted: 3, Observed: 2, Refused: "generation 1 is older",
			Sections: []Section{{Name: "host", State: "failed", Message: "two\nlines\x1b[31m"}}},
		Journal:    Journal{Events: 2, Bytes: 1500},
		Commands:   []Command{{ID: "cmd_1", Kind: "deploy.image", State: "started", Progress: "writing 41 %"}},
		Conditions: []Condition{{Type: "HostPressure", Status: "false"}, {Type: "ClockUnsynchronised", Status: "true", Message: "no NTP"}},
	}
}

const exampleText = `agent        connected
version      1.2.3, role node, pid 7, up 1h30m
node         node_1 of mach_1, site fsn1
certificate  valid 14h12m more
session      connected to https://gw for 1m05s, epoch 4
spec         generation 3, observed 2
  host       failed: two lines [31m
  refused    generation 1 is older
journal      2 unacknowledged events, 2 KiB
command      cmd_1 deploy.image started, writing 41 %
condition    ClockUnsynchronised true: no NTP
`

func TestText(t *testing.T) {
	var b strings.Builder
	if err := example().WriteText(&b); err != nil || b.String() != exampleText {
		t.Errorf("%v\n%s", err, b.String())
	}
	b.Reset()
	bad := &Status{Time: t0, Agent: Agent{State: "connecting", NotAfter: t0.Add(-time.Hour)},
		Session: Session{Gateway: "https://gw", LastError: "connection refused", NextTry: t0.Add(12 * time.Second)}}
	if err := bad.WriteText(&b); err != nil {
		t.Error(err)
	}
	for _, want := range []string{"not joined; run bcd join", "expired 1h00m ago", "not connected to https://gw: connection refused; next try in 12s", "spec         none"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
}

// serve runs s until the test ends and waits for its socket.
func serve(t *testing.T, s *Server) {
	t.Helper()
	listener, err := s.listen()
	if err != nil {
		t.Fatal(err)
	}
	// listen has made the socket; Run makes it again, over this stale one, as
	// after a kill -9.
	listener.Close()
	ready := make(chan struct{})
	s.listening = func() { close(ready) }
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	<-ready
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("run: %v", err)
		}
		if _, err := os.Lstat(s.Path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the socket is left: %v", err)
		}
		if left, _ := os.ReadDir(filepath.Dir(s.Path)); len(left) != 0 {
			t.Errorf("left in the folder: %v", left)
		}
	})
}

func newServer(t *testing.T) *Server {
	return &Server{
		Path: filepath.Join(t.TempDir(), "run", "bcd.sock"), Version: "1.2.3", Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
		Status: func(context.Context) *Status { return example() },
		Doctor: func(context.Context) (any, error) { return map[string]int{"fails": 2}, nil },
	}
}

func TestServer(t *testing.T) {
	s := newServer(t)
	serve(t, s)
	info, err := os.Stat(s.Path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket %v, %v", info.Mode(), err)
	}
	if info, err := os.Stat(filepath.Dir(s.Path)); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("folder %v, %v", info.Mode(), err)
	}
	c := Client{Path: s.Path}
	got, err := c.Status(t.Context())
	if err != nil || got.Schema != Schema || got.Agent.NodeID != "node_1" {
		t.Fatalf("%+v, %v", got, err)
	}
	var b strings.Builder
	if err := got.WriteText(&b); err != nil || b.String() != exampleText {
		t.Errorf("over the socket: %s", b.String())
	}
	if v, err := c.Version(t.Context()); err != nil || *v != (Version{Schema, "1.2.3"}) {
		t.Errorf("%v, %v", v, err)
	}
	var report map[string]int
	if err := c.Doctor(t.Context(), &report); err != nil || report["fails"] != 2 {
		t.Errorf("%v, %v", report, err)
	}
	if err := c.Get(t.Context(), "/v1/other", &report); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("%v", err)
	}
}

// TestSecondDaemon: one that is started by mistake leaves the first its socket.
func TestSecondDaemon(t *testing.T) {
	first := newServer(t)
	serve(t, first)
	second := newServer(t)
	second.Path = first.Path
	if listener, err := second.listen(); err == nil || !strings.Contains(err.Error(), "another daemon answers on "+first.Path) {
		t.Errorf("%v, %v", listener, err)
	}
	if _, err := (Client{Path: first.Path}).Status(t.Context()); err != nil {
		t.Errorf("the first daemon's socket: %v", err)
	}
}

// TestSocketOfAnother: a daemon that ends removes its own socket only.
func TestSocketOfAnother(t *testing.T) {
	s := newServer(t)
	listener, err := s.listen()
	if err != nil {
		t.Fatal(err)
	}
	listener.Close()
	if err := errors.Join(os.Remove(s.Path), os.WriteFile(s.Path, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	listener.remove()
	if _, err := os.Lstat(s.Path); err != nil {
		t.Errorf("another's file is gone: %v", err)
	}
}

// TestSharedFolder: a folder that others use stays as it is.
func TestSharedFolder(t *testing.T) {
	s := newServer(t)
	dir := filepath.Dir(s.Path)
	if err := errors.Join(os.Mkdir(dir, 0o700), os.Chmod(dir, 0o1777)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.listen(); err == nil || !strings.Contains(err.Error(), "chmod 700 "+dir) {
		t.Errorf("%v", err)
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o777 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}

func TestRefusedCaller(t *testing.T) {
	s := newServer(t)
	s.allowed = func(uid uint32) bool { return uid != uint32(os.Geteuid()) }
	serve(t, s)
	if _, err := (Client{Path: s.Path}).Status(t.Context()); err == nil {
		t.Error("let in")
	}
	if (&Server{}).mayConnect(uint32(os.Geteuid())+12345) || !(&Server{}).mayConnect(0) {
		t.Error("who may connect")
	}
}

func TestNoSocket(t *testing.T) {
	s := newServer(t)
	if err := os.MkdirAll(s.Path, 0o700); err != nil { // a folder is in its place
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("a daemon without a socket goes on: %v", err)
	}
	missing := filepath.Join(t.TempDir(), "none.sock")
	if _, err := (Client{Path: missing}).Status(t.Context()); !errors.Is(err, ErrNotRunning) {
		t.Errorf("%v", err)
	}
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: missing, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	stale.Close()
	if _, err := (Client{Path: missing}).Status(t.Context()); !errors.Is(err, ErrNotRunning) {
		t.Errorf("stale: %v", err)
	}
}
