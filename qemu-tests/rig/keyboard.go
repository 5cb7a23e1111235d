package rig

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
)

// Type writes text to the console's serial port; a line ends with "\n". The
// machine needs Config.Keyboard.
func (vm *VM) Type(ctx context.Context, text string) error {
	if !vm.Keyboard {
		return fmt.Errorf("machine %s has no keyboard: set Config.Keyboard", vm.Name)
	}
	vm.mu.Lock()
	defer vm.mu.Unlock()
	if vm.keyboard == nil {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "unix", filepath.Join(vm.sockets, keyboardSocket))
		if err != nil {
			return fmt.Errorf("machine %s: keyboard: %w", vm.Name, err)
		}
		// One connection for the machine's life: QEMU forgets what a closed
		// one had sent. What it says is read and dropped, or it would wait for
		// a reader; the console's file has it.
		go io.Copy(io.Discard, conn)
		vm.keyboard = conn
	}
	if _, err := io.WriteString(vm.keyboard, text); err != nil {
		return fmt.Errorf("machine %s: keyboard: %w", vm.Name, err)
	}
	return nil
}

// unplugKeyboard ends the connection, whose other end has gone.
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
