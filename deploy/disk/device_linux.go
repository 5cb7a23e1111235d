package disk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrBusy says that something else on this machine has the disk open for
// itself: a mount, swap, md or dm.
var ErrBusy = errors.New("disk is in use")

// ErrNoZeroing says that the disk cannot make a range read as zeros by itself.
var ErrNoZeroing = errors.New("disk cannot zero a range by itself")

const (
	// bounceBytes is the aligned buffer for requests that are not aligned;
	// the body of an image never needs it.
	bounceBytes = 1 << 20
	// zeroStep bounds one zeroing request, so that a cancel is noticed.
	zeroStep = 1 << 30
	// dirtyStep is how much an indirect writer leaves to the page cache: a
	// ramdisk has no room for more.
	dirtyStep = 32 << 20
)

// Device is an open disk. Reads and writes take any offset and length; those
// aligned to the sector size in aligned memory (see Buffer) go past the page
// cache. It is not safe for concurrent use.
type Device struct {
	f      *os.File
	name   string
	size   int64
	sector int
	direct bool
	dirty  int64
	bounce []byte
}

// Open opens a disk for itself: it fails with ErrBusy while anything is
// mounted from it or built on it, whatever the sysfs of a moment ago said.
func Open(name string) (*Device, error) {
	flags := os.O_RDWR | unix.O_EXCL | unix.O_CLOEXEC
	f, err := os.OpenFile(name, flags|unix.O_DIRECT, 0)
	direct := err == nil
	if errors.Is(err, unix.EINVAL) {
		f, err = os.OpenFile(name, flags, 0)
	}
	if errors.Is(err, unix.EBUSY) {
		return nil, fmt.Errorf("%s: %w: unmount what is on it, stop md and LVM on it, then try again", name, ErrBusy)
	}
	if err != nil {
		return nil, fmt.Errorf("open disk: %w", err)
	}
	d := &Device{f: f, name: name, direct: direct}
	if err := d.measure(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	d.bounce = Buffer(bounceBytes)
	return d, nil
}

func (d *Device) measure() error {
	var size uint64
	if err := ioctl(d.f, unix.BLKGETSIZE64, unsafe.Pointer(&size)); err != nil {
		return fmt.Errorf("size of %s: %w", d.name, err)
	}
	sector, err := unix.IoctlGetInt(int(d.f.Fd()), unix.BLKSSZGET)
	if err != nil {
		return fmt.Errorf("sector size of %s: %w", d.name, err)
	}
	if sector != 512 && sector != 4096 {
		return fmt.Errorf("%s has sectors of %d bytes; only 512 and 4096 are supported", d.name, sector)
	}
	d.size, d.sector = int64(size), sector
	return nil
}

// Size is in bytes.
func (d *Device) Size() int64 { return d.size }

// SectorSize is the logical sector's, in bytes.
func (d *Device) SectorSize() int { return d.sector }

// Buffer returns n bytes aligned for direct reads and writes.
func Buffer(n int) []byte {
	const align = 4096
	b := make([]byte, n+align)
	skip := (align - int(uintptr(unsafe.Pointer(&b[0]))%align)) % align
	return b[skip : skip+n : skip+n]
}

func (d *Device) aligned(p []byte, off int64) bool {
	s := int64(d.sector)
	return off%s == 0 && int64(len(p))%s == 0 && (len(p) == 0 || uintptr(unsafe.Pointer(&p[0]))%4096 == 0)
}

// ReadAt implements io.ReaderAt.
func (d *Device) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 || off > d.size {
		return 0, fmt.Errorf("read at %d of %s, which has %d bytes", off, d.name, d.size)
	}
	if d.aligned(p, off) {
		return d.f.ReadAt(p, off)
	}
	n := 0
	for n < len(p) {
		span, start, err := d.load(off+int64(n), int64(len(p)-n))
		if err != nil {
			return n, err
		}
		c := copy(p[n:], span[start:])
		if c == 0 {
			return n, io.EOF
		}
		n += c
	}
	return n, nil
}

// load reads the aligned span around a range, as much as the bounce buffer
// holds, and says where the range begins in it.
func (d *Device) load(off, n int64) (span []byte, start int64, err error) {
	s := int64(d.sector)
	start = off % s
	n = min((start+n+s-1)/s*s, int64(len(d.bounce)), d.size-(off-start))
	if n <= start {
		return nil, 0, io.EOF
	}
	span = d.bounce[:n]
	if _, err := d.f.ReadAt(span, off-start); err != nil {
		return nil, 0, err
	}
	return span, start, nil
}

// WriteAt implements io.WriterAt. A request that is not aligned reads the
// sectors around it first.
func (d *Device) WriteAt(p []byte, off int64) (int, error) {
	if off < 0 || int64(len(p)) > d.size-off {
		return 0, fmt.Errorf("write of %d bytes at %d of %s, which has %d bytes", len(p), off, d.name, d.size)
	}
	if d.aligned(p, off) {
		n, err := d.f.WriteAt(p, off)
		return n, errors.Join(err, d.bound(n))
	}
	n := 0
	for n < len(p) {
		at := off + int64(n)
		span, start, err := d.load(at, int64(len(p)-n))
		if err != nil {
			return n, err
		}
		c := copy(span[start:], p[n:])
		if _, err := d.f.WriteAt(span, at-start); err != nil {
			return n, err
		}
		if err := d.bound(len(span)); err != nil {
			return n, err
		}
		n += c
	}
	return n, nil
}

// bound keeps the page cache from filling when writes go through it.
func (d *Device) bound(n int) error {
	if d.direct {
		return nil
	}
	if d.dirty += int64(n); d.dirty < dirtyStep {
		return nil
	}
	d.dirty = 0
	return unix.Fdatasync(int(d.f.Fd()))
}

// Flush returns once everything written is on stable storage.
func (d *Device) Flush() error {
	if err := d.f.Sync(); err != nil {
		return fmt.Errorf("flush %s: %w", d.name, err)
	}
	return nil
}

// DropCaches makes the next read come from the disk.
func (d *Device) DropCaches() error {
	if err := ioctl(d.f, unix.BLKFLSBUF, nil); err != nil {
		return fmt.Errorf("drop the caches of %s: %w", d.name, err)
	}
	return nil
}

// ZeroOut makes a range read as zeros, or fails with ErrNoZeroing: the
// kernel's promise for a punched hole of a block device (no fallback to
// writing zeros, which would take hours). What is between sectors is not
// touched.
func (d *Device) ZeroOut(ctx context.Context, off, n int64) error {
	for n > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		step := min(n, zeroStep)
		err := unix.Fallocate(int(d.f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, step)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		// EREMOTEIO is a SCSI disk that promised WRITE SAME and then refused.
		if errors.Is(err, unix.EREMOTEIO) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("%s: %w (%w)", d.name, ErrNoZeroing, err)
		}
		if err != nil {
			return fmt.Errorf("zero %d bytes at %d of %s: %w", step, off, d.name, err)
		}
		off, n = off+step, n-step
	}
	return nil
}

// RereadPartitions makes the kernel look at the partition table again.
func (d *Device) RereadPartitions() error {
	if err := ioctl(d.f, unix.BLKRRPART, nil); err != nil {
		return fmt.Errorf("re-read the partition table of %s: %w", d.name, err)
	}
	return nil
}

// Close closes the disk without flushing.
func (d *Device) Close() error { return d.f.Close() }

func ioctl(f *os.File, request uintptr, arg unsafe.Pointer) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(arg))
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return errno
		}
	}
}
