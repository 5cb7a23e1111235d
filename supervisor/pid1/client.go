package pid1

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/bcd/supervisor"
)

// fdVariable names the number of the inherited pipe.
const fdVariable = "BCD_PID1_FD"

// ErrNoInit is returned by Connect in a process that process 1 did not start.
var ErrNoInit = errors.New("not started by process 1 (no " + fdVariable + ")")

// sendWithin bounds a write: process 1 reads all the time, unless it is gone.
const sendWithin = 5 * time.Second

// Client is the supervisor process's end of the pipe to process 1.
type Client struct {
	mu   sync.Mutex
	pipe *os.File
}

// Connect takes over the pipe that process 1 gave to this process. It may be
// called once; it hides the pipe from the processes that this one starts.
func Connect() (*Client, error) {
	value, ok := os.LookupEnv(fdVariable)
	if !ok {
		return nil, ErrNoInit
	}
	if err := os.Unsetenv(fdVariable); err != nil {
		return nil, fmt.Errorf("connect to process 1: %w", err)
	}
	fd, err := strconv.Atoi(value)
	if err != nil || fd < 3 || fd > 1024 {
		return nil, fmt.Errorf("connect to process 1: %s is %q, want a descriptor from 3 to 1024", fdVariable, value)
	}
	unix.CloseOnExec(fd)
	// Polled, so that a write can have a deadline.
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, fmt.Errorf("connect to process 1: descriptor %d: %w", fd, err)
	}
	return &Client{pipe: os.NewFile(uintptr(fd), "process 1")}, nil
}

func (c *Client) send(m message) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.pipe.SetWriteDeadline(time.Now().Add(sendWithin)); err != nil {
		return fmt.Errorf("tell process 1: %w", err)
	}
	if _, err := c.pipe.WriteString(m.format()); err != nil {
		return fmt.Errorf("tell process 1: %w", err)
	}
	return nil
}

// Heartbeat says that this process is healthy. Process 1 wants one at least
// every 15 s.
func (c *Client) Heartbeat() error { return c.send(message{}) }

// Reboot asks process 1 to restart the machine, after an orderly stop of this
// process: it will get SIGTERM. The reason is one line for people.
func (c *Client) Reboot(reason string) error { return c.send(message{Reboot, reason}) }

// PowerOff asks process 1 to switch the machine off.
func (c *Client) PowerOff(reason string) error { return c.send(message{PowerOff, reason}) }

// Kexec asks process 1 to start the kernel that was loaded with
// kexec_file_load(2); if there is none the machine restarts.
func (c *Client) Kexec(reason string) error { return c.send(message{Kexec, reason}) }

// Service sends heartbeats as long as healthy returns nil, which
// [supervisor.Supervisor.Healthy] is meant for. While it returns an error
// nothing is sent: the watchdog, or process 1, does what is left to do.
func (c *Client) Service(healthy func() error) supervisor.Service {
	return supervisor.Func("heartbeat", func(ctx context.Context) error {
		return beat(ctx, healthy, c.Heartbeat)
	})
}

func beat(ctx context.Context, healthy, send func() error) error {
	ticker := time.NewTicker(beatEvery)
	defer ticker.Stop()
	for {
		if healthy() == nil {
			if err := send(); err != nil {
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
