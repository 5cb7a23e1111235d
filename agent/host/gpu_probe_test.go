//go:build !nonvml

package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// script writes a stand-in for nvidia-smi.
func script(t *testing.T, body string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "nvidia-smi")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+body), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func testdata(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func TestProbe(t *testing.T) {
	h100 := testdata(t, "smi-h100.xml")
	for _, test := range []struct {
		name, body string
		gpus       int
		err        error
		note       string
	}{
		{"healthy", "[ \"$*\" = '-q -x' ] && cat " + h100, 2, nil, ""},
		{"one GPU lost, the others serve", "cat " + h100 + "; echo 'Unable to determine the device handle for GPU0000:B3:00.0: GPU is lost.  Reboot the system to recover this GPU'; exit 15", 2, nil, "exit status 15: Unable to determine the device handle for GPU0000:B3:00.0: GPU is lost."},
		{"no device", "echo 'No devices were found'; exit 6", 0, ErrNoDevices, ""},
		{"mismatch", "echo 'Failed to initialize NVML: Driver/library version mismatch' >&2; exit 18", 0, ErrVersionMismatch, ""},
	} {
		p := &GPUProbe{Path: script(t, test.body), Timeout: time.Minute}
		s, err := p.Sample(context.Background())
		if !errors.Is(err, test.err) || len(s.GPUs) != test.gpus || !strings.Contains(s.Note, test.note) {
			t.Errorf("%s: %d gpus, note %q, %v", test.name, len(s.GPUs), s.Note, err)
		}
		if _, _, ok := p.Last(); ok != (test.err == nil) {
			t.Errorf("%s: last sample there: %t", test.name, ok)
		}
	}
	silent := &GPUProbe{Path: script(t, "exit 9"), Timeout: time.Minute}
	if _, err := silent.Sample(context.Background()); err == nil || !strings.Contains(err.Error(), "exit status 9 and printed nothing") {
		t.Error(err)
	}
	missing := &GPUProbe{Path: filepath.Join(t.TempDir(), "nvidia-smi")}
	if _, err := missing.Sample(context.Background()); !errors.Is(err, ErrNoNVIDIASMI) {
		t.Error(err)
	}
}

// The child ends and something it started keeps the pipe open: that must not
// hold the answer up.
func TestProbePipeHeldOpen(t *testing.T) {
	pidFile := filepath.Join(t.TempDir(), "pid")
	body := fmt.Sprintf("sleep 600 & echo $! >%s; cat %s", pidFile, testdata(t, "smi-h100.xml"))
	p := &GPUProbe{Path: script(t, body), Timeout: time.Minute}
	s, err := p.Sample(context.Background())
	if err != nil || len(s.GPUs) != 2 || s.Note != "" {
		t.Errorf("%d gpus, note %q, %v", len(s.GPUs), s.Note, err)
	}
	killPID(t, pidFile)
}

func killPID(t *testing.T, file string) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Fatal(err)
	}
	_ = syscall.Kill(pid, syscall.SIGKILL) // may be gone already
}

// A child that does not answer is killed at its deadline, and once it is gone
// the next call asks again.
func TestProbeHangs(t *testing.T) {
	p := &GPUProbe{Path: script(t, "exec sleep 600"), Timeout: 100 * time.Millisecond}
	if _, err := p.Sample(context.Background()); !errors.Is(err, ErrProbeHung) || !strings.Contains(err.Error(), "100ms") {
		t.Error(err)
	}
	p.mu.Lock()
	run := p.run
	p.mu.Unlock()
	<-run.done
	p.Path = script(t, "cat "+testdata(t, "smi-h100.xml"))
	p.Timeout = time.Minute
	if _, err := p.Sample(context.Background()); err != nil {
		t.Error(err)
	}
}

// An unkillable child, as in D state: until it goes, no second one is
// started and each call answers at once.
func TestProbeAbandoned(t *testing.T) {
	starts := filepath.Join(t.TempDir(), "starts")
	p := &GPUProbe{Path: script(t, "echo x >>"+starts+"; exit 1"), Timeout: time.Minute}
	stuck := &probeRun{done: make(chan struct{}), ready: make(chan struct{}), err: ErrProbeHung}
	close(stuck.ready) // answered for, never waited for
	p.run = stuck
	for range 3 {
		if _, err := p.Sample(context.Background()); !errors.Is(err, ErrProbeHung) {
			t.Error(err)
		}
	}
	if _, err := os.Stat(starts); err == nil {
		t.Error("a second nvidia-smi was started beside the hung one")
	}
	close(stuck.done)
	if _, err := p.Sample(context.Background()); errors.Is(err, ErrProbeHung) {
		t.Error("still hung after the child went")
	}
}

func TestProbeSharesOneRun(t *testing.T) {
	dir := t.TempDir()
	fifo, starts := filepath.Join(dir, "go"), filepath.Join(dir, "starts")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	p := &GPUProbe{Path: script(t, fmt.Sprintf("echo x >>%s; read line <%s; cat %s", starts, fifo, testdata(t, "smi-h100.xml"))), Timeout: time.Minute}
	var asked, wait sync.WaitGroup
	for range 8 {
		asked.Add(1)
		wait.Go(func() {
			run, err := p.join()
			asked.Done()
			if err != nil {
				t.Error(err)
				return
			}
			<-run.ready
		})
	}
	asked.Wait()
	f, err := os.OpenFile(fifo, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString("go\n"); err != nil {
		t.Error(err)
	}
	f.Close()
	wait.Wait()
	if b, err := os.ReadFile(starts); err != nil || strings.Count(string(b), "x") != 1 {
		t.Errorf("started %q, %v", b, err)
	}
}

func TestProbeEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	p := &GPUProbe{Path: script(t, "exec sleep 600"), Timeout: 100 * time.Millisecond}
	if _, err := p.Sample(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	p.mu.Lock()
	run := p.run
	p.mu.Unlock()
	<-run.done // killed at its deadline all the same
}

// A GPU that the bus shows and nvidia-smi does not makes the section say so,
// and keeps the others.
func TestLostGPUInInventory(t *testing.T) {
	roots := plant(t, "server.tree")
	roots.GPUs = &GPUProbe{Path: script(t, "cat "+testdata(t, "smi-h100.xml")), Timeout: time.Minute}
	f := recordedFacts(context.Background(), roots)
	if f.GPU.Reader != "nvidia-smi" || len(f.GPU.Devices) != 2 || f.Errors["gpu"] != "the PCI bus shows 1 GPU, nvidia-smi 2" {
		t.Errorf("%+v, %q", f.GPU, f.Errors["gpu"])
	}
}
