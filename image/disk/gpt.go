package disk

import (
	"encoding/binary"
	"hash/crc32"
	"unicode/utf16"
)

const (
	sectorSize = 512
	// alignment of partitions, in sectors: 1 MiB, as every partitioning tool
	// does it, so that no flash or RAID page is cut.
	alignment = 2048

	entryCount   = 128
	entrySize    = 128
	tableSectors = entryCount * entrySize / sectorSize
	headerSize   = 92
	maxLabel     = 36 // UTF-16 units of a partition name
)

// partition is one entry of the table; sectors are inclusive.
type partition struct {
	kind, unique guid
	first, last  uint64
	name         string
}

// writeGPT writes protective MBR, primary and backup table into a disk image,
// UEFI 2.10 section 5.
func writeGPT(image []byte, disk guid, parts []partition) {
	total := uint64(len(image) / sectorSize)
	writeProtectiveMBR(image, total)
	entries := make([]byte, entryCount*entrySize)
	for i, p := range parts {
		e := entries[i*entrySize:]
		copy(e, p.kind[:])
		copy(e[16:], p.unique[:])
		binary.LittleEndian.PutUint64(e[32:], p.first)
		binary.LittleEndian.PutUint64(e[40:], p.last)
		for j, unit := range utf16.Encode([]rune(p.name)) {
			if j < maxLabel {
				binary.LittleEndian.PutUint16(e[56+2*j:], unit)
			}
		}
	}
	backupTable := total - 1 - tableSectors
	copy(image[2*sectorSize:], entries)
	copy(image[backupTable*sectorSize:], entries)
	writeGPTHeader(image[sectorSize:], disk, entries, total, 1, total-1, 2)
	writeGPTHeader(image[(total-1)*sectorSize:], disk, entries, total, total-1, 1, backupTable)
}

func writeGPTHeader(b []byte, disk guid, entries []byte, total, here, other, table uint64) {
	le := binary.LittleEndian
	copy(b, "EFI PART")
	le.PutUint32(b[8:], 0x00010000)
	le.PutUint32(b[12:], headerSize)
	le.PutUint64(b[24:], here)
	le.PutUint64(b[32:], other)
	le.PutUint64(b[40:], 2+tableSectors)
	le.PutUint64(b[48:], total-2-tableSectors)
	copy(b[56:], disk[:])
	le.PutUint64(b[72:], table)
	le.PutUint32(b[80:], entryCount)
	le.PutUint32(b[84:], entrySize)
	le.PutUint32(b[88:], crc32.ChecksumIEEE(entries))
	le.PutUint32(b[16:], crc32.ChecksumIEEE(b[:headerSize]))
}

func writeProtectiveMBR(b []byte, total uint64) {
	e := b[446:]
	copy(e, []byte{0, 0x00, 0x02, 0x00, 0xee, 0xff, 0xff, 0xff})
	binary.LittleEndian.PutUint32(e[8:], 1)
	binary.LittleEndian.PutUint32(e[12:], uint32(min(total-1, 0xffffffff)))
	b[510], b[511] = 0x55, 0xaa
}
