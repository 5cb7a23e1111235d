package pid1

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// child is a supervisor process.
type child struct {
	generation int
	pid        int
	gone       chan struct{} // closed when it has been reaped
}

// startChild starts a supervisor process and the goroutines that listen to it.
func (p *process) startChild(generation int) error {
	beats, beatsChild, err := pipe()
	if err != nil {
		return err
	}
	defer beatsChild.Close()
	output, outputChild, err := pipe()
	if err != nil {
		beats.Close()
		return err
	}
	defer outputChild.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		beats.Close()
		output.Close()
		return err
	}
	defer null.Close()

	attr := &syscall.ProcAttr{
		Dir:   "/",
		Env:   slices.Concat(environment, p.opts.Env, []string{fmt.Sprintf("%s=%d", fdVariable, 3)}),
		Files: []uintptr{null.Fd(), outputChild.Fd(), outputChild.Fd(), beatsChild.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	}
	if dir := openCgroup(p.cgroup); dir != nil {
		defer dir.Close()
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, int(dir.Fd())
	}
	argv := append([]string{"bcd"}, p.opts.Args...)
	pid, status, err := p.reaper.start(func() (int, error) {
		return syscall.ForkExec("/proc/self/exe", argv, attr)
	})
	if err != nil {
		beats.Close()
		output.Close()
		return err
	}
	c := &child{generation: generation, pid: pid, gone: make(chan struct{})}
	p.child = c
	p.guarded("message reader", func() {
		readMessages(beats, func(m message, err error) { p.events <- said{generation, m, err} })
	})
	var copied sync.WaitGroup
	copied.Add(1)
	p.guarded("output reader", func() {
		defer copied.Done()
		p.con.copyFrom(output)
	})
	p.guarded("child waiter", func() {
		s := <-status
		// What it started must not go on beside its successor's.
		_ = unix.Kill(-pid, unix.SIGKILL)
		killCgroup(p.cgroup)
		close(c.gone)
		beats.Close()
		waitAtMost(&copied, time.Second) // its last words come before the news of its death
		output.Close()
		p.events <- exited{generation, howEnded(s)}
	})
	return nil
}

// pipe returns a pipe: a read end that the runtime polls, and a write end for a
// child.
func pipe() (r, w *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, fmt.Errorf("make a pipe: %w", err)
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return nil, nil, fmt.Errorf("make a pipe: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "pipe"), os.NewFile(uintptr(fds[1]), "pipe"), nil
}

func waitAtMost(wg *sync.WaitGroup, d time.Duration) {
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(d):
	}
}

// openCgroup makes and opens the supervisor's cgroup, nil where there are none.
func openCgroup(path string) *os.File {
	if path == "" {
		return nil
	}
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return nil
	}
	dir, err := os.Open(path)
	if err != nil {
		return nil
	}
	return dir
}

// killCgroup kills whatever is left in the cgroup (cgroup.kill, Linux 5.14).
func killCgroup(path string) {
	if path != "" {
		_ = os.WriteFile(path+"/cgroup.kill", []byte("1"), 0) // absent: the process group was all there is
	}
}
