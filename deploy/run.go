// Package deploy writes an operating system image to this machine's disk.
//
// Parties: a signed command (Request) says which image, by digest, belongs on
// which disk; an HTTP server that is trusted with nothing holds the image; the
// disk is believed only what it gives back when it is read again.
//
// The order of writes is what makes a failure safe. The start of the disk is
// wiped first and written last, its very first sector after everything else
// was read back and compared. So at each moment the disk has no partition
// table or all of the new system, never a part of it that might boot.
package deploy

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"hash"
	"io"
	"log/slog"
	"net/http"
	"time"

	"github.com/better-compute/bcd/agent/host"
	"github.com/better-compute/bcd/boot"
	"github.com/better-compute/bcd/deploy/disk"
	"github.com/better-compute/bcd/deploy/gpt"
)

// Target is an open disk; *disk.Device is the real one.
type Target interface {
	io.ReaderAt
	io.WriterAt
	// Size is in bytes, SectorSize the logical sector's.
	Size() int64
	SectorSize() int
	// Flush returns once everything written is on stable storage.
	Flush() error
	// DropCaches makes the next read come from the disk.
	DropCaches() error
	// ZeroOut makes a range read as zeros or returns disk.ErrNoZeroing.
	ZeroOut(ctx context.Context, off, n int64) error
	RereadPartitions() error
	Close() error
}

// Deps is the world a deployment runs in. The zero value of a field stands for
// this machine's.
type Deps struct {
	// Client reads the image; it should be one of its own, so that a long
	// download shares no connection with heartbeats.
	Client *http.Client
	Clock  Clock
	Roots  disk.Roots
	Disks  func(context.Context) ([]disk.Disk, error)
	Open   func(disk.Disk) (Target, error)
	// Variables opens the firmware's; boot.ErrNoVariables means a BIOS.
	Variables func() (*boot.Variables, error)
	// Memory is how many bytes can be used without swapping.
	Memory func() (int64, error)
	// PartitionReady says whether the kernel shows a partition.
	PartitionReady func(disk.Disk, gpt.Partition, int) bool
	// BeforeWrite is called once, right before the first write; its error
	// stops the deployment with nothing written.
	BeforeWrite func(disk.Disk) error
	// Progress is called often; the caller limits the rate.
	Progress func(Progress)
	Log      *slog.Logger
}

// Phase is a step of a deployment.
type Phase string

// Phases, in their order.
const (
	PhaseSelect    Phase = "select"
	PhasePreflight Phase = "preflight"
	PhaseWipe      Phase = "wipe"
	PhaseStream    Phase = "stream"
	PhaseVerify    Phase = "verify"
	PhaseSeed      Phase = "seed"
	PhaseCommit    Phase = "commit"
	PhaseRescan    Phase = "rescan"
	PhaseBoot      Phase = "boot"
)

// PhaseRecord is what a phase took. A phase that began again is there twice.
type PhaseRecord struct {
	Phase    Phase
	Started  time.Time
	Duration time.Duration
	Bytes    int64
}

// Result is what a deployment did; after an error, what it did until then.
type Result struct {
	Disk disk.Disk
	// Wrote says that the disk was touched.
	Wrote bool
	// ImageBytes and ImageDigest are of the file as it came, RawBytes and
	// RawDigest of the unpacked image, ReadbackDigest of the image as it was
	// read back from the disk, before the seed was added and the backup
	// partition table moved.
	ImageBytes, RawBytes                   int64
	ImageDigest, RawDigest, ReadbackDigest Digest
	// SkippedBytes are zeros that were not written because the disk had
	// zeroed the range itself.
	SkippedBytes int64
	// ESP is the unique GUID of the EFI system partition, or empty.
	ESP string
	// BootEntry is for example Boot0004; empty where there is none.
	BootEntry string
	Phases    []PhaseRecord
	// Notes are sentences an operator may want to read.
	Notes []string
}

const (
	// headBytes is what is written last. It holds a GPT of any size in use,
	// and partitions start after it unless somebody went out of their way.
	headBytes = 1 << 20
	// tailBytes is wiped at the end of the disk: backup GPT, md 1.0 (128 KiB),
	// ZFS labels (512 KiB), RAID controllers' own (up to 32 MiB is theirs).
	tailBytes = 1 << 20
	// maxRestarts bounds how often an image may change under our hands.
	maxRestarts = 3
)

// job is one run.
type job struct {
	Request
	Deps
	res    Result
	target Target
	meter  meter
	// table is the image's, nil when it has none.
	table *gpt.Table
	head  []byte
	// zeroEnd is up to where the disk reads zeros since it was wiped; 0 when
	// nothing is known.
	zeroEnd int64
}

// Run deploys an image. The error is always an *Error. Seed values are
// overwritten when it returns.
func Run(ctx context.Context, req Request, deps Deps) (Result, error) {
	defer func() {
		for _, secret := range req.Seed {
			clear(secret)
		}
	}()
	j := &job{Request: req, Deps: deps.withDefaults()}
	j.meter = meter{clock: j.Clock, report: j.Progress}
	err := j.run(ctx)
	if j.target != nil {
		if cerr := j.target.Close(); cerr != nil && err == nil {
			err = fail(DiskIO, "close %s: %w", j.res.Disk.Node, cerr)
		}
	}
	if err == nil {
		return j.res, nil
	}
	e := asError(ctx, err, Failed)
	e.Wrote = j.res.Wrote
	if n := len(j.res.Phases); n > 0 {
		e.Phase = j.res.Phases[n-1].Phase
	}
	return j.res, e
}

func (j *job) run(ctx context.Context) error {
	if err := j.check(); err != nil {
		return err
	}
	if err := j.phase(ctx, PhaseSelect, j.choose); err != nil {
		return err
	}
	for restart := 0; ; restart++ {
		err := j.transfer(ctx)
		if err == nil {
			break
		}
		if !errors.Is(err, errChanged) {
			return err
		}
		if restart == maxRestarts {
			return fail(ImageChanged, "%s changed %d times while it was read, or its server cannot resume: give it a strong ETag and leave it alone", redact(j.URL), restart+1)
		}
		j.note("the image changed or could not be resumed: starting again from its first byte")
	}
	for _, step := range []struct {
		phase Phase
		do    func(context.Context) error
	}{
		{PhaseVerify, j.verify}, {PhaseSeed, j.finishLayout}, {PhaseCommit, j.commit},
		{PhaseRescan, j.rescan}, {PhaseBoot, j.bootEntry},
	} {
		if err := j.phase(ctx, step.phase, step.do); err != nil {
			return err
		}
	}
	return nil
}

// phase runs a step and records it.
func (j *job) phase(ctx context.Context, p Phase, do func(context.Context) error) error {
	if err := ctx.Err(); err != nil {
		return asError(ctx, err, Failed)
	}
	j.res.Phases = append(j.res.Phases, PhaseRecord{Phase: p, Started: j.Clock.Now()})
	rec := &j.res.Phases[len(j.res.Phases)-1]
	j.meter.begin(p)
	err := do(ctx)
	rec.Duration = j.Clock.Now().Sub(rec.Started)
	rec.Bytes = j.meter.done
	if err != nil {
		return err
	}
	j.Log.Info("deploy phase done", "phase", p, "disk", j.res.Disk.Node, "bytes", rec.Bytes, "duration", rec.Duration)
	return nil
}

// maxNotes keeps a result within its size however often a connection broke;
// the log has them all.
const maxNotes = 20

func (j *job) note(s string) {
	if len(j.res.Notes) < maxNotes {
		j.res.Notes = append(j.res.Notes, s)
	}
	j.Log.Warn(s, "disk", j.res.Disk.Node)
}

func (j *job) choose(ctx context.Context) error {
	disks, err := j.Disks(ctx)
	if err != nil {
		return fail(Failed, "list disks: %w", err)
	}
	d, err := disk.Choose(disks, j.Request.Disk, j.Binding)
	if err != nil {
		return asError(ctx, err, Failed)
	}
	j.res.Disk = d
	j.Log.Info("disk chosen", "disk", d.Node, "model", d.Model, "serial", d.Serial, "bytes", d.SizeBytes)
	return nil
}

// transfer brings the image to the disk once, all but its head.
func (j *job) transfer(ctx context.Context) error {
	var src *source
	var dec *decoder
	defer func() {
		if dec != nil {
			dec.close()
		}
		if src != nil {
			src.Close()
		}
	}()
	raw := sha256.New()
	err := j.phase(ctx, PhasePreflight, func(ctx context.Context) (err error) {
		src, err = openSource(ctx, j.Client, j.Clock, j.URL, j.note)
		if err != nil {
			return err
		}
		if src.total < 0 && j.ImageSize > 0 {
			// The server does not say; then an early end is one all the same.
			src.total = j.ImageSize
		}
		if j.ImageSize > 0 && src.total != j.ImageSize {
			return fail(SizeMismatch, "%s has %d bytes, the command says %d", redact(j.URL), src.total, j.ImageSize)
		}
		if dec, err = newDecoder(src, j.Format); err != nil {
			return err
		}
		if err := j.checkMemory(dec); err != nil {
			return err
		}
		if err := dec.start(); err != nil {
			return err
		}
		j.head = disk.Buffer(headBytes)
		n, _, err := readFull(dec, j.head)
		if err != nil {
			return err
		}
		j.head = j.head[:n]
		raw.Write(j.head)
		if err := j.open(); err != nil {
			return err
		}
		return j.preflight(src, dec)
	})
	if err != nil {
		return err
	}
	if err := j.phase(ctx, PhaseWipe, j.wipe); err != nil {
		return err
	}
	return j.phase(ctx, PhaseStream, func(ctx context.Context) error {
		return j.stream(ctx, src, dec, raw)
	})
}

// open opens the disk, once; a restart keeps it.
func (j *job) open() error {
	if j.target != nil {
		return nil
	}
	t, err := j.Open(j.res.Disk)
	if err != nil {
		return asError(context.Background(), err, DiskIO)
	}
	j.target = t
	return nil
}

func (j *job) checkMemory(dec *decoder) error {
	have, err := j.Memory()
	if err != nil {
		return fail(Failed, "read available memory: %w", err)
	}
	if need := dec.need(); have < need {
		return fail(InsufficientMemory, "the machine has %d MiB of memory available, unpacking this image needs %d MiB: give it more memory or pack the image with a smaller window", have>>20, need>>20)
	}
	return nil
}

// preflight refuses before the first write what cannot end well.
func (j *job) preflight(src *source, dec *decoder) error {
	size, sector := j.target.Size(), j.target.SectorSize()
	table, err := gpt.Detect(j.head)
	switch {
	case errors.Is(err, gpt.ErrNoTable):
		table = nil
		if len(j.head) < 512 || j.head[510] != 0x55 || j.head[511] != 0xaa {
			return fail(ImageInvalid, "the image has no partition table in its first MiB: it is not a disk image")
		}
	case err != nil:
		return fail(ImageInvalid, "the image's partition table is damaged: %w", err)
	}
	j.table = table
	switch {
	case table == nil && sector != 512:
		return fail(SectorSize, "%s has sectors of %d bytes, and the image has an MBR, which is for 512: build the image with a GPT for %d", j.res.Disk, sector, sector)
	case table != nil && table.SectorSize != sector:
		return fail(SectorSize, "the image is made for sectors of %d bytes, but %s has %d: build it for that sector size (mkosi: SectorSize=%d)", table.SectorSize, j.res.Disk, sector, sector)
	}
	known := max(j.RawSize, dec.header.rawSize)
	if dec.header.format == Raw && src.total >= 0 {
		if j.RawSize > 0 && src.total != j.RawSize {
			return fail(SizeMismatch, "%s has %d bytes, the command says that the image has %d", redact(j.URL), src.total, j.RawSize)
		}
		known = src.total
	}
	if j.RawSize > 0 && dec.header.rawSize > j.RawSize {
		return fail(SizeMismatch, "the image unpacks to %d bytes at least, the command says %d", dec.header.rawSize, j.RawSize)
	}
	whole := known
	if table != nil {
		whole = max(whole, table.DiskBytes())
	}
	switch {
	case j.RawSize > 0 && j.RawSize < whole:
		return fail(SizeMismatch, "the command says that the image has %d bytes, but its partition table is for %d: the image was cut off before it was uploaded, or the command is wrong: upload it again", j.RawSize, whole)
	case dec.header.format == Raw && src.total >= 0 && known < whole:
		return fail(ImageInvalid, "the image has %d bytes, but its partition table is for %d: it was cut off before it was uploaded", known, whole)
	case whole > size:
		return fail(ImageTooLarge, "the image needs %d bytes (%s), but %s has %d: choose a larger disk or build a smaller image", whole, host.Bytes(whole), j.res.Disk, size)
	case known%int64(sector) != 0 && (j.RawSize > 0 || dec.header.format == Raw):
		return fail(ImageInvalid, "the image has %d bytes, which is no multiple of the %d byte sectors of a disk: it was cut off", known, sector)
	}
	return j.needESP()
}

// needESP looks whether the image has what the rest of the work needs.
func (j *job) needESP() error {
	var has bool
	if j.table != nil {
		var p gpt.Partition
		if p, has = j.table.Find(gpt.ESP); has {
			j.res.ESP = p.Unique.String()
		}
	}
	if !has && len(j.Seed) > 0 {
		return fail(NoESP, "the image has no EFI system partition (type %s), where the seed files belong", gpt.ESP)
	}
	return nil
}

// wipe takes away what could boot or confuse, and proves it. The first write
// of a deployment is here.
func (j *job) wipe(ctx context.Context) error {
	if !j.res.Wrote && j.BeforeWrite != nil {
		if err := j.BeforeWrite(j.res.Disk); err != nil {
			return asError(ctx, err, Failed)
		}
	}
	j.res.Wrote = true
	size := j.target.Size()
	zeros := disk.Buffer(headBytes)
	n := min(headBytes, size)
	tail := max(n, size-tailBytes)
	for _, r := range []struct{ off, n int64 }{{0, n}, {tail, size - tail}} {
		if err := j.write(zeros[:r.n], r.off); err != nil {
			return err
		}
	}
	if err := j.flush(); err != nil {
		return err
	}
	if err := j.target.DropCaches(); err != nil {
		return fail(DiskIO, "%w", err)
	}
	buf := disk.Buffer(headBytes)
	for _, r := range []struct{ off, n int64 }{{0, n}, {tail, size - tail}} {
		if err := j.read(buf[:r.n], r.off); err != nil {
			return err
		}
		if !bytes.Equal(buf[:r.n], zeros[:r.n]) {
			return fail(ReadbackMismatch, "%s does not keep zeros written at byte %d: the disk is broken or write-protected; replace it", j.res.Disk, r.off)
		}
	}
	return j.zeroOut(ctx, n)
}

// zeroOut lets the disk zero the image's range by itself, where it can.
func (j *job) zeroOut(ctx context.Context, from int64) error {
	j.zeroEnd, j.res.SkippedBytes = 0, 0
	var end int64
	if j.table != nil {
		end = j.table.DiskBytes()
	}
	end = min(max(end, j.RawSize), j.target.Size())
	if j.Zeros == ZeroWrite || end <= from {
		return nil
	}
	err := j.target.ZeroOut(ctx, from, end-from)
	switch {
	case errors.Is(err, disk.ErrNoZeroing):
		j.note("the disk cannot zero a range by itself: zeros are written")
		return nil
	case err != nil:
		return asError(ctx, err, DiskIO)
	}
	j.zeroEnd = end
	return j.flush()
}

// stream writes everything after the head and checks both digests.
func (j *job) stream(ctx context.Context, src *source, dec *decoder, raw hash.Hash) error {
	total := src.total
	n, err := j.body(ctx, dec, raw, func() { j.meter.set(src.off, total) })
	if err != nil {
		return err
	}
	j.meter.set(src.off, total)
	if err := j.flush(); err != nil {
		return err
	}
	r := &j.res
	r.ImageBytes, r.RawBytes = src.off, n
	r.ImageDigest, r.RawDigest = src.sum.Sum(nil), raw.Sum(nil)
	switch {
	case j.ImageSize > 0 && r.ImageBytes != j.ImageSize:
		return fail(SizeMismatch, "%s had %d bytes, the command says %d", redact(j.URL), r.ImageBytes, j.ImageSize)
	case j.RawSize > 0 && n != j.RawSize:
		return fail(SizeMismatch, "the image unpacked to %d bytes, the command says %d", n, j.RawSize)
	case j.ImageDigest != nil && !bytes.Equal(r.ImageDigest, j.ImageDigest):
		return fail(DigestMismatch, "%s has the SHA-256 %s, the command says %s: it is damaged or another image; nothing bootable is left on the disk", redact(j.URL), r.ImageDigest, j.ImageDigest)
	case j.RawDigest != nil && !bytes.Equal(r.RawDigest, j.RawDigest):
		return fail(DigestMismatch, "the unpacked image has the SHA-256 %s, the command says %s: it is damaged or another image; nothing bootable is left on the disk", r.RawDigest, j.RawDigest)
	case j.table != nil && n < j.table.DiskBytes():
		return fail(ImageInvalid, "the image has %d bytes, but its partition table is for %d: it was cut off before it was uploaded", n, j.table.DiskBytes())
	}
	return nil
}

func (j *job) write(p []byte, off int64) error {
	if _, err := j.target.WriteAt(p, off); err != nil {
		return fail(DiskIO, "writing %d bytes at %d of %s failed: %w: replace the disk or check its cabling", len(p), off, j.res.Disk, err)
	}
	return nil
}

func (j *job) read(p []byte, off int64) error {
	if _, err := j.target.ReadAt(p, off); err != nil {
		return fail(DiskIO, "reading %d bytes at %d of %s failed: %w: replace the disk or check its cabling", len(p), off, j.res.Disk, err)
	}
	return nil
}

func (j *job) flush() error {
	if err := j.target.Flush(); err != nil {
		return fail(DiskIO, "flushing %s failed: %w: replace the disk or check its cabling", j.res.Disk, err)
	}
	return nil
}
