package pid1

import (
	"bytes"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// screen is a console that can be stopped, as by ^S.
type screen struct {
	mu   sync.Mutex
	text bytes.Buffer
	stop chan struct{} // if not nil, writes wait for it
}

func (s *screen) Write(p []byte) (int, error) {
	if s.stop != nil {
		<-s.stop
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// closeAll ends the sinks' goroutines.
func closeAll(c *console) {
	for _, s := range slices.Clone(c.sinks) {
		c.remove(s.name)
	}
}

func TestLinesReachAllConsolesAndTheKernelLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c console
		var tty, serial, kmsg screen
		c.add("tty0", "", &tty)
		c.add("ttyS0", "", &serial)
		c.add("kmsg", kmsgPrefix, &kmsg)
		c.printf("have %d MiB\nneed %d MiB", 200, 384)
		c.line("evil \x1b[2Jtext\r")
		c.flush(time.Second)
		want := "bcd: have 200 MiB\nbcd: need 384 MiB\nevil [2Jtext\n"
		if tty.String() != want || serial.String() != want {
			t.Errorf("tty %q, serial %q, want %q", tty.String(), serial.String(), want)
		}
		if want := "<31>bcd: have"; !strings.HasPrefix(kmsg.String(), want) {
			t.Errorf("kmsg %q", kmsg.String())
		}
		closeAll(&c)
	})
}

func TestAStoppedConsoleStopsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c console
		stopped, fine := screen{stop: make(chan struct{})}, screen{}
		c.add("ttyS0", "", &stopped)
		c.add("tty0", "", &fine)
		for range 3 * consoleQueue {
			c.line("x")
			synctest.Wait()
		}
		if n := strings.Count(fine.String(), "x\n"); n != 3*consoleQueue {
			t.Errorf("the other console has %d lines", n)
		}
		c.flush(time.Second) // must come back although one never will
		close(stopped.stop)
		synctest.Wait()
		c.line("and on")
		c.flush(time.Second)
		if got := stopped.String(); !strings.Contains(got, "lines were dropped here") || !strings.HasSuffix(got, "and on\n") {
			t.Errorf("it ends with %q", got[max(0, len(got)-120):])
		}
		closeAll(&c)
	})
}

func TestCopyFrom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c console
		var tty screen
		c.add("tty0", "", &tty)
		long := strings.Repeat("a", 2*maxConsoleLine+10)
		c.copyFrom(io.MultiReader(strings.NewReader("one\ntw"), strings.NewReader("o\n"+long+"\nno newline")))
		c.flush(time.Second)
		lines := strings.Split(tty.String(), "\n")
		want := []string{"one", "two", long[:maxConsoleLine], long[:maxConsoleLine], long[:10], "no newline", ""}
		if !slices.Equal(lines, want) {
			t.Errorf("got %d lines: %.80q", len(lines), lines)
		}
		closeAll(&c)
	})
}

func TestConsoleNames(t *testing.T) {
	for in, want := range map[string][]string{
		"tty0 ttyS0\n":          {"tty0", "ttyS0"},
		"":                      nil,
		"ttyS0 ttyS0 ../x ttyA": {"ttyS0", "ttyA"},
	} {
		if got := consoleNames(in); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}
