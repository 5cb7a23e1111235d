package rig

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// DHCPLog is the name of a DHCP server's log in its folder.
const DHCPLog = "dnsmasq.log"

// dnsmasqLimit bounds a start that takes milliseconds, on a busy host.
const dnsmasqLimit = 30 * time.Second

// RunDHCP starts a DHCP and TFTP server that is not ours, dnsmasq, in a
// namespace, with further options such as "--dhcp-range=…", and ends it with
// the test. Its log, with what each packet asked and got, is in dir, which it
// has for itself.
func RunDHCP(t testing.TB, n *Namespace, dir string, options ...string) {
	t.Helper()
	stop, err := startDHCP(Context(t), n, dir, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
}

// startDHCP returns when the server is up.
func startDHCP(ctx context.Context, n *Namespace, dir string, options []string) (stop func(), err error) {
	name := filepath.Join(dir, DHCPLog)
	log, err := os.Create(name)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	// No pid file, no user of its own, nothing from /etc: several run at once.
	args := []string{"--keep-in-foreground", "--conf-file=/dev/null", "--user=root", "--group=root", "--pid-file=", "--port=0", "--no-ping",
		"--no-resolv", "--no-hosts", "--dhcp-leasefile=" + filepath.Join(dir, "dnsmasq.leases"), "--log-facility=-", "--log-dhcp"}
	c := n.Command(context.Background(), "dnsmasq", append(args, options...)...)
	c.Stdout, c.Stderr = log, log
	if err := c.Start(); err != nil {
		return nil, fmt.Errorf("dnsmasq: %w; install dnsmasq-base", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	stop = func() {
		c.Process.Kill()
		<-ended
	}
	ctx, cancel := context.WithTimeout(ctx, dnsmasqLimit)
	defer cancel()
	poll := time.NewTicker(10 * time.Millisecond)
	defer poll.Stop()
	for {
		if text, err := os.ReadFile(name); err == nil && bytes.Contains(text, []byte("started, version")) {
			return stop, nil
		}
		select {
		case err := <-ended:
			var exit *exec.ExitError
			if err == nil || errors.As(err, &exit) {
				return nil, fmt.Errorf("dnsmasq ended: %v: %s", err, tailOf(name, 500))
			}
			return nil, fmt.Errorf("dnsmasq: %w", err)
		case <-ctx.Done():
			stop()
			return nil, fmt.Errorf("dnsmasq does not start: %w: %s", context.Cause(ctx), tailOf(name, 500))
		case <-poll.C:
		}
	}
}
