package identity

import (
	"context"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/bcd/agent/clock"
)

// TestRenewerRun lives through a day, an outage of two days, and what follows.
func TestRenewerRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGateway()
		dir := dataDir(t)
		// The bubble's clock begins in 2000; certificates are of 2026.
		offset := time.Until(t0)
		g.now = func() time.Time { return time.Now().Add(offset) }
		i := newIdentity(t, g, dir)
		current := NewCurrent(i)
		var down atomic.Bool
		var told atomic.Int32
		r := &Renewer{
			Store: Store{Dir: dir}, Current: current, Roots: g.roots, GatewayURL: "https://gw.test",
			Clock: clock.System(), Now: g.now, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
			OnRenewed: func(*Identity) { told.Add(1) },
			HTTP: func(with bool) connect.HTTPClient {
				d := direct{g: g, fail: func() error {
					if down.Load() {
						return errors.New("connection refused")
					}
					return nil
				}}
				if with {
					d.peer = func() []*x509.Certificate { return current.Get().Chain }
				}
				return d
			},
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- r.Run(ctx) }()

		time.Sleep(14 * time.Hour)
		synctest.Wait()
		if n := g.renewed(); n != 0 {
			t.Errorf("%d renewals before 0.61 of the life", n)
		}
		time.Sleep(4 * time.Hour)
		synctest.Wait()
		if n := g.renewed(); n != 1 || told.Load() != 1 || current.Get() == i {
			t.Errorf("%d renewals at 18 of 24 hours, told of %d", n, told.Load())
		}
		down.Store(true)
		time.Sleep(48 * time.Hour)
		synctest.Wait()
		if left := current.Get().NotAfter().Sub(g.now()); left > 0 {
			t.Fatalf("the test's outage is too short: %v left", left)
		}
		if _, err := Load(dir); err != nil {
			t.Errorf("an outage harmed the identity: %v", err)
		}
		down.Store(false)
		time.Sleep(renewRetryCap)
		synctest.Wait()
		if left := current.Get().NotAfter().Sub(g.now()); left < 23*time.Hour {
			t.Errorf("not renewed after the outage: %v left", left)
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
	})
}
