package rig

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// TestMachineLife takes a machine without anything to boot through all that
// tests do to one. The firmware's own words are enough for that.
func TestMachineLife(t *testing.T) {
	ctx := Context(t)
	dir := Folder(t)
	disk, err := NewDisk(dir, "disk.raw", 16<<20)
	if err != nil {
		t.Fatal(err)
	}
	vm := Run(t, dir, Config{
		Name: "life", MemoryMiB: 256, Watchdog: true, Results: true, Keyboard: true, RTC: "1970-01-02T00:00:00",
		SMBIOS: []string{"bcd.token=bcjt_canary,with,commas"},
		NICs:   []NIC{{Model: "e1000e", Capture: true}},
		Disks:  []Disk{{Path: disk, Serial: "LIFE1", BootIndex: 1}},
	})
	const nothing = "Bds"
	mark, err := vm.WaitConsoleAfter(ctx, 0, nothing)
	if err != nil {
		t.Fatal(err)
	}

	cmdline, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(vm.PID()), "cmdline"))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(cmdline), "canary") {
		t.Error("a token is in QEMU's arguments")
	}
	if _, err := os.Stat(filepath.Join(vm.Dir, smbiosDir)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the strings stay on disk: %v", err)
	}

	if err := vm.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	if raw, err := vm.Command(ctx, "query-status", nil); err != nil || !strings.Contains(string(raw), `"paused"`) {
		t.Errorf("paused machine: %s, %v", raw, err)
	}
	if err := errors.Join(vm.Resume(ctx), vm.SetLink(ctx, 0, false), vm.SetLink(ctx, 0, true)); err != nil {
		t.Error(err)
	}
	mark = max(mark, vm.ConsoleMark())
	if err := vm.Reset(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err = vm.WaitConsoleAfter(ctx, mark, nothing); err != nil {
		t.Fatal(err)
	}
	if vm.Events("RESET") == 0 {
		t.Error("QEMU's event of the reset was not seen")
	}
	if err := errors.Join(vm.Type(ctx, "a"), vm.Type(ctx, "b\n"), vm.Throttle(ctx, 0, 1<<20), vm.Throttle(ctx, 0, 0)); err != nil {
		t.Error(err)
	}

	first := vm.PID()
	vm.PowerCut()
	if vm.PID() != 0 {
		t.Error("the machine has no power and a process")
	}
	err = vm.WaitConsole(ctx, "words that nobody says")
	if err == nil || !strings.Contains(err.Error(), "off") {
		t.Errorf("waiting for a machine that is off: %v", err)
	}
	mark = vm.ConsoleMark()
	if err := vm.PowerOn(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err = vm.WaitConsoleAfter(ctx, mark, nothing); err != nil {
		t.Fatal(err)
	}
	if vm.PID() == first {
		t.Error("the same process after a power cut")
	}

	// A wait ends with its context, and says for what it waited.
	short, cancel := context.WithCancelCause(ctx)
	cancel(errors.New("enough"))
	if err := vm.WaitConsole(short, "words that nobody says"); err == nil || !strings.Contains(err.Error(), "enough") || !strings.Contains(err.Error(), "nobody says") {
		t.Errorf("got %v", err)
	}
	if info, err := os.Stat(filepath.Join(vm.Dir, "nic0.pcap")); err != nil || info.Size() < 24 {
		t.Errorf("capture: %v", err)
	}
}

// TestQEMUThatCannotStart must say why, not wait.
func TestQEMUThatCannotStart(t *testing.T) {
	dir := t.TempDir()
	_, err := Start(Context(t), Config{Name: "broken", Dir: dir, Accel: TCG, Disks: []Disk{{Path: filepath.Join(dir, "missing.raw")}}})
	if err == nil || !strings.Contains(err.Error(), "missing.raw") {
		t.Fatalf("got %v, want QEMU's own words", err)
	}
	// The boot slot is free again.
	select {
	case booting <- struct{}{}:
		<-booting
	default:
		t.Error("a machine that never started holds the boot slot")
	}
}
