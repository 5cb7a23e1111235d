// Package uki assembles a unified kernel image: systemd's EFI stub with the
// kernel, initramfs and command line as further sections of one PE file. See
// the UAPI Group's UKI specification and Microsoft's PE/COFF specification.
package uki

import (
	"bytes"
	"debug/pe"
	"encoding/binary"
	"errors"
	"fmt"
)

const (
	// maxImage bounds what is parsed: a metal image has about 60 MB, and
	// firmware takes no file above 4 GiB anyway.
	maxImage = 1 << 30
	// maxSections is what stays readable in one header page.
	maxSections = 96

	sectionHeaderSize = 40
	peSignatureSize   = 4
	fileHeaderSize    = 20
	// offsets inside the optional header, PE32+
	offSizeOfInitializedData = 8
	offSectionAlignment      = 32
	offFileAlignment         = 36
	offSizeOfImage           = 56
	offSizeOfHeaders         = 60
	offCheckSum              = 64
	offDllCharacteristics    = 70
	offNumberOfRvaAndSizes   = 108
	offSecurityDirectory     = 112 + 4*8
	minOptionalHeader        = 112

	peMagic64 = 0x20b

	dllNXCompat     = 0x0100
	scnCode         = 0x00000020
	scnInitialized  = 0x00000040
	scnRead         = 0x40000000
	directoryNumber = 4 // index of the certificate table
)

// image is a parsed PE32+ file that can grow sections.
type image struct {
	data []byte
	// optional is the offset of the optional header, table that of the
	// section table.
	optional, table             int
	sections                    []header
	sectionAlign, fileAlign     uint32
	sizeOfHeaders, sizeOfImage  uint32
	dllCharacteristics, machine uint16
}

// header is one section header.
type header struct {
	name                 string
	virtualSize, address uint32
	rawSize, rawOffset   uint32
	characteristics      uint32
}

// parse reads the headers, checking each offset against the file.
func parse(b []byte) (*image, error) {
	if len(b) > maxImage {
		return nil, fmt.Errorf("pe file has %d bytes, more than the %d that a boot image may have", len(b), maxImage)
	}
	if len(b) < 64 || b[0] != 'M' || b[1] != 'Z' {
		return nil, errors.New("not a pe file: it does not start with MZ")
	}
	le := binary.LittleEndian
	start := int64(le.Uint32(b[0x3c:]))
	if start+peSignatureSize+fileHeaderSize > int64(len(b)) || string(b[start:start+4]) != "PE\x00\x00" {
		return nil, fmt.Errorf("not a pe file: no PE signature at offset %d", start)
	}
	file := int(start) + peSignatureSize
	img := &image{data: b, machine: le.Uint16(b[file:])}
	count := int(le.Uint16(b[file+2:]))
	optionalSize := int(le.Uint16(b[file+16:]))
	img.optional = file + fileHeaderSize
	img.table = img.optional + optionalSize
	if optionalSize < minOptionalHeader || img.table > len(b) {
		return nil, fmt.Errorf("pe optional header of %d bytes does not fit", optionalSize)
	}
	o := b[img.optional:img.table]
	if magic := le.Uint16(o); magic != peMagic64 {
		return nil, fmt.Errorf("pe optional header has magic %#x, want PE32+ (%#x)", magic, peMagic64)
	}
	img.sectionAlign, img.fileAlign = le.Uint32(o[offSectionAlignment:]), le.Uint32(o[offFileAlignment:])
	if !powerOfTwo(img.sectionAlign) || !powerOfTwo(img.fileAlign) || img.fileAlign > img.sectionAlign || img.sectionAlign > 1<<21 {
		return nil, fmt.Errorf("pe alignments %d (sections) and %d (file) are not powers of two in order", img.sectionAlign, img.fileAlign)
	}
	img.sizeOfImage, img.sizeOfHeaders = le.Uint32(o[offSizeOfImage:]), le.Uint32(o[offSizeOfHeaders:])
	img.dllCharacteristics = le.Uint16(o[offDllCharacteristics:])
	if count == 0 || count > maxSections || img.table+count*sectionHeaderSize > len(b) {
		return nil, fmt.Errorf("pe section table of %d entries does not fit", count)
	}
	for i := range count {
		s := b[img.table+i*sectionHeaderSize:][:sectionHeaderSize]
		h := header{
			name:        string(bytes.TrimRight(s[:8], "\x00")),
			virtualSize: le.Uint32(s[8:]), address: le.Uint32(s[12:]),
			rawSize: le.Uint32(s[16:]), rawOffset: le.Uint32(s[20:]),
			characteristics: le.Uint32(s[36:]),
		}
		if h.rawSize > 0 && int64(h.rawOffset)+int64(h.rawSize) > int64(len(b)) {
			return nil, fmt.Errorf("pe section %q: %d bytes at offset %d lie outside the file", h.name, h.rawSize, h.rawOffset)
		}
		if int64(h.address)+int64(h.virtualSize) > 1<<32-1<<21 {
			return nil, fmt.Errorf("pe section %q: %d bytes at address %#x leave the image", h.name, h.virtualSize, h.address)
		}
		img.sections = append(img.sections, h)
	}
	return img, nil
}

// signed reports whether the image carries an Authenticode signature.
func (img *image) signed() bool {
	o := img.data[img.optional:img.table]
	le := binary.LittleEndian
	return len(o) >= offSecurityDirectory+8 && le.Uint32(o[offNumberOfRvaAndSizes:]) > directoryNumber && le.Uint32(o[offSecurityDirectory+4:]) != 0
}

func powerOfTwo(n uint32) bool { return n != 0 && n&(n-1) == 0 }

// up rounds n up to a multiple of align, a power of two.
func up(n int64, align uint32) int64 { return (n + int64(align) - 1) &^ (int64(align) - 1) }

// checksum is the PE image checksum: the 16-bit one's complement sum of the
// file with the checksum field as zero, plus the file's length. Firmware does
// not look at it; signing tools do.
func checksum(b []byte, field int) uint32 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		if i == field || i == field+2 {
			continue
		}
		word := uint32(b[i])
		if i+1 < len(b) {
			word |= uint32(b[i+1]) << 8
		}
		sum += word
		sum = sum&0xffff + sum>>16
	}
	return sum&0xffff + sum>>16 + uint32(len(b))
}

// Architecture gives the Debian name of the machine that a PE file is for, or
// "" for one that is not known here.
func Architecture(b []byte) (string, error) {
	img, err := parse(b)
	if err != nil {
		return "", err
	}
	switch img.machine {
	case pe.IMAGE_FILE_MACHINE_AMD64:
		return "amd64", nil
	case pe.IMAGE_FILE_MACHINE_ARM64:
		return "arm64", nil
	}
	return "", nil
}
