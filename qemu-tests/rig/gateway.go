package rig

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

const (
	// gatewayLimit bounds a gateway's start, which takes under a second, on a
	// host that has two machines booting.
	gatewayLimit = 60 * time.Second
	// maxOutput bounds what one command-line call may print.
	maxOutput = 16 << 20
)

// Gateway is a bcd-gateway process and its command line.
type Gateway struct {
	// Binary is the path of bcd-gateway; Data its data directory.
	Binary, Data string
	// Listen is its address, such as "127.0.0.1:34567". A machine reaches a
	// port of the host's loopback at HostAddress.
	Listen string
	// Args are further arguments of serve.
	Args []string
	// Log is the file its output is appended to.
	Log string

	cmd  *exec.Cmd
	done chan struct{}
}

// NewGateway gives a gateway with its data in a folder below dir, on a free
// port, that tells machines the address at which they reach it.
func NewGateway(binary, dir string) (*Gateway, error) {
	// The port is free now and was just given to us; the kernel gives it to
	// nobody else soon.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer l.Close()
	g := &Gateway{Binary: binary, Data: filepath.Join(dir, "gateway"), Listen: l.Addr().String(), Log: filepath.Join(dir, "gateway.log")}
	g.Args = []string{"--advertise", g.URL()}
	return g, nil
}

// URL is where machines reach the gateway.
func (g *Gateway) URL() string {
	_, port, err := net.SplitHostPort(g.Listen)
	if err != nil {
		port = "0"
	}
	return "https://" + net.JoinHostPort(HostAddress, port)
}

// Start starts the gateway and waits until its command line answers.
func (g *Gateway) Start(ctx context.Context) error {
	if g.cmd != nil {
		return errors.New("the gateway runs already")
	}
	log, err := os.OpenFile(g.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	args := append([]string{"--data", g.Data, "serve", "--listen", g.Listen}, g.Args...)
	cmd := exec.Command(g.Binary, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("gateway: %w", err)
	}
	done := make(chan struct{})
	go func() { cmd.Wait(); close(done) }()
	g.cmd, g.done = cmd, done

	ctx, cancel := context.WithTimeout(ctx, gatewayLimit)
	defer cancel()
	poll := time.NewTicker(100 * time.Millisecond)
	defer poll.Stop()
	for {
		_, err := g.Run(ctx, "machines", "--json")
		if err == nil {
			return nil
		}
		select {
		case <-done:
			g.cmd = nil
			return fmt.Errorf("the gateway ended at its start: %s", bytes.TrimSpace(tailOf(g.Log, 1000)))
		case <-ctx.Done():
			g.Kill()
			return fmt.Errorf("the gateway is not ready: %w; its log is %s", err, g.Log)
		case <-poll.C:
		}
	}
}

// Kill is kill -9 of the gateway. Start may follow.
func (g *Gateway) Kill() {
	if g.cmd == nil {
		return
	}
	g.cmd.Process.Kill()
	<-g.done
	g.cmd = nil
}

// Stop asks the gateway to end, and insists after some seconds.
func (g *Gateway) Stop() {
	if g.cmd == nil {
		return
	}
	g.cmd.Process.Signal(syscall.SIGTERM)
	t := time.NewTimer(10 * time.Second)
	defer t.Stop()
	select {
	case <-g.done:
		g.cmd = nil
	case <-t.C:
		g.Kill()
	}
}

// Run runs the gateway's command line, such as "machines", "--json", and gives
// its standard output. An error has what it said on standard error.
func (g *Gateway) Run(ctx context.Context, args ...string) ([]byte, error) {
	return g.RunInput(ctx, nil, args...)
}

// RunInput is Run with something on standard input.
func (g *Gateway) RunInput(ctx context.Context, input []byte, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, g.Binary, append([]string{"--data", g.Data}, args...)...)
	cmd.WaitDelay = 5 * time.Second
	cmd.Stdin = bytes.NewReader(input)
	out, errs := bounded{limit: maxOutput}, bounded{limit: 64 << 10}
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if err == nil && out.cut {
		err = fmt.Errorf("it printed more than %d bytes", maxOutput)
	}
	if err != nil {
		verb := ""
		if len(args) > 0 {
			verb = args[0]
		}
		return out.buf.Bytes(), fmt.Errorf("bcd-gateway %s: %w: %s", verb, err, bytes.TrimSpace(errs.buf.Bytes()))
	}
	return out.buf.Bytes(), nil
}

// RunJSON runs a command with --json and decodes what it prints.
func (g *Gateway) RunJSON(ctx context.Context, into any, args ...string) error {
	out, err := g.Run(ctx, append(args, "--json")...)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(out, into); err != nil {
		return fmt.Errorf("bcd-gateway %s --json: %w in %.200q", args[0], err, out)
	}
	return nil
}

// bounded keeps the first bytes that are written to it. The buffer is a field
// and not embedded: io.Copy would take its ReadFrom and pass Write by.
type bounded struct {
	buf   bytes.Buffer
	limit int
	cut   bool
}

func (b *bounded) Write(p []byte) (int, error) {
	room := max(0, b.limit-b.buf.Len())
	if room < len(p) {
		b.cut = true
	}
	b.buf.Write(p[:min(room, len(p))])
	return len(p), nil
}
