package gateway

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

// tableTx is a store with machines only.
type tableTx struct {
	Tx
	machines []*Machine
}

func (t tableTx) EachMachine(fn func(*Machine) error) error {
	for _, m := range t.machines {
		if err := fn(m); err != nil {
			return err
		}
	}
	return nil
}

func (tableTx) EachArtefact(func(*Artefact) error) error { return nil }

// TestTableGeneration: the same content keeps its generation, whatever order
// the store has; new content, and an agent that is ahead, raise it.
func TestTableGeneration(t *testing.T) {
	now := time.Date(2026, 12, 1, 8, 0, 0, 0, time.UTC)
	a := &Machine{ID: "mach_a", Name: "a", Site: "lab", MACs: []string{"52:54:00:aa:00:01"}}
	b := &Machine{ID: "mach_b", Name: "b", Site: "lab", MACs: []string{"52:54:00:aa:00:02"}}
	site := &Site{Name: "lab", Unknown: bootRamdisk}
	for _, step := range []struct {
		name       string
		machines   []*Machine
		have, want int64
		changed    bool
	}{
		{"the first", []*Machine{a, b}, 0, 1, true},
		{"another order", []*Machine{b, a}, 1, 1, false},
		{"one is gone", []*Machine{a}, 1, 2, true},
		{"the store is older than an agent", []*Machine{a}, 9, 10, true},
		{"a generation that nobody could have", []*Machine{a}, 1 << 60, 10, false},
	} {
		table, changed, err := currentTable(tableTx{machines: step.machines}, now, site, step.have)
		if err != nil || table.GetGeneration() != step.want || changed != step.changed || len(table.GetMachines()) != len(step.machines) {
			t.Errorf("%s: generation %d, changed %v, %v; want %d, %v", step.name, table.GetGeneration(), changed, err, step.want, step.changed)
		}
		now = now.Add(time.Second)
	}
}

func TestTableTooLarge(t *testing.T) {
	var machines []*Machine
	for i := range 40000 {
		machines = append(machines, &Machine{ID: newID("mach"), Name: fmt.Sprint("machine-", i), Site: "lab", MACs: []string{fmt.Sprintf("52:54:00:%02x:%02x:%02x", i>>16, i>>8&255, i&255), fmt.Sprintf("52:54:01:%02x:%02x:%02x", i>>16, i>>8&255, i&255)}, UUID: "11111111-2222-3333-4444-555555555501"})
	}
	site := &Site{Name: "lab", Generation: 4}
	_, _, err := currentTable(tableTx{machines: machines}, time.Now(), site, 4)
	var large *errTableTooLarge
	if !errors.As(err, &large) || !strings.Contains(err.Error(), "40000 machines") || !strings.Contains(err.Error(), "another site") || site.Generation != 4 {
		t.Errorf("%v, generation %d", err, site.Generation)
	}
	// What the bound says in words is about right.
	if _, _, err := currentTable(tableTx{machines: machines[:25000]}, time.Now(), site, 4); err != nil {
		t.Error(err)
	}
}
