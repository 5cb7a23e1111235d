package modules

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"testing"
	"testing/fstest"
)

// debian is what depmod made for Debian's 6.12 generic kernel, cut down to some
// modules with all they need.
func debian(t testing.TB) *Index {
	t.Helper()
	x, err := ReadIndex(os.DirFS("testdata/debian-6.12"))
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// The devices are real ones: QEMU's, and two servers' controllers.
func TestDevicesGetTheirModules(t *testing.T) {
	x := debian(t)
	for modalias, want := range map[string]string{
		"virtio:d00000001v00001AF4":                             "virtio_net",
		"virtio:d00000002v00001AF4":                             "virtio_blk",
		"virtio:d00000004v00001AF4":                             "virtio_rng",
		"pci:v00001B36d00000010sv00001AF4sd00001100bc01sc08i02": "nvme",
		"pci:v00008086d00002922sv00001AF4sd00001100bc01sc06i01": "ahci",
		"pci:v00001000d00000060sv00001000sd00001013bc01sc04i00": "megaraid_sas",
		"pci:v00008086d000010D3sv00008086sd00000000bc02sc00i00": "e1000e",
		"pci:v00008086d000025ABsv00001AF4sd00001100bc08sc80i00": "i6300esb",
		"scsi:t-0x00": "sd_mod",
	} {
		got := x.Match(modalias)
		if !slices.Contains(got, want) {
			t.Errorf("%s: %q, want %s", modalias, got, want)
		}
	}
	for _, none := range []string{"", "x", "pci:v00001234d00001111sv00001AF4sd00001100bc03sc00i00", "pci:"} {
		if got := x.Match(none); len(got) != 0 {
			t.Errorf("%q: %q, want none", none, got)
		}
	}
}

func TestOrder(t *testing.T) {
	x := debian(t)
	for name, want := range map[string][]string{
		"e1000e":       {"e1000e"},
		"virtio-net":   {"failover", "net_failover", "virtio_net"},
		"megaraid_sas": {"scsi_common", "scsi_mod", "megaraid_sas"},
		"virtio_pci":   nil, // built in
	} {
		got, err := x.Order(name)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %q, %v, want %q", name, got, err, want)
		}
	}
	if _, err := x.Order("nonsense"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("nonsense: %v", err)
	}
	// btrfs names soft dependencies by alias, to be loaded before it.
	got, err := x.Order("btrfs")
	if err != nil {
		t.Fatal(err)
	}
	for _, before := range []string{"crc32c_intel", "raid6_pq", "libcrc32c"} {
		if i := slices.Index(got, before); i < 0 || i > slices.Index(got, "btrfs") {
			t.Errorf("%q lacks %s before btrfs", got, before)
		}
	}
	got, err = x.Order("ipmi_msghandler")
	if err != nil || !slices.Equal(got, []string{"ipmi_msghandler", "ipmi_devintf"}) {
		t.Errorf("ipmi_msghandler: %q, %v; want its soft dependency after it", got, err)
	}
}

func TestEveryDependencyComesBeforeItsModule(t *testing.T) {
	x := debian(t)
	for name := range x.files {
		order, err := x.Order(name)
		if err != nil {
			t.Error(err)
		}
		for i, m := range order {
			for _, d := range x.deps[m] {
				if j := slices.Index(order, d); !x.builtin[d] && (j < 0 || j > i) {
					t.Errorf("%s: %q has %s before its dependency %s", name, order, m, d)
				}
			}
		}
	}
}

func TestCyclesAreCut(t *testing.T) {
	x, err := ReadIndex(fstest.MapFS{
		"modules.dep":     {Data: []byte("a.ko: b.ko\nb.ko: a.ko\nc.ko:\n")},
		"modules.softdep": {Data: []byte("softdep c pre: c a post: c nothing\n")},
	})
	if err != nil {
		t.Fatal(err)
	}
	got, err := x.Order("c")
	if err != nil || !slices.Equal(got, []string{"b", "a", "c"}) {
		t.Errorf("%q, %v", got, err)
	}
}

func TestMatches(t *testing.T) {
	for _, c := range []struct {
		pattern, s string
		want       bool
	}{
		{"", "", true}, {"", "a", false}, {"*", "", true}, {"*", "any/thing", true},
		{"a*c", "abbbc", true}, {"a*c", "abbb", false}, {"a?c", "abc", true}, {"a?c", "ac", false},
		{"a[0-9]c", "a5c", true}, {"a[0-9]c", "axc", false}, {"a[!0-9]c", "axc", true}, {"a[]]c", "a]c", true},
		{"a[0-9", "a[0-9", true}, {`a\*c`, "a*c", true}, {`a\*c`, "abc", false}, {`a\`, `a\`, true},
		{"usb:v*d*dc*ic03isc[0-1]*", "usb:v1d2dc3ic03isc1ip2", true},
		{"*a*b*c", "xxaxxbxxc", true}, {"*a*b*c", "xxaxxcxxb", false},
	} {
		if got := matches(c.pattern, c.s); got != c.want {
			t.Errorf("matches(%q, %q) = %v", c.pattern, c.s, got)
		}
	}
}

func TestNameOf(t *testing.T) {
	for file, want := range map[string]string{
		"kernel/drivers/net/virtio-net.ko.xz": "virtio_net", "a.ko": "a", "a.ko.zst": "a", "a.ko.gz": "a",
		"a.ko.lz": "", ".ko": "", "a": "", "../a.ko": "", "/abs/a.ko": "", "a.kox": "",
	} {
		if got := nameOf(file); got != want {
			t.Errorf("%q: %q, want %q", file, got, want)
		}
	}
}

func TestNoIndexIsAnError(t *testing.T) {
	if _, err := ReadIndex(fstest.MapFS{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v", err)
	}
}

func FuzzReadIndex(f *testing.F) {
	f.Add([]byte("kernel/a.ko.xz: kernel/b.ko\n"), []byte("alias pci:v*d[0-9]* a\n"), []byte("softdep a pre: b post: c\n"), "pci:v1d2")
	f.Fuzz(func(t *testing.T, dep, alias, soft []byte, modalias string) {
		x, err := ReadIndex(fstest.MapFS{
			"modules.dep": {Data: dep}, "modules.alias": {Data: alias}, "modules.softdep": {Data: soft},
		})
		if err != nil {
			return
		}
		for name, file := range x.files {
			if !fs.ValidPath(file) {
				t.Fatalf("module %q has the file %q, outside of the directory", name, file)
			}
			order, err := x.Order(name)
			if err != nil || !slices.Contains(order, name) {
				t.Fatalf("order of %q: %q, %v", name, order, err)
			}
		}
		x.Match(modalias)
	})
}
