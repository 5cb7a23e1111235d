package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/image/disk"
)

func TestLandmarks(t *testing.T) {
	for line, want := range map[string]string{
		">>Start PXE over IPv4.":                                                     "firmware looks for something to boot on the network (PXE, IPv4)",
		"  NBP filesize is 1048576 Bytes\r":                                          "firmware fetches 1.0 MiB over TFTP",
		"\x1b[2JBdsDxe: starting Boot0004 \"bcd node\" from HD(1)":                   "firmware starts Boot0004 \"bcd node\"",
		"[    0.000000] Linux version 6.12.1-cloud (debian-kernel@lists.debian.org)": "console Linux 6.12.1-cloud starts",
		"[    3.1] systemd[1]: systemd 257.13-1 running in system mode (+PAM)":       "console systemd 257.13-1 is process 1, from the disk",
		"an ordinary line": "",
	} {
		from, text, _ := landmark(line)
		if got := strings.TrimSpace(from + " " + text); got != want {
			t.Errorf("%q: %q, want %q", line, got, want)
		}
	}
}

func FuzzLandmark(f *testing.F) {
	f.Add("BdsDxe: starting Boot0004 \"bcd node\" from HD(1)")
	f.Fuzz(func(t *testing.T, line string) {
		if _, text, ok := landmark(line); len(text) > 400 || ok != (text != "") {
			t.Errorf("%q", text)
		}
	})
}

// Where there is no terminal a transfer is a line every few seconds, and one
// when it is whole.
func TestTransferWithoutATerminal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "out")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	v := newView(f)
	for done := int64(0); done <= 1000; done++ {
		v.transfer(&bcdv1.TransferProgress{Phase: "write", BytesDone: done << 20, BytesTotal: 1000 << 20})
	}
	v.transferred()
	out, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(out), "\n"); n < 2 || n > 5 || !strings.Contains(string(out), "write 100%  1000.0 MiB of 1000.0 MiB") {
		t.Errorf("%d lines:\n%s", n, out)
	}
}

// A disk that an image was written to is larger than the image and has it at
// its beginning; another loader or table is found.
func TestLayoutTellsDisksApart(t *testing.T) {
	read := func(loader string, size int64) layout {
		t.Helper()
		image, err := disk.Build(t.Context(), disk.Options{UKI: []byte(loader), Arch: "amd64"})
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "disk.raw")
		if err := os.WriteFile(path, image, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, max(size, int64(len(image)))); err != nil {
			t.Fatal(err)
		}
		l, err := readLayout(path)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	image := read("MZ one", 0)
	if len(image.parts) != 2 {
		t.Errorf("partitions: %q", image.parts)
	}
	if err := sameLayout(image, read("MZ one", 128<<20)); err != nil {
		t.Error(err)
	}
	other := image
	other.loader[0]++
	if err := sameLayout(image, other); err == nil {
		t.Error("another loader went unseen")
	}
	if err := sameLayout(image, read("MZ two", 0)); err == nil {
		t.Error("another image went unseen")
	}
	if _, err := readLayout(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("no disk, no error")
	}
}
