package uki

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Parts are what goes into a unified kernel image.
type Parts struct {
	// Stub is systemd's EFI stub, linuxx64.efi.stub or linuxaa64.efi.stub.
	Stub []byte
	// Linux is the kernel, an EFI program itself; Initrd its initramfs.
	Linux, Initrd []byte
	// Cmdline is the kernel command line. The stub uses it as it is, and
	// nothing of the boot menu's under Secure Boot.
	Cmdline string
	// OSRelease is an os-release(5) file that names the image in boot menus.
	OSRelease string
	// Uname is the kernel's release.
	Uname string
}

// Section is one named part of a unified kernel image.
type Section struct {
	Name string
	Data []byte
}

// Assemble makes the image. Sections come after the stub's last one, each at
// the next multiple of SectionAlignment, .linux last: the kernel may write
// behind itself while it unpacks.
func Assemble(p Parts) ([]byte, error) {
	stub, err := parse(p.Stub)
	if err != nil {
		return nil, fmt.Errorf("efi stub: %w", err)
	}
	if stub.signed() {
		return nil, errors.New("efi stub is signed: adding sections would break the signature; give the unsigned stub")
	}
	kernel, err := parse(p.Linux)
	if err != nil {
		return nil, fmt.Errorf("kernel: %w", err)
	}
	if kernel.machine != stub.machine {
		return nil, fmt.Errorf("kernel is for machine %#x, the efi stub for %#x: give both of one architecture", kernel.machine, stub.machine)
	}
	switch {
	case len(p.Initrd) == 0:
		return nil, errors.New("initramfs is empty")
	case strings.ContainsAny(p.Cmdline, "\x00\n\r"):
		return nil, fmt.Errorf("kernel command line %q has a line end or zero byte", p.Cmdline)
	case strings.ContainsRune(p.Uname, 0):
		return nil, fmt.Errorf("kernel release %q has a zero byte", p.Uname)
	}
	return stub.grow(kernel.dllCharacteristics, []Section{
		{".osrel", []byte(p.OSRelease)},
		{".cmdline", []byte(p.Cmdline)},
		{".uname", []byte(p.Uname)},
		{".initrd", p.Initrd},
		{".linux", p.Linux},
	})
}

// grow gives a copy of img with further sections.
func (img *image) grow(kernelCharacteristics uint16, added []Section) ([]byte, error) {
	room := img.sizeOfHeaders
	for _, s := range img.sections {
		if s.rawSize > 0 {
			room = min(room, s.rawOffset)
		}
		for _, a := range added {
			if a.Name == s.name {
				return nil, fmt.Errorf("efi stub already has a section %s: it is a whole image, not a stub", s.name)
			}
		}
	}
	count := len(img.sections) + len(added)
	if end := img.table + count*sectionHeaderSize; count > maxSections || int64(end) > int64(room) {
		return nil, fmt.Errorf("efi stub has no room for %d more section headers (%d bytes of %d used)", len(added), end, room)
	}
	size := up(int64(len(img.data)), img.fileAlign)
	for _, a := range added {
		size += up(int64(len(a.Data)), img.fileAlign)
	}
	if size > maxImage {
		return nil, fmt.Errorf("image of %d bytes is larger than the %d that firmware is asked to load", size, maxImage)
	}
	le := binary.LittleEndian
	out := make([]byte, up(int64(len(img.data)), img.fileAlign), size)
	copy(out, img.data)
	var address int64
	for _, s := range img.sections {
		address = max(address, int64(s.address)+int64(max(s.virtualSize, s.rawSize)))
	}
	var initialized uint32
	for i, a := range added {
		address = up(address, img.sectionAlign)
		raw := up(int64(len(a.Data)), img.fileAlign)
		if address+raw > 1<<32-1<<21 {
			return nil, fmt.Errorf("section %s does not fit into the address range of the image", a.Name)
		}
		h := out[img.table+(len(img.sections)+i)*sectionHeaderSize:][:sectionHeaderSize]
		clear(h)
		copy(h, a.Name)
		le.PutUint32(h[8:], uint32(len(a.Data)))
		le.PutUint32(h[12:], uint32(address))
		le.PutUint32(h[16:], uint32(raw))
		le.PutUint32(h[20:], uint32(len(out)))
		kind := uint32(scnInitialized)
		if a.Name == ".linux" {
			kind = scnCode
		}
		le.PutUint32(h[36:], scnRead|kind)
		out = append(out, a.Data...)
		out = append(out, make([]byte, raw-int64(len(a.Data)))...)
		address += int64(len(a.Data))
		initialized += uint32(len(a.Data))
	}
	le.PutUint16(out[img.optional-fileHeaderSize+2:], uint16(count))
	o := out[img.optional:img.table]
	le.PutUint32(o[offSizeOfInitializedData:], le.Uint32(o[offSizeOfInitializedData:])+initialized)
	le.PutUint32(o[offSizeOfImage:], uint32(up(address, img.sectionAlign)))
	// An image that promises no-execute data but holds a kernel that does not
	// would be refused by firmware that enforces the promise.
	if kernelCharacteristics&dllNXCompat == 0 {
		le.PutUint16(o[offDllCharacteristics:], img.dllCharacteristics&^dllNXCompat)
	}
	le.PutUint32(o[offCheckSum:], checksum(out, img.optional+offCheckSum))
	return out, nil
}

// Inspect gives the sections of an image in their order. The data is the part
// of each that counts (VirtualSize), a slice of b.
func Inspect(b []byte) ([]Section, error) {
	img, err := parse(b)
	if err != nil {
		return nil, err
	}
	sorted := slices.Clone(img.sections)
	slices.SortFunc(sorted, func(a, b header) int { return int(int64(a.address) - int64(b.address)) })
	var end int64
	for _, s := range sorted {
		if int64(s.address) < end {
			return nil, fmt.Errorf("pe section %q at %#x lies over the one before it", s.name, s.address)
		}
		end = int64(s.address) + int64(s.virtualSize)
	}
	if end > int64(img.sizeOfImage) {
		return nil, fmt.Errorf("pe sections end at %#x, SizeOfImage is only %#x", end, img.sizeOfImage)
	}
	var out []Section
	for _, s := range img.sections {
		n := min(s.virtualSize, s.rawSize)
		data := b[:0]
		if n > 0 {
			data = b[s.rawOffset : s.rawOffset+n]
		}
		out = append(out, Section{s.name, data})
	}
	return out, nil
}
