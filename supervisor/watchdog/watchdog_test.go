package watchdog

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestOpenWithoutADevice(t *testing.T) {
	path := filepath.Join(t.TempDir(), "watchdog0")
	if _, err := Open(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v, want one that is os.ErrNotExist", err)
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("opening made a file")
	}
}

// A file that is no watchdog must give errors, not silence: a machine that
// believes it is guarded is worse off than one that knows it is not.
func TestAFileThatIsNoWatchdog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "watchdog0")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	d, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Feed(); err == nil {
		t.Error("feed: no error")
	}
	if _, err := d.SetTimeout(time.Minute); err == nil {
		t.Error("set timeout: no error")
	}
}
