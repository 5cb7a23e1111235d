package debian

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// fakeApt puts an apt-get and an apt-cache before the real ones. They serve the
// one package of dir, and count their calls in dir/calls. While dir/offline
// exists they fail.
func fakeApt(t *testing.T) (dir string, pkg Package) {
	t.Helper()
	dir = t.TempDir()
	content := []byte("!<arch>\nnot really\n")
	sum := sha256.Sum256(content)
	pkg = Package{Name: "linux-image-6.12.1+deb13-cloud-amd64", Version: "6.12.1-1", Architecture: "amd64", Size: int64(len(content)), SHA256: hex.EncodeToString(sum[:]), Source: "linux-signed-amd64"}
	index := fmt.Sprintf(`Package: linux-image-cloud-amd64
Source: linux-signed-amd64 (6.12.1+1)
Version: 6.12.1-1
Architecture: amd64
Depends: something, %s (= 6.12.1-1)
Size: 10
SHA256: %s

Package: %s
Source: linux-signed-amd64 (6.12.1+1)
Version: 6.12.1-1
Architecture: amd64
Description: kernel
 of many
 lines
Size: %d
SHA256: %s
`, pkg.Name, strings.Repeat("0", 64), pkg.Name, pkg.Size, pkg.SHA256)
	write := func(name, text string, mode os.FileMode) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	write("index", index, 0o644)
	write("content", string(content), 0o644)
	// Options come as "-o KEY=VALUE" pairs before the verb.
	script := `#!/bin/sh
here=` + dir + `
while [ "$1" = -o ]; do shift 2; done
echo "$(basename "$0") $*" >> "$here/calls"
[ -e "$here/offline" ] && { echo "E: no network" >&2; exit 100; }
case "$1" in
show) shift 2; while read -r line; do case "$line" in "Package: "*) on=0; for n in "$@"; do [ "Package: $n" = "$line" ] && on=1; done;; esac; [ "$on" = 1 ] && echo "$line"; done < "$here/index"; exit 0;;
download) cp "$here/content" "./x_1_amd64.deb";;
esac
`
	write("apt-get", script, 0o755)
	write("apt-cache", script, 0o755)
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	return dir, pkg
}

func calls(t *testing.T, dir, verb string) int {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "calls"))
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return strings.Count(string(b), verb)
}

func archive(cache string) *Archive {
	return &Archive{Release: "trixie", Architecture: "amd64", Cache: cache}
}

func TestKernelThroughItsMetapackage(t *testing.T) {
	dir, pkg := fakeApt(t)
	cache := t.TempDir()
	got, err := archive(cache).Kernel(t.Context(), "linux-image-cloud-amd64")
	if err != nil {
		t.Fatal(err)
	}
	got.Depends = ""
	if got != pkg {
		t.Errorf("kernel %+v, want %+v", got, pkg)
	}
	file, err := archive(cache).Fetch(t.Context(), got)
	if err != nil || !strings.HasPrefix(file, cache) {
		t.Fatalf("%s, %v", file, err)
	}
	if _, err := archive(cache).Find(t.Context(), "no-such-package"); err == nil || !strings.Contains(err.Error(), "not in this machine's apt sources") {
		t.Errorf("a package that is not there: %v", err)
	}
	if n := calls(t, dir, "update"); n != 1 {
		t.Errorf("package lists were updated %d times in a row", n)
	}
}

// TestOffline: what the cache has needs no network; a list that is old is used
// all the same.
func TestOffline(t *testing.T) {
	dir, pkg := fakeApt(t)
	cache := t.TempDir()
	if _, err := archive(cache).Fetch(t.Context(), pkg); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "offline"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := archive(cache).Fetch(t.Context(), pkg); err != nil {
		t.Errorf("a package that the cache has: %v", err)
	}
	old := archive(cache)
	old.MaxAge = 1 // a nanosecond
	if unlock, err := old.prepare(t.Context()); err != nil {
		t.Errorf("old lists: %v", err)
	} else {
		unlock()
	}
	if _, err := archive(t.TempDir()).Find(t.Context(), pkg.Name); err == nil || !strings.Contains(err.Error(), "no network") {
		t.Errorf("an empty cache without network: %v", err)
	}
}

func TestDamagedCacheIsFetchedAgain(t *testing.T) {
	dir, pkg := fakeApt(t)
	cache := t.TempDir()
	file, err := archive(cache).Fetch(t.Context(), pkg)
	if err != nil {
		t.Fatal(err)
	}
	for _, damage := range []string{"", "!<arch>\nnot Really\n", "!<arch>\nnot really\nand more"} {
		if err := os.WriteFile(file, []byte(damage), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := archive(cache).Fetch(t.Context(), pkg); err != nil {
			t.Errorf("after damage to %q: %v", damage, err)
		}
		if err := checkFile(file, pkg); err != nil {
			t.Error(err)
		}
	}
	// A mirror that serves other bytes than the signed index says.
	if err := os.WriteFile(filepath.Join(dir, "content"), []byte("evil"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := archive(t.TempDir()).Fetch(t.Context(), pkg); err == nil || !strings.Contains(err.Error(), "want 19 with "+pkg.SHA256) {
		t.Errorf("wrong bytes: %v", err)
	}
}

func TestBuildsAtOnce(t *testing.T) {
	dir, pkg := fakeApt(t)
	cache := t.TempDir()
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			file, err := archive(cache).Fetch(t.Context(), pkg)
			if err == nil {
				err = checkFile(file, pkg)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	if n := calls(t, dir, "download"); n != 1 {
		t.Errorf("%d downloads of one package", n)
	}
	left, err := filepath.Glob(filepath.Join(cache, "deb", "*"))
	if err != nil || len(left) != 1 {
		t.Errorf("cache holds %q, %v", left, err)
	}
}

func TestLock(t *testing.T) {
	dir, pkg := fakeApt(t)
	file := filepath.Join(t.TempDir(), "manifest.json")
	text, err := json.Marshal(map[string]any{"format": "x", "packages": []Package{pkg}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, text, 0o644); err != nil {
		t.Fatal(err)
	}
	lock, err := ReadLock(file)
	if err != nil {
		t.Fatal(err)
	}
	a := archive(t.TempDir())
	a.Lock = lock
	if got, err := a.Kernel(t.Context(), "linux-image-cloud-amd64"); err != nil || got != pkg {
		t.Errorf("locked kernel %+v, %v", got, err)
	}
	if n := calls(t, dir, "apt"); n != 0 {
		t.Errorf("a locked choice asked apt %d times", n)
	}
	for _, meta := range []string{"linux-image-amd64", "linux-image-cloud-arm64"} {
		if _, err := a.Kernel(t.Context(), meta); err == nil || !strings.Contains(err.Error(), "lock file names no kernel") {
			t.Errorf("%s: %v", meta, err)
		}
	}
	if _, err := a.Find(t.Context(), "systemd-boot-efi"); err == nil || !strings.Contains(err.Error(), "not in the lock file") {
		t.Errorf("a package that is not locked: %v", err)
	}
	// The archive moved on: the locked version's bytes are others now.
	lock.Packages[0].SHA256 = strings.Repeat("1", 64)
	if _, err := a.Fetch(t.Context(), lock.Packages[0]); err == nil || !strings.Contains(err.Error(), strings.Repeat("1", 64)) {
		t.Errorf("locked bytes: %v", err)
	}
	for want, text := range map[string]string{
		"names no package": "{}", "unexpected end": "{", "not well formed": `{"packages":[{"name":"-o","version":"1","architecture":"amd64","size":1,"sha256":"00"}]}`,
	} {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadLock(file); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("lock %s: %v, want %q", text, err, want)
		}
	}
}

func TestNamesAreNotOptions(t *testing.T) {
	fakeApt(t)
	for _, name := range []string{"-o=Dir::Etc=x", "", "a b", "A", "../x"} {
		if _, err := archive(t.TempDir()).Find(t.Context(), name); err == nil {
			t.Errorf("package name %q is accepted", name)
		}
	}
}

// TestWalk reads a real package that is made here.
func TestWalk(t *testing.T) {
	root := t.TempDir()
	for name, text := range map[string]string{
		"DEBIAN/control":     "Package: x\nVersion: 1\nArchitecture: all\nMaintainer: nobody <n@example.org>\nDescription: x\n",
		"lib/firmware/a.bin": "AAAA", "lib/firmware/sub/b.bin": "BB",
	} {
		file := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("sub/b.bin", filepath.Join(root, "lib/firmware/c.bin")); err != nil {
		t.Fatal(err)
	}
	deb := filepath.Join(t.TempDir(), "x.deb")
	if out, err := exec.CommandContext(t.Context(), "dpkg-deb", "--build", root, deb).CombinedOutput(); err != nil {
		t.Fatalf("dpkg-deb: %v: %s", err, out)
	}
	got := map[string]string{}
	err := Walk(t.Context(), deb, func(f File, r io.Reader) error {
		b, err := io.ReadAll(r)
		got[f.Name] = string(b) + f.Link
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"lib/firmware/a.bin": "AAAA", "lib/firmware/sub/b.bin": "BB", "lib/firmware/c.bin": "sub/b.bin"}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("package holds %v, want %v", got, want)
	}
	stop := fmt.Errorf("enough")
	if err := Walk(t.Context(), deb, func(File, io.Reader) error { return stop }); err == nil || !strings.Contains(err.Error(), "enough") {
		t.Errorf("an error of visit: %v", err)
	}
	if err := Walk(context.Background(), filepath.Join(root, "DEBIAN/control"), func(File, io.Reader) error { return nil }); err == nil {
		t.Error("a file that is no package is accepted")
	}
}

func FuzzWalkTar(f *testing.F) {
	f.Add([]byte("x"))
	f.Add(bytes.Repeat([]byte{0}, 1024))
	f.Fuzz(func(t *testing.T, b []byte) {
		_ = walkTar(bytes.NewReader(b), func(file File, r io.Reader) error {
			if strings.HasPrefix(file.Name, "/") || strings.HasPrefix(file.Name, "..") {
				t.Errorf("member %q", file.Name)
			}
			return nil
		})
	})
}
