// Package durable writes small files that survive a power cut: after a crash
// at any moment the name shows the whole old content or the whole new one.
//
// The order is: temporary file beside the target (O_EXCL, so that a planted
// link is never followed), write, fsync, rename over the target, fsync of the
// directory. Without the last one the rename itself may be lost.
package durable

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// Writer writes and removes files. The zero value is ready. There must be one
// writer of a file at a time: the temporary name is fixed, so that crashes
// leave at most one leftover, which the next write removes.
type Writer struct {
	// Before, when not nil, is called before each step with the step's name
	// and the file's. An error ends the operation on the spot, as a crash
	// would: nothing is tidied up. Tests use it; a real writer leaves it nil.
	Before func(step, name string) error
}

// Steps of WriteIn and RemoveIn, in order, as Before sees them.
const (
	StepCreate  = "create"
	StepWrite   = "write"
	StepSync    = "sync"
	StepRename  = "rename"
	StepRemove  = "remove"
	StepSyncDir = "sync-dir"
)

// WriteFile makes path hold data with exactly mode, whatever the umask.
func WriteFile(path string, data []byte, mode fs.FileMode) error {
	return Writer{}.WriteFile(path, data, mode)
}

// WriteFile is as the function of that name.
func (w Writer) WriteFile(path string, data []byte, mode fs.FileMode) error {
	root, err := os.OpenRoot(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer root.Close()
	if err := w.WriteIn(root, filepath.Base(path), data, mode); err != nil {
		return fmt.Errorf("in %s: %w", filepath.Dir(path), err)
	}
	return nil
}

// TempName is the name of the temporary file that stands for name while it is
// written.
func TempName(name string) string {
	return filepath.Join(filepath.Dir(name), "."+filepath.Base(name)+".tmp")
}

// WriteIn makes name, a path below root, hold data with exactly mode.
func (w Writer) WriteIn(root *os.Root, name string, data []byte, mode fs.FileMode) (err error) {
	temp := TempName(name)
	if err := w.before(StepCreate, name); err != nil {
		return err
	}
	if err := root.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("write %s: leftover: %w", name, err)
	}
	f, err := root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode&fs.ModePerm)
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	var crashed *crash
	defer func() {
		if err != nil && !errors.As(err, &crashed) {
			root.Remove(temp)
		}
	}()
	// Each of write, chmod, sync and close is checked: on a full disk or a
	// network file system it may be the last one that tells.
	err = func() error {
		if err := w.before(StepWrite, name); err != nil {
			return err
		}
		if _, err := f.Write(data); err != nil {
			return err
		}
		if err := f.Chmod(mode & fs.ModePerm); err != nil {
			return err
		}
		if err := w.before(StepSync, name); err != nil {
			return err
		}
		return f.Sync()
	}()
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	if err := w.before(StepRename, name); err != nil {
		return err
	}
	if err := root.Rename(temp, name); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return w.syncDir(root, name)
}

// Remove unlinks path and syncs its directory. A path that is not there is no
// error.
func Remove(path string) error {
	root, err := os.OpenRoot(filepath.Dir(path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	defer root.Close()
	return Writer{}.RemoveIn(root, filepath.Base(path))
}

// RemoveIn unlinks name below root and syncs its directory. A name that is
// not there is no error.
func (w Writer) RemoveIn(root *os.Root, name string) error {
	if err := w.before(StepRemove, name); err != nil {
		return err
	}
	err := root.Remove(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", name, err)
	}
	return w.syncDir(root, name)
}

// Shred overwrites path with zeros, syncs it, unlinks it and syncs the
// directory. It is for single-use secrets on media that keep deleted blocks;
// flash that remaps sectors may still keep a copy, which is why such secrets
// must be single-use. A path that is not there is no error.
func Shred(path string) error {
	root, err := os.OpenRoot(filepath.Dir(path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("shred %s: %w", path, err)
	}
	defer root.Close()
	name := filepath.Base(path)
	info, err := root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("shred %s: %w", path, err)
	}
	if info.Mode().IsRegular() {
		f, err := root.OpenFile(name, os.O_WRONLY, 0)
		if err != nil {
			return fmt.Errorf("shred %s: %w", path, err)
		}
		_, err = f.Write(make([]byte, info.Size()))
		if err == nil {
			err = f.Sync()
		}
		if closeErr := f.Close(); err == nil {
			err = closeErr
		}
		if err != nil {
			return fmt.Errorf("shred %s: %w", path, err)
		}
	}
	return Writer{}.RemoveIn(root, name)
}

// ErrTooLarge is wrapped by ReadFile.
var ErrTooLarge = errors.New("file too large")

// ReadFile reads path, refusing one of more than limit bytes.
func ReadFile(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readAll(f, path, limit)
}

// ReadIn reads name below root, refusing one of more than limit bytes.
func ReadIn(root *os.Root, name string, limit int64) ([]byte, error) {
	f, err := root.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readAll(f, name, limit)
}

func readAll(f *os.File, name string, limit int64) ([]byte, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("read %s: not a regular file but %v", name, info.Mode().Type())
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if int64(len(data)) > limit {
		return nil, fmt.Errorf("read %s: %w: more than %d bytes", name, ErrTooLarge, limit)
	}
	return data, nil
}

func (w Writer) syncDir(root *os.Root, name string) error {
	if err := w.before(StepSyncDir, name); err != nil {
		return err
	}
	dir, err := root.Open(filepath.Dir(name))
	if err != nil {
		return fmt.Errorf("sync folder of %s: %w", name, err)
	}
	err = dir.Sync()
	if closeErr := dir.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return fmt.Errorf("sync folder of %s: %w", name, err)
	}
	return nil
}

// crash marks an error that Before asked for.
type crash struct{ err error }

func (c *crash) Error() string { return c.err.Error() }
func (c *crash) Unwrap() error { return c.err }

func (w Writer) before(step, name string) error {
	if w.Before == nil {
		return nil
	}
	if err := w.Before(step, name); err != nil {
		return &crash{err}
	}
	return nil
}
