package bmc

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/better-compute/bcd/agent/dispatch"
	"github.com/better-compute/bcd/agent/secret"
)

const redacted = "[redacted]"

// minHidden: a shorter value would take letters out of every word. Such a
// password protects nothing anyway.
const minHidden = 3

// hidden are the secret texts of one run.
type hidden struct {
	needles [][]byte
	values  []*secret.Value
}

// keep registers a secret text, in the forms that it may come back in.
func (h *hidden) keep(text []byte) {
	if len(text) < minHidden {
		return
	}
	h.needles = append(h.needles, bytes.Clone(text))
	if escaped, err := json.Marshal(string(text)); err == nil && len(escaped) > 2 && !bytes.Equal(escaped[1:len(escaped)-1], text) {
		h.needles = append(h.needles, escaped[1:len(escaped)-1])
	}
	h.needles = append(h.needles, base64.StdEncoding.AppendEncode(nil, text))
}

// own makes h destroy v at the end of the run.
func (h *hidden) own(v *secret.Value) { h.values = append(h.values, v) }

func (h *hidden) destroy() {
	for _, n := range h.needles {
		clear(n)
	}
	for _, v := range h.values {
		v.Destroy()
	}
	h.needles, h.values = nil, nil
}

func (h *hidden) bytes(b []byte) []byte {
	for _, n := range h.needles {
		b = bytes.ReplaceAll(b, n, []byte(redacted))
	}
	return b
}

func (h *hidden) text(s string) string {
	for _, n := range h.needles {
		if i := strings.Index(s, string(n)); i >= 0 {
			s = strings.ReplaceAll(s, string(n), redacted)
		}
	}
	return s
}

// message cleans every text of a result, in place.
func (h *hidden) message(m proto.Message) {
	if m == nil || len(h.needles) == 0 {
		return
	}
	h.walk(m.ProtoReflect())
}

func (h *hidden) walk(m protoreflect.Message) {
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if fd.IsList() {
			for list, i := v.List(), 0; i < list.Len(); i++ {
				if fd.Kind() == protoreflect.MessageKind {
					h.walk(list.Get(i).Message())
				} else if clean, ok := h.scalar(fd, list.Get(i)); ok {
					list.Set(i, clean)
				}
			}
			return true
		}
		if fd.Kind() == protoreflect.MessageKind {
			h.walk(v.Message())
		} else if clean, ok := h.scalar(fd, v); ok {
			m.Set(fd, clean)
		}
		return true
	})
}

func (h *hidden) scalar(fd protoreflect.FieldDescriptor, v protoreflect.Value) (protoreflect.Value, bool) {
	switch fd.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(h.text(v.String())), true
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes(h.bytes(bytes.Clone(v.Bytes()))), true
	}
	return v, false
}

// failure cleans an error. What it wraps is kept only where it is no more than
// a reason of this program: a library's text may hold anything.
func (h *hidden) failure(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, dispatch.ErrNotDue) {
		return err
	}
	clean := &dispatch.Failure{Code: "FAILED", Message: h.text(err.Error())}
	var f *dispatch.Failure
	if errors.As(err, &f) {
		h.message(f.Body)
		clean.Code, clean.Indeterminate, clean.Body = f.Code, f.Indeterminate, f.Body
	}
	for _, reason := range []error{context.Canceled, context.DeadlineExceeded} {
		if errors.Is(err, reason) {
			clean.Err = reason
		}
	}
	if clean.Code == "FAILED" && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		clean.Code = "TIMEOUT"
	}
	return clean
}
