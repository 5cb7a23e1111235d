// Package disk makes a small bootable disk image for boot tests: what a
// deployment writes to a disk when the test is about the deployment and not
// about the operating system. It has a GPT with two partitions:
//
//	1  EFI system partition, FAT32: one unified kernel image as
//	   \EFI\BOOT\BOOTX64.EFI (or BOOTAA64.EFI), and room for \bcd\seed
//	2  data, of type DataType, an empty ext4
//
// The unified kernel image is a bcd image whose command line has
// bcd.role=node. The same input gives the same bytes on the same machine.
package disk

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/klauspost/compress/zstd"
)

const (
	// ESPType is the partition type of an EFI system partition, UEFI 2.10
	// section 5.3.3.
	ESPType = "c12a7328-f81f-11d2-ba4b-00a0c93ec93b"
	// DataType is the partition type of bcd's data partition.
	DataType = "b0cd0da7-a000-4bcd-8bcd-6e6f64650001"
	// DataLabel names the data partition and its file system.
	DataLabel = "bcd-data"

	// MaxSize bounds an image: boot tests send it over a slow virtual wire.
	MaxSize = 64 << 20

	dataSize = 12 << 20
	// espSlack is room beside the unified kernel image: for the seed, and so
	// that the file system has the clusters that make it FAT32.
	espSlack   = 2 << 20
	minESPSize = 34 << 20
	mib        = 1 << 20
)

// Options are the inputs of an image.
type Options struct {
	// UKI is the unified kernel image.
	UKI []byte
	// Arch is "amd64" or "arm64", which decides the file's name.
	Arch string
	// Files are further files of the EFI system partition, by path, in
	// capital 8.3 names as in "BCD/SEED/CONFIG".
	Files map[string][]byte
	// Epoch is the time of every file in seconds since 1970.
	Epoch int64
}

// Build gives the disk image. It needs mke2fs (Debian package e2fsprogs).
func Build(ctx context.Context, o Options) ([]byte, error) {
	name, ok := map[string]string{"amd64": "BOOTX64.EFI", "arm64": "BOOTAA64.EFI"}[o.Arch]
	if !ok {
		return nil, fmt.Errorf("architecture %q: use amd64 or arm64", o.Arch)
	}
	if len(o.UKI) < 2 || o.UKI[0] != 'M' || o.UKI[1] != 'Z' {
		return nil, errors.New("unified kernel image is not a pe file")
	}
	files := []fatFile{{"EFI/BOOT/" + name, o.UKI}}
	payload := len(o.UKI)
	for _, p := range sortedKeys(o.Files) {
		files = append(files, fatFile{p, o.Files[p]})
		payload += len(o.Files[p]) + sectorSize
	}
	// 1/60 of the partition is the two tables.
	esp := max(minESPSize, roundUp(payload+payload/60+espSlack, mib))
	total := mib + esp + dataSize + mib
	if total > MaxSize {
		return nil, fmt.Errorf("disk image would have %d bytes, more than %d: the unified kernel image has %d; build it without the rescue shell", total, MaxSize, len(o.UKI))
	}
	sum := sha256.Sum256(o.UKI)
	seed := sum[:]
	at := time.Unix(o.Epoch, 0).UTC()
	image := make([]byte, total)
	espAt := alignment * sectorSize
	dataAt := espAt + esp
	serial := binary.LittleEndian.Uint32(seed)
	if err := writeFAT32(image[espAt:dataAt], "BCD-ESP", serial, alignment, at, files); err != nil {
		return nil, fmt.Errorf("efi system partition: %w", err)
	}
	data, err := ext4(ctx, derive(seed, "data file system"), o.Epoch)
	if err != nil {
		return nil, fmt.Errorf("data partition: %w", err)
	}
	copy(image[dataAt:], data)
	writeGPT(image, derive(seed, "disk"), []partition{
		{mustGUID(ESPType), derive(seed, "esp"), alignment, uint64(dataAt/sectorSize - 1), "bcd-esp"},
		{mustGUID(DataType), derive(seed, "data"), uint64(dataAt / sectorSize), uint64((dataAt+dataSize)/sectorSize - 1), DataLabel},
	})
	return image, nil
}

// ext4 makes the empty file system of the data partition. The journal is there
// on purpose: tests cut the power.
func ext4(ctx context.Context, id guid, epoch int64) ([]byte, error) {
	dir, err := os.MkdirTemp("", "bcd-disk-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "data")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		return nil, err
	}
	if err := os.Truncate(file, dataSize); err != nil {
		return nil, err
	}
	program, err := exec.LookPath("mke2fs")
	if err != nil {
		program = "/usr/sbin/mke2fs" // not on the path of an ordinary user
	}
	cmd := exec.CommandContext(ctx, program, "-q", "-F", "-t", "ext4", "-b", "4096", "-L", DataLabel, "-U", id.String(),
		"-m", "0", "-J", "size=4", "-O", "^resize_inode", "-E", "hash_seed="+id.String()+",lazy_itable_init=0,lazy_journal_init=0,root_owner=0:0", file)
	// The time in the superblock: old releases know the one, new the other.
	cmd.Env = append(os.Environ(), fmt.Sprintf("E2FSPROGS_FAKE_TIME=%d", epoch), fmt.Sprintf("SOURCE_DATE_EPOCH=%d", epoch), "MKE2FS_CONFIG=/dev/null")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("mke2fs: %w: %s", err, out)
	}
	return os.ReadFile(file)
}

// Compress gives the image as zstd, always the same bytes for the same image.
func Compress(image []byte) ([]byte, error) {
	w, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithEncoderConcurrency(1),
		// A deployer bounds the window it accepts.
		zstd.WithWindowSize(4*mib), zstd.WithEncoderCRC(true))
	if err != nil {
		return nil, err
	}
	out := w.EncodeAll(image, nil)
	return out, w.Close()
}

func roundUp(n, step int) int { return (n + step - 1) / step * step }
