// Package faultdisk is a disk made of memory that fails as disks do: it loses
// what was not flushed, tears writes, returns I/O errors, lies about zeroing
// and gives back wrong data. Unit tests use it as a deploy target; a network
// block device server can be put in front of it.
package faultdisk

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"

	"github.com/better-compute/bcd/deploy/disk"
)

// ErrPowerCut is what every request after a power cut gets.
var ErrPowerCut = errors.New("faultdisk: power is cut")

// Op is one recorded request that changes the disk.
type Op struct {
	// Off and Data are a write's; Data is nil for a zeroing of Len bytes.
	Off  int64
	Data []byte
	Len  int64
	// Flush is a flush; the other fields are 0 then.
	Flush bool
}

// Disk is a disk of a fixed size. The exported fields are set before use.
// Requests may come from several goroutines.
type Disk struct {
	// Sector is the logical sector size; requests that are not aligned to it
	// are errors, as on a disk opened for direct I/O, unless Lenient is set.
	Sector  int
	Lenient bool
	// Record keeps every write in Ops.
	Record bool
	// FailAt makes requests that touch this byte fail with EIO; -1 is never.
	FailAt int64
	// CorruptAt flips a bit of this byte when it is read; -1 is never.
	CorruptAt int64
	// CutAfter is how many writes still happen before the power is cut; -1 is
	// never.
	CutAfter int
	// NoZeroing makes ZeroOut fail; LyingZeroing makes it do nothing.
	NoZeroing, LyingZeroing bool
	// ReadOnly refuses writes with EROFS.
	ReadOnly bool

	mu      sync.Mutex
	data    []byte
	ops     []Op
	writes  int
	flushes int
	written int64
	cut     bool
}

// New makes a disk full of fill bytes.
func New(size int64, sector int, fill byte) *Disk {
	d := &Disk{Sector: sector, FailAt: -1, CorruptAt: -1, CutAfter: -1, data: make([]byte, size)}
	if fill != 0 && size > 0 {
		d.data[0] = fill
		for n := 1; n < len(d.data); n *= 2 {
			copy(d.data[n:], d.data[:n])
		}
	}
	return d
}

// Size is in bytes.
func (d *Disk) Size() int64 { return int64(len(d.data)) }

// SectorSize is the logical sector's.
func (d *Disk) SectorSize() int { return d.Sector }

// Bytes is the content, not a copy.
func (d *Disk) Bytes() []byte { return d.data }

// Ops are the recorded requests.
func (d *Disk) Ops() []Op { return d.ops }

// Writes, Flushes and Written count requests and bytes.
func (d *Disk) Writes() int { return d.writes }

// Flushes counts flush requests.
func (d *Disk) Flushes() int { return d.flushes }

// Written counts bytes of writes, without zeroing.
func (d *Disk) Written() int64 { return d.written }

func (d *Disk) check(what string, off, n int64) error {
	switch s := int64(d.Sector); {
	case d.cut:
		return ErrPowerCut
	case off < 0 || n < 0 || off+n > int64(len(d.data)):
		return fmt.Errorf("faultdisk: %s of %d bytes at %d, disk has %d", what, n, off, len(d.data))
	case !d.Lenient && (off%s != 0 || n%s != 0):
		return fmt.Errorf("faultdisk: %s of %d bytes at %d is not aligned to %d: %w", what, n, off, s, syscall.EINVAL)
	case d.FailAt >= off && d.FailAt < off+n:
		return fmt.Errorf("faultdisk: %s at %d: %w", what, off, syscall.EIO)
	}
	return nil
}

// ReadAt implements io.ReaderAt.
func (d *Disk) ReadAt(p []byte, off int64) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.check("read", off, int64(len(p))); err != nil {
		return 0, err
	}
	n := copy(p, d.data[off:])
	if d.CorruptAt >= off && d.CorruptAt < off+int64(n) {
		p[d.CorruptAt-off] ^= 0x10
	}
	return n, nil
}

// WriteAt implements io.WriterAt.
func (d *Disk) WriteAt(p []byte, off int64) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.check("write", off, int64(len(p))); err != nil {
		return 0, err
	}
	if d.ReadOnly {
		return 0, syscall.EROFS
	}
	if d.CutAfter == 0 {
		d.cut = true
		return 0, ErrPowerCut
	}
	if d.CutAfter > 0 {
		d.CutAfter--
	}
	d.writes++
	d.written += int64(len(p))
	if d.Record {
		d.ops = append(d.ops, Op{Off: off, Data: append([]byte(nil), p...), Len: int64(len(p))})
	}
	return copy(d.data[off:], p), nil
}

// ZeroOut makes a range zeros.
func (d *Disk) ZeroOut(_ context.Context, off, n int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.NoZeroing {
		return disk.ErrNoZeroing
	}
	if err := d.check("zeroing", off, n); err != nil {
		return err
	}
	if d.Record {
		d.ops = append(d.ops, Op{Off: off, Len: n})
	}
	if !d.LyingZeroing {
		clear(d.data[off : off+n])
	}
	return nil
}

// Flush makes everything written before it safe.
func (d *Disk) Flush() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cut {
		return ErrPowerCut
	}
	d.flushes++
	if d.Record {
		d.ops = append(d.ops, Op{Flush: true})
	}
	return nil
}

// DropCaches does nothing: there is no cache.
func (d *Disk) DropCaches() error { return nil }

// RereadPartitions does nothing.
func (d *Disk) RereadPartitions() error { return nil }

// Close does nothing.
func (d *Disk) Close() error { return nil }

// Apply does an operation on the content of another disk, or on the first
// bytes of one. A torn one does only its first keep bytes.
func (o Op) Apply(data []byte, keep int64) {
	size := int64(len(data))
	if o.Flush || o.Off >= size {
		return
	}
	n := min(o.Len, keep, size-o.Off)
	if o.Data == nil {
		clear(data[o.Off : o.Off+n])
		return
	}
	copy(data[o.Off:], o.Data[:n])
}
