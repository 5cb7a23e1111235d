package journal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// Options of [Open].
type Options struct {
	// Path is the file, usually journal.db in the data directory.
	Path string
	// Anchor remembers outside the file which journal it was and how far it
	// had come.
	Anchor Anchor
	// Probe opens the file in a child process and returns a *DamageError when
	// the child says, or shows by its death, that the file is damaged. See
	// [ExecProbe].
	Probe func(ctx context.Context, path string) error
	// Now names a damaged file; nil is time.Now.
	Now func() time.Time
	// Random makes journal ids; nil is crypto/rand.
	Random io.Reader
}

// keptDamaged is how many files that were moved aside stay.
const keptDamaged = 3

// Open opens the journal, or makes one. When an earlier one is missing,
// damaged or rolled back, that is in [Journal.Loss] and [Journal.Lost], what
// is left of it is moved aside, and the journal is a new one. An error means
// that neither could be done; nothing was moved then.
func Open(ctx context.Context, o Options) (*Journal, error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	before, known, anchorErr := o.Anchor.Load()
	loss, err := o.examine(ctx, before, known, anchorErr)
	if err != nil {
		return nil, err
	}
	if loss != nil {
		if loss.MovedTo, err = o.moveAside(); err != nil {
			return nil, fmt.Errorf("journal %s: %s; moving it aside: %w", o.Path, loss.Reason, err)
		}
	}
	s, err := openDisk(o.Path, false)
	if err != nil {
		return nil, err
	}
	j, err := o.start(s, loss)
	if err != nil {
		s.close()
		return nil, fmt.Errorf("journal %s: %w", o.Path, err)
	}
	return j, nil
}

// start makes a Journal of an open file that is either good or new.
func (o *Options) start(s *disk, loss *Loss) (*Journal, error) {
	raw, err := s.get(bucketMeta, metaKey)
	if err != nil {
		return nil, err
	}
	if len(raw) == 0 {
		if _, err := initialise(s, o.Random, loss); err != nil {
			return nil, err
		}
		if err := syncDir(filepath.Dir(o.Path)); err != nil {
			return nil, err
		}
	}
	l, err := load(s)
	if err != nil {
		return nil, err
	}
	j := &Journal{ledger: l, store: s, anchor: o.Anchor, loss: loss}
	// A crash may have come between a commit and its anchor.
	m := l.meta
	want := Position{JournalID: m.ID, Serial: m.Serial, Event: m.NextEvent - 1, Epoch: m.Epoch}
	if have, known, err := o.Anchor.Load(); err != nil || !known || have != want {
		if err := j.saveAnchor(); err != nil {
			return nil, err
		}
	}
	return j, nil
}

// examine finds out whether the journal that was here is still whole.
func (o *Options) examine(ctx context.Context, before Position, known bool, anchorErr error) (*Loss, error) {
	lost := func(format string, args ...any) *Loss {
		l := &Loss{JournalID: "unknown", Reason: fmt.Sprintf(format, args...)}
		if known {
			l.JournalID = before.JournalID
		}
		return l
	}
	info, err := os.Lstat(o.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && known:
		return lost("the file %s is missing", o.Path), nil
	case errors.Is(err, fs.ErrNotExist) && anchorErr != nil:
		return lost("the file %s is missing, and its position cannot be read: %v", o.Path, anchorErr), nil
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil // the first start
	case err != nil:
		return nil, fmt.Errorf("journal: %w", err)
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("journal: %s is not a regular file: remove it", o.Path)
	case info.Size() == 0 && !known && anchorErr == nil:
		// A first start that was cut before its first write.
		return nil, os.Remove(o.Path)
	case info.Size() == 0:
		return lost("the file %s is empty", o.Path), nil
	}
	var damage *DamageError
	if err := o.Probe(ctx, o.Path); errors.As(err, &damage) {
		if !known && anchorErr == nil && freshCut(o.Path) {
			return nil, os.Remove(o.Path)
		}
		return lost("the file %s is damaged: %s", o.Path, damage.Detail), nil
	} else if err != nil {
		return nil, fmt.Errorf("journal: probe %s: %w", o.Path, err)
	}
	s, err := openDisk(o.Path, true)
	if err != nil {
		return nil, err
	}
	defer s.close()
	l, err := load(s)
	switch {
	case err != nil:
		return lost("the file %s is damaged: %v", o.Path, err), nil
	case !known:
		return nil, nil // the anchor is written anew
	case l.meta.ID != before.JournalID:
		return lost("the file %s is another journal (%s)", o.Path, l.meta.ID), nil
	case l.meta.Serial < before.Serial || l.meta.NextEvent-1 < before.Event || l.meta.Epoch < before.Epoch:
		return lost("the file %s is older than it should be (step %d of %d, event %d of %d): was it restored from a copy?",
			o.Path, l.meta.Serial, before.Serial, l.meta.NextEvent-1, before.Event), nil
	}
	return nil, nil
}

// freshCut tells whether the file can only be a first start that was cut
// short: no anchor was ever written, and there is no record in it. It is
// called after the probe found no journal in it; a file with more than
// bbolt's four first pages is never taken for one.
func freshCut(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Size() <= int64(4*os.Getpagesize())
}

// moveAside renames what is at Path and returns its new name, "" when nothing
// was there. Only the newest few such files stay.
func (o *Options) moveAside() (string, error) {
	stamp := o.Now().UTC().Format("20060102T150405.000")
	to := fmt.Sprintf("%s.damaged-%s", o.Path, stamp)
	for n := 1; ; n++ {
		if _, err := os.Lstat(to); errors.Is(err, fs.ErrNotExist) {
			break
		}
		to = fmt.Sprintf("%s.damaged-%s-%d", o.Path, stamp, n)
	}
	err := os.Rename(o.Path, to)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	if old, err := filepath.Glob(o.Path + ".damaged-*"); err == nil && len(old) > keptDamaged {
		slices.Sort(old)
		for _, name := range old[:len(old)-keptDamaged] {
			if err := os.Remove(name); err != nil {
				return "", err
			}
		}
	}
	return to, syncDir(filepath.Dir(o.Path))
}
