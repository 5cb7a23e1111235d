package gpt

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// image makes a disk image with sgdisk, which is somebody else's idea of a
// correct table. 4096-byte sectors need a loop device, as sgdisk asks it.
func image(t testing.TB, size int64) (string, []byte) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "disk")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Truncate(size), f.Close()); err != nil {
		t.Fatal(err)
	}
	run(t, "sgdisk", "-o", "-n", "1:2048:+4M", "-t", "1:ef00", "-c", "1:boot ü", "-n", "2:0:0", "-t", "2:8300", name)
	return name, read(t, name)
}

func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func read(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestParseWhatSgdiskMakes(t *testing.T) {
	_, b := image(t, 16<<20)
	tab, err := Detect(b[:1<<20])
	if err != nil {
		t.Fatal(err)
	}
	if tab.SectorSize != 512 || tab.DiskBytes() != 16<<20 || len(tab.Partitions) != 2 {
		t.Fatalf("table %+v", tab)
	}
	p, ok := tab.Find(ESP)
	if !ok || p.Number != 1 || p.First != 2048 || p.Sectors() != 8192 || p.Name != "boot ü" {
		t.Errorf("ESP %+v", p)
	}
}

func TestRelocateSatisfiesSgdisk(t *testing.T) {
	name, b := image(t, 16<<20)
	tab, err := Detect(b[:1<<20])
	if err != nil {
		t.Fatal(err)
	}
	const larger = 48 << 20
	backup, lba, err := tab.Relocate(b[:1<<20], larger/512)
	if err != nil {
		t.Fatal(err)
	}
	b = append(b, make([]byte, larger-len(b))...)
	copy(b[lba*512:], backup)
	if int(lba)*512+len(backup) != larger {
		t.Errorf("backup of %d bytes at sector %d does not reach the end", len(backup), lba)
	}
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if out := run(t, "sgdisk", "-v", name); !strings.Contains(out, "No problems found") {
		t.Errorf("sgdisk -v:\n%s", out)
	}
	again, err := Detect(b)
	if err != nil || again.DiskBytes() != larger || len(again.Partitions) != 2 || again.Partitions[1] != tab.Partitions[1] {
		t.Errorf("table after the move: %+v, %v", again, err)
	}
	if _, _, err := again.Relocate(b, 20000); err == nil {
		t.Error("moved to a disk that the partitions do not fit")
	}
}

func TestDamageIsNoticed(t *testing.T) {
	_, b := image(t, 16<<20)
	for o, want := range map[int]string{512: "no GUID", 512 + 17: "checksum", 512 + 60: "checksum", 1024 + 40: "entries checksum"} {
		c := bytes.Clone(b[:1<<20])
		c[o] ^= 0x40
		if _, err := Detect(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("byte %d: %v, want %q", o, err, want)
		}
	}
	if _, err := Detect(b[:2048]); err == nil {
		t.Error("accepted a table that is cut off")
	}
	if _, err := Detect(nil); !errors.Is(err, ErrNoTable) {
		t.Errorf("nothing: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	_, b := image(f, 16<<20)
	f.Add(b[:34*512], uint64(1<<20))
	f.Fuzz(func(t *testing.T, b []byte, sectors uint64) {
		for _, ss := range []int{512, 4096} {
			fixCRC(b, ss)
			tab, err := Parse(b, ss)
			if err != nil {
				continue
			}
			if tab.DiskBytes() <= 0 || len(tab.Partitions) > maxEntries {
				t.Fatalf("%+v", tab)
			}
			sectors %= 1 << 50
			backup, lba, err := tab.Relocate(b, sectors)
			if err != nil {
				continue
			}
			if lba+uint64(len(backup)/ss) != sectors {
				t.Fatalf("backup at %d of %d bytes on %d sectors", lba, len(backup), sectors)
			}
			if _, err := Parse(b, ss); err != nil {
				t.Fatalf("not parsable after the move: %v", err)
			}
		}
	})
}

// fixCRC lets the fuzzer past the checksum, else it would test only that.
func fixCRC(b []byte, ss int) {
	if len(b) < 2*ss || string(b[ss:ss+8]) != signature {
		return
	}
	h := b[ss : 2*ss]
	if n := le.Uint32(h[12:]); n >= minHeader && int(n) <= ss {
		start, size := le.Uint64(h[72:])*uint64(ss), uint64(le.Uint32(h[80:]))*uint64(le.Uint32(h[84:]))
		if start < uint64(len(b)) && size < uint64(len(b)) && start+size <= uint64(len(b)) {
			le.PutUint32(h[88:], crc32.ChecksumIEEE(b[start:start+size]))
		}
		le.PutUint32(h[16:], headerCRC(h[:n]))
	}
}

var le = binary.LittleEndian
