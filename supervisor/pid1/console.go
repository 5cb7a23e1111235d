package pid1

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// consoleQueue is how many lines may wait for a console. A serial port at
	// 9600 baud takes 80 ms a line; one that is stopped by flow control takes
	// for ever, and must stop nobody.
	consoleQueue = 512
	// maxConsoleLine cuts what the supervisor process prints. A kmsg record
	// holds just under 1 KiB.
	maxConsoleLine = 900
	// kmsgPrefix is facility daemon (3), severity debug (7): the kernel keeps
	// the line (dmesg, pstore) but, at its usual console log level of 7, does
	// not print it a second time on the consoles.
	kmsgPrefix = "<31>"
)

// console prints lines on every console of the machine and keeps them in the
// kernel's log. It never blocks its caller; what a stopped console cannot take
// is dropped there, and counted.
type console struct {
	mu    sync.Mutex
	sinks []*sink
}

// sink is one place where lines go, with a goroutine of its own.
type sink struct {
	name    string
	prefix  string
	out     io.Writer
	lines   chan string
	dropped int // guarded by console.mu
	pending sync.WaitGroup
}

// add makes lines go to out too.
func (c *console) add(name, prefix string, out io.Writer) {
	s := &sink{name: name, prefix: prefix, out: out, lines: make(chan string, consoleQueue)}
	c.mu.Lock()
	c.sinks = append(c.sinks, s)
	c.mu.Unlock()
	go func() {
		for line := range s.lines {
			// An error has nowhere to be reported to: this is the console.
			_, _ = io.WriteString(s.out, s.prefix+line+"\n")
			s.pending.Done()
		}
	}()
}

// remove takes a sink away; what it still holds is written.
func (c *console) remove(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sinks = slices.DeleteFunc(c.sinks, func(s *sink) bool {
		if s.name == name {
			close(s.lines)
			return true
		}
		return false
	})
}

// printf prints one of process 1's own messages.
func (c *console) printf(format string, args ...any) {
	for line := range strings.SplitSeq(fmt.Sprintf(format, args...), "\n") {
		c.line("bcd: " + line)
	}
}

// line prints one line as it is, without what could upset a terminal.
func (c *console) line(text string) {
	text = strings.Map(func(r rune) rune {
		if r < ' ' && r != '\t' || r == 0x7f {
			return -1
		}
		return r
	}, strings.ToValidUTF8(text, "?"))
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.sinks {
		if s.dropped > 0 && len(s.lines) < cap(s.lines)-1 {
			s.put(fmt.Sprintf("bcd: %d lines were dropped here: the console does not keep up", s.dropped))
			s.dropped = 0
		}
		if !s.put(text) {
			s.dropped++
		}
	}
}

func (s *sink) put(text string) bool {
	s.pending.Add(1)
	select {
	case s.lines <- text:
		return true
	default:
		s.pending.Done()
		return false
	}
}

// flush waits, at most d, until everything has been written.
func (c *console) flush(d time.Duration) {
	c.mu.Lock()
	sinks := slices.Clone(c.sinks)
	c.mu.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, s := range sinks {
			s.pending.Wait()
		}
	}()
	select {
	case <-done:
	case <-time.After(d):
	}
}

// copyFrom prints r's lines until it ends. Lines that are too long are split.
func (c *console) copyFrom(r io.Reader) {
	buf := make([]byte, 0, 2*maxConsoleLine)
	chunk := make([]byte, maxConsoleLine)
	for {
		n, err := r.Read(chunk)
		buf = append(buf, chunk[:n]...)
		for {
			i := bytes.IndexByte(buf, '\n')
			switch {
			case i >= 0 && i <= maxConsoleLine:
				c.line(string(buf[:i]))
				buf = append(buf[:0], buf[i+1:]...)
				continue
			case len(buf) >= maxConsoleLine:
				c.line(string(buf[:maxConsoleLine]))
				buf = append(buf[:0], buf[maxConsoleLine:]...)
				continue
			}
			break
		}
		if err != nil {
			if len(buf) > 0 {
				c.line(string(buf))
			}
			return
		}
	}
}

// consoleNames parses /sys/class/tty/console/active: the kernel's consoles,
// in the order of console= on the command line.
func consoleNames(active string) []string {
	var names []string
	for _, name := range strings.Fields(active) {
		if len(name) < 32 && !strings.Contains(name, "/") && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// openConsoles moves the output from the console that the kernel gave to all
// that it has, and to its log. It needs /dev and /sys.
func (c *console) openConsoles() {
	if f, err := os.OpenFile("/dev/kmsg", os.O_WRONLY, 0); err == nil {
		c.add("kmsg", kmsgPrefix, f)
	}
	active, err := os.ReadFile("/sys/class/tty/console/active")
	if err != nil {
		return
	}
	opened := false
	for _, name := range consoleNames(string(active)) {
		// ttyMV0 and its like are there on odd boards only; what cannot be
		// opened is left out. O_NOCTTY: process 1 must not get a terminal
		// whose ^C reaches it.
		f, err := os.OpenFile("/dev/"+name, os.O_WRONLY|noCTTY, 0)
		if err != nil {
			continue
		}
		c.add(name, "", f)
		opened = true
	}
	if opened {
		c.remove(firstConsole)
	}
}

// firstConsole is the sink that process 1 was born with.
const firstConsole = "console"
