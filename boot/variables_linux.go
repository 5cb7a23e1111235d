package boot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// immutableFlag is FS_IMMUTABLE_FL of <linux/fs.h>.
const immutableFlag = 0x10

// writeVariable replaces one variable. efivarfs wants attributes and data in a
// single write on the variable itself and no truncation: the write is the
// firmware's SetVariable call, which keeps the old value when it fails. Any
// other file system (tests) gets the same promise by a rename.
func writeVariable(path string, content []byte) error {
	if err := clearImmutable(path); err != nil {
		return err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(path), &fs); err != nil {
		return fmt.Errorf("statfs: %w", err)
	}
	if fs.Type != unix.EFIVARFS_MAGIC {
		tmp := path + ".tmp"
		if err := os.WriteFile(tmp, content, 0o644); err != nil {
			return err
		}
		return os.Rename(tmp, path)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	// One write call: os.File would split only on a short write, and
	// efivarfs makes none.
	_, err = f.Write(content)
	return errors.Join(err, f.Close())
}

// clearImmutable takes away the flag that the kernel puts on variables to
// keep rm -rf from bricking machines (Linux commit ed8b0de5a33d).
func clearImmutable(path string) error {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read flags: %w", err)
	}
	if flags&immutableFlag == 0 {
		return nil
	}
	if err := unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags&^immutableFlag); err != nil {
		return fmt.Errorf("clear the immutable flag: %w", err)
	}
	return nil
}
