// Package secret fetches secret values by reference and keeps them where they
// do the least harm.
//
// A command carries a reference. The node asks for the value with a request
// that its key signs, naming the reference and one fresh P-256 key; the answer
// is a JWE to that key, opened for that request only. The value lives in
// memory of its own that is locked, left out of core files and zeroed after
// use; it never reaches disk, a log, an event or a process argument.
package secret

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// MaxValue bounds a value: user data of 1 MiB, and some room.
const MaxValue = 1<<20 + 64<<10

// Registry knows the values that are alive, so that a redactor can find them
// by what they are. The zero value is ready. It is safe for concurrent use.
type Registry struct {
	mu     sync.RWMutex
	values map[*Value]struct{}
	// generation changes with every value that comes or goes.
	generation uint64
}

// Value is one secret. It prints as [redacted] however it is printed.
type Value struct {
	registry *Registry
	mapping  []byte // whole pages
	data     []byte // the value, in mapping
	locked   bool
}

// New takes plaintext into locked memory and zeroes plaintext.
func (r *Registry) New(plaintext []byte) (*Value, error) {
	defer clear(plaintext)
	if len(plaintext) > MaxValue {
		return nil, fmt.Errorf("secret value of %d bytes; at most %d are allowed", len(plaintext), MaxValue)
	}
	page := unix.Getpagesize()
	size := (max(len(plaintext), 1) + page - 1) / page * page
	mapping, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("memory for a secret value: %w", err)
	}
	// A core file must not hold it: that one is not negotiable.
	if err := unix.Madvise(mapping, unix.MADV_DONTDUMP); err != nil {
		_ = unix.Munmap(mapping)
		return nil, fmt.Errorf("memory for a secret value: keep it out of core files: %w", err)
	}
	v := &Value{registry: r, mapping: mapping, data: mapping[:len(plaintext):len(plaintext)]}
	// Locking may be refused (RLIMIT_MEMLOCK); a machine without swap, as the
	// ramdisk is, loses nothing by it.
	v.locked = unix.Mlock(mapping) == nil
	copy(v.data, plaintext)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.values == nil {
		r.values = map[*Value]struct{}{}
	}
	r.values[v] = struct{}{}
	r.generation++
	return v, nil
}

// Bytes gives the value itself, valid until Destroy; nil afterwards. Do not
// keep, change or copy it more than the use asks for.
func (v *Value) Bytes() []byte {
	v.registry.mu.RLock()
	defer v.registry.mu.RUnlock()
	return v.data
}

// Locked says whether the memory is kept out of swap.
func (v *Value) Locked() bool { return v.locked }

// Destroy zeroes the value and gives its memory back. Using slices that Bytes
// gave after it is a fault, as it should be. A second Destroy, or one of nil,
// does nothing.
func (v *Value) Destroy() {
	if v == nil {
		return
	}
	v.registry.mu.Lock()
	defer v.registry.mu.Unlock()
	if v.mapping == nil {
		return
	}
	clear(v.mapping)
	_ = unix.Munmap(v.mapping)
	v.mapping, v.data = nil, nil
	delete(v.registry.values, v)
	v.registry.generation++
}

const (
	// minNeedle: a shorter value would redact half the alphabet.
	minNeedle = 6
	// minLine: lines of a longer text are looked for too, when they are long
	// enough to be telling.
	minLine = 16
	// maxLines bounds the lines of one value.
	maxLines = 256
)

// View calls f with what a redactor should look for: every live value of 6
// bytes or more and, for those of several lines, the lines of 16 bytes or
// more. The slices are valid during the call only.
func (r *Registry) View(f func(needles [][]byte)) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	var needles [][]byte
	for v := range r.values {
		value := bytes.TrimSpace(v.data)
		if len(value) >= minNeedle {
			needles = append(needles, value)
		}
		if bytes.IndexByte(value, '\n') < 0 || !utf8.Valid(value) {
			continue
		}
		lines := 0
		for line := range bytes.SplitSeq(value, []byte{'\n'}) {
			if line = bytes.TrimSpace(line); len(line) >= minLine && lines < maxLines {
				needles = append(needles, line)
				lines++
			}
		}
	}
	f(needles)
}

// Generation changes whenever what View shows may have changed.
func (r *Registry) Generation() uint64 {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.generation
}

const redacted = "[redacted]"

func (v *Value) String() string             { return redacted }
func (v *Value) GoString() string           { return redacted }
func (v *Value) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, redacted) }
func (v *Value) LogValue() slog.Value       { return slog.StringValue(redacted) }

// MarshalText makes JSON and the like hold [redacted].
func (v *Value) MarshalText() ([]byte, error) { return []byte(redacted), nil }
