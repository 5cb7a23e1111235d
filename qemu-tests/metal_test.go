package qemutests

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/better-compute/bcd/qemu-tests/rig"
)

// TestMetalImageFindsItsHardware: the servers' UKI comes by PXE to a machine
// with three disks behind three kinds of controller, an Intel network card and
// a clock whose battery is dead. Every driver is a module, found by modalias.
// Then the machine is asked to restart: it says that it will, and does.
func TestMetalImageFindsItsHardware(t *testing.T) {
	w := newWorld(t)
	const uki = "bcd-metal-amd64.uki.efi"
	drives := []rig.Disk{{Bus: "nvme", Serial: "NVME-1"}, {Bus: "ahci", Serial: "AHCI-2"}, {Bus: "megasas", Serial: "MEGASAS-3"}}
	for i := range drives {
		path, err := rig.NewDisk(w.dir, drives[i].Serial+".raw", diskBytes)
		if err != nil {
			t.Fatal(err)
		}
		drives[i].Path = path
	}
	vm := rig.Run(t, w.dir, rig.Config{
		Name: "server", MemoryMiB: 1024, RTC: "1970-01-01T00:00:00",
		SMBIOS: []string{"bcd.gateway=" + w.URL(), "bcd.token=" + w.token("ramdisk", "--uses", "5")},
		// The first card brings the image by the firmware's own driver, the
		// second is the one that the ramdisk must find a driver for.
		NICs:  []rig.NIC{{TFTPDir: filepath.Dir(artefact(t, "images/"+uki)), BootFile: uki, BootIndex: 1}, {Model: "e1000e"}},
		Disks: drives,
	})
	first := w.connected(vm, "ramdisk", nil)

	transports := map[string]string{}
	for _, d := range section[disk](w, vm, first.ID, "block") {
		transports[d.Serial] = d.Transport
	}
	// A volume of a RAID controller is a SCSI disk: what is behind it is the
	// controller's business.
	for serial, transport := range map[string]string{"NVME-1": "nvme", "AHCI-2": "sata", "MEGASAS-3": "scsi"} {
		if transports[serial] != transport {
			t.Errorf("disk %s is on %q, want %q: %v", serial, transports[serial], transport, transports)
		}
	}
	drivers := map[string]string{}
	for _, n := range section[card](w, vm, first.ID, "net") {
		drivers[n.MAC] = n.Driver
	}
	if mac := vm.NICs[1].MAC; drivers[mac] != "e1000e" {
		t.Errorf("the card %s has the driver %q, want e1000e: %v", mac, drivers[mac], drivers)
	}
	console, err := vm.Console(0)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(console, "the clock was wrong and has been set") {
		t.Error("the console does not say that the clock was wrong")
	}

	reboot := w.ended(vm, w.send("send", "node.reboot", first.ID).ID)
	if reboot.Outcome.Status != "succeeded" {
		t.Fatalf("node.reboot: %+v", reboot.Outcome)
	}
	second := w.connected(vm, "ramdisk", first)
	if second.ID != first.ID {
		t.Errorf("the machine came back as %s, it was %s", second.ID, first.ID)
	}
	w.once(first.ID, reboot)
	t.Log(w.timeline())
}

type disk struct{ Serial, Transport string }

type card struct{ MAC, Driver string }

// section is a part of a machine's inventory that is a list. The machine sends
// it soon after its session begins.
func section[T any](w *world, vm *rig.VM, machine, name string) []T {
	w.t.Helper()
	var found []T
	err := vm.Until(w.ctx, "the inventory has the section "+name, func(ctx context.Context) (bool, error) {
		var info struct {
			Inventory []struct {
				Name string          `json:"name"`
				JSON json.RawMessage `json:"canonical_json"`
			} `json:"inventory"`
		}
		if err := w.RunJSON(ctx, &info, "machine", machine); err != nil {
			return false, err
		}
		for _, s := range info.Inventory {
			if s.Name != name {
				continue
			}
			var list map[string][]T
			if err := json.Unmarshal(s.JSON, &list); err != nil {
				return false, fmt.Errorf("inventory section %s: %w in %.200q", name, err, s.JSON)
			}
			found = list[name]
			return true, nil
		}
		return false, nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return found
}
