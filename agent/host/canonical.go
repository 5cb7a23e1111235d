package host

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxSafeInt is the largest integer that every JSON reader keeps exactly
// (RFC 7493 section 2.2).
const maxSafeInt = 1<<53 - 1

// Canonical encodes a value in canonical JSON: the JSON Canonicalization
// Scheme (RFC 8785) restricted so that nothing is left to interpretation.
//
//   - Objects have their keys sorted by bytes; keys are ASCII.
//   - There is no insignificant space.
//   - Numbers are integers within ±(2^53−1), without exponent or sign of
//     zero. A floating-point number is an error.
//   - Strings are UTF-8 with the shortest escapes of RFC 8785 section
//     3.2.2.2: only ", \ and control characters are escaped.
//
// Two programs that agree on the value agree on the bytes, and so on their
// hash, whatever language they are written in.
func Canonical(v any) ([]byte, error) {
	raw, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("canonical json: %w", err)
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	var tree any
	if err := dec.Decode(&tree); err != nil {
		return nil, fmt.Errorf("canonical json: %w", err)
	}
	out, err := appendCanonical(nil, tree)
	if err != nil {
		return nil, fmt.Errorf("canonical json: %w", err)
	}
	return out, nil
}

func appendCanonical(out []byte, v any) ([]byte, error) {
	switch v := v.(type) {
	case nil:
		return append(out, "null"...), nil
	case bool:
		return strconv.AppendBool(out, v), nil
	case json.Number:
		n, err := strconv.ParseInt(v.String(), 10, 64)
		if err != nil || n > maxSafeInt || n < -maxSafeInt {
			return nil, fmt.Errorf("number %s is not an integer within ±(2^53-1)", v)
		}
		return strconv.AppendInt(out, n, 10), nil
	case string:
		return appendCanonicalString(out, v), nil
	case []any:
		out = append(out, '[')
		for i, e := range v {
			if i > 0 {
				out = append(out, ',')
			}
			var err error
			if out, err = appendCanonical(out, e); err != nil {
				return nil, err
			}
		}
		return append(out, ']'), nil
	case map[string]any:
		keys := make([]string, 0, len(v))
		for k := range v {
			if strings.ContainsFunc(k, func(r rune) bool { return r >= utf8.RuneSelf }) {
				return nil, fmt.Errorf("key %q is not ASCII", k)
			}
			keys = append(keys, k)
		}
		slices.Sort(keys)
		out = append(out, '{')
		for i, k := range keys {
			if i > 0 {
				out = append(out, ',')
			}
			out = append(appendCanonicalString(out, k), ':')
			var err error
			if out, err = appendCanonical(out, v[k]); err != nil {
				return nil, err
			}
		}
		return append(out, '}'), nil
	}
	return nil, errors.New("value of an unknown kind")
}

func appendCanonicalString(out []byte, s string) []byte {
	out = append(out, '"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			out = append(out, '\\', byte(r))
		case r == '\b':
			out = append(out, `\b`...)
		case r == '\t':
			out = append(out, `\t`...)
		case r == '\n':
			out = append(out, `\n`...)
		case r == '\f':
			out = append(out, `\f`...)
		case r == '\r':
			out = append(out, `\r`...)
		case r < 0x20:
			out = fmt.Appendf(out, `\u%04x`, r)
		default:
			out = utf8.AppendRune(out, r)
		}
	}
	return append(out, '"')
}
