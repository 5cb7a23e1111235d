package qemutests

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/better-compute/bcd/qemu-tests/rig"
)

// mkosiDisk is more than the installed node's image.
const mkosiDisk = 1 << 30

// nodeSpec is what one generation wants of the host section.
const nodeSpec = `{"host": {"sysctl": {"vm.swappiness": "%d", "net.ipv4.ip_forward": "1"}, "modules": ["dummy", "loop"], "bcd_service": {"memory_max": "%s"}}}`

// TestInstalledDebianNode deploys the image that mkosi makes and uses it as an
// operator does: what the hardened bcd.service may do, and what it may not, is
// known only on a machine that systemd runs.
func TestInstalledDebianNode(t *testing.T) {
	w := newWorld(t)
	offered := ""
	vm := w.pxe("debian", func(c *rig.Config) {
		if err := os.Truncate(c.Disks[0].Path, mkosiDisk); err != nil {
			t.Fatal(err)
		}
		nic := &c.NICs[0]
		image := filepath.Join(nic.TFTPDir, nic.BootFile)
		nic.TFTPDir = t.TempDir()
		offered = filepath.Join(nic.TFTPDir, nic.BootFile)
		if err := os.Symlink(image, offered); err != nil {
			t.Fatal(err)
		}
	})
	ramdisk := w.connected(vm, "ramdisk", nil)
	deploy := w.ended(vm, w.send("deploy", ramdisk.ID, artefact(t, "images/bcd-node-virtual.raw.zst")).ID)
	if deploy.Outcome.Status != "succeeded" {
		t.Fatalf("deploy: %+v", deploy.Outcome)
	}
	node := w.connected(vm, "node", ramdisk)
	if node.ID != ramdisk.ID || len(node.Nodes) != 2 {
		t.Errorf("the node is machine %s with the nodes %v, the ramdisk was %s", node.ID, node.Nodes, ramdisk.ID)
	}
	if entry := w.bootEntry(vm, node.ID); entry != deploy.Outcome.Result["boot_entry"] {
		t.Errorf("it came from boot entry %q, the deployer wrote %q", entry, deploy.Outcome.Result["boot_entry"])
	}

	// The files of the first generation, the kernel's parameters, the modules
	// and the unit's limit; then the second changes what it changes.
	w.converges(vm, node.ID, 1, fmt.Sprintf(nodeSpec, 10, "700M"))
	w.converges(vm, node.ID, 2, fmt.Sprintf(nodeSpec, 20, "800M"))

	b := w.collect(vm, node.ID)
	checkSockets(t, "node", b, nodeSockets)
	journal := ""
	for name, content := range b.files {
		if strings.Contains(name, "journal") {
			journal += content
		}
	}
	if !strings.Contains(journal, "session up") {
		t.Errorf("the bundle has nothing of the agent's journal: %v", keysOf(b.files))
	}

	// A restart that the node itself asks systemd for: another boot of the
	// same node, which still is what its specification says. Its firmware asks
	// the network first, and a site offers an installed machine nothing.
	if err := os.Remove(offered); err != nil {
		t.Fatal(err)
	}
	if reboot := w.ended(vm, w.send("send", "node.reboot", node.ID).ID); reboot.Outcome.Status != "succeeded" {
		t.Fatalf("node.reboot: %+v", reboot.Outcome)
	}
	again := w.connected(vm, "node", node)
	if again.Current.ID != node.Current.ID {
		t.Errorf("after the restart it is node %s, before it was %s", again.Current.ID, node.Current.ID)
	}
	w.observes(vm, node.ID, 2)
	t.Log(w.timeline())
}

// bootEntry is the firmware's entry that a machine says it came from, once its
// inventory is there.
func (w *world) bootEntry(vm *rig.VM, machine string) (entry string) {
	w.t.Helper()
	err := vm.Until(w.ctx, "the inventory to name a boot entry", func(ctx context.Context) (bool, error) {
		var info struct {
			Inventory []struct {
				Name string `json:"name"`
				JSON struct {
					Current string `json:"current"`
				} `json:"canonical_json"`
			} `json:"inventory"`
		}
		if err := w.RunJSON(ctx, &info, "machine", machine); err != nil {
			return false, err
		}
		for _, s := range info.Inventory {
			if s.Name == "boot" {
				entry = s.JSON.Current
			}
		}
		return entry != "", nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return entry
}

// converges applies a specification and waits until the machine is what it
// says.
func (w *world) converges(vm *rig.VM, machine string, generation int64, spec string) {
	w.t.Helper()
	path := filepath.Join(w.dir, "spec.json")
	if err := os.WriteFile(path, []byte(spec), 0o600); err != nil {
		w.t.Fatal(err)
	}
	if _, err := w.Run(w.ctx, "spec", "apply", machine, path); err != nil {
		w.t.Fatal(err)
	}
	w.observes(vm, machine, generation)
}

// observes waits until a generation is observed, with no section that failed.
func (w *world) observes(vm *rig.VM, machine string, generation int64) {
	w.t.Helper()
	err := vm.Until(w.ctx, fmt.Sprintf("generation %d to be observed", generation), func(ctx context.Context) (bool, error) {
		var got struct {
			Status struct {
				Observed int64 `json:"observed_generation"`
				Sections []struct{ Name, State, Message string }
			}
		}
		if w.RunJSON(ctx, &got, "spec", "get", machine) != nil {
			return false, nil
		}
		for _, s := range got.Status.Sections {
			if s.State == "failed" {
				return false, fmt.Errorf("section %s failed: %s", s.Name, s.Message)
			}
		}
		return got.Status.Observed == generation, nil
	})
	if err != nil {
		w.t.Fatalf("%v\n%s", err, w.timeline())
	}
}
