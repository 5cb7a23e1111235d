package journal

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/better-compute/bcd/agent/durable"
)

// Position is how far a journal has come, as it is remembered outside.
type Position struct {
	JournalID string `json:"journal_id"`
	// Serial counts the journal's commits.
	Serial int64 `json:"serial"`
	// Event is the highest event sequence when the position was saved.
	Event int64 `json:"event"`
	// Epoch is the highest session epoch.
	Epoch int64 `json:"epoch"`
}

// Anchor keeps a Position outside the journal, durably.
type Anchor interface {
	// Load returns false when no position was ever saved.
	Load() (Position, bool, error)
	Save(Position) error
}

// FileAnchor keeps the position in a file of its own, beside the identity.
type FileAnchor struct{ Path string }

// anchorName is the file in the data directory.
const anchorName = "journal-position.json"

// maxAnchor bounds what is read of an anchor file.
const maxAnchor = 4 << 10

// AnchorIn returns the anchor of a data directory.
func AnchorIn(dataDir string) FileAnchor { return FileAnchor{filepath.Join(dataDir, anchorName)} }

// Load reads the file. A file that is there and cannot be understood is an
// error, never an absent position.
func (a FileAnchor) Load() (Position, bool, error) {
	info, err := os.Stat(a.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return Position{}, false, nil
	}
	if err != nil {
		return Position{}, false, err
	}
	if info.Size() > maxAnchor {
		return Position{}, false, fmt.Errorf("%s has %d bytes, at most %d are right", a.Path, info.Size(), maxAnchor)
	}
	data, err := os.ReadFile(a.Path)
	if err != nil {
		return Position{}, false, err
	}
	var p Position
	if err := json.Unmarshal(data, &p); err != nil {
		return Position{}, false, fmt.Errorf("%s: %w", a.Path, err)
	}
	if p.JournalID == "" || p.Serial < 0 || p.Event < 0 || p.Epoch < 0 {
		return Position{}, false, fmt.Errorf("%s: impossible values", a.Path)
	}
	return p, true, nil
}

// Save replaces the file, durably.
func (a FileAnchor) Save(p Position) error {
	data, err := json.Marshal(p)
	if err != nil {
		return err
	}
	return durable.WriteFile(a.Path, append(data, '\n'), 0o600)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if e := d.Close(); err == nil {
		err = e
	}
	return err
}

// MemoryAnchor is an Anchor for simulations and tests.
type MemoryAnchor struct {
	mu       sync.Mutex
	position Position
	saved    bool
}

// Load returns the last saved position.
func (a *MemoryAnchor) Load() (Position, bool, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.position, a.saved, nil
}

// Save remembers p.
func (a *MemoryAnchor) Save(p Position) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.position, a.saved = p, true
	return nil
}
