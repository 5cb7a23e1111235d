package identity

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/better-compute/bcd/agent/durable"
	"github.com/better-compute/bcd/agent/pki"
)

const (
	nameKey         = "node.key"
	nameCertificate = "node.crt"
	nameRecord      = "join-record.bin"
	nameIndex       = "identity.json"
	// next is the suffix of files that are, or become, the identity.
	next = ".next"
	// namePending is a key whose certificate has been asked for: a crash
	// between the answer and Save must not make another node of this machine.
	namePending = "node.key.pending"
)

const (
	// maxFile bounds each file; a chain has about 3 KiB, a record less.
	maxFile = 256 << 10
	// loadTries: a reader may meet a renewal in the middle of its renames.
	loadTries = 3
)

// Store keeps an identity in a directory.
type Store struct {
	Dir string
	// Writer is for tests that crash it; the zero value is right.
	Writer durable.Writer
}

// Load reads the identity in dir. ErrNotJoined when there is none;
// ErrUnloadable, with the way back, when there is one that cannot be used. It
// changes nothing.
func Load(dir string) (*Identity, error) { return Store{Dir: dir}.Load() }

// Load is as the function of that name.
func (s Store) Load() (i *Identity, err error) {
	root, err := os.OpenRoot(s.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrNotJoined
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnloadable, err)
	}
	defer root.Close()
	for range loadTries {
		if i, err = load(root); err == nil || errors.Is(err, ErrNotJoined) {
			return i, err
		}
	}
	return nil, fmt.Errorf("%w: in %s: %w; %s", ErrUnloadable, s.Dir, err, WayBack)
}

func load(root *os.Root) (*Identity, error) {
	// A complete set that was written last is the identity, its renames done
	// or not.
	if index, err := durable.ReadIn(root, nameIndex+next, maxFile); err == nil {
		if i, err := assemble(root, index); err == nil {
			return i, nil
		}
	}
	index, err := durable.ReadIn(root, nameIndex, maxFile)
	if errors.Is(err, fs.ErrNotExist) {
		// A key alone is no identity: a join that was cut off leaves one under
		// another name. But these files have no other owner.
		for _, name := range []string{nameKey, nameCertificate, nameRecord} {
			if _, err := root.Lstat(name); err == nil {
				return nil, fmt.Errorf("%s is there and %s is missing", name, nameIndex)
			}
		}
		return nil, ErrNotJoined
	}
	if err != nil {
		return nil, err
	}
	return assemble(root, index)
}

// assemble finds the files that index names, under either of their names.
func assemble(root *os.Root, index []byte) (*Identity, error) {
	var f file
	if err := json.Unmarshal(index, &f); err != nil {
		return nil, fmt.Errorf("%s is not readable: %w", nameIndex, err)
	}
	if f.Version != fileVersion {
		return nil, fmt.Errorf("%s has version %d, this bcd reads %d", nameIndex, f.Version, fileVersion)
	}
	key, err := find(root, nameKey, f.KeySHA256)
	if err != nil {
		return nil, err
	}
	defer clear(key)
	crt, err := find(root, nameCertificate, f.CertificateSHA256)
	if err != nil {
		return nil, err
	}
	record, err := find(root, nameRecord, f.RecordSHA256)
	if err != nil {
		return nil, err
	}
	return decode(key, crt, record, &f)
}

func find(root *os.Root, name string, want []byte) ([]byte, error) {
	var firstErr error
	for _, candidate := range []string{name, name + next} {
		data, err := durable.ReadIn(root, candidate, maxFile)
		if err == nil && bytes.Equal(digest(data), want) {
			return data, nil
		}
		if err == nil {
			clear(data)
			err = fmt.Errorf("%s is not the one that %s names", candidate, nameIndex)
		}
		if firstErr == nil {
			firstErr = err
		}
	}
	return nil, firstErr
}

// Save makes i the identity in the directory. The old one stays until the new
// one is durable; a crash at any moment leaves one of the two.
func (s Store) Save(i *Identity) error {
	key, crt, record, index, err := i.encode()
	if err != nil {
		return fmt.Errorf("save identity: %w", err)
	}
	defer clear(key)
	root, err := s.open()
	if err != nil {
		return fmt.Errorf("save identity: %w", err)
	}
	defer root.Close()
	if err := s.settle(root); err != nil {
		return fmt.Errorf("save identity: %w", err)
	}
	for _, f := range []struct {
		name string
		data []byte
	}{{nameKey, key}, {nameCertificate, crt}, {nameRecord, record}, {nameIndex, index}} {
		if err := s.Writer.WriteIn(root, f.name+next, f.data, 0o600); err != nil {
			return fmt.Errorf("save identity: %w", err)
		}
	}
	if err := s.settle(root); err != nil {
		return fmt.Errorf("save identity: %w", err)
	}
	return s.Writer.RemoveIn(root, namePending)
}

// settle ends what a crash interrupted: it finishes the renames of a complete
// set, and drops an incomplete one.
func (s Store) settle(root *os.Root) error {
	index, err := durable.ReadIn(root, nameIndex+next, maxFile)
	complete := false
	if err == nil {
		_, nextErr := assemble(root, index)
		complete = nextErr == nil
		// Nothing is dropped on a mere suspicion: the set may be the identity,
		// half renamed, behind a read error.
		if _, loadErr := load(root); !complete && loadErr != nil {
			return fmt.Errorf("%w: %w; %s", ErrUnloadable, nextErr, WayBack)
		}
	}
	for _, name := range []string{nameKey, nameCertificate, nameRecord, nameIndex} {
		if complete {
			err = s.step(durable.StepRename, name+next)
			if err == nil {
				err = root.Rename(name+next, name)
			}
		} else {
			err = s.Writer.RemoveIn(root, name+next)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := s.step(durable.StepSyncDir, "."); err != nil {
		return err
	}
	return syncDir(root)
}

func (s Store) step(step, name string) error {
	if s.Writer.Before == nil {
		return nil
	}
	return s.Writer.Before(step, name)
}

func syncDir(root *os.Root) error {
	dir, err := root.Open(".")
	if err != nil {
		return err
	}
	err = dir.Sync()
	if closeErr := dir.Close(); err == nil {
		err = closeErr
	}
	return err
}

// open makes the directory if need be, with mode 0700.
func (s Store) open() (*os.Root, error) {
	if err := os.MkdirAll(s.Dir, 0o700); err != nil {
		return nil, err
	}
	if err := os.Chmod(s.Dir, 0o700); err != nil {
		return nil, err
	}
	return os.OpenRoot(s.Dir)
}

// pendingKey gives the key for a join: the one that a join which was cut off
// had asked with, else a new one, which is on disk before it is used.
func (s Store) pendingKey() (Key, error) {
	root, err := s.open()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	if data, err := durable.ReadIn(root, namePending, maxFile); err == nil {
		defer clear(data)
		if key, err := pki.DecodeKey(data); err == nil {
			return key, nil
		}
	}
	key, err := pki.NewKey()
	if err != nil {
		return nil, err
	}
	data, err := pki.EncodeKey(key)
	if err != nil {
		return nil, err
	}
	defer clear(data)
	if err := s.Writer.WriteIn(root, namePending, data, 0o600); err != nil {
		return nil, err
	}
	return key, nil
}

// Reset removes the identity in dir and gives the paths that it removed. The
// key is overwritten first. What was there need not load.
func Reset(dir string) (removed []string, err error) {
	for _, name := range []string{nameIndex, nameKey, nameCertificate, nameRecord, namePending} {
		for _, path := range []string{filepath.Join(dir, name), filepath.Join(dir, name+next), filepath.Join(dir, durable.TempName(name)), filepath.Join(dir, durable.TempName(name+next))} {
			if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err := durable.Shred(path); err != nil {
				return removed, fmt.Errorf("reset identity: %w", err)
			}
			removed = append(removed, path)
		}
	}
	return removed, nil
}

// Describe says in one line who the identity is and how long its certificate
// is still valid at now (the best known server time), for doctor and status.
func (i *Identity) Describe(now time.Time) string {
	left := i.NotAfter().Sub(now).Round(time.Minute)
	valid := fmt.Sprintf("certificate valid %s more", shortDuration(left))
	if left <= 0 {
		valid = fmt.Sprintf("certificate expired %s ago", shortDuration(-left))
	}
	site := ""
	if i.Site != "" {
		site = ", site " + i.Site
	}
	return fmt.Sprintf("%s%s, role %s, %s", i.NodeID, site, pki.RoleWord(i.Role), valid)
}

func shortDuration(d time.Duration) string {
	h, m := int(d.Hours()), int(d.Minutes())%60
	switch {
	case h >= 48:
		return fmt.Sprintf("%dd", h/24)
	case h > 0:
		return fmt.Sprintf("%dh%02dm", h, m)
	default:
		return fmt.Sprintf("%dm", m)
	}
}
