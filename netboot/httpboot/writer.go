package httpboot

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

const (
	// MaxBody is the most that a mount can read of a request, in bytes: a
	// BootConfigAsk has a key and the machine's identifiers.
	MaxBody = 16 << 10
	// MaxMountAnswer is the most that a mount can answer, in bytes: a boot
	// configuration with the roots it names.
	MaxMountAnswer = 256 << 10
)

// writer counts what a file's answer sends, and lets each chunk have its own
// time, so that a large file may take long and a stalled client may not.
type writer struct {
	http.ResponseWriter
	control *http.ResponseController
	status  int
	sent    int64
	err     error // the first of a write
}

func (w *writer) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

// length is what the answer's header says.
func (w *writer) length() int64 {
	n, _ := strconv.ParseInt(w.Header().Get("Content-Length"), 10, 64)
	return n
}

func (w *writer) extend() {
	// A connection without deadlines has none to be extended.
	_ = w.control.SetWriteDeadline(time.Now().Add(sendWait))
}

func (w *writer) Write(b []byte) (int, error) {
	w.extend()
	n, err := w.ResponseWriter.Write(b)
	w.sent += int64(n)
	w.err = errors.Join(w.err, err)
	return n, err
}

// ReadFrom hands the file on to the connection, which sends it without copying
// it when it can.
func (w *writer) ReadFrom(from io.Reader) (int64, error) {
	left := int64(1) << 62
	if limited, ok := from.(*io.LimitedReader); ok {
		from, left = limited.R, limited.N
		defer func() { limited.N = left }()
	}
	var all int64
	for left > 0 {
		w.extend()
		// http's own writer, or a bare one of a test.
		n, err := io.Copy(w.ResponseWriter, &io.LimitedReader{R: from, N: min(left, sendChunk)})
		all, left, w.sent = all+n, left-n, w.sent+n
		if err != nil {
			w.err = err
			return all, err
		}
		if n == 0 {
			break
		}
	}
	return all, nil
}

// mount finds the handler of a name.
func (h *Handler) mount(name string) (http.Handler, bool) {
	if mount, ok := h.config.Mounts[name]; ok {
		return mount, true
	}
	mount, ok := h.config.Mounts[strings.ToLower(name)]
	return mount, ok
}

func (h *Handler) serveMount(w http.ResponseWriter, r *http.Request, mount http.Handler, event Event) {
	h.observe(event, EventGet, r.Method)
	r.Body = http.MaxBytesReader(w, r.Body, MaxBody)
	answer := &held{header: make(http.Header)}
	mount.ServeHTTP(answer, r)
	if answer.status == 0 {
		answer.status = http.StatusOK
	}
	switch {
	case answer.over:
		h.refuse(w, event, http.StatusInternalServerError, "the answer is too long", fmt.Errorf("more than %d bytes", MaxMountAnswer))
		return
	case answer.status >= 300 && answer.status < 400 && answer.status != http.StatusNotModified:
		h.refuse(w, event, http.StatusInternalServerError, "a redirect is not for firmware", nil)
		return
	}
	for name, values := range answer.header {
		if len(values) > 0 && strings.Join(values, "") != "" {
			w.Header()[name] = values
		}
	}
	if w.Header().Get("Content-Type") == "" {
		w.Header().Set("Content-Type", "application/octet-stream")
	}
	if answer.status != http.StatusNoContent && answer.status != http.StatusNotModified {
		w.Header().Set("Content-Length", strconv.Itoa(answer.body.Len()))
	}
	w.WriteHeader(answer.status)
	sent := 0
	var err error
	if r.Method != http.MethodHead {
		sent, err = w.Write(answer.body.Bytes())
	}
	event.Status, event.Bytes = answer.status, int64(sent)
	switch {
	case answer.status >= 400:
		h.observe(event, EventRefused, r.Method)
	case err != nil:
		h.observe(event, EventAborted, err.Error())
	default:
		h.observe(event, EventDone, r.Method)
	}
}

// held keeps a mount's answer until its length is known.
type held struct {
	header http.Header
	status int
	body   bytes.Buffer
	over   bool
}

func (a *held) Header() http.Header { return a.header }

func (a *held) WriteHeader(status int) {
	// 1xx are not the answer (RFC 9110 section 15.2).
	if a.status == 0 && status >= 200 {
		a.status = status
	}
}

func (a *held) Write(b []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	if a.body.Len()+len(b) > MaxMountAnswer {
		a.over = true
		return 0, fmt.Errorf("an answer has at most %d bytes", MaxMountAnswer)
	}
	return a.body.Write(b)
}
