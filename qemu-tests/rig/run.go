package rig

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// cleanupRoom is what a test keeps of its time to write down what went wrong.
const cleanupRoom = 30 * time.Second

// Context gives a context that ends shortly before the test's own deadline,
// so that there is time to keep console and logs.
func Context(t testing.TB) context.Context {
	ctx := t.Context()
	d, ok := t.(interface{ Deadline() (time.Time, bool) })
	if !ok {
		return ctx
	}
	deadline, ok := d.Deadline()
	if !ok {
		return ctx
	}
	ctx, cancel := context.WithDeadline(ctx, deadline.Add(-cleanupRoom))
	t.Cleanup(cancel)
	return ctx
}

// Folder makes a folder for a test's machines. It is removed when the test
// passes. When it fails the folder stays, below $BCD_RIG_DIR or the system's
// folder for temporary files, and the test says where; disk images in it go.
func Folder(t testing.TB) string {
	t.Helper()
	parent := os.Getenv("BCD_RIG_DIR")
	if parent != "" {
		if err := os.MkdirAll(parent, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	dir, err := os.MkdirTemp(parent, "bcd-rig-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if !t.Failed() {
			os.RemoveAll(dir)
			return
		}
		keepLogs(dir)
		t.Logf("console, captures and logs of this test are in %s", dir)
	})
	return dir
}

// maxKept is the size from which a file is a disk image and not a log.
const maxKept = 64 << 20

func keepLogs(dir string) {
	filepath.WalkDir(dir, func(name string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil
		}
		if info, err := d.Info(); err == nil && info.Size() > maxKept {
			os.Remove(name)
		}
		return nil
	})
}

// Run starts a machine for a test, with a folder of its own below dir, and
// switches it off at the test's end. When the test fails, the end of the
// console is in its log.
func Run(t testing.TB, dir string, config Config) *VM {
	t.Helper()
	config.Dir = filepath.Join(dir, config.Name)
	if err := os.MkdirAll(config.Dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of %s's console:\n%s", config.Name, tailOf(filepath.Join(config.Dir, ConsoleLog), 3000))
		}
	})
	vm, err := Start(Context(t), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { vm.Close() })
	return vm
}

// RunGateway starts a gateway for a test, with further arguments of serve; its
// log stays with the folder dir.
func RunGateway(t testing.TB, binary, dir string, args ...string) *Gateway {
	t.Helper()
	g, err := NewGateway(binary, dir)
	if err != nil {
		t.Fatal(err)
	}
	g.Args = append(g.Args, args...)
	if err := g.Start(Context(t)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Stop)
	return g
}
