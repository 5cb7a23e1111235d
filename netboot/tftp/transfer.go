package tftp

import (
	"encoding/binary"
	"fmt"
	"time"
)

const (
	// firstWait is how long an answer may take before a round trip was measured
	// (RFC 1350 leaves it open). Firmware itself waits for a second or more.
	firstWait = 500 * time.Millisecond
	// minWait is well above what firmware needs to put a window away, so that a
	// slow machine is not sent everything twice.
	minWait = 100 * time.Millisecond
	// maxWait ends the doubling: a machine that comes back is served soon.
	maxWait = 5 * time.Second
	// maxTries are waits in a row without progress, some 25 s in all, after
	// which the client is gone. With one packet in five lost each way, this
	// happens to one block in 27 000.
	maxTries = 10
	// maxUnheard is the same before the client was heard at all: its address may
	// be forged, and whoever has it then gets few packets from us.
	maxUnheard = 6
)

// transfer is one file on its way to one client. It decides and does nothing:
// it is told what came and when, and answers with what to send. Blocks are
// counted from 1 without wrapping; only the wire has 16 bits.
type transfer struct {
	terms
	blocks int64 // the last one is shorter than the others, and may be empty

	agreed bool  // the OACK was acknowledged, or there was none
	acked  int64 // all up to here have arrived
	sent   int64 // the highest that was ever sent

	sentAt   time.Time // of the last step that sent
	clean    bool      // since then nothing was sent twice (Karn's rule)
	round    time.Duration
	wait     time.Duration
	tries    int
	resends  int
	finished bool
}

func newTransfer(size int64, t terms) *transfer {
	return &transfer{terms: t, blocks: size/int64(t.block) + 1, agreed: t.oack == nil}
}

// step is what is to be done: nothing, when it is zero.
type step struct {
	oack     bool
	from, to int64 // blocks to send, both included; none when from is 0
	done     bool
	failed   string // why the transfer ends without success
	quiet    bool   // the client ended it, which is no fault
}

// start gives what is sent first.
func (t *transfer) start(now time.Time) step {
	t.wait = firstWait
	if t.timeout > 0 {
		t.wait = time.Duration(t.timeout) * time.Second
	}
	return t.send(now, true)
}

// deadline is when [transfer.expired] is due.
func (t *transfer) deadline() time.Time { return t.sentAt.Add(t.wait) }

// send sends the window that begins behind what was acknowledged.
func (t *transfer) send(now time.Time, clean bool) step {
	t.sentAt, t.clean = now, clean
	if !t.agreed {
		return step{oack: true}
	}
	from, to := t.acked+1, min(t.acked+int64(t.window), t.blocks)
	if from <= t.sent {
		t.resends++
		t.clean = false
	}
	t.sent = max(t.sent, to)
	return step{from: from, to: to}
}

// received handles a packet of the client.
func (t *transfer) received(now time.Time, packet []byte) step {
	if len(packet) < 4 || t.finished {
		return step{}
	}
	switch binary.BigEndian.Uint16(packet) {
	case opError:
		t.finished = true
		code := binary.BigEndian.Uint16(packet[2:])
		text := packet[4:]
		for i, b := range text {
			if b == 0 {
				text = text[:i]
				break
			}
		}
		return step{failed: fmt.Sprintf("the client ended it: error %d %.100q", code, text), quiet: true}
	case opAck:
		return t.acknowledged(now, binary.BigEndian.Uint16(packet[2:]))
	}
	return step{}
}

func (t *transfer) acknowledged(now time.Time, block uint16) step {
	if !t.agreed {
		if block != 0 {
			return step{}
		}
		t.agreed = true
		t.measure(now)
		return t.send(now, true)
	}
	// What is between acked and sent is less than 65536 blocks, so that 16 bits
	// say which one is meant, over the wrap from 65535 to 0 as well.
	fresh := int64(block - uint16(t.acked))
	if fresh == 0 || t.acked+fresh > t.sent {
		// A duplicate never sends anything: else each packet that the network
		// doubles is doubled from there on (RFC 1123 section 4.2.3.1).
		return step{}
	}
	t.acked += fresh
	if t.acked == t.blocks {
		t.finished = true
		return step{done: true}
	}
	if t.acked == t.sent {
		t.measure(now)
	} else {
		t.clean, t.tries = false, 0
	}
	return t.send(now, true)
}

// measure takes the time since the last step as a round trip, and sets the wait
// by it (RFC 6298, simplified) unless the client named one.
func (t *transfer) measure(now time.Time) {
	t.tries = 0
	if t.timeout > 0 {
		t.wait = time.Duration(t.timeout) * time.Second
		return
	}
	if !t.clean {
		// It is not known which of the packets was answered: the longer wait
		// stays until a round trip was measured.
		return
	}
	if took := now.Sub(t.sentAt); t.round == 0 {
		t.round = took
	} else {
		t.round += (took - t.round) / 8
	}
	t.wait = min(max(minWait, 4*t.round), maxWait)
}

// expired handles a wait that ended without progress: the window is sent
// again, and the next wait is twice as long.
func (t *transfer) expired(now time.Time) step {
	if t.finished {
		return step{}
	}
	t.tries++
	if t.tries >= maxTries || t.tries >= maxUnheard && t.acked == 0 && (!t.agreed || t.oack == nil) {
		t.finished = true
		return step{failed: t.silence()}
	}
	t.wait = min(2*t.wait, max(maxWait, time.Duration(t.timeout)*time.Second))
	if !t.agreed {
		t.resends++
	}
	return t.send(now, false)
}

// silence says how far the client had come when it was heard no more.
func (t *transfer) silence() string {
	switch {
	case !t.agreed:
		return "the client did not answer the options; its answers may be filtered on the way"
	case t.acked == 0:
		return "the client did not acknowledge the first block; its answers may be filtered on the way"
	case t.sent == t.blocks:
		return "all was sent, but the last block was never acknowledged"
	}
	return fmt.Sprintf("the client fell silent after block %d of %d", t.acked, t.blocks)
}

// bytes is how much of a file of that size has arrived.
func (t *transfer) bytes(size int64) int64 { return min(t.acked*int64(t.block), size) }
