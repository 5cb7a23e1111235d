package logs

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"time"
)

// NewHandler makes the daemon's log handler: text or JSON lines to every
// writer, each record without secrets before any of them sees it.
func NewHandler(format string, level slog.Leveler, r *Redactor, writers ...io.Writer) slog.Handler {
	w := &recordWriter{r: r, to: writers}
	options := &slog.HandlerOptions{Level: level}
	if format == "json" {
		return slog.NewJSONHandler(w, options)
	}
	return slog.NewTextHandler(w, options)
}

// recordWriter relies on slog's handlers writing one record a call.
type recordWriter struct {
	r  *Redactor
	to []io.Writer
}

func (w *recordWriter) Write(record []byte) (int, error) {
	clean, _ := w.r.Redact(record)
	var first error
	for _, to := range w.to {
		// One that fails, a closed console, must not silence the others.
		if _, err := to.Write(clean); err != nil && first == nil {
			first = err
		}
	}
	return len(record), first
}

// Ring keeps the newest records in memory, at most a number of bytes. It is
// safe for concurrent use.
type Ring struct {
	mu      sync.Mutex
	max     int
	size    int
	records [][]byte
	dropped int
}

// NewRing makes a ring of max bytes.
func NewRing(max int) *Ring { return &Ring{max: max} }

// Write takes one record.
func (r *Ring) Write(record []byte) (int, error) {
	kept := record
	if len(kept) > r.max {
		kept = kept[:r.max]
	}
	kept = append([]byte(nil), kept...)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.records = append(r.records, kept)
	r.size += len(kept)
	for r.size > r.max {
		r.size -= len(r.records[0])
		r.records[0] = nil
		r.records = r.records[1:]
		r.dropped++
	}
	return len(record), nil
}

// Snapshot gives the records as one text, and how many older ones are gone.
func (r *Ring) Snapshot() (text []byte, dropped int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	text = make([]byte, 0, r.size)
	for _, record := range r.records {
		text = append(text, record...)
	}
	return text, r.dropped
}

// Source makes the ring a file of the bundle.
func (r *Ring) Source(name string) Source {
	return Source{Name: name, Write: func(_ context.Context, w io.Writer, _ time.Time) error {
		text, _ := r.Snapshot()
		_, err := w.Write(text)
		return err
	}}
}
