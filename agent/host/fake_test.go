//go:build fakehw

package host

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

var update = flag.Bool("update", false, "write the golden hashes of the made-up machines again")

// The hashes of seeds 1 and 7 are a contract: other implementations of the
// made-up machine must reach the same ones.
func TestFakeGolden(t *testing.T) {
	for _, seed := range []uint64{1, 7} {
		facts, err := Read(context.Background(), Roots{Seed: seed})
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]string{"hardware_key": facts.HardwareKey}
		for _, s := range facts.Sections() {
			if s.Error != "" {
				t.Errorf("seed %d: section %s: %s", seed, s.Name, s.Error)
			}
			got[s.Name] = s.Hex()
		}
		path := filepath.Join("testdata", fmt.Sprintf("fakehw-seed-%d.json", seed))
		if *update {
			b, err := json.MarshalIndent(got, "", "  ")
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, append(b, '\n'), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		want := map[string]string{}
		if err := json.Unmarshal(b, &want); err != nil {
			t.Fatal(err)
		}
		if len(want) != len(got) {
			t.Errorf("seed %d: %d hashes, golden file has %d", seed, len(got), len(want))
		}
		for name, hash := range got {
			if want[name] != hash {
				t.Errorf("seed %d: %s is %s, golden %s", seed, name, hash, want[name])
			}
		}
	}
}

func TestFakeMachinesAreDistinct(t *testing.T) {
	keys, gpus, disks, macs := map[string]bool{}, map[string]bool{}, map[string]bool{}, map[string]bool{}
	const machines = 100
	for seed := range uint64(machines) {
		f, err := Read(context.Background(), Roots{Seed: seed})
		if err != nil {
			t.Fatal(err)
		}
		keys[f.HardwareKey] = true
		for _, g := range f.GPU.Devices {
			gpus[g.UUID] = true
		}
		for _, b := range f.Block {
			disks[b.ID] = true
		}
		for _, n := range f.Net {
			macs[n.MAC] = true
		}
	}
	if len(keys) != machines || len(gpus) != machines*8 || len(disks) != machines*10 || len(macs) != machines*10 {
		t.Errorf("%d keys, %d gpus, %d disks, %d macs", len(keys), len(gpus), len(disks), len(macs))
	}
}

func TestFakeSampleMatchesInventory(t *testing.T) {
	r := Roots{Seed: 7}
	f, err := Read(context.Background(), r)
	if err != nil {
		t.Fatal(err)
	}
	s, err := SampleGPUs(context.Background(), r)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.GPUs) != 8 || f.GPU.PCICount != 8 || countPCIGPUs(f.PCI) != 8 {
		t.Fatalf("%d sampled, %d on the bus", len(s.GPUs), countPCIGPUs(f.PCI))
	}
	for i, g := range s.GPUs {
		if g.GPU != f.GPU.Devices[i] {
			t.Errorf("gpu %d: %+v and %+v", i, g.GPU, f.GPU.Devices[i])
		}
	}
}

func TestFakeBootID(t *testing.T) {
	r := Roots{Seed: 7, DataDir: t.TempDir()}
	first, err := BootID(r)
	if err != nil {
		t.Fatal(err)
	}
	same, err := BootID(r)
	if err != nil || same != first {
		t.Errorf("boot id %q, then %q, %v", first, same, err)
	}
	next, err := NextBoot(r)
	if err != nil || next == first || len(next) != 36 {
		t.Errorf("after a reboot %q, %v", next, err)
	}
	if now, err := BootID(r); err != nil || now != next {
		t.Errorf("boot id %q, want %q, %v", now, next, err)
	}
	if _, err := BootID(Roots{DataDir: filepath.Join(r.DataDir, "missing")}); err == nil {
		t.Error("no data directory and no error")
	}
}
