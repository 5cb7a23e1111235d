package host

import (
	"errors"
	"os"
	"testing"
)

func TestSMBIOSDamage(t *testing.T) {
	whole, err := os.ReadFile("testdata/server.dmi")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ParseSMBIOS(whole); err != nil {
		t.Fatal(err)
	}
	// Cut anywhere: never a panic, and what was whole before the cut stays.
	for n := range whole {
		info, err := ParseSMBIOS(whole[:n])
		if err != nil && !errors.Is(err, ErrSMBIOSDamaged) {
			t.Fatalf("cut at %d: %v", n, err)
		}
		if n > 200 && info.BIOSVersion != "2.4" {
			t.Fatalf("cut at %d lost the BIOS version", n)
		}
	}
	if _, err := ParseSMBIOS(make([]byte, maxSMBIOSTable+1)); !errors.Is(err, ErrSMBIOSDamaged) {
		t.Errorf("long table: %v", err)
	}
}

func TestPlaceholders(t *testing.T) {
	for in, want := range map[string]string{
		"To Be Filled By O.E.M.": "", "Default string": "", " 00000000 ": "", "xxxx": "", "Not Specified": "", "........": "", "FFFFFFFF": "",
		"Type2 - Board Serial Number": "", "No Asset Tag": "",
		"CZ1234": "CZ1234", "1111": "1111", " A \x00 B ": "A B", "0123": "0123", "FF00": "FF00",
	} {
		if got := meaningful(in); got != want {
			t.Errorf("meaningful(%q) = %q, want %q", in, got, want)
		}
	}
}

func FuzzParseSMBIOS(f *testing.F) {
	whole, err := os.ReadFile("testdata/server.dmi")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	f.Add([]byte{127, 4, 0, 0})
	f.Add([]byte{1, 4, 0, 0, 'a', 0, 'b', 0, 0})
	f.Fuzz(func(t *testing.T, table []byte) {
		info, err := ParseSMBIOS(table)
		if err != nil && !errors.Is(err, ErrSMBIOSDamaged) {
			t.Errorf("error of another kind: %v", err)
		}
		if _, err := Canonical(info); err != nil {
			t.Errorf("not fit to hash: %v", err)
		}
	})
}
