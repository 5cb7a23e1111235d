package uki

import (
	"bytes"
	"debug/pe"
	"encoding/binary"
	"strings"
	"testing"
)

// fakePE makes a PE32+ file with sections .text and .reloc, as a stub or a
// kernel looks to Assemble.
func fakePE(machine, dll uint16) []byte {
	const headers, optionalSize = 0x600, 240
	b := make([]byte, headers+2*0x200)
	le := binary.LittleEndian
	copy(b, "MZ")
	le.PutUint32(b[0x3c:], 0x80)
	copy(b[0x80:], "PE\x00\x00")
	file := b[0x84:]
	le.PutUint16(file, machine)
	le.PutUint16(file[2:], 2)
	le.PutUint16(file[16:], optionalSize)
	le.PutUint16(file[18:], 0x22e)
	o := file[fileHeaderSize:]
	le.PutUint16(o, peMagic64)
	le.PutUint32(o[offSectionAlignment:], 0x1000)
	le.PutUint32(o[offFileAlignment:], 0x200)
	le.PutUint32(o[offSizeOfImage:], 0x3000)
	le.PutUint32(o[offSizeOfHeaders:], headers)
	le.PutUint16(o[offDllCharacteristics:], dll)
	le.PutUint32(o[offNumberOfRvaAndSizes:], 16)
	for i, name := range []string{".text", ".reloc"} {
		s := o[optionalSize+i*sectionHeaderSize:]
		copy(s, name)
		le.PutUint32(s[8:], 0x123)
		le.PutUint32(s[12:], uint32(0x1000*(i+1)))
		le.PutUint32(s[16:], 0x200)
		le.PutUint32(s[20:], uint32(headers+i*0x200))
		le.PutUint32(s[36:], scnRead)
	}
	return b
}

func parts() Parts {
	return Parts{
		Stub:  fakePE(pe.IMAGE_FILE_MACHINE_AMD64, dllNXCompat|0x60),
		Linux: append(fakePE(pe.IMAGE_FILE_MACHINE_AMD64, dllNXCompat), bytes.Repeat([]byte("kernel"), 5000)...),
		// odd sizes, so that padding shows
		Initrd: bytes.Repeat([]byte{7}, 70001), Cmdline: "console=ttyS0", OSRelease: "ID=bcd\n", Uname: "6.12.0-test",
	}
}

// TestAnotherReaderAgrees reads an image with the standard library.
func TestAnotherReaderAgrees(t *testing.T) {
	p := parts()
	b, err := Assemble(p)
	if err != nil {
		t.Fatal(err)
	}
	f, err := pe.NewFile(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	o := f.OptionalHeader.(*pe.OptionalHeader64)
	want := []Section{{".osrel", []byte(p.OSRelease)}, {".cmdline", []byte(p.Cmdline)}, {".uname", []byte(p.Uname)}, {".initrd", p.Initrd}, {".linux", p.Linux}}
	if len(f.Sections) != 2+len(want) {
		t.Fatalf("%d sections", len(f.Sections))
	}
	end := uint32(0)
	for i, s := range f.Sections {
		if s.VirtualAddress%o.SectionAlignment != 0 || s.VirtualAddress < end {
			t.Errorf("section %s at %#x: not aligned, or over the one before (%#x)", s.Name, s.VirtualAddress, end)
		}
		if s.Offset%o.FileAlignment != 0 || s.Size%o.FileAlignment != 0 {
			t.Errorf("section %s: %d bytes at %d in the file, alignment %d", s.Name, s.Size, s.Offset, o.FileAlignment)
		}
		end = s.VirtualAddress + s.VirtualSize
		if i < 2 {
			continue
		}
		data, err := s.Data()
		if w := want[i-2]; err != nil || s.Name != w.Name || !bytes.Equal(data[:s.VirtualSize], w.Data) {
			t.Errorf("section %d is %s with %d bytes (%v), want %s with %d", i, s.Name, s.VirtualSize, err, w.Name, len(w.Data))
		}
	}
	if size := uint32(up(int64(end), o.SectionAlignment)); o.SizeOfImage != size {
		t.Errorf("SizeOfImage %#x, want %#x", o.SizeOfImage, size)
	}
	if o.DllCharacteristics&dllNXCompat == 0 {
		t.Error("NX_COMPAT is lost though the kernel has it")
	}
	got, err := Inspect(b)
	if err != nil {
		t.Fatal(err)
	}
	for i, w := range want {
		if g := got[i+2]; g.Name != w.Name || !bytes.Equal(g.Data, w.Data) {
			t.Errorf("Inspect: section %d is %s with %d bytes", i+2, g.Name, len(g.Data))
		}
	}
	if again, err := Assemble(p); err != nil || !bytes.Equal(again, b) {
		t.Errorf("two images of the same parts differ (%v)", err)
	}
}

// TestChecksum compares with the figure of an independent definition: the sum
// of all 16-bit words but the field's, end-around carry, plus the length.
func TestChecksum(t *testing.T) {
	b, err := Assemble(parts())
	if err != nil {
		t.Fatal(err)
	}
	img, err := parse(b)
	if err != nil {
		t.Fatal(err)
	}
	field := img.optional + offCheckSum
	var sum uint64
	for i := 0; i+1 < len(b); i += 2 {
		if i < field || i >= field+4 {
			sum += uint64(binary.LittleEndian.Uint16(b[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	if want, got := uint32(sum)+uint32(len(b)), binary.LittleEndian.Uint32(b[field:]); got != want {
		t.Errorf("checksum %#x, want %#x", got, want)
	}
}

func TestKernelWithoutNXClearsThePromise(t *testing.T) {
	p := parts()
	p.Linux = fakePE(pe.IMAGE_FILE_MACHINE_AMD64, 0)
	b, err := Assemble(p)
	if err != nil {
		t.Fatal(err)
	}
	if img, err := parse(b); err != nil || img.dllCharacteristics&dllNXCompat != 0 || img.dllCharacteristics&0x60 != 0x60 {
		t.Errorf("DllCharacteristics %#x (%v)", img.dllCharacteristics, err)
	}
}

func TestBadParts(t *testing.T) {
	signed := fakePE(pe.IMAGE_FILE_MACHINE_AMD64, 0)
	binary.LittleEndian.PutUint32(signed[0x84+fileHeaderSize+offSecurityDirectory+4:], 8)
	whole, err := Assemble(parts())
	if err != nil {
		t.Fatal(err)
	}
	narrow := fakePE(pe.IMAGE_FILE_MACHINE_AMD64, 0)
	binary.LittleEndian.PutUint32(narrow[0x84+fileHeaderSize+offSizeOfHeaders:], 0x200)
	for want, change := range map[string]func(*Parts){
		"one architecture":     func(p *Parts) { p.Linux = fakePE(pe.IMAGE_FILE_MACHINE_ARM64, 0) },
		"stub is signed":       func(p *Parts) { p.Stub = signed },
		"whole image, not a":   func(p *Parts) { p.Stub = whole },
		"no room":              func(p *Parts) { p.Stub = narrow },
		"line end":             func(p *Parts) { p.Cmdline = "a\nb" },
		"initramfs is empty":   func(p *Parts) { p.Initrd = nil },
		"kernel: not a pe":     func(p *Parts) { p.Linux = []byte("\x7fELF") },
		"efi stub: not a pe":   func(p *Parts) { p.Stub = p.Stub[:10] },
		"release":              func(p *Parts) { p.Uname = "a\x00b" },
		"lie outside the file": func(p *Parts) { p.Stub = p.Stub[:len(p.Stub)-1] },
	} {
		p := parts()
		change(&p)
		if _, err := Assemble(p); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

func TestArchitecture(t *testing.T) {
	for machine, want := range map[uint16]string{pe.IMAGE_FILE_MACHINE_AMD64: "amd64", pe.IMAGE_FILE_MACHINE_ARM64: "arm64", pe.IMAGE_FILE_MACHINE_I386: ""} {
		if got, err := Architecture(fakePE(machine, 0)); err != nil || got != want {
			t.Errorf("machine %#x is %q, %v; want %q", machine, got, err, want)
		}
	}
}

// FuzzInspect: no file makes the parser panic, read outside or grow without
// bound, and what it accepts as a stub can be assembled and read again.
func FuzzInspect(f *testing.F) {
	p := parts()
	whole, err := Assemble(p)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(p.Stub)
	f.Add(whole)
	f.Add([]byte("MZ"))
	f.Fuzz(func(t *testing.T, b []byte) {
		_, _ = Inspect(b)
		p := parts()
		p.Stub = b
		out, err := Assemble(p)
		if err != nil {
			return
		}
		if _, err := parse(out); err != nil {
			t.Errorf("an image of an accepted stub is refused: %v", err)
		}
	})
}
