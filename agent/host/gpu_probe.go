package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// Bounds of one run of nvidia-smi. A healthy 8-GPU machine answers in about a
// second with persistence mode, in some seconds without; status must not wait
// longer than people do.
const (
	defaultProbeTimeout = 3 * time.Second
	// probeGrace is how long a killed nvidia-smi may take to die, and its
	// descendants to close the pipe, before it is abandoned.
	probeGrace = 250 * time.Millisecond
)

// GPUProbe runs nvidia-smi without ever waiting for it: in its own process
// group, with a deadline, at most one at a time. A child that does not die at
// the deadline is abandoned, and as long as it lives each further call
// answers [ErrProbeHung] at once: a second one would hang in the same lock.
//
// The zero value is ready: it looks for nvidia-smi in PATH and gives it 3 s.
// It is safe for concurrent use; concurrent calls share one run.
type GPUProbe struct {
	// Path of nvidia-smi; empty looks in PATH.
	Path string
	// Timeout of one run; 0 is 3 s.
	Timeout time.Duration

	mu     sync.Mutex
	run    *probeRun
	last   GPUSample
	lastAt time.Time
}

// probeRun is one child. done is closed when it has been waited for, which
// for an abandoned one may be never.
type probeRun struct {
	done   chan struct{}
	ready  chan struct{} // closed when sample and err are set
	sample GPUSample
	err    error
}

// Last returns the newest good sample and when it was taken, so that a caller
// can show it with its age while the probe hangs.
func (p *GPUProbe) Last() (GPUSample, time.Time, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.last, p.lastAt, !p.lastAt.IsZero()
}

// Sample asks nvidia-smi. It returns within the timeout and a grace of 0.25 s
// or when ctx ends. Errors are those of the package, or nvidia-smi's own
// complaint.
func (p *GPUProbe) Sample(ctx context.Context) (GPUSample, error) {
	if !gpuReading {
		return GPUSample{}, ErrNoGPUReader
	}
	run, err := p.join()
	if err != nil {
		return GPUSample{}, err
	}
	select {
	case <-run.ready:
		return run.sample, run.err
	case <-ctx.Done():
		return GPUSample{}, fmt.Errorf("nvidia-smi: %w", ctx.Err())
	}
}

// join returns the run in flight, or starts one.
func (p *GPUProbe) join() (*probeRun, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if run := p.run; run != nil {
		select {
		case <-run.done: // over; a new one below
		default:
			select {
			case <-run.ready: // answered for, and still alive: abandoned
				return nil, ErrProbeHung
			default:
				return run, nil
			}
		}
	}
	path := p.Path
	if path == "" {
		path = "nvidia-smi"
	}
	path, err := exec.LookPath(path)
	if err != nil {
		return nil, ErrNoNVIDIASMI
	}
	run := &probeRun{done: make(chan struct{}), ready: make(chan struct{})}
	p.run = run
	go p.drive(run, path)
	return run, nil
}

// drive runs the child and answers for it, at the deadline at the latest.
func (p *GPUProbe) drive(run *probeRun, path string) {
	timeout := p.Timeout
	if timeout <= 0 {
		timeout = defaultProbeTimeout
	}
	out := &limitedBuffer{limit: maxSMIOutput}
	cmd := exec.Command(path, "-q", "-x")
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Env = []string{"LC_ALL=C", "PATH=" + os.Getenv("PATH")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// A descendant may hold the pipe open after the child is gone.
	cmd.WaitDelay = probeGrace

	if err := cmd.Start(); err != nil {
		close(run.done)
		p.answer(run, GPUSample{}, fmt.Errorf("nvidia-smi: %w", err))
		return
	}
	waited := make(chan error, 1)
	go func() {
		waited <- cmd.Wait()
		close(run.done)
	}()
	deadline := time.NewTimer(timeout)
	defer deadline.Stop()
	select {
	case err := <-waited:
		sample, err := judge(out.bytes(), err)
		p.answer(run, sample, err)
		return
	case <-deadline.C:
	}
	// The whole group, so that a wrapper script's children go too. An error
	// means that it is gone already.
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	grace := time.NewTimer(probeGrace)
	defer grace.Stop()
	select {
	case <-waited:
	case <-grace.C:
	}
	p.answer(run, GPUSample{}, fmt.Errorf("%w (no answer in %s)", ErrProbeHung, timeout))
}

func (p *GPUProbe) answer(run *probeRun, sample GPUSample, err error) {
	p.mu.Lock()
	if err == nil {
		p.last, p.lastAt = sample, time.Now()
	}
	p.mu.Unlock()
	run.sample, run.err = sample, err
	close(run.ready)
}

// judge makes a sample of what nvidia-smi printed and how it ended.
func judge(out []byte, exit error) (GPUSample, error) {
	if errors.Is(exit, exec.ErrWaitDelay) {
		exit = nil // it ended well; only something it started keeps the pipe open
	}
	sample, err := ParseSMI(out)
	if err != nil {
		var code *exec.ExitError
		if errors.As(exit, &code) && len(bytes.TrimSpace(out)) == 0 {
			return GPUSample{}, fmt.Errorf("nvidia-smi: %w and printed nothing", exit)
		}
		return GPUSample{}, err
	}
	if exit != nil {
		sample.Note = joinText(sample.Note, "nvidia-smi: "+exit.Error()+lostText(out))
	}
	return sample, nil
}

// lostText picks the line by which nvidia-smi names a GPU it cannot reach.
func lostText(out []byte) string {
	for line := range bytes.Lines(out) {
		if bytes.Contains(line, []byte("Unable to determine the device handle")) || bytes.Contains(line, []byte("is lost")) {
			return ": " + clean(string(line))
		}
	}
	return ""
}

// limitedBuffer keeps the first limit bytes and drops the rest, so that a
// child that prints for ever costs nothing. It has a lock because an
// abandoned child's copier may still write while the probe reads.
type limitedBuffer struct {
	mu    sync.Mutex
	buf   []byte
	limit int
}

func (b *limitedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	room := max(b.limit-len(b.buf), 0)
	b.buf = append(b.buf, p[:min(len(p), room)]...)
	return len(p), nil
}

func (b *limitedBuffer) bytes() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	return bytes.Clone(b.buf)
}
