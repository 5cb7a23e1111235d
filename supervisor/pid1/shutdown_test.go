package pid1

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// talos#14404: one wait without a deadline, and the machine never went off.
func TestEveryStepOfTheWayDownHasItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		never := make(chan struct{})
		var story []string
		var mu sync.Mutex
		note := func(name string) { mu.Lock(); defer mu.Unlock(); story = append(story, name) }
		var told []string
		began := time.Now()
		runSteps([]shutdownStep{
			{"good", time.Second, func(context.Context) error { note("good"); return nil }},
			{"deaf", 2 * time.Second, func(context.Context) error { note("deaf"); <-never; return nil }},
			{"obeys", 3 * time.Second, func(ctx context.Context) error {
				note("obeys")
				<-ctx.Done()
				return errors.New("two are left")
			}},
			{"panics", time.Second, func(context.Context) error { note("panics"); panic("oh") }},
			{"fails", time.Second, func(context.Context) error { note("fails"); return errors.New("no") }},
			{"last", time.Second, func(context.Context) error { note("last"); return nil }},
		}, func(format string, args ...any) { told = append(told, fmt.Sprintf(format, args...)) })
		if want := []string{"good", "deaf", "obeys", "panics", "fails", "last"}; !slices.Equal(story, want) {
			t.Errorf("steps %q, want %q", story, want)
		}
		if d := time.Since(began); d > 6*time.Second {
			t.Errorf("took %s", d)
		}
		all := strings.Join(told, "\n")
		for _, want := range []string{"deaf: not done within 2s", "obeys: two are left", "panics: panic: oh", "fails: no"} {
			if !strings.Contains(all, want) {
				t.Errorf("nothing told about %q in:\n%s", want, all)
			}
		}
		close(never)
	})
}

func TestMountPoints(t *testing.T) {
	path := filepath.Join(t.TempDir(), "mounts")
	text := "rootfs / rootfs rw 0 0\nproc /proc proc rw 0 0\n/dev/vda1 /mnt/a\\040b ext4 rw 0 0\ntmpfs /run tmpfs rw 0 0\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	points, err := mountPoints(path)
	if err != nil {
		t.Fatal(err)
	}
	var data []string
	for _, p := range points {
		if holdsData(p) {
			data = append(data, p)
		}
	}
	if !slices.Equal(data, []string{"/mnt/a b"}) {
		t.Errorf("%q hold data, of %q", data, points)
	}
}
