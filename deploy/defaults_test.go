package deploy

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/better-compute/bcd/agent/host"
	"github.com/better-compute/bcd/deploy/disk"
	"github.com/better-compute/bcd/deploy/gpt"
)

func put(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestPartitionReady(t *testing.T) {
	for name, part := range map[string]string{"vda": "vda2", "nvme0n1": "nvme0n1p2", "loop0": "loop0p2"} {
		for sector, want := range map[int][2]string{512: {"2048\n", "16\n"}, 4096: {"16384\n", "128\n"}} {
			dir := t.TempDir()
			r := rootsOf{sys: dir + "/sys", dev: dir + "/dev"}
			d, p := disk.Disk{Block: host.Block{Name: name}}, gpt.Partition{Number: 2, First: 2048, Last: 2063}
			ready := func() bool { return r.partitionReady(d, p, sector) }
			if ready() {
				t.Errorf("%s: ready without a node", name)
			}
			put(t, filepath.Join(dir, "dev", part), "")
			put(t, filepath.Join(dir, "sys/block", name, part, "start"), "34\n")
			put(t, filepath.Join(dir, "sys/block", name, part, "size"), want[1])
			if ready() {
				t.Errorf("%s: the old partition of that number is taken for the new one", name)
			}
			put(t, filepath.Join(dir, "sys/block", name, part, "start"), want[0])
			if !ready() {
				t.Errorf("%s with sectors of %d: not ready", name, sector)
			}
		}
	}
}

func TestMemory(t *testing.T) {
	dir := t.TempDir()
	r := rootsOf{proc: dir}
	for text, want := range map[string]int64{
		"MemTotal:        1000 kB\nMemFree: 1 kB\nMemAvailable:     512 kB\n": 512 << 10,
		"MemTotal: 1000 kB\n":  -1,
		"MemAvailable: x kB\n": -1,
	} {
		put(t, dir+"/meminfo", text)
		got, err := r.memory()
		if err != nil {
			got = -1
		}
		if got != want {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
}

func TestMeter(t *testing.T) {
	c := newClock()
	var last Progress
	m := meter{clock: c, report: func(p Progress) { last = p }}
	m.begin(PhaseStream)
	for i := range int64(20) {
		c.now = c.now.Add(time.Second)
		m.set((i+1)*1000, 40000)
	}
	if last.Phase != PhaseStream || last.Done != 20000 || last.Rate < 980 || last.Rate > 1001 || last.ETA < 19*time.Second || last.ETA > 21*time.Second {
		t.Errorf("%+v", last)
	}
	m.set(21000, -1)
	if last.Total != 0 || last.ETA != -1 {
		t.Errorf("unknown total: %+v", last)
	}
	m.begin(PhaseVerify)
	if last != (Progress{Phase: PhaseVerify, ETA: -1}) {
		t.Errorf("new phase: %+v", last)
	}
}
