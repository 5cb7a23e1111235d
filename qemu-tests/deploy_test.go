package qemutests

import (
	"path/filepath"
	"testing"

	"github.com/better-compute/bcd/qemu-tests/rig"
)

// diskBytes is the size of the machines' disks: more than the node image, so
// that the backup partition table has to move.
const diskBytes = 256 << 20

// pxe is a machine with an empty disk whose firmware finds our UKI by PXE and
// nothing else.
func (w *world) pxe(name string, change func(*rig.Config)) *rig.VM {
	w.t.Helper()
	disk, err := rig.NewDisk(w.dir, name+".raw", diskBytes)
	if err != nil {
		w.t.Fatal(err)
	}
	c := rig.Config{
		Name: name, MemoryMiB: 512,
		SMBIOS: []string{"bcd.gateway=" + w.URL(), "bcd.token=" + w.token("ramdisk")},
		NICs:   []rig.NIC{{TFTPDir: filepath.Dir(artefact(w.t, "images/bcd-virtual-amd64.uki.efi")), BootFile: "bcd-virtual-amd64.uki.efi", BootIndex: 1}},
		Disks:  []rig.Disk{{Path: disk, Serial: "disk-of-" + name, BootIndex: 2}},
	}
	if change != nil {
		change(&c)
	}
	return rig.Run(w.t, w.dir, c)
}

func TestDeployRebootNodeJoins(t *testing.T) {
	w := newWorld(t)
	vm := w.pxe("bare", nil)
	ramdisk := w.connected(vm, "ramdisk", nil)

	deploy := w.ended(vm, w.send("deploy", ramdisk.ID, artefact(t, "images/bcd-virtual-amd64.node.raw.zst")).ID)
	if deploy.Outcome.Status != "succeeded" {
		t.Fatalf("deploy: %+v\n%s", deploy.Outcome, w.timeline())
	}
	t.Logf("deployed: %v", deploy.Outcome.Result)

	node := w.connected(vm, "node", ramdisk)
	if node.ID != ramdisk.ID {
		t.Errorf("the node came up as machine %s, the ramdisk was %s", node.ID, ramdisk.ID)
	}
	if len(node.Nodes) != 2 {
		t.Errorf("the machine has the nodes %v, want its ramdisk and its installed node", node.Nodes)
	}
	t.Log(w.timeline())
}
