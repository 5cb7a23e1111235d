package fat

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

var now = time.Date(2026, 12, 1, 4, 5, 6, 0, time.UTC)

// made is a file system made by mkfs.vfat, at an offset inside a file as a
// partition is inside a disk.
type made struct {
	t    testing.TB
	name string
	file *os.File
	fs   *FS
	off  int64
}

func mkfs(t testing.TB, size int64, args ...string) *made {
	t.Helper()
	m := &made{t: t, name: filepath.Join(t.TempDir(), "fs"), off: 1 << 20}
	f, err := os.Create(m.name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(m.off + size); err != nil {
		t.Fatal(err)
	}
	// mkfs.vfat counts the offset in its own sectors.
	offset := "2048"
	if slices.Contains(args, "4096") {
		offset = "256"
	}
	m.run("mkfs.vfat", append(args, "--offset", offset, m.name, fmt.Sprint(size/1024))...)
	m.file = f
	m.reopen(size)
	return m
}

func (m *made) reopen(size int64) {
	m.t.Helper()
	var err error
	if m.fs, err = Open(m.file, m.off, size); err != nil {
		m.t.Fatal(err)
	}
}

func (m *made) run(name string, args ...string) string {
	m.t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		m.t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// check asks fsck.fat, which wants a file system at the start of its file.
func (m *made) check(size int64) {
	m.t.Helper()
	b := make([]byte, size)
	if _, err := m.file.ReadAt(b, m.off); err != nil {
		m.t.Fatal(err)
	}
	alone := m.name + ".alone"
	if err := os.WriteFile(alone, b, 0o600); err != nil {
		m.t.Fatal(err)
	}
	m.run("fsck.fat", "-n", alone)
	os.Remove(alone)
}

func TestSeedOnEveryKindOfFAT(t *testing.T) {
	for name, tc := range map[string]struct {
		size int64
		args []string
		bits int
	}{
		"FAT12":                      {2 << 20, []string{"-F", "12"}, 12},
		"FAT16":                      {32 << 20, []string{"-F", "16"}, 16},
		"FAT32":                      {64 << 20, []string{"-F", "32"}, 32},
		"FAT32 with few clusters":    {33 << 20, []string{"-F", "32", "-s", "8"}, 32},
		"FAT32 with 4096 sectors":    {300 << 20, []string{"-F", "32", "-S", "4096"}, 32},
		"what mkfs chooses for 64 M": {64 << 20, nil, 16},
	} {
		t.Run(name, func(t *testing.T) {
			m := mkfs(t, tc.size, tc.args...)
			if m.fs.bits != tc.bits {
				t.Fatalf("FAT%d, want FAT%d", m.fs.bits, tc.bits)
			}
			files := map[string][]byte{
				"/bcd/seed/config.toml":         []byte("role = 'node'\n"),
				"/bcd/seed/join-encryption.jwk": bytes.Repeat([]byte("k"), 5000),
				"/bcd/seed/join-token":          []byte("bcjt_a_b"),
				"/bcd/seed/user-data":           bytes.Repeat([]byte("user "), 20000),
				"/bcd/seed/empty":               nil,
				"/EFI/BOOT/BOOTX64.EFI":         []byte("MZ"),
			}
			for p, b := range files {
				if err := m.fs.WriteFile(p, b, now); err != nil {
					t.Fatal(err)
				}
			}
			m.reopen(tc.size)
			for p, want := range files {
				if got, err := m.fs.ReadFile(strings.ReplaceAll(p, "/", `\`)); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%s: %d bytes, %v", p, len(got), err)
				}
				// mtools is another reader.
				// It refuses FAT32 with few clusters, which Linux and firmwares take.
				if name == "FAT32 with few clusters" {
					continue
				}
				if got := m.run("mtype", "-i", m.name+"@@1M", "::"+p); got != string(want) {
					t.Errorf("mtools reads %s as %d bytes, want %d", p, len(got), len(want))
				}
			}
			m.check(tc.size)

			// Replace, remove; nothing of the old content stays on the disk.
			if err := m.fs.WriteFile("/bcd/seed/JOIN-TOKEN", []byte("new"), now); err != nil {
				t.Fatal(err)
			}
			if err := m.fs.Shred("/bcd/seed/join-token"); err != nil {
				t.Fatal(err)
			}
			if ok, err := m.fs.Exists("/bcd/seed/join-token"); ok || err != nil {
				t.Errorf("join token still there: %v %v", ok, err)
			}
			m.check(tc.size)
			disk, err := os.ReadFile(m.name)
			if err != nil || bytes.Contains(disk, []byte("bcjt_a_b")) {
				t.Errorf("the token is still on the disk (%v)", err)
			}
		})
	}
}

func TestFilesBesideThoseOfMtools(t *testing.T) {
	const size = 64 << 20
	m := mkfs(t, size, "-F", "32")
	img := m.name + "@@1M"
	src := filepath.Join(t.TempDir(), "src")
	if err := os.WriteFile(src, bytes.Repeat([]byte("loader"), 100000), 0o600); err != nil {
		t.Fatal(err)
	}
	m.run("mmd", "-i", img, "::EFI", "::EFI/BOOT", "::bcd")
	m.run("mcopy", "-i", img, src, "::EFI/BOOT/BOOTX64.EFI")
	m.reopen(size)
	if ok, err := m.fs.Exists(`\EFI\BOOT\BOOTX64.EFI`); !ok || err != nil {
		t.Errorf("loader: %v %v", ok, err)
	}
	if ok, err := m.fs.Exists(`\EFI\BOOT`); ok || err != nil {
		t.Errorf("a directory is no file: %v %v", ok, err)
	}
	if _, err := m.fs.ReadFile("/EFI/none/x"); !errors.Is(err, ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
	// More names than one cluster of the directory holds.
	for i := range 100 {
		if err := m.fs.WriteFile(fmt.Sprintf("/bcd/seed/a-rather-long-name-%03d.conf", i), []byte{byte(i)}, now); err != nil {
			t.Fatal(err)
		}
	}
	m.check(size)
	for _, bad := range []string{"/a b", "/ü", "/../x", "/x.", "/a//b", "/", "/" + strings.Repeat("n", 70)} {
		if err := m.fs.WriteFile(bad, nil, now); err == nil {
			t.Errorf("wrote %q", bad)
		}
	}
	if err := m.fs.WriteFile("/EFI/BOOT/BOOTX64.EFI/x", nil, now); err == nil {
		t.Error("wrote below a file")
	}
}

func TestFullFileSystemSaysSo(t *testing.T) {
	m := mkfs(t, 2<<20, "-F", "12")
	if err := m.fs.WriteFile("/big", make([]byte, 3<<20), now); !errors.Is(err, ErrFull) {
		t.Errorf("err = %v", err)
	}
	if err := m.fs.WriteFile("/small", []byte("x"), now); err != nil {
		t.Error(err)
	}
	m.check(2 << 20)
}

type memory []byte

func (m memory) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 || off+int64(len(p)) > int64(len(m)) {
		return 0, errors.New("outside")
	}
	return copy(p, m[off:]), nil
}

func (m memory) WriteAt(p []byte, off int64) (int, error) {
	if off < 0 || off+int64(len(p)) > int64(len(m)) {
		return 0, errors.New("outside")
	}
	return copy(m[off:], p), nil
}

func FuzzFAT(f *testing.F) {
	m := mkfs(f, 1<<20, "-F", "12")
	if err := m.fs.WriteFile("/bcd/seed/config.toml", []byte("x"), now); err != nil {
		f.Fatal(err)
	}
	b, err := os.ReadFile(m.name)
	if err != nil {
		f.Fatal(err)
	}
	// The boot sector, the table and the root are what a fuzzer can break.
	f.Add(b[1<<20:][:24<<10])
	f.Fuzz(func(t *testing.T, b []byte) {
		dev := make(memory, 1<<20)
		copy(dev, b)
		fs, err := Open(dev, 0, int64(len(dev)))
		if err != nil {
			return
		}
		_, _ = fs.ReadFile("/bcd/seed/config.toml")
		if err := fs.WriteFile("/bcd/seed/config.toml", []byte("hello"), now); err != nil {
			return
		}
		if got, err := fs.ReadFile("/bcd/seed/config.toml"); err != nil || string(got) != "hello" {
			t.Fatalf("read back %q, %v", got, err)
		}
	})
}
