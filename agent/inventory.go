package agent

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/better-compute/bcd/agent/host"
	"github.com/better-compute/bcd/agent/session"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// reportBytes bounds the sections of one report frame: a frame of 1 MiB does
// not hold up a heartbeat for long.
const reportBytes = 1 << 20

// inventory is what was last read of the machine.
type inventory struct {
	sections []host.Section
	// told has the hashes that the gateway was told on this session.
	told map[string][]byte
}

// goInventory runs f beside everything else, joined before Run returns.
func (a *Agent) goInventory(f func(context.Context)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.deps.Inventory == nil || a.ctx == nil || a.ctx.Err() != nil {
		return
	}
	ctx := a.ctx
	a.background.Go(func() { f(ctx) })
}

// inventoryHashes are for Hello, which begins a session.
func (a *Agent) inventoryHashes() map[string][]byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	hashes := map[string][]byte{}
	for _, s := range a.inventory.sections {
		hashes[s.Name] = s.SHA256[:]
	}
	a.inventory.told = maps.Clone(hashes)
	return hashes
}

// wanted sends the sections that the gateway lacks: those it asked for, and
// those that were read since the Hello was made, of which it knows nothing.
func (a *Agent) wanted(names []string) {
	a.mu.Lock()
	var list []host.Section
	for _, s := range a.inventory.sections {
		if slices.Contains(names, s.Name) || !bytes.Equal(a.inventory.told[s.Name], s.SHA256[:]) {
			list = append(list, s)
		}
	}
	a.mu.Unlock()
	a.report(list)
}

// RefreshInventory reads the machine again and reports the sections that
// changed, or all. It returns every section and the names of those that
// changed.
func (a *Agent) RefreshInventory(ctx context.Context, all bool) (sections []host.Section, changed []string, err error) {
	if a.deps.Inventory == nil {
		return nil, nil, errors.New("this daemon reads no inventory")
	}
	return a.collect(ctx, all)
}

func (a *Agent) collectInventory(ctx context.Context, all bool) {
	if _, _, err := a.collect(ctx, all); err != nil && ctx.Err() == nil {
		a.deps.Log.Error("inventory", "error", err)
	}
}

func (a *Agent) collect(ctx context.Context, all bool) ([]host.Section, []string, error) {
	sections, err := a.deps.Inventory(ctx)
	if err != nil {
		return nil, nil, err
	}
	a.mu.Lock()
	before := map[string][32]byte{}
	for _, s := range a.inventory.sections {
		before[s.Name] = s.SHA256
	}
	var changed []string
	var tell []host.Section
	for _, s := range sections {
		if old, known := before[s.Name]; !known || old != s.SHA256 {
			changed = append(changed, s.Name)
		}
		if all || !bytes.Equal(a.inventory.told[s.Name], s.SHA256[:]) {
			tell = append(tell, s)
		}
	}
	a.inventory.sections = sections
	a.mu.Unlock()
	a.report(tell)
	return sections, changed, nil
}

// report sends sections, a few a frame. Without a session the next Welcome
// does it: see wanted.
func (a *Agent) report(sections []host.Section) {
	for len(sections) > 0 {
		report, size := &bcdv1.InventoryReport{}, 0
		for len(sections) > 0 {
			s := sections[0]
			if size += len(s.JSON); size > reportBytes && len(report.Sections) > 0 {
				break
			}
			report.Sections = append(report.Sections, &bcdv1.InventorySection{
				Name: s.Name, CanonicalJson: s.JSON, Sha256: s.SHA256[:], Error: s.Error,
			})
			sections = sections[1:]
		}
		if !a.session.Send(session.Bulk, &bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Inventory{Inventory: report}}) {
			return
		}
		a.mu.Lock()
		if a.inventory.told == nil {
			a.inventory.told = map[string][]byte{}
		}
		for _, s := range report.Sections {
			a.inventory.told[s.GetName()] = s.GetSha256()
		}
		a.mu.Unlock()
	}
}
