// Package fat writes a few small files to a FAT file system (Microsoft FAT
// specification 1.03; FAT12, FAT16 and FAT32) straight on a disk: the seed on
// a deployed machine's EFI system partition. It needs neither a mount, nor
// the kernel's vfat module, nor partition nodes, and every byte it writes goes
// through the device given to it, so that a power cut can be tried at each.
package fat

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"
)

// Device is where the file system lies.
type Device interface {
	io.ReaderAt
	io.WriterAt
}

var (
	// ErrNotFAT says that there is no FAT file system.
	ErrNotFAT = errors.New("not a FAT file system")
	// ErrNotExist says that a file or directory does not exist.
	ErrNotExist = errors.New("file does not exist")
	// ErrFull says that there is no room.
	ErrFull = errors.New("file system is full")
)

const (
	// maxFAT bounds the table held in memory: 16 MiB is a 16 GiB file system
	// with 4 KiB clusters, and an EFI system partition has 1 or 2.
	maxFAT = 16 << 20
	// maxDir bounds one directory: 65536 entries, FAT's own limit.
	maxDir = 65536 * entrySize
	// MaxFile bounds a file; user data and keys are far smaller.
	MaxFile = 8 << 20
)

// FS is an open file system. It is not safe for concurrent use. The table is
// in memory; each WriteFile puts on the device what it changed.
type FS struct {
	dev  Device
	base int64
	// All in bytes from base.
	fatAt, rootAt, dataAt int64
	fatBytes, rootBytes   int64
	cluster               int64
	sector                int64
	copies                int
	// clusters are numbered from 2 to count+1.
	count    uint32
	bits     int
	rootClus uint32
	infoAt   int64

	table []byte
	dirty map[int64]bool // sectors of the table
	hint  uint32
}

// Open reads the file system in size bytes at off of dev.
func Open(dev Device, off, size int64) (*FS, error) {
	boot := make([]byte, 512)
	if _, err := dev.ReadAt(boot, off); err != nil {
		return nil, fmt.Errorf("read FAT boot sector: %w", err)
	}
	f := &FS{dev: dev, base: off, dirty: map[int64]bool{}, hint: 2}
	if err := f.geometry(boot, size); err != nil {
		return nil, err
	}
	f.table = make([]byte, f.fatBytes)
	if _, err := dev.ReadAt(f.table, off+f.fatAt); err != nil {
		return nil, fmt.Errorf("read FAT: %w", err)
	}
	return f, nil
}

func (f *FS) geometry(b []byte, size int64) error {
	le := binary.LittleEndian
	if b[510] != 0x55 || b[511] != 0xaa || b[0] != 0xeb && b[0] != 0xe9 {
		return ErrNotFAT
	}
	sector, spc := int64(le.Uint16(b[11:])), int64(b[13])
	if sector != 512 && sector != 1024 && sector != 2048 && sector != 4096 || spc == 0 || spc&(spc-1) != 0 {
		return fmt.Errorf("%w: %d sectors of %d bytes in a cluster", ErrNotFAT, spc, sector)
	}
	reserved, rootEntries := int64(le.Uint16(b[14:])), int64(le.Uint16(b[17:]))
	total, fatSectors := int64(le.Uint16(b[19:])), int64(le.Uint16(b[22:]))
	if total == 0 {
		total = int64(le.Uint32(b[32:]))
	}
	wide := fatSectors == 0
	if wide {
		fatSectors = int64(le.Uint32(b[36:]))
		if le.Uint16(b[40:])&0x80 != 0 {
			return errors.New("FAT mirroring is off, which is not supported: make the file system again")
		}
		f.rootClus = le.Uint32(b[44:])
		if n := int64(le.Uint16(b[48:])); n > 0 && n < reserved {
			f.infoAt = n * sector
		}
	}
	f.copies = int(b[16])
	f.sector, f.cluster = sector, sector*spc
	f.fatAt, f.fatBytes = reserved*sector, fatSectors*sector
	f.rootAt = f.fatAt + int64(f.copies)*f.fatBytes
	f.rootBytes = (rootEntries*entrySize + sector - 1) / sector * sector
	f.dataAt = f.rootAt + f.rootBytes
	if reserved == 0 || f.copies == 0 || f.copies > 4 || fatSectors == 0 || f.fatBytes > maxFAT || total*sector > size || f.dataAt >= total*sector {
		return fmt.Errorf("%w: %d sectors of %d bytes with %d tables of %d sectors in %d bytes", ErrNotFAT, total, sector, f.copies, fatSectors, size)
	}
	clusters := (total*sector - f.dataAt) / f.cluster
	switch {
	case wide:
		f.bits = 32
	case clusters < 4085:
		f.bits = 12
	default:
		f.bits = 16
	}
	if room := f.fatBytes * 8 / int64(f.bits); clusters+2 > room {
		clusters = room - 2
	}
	if clusters < 1 || clusters >= 0x0ffffff5 {
		return fmt.Errorf("%w: %d clusters", ErrNotFAT, clusters)
	}
	f.count = uint32(clusters)
	if wide && !f.valid(f.rootClus) {
		return fmt.Errorf("%w: root directory at cluster %d of %d", ErrNotFAT, f.rootClus, f.count)
	}
	return nil
}

func (f *FS) valid(c uint32) bool { return c >= 2 && c-2 < f.count }

func (f *FS) at(c uint32) int64 { return f.base + f.dataAt + int64(c-2)*f.cluster }

// next is the table's entry for a cluster.
func (f *FS) next(c uint32) uint32 {
	le := binary.LittleEndian
	switch f.bits {
	case 12:
		o := c + c/2
		v := uint32(le.Uint16(f.table[o:]))
		if c&1 == 1 {
			return v >> 4
		}
		return v & 0xfff
	case 16:
		return uint32(le.Uint16(f.table[2*c:]))
	}
	return le.Uint32(f.table[4*c:]) & 0x0fffffff
}

func (f *FS) setNext(c, v uint32) {
	le := binary.LittleEndian
	var o, n uint32
	switch f.bits {
	case 12:
		o, n = c+c/2, 2
		old := uint32(le.Uint16(f.table[o:]))
		if c&1 == 1 {
			v = old&0x000f | v<<4
		} else {
			v = old&0xf000 | v&0xfff
		}
		le.PutUint16(f.table[o:], uint16(v))
	case 16:
		o, n = 2*c, 2
		le.PutUint16(f.table[o:], uint16(v))
	default:
		o, n = 4*c, 4
		le.PutUint32(f.table[o:], le.Uint32(f.table[o:])&0xf0000000|v&0x0fffffff)
	}
	f.dirty[int64(o)/f.sector] = true
	f.dirty[int64(o+n-1)/f.sector] = true
}

const endOfChain = 0x0fffffff

// chain lists the clusters of a file or directory.
func (f *FS) chain(first uint32, limit int64) ([]uint32, error) {
	var out []uint32
	for c := first; ; {
		if !f.valid(c) {
			return nil, fmt.Errorf("damaged FAT: chain reaches cluster %d of %d", c, f.count)
		}
		if out = append(out, c); int64(len(out))*f.cluster > max(limit, f.cluster) {
			return nil, fmt.Errorf("damaged FAT: a chain from cluster %d is over %d bytes", first, limit)
		}
		n := f.next(c)
		if n >= 0x0ffffff8&(1<<f.bits-1) {
			return out, nil
		}
		c = n
	}
}

// allocate takes n free clusters and links them.
func (f *FS) allocate(n int) ([]uint32, error) {
	var out []uint32
	for i := uint32(0); i < f.count && len(out) < n; i++ {
		c := 2 + (f.hint-2+i)%f.count
		if f.next(c) == 0 {
			out = append(out, c)
		}
	}
	if len(out) < n {
		return nil, fmt.Errorf("%w: no room for %d bytes", ErrFull, int64(n)*f.cluster)
	}
	for i, c := range out {
		if i+1 < n {
			f.setNext(c, out[i+1])
		} else {
			f.setNext(c, endOfChain)
		}
	}
	if n > 0 {
		f.hint = out[n-1]
	}
	return out, nil
}

func (f *FS) free(chain []uint32) {
	for _, c := range chain {
		f.setNext(c, 0)
	}
}

// writeChain writes data into a chain, the rest of its last cluster as zeros.
func (f *FS) writeChain(chain []uint32, data []byte) error {
	buf := make([]byte, f.cluster)
	defer clear(buf)
	for _, c := range chain {
		n := copy(buf, data)
		clear(buf[n:])
		data = data[n:]
		if _, err := f.dev.WriteAt(buf, f.at(c)); err != nil {
			return fmt.Errorf("write cluster %d: %w", c, err)
		}
	}
	return nil
}

func (f *FS) readChain(chain []uint32) ([]byte, error) {
	out := make([]byte, int64(len(chain))*f.cluster)
	for i, c := range chain {
		if _, err := f.dev.ReadAt(out[int64(i)*f.cluster:][:f.cluster], f.at(c)); err != nil {
			return nil, fmt.Errorf("read cluster %d: %w", c, err)
		}
	}
	return out, nil
}

// sync writes the changed sectors of the table to each copy, and the count of
// free clusters.
func (f *FS) sync() error {
	for s := range f.dirty {
		for i := range f.copies {
			off := f.base + f.fatAt + int64(i)*f.fatBytes + s*f.sector
			if _, err := f.dev.WriteAt(f.table[s*f.sector:][:f.sector], off); err != nil {
				return fmt.Errorf("write FAT: %w", err)
			}
		}
	}
	clear(f.dirty)
	if f.infoAt == 0 {
		return nil
	}
	info := make([]byte, 512)
	if _, err := f.dev.ReadAt(info, f.base+f.infoAt); err != nil {
		return fmt.Errorf("read FSInfo: %w", err)
	}
	le := binary.LittleEndian
	if le.Uint32(info) != 0x41615252 || le.Uint32(info[484:]) != 0x61417272 {
		return nil // not there; the count is only advice
	}
	var free uint32
	for c := uint32(2); c-2 < f.count; c++ {
		if f.next(c) == 0 {
			free++
		}
	}
	le.PutUint32(info[488:], free)
	le.PutUint32(info[492:], f.hint)
	if _, err := f.dev.WriteAt(info, f.base+f.infoAt); err != nil {
		return fmt.Errorf("write FSInfo: %w", err)
	}
	return nil
}

// dosTime is a time as directory entries have it: two seconds fine, from 1980.
func dosTime(t time.Time) (date, clock uint16) {
	if t.Year() < 1980 || t.Year() > 2107 {
		return 1<<5 | 1, 0
	}
	return uint16((t.Year()-1980)<<9 | int(t.Month())<<5 | t.Day()),
		uint16(t.Hour()<<11 | t.Minute()<<5 | t.Second()/2)
}
