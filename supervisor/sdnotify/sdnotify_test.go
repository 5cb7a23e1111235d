package sdnotify

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"testing/synctest"
	"time"
)

func TestNotifyReachesTheSocket(t *testing.T) {
	for _, name := range []string{filepath.Join(t.TempDir(), "n"), "@bcd-sdnotify-test-" + strconv.Itoa(os.Getpid())} {
		conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		t.Setenv("NOTIFY_SOCKET", name)
		if err := Notify(Ready, Status("joined as\nnode")); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 256)
		n, err := conn.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := string(buf[:n]), "READY=1\nSTATUS=joined as node"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestNotifyWithoutSystemdDoesNothing(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	if err := Notify(Ready); err != nil {
		t.Error(err)
	}
}

func TestNotifyErrors(t *testing.T) {
	for _, name := range []string{"relative", filepath.Join(t.TempDir(), "nobody-listens")} {
		t.Setenv("NOTIFY_SOCKET", name)
		if err := Notify(Ready); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestWatchdogInterval(t *testing.T) {
	for _, c := range []struct {
		usec, pid string
		want      time.Duration
	}{
		{"30000000", "", 30 * time.Second},
		{"30000000", strconv.Itoa(os.Getpid()), 30 * time.Second},
		{"30000000", "1", 0},
		{"", "", 0}, {"x", "", 0}, {"-5", "", 0}, {"99999999999999999", "", 0},
	} {
		t.Setenv("WATCHDOG_USEC", c.usec)
		t.Setenv("WATCHDOG_PID", c.pid)
		if got := WatchdogInterval(); got != c.want {
			t.Errorf("usec %q pid %q: %s, want %s", c.usec, c.pid, got, c.want)
		}
	}
}

func TestFeedOnlyWhileHealthy(t *testing.T) {
	t.Setenv("WATCHDOG_USEC", "30000000")
	t.Setenv("WATCHDOG_PID", "")
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(context.Background(), 99*time.Second)
		defer cancel()
		began := time.Now()
		healthy := func() error {
			if d := time.Since(began); d > 25*time.Second && d < 75*time.Second {
				return errors.New("sick")
			}
			return nil
		}
		fed := 0
		err := Feed(ctx, healthy, func(states ...string) error {
			if len(states) != 1 || states[0] != Watchdog {
				t.Errorf("sent %q", states)
			}
			fed++
			return nil
		})
		if err != nil || fed != 5 { // at 0, 10, 20, 80 and 90 s
			t.Errorf("fed %d times, %v", fed, err)
		}
	})
}
