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

// LoadModule has systemd load what is in modules-load.d, because a hardened
// bcd.service may not load modules, and runs modprobe where systemd is not the
// init.
func (s System) LoadModule(ctx context.Context, name string) error {
	booted, err := s.booted()
	if err != nil {
		return err
	}
	if !booted {
		return run(ctx, "modprobe", "--", name)
	}
	// An earlier step may have loaded them all.
	if ready, err := s.ModuleReady(name); ready || err != nil {
		return err
	}
	asked := run(ctx, "systemctl", "restart", "systemd-modules-load.service")
	ready, err := s.ModuleReady(name)
	if ready {
		return nil // whatever else systemd could not load
	}
	return errors.Join(fmt.Errorf("kernel module %s did not load: there is none of that name for this kernel, or it finds no device; journalctl -u systemd-modules-load tells", name), asked, err)
}

// ApplySysctls restarts systemd-sysctl.service.
func (s System) ApplySysctls(ctx context.Context) (asked bool, err error) {
	booted, err := s.booted()
	if !booted || err != nil {
		return false, err
	}
	return true, run(ctx, "systemctl", "restart", "systemd-sysctl.service")
}

// booted is the test of sd_booted(3).
func (s System) booted() (bool, error) {
	_, err := s.Root.Stat("run/systemd/system")
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
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
	if booted, err := s.booted(); !booted {
		return err
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
