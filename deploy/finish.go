package deploy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/better-compute/bcd/boot"
	"github.com/better-compute/bcd/deploy/disk"
	"github.com/better-compute/bcd/deploy/fat"
	"github.com/better-compute/bcd/deploy/gpt"
)

// overlay is the disk as it will be once the head is written.
type overlay struct {
	head []byte
	Target
}

func (o overlay) ReadAt(p []byte, off int64) (n int, err error) {
	if off < int64(len(o.head)) {
		n = copy(p, o.head[off:])
	}
	if n == len(p) {
		return n, nil
	}
	m, err := o.Target.ReadAt(p[n:], off+int64(n))
	return n + m, err
}

func (o overlay) WriteAt(p []byte, off int64) (n int, err error) {
	if off < int64(len(o.head)) {
		n = copy(o.head[off:], p)
	}
	if n == len(p) {
		return n, nil
	}
	m, err := o.Target.WriteAt(p[n:], off+int64(n))
	return n + m, err
}

// finishLayout does what the image could not know: the backup table goes to
// the end of this disk, the seed onto the EFI system partition. All of it is
// on stable storage when it returns; the head is changed in memory only.
func (j *job) finishLayout(context.Context) error {
	if j.table == nil {
		return nil
	}
	if err := j.moveBackup(); err != nil {
		return err
	}
	esp, ok := j.table.Find(gpt.ESP)
	if !ok {
		return nil
	}
	fs, err := j.openESP(esp)
	if err != nil {
		if len(j.Seed) == 0 {
			// Nothing has to be written: let the firmware judge.
			j.note(fmt.Sprintf("the EFI system partition cannot be read (%v): the boot loader was not checked", err))
			return nil
		}
		return fail(NoESP, "the image's EFI system partition (number %d) cannot be read: %w", esp.Number, err)
	}
	if err := j.checkLoader(fs); err != nil {
		return err
	}
	if err := j.writeSeed(fs, esp); err != nil {
		j.unseed(fs)
		return err
	}
	return j.flush()
}

// checkLoader looks for what the boot entry will name. A machine that was
// started by a BIOS may boot the same image in another way.
func (j *job) checkLoader(fs *fat.FS) error {
	ok, err := fs.Exists(j.Loader)
	if err != nil {
		return fail(LoaderMissing, "look for the boot loader %s on the image's EFI system partition: %w", j.Loader, err)
	}
	if ok {
		return nil
	}
	if _, err := j.Variables(); errors.Is(err, boot.ErrNoVariables) {
		j.note(fmt.Sprintf("the image has no %s on its EFI system partition; the machine was started by a BIOS, so it may not need it", j.Loader))
		return nil
	}
	return fail(LoaderMissing, "the image has no boot loader %s on its EFI system partition: name the right one in the command or add it to the image", j.Loader)
}

func (j *job) openESP(esp gpt.Partition) (*fat.FS, error) {
	ss := int64(j.table.SectorSize)
	return fat.Open(overlay{j.head, j.target}, int64(esp.First)*ss, int64(esp.Sectors())*ss)
}

func (j *job) moveBackup() error {
	ss := int64(j.table.SectorSize)
	sectors := uint64(j.target.Size() / ss)
	old := j.table.Alternate
	backup, at, err := j.table.Relocate(j.head, sectors)
	if err != nil {
		return fail(ImageTooLarge, "move the backup partition table to the end of %s: %w", j.res.Disk, err)
	}
	o := overlay{j.head, j.target}
	// The old header would be a second, wrong opinion about this disk. It
	// goes first: the new table may cover its place.
	for _, w := range []struct {
		data []byte
		off  int64
	}{{make([]byte, ss), int64(old) * ss}, {backup, int64(at) * ss}} {
		if _, err := o.WriteAt(w.data, w.off); err != nil {
			return fail(DiskIO, "writing the backup partition table to %s failed: %w", j.res.Disk, err)
		}
	}
	if err := j.flush(); err != nil {
		return err
	}
	back := make([]byte, len(backup))
	if err := j.read(back, int64(at)*ss); err != nil {
		return err
	}
	if !bytes.Equal(back, backup) {
		return fail(ReadbackMismatch, "%s gives back another backup partition table than was written: the disk is broken", j.res.Disk)
	}
	return nil
}

func (j *job) writeSeed(fs *fat.FS, esp gpt.Partition) error {
	for _, name := range slices.Sorted(maps.Keys(j.Seed)) {
		if err := fs.WriteFile(SeedDir+name, j.Seed[name], j.Clock.Now()); err != nil {
			return fail(SeedFailed, "seed file %s: %w", name, err)
		}
	}
	if err := j.flush(); err != nil {
		return err
	}
	if err := j.target.DropCaches(); err != nil {
		return fail(DiskIO, "%w", err)
	}
	// Read as the installed system will: from the beginning.
	again, err := j.openESP(esp)
	if err != nil {
		return fail(SeedFailed, "open the EFI system partition again: %w", err)
	}
	for _, name := range slices.Sorted(maps.Keys(j.Seed)) {
		got, err := again.ReadFile(SeedDir + name)
		if err == nil && !bytes.Equal(got, j.Seed[name]) {
			err = errors.New("file reads back differently")
		}
		clear(got)
		if err != nil {
			return fail(SeedFailed, "seed file %s: %w", name, err)
		}
	}
	return nil
}

// unseed takes secrets back from a disk that will not boot. It does what it
// can: the disk may be the reason for the failure.
func (j *job) unseed(fs *fat.FS) {
	for name := range j.Seed {
		if err := fs.Shred(SeedDir + name); err != nil && !errors.Is(err, fat.ErrNotExist) {
			j.note(fmt.Sprintf("seed file %s could not be removed from the disk again: %v", name, err))
		}
	}
}

// commit writes the head: all but the first sector, then, once that is safe,
// the first sector. Without its protective MBR (or boot code) no firmware and
// no kernel takes the disk for partitioned, so this last small write is the
// moment the deployment happens.
func (j *job) commit(context.Context) (err error) {
	ss := j.target.SectorSize()
	defer func() {
		if err != nil {
			// Whatever was written of it must not boot.
			if werr := errors.Join(j.write(disk.Buffer(ss), 0), j.flush()); werr != nil {
				j.note("the first sector could not be wiped again: " + werr.Error())
			}
		}
	}()
	for _, part := range []struct {
		data []byte
		off  int
	}{{j.head[ss:], ss}, {j.head[:ss], 0}} {
		if err := j.write(part.data, int64(part.off)); err != nil {
			return err
		}
		if err := j.flush(); err != nil {
			return err
		}
	}
	if err := j.target.DropCaches(); err != nil {
		return fail(DiskIO, "%w", err)
	}
	back := disk.Buffer(headBytes)[:len(j.head)]
	if err := j.read(back, 0); err != nil {
		return err
	}
	if !bytes.Equal(back, j.head) {
		return fail(ReadbackMismatch, "%s gives back another partition table than was written: the disk is broken; nothing bootable is left on it", j.res.Disk)
	}
	return nil
}

const (
	// rescanFor is how long the kernel may take to show new partitions.
	rescanFor   = 10 * time.Second
	rescanEvery = 100 * time.Millisecond
)

// rescan makes the kernel see the new partitions. The deployment is done and
// proven by now, so what goes wrong here is a note.
func (j *job) rescan(ctx context.Context) error {
	if err := j.target.RereadPartitions(); err != nil {
		j.note("the kernel did not re-read the partition table: " + err.Error())
		return nil
	}
	if j.table == nil {
		return nil
	}
	deadline := j.Clock.Now().Add(rescanFor)
	for _, p := range j.table.Partitions {
		for !j.PartitionReady(j.res.Disk, p, j.table.SectorSize) {
			if !j.Clock.Now().Before(deadline) {
				j.note(fmt.Sprintf("the kernel did not show partition %d of %s within %s", p.Number, j.res.Disk.Node, rescanFor))
				return nil
			}
			if err := j.Clock.Sleep(ctx, rescanEvery); err != nil {
				return asError(ctx, err, Failed)
			}
		}
	}
	return nil
}

// partitionReady looks for the node, and that it is the new partition and not
// an old one of the same number.
func (r rootsOf) partitionReady(d disk.Disk, p gpt.Partition, sector int) bool {
	name := d.Name + strconv.Itoa(p.Number)
	if last := d.Name[len(d.Name)-1]; last >= '0' && last <= '9' {
		name = d.Name + "p" + strconv.Itoa(p.Number)
	}
	if _, err := os.Stat(filepath.Join(r.dev, name)); err != nil {
		return false
	}
	dir := filepath.Join(r.sys, "block", d.Name, name)
	// sysfs counts in 512 bytes whatever the sector size.
	return number(filepath.Join(dir, "start")) == p.First*uint64(sector/512) &&
		number(filepath.Join(dir, "size")) == p.Sectors()*uint64(sector/512)
}

func number(name string) uint64 {
	b, err := os.ReadFile(name)
	if err != nil {
		return 0
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// bootEntry tells the firmware.
func (j *job) bootEntry(context.Context) error {
	if j.res.ESP == "" {
		j.note("the image has no EFI system partition: no boot entry was made")
		return nil
	}
	vars, err := j.Variables()
	if errors.Is(err, boot.ErrNoVariables) {
		j.note("the machine has no EFI variables (it was started by a BIOS): no boot entry was made")
		return nil
	}
	if err == nil {
		esp, _ := j.table.Find(gpt.ESP)
		var n uint16
		n, err = vars.EnsureEntry(boot.Entry{Label: j.Label, Partition: esp.Unique, Number: uint32(esp.Number),
			Start: esp.First, Size: esp.Sectors(), Loader: j.Loader})
		if err == nil {
			j.res.BootEntry = boot.EntryName(n)
			return nil
		}
	}
	// Without an entry firmware still tries the removable media path.
	if strings.EqualFold(j.Loader, removableLoader()) {
		j.note(fmt.Sprintf("no boot entry was made (%v): the firmware has to find %s on the disk by itself", err, j.Loader))
		return nil
	}
	return fail(BootEntryFailed, "the image is complete on %s, but the firmware has no entry to boot it: %w", j.res.Disk, err)
}
