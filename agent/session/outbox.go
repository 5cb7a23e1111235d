package session

import (
	"sync"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Priority orders what waits to be sent on a link.
type Priority int

// The priorities, most urgent first.
const (
	// Control: heartbeats, acknowledgements, everything of the session.
	Control Priority = iota
	// Outcomes of commands.
	Outcomes
	// Events, conditions and spec status.
	Events
	// Bulk: inventory and progress.
	Bulk
	priorities
)

// places bounds each queue. Outcomes has room for every command of all lanes
// twice over; Bulk is small, because its frames are large.
var places = [priorities]int{Control: 256, Outcomes: 256, Events: 64, Bulk: 32}

// outbox is a link's bounded priority queue. The writer takes from it.
type outbox struct {
	mu       sync.Mutex
	queues   [priorities][]*bcdv1.ClientFrame
	finished bool // nothing more comes; what is there is sent
	dropped  bool // nothing is sent any more
	signal   chan struct{}
}

func newOutbox() *outbox { return &outbox{signal: make(chan struct{}, 1)} }

// push reports whether the frame found a place.
func (o *outbox) push(p Priority, frame *bcdv1.ClientFrame) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.finished || o.dropped || len(o.queues[p]) >= places[p] {
		return false
	}
	o.queues[p] = append(o.queues[p], frame)
	o.wake()
	return true
}

// wake never blocks; the writer looks again at everything.
func (o *outbox) wake() {
	select {
	case o.signal <- struct{}{}:
	default:
	}
}

// pop returns the most urgent frame. With more false the writer ends; without
// a frame it waits for signal.
func (o *outbox) pop() (frame *bcdv1.ClientFrame, more bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.dropped {
		return nil, false
	}
	for p := range o.queues {
		if q := o.queues[p]; len(q) > 0 {
			frame, q[0] = q[0], nil
			if o.queues[p] = q[1:]; len(q) == 1 {
				o.queues[p] = nil
			}
			return frame, true
		}
	}
	return nil, !o.finished
}

// finish lets the writer send what is queued and end.
func (o *outbox) finish() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.finished = true
	o.wake()
}

// drop ends the writer at once.
func (o *outbox) drop() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.dropped = true
	o.wake()
}
