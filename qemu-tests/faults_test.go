package qemutests

import (
	"context"
	"strings"
	"testing"

	"github.com/better-compute/bcd/qemu-tests/rig"
)

// slow is how many bytes a second a disk takes while a test does something in
// the middle of a deployment; half of the node image takes a quarter of a
// minute then, at whatever speed the machine is emulated.
const slow = 1 << 20

// bareDisk gives a machine an empty disk of diskBytes.
func (w *world) bareDisk(c *rig.Config) {
	w.t.Helper()
	disk, err := rig.NewDisk(w.dir, c.Name+".raw", diskBytes)
	if err != nil {
		w.t.Fatal(err)
	}
	c.Disks = []rig.Disk{{Path: disk, Serial: "disk-of-" + c.Name}}
}

// middleOfDeploy begins a deployment on a slow disk and comes back when some
// of the image is there and most is not.
func (w *world) middleOfDeploy(vm *rig.VM, machine string) *command {
	w.t.Helper()
	if err := vm.Throttle(w.ctx, 0, slow); err != nil {
		w.t.Fatal(err)
	}
	c := w.send("deploy", machine, artefact(w.t, "images/bcd-virtual-amd64.node.raw.zst"), "--no-reboot")
	err := vm.Until(w.ctx, "some of the image is on the disk", func(ctx context.Context) (bool, error) {
		now := w.command(ctx, c.ID)
		if now == nil || now.Progress == nil {
			return false, nil
		}
		if now.Outcome != nil {
			w.t.Errorf("the deployment ended before the middle: %+v", now.Outcome)
			return true, nil
		}
		done, _ := now.Progress.Body["bytes_done"].(float64)
		return now.Progress.Body["phase"] == "stream" && done > 0, nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	if w.t.Failed() {
		w.t.FailNow()
	}
	return c
}

// entry is a line of a machine's history.
type entry struct {
	Type      string `json:"type"`
	Message   string `json:"message"`
	CommandID string `json:"command_id"`
}

// history gives what the gateway wrote down about a command: how often each
// type of entry is there.
func (w *world) history(machine, command string) map[string]int {
	w.t.Helper()
	var info struct {
		Timeline []entry `json:"timeline"`
	}
	if err := w.RunJSON(w.ctx, &info, "machine", machine); err != nil {
		w.t.Fatal(err)
	}
	counts := map[string]int{}
	for _, e := range info.Timeline {
		if e.CommandID == command {
			counts[e.Type]++
		}
	}
	return counts
}

// once checks that a command began once and ended once.
func (w *world) once(machine string, c *command) {
	w.t.Helper()
	counts := w.history(machine, c.ID)
	for _, kind := range []string{"command.queued", "command.started", "command.finished"} {
		if counts[kind] != 1 {
			w.t.Errorf("%s %s has %d entries %s, want one: %v\n%s", c.Kind, c.ID, counts[kind], kind, counts, w.timeline())
		}
	}
}

// TestGatewayKilledDuringDeploy: the gateway has no chance to say goodbye, and
// comes back with nothing but its disk, while a machine is being deployed.
// The machine goes on where it was, and what was asked for happens once.
func TestGatewayKilledDuringDeploy(t *testing.T) {
	w := newWorld(t)
	vm := w.ramdisk("held", w.bareDisk)
	m := w.connected(vm, "ramdisk", nil)
	deploy := w.middleOfDeploy(vm, m.ID)

	w.Kill()
	if err := w.Start(w.ctx); err != nil {
		t.Fatal(err)
	}
	// The machine has not come back yet; this waits at the gateway for it.
	ping := w.send("send", "diag.ping", m.ID, "--payload", "while you were away")
	if err := vm.Throttle(w.ctx, 0, 0); err != nil {
		t.Fatal(err)
	}

	if ping = w.ended(vm, ping.ID); ping.Outcome.Status != "succeeded" {
		t.Errorf("diag.ping: %+v", ping.Outcome)
	}
	deploy = w.ended(vm, deploy.ID)
	if deploy.Outcome.Status != "succeeded" {
		t.Fatalf("deploy: %+v\n%s", deploy.Outcome, w.timeline())
	}
	w.once(m.ID, deploy)
	w.once(m.ID, ping)

	// Once, too, by the machine's own account, which outlives the gateway.
	console, err := vm.Console(0)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(console, "disk chosen"); n != 1 {
		t.Errorf("the machine chose a disk %d times, want once", n)
	}
	if after := w.connected(vm, "ramdisk", nil); after.Current.BootID != m.Current.BootID || len(after.Nodes) != 1 {
		t.Errorf("the machine is %+v after it was %+v", after, m)
	}
	t.Log(w.timeline())
}

// TestPowerCutDuringDeploy: what a machine was doing when its power went is
// told as unknown, and the machine can be deployed again.
func TestPowerCutDuringDeploy(t *testing.T) {
	w := newWorld(t)
	vm := w.pxe("cut", func(c *rig.Config) {
		c.SMBIOS = []string{"bcd.gateway=" + w.URL(), "bcd.token=" + w.token("ramdisk", "--uses", "5")}
	})
	first := w.connected(vm, "ramdisk", nil)
	cut := w.middleOfDeploy(vm, first.ID)

	vm.PowerCut()
	if err := vm.PowerOn(w.ctx); err != nil {
		t.Fatal(err)
	}
	// Half an image must not boot: the firmware goes on to the network, and
	// the ramdisk joins again.
	second := w.connected(vm, "ramdisk", first)
	if second.ID != first.ID {
		t.Errorf("the machine came back as %s, it was %s", second.ID, first.ID)
	}
	if cut = w.ended(vm, cut.ID); cut.Outcome.Status != "indeterminate" {
		t.Errorf("the deployment that was cut off: %+v", cut.Outcome)
	}
	t.Logf("the cut deployment: %s %s: %s", cut.Outcome.Status, cut.Outcome.Code, cut.Outcome.Message)

	deploy := w.ended(vm, w.send("deploy", first.ID, artefact(t, "images/bcd-virtual-amd64.node.raw.zst")).ID)
	if deploy.Outcome.Status != "succeeded" {
		t.Fatalf("deploy: %+v\n%s", deploy.Outcome, w.timeline())
	}
	w.connected(vm, "node", second)
	t.Log(w.timeline())
}

// shellPrompt is what the rescue shell has under its first prompt.
const shellPrompt = "toggle key help"

// supervisorProcesses are the supervisor and all that it started, for a shell.
const supervisorProcesses = "$(cat /sys/fs/cgroup/supervisor/cgroup.procs)"

// TestSupervisorKilledAndStopped: somebody at the machine's console kills the
// supervisor, and the machine stays up; then stops it, and the watchdog takes
// the machine down, because nothing in it can tell any more that it is well.
func TestSupervisorKilledAndStopped(t *testing.T) {
	w := newWorld(t)
	vm := w.ramdisk("patient", func(c *rig.Config) {
		c.Keyboard, c.Watchdog = true, true
		c.Cmdline += " bcd.rescue"
		c.SMBIOS = []string{"bcd.gateway=" + w.URL(), "bcd.token=" + w.token("ramdisk", "--uses", "5")}
	})
	first := w.connected(vm, "ramdisk", nil)
	for _, ready := range []string{"hardware watchdog", shellPrompt} {
		if err := vm.WaitConsole(w.ctx, ready); err != nil {
			t.Fatal(err)
		}
	}

	mark := vm.ConsoleMark()
	if err := vm.Type(w.ctx, "kill -9 "+supervisorProcesses+"\r"); err != nil {
		t.Fatal(err)
	}
	if _, err := vm.WaitConsoleAfter(w.ctx, mark, "the supervisor ended: killed by"); err != nil {
		t.Fatal(err)
	}
	ping := w.ended(vm, w.send("send", "diag.ping", first.ID, "--payload", "still there").ID)
	if ping.Outcome.Status != "succeeded" {
		t.Errorf("diag.ping: %+v", ping.Outcome)
	}
	back := w.connected(vm, "ramdisk", nil)
	if back.Current.BootID != first.Current.BootID || vm.Events("RESET") != 0 {
		t.Errorf("the machine has restarted: boot %s, then %s", first.Current.BootID, back.Current.BootID)
	}

	if err := vm.Type(w.ctx, "kill -19 "+supervisorProcesses+"\r"); err != nil {
		t.Fatal(err)
	}
	err := vm.Until(w.ctx, "the watchdog resets the machine", func(context.Context) (bool, error) {
		return vm.Events("WATCHDOG") > 0 && vm.Events("RESET") > 0, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	again := w.connected(vm, "ramdisk", first)
	if again.ID != first.ID {
		t.Errorf("the machine came back as %s, it was %s", again.ID, first.ID)
	}
	t.Log(w.timeline())
}
