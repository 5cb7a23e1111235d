// Package cpio writes the initramfs archive format: "newc", as
// Documentation/driver-api/early-userspace/buffer-format.rst of Linux defines
// it. The same entries always give the same bytes: owner is root, times are
// the caller's, inode numbers count up from one.
package cpio

import (
	"bytes"
	"fmt"
	"path"
	"strings"
)

const (
	modeDir     = 0o040000
	modeFile    = 0o100000
	modeSymlink = 0o120000
	modeChar    = 0o020000

	// maxName is PATH_MAX of Linux, which its unpacker enforces.
	maxName = 4096
	// maxFile is what the eight hexadecimal digits of the size field hold.
	maxFile = 1<<32 - 1

	trailer = "TRAILER!!!"
)

// Entry is one member of an archive. Exactly one of the constructors Dir, File,
// Symlink and CharDevice should make it.
type Entry struct {
	// Name is relative and clean, as in "etc/hosts".
	Name         string
	mode         uint32
	data         []byte
	major, minor uint32
}

// Dir is a folder; perm holds permission bits, the sticky bit as 0o1000.
func Dir(name string, perm uint32) Entry { return Entry{Name: name, mode: modeDir | perm&0o7777} }

// File is a regular file. data is kept, not copied.
func File(name string, perm uint32, data []byte) Entry {
	return Entry{Name: name, mode: modeFile | perm&0o7777, data: data}
}

// Symlink is a symbolic link.
func Symlink(name, target string) Entry {
	return Entry{Name: name, mode: modeSymlink | 0o777, data: []byte(target)}
}

// CharDevice is a character device node.
func CharDevice(name string, perm, major, minor uint32) Entry {
	return Entry{Name: name, mode: modeChar | perm&0o7777, major: major, minor: minor}
}

// Regular reports whether the entry is a regular file.
func (e Entry) Regular() bool { return e.mode&0o170000 == modeFile }

// Data is the content of a regular file or the target of a link.
func (e Entry) Data() []byte { return e.data }

// Perm is the permission bits.
func (e Entry) Perm() uint32 { return e.mode & 0o7777 }

// Marshal gives the archive of entries in their order, with mtime (seconds
// since 1970) on each.
//
// An entry whose folder does not come before it is an error: the kernel drops
// such a file without a word. So is a name that comes twice.
func Marshal(entries []Entry, mtime uint32) ([]byte, error) {
	var out bytes.Buffer
	dirs := map[string]bool{".": true}
	seen := map[string]bool{}
	for i, e := range entries {
		switch {
		case e.Name == "" || path.IsAbs(e.Name) || path.Clean(e.Name) != e.Name || strings.HasPrefix(e.Name, "..") || strings.ContainsRune(e.Name, 0) || len(e.Name) >= maxName:
			return nil, fmt.Errorf("archive entry %q: the name is not relative and clean", e.Name)
		case e.Name == trailer:
			return nil, fmt.Errorf("archive entry %q: this name ends an archive", e.Name)
		case seen[e.Name]:
			return nil, fmt.Errorf("archive entry %q comes twice", e.Name)
		case !dirs[path.Dir(e.Name)]:
			return nil, fmt.Errorf("archive entry %q comes before its folder: the kernel would drop it", e.Name)
		case len(e.data) > maxFile:
			return nil, fmt.Errorf("archive entry %q has %d bytes, the format holds %d", e.Name, len(e.data), maxFile)
		}
		seen[e.Name] = true
		links := uint32(1)
		if e.mode&0o170000 == modeDir {
			dirs[e.Name] = true
			links = 2
		}
		writeHeader(&out, uint32(i+1), e, links, mtime)
	}
	writeHeader(&out, 0, Entry{Name: trailer}, 1, 0)
	return out.Bytes(), nil
}

func writeHeader(out *bytes.Buffer, inode uint32, e Entry, links, mtime uint32) {
	fmt.Fprintf(out, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X",
		inode, e.mode, 0, 0, links, mtime, len(e.data), 0, 0, e.major, e.minor, len(e.Name)+1, 0)
	out.WriteString(e.Name)
	out.WriteByte(0)
	pad(out)
	out.Write(e.data)
	pad(out)
}

// pad fills to the next multiple of four, where the kernel looks for what
// follows.
func pad(out *bytes.Buffer) {
	for out.Len()%4 != 0 {
		out.WriteByte(0)
	}
}
