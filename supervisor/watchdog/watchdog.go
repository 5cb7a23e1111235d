// Package watchdog drives a hardware watchdog by the kernel's watchdog API
// (Documentation/watchdog/watchdog-api.rst): once opened it resets the machine
// unless it is fed within its timeout.
package watchdog

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Path is the first watchdog of the machine.
const Path = "/dev/watchdog0"

// Device is an open, running watchdog. It is deliberately never closed by this
// package's users: a process that dies must not disarm it.
type Device struct {
	file     *os.File
	identity string
}

// Open opens and thereby starts the watchdog at path. The error matches
// [os.ErrNotExist] while there is none.
func Open(path string) (*Device, error) {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return nil, fmt.Errorf("open watchdog: %w", err)
	}
	d := &Device{file: file, identity: "unnamed"}
	if info, err := unix.IoctlGetWatchdogInfo(int(file.Fd())); err == nil {
		if name := unix.ByteSliceToString(info.Identity[:]); name != "" {
			d.identity = name
		}
	}
	return d, nil
}

// Identity is the driver's name for the device.
func (d *Device) Identity() string { return d.identity }

// SetTimeout asks for a timeout, rounded up to seconds, and returns the one
// that the hardware took, which may differ.
func (d *Device) SetTimeout(want time.Duration) (time.Duration, error) {
	seconds := int((want + time.Second - 1) / time.Second)
	err := unix.IoctlSetPointerInt(int(d.file.Fd()), unix.WDIOC_SETTIMEOUT, seconds)
	if err != nil {
		err = fmt.Errorf("set watchdog %q to %d s: %w", d.identity, seconds, err)
	}
	have, err2 := unix.IoctlGetInt(int(d.file.Fd()), unix.WDIOC_GETTIMEOUT)
	if err2 != nil {
		return 0, errors.Join(err, fmt.Errorf("read the timeout of watchdog %q: %w", d.identity, err2))
	}
	return time.Duration(have) * time.Second, err
}

// Feed starts the timeout anew.
func (d *Device) Feed() error {
	if err := unix.IoctlWatchdogKeepalive(int(d.file.Fd())); err != nil {
		return fmt.Errorf("feed watchdog %q: %w", d.identity, err)
	}
	return nil
}
