package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/diskfs/go-diskfs"
	"github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/partition/gpt"
)

// loader is the program that the boot entry starts.
const loader = "/EFI/BOOT/BOOTX64.EFI"

// layout is what of a disk stays as the image had it, whatever the installed
// system writes.
type layout struct {
	disk   string
	parts  []string
	loader [sha256.Size]byte
}

// readLayout reads a raw disk or image. A running machine may have it open:
// its EFI system partition is at rest by then.
func readLayout(path string) (layout, error) {
	var l layout
	f, err := os.Open(path)
	if err != nil {
		return l, err
	}
	defer f.Close()
	d, err := diskfs.OpenBackend(file.New(f, true), diskfs.WithOpenMode(diskfs.ReadOnly))
	if err != nil {
		return l, fmt.Errorf("%s: %w", path, err)
	}
	table, err := d.GetPartitionTable()
	if err != nil {
		return l, fmt.Errorf("%s: %w", path, err)
	}
	t, ok := table.(*gpt.Table)
	if !ok {
		return l, fmt.Errorf("%s has a %s partition table, not a GUID one", path, table.Type())
	}
	l.disk = strings.ToLower(t.GUID)
	for _, p := range t.Partitions {
		if p.Type != gpt.Unused {
			l.parts = append(l.parts, fmt.Sprintf("%s %d-%d %s", strings.ToLower(p.GUID), p.Start, p.End, p.Name))
		}
	}
	fs, err := d.GetFilesystem(1)
	if err != nil {
		return l, fmt.Errorf("%s: EFI system partition: %w", path, err)
	}
	r, err := fs.OpenFile(loader, os.O_RDONLY)
	if err != nil {
		return l, fmt.Errorf("%s: %s: %w", path, loader, err)
	}
	h := sha256.New()
	_, err = io.Copy(h, r)
	if err := errors.Join(err, r.Close()); err != nil {
		return l, fmt.Errorf("%s: %s: %w", path, loader, err)
	}
	h.Sum(l.loader[:0])
	return l, nil
}

// sameLayout says in what a disk differs from the image it was written from.
func sameLayout(image, disk layout) error {
	switch {
	case image.disk != disk.disk:
		return fmt.Errorf("the disk's GUID is %s, the image's %s", disk.disk, image.disk)
	case strings.Join(image.parts, "\n") != strings.Join(disk.parts, "\n"):
		return fmt.Errorf("the disk has the partitions %q, the image %q", disk.parts, image.parts)
	case image.loader != disk.loader:
		return fmt.Errorf("%s has the SHA-256 %x, the image's %x", loader, disk.loader, image.loader)
	}
	return nil
}

// digestOf is a file's SHA-256.
func digestOf(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return nil, err
	}
	return h.Sum(nil), nil
}
