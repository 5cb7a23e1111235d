package pid1

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/bcd/supervisor"
	"github.com/better-compute/bcd/supervisor/selfcheck"
	"github.com/better-compute/bcd/supervisor/watchdog"
)

// Options for [Main]. The zero value starts "/proc/self/exe supervise".
type Options struct {
	// Banner is the first line on the console, such as the name and version.
	Banner string
	// Args are the arguments of the supervisor process, after its name. Nil
	// means "supervise".
	Args []string
	// Env is added to the supervisor process's environment (PATH, HOME, TERM
	// and the pipe's number).
	Env []string
	// RescueShell is a program that is kept running on the console when the
	// kernel command line has the word bcd.rescue. Empty means none.
	RescueShell string
	// HaltAfter is how long a message about a damaged initramfs stays on the
	// console before the machine restarts. Zero means one minute.
	HaltAfter time.Duration
}

// ErrNotInit is returned by Main in a process whose pid is not 1.
var ErrNotInit = errors.New("this is not process 1")

// environment of the supervisor process.
var environment = []string{"PATH=/bbin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/", "TERM=linux"}

// Main is process 1. It returns only [ErrNotInit]. In order, it
//
//  1. takes SIGTERM and SIGINT (ctrl-alt-del) to mean restart, SIGUSR2 to mean
//     power off, and ignores SIGHUP, SIGPIPE and SIGUSR1;
//  2. compares the initramfs with its manifest (sizes; digests a while later); if
//     that fails it says why on every console, waits Options.HaltAfter and
//     restarts the machine;
//  3. mounts /proc, /sys, /dev, /dev/pts, /dev/shm, /run, /tmp, /sys/fs/cgroup,
//     and what is there of securityfs, efivarfs and pstore;
//  4. prints on all consoles of the kernel, and into its log, from here on;
//  5. turns off the kernel's rate limit for its log, sets panic=10, no core
//     files, and ctrl-alt-del as a signal;
//  6. starts to reap;
//  7. starts the supervisor process in a session and cgroup of its own, its
//     output on the consoles, and starts it again, with a growing back-off and
//     after killing what it left behind, whenever it ends;
//  8. opens the hardware watchdog once one appears, and feeds it only while the
//     supervisor process is healthy (or is being started);
//  9. keeps the rescue shell running, if asked for;
//  10. on a request or a signal, or after ten minutes without a healthy
//     supervisor process: stops it, then every process, syncs, unmounts, and
//     calls reboot(2); each within its own deadline, and all of it whatever
//     went wrong before.
func Main(o Options) error {
	if os.Getpid() != 1 {
		return fmt.Errorf("pid %d: %w", os.Getpid(), ErrNotInit)
	}
	p := newProcess(o)
	p.signals()
	p.con.add(firstConsole, "", os.Stderr)
	if o.Banner != "" {
		p.con.printf("%s", o.Banner)
	}
	p.checkSelf()
	p.prepare()
	p.serve(context.Background())
	return nil // not reached
}

// process is process 1.
type process struct {
	opts   Options
	con    *console
	reaper *reaper
	keeper *keeper
	events chan any
	child  *child
	dog    feeder // nil until there is one

	stopWithin time.Duration // for the supervisor process, on the way down

	// What touches the machine, so that a test in a pid namespace can leave it
	// alone.
	ownsMounts bool
	cgroup     string
	openDog    func() (feeder, error)
	reboot     func(Action) error
}

// feeder is what process 1 needs of a watchdog.
type feeder interface {
	Identity() string
	SetTimeout(time.Duration) (time.Duration, error)
	Feed() error
}

func newProcess(o Options) *process {
	if o.Args == nil {
		o.Args = []string{"supervise"}
	}
	if o.HaltAfter <= 0 {
		o.HaltAfter = time.Minute
	}
	return &process{
		opts:       o,
		con:        &console{},
		reaper:     newReaper(),
		keeper:     newKeeper(time.Now(), supervisor.Backoff{}),
		events:     make(chan any, 16),
		stopWithin: stopSupervisorWithin,
		ownsMounts: true,
		cgroup:     "/sys/fs/cgroup/supervisor",
		openDog: func() (feeder, error) {
			d, err := watchdog.Open(watchdog.Path)
			if err != nil {
				return nil, err // not a feeder that holds a nil
			}
			return d, nil
		},
		reboot: rebootMachine,
	}
}

// signals makes the signals of process 1 events. The kernel does not deliver to
// process 1 what it has no handler for.
func (p *process) signals() {
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE, syscall.SIGUSR1)
	got := make(chan os.Signal, 4)
	signal.Notify(got, syscall.SIGTERM, syscall.SIGINT, syscall.SIGUSR2)
	go func() {
		for s := range got {
			e := signalled{Reboot, "signal " + unix.SignalName(s.(syscall.Signal))}
			switch s {
			case syscall.SIGUSR2:
				e.action = PowerOff
			case syscall.SIGINT:
				e.name = "ctrl-alt-del"
			}
			p.events <- e
		}
	}()
}

// checkSelf ends the machine if the initramfs is not whole.
func (p *process) checkSelf() {
	have := memoryMiB()
	manifest, warning, err := selfcheck.Verify("/", have)
	if warning != "" {
		p.con.printf("%s", warning)
	}
	if err == nil {
		p.guarded("digest check", func() { p.checkDigests(manifest, have) })
		return
	}
	// All consoles, if the memory still allows for it: the one that the kernel
	// gave may be a serial port that nobody looks at.
	_ = mountAll(mounts[:3])
	p.con.openConsoles()
	p.con.printf("%v", err)
	p.con.printf("the machine restarts in %s", p.opts.HaltAfter)
	p.con.flush(10 * time.Second)
	time.Sleep(p.opts.HaltAfter)
	unix.Sync()
	err = p.reboot(Reboot)
	p.con.printf("restart: %v", err)
	for {
		time.Sleep(time.Hour)
	}
}

// digestsAfter is when the files' digests are checked: after the boot, which
// should not wait for it (3 s for 60 MB on a machine without KVM or SHA
// instructions).
const digestsAfter = 45 * time.Second

// checkDigests ends the machine if a file's content is not the manifest's.
func (p *process) checkDigests(m *selfcheck.Manifest, haveMiB int) {
	time.Sleep(digestsAfter)
	if err := m.CheckDigests("/"); err != nil {
		p.con.printf("%v", &selfcheck.Failure{HaveMiB: haveMiB, NeedMiB: m.MinMemMiB, Err: err})
		p.events <- signalled{Reboot, "this system is damaged"}
	}
}

// prepare makes the system that processes expect. Nothing here is worth not
// booting for: what fails is said.
func (p *process) prepare() {
	unix.Umask(0o022)
	if err := mountAll(mounts); err != nil {
		p.con.printf("%v", err)
	}
	if err := MountLate(); err != nil {
		p.con.printf("%v", err)
	}
	p.con.openConsoles()
	if err := setSysctls(); err != nil {
		p.con.printf("%v", err)
	}
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF); err != nil {
		p.con.printf("make ctrl-alt-del a signal: %v", err)
	}
	if p.opts.RescueShell != "" && rescueWanted("/proc/cmdline") {
		p.guarded("rescue shell", p.rescue)
	}
}

// serve is the life of process 1: events in, what the keeper says out. It
// returns only when ctx ends, which in process 1 it does not.
func (p *process) serve(ctx context.Context) {
	p.guarded("reaper", func() { p.reaper.run(ctx) })
	for panics := 0; ctx.Err() == nil; panics++ {
		p.attempt("main loop", func() { p.loop(ctx) })
		if panics > 10 && ctx.Err() == nil {
			p.attempt("shutdown", func() { p.goDown(Reboot, "process 1 keeps failing") })
		}
	}
}

func (p *process) loop(ctx context.Context) {
	ticker := time.NewTicker(tickEvery)
	defer ticker.Stop()
	var event any = tick{} // the first start does not wait for the ticker
	for {
		for _, e := range p.keeper.step(time.Now(), event) {
			p.effect(e)
		}
		if _, ok := event.(tick); ok {
			p.findWatchdog()
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			event = tick{}
		case event = <-p.events:
		}
	}
}

// effect does what the keeper decided.
func (p *process) effect(e any) {
	switch e := e.(type) {
	case startIt:
		if err := p.startChild(e.generation); err != nil {
			for _, more := range p.keeper.step(time.Now(), startFailed{err}) {
				p.effect(more)
			}
		}
	case killIt:
		if p.child != nil && p.child.generation == e.generation {
			_ = unix.Kill(p.child.pid, unix.SIGKILL) // ESRCH: it went by itself
		}
	case feed:
		if p.dog != nil {
			if err := p.dog.Feed(); err != nil {
				p.con.printf("%v", err)
			}
		}
	case tell:
		p.con.printf("%s", e.text)
	case end:
		p.goDown(e.action, e.reason)
	}
}

// findWatchdog opens the watchdog once its module has been loaded.
func (p *process) findWatchdog() {
	if p.dog != nil {
		return
	}
	dog, err := p.openDog()
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENXIO) {
		return
	}
	if err != nil {
		p.con.printf("%v; going on without it", err)
		p.dog = noDog{}
		return
	}
	timeout, err := dog.SetTimeout(watchdogTimeout)
	if err != nil {
		p.con.printf("%v", err)
	}
	p.dog = dog
	p.con.printf("hardware watchdog %q resets the machine after %s", dog.Identity(), timeout)
}

// noDog stands for a watchdog that cannot be had.
type noDog struct{}

func (noDog) Identity() string                                  { return "none" }
func (noDog) SetTimeout(d time.Duration) (time.Duration, error) { return d, nil }
func (noDog) Feed() error                                       { return nil }

// guarded runs f on a goroutine; a panic in it is told and not passed on, since
// it would end process 1 and with it the kernel.
func (p *process) guarded(name string, f func()) {
	go p.attempt(name, f)
}

func (p *process) attempt(name string, f func()) {
	defer func() {
		if v := recover(); v != nil {
			p.con.printf("internal: panic in the %s: %v\n%s", name, v, debug.Stack())
		}
	}()
	f()
}
