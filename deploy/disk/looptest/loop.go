// Package looptest makes loop devices for tests: disks of the kernel with a
// chosen sector size.
package looptest

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// New makes a loop device of the given size and sector size, full of fill
// bytes, and returns its node and the file behind it. It needs root.
func New(t testing.TB, size int64, sector int, fill byte) (node, file string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "loop.img")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	if fill != 0 {
		block := bytes.Repeat([]byte{fill}, 1<<20)
		for off := int64(0); off < size; off += int64(len(block)) {
			if _, err := f.WriteAt(block[:min(int64(len(block)), size-off)], off); err != nil {
				t.Fatal(err)
			}
		}
	}
	var out []byte
	// Another process may take the free device in between.
	for range 5 {
		out, err = exec.Command("losetup", "--find", "--show", "--sector-size", strconv.Itoa(sector), file).CombinedOutput()
		if err == nil {
			break
		}
	}
	if err != nil {
		t.Fatalf("losetup (needs root): %v: %s", err, out)
	}
	node = strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", node).CombinedOutput(); err != nil {
			t.Errorf("losetup --detach %s: %v: %s", node, err, out)
		}
	})
	return node, file
}
