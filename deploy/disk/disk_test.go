package disk

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/better-compute/bcd/agent/host"
	"github.com/better-compute/bcd/deploy/disk/looptest"
)

// machine writes a sysfs tree as the kernel shows it.
type machine struct {
	t   testing.TB
	dir string
}

func (m machine) file(path, text string) {
	m.t.Helper()
	full := filepath.Join(m.dir, path)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(full, []byte(text), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

func (m machine) disk(name, device string, mibs string, files map[string]string) {
	m.t.Helper()
	place := filepath.Join("devices", device, "block", name)
	m.file(filepath.Join("sys", place, "size"), mibs+"\n")
	m.file(filepath.Join("sys", place, "queue/logical_block_size"), "512\n")
	for f, text := range files {
		m.file(filepath.Join("sys", place, f), text)
	}
	for link, target := range map[string]string{
		filepath.Join("sys", place, "device"): filepath.Join(m.dir, "sys/devices", device),
		filepath.Join("sys/block", name):      filepath.Join(m.dir, "sys", place),
	} {
		full := filepath.Join(m.dir, link)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			m.t.Fatal(err)
		}
		if err := os.Symlink(target, full); err != nil {
			m.t.Fatal(err)
		}
	}
}

func (m machine) list() map[string]Disk {
	m.t.Helper()
	disks, err := List(context.Background(), Roots{Sys: m.dir + "/sys", Proc: m.dir + "/proc", Dev: m.dir + "/dev"})
	if err != nil {
		m.t.Fatal(err)
	}
	out := map[string]Disk{}
	for _, d := range disks {
		out[d.Name] = d
	}
	return out
}

func TestList(t *testing.T) {
	m := machine{t, t.TempDir()}
	pci := "pci0000:00/0000:00:04.0/"
	m.disk("vda", pci+"virtio1", "41943040", map[string]string{"serial": "ROOT1\n", "dev": "252:0\n"})
	m.disk("vdb", pci+"virtio2", "41943040", map[string]string{"dev": "252:16\n", "vdb1/dev": "252:17\n", "vdb1/partition": "1"})
	m.disk("vdc", pci+"virtio3", "41943040", map[string]string{"dev": "252:32\n", "vdc2/dev": "252:34\n", "vdc2/holders/md127/x": ""})
	m.disk("vdd", pci+"virtio4", "41943040", map[string]string{"dev": "252:48\n", "holders/dm-0/x": ""})
	m.disk("vde", pci+"virtio5", "41943040", map[string]string{"dev": "252:64\n", "ro": "1\n"})
	m.disk("vdf", pci+"virtio6", "41943040", map[string]string{"dev": "252:80\n"})
	m.disk("vdg", pci+"virtio7", "0", nil)
	m.disk("nvme0n1", "pci0000:00/0000:01:00.0/nvme/nvme0", "7814037168", map[string]string{"dev": "259:0\n", "wwid": "eui.0025385b71b00d4d\n"})
	m.file("sys/devices/pci0000:00/0000:01:00.0/nvme/nvme0/serial", "S4EWNX0R123  \n")
	m.disk("sda", "pci0000:00/0000:03:00.0/host0/target0:2:0/0:2:0:0", "7814037168", map[string]string{"dev": "8:0\n", "queue/rotational": "1\n"})
	m.file("sys/devices/pci0000:00/0000:03:00.0/host0/target0:2:0/0:2:0:0/model", "PERC H730\n")
	m.file("sys/devices/pci0000:00/0000:03:00.0/host0/target0:2:0/0:2:0:0/wwid", "naa.61866da0\n")
	m.disk("sdb", "pci0000:00/0000:00:14.0/usb1/1-1/host9/target9:0:0/9:0:0:0", "1000000", map[string]string{"dev": "8:16\n", "removable": "1\n"})
	for _, virtual := range []string{"loop0", "ram0", "zram0", "dm-0", "md127"} {
		m.file("sys/block/"+virtual+"/size", "1000000\n")
	}
	m.file("proc/self/mountinfo", "1 1 0:2 / / rw - rootfs rootfs rw\n25 1 252:17 / /mnt rw - ext4 /dev/vdb1 rw\n")
	m.file("proc/swaps", "Filename Type Size Used Priority\n/dev/vdf partition 1 0 -2\n")

	got := m.list()
	for name, want := range map[string]string{
		"vda": "", "nvme0n1": "", "sda": "",
		"vdb": "vdb1 is mounted at /mnt",
		"vdc": "vdc2 is part of md127: stop it first (mdadm --stop /dev/md127)",
		"vdd": "vdd is part of dm-0: stop it first (vgchange -an",
		"vde": "it is read-only",
		"vdf": "vdf is used as swap",
		"sdb": "it is removable",
	} {
		d, ok := got[name]
		if !ok || !strings.HasPrefix(d.Refused, want) || (want == "") != (d.Refused == "") {
			t.Errorf("%s: refused %q, want %q (found %v)", name, d.Refused, want, ok)
		}
	}
	if len(got) != 9 {
		t.Errorf("%d disks: %v", len(got), got)
	}
	if s := got["vda"].String(); !strings.Contains(s, "serial ROOT1") || !strings.Contains(s, "virtio") || !strings.Contains(s, "vda (") {
		t.Errorf("vda is called %s", s)
	}
	if d := got["sda"]; d.WWN != "naa.61866da0" || !d.Rotational || d.Model != "PERC H730" {
		t.Errorf("sda %+v", d)
	}
	if d := got["nvme0n1"]; d.Serial != "S4EWNX0R123" || d.Transport != "nvme" {
		t.Errorf("nvme %+v", d)
	}
}

func fleet() []Disk {
	mk := func(name string, size int64, b host.Block) Disk {
		b.Name, b.SizeBytes = name, size
		return Disk{Block: b, Node: "/dev/" + name}
	}
	refused := mk("sdz", 500, host.Block{Serial: "Z"})
	refused.Refused = "it is read-only"
	return []Disk{
		mk("nvme1n1", 1000, host.Block{Serial: "A1", WWN: "eui.00aa", Model: "SAMSUNG MZVL2", Transport: "nvme", Path: "pci-0000:02:00.0-nvme-1"}),
		mk("nvme0n1", 1000, host.Block{Serial: "A2", WWN: "eui.00ab", Model: "SAMSUNG MZVL2", Transport: "nvme", Path: "pci-0000:01:00.0-nvme-1"}),
		mk("sda", 4000, host.Block{Serial: "R", WWN: "naa.5000C500AB", Model: "ST4000", Transport: "sata", Rotational: true, Path: "pci-0000:00:1f.2-ata-1"}),
		mk("sdb", 200, host.Block{Serial: "S", Model: "INTEL SSDSC2", Transport: "sata", Path: "pci-0000:00:1f.2-ata-2"}),
		refused,
	}
}

func TestChoose(t *testing.T) {
	for name, tc := range map[string]struct {
		h    Hints
		b    Binding
		want string
		err  error
	}{
		"serial":            {h: Hints{Serial: "A1"}, want: "nvme1n1"},
		"wwn with 0x":       {h: Hints{WWN: "0x5000c500ab"}, want: "sda"},
		"wwn with wwn-":     {h: Hints{WWN: "wwn-0x5000c500ab"}, want: "sda"},
		"model glob":        {h: Hints{Model: "intel*"}, want: "sdb"},
		"model glob front":  {h: Hints{Model: "*SC2"}, want: "sdb"},
		"model glob both":   {h: Hints{Model: "*4000*"}, want: "sda"},
		"by path":           {h: Hints{ByPath: "/dev/disk/by-path/pci-0000:01:00.0-nvme-1"}, want: "nvme0n1"},
		"rotational":        {h: Hints{Rotational: "yes"}, want: "sda"},
		"size range":        {h: Hints{MinBytes: 100, MaxBytes: 900}, want: "sdb"},
		"smallest":          {h: Hints{Smallest: true}, want: "sdb"},
		"two smallest":      {h: Hints{Smallest: true, Transport: "NVMe"}, err: ErrAmbiguous},
		"first of smallest": {h: Hints{Smallest: true, First: true, Transport: "nvme"}, want: "nvme0n1"},
		"first":             {h: Hints{First: true}, want: "sda"},
		"ambiguous":         {h: Hints{Transport: "nvme"}, err: ErrAmbiguous},
		"bound":             {h: Hints{Transport: "nvme"}, b: Binding{WWN: "00AB"}, want: "nvme0n1"},
		"bound elsewhere":   {h: Hints{Transport: "nvme"}, b: Binding{Serial: "R"}, err: ErrMismatch},
		"bound to both":     {b: Binding{Serial: "A1", WWN: "eui.00ab"}, err: ErrMismatch},
		"read-only":         {h: Hints{Serial: "Z"}, err: ErrNone},
		"none":              {h: Hints{MinBytes: 9999}, err: ErrNone},
		"no hints":          {err: ErrAmbiguous},
	} {
		d, err := Choose(fleet(), tc.h, tc.b)
		if !errors.Is(err, tc.err) || d.Name != tc.want {
			t.Errorf("%s: %q, %v; want %q, %v", name, d.Name, err, tc.want, tc.err)
		}
		if err != nil && name != "none" && !strings.Contains(err.Error(), "serial") {
			t.Errorf("%s: the error lists no candidates: %v", name, err)
		}
	}
	for _, h := range []Hints{{MinBytes: 5, MaxBytes: 4}, {MinBytes: -1}, {Rotational: "maybe"}, {Model: "a*b"}} {
		if _, err := Choose(fleet(), h, Binding{}); err == nil {
			t.Errorf("accepted %+v", h)
		}
	}
	if _, err := Choose(nil, Hints{}, Binding{}); !errors.Is(err, ErrNone) {
		t.Errorf("no disks: %v", err)
	}
}

func TestDevice(t *testing.T) {
	const size = 8 << 20
	for _, sector := range []int{512, 4096} {
		node, file := looptest.New(t, size, sector, 0xAA)
		d, err := Open(node)
		if err != nil {
			t.Fatal(err)
		}
		if d.Size() != size || d.SectorSize() != sector || !d.direct {
			t.Errorf("size %d sector %d direct %v", d.Size(), d.SectorSize(), d.direct)
		}
		want := bytes.Repeat([]byte{0xAA}, size)
		put := func(off int, p []byte) {
			t.Helper()
			if n, err := d.WriteAt(p, int64(off)); n != len(p) || err != nil {
				t.Fatalf("write %d at %d: %d, %v", len(p), off, n, err)
			}
			copy(want[off:], p)
		}
		put(0, bytes.Repeat([]byte{1}, size)[:3<<20]) // not in aligned memory
		block := Buffer(1 << 20)
		for i := range block {
			block[i] = byte(i)
		}
		put(1<<20, block)
		put(4097, []byte("across no sector"))
		put(8190, []byte("across sectors"))
		put(size-5, []byte("edge!"))
		if _, err := d.WriteAt([]byte("beyond"), size-5); err == nil {
			t.Error("wrote beyond the end")
		}
		if err := d.ZeroOut(context.Background(), 2<<20, 1<<20); err != nil {
			t.Fatal(err)
		}
		clear(want[2<<20 : 3<<20])
		if err := errors.Join(d.Flush(), d.DropCaches()); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, size-3)
		if n, err := d.ReadAt(got, 3); n != len(got) || err != nil || !bytes.Equal(got, want[3:]) {
			t.Errorf("read back %d bytes, %v", n, err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := d.ZeroOut(ctx, 0, size); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled zeroing: %v", err)
		}
		// A second opener is kept out while we hold it.
		if _, err := Open(node); !errors.Is(err, ErrBusy) {
			t.Errorf("second open: %v", err)
		}
		if err := d.RereadPartitions(); err != nil && !strings.Contains(err.Error(), "invalid argument") {
			// A loop device without partition scanning says EINVAL.
			t.Error(err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		b, err := os.ReadFile(file)
		if err != nil || !bytes.Equal(b, want) {
			t.Errorf("the file behind the disk differs (%v)", err)
		}
	}
}

func TestMountedDiskIsBusy(t *testing.T) {
	node, _ := looptest.New(t, 16<<20, 512, 0xAA)
	if out, err := exec.Command("mkfs.ext4", "-q", "-F", node).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	at := t.TempDir()
	if out, err := exec.Command("mount", node, at).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", at).CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	if _, err := Open(node); !errors.Is(err, ErrBusy) || !strings.Contains(err.Error(), "unmount") {
		t.Errorf("opened a mounted disk: %v", err)
	}
}
