package host

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// readBounded reads at most limit bytes and fails when there are more.
func readBounded(r io.Reader, name string, limit int64) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if int64(len(b)) > limit {
		return nil, fmt.Errorf("read %s: longer than %d bytes", name, limit)
	}
	return b, nil
}

// maxText bounds one text value of the inventory. SMBIOS strings and model
// names stay below 64 bytes; a longer one is firmware damage.
const maxText = 256

// clean makes firmware text fit to hash and to print: valid UTF-8, no control
// characters, no runs of space, at most maxText bytes. Vendors pad with space
// and NUL, differently from one firmware version to the next.
func clean(s string) string {
	s = strings.Map(func(r rune) rune {
		switch {
		case r == utf8.RuneError:
			return '?'
		case r == 0:
			return -1
		case unicode.IsSpace(r):
			return ' '
		case unicode.IsControl(r):
			return -1
		}
		return r
	}, s)
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > maxText {
		s = s[:maxText]
		for !utf8.ValidString(s) {
			s = s[:len(s)-1]
		}
	}
	return s
}

func parseInt(s string) (int64, bool) {
	n, err := strconv.ParseInt(strings.TrimSpace(s), 0, 64)
	return n, err == nil
}

// hexID normalises a sysfs id such as 0x10DE to 10de.
func hexID(s string) string {
	return strings.ToLower(strings.TrimPrefix(strings.TrimSpace(s), "0x"))
}

// countCPUList counts the CPUs of a kernel list such as 0-3,8-11. It refuses
// what no kernel writes, so that damage cannot make it count for ever.
func countCPUList(s string) (int, error) {
	s = strings.TrimSpace(s)
	if s == "" {
		return 0, nil
	}
	total := 0
	for part := range strings.SplitSeq(s, ",") {
		lo, hi, isRange := strings.Cut(part, "-")
		a, err := strconv.ParseUint(lo, 10, 20)
		if err != nil {
			return 0, fmt.Errorf("cpu list %q: %w", s, err)
		}
		b := a
		if isRange {
			if b, err = strconv.ParseUint(hi, 10, 20); err != nil {
				return 0, fmt.Errorf("cpu list %q: %w", s, err)
			}
		}
		if b < a {
			return 0, fmt.Errorf("cpu list %q: range runs backwards", s)
		}
		total += int(b-a) + 1
	}
	return total, nil
}
