package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
)

// DamageError says what a probe found wrong with a file.
type DamageError struct{ Detail string }

func (e *DamageError) Error() string { return "journal is damaged: " + e.Detail }

// Exit codes of ProbeMain. Any other end of the child, a signal or a runtime
// crash (2) above all, is damage too.
const (
	probeGood    = 0
	probeDamaged = 10
	probeLocked  = 11
	probeUsage   = 12
)

// probeTimeout bounds the child: 64 MiB are read in well under a second from
// any disk that works.
const probeTimeout = 60 * time.Second

// ProbeMain is the child's work: open the file named by the only argument,
// read only, and read every page and record of it. It returns an exit code
// and says on stderr what is wrong. A damaged file may kill the process; that
// is what it is for.
func ProbeMain(args []string, stderr io.Writer) int {
	if len(args) != 1 {
		fmt.Fprintln(stderr, "journal probe: wants one path")
		return probeUsage
	}
	err := probe(args[0])
	switch {
	case err == nil:
		return probeGood
	case errors.Is(err, errLocked):
		fmt.Fprintln(stderr, err)
		return probeLocked
	default:
		fmt.Fprintln(stderr, err)
		return probeDamaged
	}
}

func probe(path string) error {
	if _, err := os.Stat(path); err != nil {
		return err
	}
	d, err := openDisk(path, true)
	if err != nil {
		return err
	}
	defer d.close()
	err = d.db.View(func(tx *bolt.Tx) error {
		var first error
		for err := range tx.Check() { // the channel must be drained
			if first == nil {
				first = err
			}
		}
		return first
	})
	if err != nil {
		return err
	}
	if _, err := load(d); err != nil {
		return err
	}
	return d.each(bucketEvents, func(key, value []byte) error {
		body, err := open(string(key), value)
		if err != nil {
			return err
		}
		return checkEvent(key, body)
	})
}

// ExecProbe returns a Probe for [Options] that runs the program with the
// arguments and the path after them; it must end in [ProbeMain].
func ExecProbe(program string, args ...string) func(context.Context, string) error {
	return func(ctx context.Context, path string) error {
		ctx, cancel := context.WithTimeout(ctx, probeTimeout)
		defer cancel()
		cmd := exec.CommandContext(ctx, program, append(append([]string(nil), args...), path)...)
		var stderr bytes.Buffer
		cmd.Stderr = &limited{&stderr, 4 << 10}
		err := cmd.Run()
		var exit *exec.ExitError
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("%s %s: %w", program, strings.Join(args, " "), ctx.Err())
		case !errors.As(err, &exit):
			return err // it could not be started: says nothing about the file
		}
		line, _, _ := strings.Cut(strings.TrimSpace(stderr.String()), "\n")
		switch exit.ExitCode() {
		case probeLocked:
			return fmt.Errorf("%s: %w", path, errLocked)
		case probeUsage:
			return fmt.Errorf("%s: %s", program, line)
		case probeDamaged:
			return &DamageError{line}
		default:
			return &DamageError{fmt.Sprintf("reading it ended with %s: %s", exit, line)}
		}
	}
}

// limited writes the first n bytes and swallows the rest.
type limited struct {
	w io.Writer
	n int
}

func (l *limited) Write(p []byte) (int, error) {
	keep := p[:min(len(p), l.n)]
	l.n -= len(keep)
	if _, err := l.w.Write(keep); err != nil {
		return 0, err
	}
	return len(p), nil
}
