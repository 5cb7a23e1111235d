package gateway

import "time"

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
