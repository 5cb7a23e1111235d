package qemutests

import (
	"regexp"
	"strconv"
	"testing"

	"github.com/better-compute/bcd/qemu-tests/rig"
)

// Memory of virtual machines, in MiB, as plugged in. qemu-tests/minram
// measures the border, which lies between the two.
const (
	tooLittle = 112
	enough    = 192
)

// TestTooLittleMemory: the kernel of a machine with too little memory leaves
// out files of the initramfs without stopping. The machine says so in words,
// with the figures, and does not go on with what it has.
func TestTooLittleMemory(t *testing.T) {
	w := newWorld(t)
	vm := w.ramdisk("small", func(c *rig.Config) { c.MemoryMiB = tooLittle })
	if err := vm.WaitConsole(w.ctx, "the machine restarts in"); err != nil {
		t.Fatal(err)
	}
	console, err := vm.Console(0)
	if err != nil {
		t.Fatal(err)
	}
	said := regexp.MustCompile(`too little memory: have (\d+) MiB, need (\d+) MiB`).FindStringSubmatch(console)
	if said == nil {
		t.Fatalf("the console does not say how much memory is missing:\n%s", console)
	}
	have, _ := strconv.Atoi(said[1])
	need, _ := strconv.Atoi(said[2])
	if have >= tooLittle || need <= have {
		t.Errorf("a machine with %d MiB says: %s", tooLittle, said[0])
	}
	t.Log(said[0])
}

// TestSmallestMemoryThatDeploys: what the README says is enough is enough.
func TestSmallestMemoryThatDeploys(t *testing.T) {
	w := newWorld(t)
	vm := w.ramdisk("least", func(c *rig.Config) {
		c.MemoryMiB = enough
		w.bareDisk(c)
	})
	m := w.connected(vm, "ramdisk", nil)
	deploy := w.ended(vm, w.send("deploy", m.ID, artefact(t, "images/bcd-virtual-amd64.node.raw.zst"), "--no-reboot").ID)
	if deploy.Outcome.Status != "succeeded" {
		t.Fatalf("deploy with %d MiB: %+v\n%s", enough, deploy.Outcome, w.timeline())
	}
}
