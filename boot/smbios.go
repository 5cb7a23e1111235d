package boot

import (
	"bytes"
	"fmt"
)

// maxOEMStrings is the most a type 11 structure can have: its count is a byte.
const maxOEMStrings = 255

// ParseOEMStrings reads one raw SMBIOS type 11 structure (DSP0134 section
// 7.12): a header of type, length and handle, the count, then as many strings
// ending in NUL, then one more NUL. A structure that ends early is an error:
// half a token or half a URL is worse than none.
func ParseOEMStrings(b []byte) ([]string, error) {
	if len(b) == 0 {
		return nil, nil
	}
	if len(b) > maxFactFile {
		return nil, fmt.Errorf("SMBIOS structure of %d bytes is over the limit of %d", len(b), maxFactFile)
	}
	if len(b) < 5 || b[0] != 11 || int(b[1]) < 5 || int(b[1]) > len(b) {
		return nil, fmt.Errorf("not an SMBIOS type 11 structure (%d bytes)", len(b))
	}
	count, rest := int(b[4]), b[b[1]:]
	out := make([]string, 0, min(count, maxOEMStrings))
	for i := range count {
		end := bytes.IndexByte(rest, 0)
		if end < 0 {
			return nil, fmt.Errorf("SMBIOS type 11 string %d of %d is cut off", i+1, count)
		}
		if end == 0 {
			// An empty string cannot be told from the end of the set.
			break
		}
		out = append(out, string(rest[:end]))
		rest = rest[end+1:]
	}
	return out, nil
}
