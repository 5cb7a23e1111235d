package rig

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
)

const (
	// maxQMPLine bounds one message; query-blockstats has a few kB.
	maxQMPLine = 1 << 20
	// maxEvents is how many events wait for a reader; the oldest go first.
	maxEvents = 256
)

// Event is something that QEMU told by itself, such as RESET or SHUTDOWN.
type Event struct {
	Name string
	Data json.RawMessage
}

// message is any line of QMP.
type message struct {
	Greeting json.RawMessage `json:"QMP"`
	ID       json.RawMessage `json:"id"`
	Return   json.RawMessage `json:"return"`
	Error    *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
	Event string          `json:"event"`
	Data  json.RawMessage `json:"data"`
}

// kinds of message.
type messageKind int

const (
	greeting messageKind = iota
	reply
	event
)

var errQMP = errors.New("malformed QMP message")

// parseMessage reads one line. id is that of a reply, 0 for one without: QEMU
// leaves it out only when it could not read the command.
func parseMessage(line []byte) (m message, kind messageKind, id uint64, err error) {
	if err := json.Unmarshal(line, &m); err != nil {
		return m, 0, 0, fmt.Errorf("%w: %w", errQMP, err)
	}
	switch {
	case m.Greeting != nil:
		return m, greeting, 0, nil
	case m.Event != "":
		return m, event, 0, nil
	case m.Return != nil || m.Error != nil:
		if m.ID != nil {
			if err := json.Unmarshal(m.ID, &id); err != nil {
				return m, 0, 0, fmt.Errorf("%w: id %.40q is not ours", errQMP, m.ID)
			}
		}
		return m, reply, id, nil
	}
	return m, 0, 0, fmt.Errorf("%w: neither greeting, reply nor event", errQMP)
}

// qmp is a connection to QEMU's control socket. Replies and events come in any
// order: replies are matched by id.
type qmp struct {
	conn   io.ReadWriteCloser
	events chan Event
	done   chan struct{}

	mu      sync.Mutex
	next    uint64
	waiting map[uint64]chan message
	err     error
}

func dialQMP(ctx context.Context, socket string) (*qmp, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}
	return newQMP(ctx, conn)
}

// newQMP does the greeting. It owns conn, also on failure.
func newQMP(ctx context.Context, conn io.ReadWriteCloser) (*qmp, error) {
	q := &qmp{conn: conn, events: make(chan Event, maxEvents), done: make(chan struct{}), waiting: map[uint64]chan message{}}
	greeted := make(chan struct{})
	go q.read(greeted)
	select {
	case <-greeted:
	case <-q.done:
		return nil, fmt.Errorf("qmp greeting: %w", q.failure())
	case <-ctx.Done():
		q.Close()
		return nil, fmt.Errorf("qmp greeting: %w", context.Cause(ctx))
	}
	if _, err := q.Do(ctx, "qmp_capabilities", nil); err != nil {
		q.Close()
		return nil, err
	}
	return q, nil
}

// Close ends the connection and waits for its reader.
func (q *qmp) Close() error {
	err := q.conn.Close()
	<-q.done
	return err
}

func (q *qmp) failure() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.err
}

func (q *qmp) read(greeted chan<- struct{}) {
	lines := bufio.NewScanner(q.conn)
	lines.Buffer(make([]byte, 0, 4096), maxQMPLine)
	err := q.readLines(lines, greeted)
	q.mu.Lock()
	q.err = err
	q.mu.Unlock()
	q.conn.Close()
	close(q.done)
	close(q.events)
}

func (q *qmp) readLines(lines *bufio.Scanner, greeted chan<- struct{}) error {
	for lines.Scan() {
		m, kind, id, err := parseMessage(lines.Bytes())
		if err != nil {
			return err
		}
		switch kind {
		case greeting:
			if greeted == nil {
				return fmt.Errorf("%w: a second greeting", errQMP)
			}
			close(greeted)
			greeted = nil
		case event:
			q.deliver(Event{m.Event, m.Data})
		case reply:
			q.mu.Lock()
			ch := q.waiting[id]
			delete(q.waiting, id)
			q.mu.Unlock()
			// A reply that nobody waits for any more is no fault.
			if ch != nil {
				ch <- m
			}
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return io.EOF
}

// deliver never blocks: a reader of events that is gone must not stop replies.
func (q *qmp) deliver(e Event) {
	for {
		select {
		case q.events <- e:
			return
		default:
		}
		select {
		case <-q.events:
		default:
		}
	}
}

// Do runs a command and gives its return value. The context bounds the wait;
// the command itself may still take place after it.
func (q *qmp) Do(ctx context.Context, command string, arguments any) (json.RawMessage, error) {
	ch := make(chan message, 1)
	q.mu.Lock()
	q.next++
	id := q.next
	line, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        uint64 `json:"id"`
	}{command, arguments, id})
	if err == nil {
		q.waiting[id] = ch
		_, err = q.conn.Write(append(line, '\n'))
	}
	q.mu.Unlock()
	defer func() {
		q.mu.Lock()
		delete(q.waiting, id)
		q.mu.Unlock()
	}()
	if err != nil {
		return nil, fmt.Errorf("qmp %s: %w", command, err)
	}
	select {
	case m := <-ch:
		if m.Error != nil {
			return nil, fmt.Errorf("qmp %s: %s: %s", command, m.Error.Class, m.Error.Desc)
		}
		return m.Return, nil
	case <-q.done:
		return nil, fmt.Errorf("qmp %s: %w", command, q.failure())
	case <-ctx.Done():
		return nil, fmt.Errorf("qmp %s: %w", command, context.Cause(ctx))
	}
}
