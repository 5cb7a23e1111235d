package pid1

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// reaper owns wait(2) in this process: every child, started or inherited, is
// waited for here and nowhere else. Two owners steal each other's exit statuses
// (measured: a naive reaper broke 9 to 22 of 40 os/exec runs); none leaves
// zombies. So nothing in process 1 may use os/exec or os.StartProcess.
type reaper struct {
	mu       sync.Mutex // held across fork, so that a child cannot end unregistered
	children map[int]chan syscall.WaitStatus
	orphans  int // reaped children that nobody here had started
}

func newReaper() *reaper {
	return &reaper{children: map[int]chan syscall.WaitStatus{}}
}

// start calls fork, which must start a child and return its pid. The channel
// gives the child's status once, when it has been reaped.
func (r *reaper) start(fork func() (pid int, err error)) (int, <-chan syscall.WaitStatus, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := fork()
	if err != nil {
		return 0, nil, err
	}
	done := make(chan syscall.WaitStatus, 1)
	r.children[pid] = done
	return pid, done, nil
}

// run reaps until ctx ends.
func (r *reaper) run(ctx context.Context) {
	died := make(chan os.Signal, 1)
	signal.Notify(died, syscall.SIGCHLD)
	defer signal.Stop(died)
	// SIGCHLDs merge, which reap allows for. The ticker is for the one that was
	// sent before Notify.
	ticker := time.NewTicker(tickEvery)
	defer ticker.Stop()
	for {
		r.reap()
		select {
		case <-ctx.Done():
			return
		case <-died:
		case <-ticker.C:
		}
	}
}

// reap waits for whatever has ended and says whether any child is left.
func (r *reaper) reap() (left bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		switch {
		case err == syscall.EINTR:
			continue
		case err != nil: // ECHILD: none is left
			return false
		case pid == 0:
			return true
		}
		if done, ok := r.children[pid]; ok {
			delete(r.children, pid)
			done <- status
		} else {
			r.orphans++
		}
	}
}

// reaped gives the number of adopted processes that were reaped.
func (r *reaper) reaped() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.orphans
}
