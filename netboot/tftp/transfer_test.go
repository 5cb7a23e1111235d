package tftp

import (
	"testing"
	"time"
)

// memory is a File.
type memory string

func (m memory) Size() int64  { return int64(len(m)) }
func (m memory) Close() error { return nil }
func (m memory) ReadAt(b []byte, offset int64) (int, error) {
	return copy(b, m[min(offset, int64(len(m))):]), nil
}

func ackPacket(block int) []byte { return []byte{0, opAck, byte(block >> 8), byte(block)} }

// drill tells a transfer what happens, and compares what it does.
type drill struct {
	t   *testing.T
	x   *transfer
	now time.Time
}

func (d *drill) is(what string, got, want step) {
	d.t.Helper()
	if got != want {
		d.t.Fatalf("%s: %+v, want %+v", what, got, want)
	}
}

func (d *drill) ack(block int, want step) {
	d.t.Helper()
	d.now = d.now.Add(time.Millisecond)
	d.is("ack", d.x.received(d.now, ackPacket(block)), want)
}

func (d *drill) expire(want step) {
	d.t.Helper()
	d.now = d.x.deadline()
	d.is("deadline", d.x.expired(d.now), want)
}

func begin(t *testing.T, size int64, terms terms, want step) *drill {
	t.Helper()
	d := &drill{t: t, x: newTransfer(size, terms), now: time.Unix(1e9, 0)}
	d.is("start", d.x.start(d.now), want)
	return d
}

func TestLockstep(t *testing.T) {
	d := begin(t, 1024, terms{block: 512, window: 1}, step{from: 1, to: 1})
	d.ack(1, step{from: 2, to: 2})
	d.ack(2, step{from: 3, to: 3}) // the last one, empty
	d.ack(3, step{done: true})
	d.ack(3, step{})
}

func TestEmptyFile(t *testing.T) {
	d := begin(t, 0, terms{block: 512, window: 1}, step{from: 1, to: 1})
	d.ack(1, step{done: true})
}

func TestNoDataBeforeAck0(t *testing.T) {
	d := begin(t, 100, terms{block: 512, window: 1, oack: []byte{0, opOACK}}, step{oack: true})
	d.ack(1, step{})
	d.expire(step{oack: true})
	d.ack(0, step{from: 1, to: 1})
	d.ack(0, step{})
	d.ack(1, step{done: true})
}

// TestSorcerersApprentice has each acknowledgement come twice, after one block
// was sent twice: nothing else may be.
func TestSorcerersApprentice(t *testing.T) {
	d := begin(t, 512*4, terms{block: 512, window: 1}, step{from: 1, to: 1})
	d.expire(step{from: 1, to: 1})
	for block := 1; block < 5; block++ {
		d.ack(block, step{from: int64(block + 1), to: int64(block + 1)})
		d.ack(block, step{})
	}
	d.ack(5, step{done: true})
	if d.x.resends != 1 {
		t.Errorf("%d blocks were sent again", d.x.resends)
	}
}

func TestWindow(t *testing.T) {
	d := begin(t, 512*9+1, terms{block: 512, window: 4}, step{from: 1, to: 4})
	d.ack(4, step{from: 5, to: 8})
	d.ack(4, step{})                // a duplicate
	d.ack(9, step{})                // of a block that was not sent
	d.ack(6, step{from: 7, to: 10}) // 7 was lost (RFC 7440 section 4)
	d.ack(6, step{})
	d.expire(step{from: 7, to: 10})
	d.ack(10, step{done: true})
}

func TestWrap(t *testing.T) {
	for _, window := range []int{1, 4, 64} {
		const blocks = 140_000 // two wraps
		d := begin(t, 512*blocks-1, terms{block: 512, window: window}, step{from: 1, to: int64(window)})
		for at := int64(window); at < blocks; at = min(at+int64(window), blocks) {
			d.ack(int(uint16(at)), step{from: at + 1, to: min(at+int64(window), blocks)})
			d.ack(int(uint16(at)), step{})
		}
		d.ack(blocks&0xffff, step{done: true})
	}
}

func TestErrorEndsQuietly(t *testing.T) {
	for _, oack := range [][]byte{nil, {0, opOACK}} {
		d := &drill{t: t, x: newTransfer(5000, terms{block: 512, window: 1, oack: oack}), now: time.Unix(1e9, 0)}
		d.x.start(d.now)
		s := d.x.received(d.now, []byte("\x00\x05\x00\x08User aborted\x00"))
		if !s.quiet || s.done || s.failed == "" {
			t.Errorf("%+v", s)
		}
		if s := d.x.expired(d.now); s != (step{}) {
			t.Errorf("after its end: %+v", s)
		}
	}
}

func TestBackOff(t *testing.T) {
	d := begin(t, 512*9, terms{block: 512, window: 1}, step{from: 1, to: 1})
	d.ack(1, step{from: 2, to: 2})
	if d.x.wait != minWait {
		t.Errorf("after a round trip of a millisecond: wait %v", d.x.wait)
	}
	last, all := time.Duration(0), time.Duration(0)
	for range maxTries - 1 {
		if d.x.wait < last || d.x.wait > maxWait {
			t.Errorf("wait %v after %v", d.x.wait, last)
		}
		last, all = d.x.wait, all+d.x.wait
		d.expire(step{from: 2, to: 2})
	}
	d.expire(step{failed: "the client fell silent after block 1 of 10"})
	if all < 20*time.Second || all > time.Minute {
		t.Errorf("gave up after %v", all)
	}
}

// TestForgedAddress: who was never heard gets few packets.
func TestForgedAddress(t *testing.T) {
	for _, oack := range [][]byte{nil, {0, opOACK}} {
		x := newTransfer(5000, terms{block: 512, window: 1, oack: oack})
		sent := 1
		x.start(time.Unix(1e9, 0))
		for x.expired(x.deadline()).failed == "" {
			sent++
		}
		if sent != maxUnheard {
			t.Errorf("%d packets", sent)
		}
	}
}

func TestTimeoutOption(t *testing.T) {
	d := begin(t, 5000, terms{block: 512, window: 1, timeout: 7, oack: []byte{0, opOACK}}, step{oack: true})
	if d.x.wait != 7*time.Second {
		t.Errorf("wait %v", d.x.wait)
	}
	d.ack(0, step{from: 1, to: 1})
	d.ack(1, step{from: 2, to: 2})
	if d.x.wait != 7*time.Second {
		t.Errorf("wait %v", d.x.wait)
	}
}
