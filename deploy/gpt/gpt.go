// Package gpt reads a GUID partition table (UEFI 2.10 section 5.3) from the
// first bytes of an image and moves its backup to the end of a larger disk.
// It changes nothing else: no partition is grown, moved or renamed.
package gpt

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"unicode/utf16"

	"github.com/better-compute/bcd/boot"
)

const (
	signature = "EFI PART"
	// minHeader is the size of the header of revision 1.0.
	minHeader = 92
	minEntry  = 128
	maxEntry  = 4096
	// maxEntries is eight times what everybody writes.
	maxEntries = 1024
)

// ErrNoTable says that there is no GPT at this sector size.
var ErrNoTable = errors.New("no GUID partition table")

// ESP is the partition type GUID of an EFI system partition, as text.
const ESP = "c12a7328-f81f-11d2-ba4b-00a0c93ec93b"

// Table is a primary GPT. All positions are in sectors of SectorSize bytes.
type Table struct {
	SectorSize int
	Disk       boot.GUID
	// Alternate is where the backup header is; with it the table says how
	// large the disk is that it was made for.
	Alternate               uint64
	FirstUsable, LastUsable uint64
	Partitions              []Partition

	entriesLBA uint64
	entryCount uint32
	entrySize  uint32
	headerSize uint32
}

// Partition is one used entry.
type Partition struct {
	// Number counts from 1, by place in the table.
	Number       int
	Type, Unique boot.GUID
	// First and Last are both part of the partition.
	First, Last uint64
	Attributes  uint64
	Name        string
}

// Sectors is the partition's length.
func (p Partition) Sectors() uint64 { return p.Last - p.First + 1 }

// DiskBytes is the size of the disk that the table was made for.
func (t *Table) DiskBytes() int64 { return int64(t.Alternate+1) * int64(t.SectorSize) }

// Find returns the first partition of a type given as text.
func (t *Table) Find(typeGUID string) (Partition, bool) {
	for _, p := range t.Partitions {
		if p.Type.String() == typeGUID {
			return p, true
		}
	}
	return Partition{}, false
}

// Detect finds the sector size that a table was made for, 512 or 4096: the
// header is at sector 1 and says so itself. head is the start of an image, at
// least as far as the end of the partition entries.
func Detect(head []byte) (*Table, error) {
	t, err := Parse(head, 512)
	if !errors.Is(err, ErrNoTable) {
		return t, err
	}
	return Parse(head, 4096)
}

// Parse reads the primary table. ErrNoTable means that there is none; any
// other error that there is one which nobody should boot.
func Parse(head []byte, sectorSize int) (*Table, error) {
	if sectorSize != 512 && sectorSize != 4096 {
		return nil, fmt.Errorf("sector size %d is not 512 or 4096", sectorSize)
	}
	if len(head) < 2*sectorSize || string(head[sectorSize:sectorSize+8]) != signature {
		return nil, ErrNoTable
	}
	le := binary.LittleEndian
	h := head[sectorSize : 2*sectorSize]
	t := &Table{
		SectorSize: sectorSize,
		headerSize: le.Uint32(h[12:]),
		Alternate:  le.Uint64(h[32:]), FirstUsable: le.Uint64(h[40:]), LastUsable: le.Uint64(h[48:]),
		entriesLBA: le.Uint64(h[72:]), entryCount: le.Uint32(h[80:]), entrySize: le.Uint32(h[84:]),
	}
	copy(t.Disk[:], h[56:72])
	if t.headerSize < minHeader || int(t.headerSize) > sectorSize {
		return nil, fmt.Errorf("GPT header size %d is not between %d and %d", t.headerSize, minHeader, sectorSize)
	}
	if got, want := headerCRC(h[:t.headerSize]), le.Uint32(h[16:]); got != want {
		return nil, fmt.Errorf("GPT header checksum is %08x, expected %08x", got, want)
	}
	// 2^52 sectors of 4096 bytes is far beyond what an int64 of bytes holds
	// at half; the bound keeps every later product in range.
	const maxLBA = 1 << 50
	switch {
	case le.Uint64(h[24:]) != 1:
		return nil, fmt.Errorf("GPT header says it is at sector %d, not 1", le.Uint64(h[24:]))
	case t.Alternate >= maxLBA || t.LastUsable >= t.Alternate || t.FirstUsable > t.LastUsable || t.FirstUsable < 3:
		return nil, fmt.Errorf("GPT usable sectors %d to %d and backup at %d make no sense", t.FirstUsable, t.LastUsable, t.Alternate)
	case t.entrySize < minEntry || t.entrySize > maxEntry || t.entrySize&(t.entrySize-1) != 0:
		return nil, fmt.Errorf("GPT entry size %d is not a power of two from %d to %d", t.entrySize, minEntry, maxEntry)
	case t.entryCount == 0 || t.entryCount > maxEntries:
		return nil, fmt.Errorf("GPT has %d entries, the limit is %d", t.entryCount, maxEntries)
	case t.entriesLBA < 2 || t.entriesLBA >= t.FirstUsable:
		return nil, fmt.Errorf("GPT entries at sector %d are not between the header and the first usable sector %d", t.entriesLBA, t.FirstUsable)
	}
	start, size := t.entriesLBA*uint64(sectorSize), uint64(t.entryCount)*uint64(t.entrySize)
	if start+size > uint64(len(head)) || start+size > t.FirstUsable*uint64(sectorSize) {
		return nil, fmt.Errorf("GPT entries end at byte %d, beyond the first %d bytes of the disk", start+size, len(head))
	}
	entries := head[start : start+size]
	if got, want := crc32.ChecksumIEEE(entries), le.Uint32(h[88:]); got != want {
		return nil, fmt.Errorf("GPT entries checksum is %08x, expected %08x", got, want)
	}
	return t, t.parseEntries(entries)
}

func (t *Table) parseEntries(entries []byte) error {
	le := binary.LittleEndian
	for i := range int(t.entryCount) {
		e := entries[i*int(t.entrySize):][:t.entrySize]
		if bytes.Equal(e[:16], make([]byte, 16)) {
			continue
		}
		p := Partition{Number: i + 1, First: le.Uint64(e[32:]), Last: le.Uint64(e[40:]), Attributes: le.Uint64(e[48:])}
		copy(p.Type[:], e[:16])
		copy(p.Unique[:], e[16:32])
		if p.First > p.Last || p.First < t.FirstUsable || p.Last > t.LastUsable {
			return fmt.Errorf("partition %d from sector %d to %d is outside of %d to %d", p.Number, p.First, p.Last, t.FirstUsable, t.LastUsable)
		}
		var name []uint16
		for o := 56; o+1 < 128; o += 2 {
			c := le.Uint16(e[o:])
			if c == 0 {
				break
			}
			name = append(name, c)
		}
		p.Name = string(utf16.Decode(name))
		for _, q := range t.Partitions {
			if p.First <= q.Last && q.First <= p.Last {
				return fmt.Errorf("partitions %d and %d overlap", q.Number, p.Number)
			}
		}
		t.Partitions = append(t.Partitions, p)
	}
	return nil
}

// Relocate makes the table fit a disk of the given number of sectors: the
// backup goes to the very end, the usable area grows, and the protective MBR
// covers the disk. head is changed in place; backup is what belongs at sector
// backupLBA, up to the end of the disk.
func (t *Table) Relocate(head []byte, sectors uint64) (backup []byte, backupLBA uint64, err error) {
	ss := uint64(t.SectorSize)
	size := uint64(t.entryCount) * uint64(t.entrySize)
	entrySectors := (size + ss - 1) / ss
	if sectors < t.FirstUsable+entrySectors+2 {
		return nil, 0, fmt.Errorf("disk of %d sectors is too small for the partition table", sectors)
	}
	last := sectors - 1
	lastUsable := last - entrySectors - 1
	for _, p := range t.Partitions {
		if p.Last > lastUsable {
			return nil, 0, fmt.Errorf("partition %d ends at sector %d, after the last usable sector %d of the disk", p.Number, p.Last, lastUsable)
		}
	}
	le := binary.LittleEndian
	h := head[ss : 2*ss]
	le.PutUint64(h[32:], last)
	le.PutUint64(h[48:], lastUsable)
	le.PutUint32(h[16:], headerCRC(h[:t.headerSize]))
	t.Alternate, t.LastUsable = last, lastUsable

	for o := 446; o < 510; o += 16 {
		if head[o+4] == 0xee && le.Uint32(head[o+8:]) == 1 {
			// UEFI 2.10 table 5-4: the whole disk, or as much as fits.
			le.PutUint32(head[o+12:], uint32(min(last, 0xffffffff)))
		}
	}

	backupLBA = last - entrySectors
	backup = make([]byte, (entrySectors+1)*ss)
	copy(backup, head[t.entriesLBA*ss:][:size])
	b := backup[entrySectors*ss:]
	copy(b, h)
	le.PutUint64(b[24:], last)
	le.PutUint64(b[32:], 1)
	le.PutUint64(b[72:], backupLBA)
	le.PutUint32(b[16:], headerCRC(b[:t.headerSize]))
	return backup, backupLBA, nil
}

// headerCRC is the checksum with its own field taken as zero.
func headerCRC(h []byte) uint32 {
	c := crc32.NewIEEE()
	c.Write(h[:16])
	c.Write([]byte{0, 0, 0, 0})
	c.Write(h[20:])
	return c.Sum32()
}
