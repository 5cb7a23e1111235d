package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

const unit = "mkosi.extra/usr/lib/systemd/system/bcd.service"

// TestUnitIsHardened asks systemd itself. Lower is better; a service that is
// open to everything has 9.6.
func TestUnitIsHardened(t *testing.T) {
	const limit = 3.0
	cmd := exec.Command("systemd-analyze", "security", "--offline=yes", "--no-pager", unit)
	cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("systemd-analyze (package systemd): %v: %s", err, out)
	}
	m := regexp.MustCompile(`Overall exposure level for bcd\.service: ([0-9.]+)`).FindSubmatch(out)
	if m == nil {
		t.Fatalf("no verdict in %s", out)
	}
	if got, err := strconv.ParseFloat(string(m[1]), 64); err != nil || got > limit {
		t.Errorf("exposure %s is over %.1f:\n%s", m[1], limit, out)
	}
}

// TestUnitKeepsItsPromises are those that no score counts.
func TestUnitKeepsItsPromises(t *testing.T) {
	text, err := os.ReadFile(unit)
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		have[strings.TrimSpace(line)] = true
	}
	for _, want := range []string{
		"Type=notify", "WatchdogSec=60", "ProtectSystem=strict", "NoNewPrivileges=yes", "LimitCORE=0",
		"StateDirectory=bcd", "StateDirectoryMode=0700", "RuntimeDirectory=bcd", "RuntimeDirectoryMode=0700", "Restart=always",
	} {
		if !have[want] {
			t.Errorf("the unit lacks %s", want)
		}
	}
}

func TestConfigHash(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) {
		t.Helper()
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(name, mode); err != nil {
			t.Fatal(err)
		}
	}
	o := options{config: dir, profile: "virtual", freeMiB: 100}
	if _, err := configHash(o); err == nil {
		t.Error("a folder without mkosi.conf has a hash")
	}
	write("mkosi.conf", "x", 0o644)
	write("mkosi.extra/etc/hosts", "h", 0o644)
	hash := func() string {
		t.Helper()
		h, err := configHash(o)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	first := hash()
	write("main.go", "code", 0o644)
	if hash() != first {
		t.Error("this program's own source makes another base")
	}
	seen := map[string]string{first: "first"}
	differs := func(what string) {
		t.Helper()
		h := hash()
		if was, ok := seen[h]; ok {
			t.Errorf("%s: the same base as %s", what, was)
		}
		seen[h] = what
	}
	write("mkosi.extra/etc/hosts", "i", 0o644)
	differs("other content")
	write("mkosi.extra/etc/hosts", "i", 0o755)
	differs("other mode")
	o.profile = "metal"
	differs("other profile")
	o.freeMiB++
	differs("other size")
}

func TestGUID(t *testing.T) {
	a, b := guid("k", "root"), guid("k", "esp")
	if a == b || a != guid("k", "root") || a == guid("l", "root") {
		t.Error("identifiers do not follow key and purpose")
	}
	if !regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`).MatchString(a) {
		t.Errorf("%s is not a version 8 UUID", a)
	}
}

func TestCopySparse(t *testing.T) {
	dir := t.TempDir()
	in := append(make([]byte, 200<<10), []byte("tail")...)
	copy(in[70<<10:], "middle")
	from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
	if err := os.WriteFile(from, in, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := createSized(to, 1<<20); err != nil {
		t.Fatal(err)
	}
	if err := copySparse(to, from, 4096); err != nil {
		t.Fatal(err)
	}
	out, err := os.ReadFile(to)
	if err != nil || len(out) != 1<<20 || !bytes.Equal(out[4096:4096+len(in)], in) {
		t.Errorf("%d bytes, %v: not what was copied", len(out), err)
	}
}

// TestBinaryInRoot puts a program into a real file system, and into one that is
// too small for it.
func TestBinaryInRoot(t *testing.T) {
	dir := t.TempDir()
	tl := tools{t.Context(), "1700000000"}
	tree := filepath.Join(dir, "tree")
	if err := os.MkdirAll(filepath.Join(tree, "usr/bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	bcd := filepath.Join(dir, "bcd")
	if err := os.WriteFile(bcd, bytes.Repeat([]byte("program "), 200_000), 0o755); err != nil {
		t.Fatal(err)
	}
	make := func(name string, size int64) string {
		t.Helper()
		root := filepath.Join(dir, name)
		if err := createSized(root, size); err != nil {
			t.Fatal(err)
		}
		if err := tl.run("mke2fs", "-q", "-F", "-t", "ext4", "-U", guid("k", "fs"), "-E", "hash_seed="+guid("k", "fs"), "-d", tree, root); err != nil {
			t.Fatal(err)
		}
		return root
	}
	// One base for both: mke2fs -d takes over the tree's access times, which
	// its own first reading changes.
	base, err := os.ReadFile(make("base", 8*mib))
	if err != nil {
		t.Fatal(err)
	}
	var sums [2][32]byte
	for i, name := range []string{"one", "two"} {
		root := filepath.Join(dir, name)
		if err := os.WriteFile(root, base, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := tl.putBinary(root, bcd, 1700000000); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command("/usr/sbin/debugfs", "-R", "stat /usr/bin/bcd", root).CombinedOutput()
		if err != nil || !bytes.Contains(out, []byte("Mode:  0755")) || !regexp.MustCompile(`User:\s+0\s+Group:\s+0`).Match(out) {
			t.Errorf("%v: %s", err, out)
		}
		if sums[i], err = digest(root); err != nil {
			t.Fatal(err)
		}
	}
	if sums[0] != sums[1] {
		t.Error("the same inputs gave different file systems")
	}
	if err := tl.putBinary(make("small", mib+mib/2), bcd, 1700000000); err == nil || !strings.Contains(err.Error(), "full") {
		t.Errorf("a root that is too small: %v", err)
	}
}

func TestDiskLayout(t *testing.T) {
	dir := t.TempDir()
	tl := tools{t.Context(), "1700000000"}
	image, root := filepath.Join(dir, "uki"), filepath.Join(dir, "root")
	if err := os.WriteFile(image, []byte("MZ"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := createSized(root, 4*mib); err != nil {
		t.Fatal(err)
	}
	var sums [2][32]byte
	for i, name := range []string{"a", "b"} {
		esp, disk := filepath.Join(dir, name+".esp"), filepath.Join(dir, name+".raw")
		if err := tl.makeESP(esp, image, 2, guid("k", "esp")); err != nil {
			t.Fatal(err)
		}
		if err := tl.layOut(disk, esp, root, "k"); err != nil {
			t.Fatal(err)
		}
		var err error
		if sums[i], err = digest(disk); err != nil {
			t.Fatal(err)
		}
	}
	if sums[0] != sums[1] {
		t.Error("the same inputs gave different disks")
	}
	out, err := exec.Command("/usr/sbin/sgdisk", "-i", "2", filepath.Join(dir, "a.raw")).CombinedOutput()
	if err != nil || !strings.Contains(strings.ToLower(string(out)), guid("k", "root")) {
		t.Errorf("the root's identifier is not what the command line names: %v: %s", err, out)
	}
}

// TestSeedIsWaitedFor: with systemd's usual patience a slow machine's first
// start went on without its EFI system partition, so without gateway and token.
func TestSeedIsWaitedFor(t *testing.T) {
	text, err := os.ReadFile("mkosi.extra/etc/fstab")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), "x-systemd.device-timeout=10min") {
		t.Error("the EFI system partition is given up too early")
	}
	text, err = os.ReadFile(unit)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Wants=efi.mount", "After=efi.mount"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the unit lacks %s", want)
		}
	}
}
