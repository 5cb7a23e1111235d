package disk

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// guid is 16 bytes in the mixed-endian order of GPT (UEFI 2.10, appendix A).
type guid [16]byte

// mustGUID parses the text form of a constant.
func mustGUID(text string) guid {
	raw, err := hex.DecodeString(strings.ReplaceAll(text, "-", ""))
	if err != nil || len(raw) != 16 {
		panic(fmt.Sprintf("disk: constant %q is no GUID", text))
	}
	return guid{raw[3], raw[2], raw[1], raw[0], raw[5], raw[4], raw[7], raw[6],
		raw[8], raw[9], raw[10], raw[11], raw[12], raw[13], raw[14], raw[15]}
}

func (g guid) String() string {
	return fmt.Sprintf("%02x%02x%02x%02x-%02x%02x-%02x%02x-%x-%x", g[3], g[2], g[1], g[0], g[5], g[4], g[7], g[6], g[8:10], g[10:])
}

// derive makes a GUID from what it names: the same image has the same ids, and
// two images have different ones. It is a UUID version 8, RFC 9562 section 5.8.
func derive(seed []byte, name string) guid {
	h := sha256.New()
	h.Write(seed)
	h.Write([]byte(name))
	var g guid
	copy(g[:], h.Sum(nil))
	g[7], g[8] = g[7]&0x0f|0x80, g[8]&0x3f|0x80
	return g
}

// sortedKeys gives the keys of m in order.
func sortedKeys(m map[string][]byte) []string { return slices.Sorted(maps.Keys(m)) }
