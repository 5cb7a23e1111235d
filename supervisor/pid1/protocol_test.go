package pid1

import (
	"bytes"
	"strings"
	"testing"
)

func TestMessagesSurviveTheirTrip(t *testing.T) {
	for _, m := range []message{
		{}, {Reboot, "deployed, on request of cmd_x"}, {PowerOff, "asked"}, {Kexec, "next kernel"},
	} {
		got, err := parseMessage(strings.TrimSuffix(m.format(), "\n"))
		if err != nil || got != m {
			t.Errorf("%+v became %+v, %v", m, got, err)
		}
	}
}

func TestAnyReasonMakesOneGoodLine(t *testing.T) {
	for _, reason := range []string{"", " ", "two\nlines", "\x1b[2J", strings.Repeat("é", 500), "tab\tbed"} {
		line := message{Reboot, reason}.format()
		m, err := parseMessage(strings.TrimSuffix(line, "\n"))
		if err != nil || m.action != Reboot || strings.Count(line, "\n") != 1 || len(line) > maxLine {
			t.Errorf("%q: line %q, %+v, %v", reason, line, m, err)
		}
	}
}

func TestReadMessages(t *testing.T) {
	in := "heartbeat\n" + strings.Repeat("x", 10_000) + "\nheartbeat\nreboot now please\nreboot\nhalt x\n\nhear\x00tbeat\nheartbeat"
	var good, bad int
	var last message
	readMessages(strings.NewReader(in), func(m message, err error) {
		if err != nil {
			bad++
			return
		}
		good++
		last = m
	})
	// The last heartbeat has no newline: whoever wrote it died in the middle.
	if good != 3 || bad != 5 || last != (message{Reboot, "now please"}) {
		t.Errorf("%d good, %d bad, last %+v", good, bad, last)
	}
}

func FuzzReadMessages(f *testing.F) {
	f.Add([]byte("heartbeat\nreboot x\n"))
	f.Add([]byte(strings.Repeat("a", 300) + "\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		lines := 0
		readMessages(bytes.NewReader(in), func(m message, err error) {
			lines++
			if err != nil {
				return
			}
			again, err := parseMessage(strings.TrimSuffix(m.format(), "\n"))
			if err != nil || again != m {
				t.Fatalf("%+v became %+v, %v", m, again, err)
			}
		})
		if n := bytes.Count(in, []byte("\n")); lines > n {
			t.Fatalf("%d messages in %d lines", lines, n)
		}
	})
}
