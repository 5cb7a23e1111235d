package selfcheck

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// tree writes files below a temporary root, and their manifest.
func tree(t *testing.T, minMem int, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	m := Manifest{MinMemMiB: minMem}
	for name, body := range files {
		write(t, root, name, body)
		m.Files = append(m.Files, File{Path: name, Size: int64(len(body)), Sum: sha256.Sum256([]byte(body))})
	}
	write(t, root, Path, format(&m))
	return root
}

// format is the other side of Parse; the image builder has its own.
func format(m *Manifest) string {
	slices.SortFunc(m.Files, func(a, b File) int { return cmp.Compare(a.Path, b.Path) })
	var b strings.Builder
	fmt.Fprintf(&b, "%s%d\n", magic, m.MinMemMiB)
	for _, f := range m.Files {
		fmt.Fprintf(&b, "%x %d %s\n", f.Sum, f.Size, f.Path)
	}
	return b.String()
}

func write(t *testing.T, root, name, body string) {
	t.Helper()
	p := filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(body), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestVerify(t *testing.T) {
	files := map[string]string{"/bbin/bcd": strings.Repeat("x", 100_000), "/lib/modules/a.ko": "module a", "/etc/empty": ""}
	for _, c := range []struct {
		name   string
		have   int
		damage func(root string)
		want   []string // all in the error; empty means none
		warn   string
	}{
		{"whole", 512, func(string) {}, nil, ""},
		{"whole but little memory", 300, func(string) {}, nil, "have 300 MiB, need 384 MiB"},
		{"missing", 300, func(r string) { os.Remove(filepath.Join(r, "/lib/modules/a.ko")) },
			[]string{"1 of 3 files", "/lib/modules/a.ko: missing", "have 300 MiB, need 384 MiB", "too little memory"}, ""},
		{"short", 300, func(r string) { os.Truncate(filepath.Join(r, "/bbin/bcd"), 4096) },
			[]string{"has 4096 bytes of 100000", "have 300 MiB, need 384 MiB"}, ""},
		{"changed", 4096, func(r string) { os.WriteFile(filepath.Join(r, "/lib/modules/a.ko"), []byte("module b"), 0o644) },
			[]string{"content has changed", "memory is not the cause"}, ""},
		{"a link instead", 4096, func(r string) {
			os.Remove(filepath.Join(r, "/etc/empty"))
			os.Symlink("/dev/null", filepath.Join(r, "/etc/empty"))
		}, []string{"not a regular file"}, ""},
		{"no manifest", 100, func(r string) { os.Remove(filepath.Join(r, Path)) },
			[]string{"the manifest cannot be read", "have 100 MiB"}, ""},
		{"manifest cut", 100, func(r string) { os.Truncate(filepath.Join(r, Path), 100) },
			[]string{"line 2", "cut short"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			root := tree(t, 384, files)
			c.damage(root)
			_, warning, err := Verify(root, c.have)
			if (c.warn == "") != (warning == "") || !strings.Contains(warning, c.warn) {
				t.Errorf("warning %q, want %q", warning, c.warn)
			}
			if len(c.want) == 0 {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			var f *Failure
			if !errors.As(err, &f) {
				t.Fatalf("error %v", err)
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error lacks %q:\n%v", w, err)
				}
			}
		})
	}
}

// What Linux leaves behind when memory runs out while it unpacks: a file of the
// right size that was not all written.
func TestHolesAreSeenWithoutReading(t *testing.T) {
	root, err := os.MkdirTemp("/dev/shm", "bcd-selfcheck-") // a tmpfs, as the initramfs is
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	body := strings.Repeat("x", 1<<20)
	m := Manifest{MinMemMiB: 384, Files: []File{{Path: "/a", Size: int64(len(body)), Sum: sha256.Sum256([]byte(body))}}}
	write(t, root, "/a", body)
	write(t, root, Path, format(&m))
	if _, _, err := Verify(root, 200); err != nil {
		t.Fatal(err)
	}
	write(t, root, "/a", body[:1<<19])
	if err := os.Truncate(filepath.Join(root, "/a"), 1<<20); err != nil {
		t.Fatal(err)
	}
	_, _, err = Verify(root, 200)
	if err == nil || !strings.Contains(err.Error(), "has only 524288 bytes of 1048576 written") ||
		!strings.Contains(err.Error(), "have 200 MiB, need 384 MiB") {
		t.Errorf("error %v", err)
	}
	// Whole, but not the same: found by the digests, when there is time.
	write(t, root, "/a", strings.Repeat("y", 1<<20))
	got, _, err := Verify(root, 200)
	if err != nil {
		t.Fatal(err)
	}
	if err := got.CheckDigests(root); err == nil {
		t.Error("no error for changed content")
	}
}

func TestParseRefuses(t *testing.T) {
	sum := strings.Repeat("0", 64)
	for name, in := range map[string]string{
		"empty":        "",
		"other magic":  "bcd-initramfs-manifest 2 min-mem-mib=1\n",
		"no number":    magic + "x\n",
		"huge number":  magic + "99999999999\n",
		"no newline":   magic + "1",
		"short line":   magic + "1\n" + sum + " 5\n",
		"bad digest":   magic + "1\n" + strings.Repeat("g", 64) + " 5 /a\n",
		"short digest": magic + "1\n00 5 /a\n",
		"bad size":     magic + "1\n" + sum + " -5 /a\n",
		"relative":     magic + "1\n" + sum + " 5 a\n",
		"dotdot":       magic + "1\n" + sum + " 5 /a/../b\n",
		"order":        magic + "1\n" + sum + " 5 /b\n" + sum + " 5 /a\n",
		"twice":        magic + "1\n" + sum + " 5 /a\n" + sum + " 5 /a\n",
		"long line":    magic + "1\n" + sum + " 5 /" + strings.Repeat("a", 5000) + "\n",
	} {
		if m, err := Parse(strings.NewReader(in)); err == nil {
			t.Errorf("%s: parsed as %+v", name, m)
		}
	}
}

func FuzzParse(f *testing.F) {
	sum := strings.Repeat("0f", 32)
	f.Add([]byte(magic + "384\n" + sum + " 5 /a b\n" + sum + " 0 /b\n"))
	f.Add([]byte(magic + "0\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		m, err := Parse(bytes.NewReader(in))
		if err != nil {
			return
		}
		again, err := Parse(strings.NewReader(format(m)))
		if err != nil {
			t.Fatalf("what was written does not parse: %v", err)
		}
		if len(again.Files) != len(m.Files) || again.MinMemMiB != m.MinMemMiB {
			t.Fatalf("%+v became %+v", m, again)
		}
	})
}
