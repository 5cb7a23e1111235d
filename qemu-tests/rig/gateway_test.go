package rig

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestMain lets the test binary play bcd-gateway: "--data DIR serve …" holds a
// socket in DIR, any other verb asks it.
func TestMain(m *testing.M) {
	if len(os.Args) > 3 && os.Args[1] == "--data" {
		os.Exit(playGateway(os.Args[2], os.Args[3:]))
	}
	os.Exit(m.Run())
}

func playGateway(data string, args []string) int {
	socket := filepath.Join(data, "s")
	switch args[0] {
	case "serve":
		if _, err := os.Stat(filepath.Join(data, "broken")); err == nil {
			fmt.Fprintln(os.Stderr, "the store is broken")
			return 1
		}
		os.MkdirAll(data, 0o700)
		os.Remove(socket)
		l, err := net.Listen("unix", socket)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer l.Close()
		fmt.Println("serving")
		stop := make(chan os.Signal, 1)
		signal.Notify(stop, syscall.SIGTERM)
		<-stop
		fmt.Println("drained")
	case "echo":
		io.Copy(os.Stdout, os.Stdin)
	case "flood":
		for range maxOutput/1000 + 10 {
			os.Stdout.Write(bytes.Repeat([]byte("x"), 1000))
		}
	default:
		c, err := net.Dial("unix", socket)
		if err != nil {
			fmt.Fprintln(os.Stderr, "no gateway")
			return 1
		}
		c.Close()
		fmt.Println(`{"machines": [1, 2]}`)
	}
	return 0
}

func TestGatewayKilledAndStartedAgain(t *testing.T) {
	ctx := Context(t)
	dir := t.TempDir()
	// A unix socket's path is short.
	data, err := os.MkdirTemp("", "g")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(data) })
	g, err := NewGateway(os.Args[0], dir)
	if err != nil {
		t.Fatal(err)
	}
	g.Data = data
	if !strings.HasPrefix(g.URL(), "https://"+HostAddress+":") {
		t.Errorf("machines are told %s", g.URL())
	}
	t.Cleanup(g.Stop)
	if err := g.Start(ctx); err != nil {
		t.Fatal(err)
	}
	g.Kill()
	if _, err := g.Run(ctx, "machines"); err == nil || !strings.Contains(err.Error(), "no gateway") {
		t.Errorf("a killed gateway answers: %v", err)
	}
	if err := g.Start(ctx); err != nil {
		t.Fatal(err)
	}
	var got struct{ Machines []int }
	if err := g.RunJSON(ctx, &got, "machines"); err != nil || len(got.Machines) != 2 {
		t.Errorf("got %v, %v", got, err)
	}
	g.Stop()
	log, err := os.ReadFile(g.Log)
	if err != nil || strings.Count(string(log), "serving") != 2 || strings.Count(string(log), "drained") != 1 {
		t.Errorf("log %q, %v", log, err)
	}
}

func TestGatewayInputAndOutput(t *testing.T) {
	g := &Gateway{Binary: os.Args[0], Data: "x"}
	if out, err := g.RunInput(t.Context(), []byte("token"), "echo"); err != nil || string(out) != "token" {
		t.Errorf("got %q, %v", out, err)
	}
	if _, err := g.Run(t.Context(), "flood"); err == nil {
		t.Error("output without end is taken")
	}
}

func TestGatewayThatEndsAtOnce(t *testing.T) {
	g, err := NewGateway(os.Args[0], t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(g.Data, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(g.Data, "broken"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := g.Start(Context(t)); err == nil || !strings.Contains(err.Error(), "the store is broken") {
		t.Errorf("got %v, want the gateway's own words", err)
	}
}
