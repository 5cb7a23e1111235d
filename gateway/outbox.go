package gateway

import (
	"errors"
	"sync"

	"google.golang.org/protobuf/proto"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// A reader that lets this much wait is too slow to be kept: its commands
	// are in the Store and come again on its next session. Room for one spec
	// and all lanes full of commands.
	outboxFrames = 1024
	outboxBytes  = 32 << 20
)

var errSlowReader = errors.New("the node reads too slowly")

// outbox is the bounded queue between a session and its writer. Adding never
// blocks.
type outbox struct {
	limit  int // bytes
	mu     sync.Mutex
	queues [priorities][]*bcdv1.ServerFrame
	frames int
	bytes  int
	closed bool
	// ready has an element when there is something to take, or the end.
	ready chan struct{}
}

func newOutbox(limit int) *outbox { return &outbox{limit: limit, ready: make(chan struct{}, 1)} }

func (o *outbox) add(p priority, frame *bcdv1.ServerFrame) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return nil
	}
	size := proto.Size(frame)
	if o.frames+1 > outboxFrames || o.bytes+size > o.limit {
		return errSlowReader
	}
	o.queues[p] = append(o.queues[p], frame)
	o.frames++
	o.bytes += size
	o.signal()
	return nil
}

// close lets the writer take what is queued and nothing after it.
func (o *outbox) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	o.signal()
}

func (o *outbox) signal() {
	select {
	case o.ready <- struct{}{}:
	default:
	}
}

// take gives the next frame in the order of priorities, nil when there is
// none now; last says that none will come.
func (o *outbox) take() (frame *bcdv1.ServerFrame, last bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for p, queue := range o.queues {
		if len(queue) == 0 {
			continue
		}
		frame = queue[0]
		queue[0] = nil
		o.queues[p] = queue[1:]
		o.frames--
		o.bytes -= proto.Size(frame)
		return frame, false
	}
	return nil, o.closed
}
