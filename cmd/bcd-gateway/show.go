package main

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/api/kinds"
)

// plainJSON turns a message into what a person would write in JSON and jq
// would like to read: numbers as numbers, digests in hex, enums as words,
// embedded JSON as JSON, and a command's body, result and progress as the
// messages that they are. Every field is there, set or not, so that a script
// need not guess.
func plainJSON(m proto.Message) any {
	if info, ok := m.(*bcdv1.CommandInfo); ok {
		return commandJSON(info)
	}
	return messageJSON(m.ProtoReflect())
}

func messageJSON(m protoreflect.Message) map[string]any {
	out := map[string]any{}
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		name := string(fd.Name())
		switch {
		case fd.IsMap():
			entries := map[string]any{}
			m.Get(fd).Map().Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
				entries[k.String()] = valueJSON(fd.MapValue(), v)
				return true
			})
			out[name] = entries
		case fd.IsList():
			list := m.Get(fd).List()
			values := make([]any, 0, list.Len())
			for j := range list.Len() {
				values = append(values, valueJSON(fd, list.Get(j)))
			}
			out[name] = values
		case fd.Kind() == protoreflect.MessageKind && !m.Has(fd):
			if fd.ContainingOneof() == nil {
				out[name] = nil
			}
		case fd.ContainingOneof() != nil && !m.Has(fd):
		default:
			out[name] = valueJSON(fd, m.Get(fd))
		}
	}
	return out
}

func valueJSON(fd protoreflect.FieldDescriptor, v protoreflect.Value) any {
	switch fd.Kind() {
	case protoreflect.MessageKind:
		return plainJSON(v.Message().Interface())
	case protoreflect.EnumKind:
		return enumWord(fd.Enum(), v.Enum())
	case protoreflect.BytesKind:
		return bytesJSON(string(fd.Name()), v.Bytes())
	default:
		return v.Interface()
	}
}

// bytesJSON writes canonical JSON as JSON, short values (digests) in hex and
// anything else in base64.
func bytesJSON(name string, b []byte) any {
	if strings.HasSuffix(name, "json") && json.Valid(b) {
		return json.RawMessage(b)
	}
	if len(b) <= 64 {
		return hex.EncodeToString(b)
	}
	return base64.StdEncoding.EncodeToString(b)
}

func enumWord(e protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	value := e.Values().ByNumber(n)
	if value == nil {
		return fmt.Sprintf("%d", n)
	}
	return trimEnum(string(e.Name()), string(value.Name()))
}

// trimEnum takes the enum's own name off its value: ROLE_NODE is node.
func trimEnum(enum, value string) string {
	var prefix strings.Builder
	for i, r := range enum {
		if i > 0 && r >= 'A' && r <= 'Z' {
			prefix.WriteByte('_')
		}
		prefix.WriteRune(r)
	}
	word := strings.ToLower(strings.TrimPrefix(value, strings.ToUpper(prefix.String())+"_"))
	if word == "unspecified" {
		return ""
	}
	return word
}

// word is an enum value for people.
func word(e interface {
	Descriptor() protoreflect.EnumDescriptor
	Number() protoreflect.EnumNumber
}) string {
	return enumWord(e.Descriptor(), e.Number())
}

func commandJSON(c *bcdv1.CommandInfo) map[string]any {
	out := messageJSON(c.ProtoReflect())
	kind, ok := kinds.ByName(c.Kind)
	if !ok {
		return out
	}
	out["body"] = decoded(kind.Body, c.Body)
	if outcome, ok := out["outcome"].(map[string]any); ok {
		// An object or null, whatever the outcome: a script need not care.
		outcome["result"] = nil
		if len(c.Outcome.GetResult()) > 0 {
			outcome["result"] = decoded(kind.Result, c.Outcome.Result)
		}
	}
	if progress, ok := out["progress"].(map[string]any); ok {
		progress["body"] = decoded(kind.Progress, c.Progress.GetBody())
	}
	return out
}

// decoded is raw as the message it is, or base64 when it is not.
func decoded(t protoreflect.MessageType, raw []byte) any {
	if t != nil {
		m := t.New().Interface()
		if proto.Unmarshal(raw, m) == nil {
			return messageJSON(m.ProtoReflect())
		}
	}
	return base64.StdEncoding.EncodeToString(raw)
}

// ago says how long ago a time in milliseconds was.
func ago(now time.Time, ms int64) string {
	if ms == 0 {
		return "never"
	}
	return short(now.Sub(time.UnixMilli(ms))) + " ago"
}

// short is a duration with one unit, as tables want it.
func short(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return fmt.Sprintf("%dd", d/(24*time.Hour))
}

// size is a number of bytes with a binary unit.
func size(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	value, unit := float64(n)/1024, 0
	for value >= 1024 && unit < len(units)-1 {
		value, unit = value/1024, unit+1
	}
	return fmt.Sprintf("%.1f %ciB", value, units[unit])
}

func clock(ms int64) string {
	if ms == 0 {
		return "-"
	}
	return time.UnixMilli(ms).UTC().Format("2006-01-02 15:04:05")
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
