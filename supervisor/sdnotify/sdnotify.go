// Package sdnotify tells systemd how a daemon under it is doing, as
// sd_notify(3) describes: one datagram of NAME=value lines to the unix socket
// named by NOTIFY_SOCKET. Where that is not set (no systemd, or a unit without
// Type=notify) everything here does nothing and returns nil.
package sdnotify

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

// The states that sd_notify(3) defines and a daemon needs.
const (
	Ready    = "READY=1"
	Stopping = "STOPPING=1"
	Watchdog = "WATCHDOG=1"
)

// sendTimeout bounds a send: systemd's receive queue can be full.
const sendTimeout = time.Second

// Notify sends the states in one datagram.
func Notify(states ...string) error {
	name := os.Getenv("NOTIFY_SOCKET")
	if name == "" {
		return nil
	}
	if name[0] != '/' && name[0] != '@' {
		return fmt.Errorf("notify systemd: NOTIFY_SOCKET %q is neither a path nor an abstract name", name)
	}
	// net turns a leading @ into the NUL of an abstract name.
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: name, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	defer conn.Close()
	if err := conn.SetWriteDeadline(time.Now().Add(sendTimeout)); err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	if _, err := conn.Write([]byte(strings.Join(states, "\n"))); err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	return nil
}

// Status is the state with a line for people, shown by systemctl status.
func Status(text string) string {
	return "STATUS=" + strings.ReplaceAll(text, "\n", " ")
}

// WatchdogInterval is the time within which systemd wants to hear [Watchdog]
// (WATCHDOG_USEC, sd_watchdog_enabled(3)); zero when it wants none from this
// process.
func WatchdogInterval() time.Duration {
	if pid := os.Getenv("WATCHDOG_PID"); pid != "" && pid != strconv.Itoa(os.Getpid()) {
		return 0
	}
	usec, err := strconv.ParseInt(os.Getenv("WATCHDOG_USEC"), 10, 64)
	if err != nil || usec <= 0 || usec > int64(24*time.Hour/time.Microsecond) {
		return 0
	}
	return time.Duration(usec) * time.Microsecond
}

// Feed calls notify with [Watchdog] three times an interval while healthy
// returns nil, until ctx ends; with no watchdog wanted it just waits for that.
// It returns the first error of notify: a supervisor starts it again, and
// systemd acts if that does not help.
func Feed(ctx context.Context, healthy func() error, notify func(...string) error) error {
	every := WatchdogInterval() / 3
	if every <= 0 {
		<-ctx.Done()
		return nil
	}
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		if healthy() == nil {
			if err := notify(Watchdog); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}
