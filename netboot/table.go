package netboot

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/durable"
	"github.com/better-compute/bcd/agent/intent"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	tableFile = "boot-table.bin"
	// maxTableFile is a table of intent.MaxPayload in its envelope.
	maxTableFile = intent.MaxPayload + 64<<10
	// maxMachines and maxArtefacts bound what a table makes us walk through
	// for each packet: a large site has some thousand machines, and a few
	// images for each architecture.
	maxMachines  = 16384
	maxArtefacts = 256
)

// ErrOldTable is wrapped when a table is not newer than the one there is.
var ErrOldTable = errors.New("boot table is not newer")

// Table keeps the boot table that this site acts on. It is safe for concurrent
// use; what Get gives is never changed.
type Table struct {
	// Dir keeps the table over restarts.
	Dir string
	// Site must be the table's; "" takes any.
	Site string
	// Roots are the pins under which tables are signed.
	Roots *intent.Roots

	mu    sync.RWMutex
	table *bcdv1.BootTable
}

// Load takes the table that the last run left. It is verified again, at its
// own time of issue: an old order stays one. A table that does not verify is
// removed and is the error, which the caller says; the next Sync brings another.
func (t *Table) Load() error {
	path := filepath.Join(t.Dir, tableFile)
	data, err := durable.ReadFile(path, maxTableFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		var table *bcdv1.BootTable
		signed := &bcdv1.Signed{}
		if err = proto.Unmarshal(data, signed); err == nil {
			if table, err = t.verify(signed, issued(signed)); err == nil {
				t.mu.Lock()
				t.table = table
				t.mu.Unlock()
				return nil
			}
		}
	}
	err = fmt.Errorf("the kept boot table %s is damaged and was dropped: %w", path, err)
	return errors.Join(err, durable.Remove(path))
}

// issued is when a table says that it was made; it counts only once the
// signature over it was found to be good at that very time.
func issued(signed *bcdv1.Signed) time.Time {
	table := &bcdv1.BootTable{}
	if proto.Unmarshal(signed.GetPayload(), table) != nil {
		return time.Time{}
	}
	return time.UnixMilli(table.GetIssuedMs())
}

// Take verifies a table at server time now, keeps it, and acts on it from then
// on. A table that cannot be written is acted on all the same, and the error
// says so: the machines are to be booted as they were last ordered to be.
func (t *Table) Take(signed *bcdv1.Signed, now time.Time) error {
	table, err := t.verify(signed, now)
	if err != nil {
		return err
	}
	data, err := proto.Marshal(signed)
	if err != nil {
		return fmt.Errorf("boot table: %w", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if old := t.table.GetGeneration(); table.GetGeneration() <= old {
		return fmt.Errorf("%w: generation %d, and %d is here", ErrOldTable, table.GetGeneration(), old)
	}
	t.table = table
	if err := durable.WriteFile(filepath.Join(t.Dir, tableFile), data, 0o600); err != nil {
		return fmt.Errorf("keep boot table of generation %d: %w", table.GetGeneration(), err)
	}
	return nil
}

func (t *Table) verify(signed *bcdv1.Signed, now time.Time) (*bcdv1.BootTable, error) {
	payload, err := t.Roots.Verify(signed, intent.TypeBootTable, now)
	if err != nil {
		return nil, err
	}
	table := &bcdv1.BootTable{}
	if err := proto.Unmarshal(payload, table); err != nil {
		return nil, fmt.Errorf("boot table: %w", err)
	}
	switch {
	case t.Site != "" && table.GetSite() != t.Site:
		return nil, fmt.Errorf("boot table is for site %.64q, and this is %s", table.GetSite(), t.Site)
	case table.GetGeneration() <= 0:
		return nil, fmt.Errorf("boot table has generation %d; it must be 1 or more", table.GetGeneration())
	case len(table.GetMachines()) > maxMachines:
		return nil, fmt.Errorf("boot table of %d machines; at most %d are allowed", len(table.GetMachines()), maxMachines)
	case len(table.GetArtefacts()) > maxArtefacts:
		return nil, fmt.Errorf("boot table of %d artefacts; at most %d are allowed", len(table.GetArtefacts()), maxArtefacts)
	}
	for _, a := range table.GetArtefacts() {
		if err := checkArtefact(a); err != nil {
			return nil, fmt.Errorf("boot table: %w", err)
		}
	}
	return table, nil
}

// Get gives the table, nil when there is none yet. It must not be changed.
func (t *Table) Get() *bcdv1.BootTable {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.table
}
