package image

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/better-compute/bcd/image/debian"
)

// firmwarePackage makes a package with files and links, already in a cache.
func firmwarePackage(t *testing.T, files, links map[string]string) (*debian.Archive, debian.Package) {
	t.Helper()
	root, cache := t.TempDir(), t.TempDir()
	put := func(name string, write func(at string) error) {
		at := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := write(at); err != nil {
			t.Fatal(err)
		}
	}
	files["DEBIAN/control"] = "Package: firmware-x\nVersion: 1\nArchitecture: all\nMaintainer: nobody <n@example.org>\nDescription: x\n"
	for name, text := range files {
		put(name, func(at string) error { return os.WriteFile(at, []byte(text), 0o644) })
	}
	for name, target := range links {
		put(name, func(at string) error { return os.Symlink(target, at) })
	}
	deb := filepath.Join(cache, "x.deb")
	if out, err := exec.CommandContext(t.Context(), "dpkg-deb", "--build", root, deb).CombinedOutput(); err != nil {
		t.Fatalf("dpkg-deb: %v: %s", err, out)
	}
	data, err := os.ReadFile(deb)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(data)
	p := debian.Package{Name: "firmware-x", Version: "1", Architecture: "all", Size: int64(len(data)), SHA256: hex.EncodeToString(sum[:])}
	if err := os.Mkdir(filepath.Join(cache, "deb"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(deb, filepath.Join(cache, "deb", p.SHA256+".deb")); err != nil {
		t.Fatal(err)
	}
	return &debian.Archive{Release: "trixie", Architecture: "amd64", Cache: cache}, p
}

// TestFirmware takes what modules name, through links, and lists the rest.
func TestFirmware(t *testing.T) {
	archive, p := firmwarePackage(t, map[string]string{
		"usr/lib/firmware/nic/fw-1.bin": "one", "usr/lib/firmware/nic/fw-2.bin": "two",
		"usr/lib/firmware/real/ddp-1.3.pkg": "ddp", "usr/lib/firmware/unasked.bin": "no", "usr/share/doc/x": "doc",
	}, map[string]string{
		"usr/lib/firmware/intel/ddp.pkg": "../real/ddp-1.3.pkg", "usr/lib/firmware/top.bin": "/lib/firmware/nic/fw-1.bin",
		"usr/lib/firmware/loop.bin": "loop.bin", "usr/lib/firmware/dangling.bin": "gone.bin",
	})
	set := &firmwareSet{missing: map[string][]string{
		"nic/fw-*.bin": {"nic"}, "intel/ddp.pkg": {"ice"}, "top.bin": {"top"},
		"loop.bin": {"loop"}, "dangling.bin": {"d"}, "gone.bin": {"b", "a"}, "../escape": {"e"},
	}}
	if err := set.take(t.Context(), archive, p); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, e := range set.entries {
		got[e.Name] = string(e.Data())
	}
	want := map[string]string{
		"lib/firmware/nic/fw-1.bin": "one", "lib/firmware/nic/fw-2.bin": "two", "lib/firmware/real/ddp-1.3.pkg": "ddp",
		"lib/firmware/intel/ddp.pkg": "../real/ddp-1.3.pkg", "lib/firmware/top.bin": "nic/fw-1.bin",
	}
	if len(got) != len(want) || len(set.files) != len(want) {
		t.Errorf("%d entries, %d files: %v", len(set.entries), len(set.files), got)
	}
	for name, data := range want {
		if got[name] != data {
			t.Errorf("%s is %q, want %q", name, got[name], data)
		}
	}
	missing := string(set.missingText())
	for _, line := range []string{"gone.bin\tb a\n", "loop.bin\tloop\n", "dangling.bin\td\n", "../escape\te\n"} {
		if !strings.Contains(missing, line) {
			t.Errorf("what is left out lacks %q:\n%s", line, missing)
		}
	}
	if len(set.packages) != 1 || strings.Contains(missing, "nic/") {
		t.Errorf("packages %v, left out:\n%s", set.packages, missing)
	}
}
