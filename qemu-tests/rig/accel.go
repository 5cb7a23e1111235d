package rig

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"
)

// Accelerators.
const (
	KVM = "kvm"
	TCG = "tcg"
)

// probeLimit is how long the firmware may take to show that KVM works; it
// takes about two seconds.
const probeLimit = 20 * time.Second

var accelerator = sync.OnceValues(func() (string, string) {
	if os.Getenv("BCD_NO_KVM") != "" {
		return TCG, "BCD_NO_KVM is set"
	}
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return TCG, err.Error()
	}
	if !hardwareVirtualisation(info) {
		return TCG, "the processor offers no hardware virtualisation here"
	}
	if err := probeKVM(); err != nil {
		return TCG, err.Error()
	}
	return KVM, "the firmware started under KVM"
})

// Accelerator gives "kvm" or "tcg", and why. KVM is taken only when it was
// seen to work: a /dev/kvm that emulates in software stops in the middle of a
// kernel's start with an internal error. BCD_NO_KVM=1 decides for TCG.
func Accelerator() (accel, reason string) { return accelerator() }

// hardwareVirtualisation looks for Intel's or AMD's flag in /proc/cpuinfo.
func hardwareVirtualisation(cpuinfo []byte) bool {
	for line := range bytes.Lines(cpuinfo) {
		key, value, ok := bytes.Cut(line, []byte(":"))
		if !ok || string(bytes.TrimSpace(key)) != "flags" {
			continue
		}
		for flag := range bytes.FieldsSeq(value) {
			if string(flag) == "vmx" || string(flag) == "svm" {
				return true
			}
		}
	}
	return false
}

// probeKVM starts the firmware with nothing to boot and waits for its first
// words on the console.
func probeKVM() error {
	dir, err := os.MkdirTemp("", "bcd-kvm-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	code, _, err := Config{Firmware: UEFI}.firmwareFiles()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), probeLimit)
	defer cancel()
	console := filepath.Join(dir, ConsoleLog)
	cmd := exec.CommandContext(ctx, qemuProgram, "-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35",
		"-accel", "kvm", "-cpu", "max", "-smp", "2", "-m", "256M", "-serial", "file:"+quote(console),
		"-drive", "if=pflash,format=raw,readonly=on,file="+quote(code))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	poll := time.NewTicker(100 * time.Millisecond)
	defer poll.Stop()
	for {
		select {
		case err := <-ended:
			return fmt.Errorf("KVM does not work here: %v: %s", err, bytes.TrimSpace(firstBytes(stderr.Bytes(), 200)))
		case <-poll.C:
			if text, err := os.ReadFile(console); err == nil && bytes.Contains(text, []byte("Bds")) {
				cancel()
				<-ended
				return nil
			}
		}
	}
}

func firstBytes(b []byte, n int) []byte { return b[:min(n, len(b))] }
