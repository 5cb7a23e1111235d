package hostconf

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// effectTimeout bounds modprobe and systemctl, which wait for others.
const effectTimeout = time.Minute

// System is Effects on this machine.
type System struct {
	// Root is "/".
	Root *os.Root
}

var _ Effects = System{}

// LoadModule runs modprobe.
func (s System) LoadModule(ctx context.Context, name string) error {
	return run(ctx, "modprobe", "--", name)
}

// ModuleReady looks into /sys/module, where loaded modules are, and then into
// modules.builtin of the running kernel.
func (s System) ModuleReady(name string) (bool, error) {
	name = strings.ReplaceAll(name, "-", "_")
	if _, err := s.Root.Stat("sys/module/" + name); err == nil {
		return true, nil
	}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return false, err
	}
	for _, base := range []string{"usr/lib/modules", "lib/modules"} {
		f, err := s.Root.Open(path.Join(base, unix.ByteSliceToString(uts.Release[:]), "modules.builtin"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return false, err
		}
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			file := strings.ReplaceAll(path.Base(lines.Text()), "-", "_")
			if strings.HasPrefix(file, name+".ko") {
				return true, nil
			}
		}
		return false, nil
	}
	return false, nil
}

// ReloadServices runs systemctl daemon-reload; where systemd is not the init,
// as in the ramdisk, there is nothing to reload.
func (s System) ReloadServices(ctx context.Context) error {
	// The test of sd_booted(3).
	if _, err := s.Root.Stat("run/systemd/system"); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return run(ctx, "systemctl", "daemon-reload")
}

func run(ctx context.Context, name string, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, effectTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %.400s", cmd, err, strings.TrimSpace(string(out)))
	}
	return nil
}
