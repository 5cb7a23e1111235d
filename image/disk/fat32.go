package disk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"
)

const (
	fatReserved = 32 // sectors before the first FAT, as mkfs.fat has it
	fatCopies   = 2
	// minFAT32Clusters: below it the file system is FAT16 by definition
	// (Microsoft FAT specification, "FAT type determination").
	minFAT32Clusters = 65525
	fatEnd           = 0x0fffffff
	fatRoot          = 2 // first cluster of the root folder
	dirEntrySize     = 32
	attrDirectory    = 0x10
	attrVolume       = 0x08
	attrArchive      = 0x20
)

// fatFile is one file, its path in capital 8.3 names: what every firmware reads
// and no long-name entry is needed for.
type fatFile struct {
	path string
	data []byte
}

// fatWriter lays out a FAT32 file system with clusters of one sector.
type fatWriter struct {
	image    []byte
	fatSize  int // sectors
	clusters int
	next     int
	date     uint16
	clock    uint16
}

// writeFAT32 fills image, whose length is a multiple of the sector size, with
// a FAT32 file system that holds files. hidden is the number of sectors before
// the partition. The same arguments give the same bytes.
func writeFAT32(image []byte, label string, serial uint32, hidden uint32, at time.Time, files []fatFile) error {
	sectors := len(image) / sectorSize
	w := &fatWriter{image: image, next: fatRoot}
	// The number of clusters and the size of the table that describes them
	// depend on one another; a table that is a little too long is allowed.
	w.fatSize = ((sectors-fatReserved)*4 + sectorSize + 8*fatCopies - 1) / (sectorSize + 4*fatCopies)
	w.clusters = sectors - fatReserved - fatCopies*w.fatSize
	if w.clusters < minFAT32Clusters {
		return fmt.Errorf("fat32 needs %d clusters, %d sectors give %d: make the partition larger", minFAT32Clusters, sectors, w.clusters)
	}
	year := max(at.UTC().Year(), 1980)
	w.date = uint16((year-1980)<<9 | int(at.UTC().Month())<<5 | at.UTC().Day())
	w.clock = uint16(at.UTC().Hour()<<11 | at.UTC().Minute()<<5 | at.UTC().Second()/2)
	w.bootSector(label, serial, hidden, uint32(sectors))
	w.setFAT(0, 0x0ffffff8)
	w.setFAT(1, fatEnd)

	root := &fatDir{}
	for _, f := range files {
		if err := root.add(strings.Split(f.path, "/"), f); err != nil {
			return err
		}
	}
	root.cluster = fatRoot
	if err := w.reserve(root); err != nil {
		return err
	}
	w.writeDir(root, nil, label)
	free := w.clusters - (w.next - fatRoot)
	w.infoSector(uint32(free), uint32(w.next))
	copy(image[6*sectorSize:], image[:3*sectorSize]) // backup of boot and info sector
	for i := 1; i < fatCopies; i++ {
		copy(image[(fatReserved+i*w.fatSize)*sectorSize:], image[fatReserved*sectorSize:(fatReserved+w.fatSize)*sectorSize])
	}
	return nil
}

// fatDir is a folder while it is laid out.
type fatDir struct {
	name    string
	cluster int
	dirs    []*fatDir
	files   []fatFile
	// starts are the first clusters of files.
	starts []int
}

func (d *fatDir) add(parts []string, f fatFile) error {
	if _, err := shortName(parts[0]); err != nil {
		return fmt.Errorf("%s: %w", f.path, err)
	}
	taken := slices.ContainsFunc(d.files, func(o fatFile) bool { return path.Base(o.path) == parts[0] })
	i := slices.IndexFunc(d.dirs, func(o *fatDir) bool { return o.name == parts[0] })
	if len(parts) == 1 {
		if taken || i >= 0 {
			return fmt.Errorf("%s comes twice", f.path)
		}
		d.files = append(d.files, f)
		return nil
	}
	if taken {
		return fmt.Errorf("%s: %s is a file", f.path, parts[0])
	}
	if i < 0 {
		d.dirs = append(d.dirs, &fatDir{name: parts[0]})
		i = len(d.dirs) - 1
	}
	return d.dirs[i].add(parts[1:], f)
}

// slots is the number of directory entries, "." and ".." or the label included.
func (d *fatDir) slots() int { return 2 + len(d.dirs) + len(d.files) }

// reserve gives clusters to a folder, its files and all below.
func (w *fatWriter) reserve(d *fatDir) (err error) {
	if d.cluster, err = w.chain(d.slots() * dirEntrySize); err != nil {
		return err
	}
	for _, f := range d.files {
		start := 0
		if len(f.data) > 0 {
			if start, err = w.chain(len(f.data)); err != nil {
				return fmt.Errorf("%s: %w", f.path, err)
			}
			copy(w.image[w.offset(start):], f.data)
		}
		d.starts = append(d.starts, start)
	}
	for _, sub := range d.dirs {
		if err := w.reserve(sub); err != nil {
			return err
		}
	}
	return nil
}

// chain takes clusters in a row for n bytes.
func (w *fatWriter) chain(n int) (int, error) {
	count := (n + sectorSize - 1) / sectorSize
	start := w.next
	if start+count > w.clusters+fatRoot {
		return 0, fmt.Errorf("%d bytes do not fit: the file system has %d of %d bytes left", n, (w.clusters+fatRoot-start)*sectorSize, w.clusters*sectorSize)
	}
	for i := range count {
		next := uint32(start + i + 1)
		if i == count-1 {
			next = fatEnd
		}
		w.setFAT(start+i, next)
	}
	w.next += count
	return start, nil
}

func (w *fatWriter) setFAT(cluster int, value uint32) {
	binary.LittleEndian.PutUint32(w.image[fatReserved*sectorSize+4*cluster:], value)
}

func (w *fatWriter) offset(cluster int) int {
	return (fatReserved + fatCopies*w.fatSize + cluster - fatRoot) * sectorSize
}

func (w *fatWriter) writeDir(d, parent *fatDir, label string) {
	at := w.offset(d.cluster)
	put := func(name string, attr byte, cluster, size int) {
		w.entry(w.image[at:at+dirEntrySize], name, attr, cluster, size)
		at += dirEntrySize
	}
	if parent == nil {
		put(fmt.Sprintf("%-11s", label), attrVolume, 0, 0)
	} else {
		up := parent.cluster
		if up == fatRoot {
			up = 0 // the root has no number in "..", by the specification
		}
		put(".          ", attrDirectory, d.cluster, 0)
		put("..         ", attrDirectory, up, 0)
	}
	for _, sub := range d.dirs {
		name, _ := shortName(sub.name)
		put(name, attrDirectory, sub.cluster, 0)
	}
	for i, f := range d.files {
		name, _ := shortName(path.Base(f.path))
		put(name, attrArchive, d.starts[i], len(f.data))
	}
	for _, sub := range d.dirs {
		w.writeDir(sub, d, label)
	}
}

func (w *fatWriter) entry(b []byte, name string, attr byte, cluster, size int) {
	le := binary.LittleEndian
	copy(b, name)
	b[11] = attr
	for _, field := range []struct {
		offset int
		value  uint16
	}{{14, w.clock}, {16, w.date}, {18, w.date}, {22, w.clock}, {24, w.date}} {
		le.PutUint16(b[field.offset:], field.value)
	}
	le.PutUint16(b[20:], uint16(cluster>>16))
	le.PutUint16(b[26:], uint16(cluster))
	le.PutUint32(b[28:], uint32(size))
}

func (w *fatWriter) bootSector(label string, serial, hidden, sectors uint32) {
	le := binary.LittleEndian
	b := w.image
	copy(b, []byte{0xeb, 0x58, 0x90})
	copy(b[3:], "mkfs.fat")
	le.PutUint16(b[11:], sectorSize)
	b[13] = 1 // sectors a cluster
	le.PutUint16(b[14:], fatReserved)
	b[16] = fatCopies
	b[21] = 0xf8 // fixed disk
	le.PutUint16(b[24:], 63)
	le.PutUint16(b[26:], 255)
	le.PutUint32(b[28:], hidden)
	le.PutUint32(b[32:], sectors)
	le.PutUint32(b[36:], uint32(w.fatSize))
	le.PutUint32(b[44:], fatRoot)
	le.PutUint16(b[48:], 1) // info sector
	le.PutUint16(b[50:], 6) // backup boot sector
	b[64] = 0x80
	b[66] = 0x29
	le.PutUint32(b[67:], serial)
	copy(b[71:], fmt.Sprintf("%-11s", label))
	copy(b[82:], "FAT32   ")
	b[510], b[511] = 0x55, 0xaa
}

func (w *fatWriter) infoSector(free, next uint32) {
	le := binary.LittleEndian
	b := w.image[sectorSize:]
	le.PutUint32(b, 0x41615252)
	le.PutUint32(b[484:], 0x61417272)
	le.PutUint32(b[488:], free)
	le.PutUint32(b[492:], next)
	le.PutUint32(b[508:], 0xaa550000)
}

// shortName turns "BOOTX64.EFI" into the eleven bytes of a directory entry.
func shortName(name string) (string, error) {
	base, ext, _ := strings.Cut(name, ".")
	if base == "" || len(base) > 8 || len(ext) > 3 || strings.Contains(ext, ".") {
		return "", fmt.Errorf("name %q is not of the form 8.3", name)
	}
	for _, r := range base + ext {
		if (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_' {
			return "", errors.New("name " + name + " has characters other than A to Z, 0 to 9, - and _")
		}
	}
	return fmt.Sprintf("%-8s%-3s", base, ext), nil
}
