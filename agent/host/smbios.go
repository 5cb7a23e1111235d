package host

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

// SMBIOS is what the inventory wants of the firmware's tables (DMTF DSP0134
// 3.7). Fields that the firmware does not give are empty. OEM strings (type
// 11) are left out on purpose: a join token may be among them.
type SMBIOS struct {
	BIOSVendor, BIOSVersion, BIOSDate string // type 0

	Vendor, Product, Version, Serial string // type 1
	UUID                             string // type 1, lower case with dashes
	SKU, Family                      string // type 1

	BoardVendor, BoardProduct, BoardSerial string // type 2, the first one

	ChassisType                   int // type 3, the DMTF number
	ChassisVendor, ChassisSerial  string
	ChassisAssetTag               string
	DIMMs                         []DIMM // type 17, slots with a module
	EmptySlots                    int    // type 17, slots without
	TPMVendor                     string // type 43
	TPMSpec                       string // type 43, for example 2.0
	TPMFirmwareMajor, TPMFirmware uint32 // type 43
}

// DIMM is one memory module (SMBIOS type 17).
type DIMM struct {
	Locator      string `json:"locator"`
	Bank         string `json:"bank,omitempty"`
	SizeMiB      int64  `json:"size_mib"`
	Type         string `json:"type,omitempty"`
	SpeedMTs     int64  `json:"speed_mts,omitempty"`
	Manufacturer string `json:"manufacturer,omitempty"`
	Part         string `json:"part,omitempty"`
	Serial       string `json:"serial,omitempty"`
}

// Bounds on the table: real ones have some hundred structures in some 20 KiB;
// the firmware's word is not taken for any length.
const (
	maxSMBIOSTable      = 1 << 20
	maxSMBIOSStructures = 8192
	maxSMBIOSStrings    = 256 // a string number is one byte
)

// ErrSMBIOSDamaged is returned, with what was read before the damage, for a
// table whose structures do not fit into it.
var ErrSMBIOSDamaged = errors.New("smbios table is damaged")

// structure is one SMBIOS structure: the formatted area with its header, and
// its strings.
type structure struct {
	kind    byte
	data    []byte
	strings []string
}

func (s structure) u8(off int) (byte, bool) {
	if off >= len(s.data) {
		return 0, false
	}
	return s.data[off], true
}

func (s structure) u16(off int) (uint16, bool) {
	if off+2 > len(s.data) {
		return 0, false
	}
	return binary.LittleEndian.Uint16(s.data[off:]), true
}

func (s structure) u32(off int) (uint32, bool) {
	if off+4 > len(s.data) {
		return 0, false
	}
	return binary.LittleEndian.Uint32(s.data[off:]), true
}

// str returns the string whose number is at off, cleaned and with the
// vendors' placeholders for "nothing" turned into nothing.
func (s structure) str(off int) string {
	n, ok := s.u8(off)
	if !ok || n == 0 || int(n) > len(s.strings) {
		return ""
	}
	return meaningful(s.strings[n-1])
}

// ParseSMBIOS reads a structure table as /sys/firmware/dmi/tables/DMI has it.
// A damaged table gives what came before the damage and an error that wraps
// [ErrSMBIOSDamaged].
func ParseSMBIOS(table []byte) (SMBIOS, error) {
	var info SMBIOS
	if len(table) > maxSMBIOSTable {
		return info, fmt.Errorf("%w: %d bytes, more than %d", ErrSMBIOSDamaged, len(table), maxSMBIOSTable)
	}
	offset := 0
	for range maxSMBIOSStructures {
		if offset == len(table) {
			return info, nil // SMBIOS 2.0 tables have no end structure
		}
		s, next, err := nextStructure(table, offset)
		if err != nil {
			return info, err
		}
		if s.kind == 127 {
			return info, nil
		}
		info.take(s)
		offset = next
	}
	return info, fmt.Errorf("%w: more than %d structures", ErrSMBIOSDamaged, maxSMBIOSStructures)
}

// nextStructure parses the structure at offset and returns the offset of the
// one after it.
func nextStructure(table []byte, offset int) (structure, int, error) {
	rest := table[offset:]
	if len(rest) < 4 {
		return structure{}, 0, fmt.Errorf("%w: %d stray bytes at offset %d", ErrSMBIOSDamaged, len(rest), offset)
	}
	length := int(rest[1])
	if length < 4 || length > len(rest) {
		return structure{}, 0, fmt.Errorf("%w: structure of type %d at offset %d says it has %d bytes", ErrSMBIOSDamaged, rest[0], offset, length)
	}
	s := structure{kind: rest[0], data: rest[:length]}
	// The strings: each ends in a NUL, the set in one more; a structure
	// without strings has two.
	pos := length
	for {
		end := pos
		for end < len(rest) && rest[end] != 0 {
			end++
		}
		if end >= len(rest) {
			if s.kind == 127 {
				return s, len(table), nil // some firmware cuts the last one short
			}
			return structure{}, 0, fmt.Errorf("%w: strings of type %d at offset %d do not end", ErrSMBIOSDamaged, s.kind, offset)
		}
		if end == pos {
			end++
			if len(s.strings) == 0 && end < len(rest) && rest[end] == 0 {
				end++
			}
			return s, offset + end, nil
		}
		if len(s.strings) == maxSMBIOSStrings {
			return structure{}, 0, fmt.Errorf("%w: type %d at offset %d has more than %d strings", ErrSMBIOSDamaged, s.kind, offset, maxSMBIOSStrings)
		}
		s.strings = append(s.strings, string(rest[pos:end]))
		pos = end + 1
	}
}

func (info *SMBIOS) take(s structure) {
	switch s.kind {
	case 0:
		info.BIOSVendor, info.BIOSVersion, info.BIOSDate = s.str(4), s.str(5), s.str(8)
	case 1:
		info.Vendor, info.Product, info.Version, info.Serial = s.str(4), s.str(5), s.str(6), s.str(7)
		if len(s.data) >= 0x18 {
			info.UUID = smbiosUUID(s.data[8:24])
		}
		info.SKU, info.Family = s.str(0x19), s.str(0x1a)
	case 2:
		if info.BoardVendor == "" && info.BoardProduct == "" && info.BoardSerial == "" {
			info.BoardVendor, info.BoardProduct, info.BoardSerial = s.str(4), s.str(5), s.str(7)
		}
	case 3:
		if info.ChassisType == 0 {
			kind, _ := s.u8(5)
			info.ChassisType = int(kind & 0x7f) // bit 7 is the lock
			info.ChassisVendor, info.ChassisSerial, info.ChassisAssetTag = s.str(4), s.str(7), s.str(8)
		}
	case 17:
		info.takeDIMM(s)
	case 43:
		if len(s.data) < 0x12 {
			return
		}
		info.TPMVendor = clean(string(s.data[4:8]))
		info.TPMSpec = fmt.Sprintf("%d.%d", s.data[8], s.data[9])
		info.TPMFirmwareMajor, _ = s.u32(0x0a)
		info.TPMFirmware, _ = s.u32(0x0e)
	}
}

func (info *SMBIOS) takeDIMM(s structure) {
	size, ok := s.u16(0x0c)
	if !ok {
		return
	}
	if size == 0 {
		info.EmptySlots++
		return
	}
	d := DIMM{
		Locator: s.str(0x10), Bank: s.str(0x11),
		Manufacturer: s.str(0x17), Serial: s.str(0x18), Part: s.str(0x1a),
	}
	switch {
	case size == 0xffff: // unknown
	case size == 0x7fff: // extended size, in MiB
		ext, _ := s.u32(0x1c)
		d.SizeMiB = int64(ext & 0x7fffffff)
	case size&0x8000 != 0: // in KiB
		d.SizeMiB = int64(size&0x7fff) / 1024
	default:
		d.SizeMiB = int64(size)
	}
	if kind, ok := s.u8(0x12); ok {
		d.Type = dimmTypes[kind]
	}
	if speed, ok := s.u16(0x15); ok {
		d.SpeedMTs = int64(speed)
		if speed == 0xffff {
			ext, _ := s.u32(0x54)
			d.SpeedMTs = int64(ext & 0x7fffffff)
		}
	}
	info.DIMMs = append(info.DIMMs, d)
}

// dimmTypes names what servers of the last fifteen years carry (DSP0134
// table 77).
var dimmTypes = map[byte]string{
	0x07: "RAM", 0x0f: "SDRAM", 0x12: "DDR", 0x13: "DDR2", 0x18: "DDR3", 0x1a: "DDR4",
	0x1e: "LPDDR4", 0x1f: "NVDIMM", 0x20: "HBM", 0x21: "HBM2", 0x22: "DDR5", 0x23: "LPDDR5", 0x24: "HBM3",
}

// smbiosUUID prints a UUID as the kernel does: the first three fields are
// little-endian since SMBIOS 2.6 (DSP0134 section 7.2.1). All zero and all
// ones mean "none".
func smbiosUUID(b []byte) string {
	zero, ones := true, true
	for _, c := range b {
		zero = zero && c == 0
		ones = ones && c == 0xff
	}
	if zero || ones {
		return ""
	}
	return fmt.Sprintf("%08x-%04x-%04x-%x-%x",
		binary.LittleEndian.Uint32(b[0:]), binary.LittleEndian.Uint16(b[4:]), binary.LittleEndian.Uint16(b[6:]), b[8:10], b[10:16])
}

// placeholders are what vendors write where there is nothing. Taken for a
// serial number they would make a rack of machines one machine.
var placeholders = map[string]bool{
	"": true, "none": true, "n/a": true, "na": true, "unknown": true, "empty": true, "null": true, "0": true,
	"not specified": true, "not available": true, "not applicable": true, "not provided": true,
	"to be filled by o.e.m.": true, "to be filled by oem": true, "default string": true, "default": true,
	"o.e.m.": true, "oem": true, "system product name": true, "system manufacturer": true, "no dimm": true, "undefined": true, "invalid": true, "123456789": true, "0123456789": true, "1234567890": true,
}

// meaningful cleans a firmware string and empties placeholders, and strings
// of one repeated character such as 0000000 or xxxxx.
func meaningful(s string) string {
	s = clean(s)
	lower := strings.ToLower(s)
	if placeholders[lower] || strings.Contains(lower, "serial number") || strings.Contains(lower, "asset tag") {
		return "" // also "Type2 - Board Serial Number", "No Asset Tag", …
	}
	if len(s) > 1 && strings.Trim(lower, lower[:1]) == "" && strings.Contains("0xf-. ?*", lower[:1]) {
		return ""
	}
	return s
}
