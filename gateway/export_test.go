package gateway

import (
	"context"
	"time"
)

// SetPings shortens the wait for a dead path.
func (g *Gateway) SetPings(idle, answer time.Duration) { g.pingIdle, g.pingAnswer = idle, answer }

// Sessions counts the live sessions.
func (g *Gateway) Sessions() int { return len(g.hub.every()) }

// SetOutbox makes a slow reader too slow sooner.
func (g *Gateway) SetOutbox(bytes int) { g.outboxBytes = bytes }

// Watchers counts who waits for changes.
func (g *Gateway) Watchers() int {
	g.hub.mu.Lock()
	defer g.hub.mu.Unlock()
	return len(g.hub.watchers)
}

// ForgetGrants is what Run does from time to time.
func (g *Gateway) ForgetGrants(ctx context.Context) error { return g.forgetGrants(ctx) }

// BootsKept counts the MACs whose boots are kept for a site, and the grants of
// all.
func (g *Gateway) BootsKept(ctx context.Context, site string) (macs, grants int, err error) {
	err = g.store.View(ctx, func(tx Tx) error {
		macs, grants = 0, 0
		if err := tx.EachBoots(site, func(*Boots) error { macs++; return nil }); err != nil {
			return err
		}
		return tx.EachBootGrant(func(*BootGrant) error { grants++; return nil })
	})
	return macs, grants, err
}
