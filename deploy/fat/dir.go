package fat

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"
	"unicode/utf16"
)

const (
	entrySize = 32

	attrDirectory = 0x10
	attrVolume    = 0x08
	attrLong      = 0x0f
	attrArchive   = 0x20
)

// nameForm is what WriteFile may create: everything that a seed needs, and
// nothing that FAT or a firmware treats specially.
var nameForm = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$`)

// directory is one directory in memory, with where its bytes lie.
type directory struct {
	data []byte
	// chain is nil for the fixed root of FAT12 and FAT16.
	chain []uint32
}

// entry is one file or directory.
type entry struct {
	name, short string
	// from and to are the first byte of its long-name entries and the end of
	// its short one.
	from, to int
	attr     byte
	first    uint32
	size     uint32
}

func (f *FS) root() (*directory, error) {
	if f.bits == 32 {
		return f.open(f.rootClus)
	}
	d := &directory{data: make([]byte, f.rootBytes)}
	if _, err := f.dev.ReadAt(d.data, f.base+f.rootAt); err != nil {
		return nil, fmt.Errorf("read root directory: %w", err)
	}
	return d, nil
}

func (f *FS) open(first uint32) (*directory, error) {
	chain, err := f.chain(first, maxDir)
	if err != nil {
		return nil, err
	}
	data, err := f.readChain(chain)
	return &directory{data: data, chain: chain}, err
}

// list parses a directory. Long names whose checksum or order is wrong are
// ignored, as every driver does: the short name counts then.
func (d *directory) list() []entry {
	var out []entry
	var long []uint16
	var sum, expect byte
	from := -1
	for o := 0; o+entrySize <= len(d.data); o += entrySize {
		e := d.data[o:][:entrySize]
		switch {
		case e[0] == 0:
			return out
		case e[0] == 0xe5:
			from, expect = -1, 0
			continue
		case e[11]&0x3f == attrLong:
			seq := e[0] & 0x1f
			if e[0]&0x40 != 0 {
				from, expect, sum, long = o, seq, e[13], nil
			}
			if seq == 0 || seq != expect || e[13] != sum {
				from, expect = -1, 0
				continue
			}
			expect--
			long = append(longPart(e), long...)
			continue
		case e[11]&attrVolume != 0:
			from, expect = -1, 0
			continue
		}
		le := binary.LittleEndian
		n := entry{short: shortText(e), from: o, to: o + entrySize, attr: e[11],
			first: uint32(le.Uint16(e[20:]))<<16 | uint32(le.Uint16(e[26:])), size: le.Uint32(e[28:])}
		n.name = n.short
		if from >= 0 && expect == 0 && sum == checksum(e[:11]) {
			n.from = from
			for i, c := range long {
				if c == 0 {
					long = long[:i]
					break
				}
			}
			n.name = string(utf16.Decode(long))
		}
		out = append(out, n)
		from, expect = -1, 0
	}
	return out
}

func (d *directory) find(name string) (entry, bool) {
	for _, e := range d.list() {
		if strings.EqualFold(e.name, name) || strings.EqualFold(e.short, name) {
			return e, true
		}
	}
	return entry{}, false
}

// walk returns the directory that holds the last element, and that element.
// create makes missing directories.
func (f *FS) walk(path string, create bool, now time.Time) (*directory, string, error) {
	parts := strings.Split(strings.Trim(strings.ReplaceAll(path, `\`, "/"), "/"), "/")
	d, err := f.root()
	if err != nil {
		return nil, "", err
	}
	parent := uint32(0) // the specification wants 0 for the root, on FAT32 too
	for _, p := range parts[:len(parts)-1] {
		e, ok := d.find(p)
		if !ok {
			if !create {
				return nil, "", fmt.Errorf("%s: %w", path, ErrNotExist)
			}
			if e, err = f.mkdir(d, p, parent, now); err != nil {
				return nil, "", fmt.Errorf("make directory %s of %s: %w", p, path, err)
			}
		}
		if e.attr&attrDirectory == 0 {
			return nil, "", fmt.Errorf("%s of %s is a file, not a directory", p, path)
		}
		parent = e.first
		if d, err = f.open(e.first); err != nil {
			return nil, "", fmt.Errorf("open directory %s of %s: %w", p, path, err)
		}
	}
	return d, parts[len(parts)-1], nil
}

// ReadFile reads a file of at most MaxFile bytes. Separators are / or \, case
// does not count.
func (f *FS) ReadFile(path string) ([]byte, error) {
	e, _, err := f.stat(path)
	if err != nil {
		return nil, err
	}
	if e.attr&attrDirectory != 0 || e.size > MaxFile {
		return nil, fmt.Errorf("%s is a directory or over %d bytes", path, MaxFile)
	}
	if e.size == 0 {
		return nil, nil
	}
	chain, err := f.chain(e.first, MaxFile+f.cluster)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	data, err := f.readChain(chain)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if len(data) < int(e.size) {
		return nil, fmt.Errorf("%s has %d bytes, but its chain only %d", path, e.size, len(data))
	}
	return data[:e.size], nil
}

// Exists reports whether a file (not a directory) is there.
func (f *FS) Exists(path string) (bool, error) {
	e, _, err := f.stat(path)
	if errors.Is(err, ErrNotExist) {
		return false, nil
	}
	return err == nil && e.attr&attrDirectory == 0, err
}

func (f *FS) stat(path string) (entry, *directory, error) {
	d, name, err := f.walk(path, false, time.Time{})
	if err != nil {
		return entry{}, nil, err
	}
	e, ok := d.find(name)
	if !ok {
		return entry{}, nil, fmt.Errorf("%s: %w", path, ErrNotExist)
	}
	return e, d, nil
}

// WriteFile creates or replaces a file and the directories above it. The
// content of a replaced file is overwritten with zeros before its clusters are
// given back.
func (f *FS) WriteFile(path string, data []byte, now time.Time) error {
	if len(data) > MaxFile {
		return fmt.Errorf("%s of %d bytes is over the limit of %d", path, len(data), MaxFile)
	}
	for _, p := range strings.Split(strings.Trim(path, "/"), "/") {
		if !nameForm.MatchString(p) || strings.HasSuffix(p, ".") {
			return fmt.Errorf("file name %q on FAT must be letters, digits, _, - and dots", p)
		}
	}
	if err := f.Shred(path); err != nil && !errors.Is(err, ErrNotExist) {
		return err
	}
	d, name, err := f.walk(path, true, now)
	if err != nil {
		return err
	}
	chain, err := f.allocate(int((int64(len(data)) + f.cluster - 1) / f.cluster))
	if err == nil {
		err = f.writeChain(chain, data)
	}
	if err == nil {
		var first uint32
		if len(chain) > 0 {
			first = chain[0]
		}
		err = f.link(d, name, attrArchive, first, uint32(len(data)), now)
	}
	if err == nil {
		err = f.sync()
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// Shred overwrites a file with zeros and removes it.
func (f *FS) Shred(path string) error {
	e, d, err := f.stat(path)
	if err != nil {
		return err
	}
	if e.attr&attrDirectory != 0 {
		return fmt.Errorf("%s is a directory", path)
	}
	if e.size > 0 {
		chain, err := f.chain(e.first, MaxFile+f.cluster)
		if err != nil {
			return fmt.Errorf("remove %s: %w", path, err)
		}
		if err := f.writeChain(chain, nil); err != nil {
			return fmt.Errorf("remove %s: %w", path, err)
		}
		f.free(chain)
	}
	for o := e.from; o < e.to; o += entrySize {
		d.data[o] = 0xe5
	}
	if err := f.store(d); err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return f.sync()
}

func (f *FS) mkdir(parent *directory, name string, parentFirst uint32, now time.Time) (entry, error) {
	chain, err := f.allocate(1)
	if err != nil {
		return entry{}, err
	}
	data := make([]byte, f.cluster)
	putEntry(data, []byte(".          "), attrDirectory, chain[0], 0, now)
	putEntry(data[entrySize:], []byte("..         "), attrDirectory, parentFirst, 0, now)
	if err := f.writeChain(chain, data); err != nil {
		return entry{}, err
	}
	if err := f.link(parent, name, attrDirectory, chain[0], 0, now); err != nil {
		return entry{}, err
	}
	return entry{name: name, attr: attrDirectory, first: chain[0]}, f.sync()
}

// link puts a new entry, with its long name, into a directory.
func (f *FS) link(d *directory, name string, attr byte, first, size uint32, now time.Time) error {
	short, err := d.shortFor(name)
	if err != nil {
		return err
	}
	units := utf16.Encode([]rune(name))
	parts := (len(units) + 12) / 13
	at, err := f.room(d, parts+1)
	if err != nil {
		return err
	}
	for i := range parts {
		seq := parts - i
		e := d.data[at+i*entrySize:][:entrySize]
		putLong(e, units, seq, i == 0, checksum(short))
	}
	putEntry(d.data[at+parts*entrySize:], short, attr, first, size, now)
	return f.store(d)
}

// room finds n entries in a row, making a directory longer if need be.
func (f *FS) room(d *directory, n int) (int, error) {
	run := 0
	for o := 0; o+entrySize <= len(d.data); o += entrySize {
		// After the first 0 everything is free, whatever is written there.
		if d.data[o] == 0 {
			if len(d.data)-o+run*entrySize >= n*entrySize {
				start := o - run*entrySize
				clear(d.data[start:])
				return start, nil
			}
			clear(d.data[o:])
			break
		}
		if d.data[o] != 0xe5 {
			run = 0
			continue
		}
		if run++; run == n {
			return o - (n-1)*entrySize, nil
		}
	}
	if d.chain == nil || len(d.data) >= maxDir {
		return 0, fmt.Errorf("%w: directory has no room", ErrFull)
	}
	more, err := f.allocate(1)
	if err != nil {
		return 0, err
	}
	f.setNext(d.chain[len(d.chain)-1], more[0])
	d.chain = append(d.chain, more[0])
	d.data = append(d.data, make([]byte, f.cluster)...)
	return f.room(d, n)
}

func (f *FS) store(d *directory) error {
	if d.chain != nil {
		return f.writeChain(d.chain, d.data)
	}
	if _, err := f.dev.WriteAt(d.data, f.base+f.rootAt); err != nil {
		return fmt.Errorf("write root directory: %w", err)
	}
	return nil
}

// shortFor makes an 8.3 name that the directory does not have yet.
func (d *directory) shortFor(name string) ([]byte, error) {
	base, ext := strings.ToUpper(name), ""
	if i := strings.LastIndexByte(base, '.'); i > 0 {
		base, ext = base[:i], base[i+1:]
	}
	base = strings.ReplaceAll(base, ".", "")
	ext = ext[:min(3, len(ext))]
	used := map[string]bool{}
	for _, e := range d.list() {
		used[e.short] = true
	}
	for n := 1; n < 10000; n++ {
		tail := fmt.Sprintf("~%d", n)
		s := []byte("           ")
		copy(s, base[:min(len(base), 8-len(tail))]+tail)
		copy(s[8:], ext)
		if !used[shortText(s)] {
			return s, nil
		}
	}
	return nil, fmt.Errorf("directory has too many names like %s", name)
}

func shortText(e []byte) string {
	base, ext := bytes.TrimRight(e[:8], " "), bytes.TrimRight(e[8:11], " ")
	s := string(base)
	if len(base) > 0 && base[0] == 0x05 {
		s = "\xe5" + s[1:]
	}
	if len(ext) > 0 {
		s += "." + string(ext)
	}
	return s
}

func checksum(short []byte) byte {
	var s byte
	for _, c := range short[:11] {
		s = s>>1 | s<<7
		s += c
	}
	return s
}

// longAt are the places of the 13 characters in a long-name entry.
var longAt = [13]int{1, 3, 5, 7, 9, 14, 16, 18, 20, 22, 24, 28, 30}

func longPart(e []byte) []uint16 {
	out := make([]uint16, 0, 13)
	for _, o := range longAt {
		out = append(out, binary.LittleEndian.Uint16(e[o:]))
	}
	return out
}

func putLong(e []byte, units []uint16, seq int, last bool, sum byte) {
	clear(e)
	e[0], e[11], e[13] = byte(seq), attrLong, sum
	if last {
		e[0] |= 0x40
	}
	for i, o := range longAt {
		c := uint16(0xffff)
		switch k := (seq-1)*13 + i; {
		case k < len(units):
			c = units[k]
		case k == len(units):
			c = 0
		}
		binary.LittleEndian.PutUint16(e[o:], c)
	}
}

func putEntry(e, short []byte, attr byte, first, size uint32, now time.Time) {
	le := binary.LittleEndian
	clear(e[:entrySize])
	copy(e, short[:11])
	e[11] = attr
	date, clock := dosTime(now.UTC())
	le.PutUint16(e[14:], clock)
	le.PutUint16(e[16:], date)
	le.PutUint16(e[18:], date)
	le.PutUint16(e[20:], uint16(first>>16))
	le.PutUint16(e[22:], clock)
	le.PutUint16(e[24:], date)
	le.PutUint16(e[26:], uint16(first))
	le.PutUint32(e[28:], size)
}
