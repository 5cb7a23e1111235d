package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const committed = "../../netboot/testdata"

// TestCommittedCaptures reads each committed capture: it belongs to a variant,
// shows what that variant is for, and is small.
func TestCommittedCaptures(t *testing.T) {
	names, err := filepath.Glob(filepath.Join(committed, "*.pcap"))
	if err != nil || len(names) == 0 {
		t.Fatalf("no captures in %s: %v", committed, err)
	}
	readme, err := os.ReadFile(filepath.Join(committed, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		base := strings.TrimSuffix(filepath.Base(name), ".pcap")
		i := slices.IndexFunc(variants, func(v variant) bool { return v.name == base })
		if i < 0 {
			t.Errorf("%s: no variant makes it", name)
			continue
		}
		raw, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		frames, err := readPcap(raw)
		if err != nil || len(raw) > maxCapture {
			t.Errorf("%s: %d bytes, %v", name, len(raw), err)
		}
		seen := kindsOf(frames)
		for _, want := range variants[i].wants {
			if !slices.Contains(seen, want) {
				t.Errorf("%s: no %s among %v", name, want, seen)
			}
		}
		if !strings.Contains(string(readme), "| `"+base+"` |") {
			t.Errorf("%s has no row in the README", name)
		}
	}
}

// TestWritePcap reads back what it wrote, with times from the first frame on,
// and refuses what is too much for testdata.
func TestWritePcap(t *testing.T) {
	name := filepath.Join(t.TempDir(), "x.pcap")
	if err := writePcap(name, []frame{{100, 999_999, []byte("first")}, {102, 1, []byte("second")}}); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	frames, err := readPcap(raw[:len(raw)-1])
	if err != nil || len(frames) != 1 {
		t.Errorf("a last frame cut short: %d frames, %v", len(frames), err)
	}
	frames, err = readPcap(raw)
	if err != nil || len(frames) != 2 || frames[0].sec != 0 || frames[1].sec != 1 || frames[1].usec != 2 || string(frames[1].data) != "second" {
		t.Errorf("got %+v, %v", frames, err)
	}
	if err := writePcap(name, []frame{{data: make([]byte, maxCapture)}}); err == nil {
		t.Error("a capture over the limit was written")
	}
	if _, err := readPcap([]byte("not a capture, but long enough")); err == nil {
		t.Error("text was read as a capture")
	}
}

// TestKeep leaves out other protocols and the bulk of a transfer.
func TestKeep(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join(committed, "ovmf-pxe.pcap"))
	if err != nil {
		t.Fatal(err)
	}
	frames, err := readPcap(raw)
	if err != nil {
		t.Fatal(err)
	}
	var data frame
	for _, f := range frames {
		if _, src, dst, p, ok := transport(f.data); ok && src > 1024 && dst > 1024 && len(p) > 1000 {
			data = f
		}
	}
	if data.data == nil {
		t.Fatal("no TFTP data in the capture")
	}
	arp := frame{data: append(make([]byte, 12), 0x08, 0x06, 0, 1, 8, 0)}
	if got := keep([]frame{arp, {data: data.data[:30]}, data}); len(got) != 1 {
		t.Errorf("kept %d of ARP, half a header and data", len(got))
	}
	if got := keep(slices.Repeat([]frame{data}, maxTransfer+5)); len(got) != maxTransfer {
		t.Errorf("kept %d of a long transfer", len(got))
	}
}
