package rig

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
)

// Type writes text to the console's serial port; the enter key is "\r". The
// machine needs Config.Keyboard.
func (vm *VM) Type(ctx context.Context, text string) error {
	if !vm.Keyboard {
		return fmt.Errorf("machine %s has no keyboard: set Config.Keyboard", vm.Name)
	}
	vm.mu.Lock()
	keyboard := vm.keyboard
	vm.mu.Unlock()
	if keyboard == nil {
		return fmt.Errorf("machine %s is off", vm.Name)
	}
	if deadline, ok := ctx.Deadline(); ok {
		if err := keyboard.SetWriteDeadline(deadline); err != nil {
			return fmt.Errorf("machine %s: keyboard: %w", vm.Name, err)
		}
	}
	if _, err := keyboard.WriteString(text); err != nil {
		return fmt.Errorf("machine %s: keyboard: %w", vm.Name, err)
	}
	return nil
}

// plugKeyboard makes QEMU's standard input and output the console, with a pipe
// on one side and the console's file on the other. A socket for both loses the
// console for good when its reader is slow and the machine sets up its port at
// that moment (QEMU 7.2). The function that it gives closes what QEMU has of
// its own by then.
func (vm *VM) plugKeyboard(cmd *exec.Cmd) (plugged func(), err error) {
	if !vm.Keyboard {
		return func() {}, nil
	}
	console, err := os.OpenFile(vm.ConsolePath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		console.Close()
		return nil, err
	}
	cmd.Stdin, cmd.Stdout = r, console
	vm.unplugKeyboard()
	vm.mu.Lock()
	vm.keyboard = w
	vm.mu.Unlock()
	return func() { r.Close(); console.Close() }, nil
}

// unplugKeyboard closes the pipe, whose other end has gone.
func (vm *VM) unplugKeyboard() {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	if vm.keyboard != nil {
		vm.keyboard.Close()
		vm.keyboard = nil
	}
}

// Throttle limits what disk n takes or gives to bytesPerSecond; 0 takes the
// limit away. It holds a write in the middle of its way for as long as a test
// needs it there.
func (vm *VM) Throttle(ctx context.Context, n int, bytesPerSecond int64) error {
	if bytesPerSecond < 0 {
		return errors.New("a disk cannot be slower than not at all")
	}
	_, err := vm.Command(ctx, "block_set_io_throttle", map[string]any{
		"device": fmt.Sprintf("disk%d", n),
		"bps":    bytesPerSecond, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0,
	})
	return err
}
