package cpio

import (
	"bytes"
	"io"
	"strings"
	"testing"

	ucpio "github.com/u-root/u-root/pkg/cpio"
)

func tree() []Entry {
	return []Entry{
		Dir("etc", 0o755), File("etc/hosts", 0o644, []byte("127.0.0.1 localhost\n")), File("etc/empty", 0o600, nil),
		Dir("tmp", 0o1777), Symlink("init", "/bbin/bcd"), Dir("dev", 0o755), CharDevice("dev/console", 0o600, 5, 1),
	}
}

// TestAnotherReaderAgrees reads an archive with u-root's implementation.
func TestAnotherReaderAgrees(t *testing.T) {
	b, err := Marshal(tree(), 1767323045)
	if err != nil {
		t.Fatal(err)
	}
	if len(b)%4 != 0 {
		t.Errorf("archive has %d bytes: what follows would not be found", len(b))
	}
	records, err := ucpio.ReadAllRecords(ucpio.Newc.Reader(bytes.NewReader(b)))
	if err != nil {
		t.Fatal(err)
	}
	want := tree()
	if len(records) != len(want) {
		t.Fatalf("%d records, want %d", len(records), len(want))
	}
	inodes := map[uint64]bool{}
	for i, r := range records {
		w := want[i]
		if r.Name != w.Name || uint32(r.Mode) != w.mode || r.UID != 0 || r.GID != 0 || r.MTime != 1767323045 || r.Rmajor != uint64(w.major) || r.Rminor != uint64(w.minor) {
			t.Errorf("record %d is %+v, want %s mode %o", i, r.Info, w.Name, w.mode)
		}
		if inodes[r.Ino] {
			t.Errorf("%s: inode %d comes twice: the kernel would take it for a hard link", r.Name, r.Ino)
		}
		inodes[r.Ino] = true
		if w.mode&0o170000 == modeDir || w.mode&0o170000 == modeChar {
			continue
		}
		data, err := io.ReadAll(io.NewSectionReader(r, 0, int64(r.FileSize)))
		if err != nil || !bytes.Equal(data, w.data) {
			t.Errorf("%s holds %q, %v", r.Name, data, err)
		}
	}
}

func TestSameBytes(t *testing.T) {
	a, err := Marshal(tree(), 1)
	if err != nil {
		t.Fatal(err)
	}
	b, err := Marshal(tree(), 1)
	if err != nil || !bytes.Equal(a, b) {
		t.Errorf("two archives differ (%v)", err)
	}
}

// TestWhatTheKernelWouldDrop refuses archives that unpack to less than they
// hold.
func TestWhatTheKernelWouldDrop(t *testing.T) {
	for want, entries := range map[string][]Entry{
		"before its folder":      {File("etc/hosts", 0o644, nil), Dir("etc", 0o755)},
		"comes twice":            {File("a", 0o644, nil), File("a", 0o644, nil)},
		"not relative and clean": {File("/a", 0o644, nil)},
		"ends an archive":        {File(trailer, 0o644, nil)},
	} {
		if _, err := Marshal(entries, 0); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	for _, name := range []string{"", "a/../b", "../a", "a/", "a\x00b", strings.Repeat("x", maxName)} {
		if _, err := Marshal([]Entry{File(name, 0o644, nil)}, 0); err == nil {
			t.Errorf("name %.20q is accepted", name)
		}
	}
}
