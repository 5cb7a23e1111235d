// Package kmod chooses kernel modules for an image and writes the index files
// that a module loader reads: modules.dep, modules.alias and modules.softdep,
// as depmod(8) would for a tree that holds nothing else.
package kmod

import (
	"bytes"
	"debug/elf"
	"fmt"
	"io"
	"strings"

	"github.com/ulikunitz/xz"
)

const (
	// maxModule bounds a decompressed module; the largest in Debian's
	// generic kernel has about 10 MB.
	maxModule = 64 << 20
	// maxModinfo bounds its .modinfo section; long alias lists have 100 kB.
	maxModinfo = 4 << 20
)

// Modinfo is what a module says of itself.
type Modinfo struct {
	Name     string
	Aliases  []string
	Depends  []string
	Softdeps []string
	Firmware []string
}

// ReadModinfo parses the .modinfo section of a decompressed module.
func ReadModinfo(ko []byte) (Modinfo, error) {
	f, err := elf.NewFile(bytes.NewReader(ko))
	if err != nil {
		return Modinfo{}, fmt.Errorf("module: %w", err)
	}
	section := f.Section(".modinfo")
	if section == nil {
		return Modinfo{}, fmt.Errorf("module has no .modinfo section")
	}
	if section.Size > maxModinfo || section.FileSize > maxModinfo {
		return Modinfo{}, fmt.Errorf("module has a .modinfo section of %d bytes, more than %d", section.Size, maxModinfo)
	}
	data, err := section.Data()
	if err != nil {
		return Modinfo{}, fmt.Errorf("module: .modinfo: %w", err)
	}
	return parseModinfo(data), nil
}

// parseModinfo reads "key=value" strings that end in zero bytes.
func parseModinfo(data []byte) Modinfo {
	var m Modinfo
	for field := range bytes.SplitSeq(data, []byte{0}) {
		key, value, ok := strings.Cut(string(field), "=")
		// A line end would become a second line of an index file.
		if !ok || strings.ContainsAny(value, "\n\r") {
			continue
		}
		switch key {
		case "name":
			m.Name = canonical(value)
		case "alias":
			m.Aliases = append(m.Aliases, value)
		case "depends":
			for name := range strings.SplitSeq(value, ",") {
				if name != "" {
					m.Depends = append(m.Depends, canonical(name))
				}
			}
		case "softdep":
			m.Softdeps = append(m.Softdeps, value)
		case "firmware":
			m.Firmware = append(m.Firmware, value)
		}
	}
	return m
}

// softNames are the modules that softdep lines name, before or after.
func (m Modinfo) softNames() []string {
	var out []string
	for _, line := range m.Softdeps {
		for word := range strings.FieldsSeq(line) {
			if !strings.HasSuffix(word, ":") {
				out = append(out, canonical(word))
			}
		}
	}
	return out
}

// canonical is how the kernel itself writes a module's name.
func canonical(name string) string { return strings.ReplaceAll(name, "-", "_") }

// decompress gives a module's ELF file; name says how it is compressed.
func decompress(name string, data []byte) ([]byte, error) {
	if !strings.HasSuffix(name, ".xz") {
		return data, nil
	}
	r, err := xz.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	out, err := io.ReadAll(io.LimitReader(r, maxModule+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if len(out) > maxModule {
		return nil, fmt.Errorf("%s has more than %d bytes decompressed", name, maxModule)
	}
	return out, nil
}
