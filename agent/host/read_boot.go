package host

import (
	"encoding/binary"
	"fmt"
	"unicode/utf16"
)

// The EFI variables of a boot (UEFI 2.10 section 3.3), under the vendor GUID
// of EFI_GLOBAL_VARIABLE.
const (
	efiGlobalVariable = "8be4df61-93ca-11d2-aa0d-00e098032b8c"
	maxBootLabel      = 256
)

// readBoot tells where this boot came from.
func (r Roots) readBoot(firmware Firmware) Boot {
	b := Boot{Mode: firmware.Mode}
	if firmware.Mode != "uefi" {
		return b
	}
	number, ok := parseBootCurrent(r.efiVariable("BootCurrent"))
	if !ok {
		return b
	}
	b.Current = fmt.Sprintf("Boot%04X", number)
	b.Label = parseBootLabel(r.efiVariable(b.Current))
	return b
}

// efiVariable gives a variable's value, nil when there is none: efivarfs has
// four bytes of attributes before it.
func (r Roots) efiVariable(name string) []byte {
	b, err := readFile(r.Sys, "firmware/efi/efivars", name+"-"+efiGlobalVariable)
	if err != nil || len(b) < 4 {
		return nil
	}
	return b[4:]
}

// parseBootCurrent reads the value of BootCurrent, a UINT16.
func parseBootCurrent(value []byte) (uint16, bool) {
	if len(value) != 2 {
		return 0, false
	}
	return binary.LittleEndian.Uint16(value), true
}

// parseBootLabel gives the description of an EFI_LOAD_OPTION (UEFI 2.10
// section 3.1.3): after attributes and a length comes UTF-16 that ends with
// zero. A damaged one gives "".
func parseBootLabel(value []byte) string {
	const header = 4 + 2
	var text []uint16
	for i := header; i+1 < len(value) && len(text) < maxBootLabel; i += 2 {
		unit := binary.LittleEndian.Uint16(value[i:])
		if unit == 0 {
			return clean(string(utf16.Decode(text)))
		}
		text = append(text, unit)
	}
	return ""
}
