package host

import (
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"
	"unicode/utf16"
	"unicode/utf8"
)

// loadOption is an EFI_LOAD_OPTION with a description and no device path.
func loadOption(label string) []byte {
	b := []byte{1, 0, 0, 0, 4, 0}
	for _, unit := range append(utf16.Encode([]rune(label)), 0) {
		b = binary.LittleEndian.AppendUint16(b, unit)
	}
	return append(b, 0x7f, 0xff, 4, 0)
}

func TestBootOfThisMachine(t *testing.T) {
	roots := plant(t, "server.tree")
	if b := recordedFacts(context.Background(), roots).Boot; b != (Boot{Mode: "uefi"}) {
		t.Errorf("without BootCurrent: %+v", b)
	}
	put := func(name string, value []byte) {
		t.Helper()
		path := filepath.Join(roots.Sys, "firmware/efi/efivars", name+"-"+efiGlobalVariable)
		if err := os.WriteFile(path, append([]byte{6, 0, 0, 0}, value...), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put("BootCurrent", []byte{0x0a, 0x00})
	if b := recordedFacts(context.Background(), roots).Boot; b != (Boot{Mode: "uefi", Current: "Boot000A"}) {
		t.Errorf("without the entry: %+v", b)
	}
	put("Boot000A", loadOption("bcd node"))
	if b := recordedFacts(context.Background(), roots).Boot; b != (Boot{Mode: "uefi", Current: "Boot000A", Label: "bcd node"}) {
		t.Errorf("%+v", b)
	}
}

// Another boot entry is no other firmware and no other machine: only the
// section of the boot may change.
func TestBootChangesItsOwnSectionOnly(t *testing.T) {
	before := Facts{Boot: Boot{Mode: "uefi", Current: "Boot0001"}}
	after := Facts{Boot: Boot{Mode: "uefi", Current: "Boot0004", Label: "bcd node"}}
	a, b := before.Sections(), after.Sections()
	for i := range a {
		if (a[i].SHA256 != b[i].SHA256) != (a[i].Name == "boot") {
			t.Errorf("section %s: %x and %x", a[i].Name, a[i].SHA256, b[i].SHA256)
		}
	}
}

func FuzzBootLabel(f *testing.F) {
	f.Add(loadOption("UEFI PXEv4"))
	f.Add(loadOption("x")[:7])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, value []byte) {
		label := parseBootLabel(value)
		if len(label) > 4*maxBootLabel || !utf8.ValidString(label) {
			t.Errorf("%q", label)
		}
		parseBootCurrent(value)
	})
}
