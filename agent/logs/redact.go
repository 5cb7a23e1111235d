// Package logs collects what helps to understand a node from afar, takes the
// secrets out of it, and uploads it.
package logs

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"io"
	"net/url"
	"slices"

	"github.com/better-compute/bcd/agent/secret"
)

// Mark stands where a secret stood.
const Mark = "[redacted]"

const (
	// hold is how much is kept back at the end of what was seen: no match
	// needs more bytes than this to be told for one.
	hold = 16 << 10
	// chunk is how much is looked at in one go.
	chunk = 64 << 10
	// maxMatch bounds one match that goes on and on; the rest of it is
	// swallowed, see Writer.flush.
	maxMatch = 1 << 20
	// maxPEM bounds a private key block without an end.
	maxPEM = 64 << 10
	// piece is the length of the parts that a long live value is looked for in.
	piece = 4 << 10
	// maxForm bounds an encoded form of a value: hold must cover it.
	maxForm = hold / 2
	// minPiece is the shortest part worth looking for.
	minPiece = 6
)

var (
	pemBegin = []byte("-----BEGIN ")
	pemKey   = []byte("PRIVATE KEY-----")
	pemEnd   = []byte("-----END ")
)

// Redactor takes secrets out of text: join tokens, JWTs and JWEs, private
// keys, passwords in URLs, Authorization headers and the like, and every live
// value of Registry, whatever it looks like.
type Redactor struct {
	// Registry may be nil.
	Registry *secret.Registry
}

// Redact gives data without secrets, and how many there were. data itself is
// returned when there were none.
func (r *Redactor) Redact(data []byte) ([]byte, int) {
	spans := r.spans(data)
	if len(spans) == 0 {
		return data, 0
	}
	out := make([]byte, 0, len(data))
	at := 0
	for _, s := range spans {
		out = append(append(out, data[at:s.from]...), Mark...)
		at = s.to
	}
	return append(out, data[at:]...), len(spans)
}

// span is a secret in a text. start is where what tells it begins, at or
// before from. goesOn says what more of it would look like, when it reaches
// the text's end.
type span struct {
	start, from, to int
	goesOn          func(byte) bool
}

// spans gives the secrets in data, in order, without overlap.
func (r *Redactor) spans(data []byte) []span {
	found := formSpans(data)
	found = append(found, pemSpans(data)...)
	if r.Registry != nil {
		r.Registry.View(func(needles [][]byte) {
			for _, needle := range needles {
				eachForm(needle, func(form []byte) { found = appendAll(found, data, form) })
			}
		})
	}
	slices.SortFunc(found, func(a, b span) int { return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(b.to, a.to)) })
	var out []span
	for _, s := range found {
		if last := len(out) - 1; last >= 0 && s.from < out[last].to {
			out[last].start = min(out[last].start, s.start)
			if s.to >= out[last].to {
				out[last].to = s.to
				if s.goesOn != nil {
					out[last].goesOn = s.goesOn
				}
			}
			continue
		}
		out = append(out, s)
	}
	return out
}

func appendAll(found []span, data, form []byte) []span {
	for at := 0; ; {
		i := bytes.Index(data[at:], form)
		if i < 0 {
			return found
		}
		found = append(found, span{start: at + i, from: at + i, to: at + i + len(form)})
		at += i + len(form)
	}
}

// eachForm calls f with the ways in which a value may stand in a text: as it
// is, in pieces when it is long, and, when it is short, in base64, within JSON
// and percent-encoded. Forms made here are zeroed afterwards.
func eachForm(value []byte, f func([]byte)) {
	if len(value) > piece {
		for part := range slices.Chunk(value, piece) {
			if len(part) >= minPiece {
				f(part)
			}
		}
		return
	}
	f(value)
	// The last characters of base64 depend on what follows; without them the
	// form holds for both alphabets' padding rules.
	for _, encoding := range []*base64.Encoding{base64.StdEncoding, base64.URLEncoding} {
		whole := encoding.AppendEncode(nil, value)
		if form := whole[:len(value)*8/6]; len(form) >= minPiece {
			f(form)
		}
		clear(whole)
	}
	if quoted, err := json.Marshal(string(value)); err == nil {
		if form := quoted[1 : len(quoted)-1]; !bytes.Equal(form, value) && len(form) <= maxForm {
			f(form)
		}
		clear(quoted)
	}
	if escaped := []byte(url.QueryEscape(string(value))); !bytes.Equal(escaped, value) {
		if len(escaped) <= maxForm {
			f(escaped)
		}
		clear(escaped)
	}
}

// pemSpans finds private keys (RFC 7468). One without an end reaches to the
// end of data, or maxPEM.
func pemSpans(data []byte) (found []span) {
	for at := 0; ; {
		i := bytes.Index(data[at:], pemBegin)
		if i < 0 {
			return found
		}
		from := at + i
		at = from + len(pemBegin)
		label := data[at:min(at+64, len(data))]
		j := bytes.Index(label, pemKey)
		if j < 0 || bytes.IndexByte(label[:j], '\n') >= 0 {
			continue
		}
		end := at + j + len(pemKey)
		to := min(len(data), from+maxPEM)
		if k := bytes.Index(data[end:to], pemEnd); k >= 0 {
			to = end + k + len(pemEnd)
			if line := bytes.Index(data[to:min(len(data), to+64)], []byte("-----")); line >= 0 {
				to += line + len("-----")
			}
		}
		found = append(found, span{start: from, from: from, to: to})
		at = to
	}
}

// Writer redacts a stream, also where a secret lies across two writes. Close
// must be called: it writes what was held back.
type Writer struct {
	r   *Redactor
	to  io.Writer
	buf []byte
	// swallow is set while a secret that is longer than maxMatch goes on.
	swallow func(byte) bool
	count   int
	// next is the length at which the buffer is looked at again.
	next int
	err  error
}

// NewWriter makes a Writer that writes to w.
func (r *Redactor) NewWriter(w io.Writer) *Writer { return &Writer{r: r, to: w} }

// Count is how many secrets were taken out so far.
func (w *Writer) Count() int { return w.count }

// Write takes p in.
func (w *Writer) Write(p []byte) (int, error) {
	for n := 0; n < len(p) && w.err == nil; {
		part := p[n:min(n+chunk, len(p))]
		n += len(part)
		w.buf = append(w.buf, part...)
		// While a long secret is held back, it is looked at again only once
		// there is a good deal more of it.
		if len(w.buf) >= max(chunk+hold, w.next) {
			w.flush(false)
			w.next = len(w.buf) + chunk
		}
	}
	if w.err != nil {
		return 0, w.err
	}
	return len(p), nil
}

// Close writes what was held back. It does not close the underlying writer.
func (w *Writer) Close() error {
	if w.err == nil {
		w.flush(true)
	}
	return w.err
}

// flush writes what can be judged now: everything but the last hold bytes, and
// but a secret that lies across that border or may go on behind the end.
func (w *Writer) flush(final bool) {
	if w.swallow != nil {
		n := 0
		for n < len(w.buf) && w.swallow(w.buf[n]) {
			n++
		}
		if n < len(w.buf) {
			w.swallow = nil
		}
		w.buf = append(w.buf[:0], w.buf[n:]...)
	}
	spans := w.r.spans(w.buf)
	cut := len(w.buf)
	if !final {
		cut = border(spans, len(w.buf))
		if cut == 0 && len(w.buf) >= maxMatch {
			// It goes on and on. What follows of it is swallowed.
			cut = len(w.buf)
			if last := len(spans) - 1; last >= 0 && spans[last].to == cut {
				w.swallow = spans[last].goesOn
			}
		}
	}
	out := make([]byte, 0, cut)
	at := 0
	for _, s := range spans {
		if s.to > cut {
			break
		}
		out = append(append(out, w.buf[at:s.from]...), Mark...)
		w.count++
		at = s.to
	}
	out = append(out, w.buf[at:cut]...)
	rest := copy(w.buf, w.buf[cut:])
	clear(w.buf[rest:])
	w.buf = w.buf[:rest]
	if len(out) > 0 {
		_, w.err = w.to.Write(out)
	}
}

// border gives the last place, at most hold before the end, that lies within
// no secret nor within what tells one.
func border(spans []span, end int) int {
	cut := max(end-hold, 0)
	for moved := true; moved; {
		moved = false
		for _, s := range spans {
			if s.start < cut && (s.to > cut || s.to == end) {
				cut, moved = s.start, true
			}
		}
	}
	return cut
}
