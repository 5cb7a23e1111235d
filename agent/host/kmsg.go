package host

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"syscall"
)

// KmsgRecord is one record of the kernel log (Documentation/ABI/testing/
// dev-kmsg).
type KmsgRecord struct {
	Priority int // syslog severity, 0 to 7
	Seq      uint64
	Micros   int64 // since boot
	Text     string
}

// KmsgEvent is a record, or a gap: the kernel overwrote records before they
// were read. After a gap the reader goes on with the oldest record there is,
// and whoever derives state from the log must look at the state itself.
type KmsgEvent struct {
	KmsgRecord
	Gap bool
}

// KmsgCursor is how far the log was read. Sequence numbers start again with
// each boot, so a cursor counts only within its own.
type KmsgCursor struct {
	BootID string `json:"boot_id"`
	Next   uint64 `json:"next"`
}

// maxKmsgRecord is more than the kernel gives at once (8 KiB with its
// dictionary).
const maxKmsgRecord = 16 << 10

// KmsgReader reads /dev/kmsg. Reopening the device replays the whole log;
// what an earlier reader of the same boot has had is not given again.
type KmsgReader struct {
	dev    io.Reader
	cursor KmsgCursor
	buf    []byte
	// Malformed counts the records that were skipped.
	Malformed int
}

// NewKmsgReader reads from an open /dev/kmsg, where one Read gives one
// record. A cursor of another boot counts for nothing.
func NewKmsgReader(dev io.Reader, bootID string, after KmsgCursor) *KmsgReader {
	if after.BootID != bootID {
		after = KmsgCursor{BootID: bootID}
	}
	return &KmsgReader{dev: dev, cursor: after, buf: make([]byte, maxKmsgRecord)}
}

// Cursor returns how far the log was read.
func (k *KmsgReader) Cursor() KmsgCursor { return k.cursor }

// Next returns the next event. It fails only when the device does; a record
// that cannot be parsed is skipped, and one that was overwritten is a gap.
func (k *KmsgReader) Next() (KmsgEvent, error) {
	for {
		n, err := k.dev.Read(k.buf)
		switch {
		case errors.Is(err, syscall.EPIPE):
			return KmsgEvent{Gap: true}, nil
		case errors.Is(err, syscall.EINVAL): // longer than the buffer; the kernel has gone past it
			k.Malformed++
			continue
		case errors.Is(err, syscall.EINTR):
			continue
		case err != nil:
			return KmsgEvent{}, fmt.Errorf("kernel log: %w", err)
		}
		record, err := ParseKmsg(k.buf[:n])
		if err != nil {
			k.Malformed++
			continue
		}
		if record.Seq < k.cursor.Next {
			continue
		}
		k.cursor.Next = record.Seq + 1
		return KmsgEvent{KmsgRecord: record}, nil
	}
}

// ParseKmsg parses one record: "priority,sequence,microseconds,flags[,…];text"
// and a newline, then lines of a dictionary, which are left out.
func ParseKmsg(b []byte) (KmsgRecord, error) {
	var r KmsgRecord
	head, rest, ok := bytes.Cut(b, []byte{';'})
	fields := strings.Split(string(head[:min(len(head), 256)]), ",")
	if !ok || len(fields) < 4 {
		return r, fmt.Errorf("kernel log record %q: no header", clean(string(b[:min(len(b), 64)])))
	}
	priority, err1 := strconv.ParseUint(fields[0], 10, 16)
	seq, err2 := strconv.ParseUint(fields[1], 10, 63)
	micros, err3 := strconv.ParseUint(fields[2], 10, 63)
	if err := errors.Join(err1, err2, err3); err != nil {
		return r, fmt.Errorf("kernel log record: %w", err)
	}
	text, _, _ := bytes.Cut(rest, []byte{'\n'})
	return KmsgRecord{Priority: int(priority & 7), Seq: seq, Micros: int64(micros), Text: unescapeKmsg(string(text))}, nil
}

// unescapeKmsg turns the kernel's \xNN back into bytes. What it escapes is
// not printable, so control characters stay escaped: a log line must not be
// able to draw on a terminal.
func unescapeKmsg(s string) string {
	if !strings.Contains(s, `\x`) {
		return s
	}
	var out strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) && s[i+1] == 'x' {
			if c, err := strconv.ParseUint(s[i+2:i+4], 16, 8); err == nil && (c == '\\' || c >= 0x80) {
				out.WriteByte(byte(c))
				i += 3
				continue
			}
		}
		out.WriteByte(s[i])
	}
	return strings.ToValidUTF8(out.String(), "?")
}
