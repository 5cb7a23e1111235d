package boot

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func guid(t testing.TB, s string) GUID {
	t.Helper()
	g, err := ParseGUID(s)
	if err != nil {
		t.Fatal(err)
	}
	if g.String() != strings.ToLower(s) {
		t.Fatalf("GUID %s prints as %s", s, g)
	}
	return g
}

func golden(t testing.TB) map[string]Entry {
	g := guid(t, "11223344-5566-7788-99AA-BBCCDDEEFF00")
	return map[string]Entry{
		"efibootmgr-512.bin":  {Label: "bcd node", Partition: g, Number: 1, Start: 0x800, Size: 0x10800, Loader: `\EFI\BOOT\BOOTX64.EFI`},
		"efibootmgr-4096.bin": {Label: "bcd nödé", Partition: g, Number: 3, Start: 0x100, Size: 0x2100, Loader: `\EFI\systemd\systemd-bootx64.efi`},
	}
}

// The files were written by efibootmgr 17 -c on loop devices with 512 and
// 4096 byte sectors, EFIVARFS_PATH set to a plain directory.
func TestSameBytesAsEfibootmgr(t *testing.T) {
	for file, e := range golden(t) {
		b, err := os.ReadFile(filepath.Join("testdata", file))
		if err != nil {
			t.Fatal(err)
		}
		if got := e.Marshal(); !bytes.Equal(got, b[4:]) {
			t.Errorf("%s:\n got %x\nwant %x", file, got, b[4:])
		}
		if back, err := ParseEntry(b[4:]); err != nil || back != e {
			t.Errorf("%s: parsed %+v, %v", file, back, err)
		}
		if attr := binary.LittleEndian.Uint32(b); attr != persistent {
			t.Errorf("%s: attributes %d", file, attr)
		}
	}
}

// nvram is a variable store in a directory, as firmware would have left it.
type nvram struct {
	t testing.TB
	v *Variables
	// log has the names in the order they were written.
	log []string
	// fail decides about one write.
	fail func(name string) error
}

func newNVRAM(t testing.TB) *nvram {
	n := &nvram{t: t}
	n.v = &Variables{Dir: t.TempDir(), write: func(path string, content []byte) error {
		name, _, _ := strings.Cut(filepath.Base(path), "-")
		if n.fail != nil {
			if err := n.fail(name); err != nil {
				return err
			}
		}
		n.log = append(n.log, name)
		return writeVariable(path, content)
	}}
	n.raw("Timeout", []byte{5, 0})
	return n
}

func (n *nvram) raw(name string, data []byte) {
	n.t.Helper()
	if err := os.WriteFile(n.v.path(name), append([]byte{7, 0, 0, 0}, data...), 0o644); err != nil {
		n.t.Fatal(err)
	}
}

func (n *nvram) order(want ...uint16) {
	n.t.Helper()
	got, err := n.v.Order()
	if err != nil || !slices.Equal(got, want) {
		n.t.Errorf("BootOrder = %04x, want %04x (%v)", got, want, err)
	}
}

func network(label string) []byte {
	// A MAC node and an end: what firmware makes for PXE.
	dp := append([]byte{3, 11, 37, 0}, make([]byte, 33)...)
	dp = append(dp, 0x7f, 0xff, 4, 0)
	b := binary.LittleEndian.AppendUint16([]byte{1, 0, 0, 0}, uint16(len(dp)))
	return append(append(b, ucs2(label)...), dp...)
}

func TestEnsureEntry(t *testing.T) {
	n := newNVRAM(t)
	e := golden(t)["efibootmgr-512.bin"]
	pxe, lookalike := network("UEFI PXE"), network(e.Label)
	n.raw("Boot0000", pxe)
	n.raw("Boot0003", lookalike)
	n.raw("Boot0007", []byte("damaged"))
	n.raw("BootOrder", []byte{3, 0, 0, 0, 1, 0, 7, 0})

	got, err := n.v.EnsureEntry(e)
	if err != nil || got != 2 {
		t.Fatalf("entry %d, %v (1 is in BootOrder, so it is not free)", got, err)
	}
	if want := []string{"Boot0002", "BootOrder", "BootNext"}; !slices.Equal(n.log, want) {
		t.Errorf("writes %v, want %v", n.log, want)
	}
	n.order(2, 3, 0, 1, 7)
	if next, ok, err := n.v.Next(); err != nil || !ok || next != 2 {
		t.Errorf("BootNext = %d %v %v", next, ok, err)
	}
	if back, err := n.v.Entry(2); err != nil || back != e {
		t.Errorf("entry reads back as %+v, %v", back, err)
	}

	// Again: nothing is written.
	n.log = nil
	if again, err := n.v.EnsureEntry(e); err != nil || again != 2 || n.log != nil {
		t.Errorf("second call: %d %v, wrote %v", again, err, n.log)
	}
	// The operator moved it: its place is kept.
	n.raw("BootOrder", []byte{0, 0, 2, 0, 2, 0})
	if _, err := n.v.EnsureEntry(e); err != nil {
		t.Fatal(err)
	}
	n.order(0, 2) // once is enough

	// Another deployment to this machine: a new partition GUID.
	n.log = nil
	e2 := e
	e2.Partition[0] ^= 0xff
	got, err = n.v.EnsureEntry(e2)
	if err != nil || got != 1 {
		t.Fatalf("entry %d, %v", got, err)
	}
	n.order(1, 0)
	if _, err := os.Stat(n.v.path("Boot0002")); !errors.Is(err, os.ErrNotExist) {
		t.Error("the entry of the earlier deployment is still there")
	}
	// Same partition, moved on the disk: rewritten in place.
	e3 := e2
	e3.Start += 8
	if got, err = n.v.EnsureEntry(e3); err != nil || got != 1 {
		t.Fatalf("entry %d, %v", got, err)
	}
	for name, want := range map[string][]byte{"Boot0000": pxe, "Boot0003": lookalike, "Boot0007": []byte("damaged")} {
		if b, _ := n.v.read(name); !bytes.Equal(b, want) {
			t.Errorf("foreign %s was changed to %x", name, b)
		}
	}
}

func TestEnsureEntryWithEmptyBootOrderKeepsTheOthers(t *testing.T) {
	for _, missing := range []bool{true, false} {
		n := newNVRAM(t)
		n.raw("Boot0000", network("a"))
		n.raw("Boot0005", network("b"))
		if !missing {
			n.raw("BootOrder", nil)
		}
		if _, err := n.v.EnsureEntry(golden(t)["efibootmgr-512.bin"]); err != nil {
			t.Fatal(err)
		}
		n.order(1, 0, 5)
	}
}

func TestFullStoreLosesNothing(t *testing.T) {
	old := golden(t)["efibootmgr-512.bin"]
	e := old
	e.Partition[3]++
	for _, errno := range []syscall.Errno{syscall.ENOSPC, syscall.EINVAL} {
		for _, where := range []string{"Boot", "BootOrder", "BootNext"} {
			n := newNVRAM(t)
			if _, err := n.v.EnsureEntry(old); err != nil {
				t.Fatal(err)
			}
			n.fail = func(name string) error {
				if name == where || where == "Boot" && strings.HasPrefix(name, "Boot0") {
					return errno
				}
				return nil
			}
			if _, err := n.v.EnsureEntry(e); !errors.Is(err, ErrVariablesFull) || !errors.Is(err, errno) {
				t.Errorf("%s: err = %v", where, err)
			}
			// The order never names what does not exist, and the old entry
			// is still complete.
			order, err := n.v.Order()
			if err != nil || len(order) == 0 {
				t.Fatalf("%s: order %v %v", where, order, err)
			}
			for _, b := range order {
				if _, err := n.v.Entry(b); err != nil {
					t.Errorf("%s: order names a broken entry: %v", where, err)
				}
			}
			if back, err := n.v.Entry(0); err != nil || back != old {
				t.Errorf("%s: the old entry is %+v, %v", where, back, err)
			}
		}
	}
	// Room to replace but not to add: the old one is replaced in place.
	n := newNVRAM(t)
	if _, err := n.v.EnsureEntry(old); err != nil {
		t.Fatal(err)
	}
	n.fail = func(name string) error {
		if name == "Boot0001" {
			return syscall.ENOSPC
		}
		return nil
	}
	if got, err := n.v.EnsureEntry(e); err != nil || got != 0 {
		t.Errorf("entry %d, %v", got, err)
	}
	n.order(0)
}

func TestForgetfulFirmwareIsNoticed(t *testing.T) {
	n := newNVRAM(t)
	n.v.write = func(string, []byte) error { return nil }
	if _, err := n.v.EnsureEntry(golden(t)["efibootmgr-512.bin"]); err == nil || !strings.Contains(err.Error(), "did not keep it") {
		t.Errorf("err = %v", err)
	}
}

func TestImmutableVariablesAreWritten(t *testing.T) {
	n := newNVRAM(t)
	e := golden(t)["efibootmgr-512.bin"]
	if _, err := n.v.EnsureEntry(e); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(n.v.path("Boot0000"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	// A file system without flags (tmpfs before 6.6), or no root: then there
	// is nothing to clear, and the rest of the test still holds.
	_ = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, immutableFlag)
	e.Start += 8
	if got, err := n.v.EnsureEntry(e); err != nil || got != 0 {
		t.Errorf("entry %d, %v", got, err)
	}
	e.Partition[0]++
	if got, err := n.v.EnsureEntry(e); err != nil || got != 1 {
		t.Errorf("entry %d, %v", got, err)
	}
}

func TestNoVariables(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Join(dir, "missing")} {
		if _, err := OpenVariables(d); !errors.Is(err, ErrNoVariables) {
			t.Errorf("%s: %v", d, err)
		}
	}
	n := newNVRAM(t)
	v, err := OpenVariables(n.v.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, ok, err := v.Current(); ok || err != nil {
		t.Errorf("BootCurrent: %v %v", ok, err)
	}
	n.raw("BootCurrent", []byte{4, 0})
	if c, ok, err := v.Current(); !ok || c != 4 || err != nil || EntryName(c) != "Boot0004" {
		t.Errorf("BootCurrent: %d %v %v", c, ok, err)
	}
}

func TestEntryCheck(t *testing.T) {
	good := golden(t)["efibootmgr-512.bin"]
	for name, change := range map[string]func(*Entry){
		"label":  func(e *Entry) { e.Label = "" },
		"long":   func(e *Entry) { e.Label = strings.Repeat("x", 65) },
		"ctrl":   func(e *Entry) { e.Label = "a\nb" },
		"guid":   func(e *Entry) { e.Partition = GUID{} },
		"number": func(e *Entry) { e.Number = 0 },
		"size":   func(e *Entry) { e.Size = 0 },
		"slash":  func(e *Entry) { e.Loader = "/EFI/BOOT/BOOTX64.EFI" },
		"rel":    func(e *Entry) { e.Loader = `EFI\BOOT` },
	} {
		e := good
		change(&e)
		if _, err := newNVRAM(t).v.EnsureEntry(e); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func FuzzParseEntry(f *testing.F) {
	for _, e := range golden(f) {
		f.Add(e.Marshal())
	}
	f.Add(network("x"))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := ParseEntry(b)
		if err != nil || e.Check() != nil {
			return
		}
		if back, err := ParseEntry(e.Marshal()); err != nil || back != e {
			t.Fatalf("%+v became %+v, %v", e, back, err)
		}
	})
}
