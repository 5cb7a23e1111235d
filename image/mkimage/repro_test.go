package main

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/better-compute/bcd/image"
	"github.com/better-compute/bcd/image/gobuild"
)

// world is what differs between the two builds of the test.
type world struct {
	source, cache, out string
	env                []string
	attributes         *syscall.SysProcAttr
	umask              string
	lock               string
}

// build compiles mkimage in its world and lets it build bcd, the rescue shell
// and a virtual image from them.
func (w world) build(t *testing.T, trust string) {
	t.Helper()
	args := []string{"run", "./image/mkimage", "-quiet", "-profile", "virtual", "-trust", trust, "-version", "0.0.1-test",
		"-source-date-epoch", "1767323045", "-gateway", "https://gateway.example:7443", "-node-disk", "-out", w.out}
	if w.lock != "" {
		args = append(args, "-lock", w.lock)
	}
	cmd := exec.CommandContext(t.Context(), "sh", append([]string{"-c", "umask " + w.umask + " && exec go \"$@\"", "sh"}, args...)...)
	cmd.Dir, cmd.SysProcAttr = w.source, w.attributes
	cmd.Env = append(cmd.Environ(), append(w.env, "BCD_CACHE="+w.cache)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		t.Fatalf("build in %s: %v\n%s", w.source, err, out.String())
	}
}

// TestSameBytesAnywhere builds everything twice, bcd and rescue shell
// included: here, and in another folder, as another user, with another umask,
// time zone and language, an empty Go cache and an empty cache of ours but for
// the Debian packages, which the first build's manifest locks.
func TestSameBytesAnywhere(t *testing.T) {
	root, err := gobuild.Root(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	cache, err := image.DefaultCache()
	if err != nil {
		t.Fatal(err)
	}
	trust := trustFolder(t)
	here := world{source: root, cache: cache, out: t.TempDir(), umask: "022", env: []string{"TZ=UTC"}}
	here.build(t, trust)

	elsewhere := filepath.Join(t.TempDir(), "another place", "source")
	copySource(t, root, elsewhere)
	home := t.TempDir()
	there := world{
		source: elsewhere, cache: filepath.Join(home, "cache"), out: filepath.Join(home, "out"), umask: "077",
		lock: filepath.Join(here.out, "bcd-virtual-amd64.manifest.json"),
		env: []string{"HOME=" + home, "USER=someone", "LOGNAME=someone", "TZ=Pacific/Chatham", "LC_ALL=C.UTF-8", "GOCACHE=" + filepath.Join(home, "go-cache"),
			"GOMODCACHE=" + goEnv(t, "GOMODCACHE"), "GOAMD64=v2", "GOFLAGS=-trimpath=false"},
		// Another user: inside, we are 1234, and root's files are ours.
		attributes: &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 1234, HostID: os.Getuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 4321, HostID: os.Getgid(), Size: 1}},
		},
	}
	linkAll(t, filepath.Join(cache, "deb"), filepath.Join(there.cache, "deb"))
	there.build(t, trust)

	names := results(t, here.out)
	if len(names) < 9 || !slices.Equal(names, results(t, there.out)) {
		t.Errorf("results %q and %q", names, results(t, there.out))
	}
	for _, name := range names {
		if a, b := read(t, filepath.Join(here.out, name)), read(t, filepath.Join(there.out, name)); !bytes.Equal(a, b) {
			t.Errorf("%s differs: %d and %d bytes, first at %d", name, len(a), len(b), firstDifference(a, b))
		}
	}
}

// trustFolder holds a root whose key nobody has, and a public key.
func trustFolder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"roots.pem", "join-encryption.jwk"} {
		if err := os.WriteFile(filepath.Join(dir, name), read(t, filepath.Join("testdata", name)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func goEnv(t *testing.T, name string) string {
	t.Helper()
	out, err := exec.CommandContext(context.Background(), "go", "env", name).Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

func read(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func results(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func firstDifference(a, b []byte) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

// copySource copies what a Go build of this module reads. Version control and
// results stay behind.
func copySource(t *testing.T, from, to string) {
	t.Helper()
	err := filepath.WalkDir(from, func(name string, e fs.DirEntry, err error) error {
		// Others may work in the tree; what goes away meanwhile is no source.
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		below, err := filepath.Rel(from, name)
		if err != nil {
			return err
		}
		if e.IsDir() {
			if below != "." && (strings.HasPrefix(e.Name(), ".") || below == "build") {
				return fs.SkipDir
			}
			return os.MkdirAll(filepath.Join(to, below), 0o755)
		}
		if !e.Type().IsRegular() {
			return nil
		}
		data, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(to, below), data, 0o644)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// linkAll gives a folder's files a second name, or copies them where the other
// folder is on another file system.
func linkAll(t *testing.T, from, to string) {
	t.Helper()
	if err := os.MkdirAll(to, 0o755); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(from, "*.deb"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		target := filepath.Join(to, filepath.Base(file))
		if os.Link(file, target) == nil {
			continue
		}
		if err := os.WriteFile(target, read(t, file), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
