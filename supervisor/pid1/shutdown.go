package pid1

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// shutdownStep is one step of the way down. A step that does not end within its
// time, fails or panics is reported and passed over: the machine always ends.
type shutdownStep struct {
	name   string
	within time.Duration
	do     func(ctx context.Context) error
}

// runSteps runs steps in order, each within its own deadline.
func runSteps(steps []shutdownStep, printf func(string, ...any)) {
	for _, s := range steps {
		if err := runStep(s); err != nil {
			printf("%s: %v; going on", s.name, err)
		}
	}
}

func runStep(s shutdownStep) error {
	ctx, cancel := context.WithTimeout(context.Background(), s.within)
	defer cancel()
	done := make(chan error, 1) // buffered: a step that is too late must not block for ever
	go func() {
		defer func() {
			if v := recover(); v != nil {
				done <- fmt.Errorf("panic: %v\n%s", v, debug.Stack())
			}
		}()
		done <- s.do(ctx)
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		// A step that ended with its deadline has more to say than the deadline.
		select {
		case err := <-done:
			return err
		case <-time.After(100 * time.Millisecond):
		}
		return fmt.Errorf("not done within %s", s.within)
	}
}

// Deadlines of the way down; together 88 s, well below lastWatchdogTimeout.
const (
	stopSupervisorWithin = 40 * time.Second // its services stop in order, 5 to 20 s each
	termWithin           = 5 * time.Second
	killWithin           = 3 * time.Second
	syncWithin           = 10 * time.Second
	unmountWithin        = 10 * time.Second
	rebootWithin         = 20 * time.Second // the kernel's own device shutdown
	// lastWatchdogTimeout guards the way down and the firmware's next start,
	// which can take minutes on a large server.
	lastWatchdogTimeout = 10 * time.Minute
)

// goDown ends every process and the machine. It does not return.
func (p *process) goDown(a Action, reason string) {
	p.con.printf("%s: %s", actionText(a), reason)
	if p.dog != nil {
		// It stays armed: a shutdown that hangs is reset.
		if _, err := p.dog.SetTimeout(lastWatchdogTimeout); err != nil {
			p.con.printf("%v", err)
		}
		_ = p.dog.Feed()
	}
	steps := []shutdownStep{
		{"stop the supervisor", p.stopWithin, p.stopSupervisor},
		{"stop processes", termWithin, func(ctx context.Context) error { return p.killAll(ctx, unix.SIGTERM) }},
		{"kill processes", killWithin, func(ctx context.Context) error { return p.killAll(ctx, unix.SIGKILL) }},
		{"sync", syncWithin, func(context.Context) error { unix.Sync(); return nil }},
	}
	if p.ownsMounts {
		steps = append(steps, shutdownStep{"unmount", unmountWithin, func(context.Context) error { return unmountAll() }})
	}
	runSteps(steps, p.con.printf)
	p.con.printf("%s now", actionText(a))
	p.con.flush(time.Second)
	runSteps([]shutdownStep{{string(a), rebootWithin, func(context.Context) error { return p.reboot(a) }}}, p.con.printf)
	// The kernel did not take it, or hangs in a driver. Ask without the drivers.
	p.con.printf("the kernel did not %s; forcing a reset", a)
	p.con.flush(time.Second)
	_ = os.WriteFile("/proc/sysrq-trigger", []byte("b"), 0)
	for {
		time.Sleep(time.Hour) // the watchdog is left; a return would be a kernel panic
	}
}

func actionText(a Action) string {
	switch a {
	case Reboot:
		return "restarting the machine"
	case PowerOff:
		return "switching the machine off"
	case Kexec:
		return "starting the loaded kernel"
	}
	return string(a)
}

// rebootMachine is reboot(2) for an action.
func rebootMachine(a Action) error {
	cmd := unix.LINUX_REBOOT_CMD_RESTART
	switch a {
	case PowerOff:
		cmd = unix.LINUX_REBOOT_CMD_POWER_OFF
	case Kexec:
		if err := unix.Reboot(unix.LINUX_REBOOT_CMD_KEXEC); err != nil {
			// Most likely none is loaded. A restart is what is nearest.
			return errors.Join(fmt.Errorf("kexec: %w", err), unix.Reboot(cmd))
		}
		return nil
	}
	return unix.Reboot(cmd)
}

// stopSupervisor asks the supervisor process to end and waits for it.
func (p *process) stopSupervisor(ctx context.Context) error {
	c := p.child
	if c == nil {
		return nil
	}
	if err := unix.Kill(c.pid, unix.SIGTERM); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	// One that is stopped would not hear it.
	_ = unix.Kill(c.pid, unix.SIGCONT)
	select {
	case <-c.gone:
		return nil
	case <-ctx.Done():
		return errors.New("it did not end; it is killed with the rest")
	}
}

// killAll signals every process but this one, and waits until none is left.
// With process 1 everything descends from it, so that "no children" is "no
// processes".
func (p *process) killAll(ctx context.Context, sig unix.Signal) error {
	if err := unix.Kill(-1, sig); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for p.reaper.reap() {
		select {
		case <-ctx.Done():
			return errors.New("some processes are still there")
		case <-ticker.C:
		}
	}
	return nil
}

// unmountAll unmounts what may hold data, the last mounted first; what is busy
// is made read-only, which writes it out too.
func unmountAll() error {
	points, err := mountPoints("/proc/self/mounts")
	if err != nil {
		return err
	}
	var errs []error
	for _, target := range slices.Backward(points) {
		if !holdsData(target) {
			continue
		}
		err := unix.Unmount(target, 0)
		if err == nil || errors.Is(err, unix.EINVAL) {
			continue
		}
		ro := unix.Mount("", target, "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
		if ro != nil {
			errs = append(errs, fmt.Errorf("unmount %s: %w, and it cannot be made read-only: %w", target, err, ro))
		}
	}
	return errors.Join(errs...)
}

// holdsData is false for the root (the initramfs, which cannot be unmounted) and
// for what the kernel makes up.
func holdsData(target string) bool {
	if target == "/" || target == "/run" || target == "/tmp" {
		return false
	}
	for _, api := range []string{"/proc", "/sys", "/dev"} {
		if target == api || strings.HasPrefix(target, api+"/") {
			return false
		}
	}
	return true
}

// howEnded tells people about an exit status.
func howEnded(s syscall.WaitStatus) string {
	switch {
	case s.Exited():
		return fmt.Sprintf("exit status %d", s.ExitStatus())
	case s.Signaled():
		return fmt.Sprintf("killed by %s", unix.SignalName(s.Signal()))
	}
	return fmt.Sprintf("wait status %#x", uint32(s))
}
