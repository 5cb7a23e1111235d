package qemutests

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/better-compute/bcd/agent/pki"
	"github.com/better-compute/bcd/qemu-tests/rig"
)

// canary is a secret that must be found nowhere.
type canary struct {
	name  string
	value []byte
}

// forms are the canary as it is and as somebody might have written it down.
func (c canary) forms() map[string][]byte {
	return map[string][]byte{
		"as it is":  c.value,
		"in hex":    []byte(hex.EncodeToString(c.value)),
		"in base64": bytes.TrimRight([]byte(base64.StdEncoding.EncodeToString(c.value)), "="),
	}
}

// absent fails for each canary that is in a text.
func absent(t *testing.T, where string, text []byte, canaries ...canary) {
	t.Helper()
	if len(text) == 0 {
		t.Errorf("%s is empty: nothing was looked at", where)
	}
	for _, c := range canaries {
		for form, value := range c.forms() {
			if bytes.Contains(text, value) {
				t.Errorf("%s is in %s, %s", c.name, where, form)
			}
		}
	}
}

// secretOf is the part of a token that nobody may see.
func (w *world) secretOf(token string) []byte {
	w.t.Helper()
	_, secret, err := pki.SplitToken(token)
	if err != nil {
		w.t.Fatal(err)
	}
	return []byte(secret)
}

// TestNoSecretLeaksAndNothingListens takes a machine from power-on to an
// installed node with three secrets on the way, and looks for them, and for
// what listens, everywhere.
func TestNoSecretLeaksAndNothingListens(t *testing.T) {
	w := newWorld(t)
	token := w.token("ramdisk")
	ramdiskToken := canary{"the ramdisk's join token", w.secretOf(token)}
	userData := canary{"the user data", []byte("canary-user-data-5f1c0e9a7b3d")}
	vm := w.pxe("canary", func(c *rig.Config) {
		c.SMBIOS = []string{"bcd.gateway=" + w.URL(), "bcd.token=" + token}
		c.NICs[0].Capture = true
	})
	disk := filepath.Join(w.dir, "canary.raw")
	ramdisk := w.connected(vm, "ramdisk", nil)
	seed := w.file("user-data", append([]byte("#cloud-config\n# "), userData.value...))
	deploy := w.ended(vm, w.send("deploy", ramdisk.ID, artefact(t, "images/bcd-virtual-amd64.node.raw.zst"),
		"--user-data", seed, "--no-reboot").ID)
	if deploy.Outcome.Status != "succeeded" {
		t.Fatalf("deploy: %+v", deploy.Outcome)
	}
	w.processesAreClean(vm, ramdiskToken, userData)

	// What the deployment left for the installed system, on the disk alone.
	nodeToken := canary{"the node's join token", w.secretOf(w.tokenOn(disk))}
	if bytes.Equal(nodeToken.value, ramdiskToken.value) {
		t.Fatal("the node was given the ramdisk's token")
	}
	all := []canary{ramdiskToken, nodeToken, userData}

	b := w.collect(vm, ramdisk.ID)
	absent(t, "the ramdisk's bundle", b.all, all...)
	nothingWasRedacted(t, b)
	checkSockets(t, "ramdisk", b, ramdiskSockets)

	if reboot := w.ended(vm, w.send("send", "node.reboot", ramdisk.ID).ID); reboot.Outcome.Status != "succeeded" {
		t.Fatalf("node.reboot: %+v", reboot.Outcome)
	}
	node := w.connected(vm, "node", ramdisk)

	// The disk has the journal, the identity and what was the seed. User data
	// are installed, so they are on the data partition; the seed's are gone.
	err := vm.Until(w.ctx, "the seed's secrets are off the disk", func(context.Context) (bool, error) {
		for _, c := range []canary{ramdiskToken, nodeToken} {
			found, err := fileContains(disk, 0, diskBytes, c.value)
			if err != nil || found {
				return false, err
			}
		}
		from, to := w.firstPartition(disk)
		found, err := fileContains(disk, from, to, userData.value)
		return !found, err
	})
	if err != nil {
		t.Error(err)
	}
	b = w.collect(vm, node.ID)
	absent(t, "the node's bundle", b.all, all...)
	nothingWasRedacted(t, b)
	checkSockets(t, "node", b, ramdiskSockets)

	w.processesAreClean(vm, all...)
	for _, args := range [][]string{{"events"}, {"events", "--json"}, {"machine", node.ID}, {"machine", node.ID, "--json", "--inventory"}, {"token", "list", "--json"}} {
		out, err := w.Run(w.ctx, args...)
		if err != nil {
			t.Fatal(err)
		}
		absent(t, "bcd-gateway "+args[0], out, all...)
	}
	// The captured packets, while the machine still runs.
	for _, name := range []string{vm.ConsolePath(), filepath.Join(vm.Dir, "nic0.pcap"), w.Log} {
		content, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		absent(t, filepath.Base(name), content, all...)
	}
	// The gateway knows tokens by their hash. User data are its to keep until
	// they are fetched, and its file keeps what was deleted until it is used
	// again.
	w.Stop()
	content, err := os.ReadFile(filepath.Join(w.Data, "state.db"))
	if err != nil {
		t.Fatal(err)
	}
	absent(t, "state.db", content, ramdiskToken, nodeToken)
}

// nothingWasRedacted looks at the arguments of a machine's processes: a bundle
// leaves out a secret that stands there, and it must not stand there.
func nothingWasRedacted(t *testing.T, b *bundle) {
	t.Helper()
	processes := b.files["processes.txt"]
	if !strings.Contains(processes, "supervise") || strings.Contains(processes, "redacted") {
		t.Errorf("the machine's processes:\n%s", processes)
	}
}

// tokenOn finds the join token that a deployment left on a disk.
func (w *world) tokenOn(disk string) string {
	w.t.Helper()
	content, err := os.ReadFile(disk)
	if err != nil {
		w.t.Fatal(err)
	}
	found := regexp.MustCompile(`bcjt_[A-Za-z0-9]+_[A-Za-z0-9_-]{20,}`).Find(content)
	if found == nil {
		w.t.Fatal("there is no join token on the disk after a deployment")
	}
	return string(found)
}

// firstPartition is where the EFI system partition of a synthetic disk begins
// and ends, in bytes (UEFI 2.10 section 5.3.3).
func (w *world) firstPartition(disk string) (from, to int64) {
	w.t.Helper()
	f, err := os.Open(disk)
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	entry := make([]byte, 48)
	if _, err := f.ReadAt(entry, 2*512); err != nil {
		w.t.Fatal(err)
	}
	from, to = int64(binary.LittleEndian.Uint64(entry[32:]))*512, (int64(binary.LittleEndian.Uint64(entry[40:]))+1)*512
	if from <= 0 || to <= from || to > diskBytes {
		w.t.Fatalf("the first partition is from %d to %d", from, to)
	}
	return from, to
}

// fileContains says whether a file has some bytes between two offsets.
func fileContains(path string, from, to int64, want []byte) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	content, err := io.ReadAll(io.NewSectionReader(f, from, to-from))
	return bytes.Contains(content, want), err
}

// processesAreClean looks at the arguments of every process of this host: QEMU
// and the gateway are among them.
func (w *world) processesAreClean(vm *rig.VM, canaries ...canary) {
	w.t.Helper()
	names, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		w.t.Fatal(err)
	}
	qemu := false
	for _, name := range names {
		line, err := os.ReadFile(name)
		if err != nil || len(line) == 0 {
			continue // ended, or the kernel's
		}
		qemu = qemu || filepath.Base(filepath.Dir(name)) == strconv.Itoa(vm.PID())
		absent(w.t, "the arguments of a process, "+name, line, canaries...)
	}
	if !qemu {
		w.t.Error("QEMU was not among the processes")
	}
}
