package pid1

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"
)

// Action is how the machine ends.
type Action string

const (
	Reboot   Action = "reboot"
	PowerOff Action = "poweroff"
	// Kexec starts the kernel that was loaded by kexec_file_load(2); without
	// one it is a reboot.
	Kexec Action = "kexec"
)

// The protocol: each message is one line of printable ASCII, at most maxLine
// bytes with its newline, so that a write to the pipe is atomic (PIPE_BUF).
//
//	heartbeat
//	reboot REASON
//	poweroff REASON
//	kexec REASON
const (
	maxLine   = 256
	heartbeat = "heartbeat"
)

// message is a parsed line: a heartbeat, or an action with its reason.
type message struct {
	action Action // "" is a heartbeat
	reason string
}

func parseMessage(line string) (message, error) {
	if len(line) >= maxLine {
		return message{}, fmt.Errorf("message of %d bytes, want less than %d", len(line), maxLine)
	}
	for i := range len(line) {
		if line[i] < ' ' || line[i] > '~' {
			return message{}, fmt.Errorf("message %.40q has a byte that is not printable", line)
		}
	}
	if line == heartbeat {
		return message{}, nil
	}
	verb, reason, _ := strings.Cut(line, " ")
	switch a := Action(verb); a {
	case Reboot, PowerOff, Kexec:
		if reason == "" {
			return message{}, fmt.Errorf("message %q gives no reason", line)
		}
		return message{action: a, reason: reason}, nil
	}
	return message{}, fmt.Errorf("message %.40q is not known", line)
}

// format gives the line, with its newline; what a reason may not hold is
// replaced, what is too long is cut.
func (m message) format() string {
	if m.action == "" {
		return heartbeat + "\n"
	}
	reason := strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, m.reason)
	if strings.TrimSpace(reason) == "" {
		reason = "no reason given"
	}
	line := string(m.action) + " " + reason
	if len(line) > maxLine-1 {
		line = line[:maxLine-1]
	}
	return line + "\n"
}

// readMessages calls got for each line of r until it ends; err is set for a line
// that is no message. Lines longer than a message are dropped whole.
func readMessages(r io.Reader, got func(m message, err error)) {
	in := bufio.NewReaderSize(r, maxLine)
	for tooLong := false; ; {
		line, err := in.ReadSlice('\n')
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			tooLong = true
			continue
		case err != nil:
			return // a line without its newline is not a message
		case tooLong:
			tooLong = false
			got(message{}, fmt.Errorf("message longer than %d bytes", maxLine))
			continue
		}
		got(parseMessage(string(line[:len(line)-1])))
	}
}
