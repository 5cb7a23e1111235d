package rig

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Namespace is a network namespace for what a LAN has besides machines: its
// DHCP server, a site agent, a gateway. No name and no process holds it, only
// this process's file: it is gone when that and the processes in it are.
type Namespace struct {
	file *os.File
}

// NewNamespace makes a namespace with only a loopback device, which is up. It
// needs root.
func NewNamespace() (*Namespace, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("a network namespace needs root: run the test as root")
	}
	n := &Namespace{}
	err := elsewhere(func() error { return unix.Unshare(unix.CLONE_NEWNET) }, func() (err error) {
		n.file, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := n.IP("link set lo up"); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

// RunNamespace makes a namespace for a test.
func RunNamespace(t testing.TB) *Namespace {
	t.Helper()
	n, err := NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

// elsewhere runs f on a thread that has left for another network namespace,
// and brings the thread back. A thread that ended instead would take along
// every process that it once started with a parent-death signal: that signal
// is about the thread, and any thread may have started any of them.
func elsewhere(leave, f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			runtime.UnlockOSThread()
			result <- err
			return
		}
		defer home.Close()
		if err = leave(); err != nil {
			err = fmt.Errorf("network namespace: %w", err)
		} else {
			err = f()
		}
		if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
			// Still locked: the thread ends with this goroutine, and nothing
			// else runs in the wrong place.
			err = errors.Join(err, fmt.Errorf("back from the network namespace: %w", back))
		} else {
			runtime.UnlockOSThread()
		}
		result <- err
	}()
	return <-result
}

// Do runs f on a thread in the namespace: sockets that f opens are there, for
// good. Processes are started with Command.
func (n *Namespace) Do(f func() error) error {
	return elsewhere(func() error { return unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET) }, f)
}

// Command gives a program that will run in the namespace and die with this
// process. Its process number is the program's own.
func (n *Namespace) Command(ctx context.Context, program string, args ...string) *exec.Cmd {
	net := fmt.Sprintf("--net=/proc/%d/fd/%d", os.Getpid(), n.file.Fd())
	c := exec.CommandContext(ctx, "nsenter", append([]string{net, "--", program}, args...)...)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return c
}

// IP runs one command of ip(8), words by spaces, in the namespace.
func (n *Namespace) IP(line string) error {
	out, err := n.Command(context.Background(), "ip", strings.Fields(line)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", line, err, firstBytes(out, 300))
	}
	return nil
}

// Close lets go of the namespace; processes in it keep it until they end.
func (n *Namespace) Close() error { return n.file.Close() }

// Join plugs the namespace in: it gets a device with the address, such as
// "10.77.0.1/24", which is up.
func (l *LAN) Join(n *Namespace, device, address string) (*Port, error) {
	var file *os.File
	err := n.Do(func() (err error) {
		file, err = openTAP(device)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("LAN port %s: %w", device, err)
	}
	for _, line := range []string{"addr add " + address + " dev " + device, "link set " + device + " up"} {
		if err := n.IP(line); err != nil {
			return nil, errors.Join(fmt.Errorf("LAN port %s: %w", device, err), file.Close())
		}
	}
	p, err := l.add(device, &tapWire{file: file, buf: make([]byte, maxFrame)})
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return p, nil
}

// openTAP makes a TAP device in the thread's namespace. It is there as long as
// the file is open.
func openTAP(device string) (*os.File, error) {
	request, err := unix.NewIfreq(device)
	if err != nil {
		return nil, fmt.Errorf("TAP device %q: %w", device, err)
	}
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/net/tun: %w; the kernel's tun module is needed", err)
	}
	request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("TAP device %s: %w", device, err)
	}
	// Non-blocking, so that Close ends a read.
	return os.NewFile(uintptr(fd), "tap "+device), nil
}
