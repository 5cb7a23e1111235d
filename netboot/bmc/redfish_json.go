package bmc

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
)

// maxDepth bounds how deep an answer nests. Redfish's own resources stay below
// ten.
const maxDepth = 32

// decodeJSON reads one JSON value of bounded depth. Text that follows it, a
// member of the wrong type and bytes that are not UTF-8 are errors, or read as
// U+FFFD; nothing of it is believed further than the fields of into go.
func decodeJSON(raw []byte, into any) error {
	if err := checkDepth(raw); err != nil {
		return err
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return fmt.Errorf("the answer is not the JSON that Redfish has there: %w", err)
	}
	return nil
}

// checkDepth counts brackets outside strings, before anything is built.
func checkDepth(raw []byte) error {
	depth, quoted := 0, false
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{' || c == '[':
			if depth++; depth > maxDepth {
				return fmt.Errorf("the answer nests deeper than %d", maxDepth)
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	return nil
}

// maxInfo bounds how much of a BMC's own words goes into an error.
const maxInfo = 400

// extendedInfo gives the messages of an error answer (DSP0266 section 8.6), or
// the beginning of what is not one.
func extendedInfo(raw []byte) string {
	var answer struct {
		Error struct {
			Message string `json:"message"`
			Info    []struct {
				Message string `json:"Message"`
				ID      string `json:"MessageId"`
			} `json:"@Message.ExtendedInfo"`
		} `json:"error"`
	}
	var parts []string
	if decodeJSON(raw, &answer) == nil {
		for _, m := range answer.Error.Info[:min(len(answer.Error.Info), 4)] {
			parts = append(parts, strings.TrimSpace(m.ID+" "+m.Message))
		}
		if len(parts) == 0 && answer.Error.Message != "" {
			parts = append(parts, answer.Error.Message)
		}
	} else {
		line, _, _ := bytes.Cut(bytes.TrimSpace(raw), []byte{'\n'})
		parts = append(parts, string(line[:min(len(line), 80)]))
	}
	return clip(strings.Join(parts, "; "), maxInfo)
}

// clip makes a BMC's text fit to be shown: one line, at most n bytes, UTF-8.
func clip(s string, n int) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
	if len(s) > n {
		s = strings.ToValidUTF8(s[:n], "")
	}
	return strings.TrimSpace(s)
}

// oneOrMore reads the names of a list that some services give as a string.
type oneOrMore []string

func (o *oneOrMore) UnmarshalJSON(raw []byte) error {
	d := json.NewDecoder(bytes.NewReader(raw))
	var many []string
	if err := d.Decode(&many); err == nil {
		*o = many
		return nil
	} else if errors.Is(err, io.EOF) {
		return err
	}
	var one string
	if err := json.Unmarshal(raw, &one); err != nil {
		return err
	}
	*o = oneOrMore{one}
	return nil
}
