package rig

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

const (
	qemuProgram = "qemu-system-x86_64"
	// launches is how often a machine that says nothing at all is started.
	launches = 3
	// pollEvery is how often console and conditions are looked at.
	pollEvery = 200 * time.Millisecond
	// qmpLimit bounds one command to QEMU, which answers at once.
	qmpLimit = 15 * time.Second
)

// booting lets one machine boot at a time: two on two cores starve each
// other's timer calibration. It is held from power-on to the first WaitConsole
// or Until that succeeds.
var booting = make(chan struct{}, 1)

// VM is a machine. Its disks and firmware variables outlive its power.
type VM struct {
	Config
	// Accel is what it runs under.
	Accel string

	smbios  []string
	sockets string

	mu      sync.Mutex
	cmd     *exec.Cmd
	qmp     *qmp
	done    chan struct{} // closed when QEMU has ended
	settled func()        // gives the boot slot back
	fault   error         // KVM gave up, or QEMU's unasked end
	// keyboard is QEMU's standard input, nil for a machine without.
	keyboard *os.File
	// seen counts QEMU's events by name, over all power cuts.
	seen map[string]int
}

// Start makes the machine and switches it on. It returns once the machine said
// its first byte. The caller must Close it.
func Start(ctx context.Context, config Config) (*VM, error) {
	config, err := config.withDefaults()
	if err != nil {
		return nil, err
	}
	vm := &VM{Config: config, Accel: config.Accel, seen: map[string]int{}}
	if vm.Accel == "" {
		vm.Accel, _ = Accelerator()
	}
	if config.Kernel == "" {
		if err := config.writeVars(); err != nil {
			return nil, err
		}
	}
	// A socket's path has at most 107 bytes: a test's own folder may be longer.
	if vm.sockets, err = os.MkdirTemp("", "bcd-vm-"); err != nil {
		return nil, err
	}
	if err := vm.PowerOn(ctx); err != nil {
		vm.Close()
		return nil, err
	}
	return vm, nil
}

// PowerOn switches a machine on that is off: same disks, same variables. The
// console is appended to.
func (vm *VM) PowerOn(ctx context.Context) error {
	if vm.running() {
		return fmt.Errorf("machine %s is on already", vm.Name)
	}
	for try := 1; ; try++ {
		silent, err := vm.launch(ctx)
		if err == nil || !silent || try == launches {
			return err
		}
		vm.PowerCut()
	}
}

// launch starts QEMU and waits for a byte; silent says that none came.
func (vm *VM) launch(ctx context.Context) (silent bool, err error) {
	select {
	case booting <- struct{}{}:
	case <-ctx.Done():
		return false, fmt.Errorf("machine %s waits for another one to boot: %w", vm.Name, context.Cause(ctx))
	}
	settled := sync.OnceFunc(func() { <-booting })
	defer func() {
		if err != nil {
			settled()
		}
	}()
	if vm.smbios, err = writeSMBIOS(vm.Dir, vm.Config.SMBIOS); err != nil {
		return false, fmt.Errorf("machine %s: %w", vm.Name, err)
	}
	// QEMU has read them once it answers; a folder that stays has no token.
	defer os.RemoveAll(filepath.Join(vm.Dir, smbiosDir))
	code := ""
	if vm.Kernel == "" {
		if code, _, err = vm.firmwareFiles(); err != nil {
			return false, err
		}
	}
	socket := filepath.Join(vm.sockets, "qmp")
	os.Remove(socket)
	args, err := vm.args(vm.Accel, socket, code, vm.smbios)
	if err != nil {
		return false, err
	}
	stderr, err := os.OpenFile(filepath.Join(vm.Dir, StderrLog), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return false, err
	}
	defer stderr.Close()
	cmd := exec.Command(qemuProgram, args...)
	cmd.Stdout, cmd.Stderr = stderr, stderr
	plugged, err := vm.plugKeyboard(cmd)
	if err != nil {
		return false, fmt.Errorf("machine %s: keyboard: %w", vm.Name, err)
	}
	defer plugged()
	// QEMU does not outlive the test, however that ends.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	before := vm.consoleSize()
	if err := cmd.Start(); err != nil {
		return false, fmt.Errorf("machine %s: %w; install the package qemu-system-x86", vm.Name, err)
	}
	done := make(chan struct{})
	vm.mu.Lock()
	vm.cmd, vm.done, vm.settled, vm.fault = cmd, done, settled, nil
	vm.mu.Unlock()
	go func() {
		cmd.Wait()
		settled()
		close(done)
	}()
	if err := vm.connect(ctx, socket); err != nil {
		vm.PowerCut()
		return false, fmt.Errorf("machine %s: %w: %s", vm.Name, err, vm.stderrTail())
	}
	err = vm.watch(ctx, "the first byte on the console", func() (bool, error) { return vm.consoleSize() > before, nil })
	return errors.As(err, new(*silence)), err
}

// connect waits for QEMU's socket.
func (vm *VM) connect(ctx context.Context, socket string) error {
	ctx, cancel := context.WithTimeout(ctx, qmpLimit)
	defer cancel()
	poll := time.NewTicker(20 * time.Millisecond)
	defer poll.Stop()
	for {
		q, err := dialQMP(ctx, socket)
		if err == nil {
			vm.mu.Lock()
			vm.qmp = q
			vm.mu.Unlock()
			go vm.listen(q)
			return nil
		}
		select {
		case <-vm.done:
			return errors.New("QEMU ended at once")
		case <-ctx.Done():
			return err
		case <-poll.C:
		}
	}
}

// listen looks for a virtual machine that stopped because KVM gave up on it.
func (vm *VM) listen(q *qmp) {
	for e := range q.events {
		vm.mu.Lock()
		vm.seen[e.Name]++
		vm.mu.Unlock()
		if e.Name != "STOP" {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), qmpLimit)
		raw, err := q.Do(ctx, "query-status", nil)
		cancel()
		var status struct{ Status string }
		if err == nil && json.Unmarshal(raw, &status) == nil && status.Status == "internal-error" {
			vm.mu.Lock()
			vm.fault = errors.New("QEMU stopped the machine with an internal error; with KVM, try BCD_NO_KVM=1")
			vm.mu.Unlock()
		}
	}
}

// Events is how often QEMU told of an event, such as "RESET" or "WATCHDOG".
func (vm *VM) Events(name string) int {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	return vm.seen[name]
}

// silence is the error of a machine that does nothing.
type silence struct{ error }

func (s *silence) Unwrap() error { return s.error }

// watch polls a condition until it holds; it fails when the machine is off,
// silent for too long, or the context ends.
func (vm *VM) watch(ctx context.Context, what string, holds func() (bool, error)) error {
	v := vigil{limit: patience(vm.Accel)}
	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	for {
		// Asked before the condition, so that last words still count.
		on := vm.running()
		ok, err := holds()
		if ok {
			return nil
		}
		if err == nil {
			err = vm.failure()
		}
		if err == nil && !on {
			err = fmt.Errorf("the machine is off; QEMU said: %s", vm.stderrTail())
		}
		if err == nil {
			if err = v.step(time.Now(), vm.signs(ctx)); err != nil {
				err = &silence{err}
			}
		}
		if err == nil {
			select {
			case <-ctx.Done():
				err = context.Cause(ctx)
			case <-poll.C:
			}
		}
		if err != nil {
			return fmt.Errorf("machine %s (%s): waiting for %s: %w; the console is %s", vm.Name, vm.Accel, what, err, vm.ConsolePath())
		}
	}
}

func (vm *VM) signs(ctx context.Context) signs {
	s := signs{console: vm.consoleSize()}
	raw, err := vm.Command(ctx, "query-blockstats", nil)
	if err != nil {
		return s
	}
	var devices []struct {
		Stats struct {
			Read    uint64 `json:"rd_bytes"`
			Written uint64 `json:"wr_bytes"`
		} `json:"stats"`
	}
	if json.Unmarshal(raw, &devices) == nil {
		for _, d := range devices {
			s.blocks += d.Stats.Read + d.Stats.Written
		}
	}
	return s
}

// Until waits for a condition outside the machine, such as a record at the
// gateway. It ends as WaitConsole does, or with the condition's own error.
func (vm *VM) Until(ctx context.Context, what string, holds func(context.Context) (bool, error)) error {
	err := vm.watch(ctx, what, func() (bool, error) { return holds(ctx) })
	if err == nil {
		vm.Booted()
	}
	return err
}

// Booted lets the next machine boot.
func (vm *VM) Booted() {
	vm.mu.Lock()
	settled := vm.settled
	vm.mu.Unlock()
	if settled != nil {
		settled()
	}
}

// Command is a QMP command to QEMU.
func (vm *VM) Command(ctx context.Context, command string, arguments any) (json.RawMessage, error) {
	vm.mu.Lock()
	q := vm.qmp
	vm.mu.Unlock()
	if q == nil {
		return nil, fmt.Errorf("machine %s is off", vm.Name)
	}
	ctx, cancel := context.WithTimeout(ctx, qmpLimit)
	defer cancel()
	return q.Do(ctx, command, arguments)
}

// Reset presses the reset button.
func (vm *VM) Reset(ctx context.Context) error {
	_, err := vm.Command(ctx, "system_reset", nil)
	return err
}

// Pause stops the machine's processors, Resume lets them run on.
func (vm *VM) Pause(ctx context.Context) error {
	_, err := vm.Command(ctx, "stop", nil)
	return err
}

// Resume ends a Pause.
func (vm *VM) Resume(ctx context.Context) error {
	_, err := vm.Command(ctx, "cont", nil)
	return err
}

// SetLink plugs network card n in or out.
func (vm *VM) SetLink(ctx context.Context, n int, up bool) error {
	_, err := vm.Command(ctx, "set_link", map[string]any{"name": fmt.Sprintf("net%d", n), "up": up})
	return err
}

// PowerCut takes the power away: QEMU is killed, nothing is flushed by the
// machine. What the machine wrote to its disks before is there, because the
// host stays up: this tests order, not the host's page cache.
func (vm *VM) PowerCut() {
	vm.mu.Lock()
	cmd, done, q := vm.cmd, vm.done, vm.qmp
	vm.qmp = nil
	vm.mu.Unlock()
	if cmd == nil {
		return
	}
	// By process, never by name; one that has ended is no fault.
	cmd.Process.Kill()
	<-done
	if q != nil {
		q.Close()
	}
	vm.unplugKeyboard()
}

// Done is closed when QEMU has ended, as it does when the machine powers off.
func (vm *VM) Done() <-chan struct{} {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	return vm.done
}

// PID is QEMU's process, 0 when off. A demo shows by it that one process ran
// from the first boot to the last.
func (vm *VM) PID() int {
	if !vm.running() {
		return 0
	}
	vm.mu.Lock()
	defer vm.mu.Unlock()
	return vm.cmd.Process.Pid
}

func (vm *VM) running() bool {
	vm.mu.Lock()
	done := vm.done
	vm.mu.Unlock()
	if done == nil {
		return false
	}
	select {
	case <-done:
		return false
	default:
		return true
	}
}

func (vm *VM) failure() error {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	return vm.fault
}

// Close cuts the power and removes the sockets; Dir stays.
func (vm *VM) Close() error {
	vm.PowerCut()
	return os.RemoveAll(vm.sockets)
}

func (vm *VM) stderrTail() string {
	text := bytes.TrimSpace(tailOf(filepath.Join(vm.Dir, StderrLog), 500))
	if len(text) == 0 {
		return "(nothing)"
	}
	return string(text)
}

// tailOf gives the last n bytes of a file, nothing when it cannot be read.
func tailOf(name string, n int64) []byte {
	f, err := os.Open(name)
	if err != nil {
		return nil
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > n {
		if _, err := f.Seek(-n, io.SeekEnd); err != nil {
			return nil
		}
	}
	b, err := io.ReadAll(io.LimitReader(f, n))
	if err != nil {
		return nil
	}
	return b
}
