package boot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"unicode/utf16"
)

// GUID is 16 bytes in the mixed-endian order that GPT and EFI keep on disk.
type GUID [16]byte

// ParseGUID reads the text form, in either case.
func ParseGUID(s string) (GUID, error) {
	var g GUID
	low := strings.ToLower(s)
	if !uuidForm.MatchString(low) {
		return g, fmt.Errorf("%q is not a GUID", shorten(s))
	}
	h := strings.ReplaceAll(low, "-", "")
	var raw [16]byte
	for i := range raw {
		raw[i] = unhex(h[2*i])<<4 | unhex(h[2*i+1])
	}
	// The first three groups are little-endian numbers (RFC 4122 calls the
	// text form big-endian; UEFI 2.10 appendix A swaps them).
	return GUID{raw[3], raw[2], raw[1], raw[0], raw[5], raw[4], raw[7], raw[6],
		raw[8], raw[9], raw[10], raw[11], raw[12], raw[13], raw[14], raw[15]}, nil
}

func unhex(c byte) byte {
	if c <= '9' {
		return c - '0'
	}
	return c - 'a' + 10
}

// String is the text form in lower case.
func (g GUID) String() string {
	return fmt.Sprintf("%08x-%04x-%04x-%x-%x", binary.LittleEndian.Uint32(g[0:]),
		binary.LittleEndian.Uint16(g[4:]), binary.LittleEndian.Uint16(g[6:]), g[8:10], g[10:16])
}

// Entry is a boot entry that starts a file on a GPT partition.
type Entry struct {
	// Label is shown in the firmware's menu. 1 to 64 printable characters.
	Label string
	// Partition is the unique partition GUID: the only thing here that is the
	// same whatever the firmware or the kernel call the disk.
	Partition GUID
	// Number counts partitions from 1.
	Number uint32
	// Start and Size are in logical blocks of the disk.
	Start, Size uint64
	// Loader is a path on that partition with backslashes, from its root.
	Loader string
}

const (
	loadOptionActive = 1
	// maxLoadOption bounds what is parsed; real ones are under 1 KiB.
	maxLoadOption = 64 << 10
	maxLabel      = 64
	maxLoader     = 255
)

// Check says what is wrong with an entry before it meets a firmware: some
// accept nonsense and then hang in their menu.
func (e Entry) Check() error {
	switch {
	case e.Label == "" || len(utf16.Encode([]rune(e.Label))) > maxLabel || strings.ContainsFunc(e.Label, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return fmt.Errorf("boot entry label %q must be 1 to %d printable characters", shorten(e.Label), maxLabel)
	case e.Partition == GUID{}:
		return errors.New("boot entry has a partition GUID of zeros")
	case e.Number == 0 || e.Start == 0 || e.Size == 0:
		return fmt.Errorf("boot entry partition number %d, start %d and size %d must not be 0", e.Number, e.Start, e.Size)
	case !strings.HasPrefix(e.Loader, `\`) || len(e.Loader) > maxLoader || strings.ContainsAny(e.Loader, "/\x00"):
		return fmt.Errorf(`boot loader path %q must start with \ and separate with \, at most %d characters`, shorten(e.Loader), maxLoader)
	}
	return nil
}

// Marshal encodes the entry as an EFI_LOAD_OPTION (UEFI 2.10 section 3.1.3)
// with a short-form device path: HD() by GUID, then File(), then the end.
// These are the bytes that efibootmgr writes for the same entry.
func (e Entry) Marshal() []byte {
	le := binary.LittleEndian
	var dp []byte
	// Hard drive node: UEFI 2.10 section 10.3.5.1.
	dp = append(dp, 4, 1, 42, 0)
	dp = le.AppendUint32(dp, e.Number)
	dp = le.AppendUint64(dp, e.Start)
	dp = le.AppendUint64(dp, e.Size)
	dp = append(dp, e.Partition[:]...)
	dp = append(dp, 2, 2) // GPT, GUID signature
	// File path node: section 10.3.5.4.
	path := ucs2(e.Loader)
	dp = append(dp, 4, 4)
	dp = le.AppendUint16(dp, uint16(4+len(path)))
	dp = append(dp, path...)
	dp = append(dp, 0x7f, 0xff, 4, 0)

	out := le.AppendUint32(nil, loadOptionActive)
	out = le.AppendUint16(out, uint16(len(dp)))
	out = append(out, ucs2(e.Label)...)
	return append(out, dp...)
}

// ParseEntry reads an EFI_LOAD_OPTION. Entries of other kinds (network,
// firmware volumes, vendor paths) give ErrForeignEntry with the label filled
// in: they are not ours and nobody here touches them.
func ParseEntry(b []byte) (Entry, error) {
	var e Entry
	le := binary.LittleEndian
	if len(b) < 6 || len(b) > maxLoadOption {
		return e, fmt.Errorf("EFI load option of %d bytes", len(b))
	}
	pathLen := int(le.Uint16(b[4:]))
	label, rest, err := parseUCS2(b[6:])
	if err != nil {
		return e, fmt.Errorf("EFI load option label: %w", err)
	}
	e.Label = label
	if pathLen > len(rest) {
		return e, fmt.Errorf("EFI load option device path of %d bytes in %d", pathLen, len(rest))
	}
	dp := rest[:pathLen]
	for first := true; len(dp) > 0; first = false {
		if len(dp) < 4 {
			return e, errors.New("EFI device path node is cut off")
		}
		n := int(le.Uint16(dp[2:]))
		if n < 4 || n > len(dp) {
			return e, fmt.Errorf("EFI device path node of %d bytes in %d", n, len(dp))
		}
		node := dp[:n]
		switch {
		case node[0] == 0x7f:
			if e.Loader == "" {
				return e, ErrForeignEntry
			}
			return e, nil
		case first && node[0] == 4 && node[1] == 1 && n == 42 && node[40] == 2 && node[41] == 2:
			e.Number, e.Start, e.Size = le.Uint32(node[4:]), le.Uint64(node[8:]), le.Uint64(node[16:])
			copy(e.Partition[:], node[24:40])
		case first:
			return e, ErrForeignEntry
		case node[0] == 4 && node[1] == 4 && e.Loader == "":
			if e.Loader, _, err = parseUCS2(node[4:]); err != nil {
				return e, fmt.Errorf("EFI file path: %w", err)
			}
		default:
			return e, ErrForeignEntry
		}
		dp = dp[n:]
	}
	return e, errors.New("EFI device path has no end")
}

// ErrForeignEntry says that a boot entry is not a file on a GPT partition.
var ErrForeignEntry = errors.New("boot entry is not a file on a GPT partition")

func ucs2(s string) []byte {
	var b []byte
	for _, u := range utf16.Encode([]rune(s)) {
		b = binary.LittleEndian.AppendUint16(b, u)
	}
	return append(b, 0, 0)
}

// parseUCS2 returns the string up to its NUL and what follows it.
func parseUCS2(b []byte) (string, []byte, error) {
	var u []uint16
	for i := 0; i+1 < len(b); i += 2 {
		c := binary.LittleEndian.Uint16(b[i:])
		if c == 0 {
			return string(utf16.Decode(u)), b[i+2:], nil
		}
		u = append(u, c)
	}
	return "", nil, errors.New("string has no end")
}
