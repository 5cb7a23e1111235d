package boot

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"syscall"
)

const (
	// efiGlobal is EFI_GLOBAL_VARIABLE (UEFI 2.10 section 3.3).
	efiGlobal = "8be4df61-93ca-11d2-aa0d-00e098032b8c"
	// persistent is NON_VOLATILE | BOOTSERVICE_ACCESS | RUNTIME_ACCESS.
	persistent = 7
	// maxEntries bounds how many Boot#### are looked at. A firmware with more
	// has a fault that adding one more would only feed.
	maxEntries = 1024
)

// DefaultVariables is where Linux mounts efivarfs.
const DefaultVariables = "/sys/firmware/efi/efivars"

// ErrNoVariables says that the machine has no EFI variables: it was started
// by a BIOS, or efivarfs is not mounted.
var ErrNoVariables = errors.New("no EFI variables: the machine was started by a BIOS, or efivarfs is not mounted")

// ErrVariablesFull says that the firmware's variable store has no room.
var ErrVariablesFull = errors.New("the firmware's variable store is full: remove crash dumps (dump-type0-*) and unused boot entries, then try again")

// Variables is a directory of EFI variables: efivarfs, or any directory in
// tests. It keeps no state; use one at a time.
type Variables struct {
	Dir string
	// write replaces one variable; tests make it fail as firmwares do.
	write func(path string, content []byte) error
}

// OpenVariables returns ErrNoVariables when dir cannot serve.
func OpenVariables(dir string) (*Variables, error) {
	names, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, ErrNoVariables
	}
	if err != nil {
		return nil, fmt.Errorf("read EFI variables: %w", err)
	}
	if len(names) == 0 {
		// sysfs makes the mount point on every EFI machine.
		return nil, ErrNoVariables
	}
	return &Variables{Dir: dir, write: writeVariable}, nil
}

var bootName = regexp.MustCompile(`^Boot([0-9A-F]{4})-` + efiGlobal + `$`)

// EntryName is how firmware and people call entry n, for example "Boot0004".
func EntryName(n uint16) string { return fmt.Sprintf("Boot%04X", n) }

// Current is the entry that this boot came from. The second value is false
// when the firmware does not say.
func (v *Variables) Current() (uint16, bool, error) { return v.number("BootCurrent") }

// Next is the one-time choice for the next boot, if any.
func (v *Variables) Next() (uint16, bool, error) { return v.number("BootNext") }

// Order is the firmware's list; nil when the variable does not exist.
func (v *Variables) Order() ([]uint16, error) {
	b, err := v.read("BootOrder")
	if err != nil || b == nil {
		return nil, err
	}
	if len(b)%2 != 0 {
		return nil, fmt.Errorf("EFI variable BootOrder has %d bytes, which is odd", len(b))
	}
	var order []uint16
	for i := 0; i < len(b); i += 2 {
		order = append(order, binary.LittleEndian.Uint16(b[i:]))
	}
	return order, nil
}

// Entry reads one boot entry.
func (v *Variables) Entry(n uint16) (Entry, error) {
	b, err := v.read(EntryName(n))
	if err != nil {
		return Entry{}, err
	}
	if b == nil {
		return Entry{}, fmt.Errorf("EFI variable %s does not exist", EntryName(n))
	}
	return ParseEntry(b)
}

// EnsureEntry makes the firmware start e next time and from then on: it
// returns the number of the one Boot#### that does so. Calling it again
// changes nothing. The order of writes is such that an error or a power cut
// after any of them leaves the old entries usable: the new Boot#### first,
// then BootOrder, then BootNext, and only then are entries of an earlier
// deployment (our label, another partition) removed. What others made is never
// changed and keeps its place in BootOrder; where BootOrder was missing or
// empty, existing entries are listed after ours so that none is lost.
func (v *Variables) EnsureEntry(e Entry) (uint16, error) {
	if err := e.Check(); err != nil {
		return 0, err
	}
	have, err := v.entries()
	if err != nil {
		return 0, err
	}
	order, err := v.Order()
	if err != nil {
		return 0, err
	}
	want := e.Marshal()
	number, stale, err := v.choose(e, want, have, order)
	if err != nil {
		return 0, err
	}
	if !bytes.Equal(have[number], want) {
		err := v.put(EntryName(number), want)
		if errors.Is(err, ErrVariablesFull) && len(stale) > 0 {
			// No room beside the old one: replace it. A failed write leaves
			// the old content, so nothing is lost either way.
			number, stale = stale[0], stale[1:]
			err = v.put(EntryName(number), want)
		}
		if err != nil {
			return 0, err
		}
	}
	if err := v.putOrder(number, stale, order, have); err != nil {
		return 0, err
	}
	if next, ok, err := v.Next(); err != nil || !ok || next != number {
		if err := v.put("BootNext", binary.LittleEndian.AppendUint16(nil, number)); err != nil {
			return 0, err
		}
	}
	for _, n := range stale {
		if err := v.remove(EntryName(n)); err != nil {
			return number, fmt.Errorf("boot entry %s is in place, but the old %s stays: %w", EntryName(number), EntryName(n), err)
		}
	}
	return number, nil
}

// choose finds the number to use and the entries that ours replaces.
func (v *Variables) choose(e Entry, want []byte, have map[uint16][]byte, order []uint16) (number uint16, stale []uint16, err error) {
	const none = -1
	same, partition := none, none
	for _, n := range sortedKeys(have) {
		old, err := ParseEntry(have[n])
		if err != nil || old.Label != e.Label {
			continue // foreign, or damaged by somebody else
		}
		switch {
		case same == none && bytes.Equal(have[n], want):
			same = int(n)
		case same == none && partition == none && old.Partition == e.Partition:
			partition = int(n)
		default:
			stale = append(stale, n)
		}
	}
	switch {
	case same != none && partition != none:
		return uint16(same), append(stale, uint16(partition)), nil
	case same != none:
		return uint16(same), stale, nil
	case partition != none:
		return uint16(partition), stale, nil
	}
	for n := range uint16(maxEntries) {
		// A number in BootOrder without an entry may be a removed device's
		// that the firmware will bring back.
		if _, used := have[n]; !used && !slices.Contains(order, n) {
			return n, stale, nil
		}
	}
	return 0, nil, fmt.Errorf("all of the first %d boot entry numbers are taken: remove unused ones", maxEntries)
}

func (v *Variables) putOrder(number uint16, stale, order []uint16, have map[uint16][]byte) error {
	var next []uint16
	if !slices.Contains(order, number) {
		next = append(next, number)
	}
	for _, n := range order {
		if !slices.Contains(stale, n) && (n != number || !slices.Contains(next, n)) {
			next = append(next, n)
		}
	}
	if len(order) == 0 {
		for _, n := range sortedKeys(have) {
			if n != number && !slices.Contains(stale, n) {
				next = append(next, n)
			}
		}
	}
	if slices.Equal(next, order) {
		return nil
	}
	var b []byte
	for _, n := range next {
		b = binary.LittleEndian.AppendUint16(b, n)
	}
	return v.put("BootOrder", b)
}

func (v *Variables) entries() (map[uint16][]byte, error) {
	names, err := os.ReadDir(v.Dir)
	if err != nil {
		return nil, fmt.Errorf("read EFI variables: %w", err)
	}
	out := map[uint16][]byte{}
	for _, d := range names {
		m := bootName.FindStringSubmatch(d.Name())
		if m == nil {
			continue
		}
		n, err := strconv.ParseUint(m[1], 16, 16)
		if err != nil {
			continue
		}
		b, err := v.read(EntryName(uint16(n)))
		if err != nil {
			// Somebody else's trouble; but the number is taken.
			b = nil
		}
		if out[uint16(n)] = b; len(out) > maxEntries {
			return nil, fmt.Errorf("more than %d boot entries: remove unused ones", maxEntries)
		}
	}
	return out, nil
}

func (v *Variables) path(name string) string {
	return filepath.Join(v.Dir, name+"-"+efiGlobal)
}

// read returns nil for a variable that does not exist.
func (v *Variables) read(name string) ([]byte, error) {
	f, err := os.Open(v.path(name))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read EFI variable %s: %w", name, err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxLoadOption+5))
	if err != nil {
		return nil, fmt.Errorf("read EFI variable %s: %w", name, err)
	}
	if len(b) < 4 || len(b) > maxLoadOption+4 {
		return nil, fmt.Errorf("EFI variable %s has %d bytes, expected 4 to %d", name, len(b), maxLoadOption+4)
	}
	return b[4:], nil
}

// put writes a variable and reads it back: some firmwares report success and
// keep the old value until the store is cleaned at the next reset.
func (v *Variables) put(name string, data []byte) error {
	content := append(binary.LittleEndian.AppendUint32(nil, persistent), data...)
	if err := v.write(v.path(name), content); err != nil {
		if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EINVAL) {
			// Full stores answer either (EFI_OUT_OF_RESOURCES, or
			// EFI_INVALID_PARAMETER on some Dell and AMI firmwares).
			return fmt.Errorf("write EFI variable %s: %w (%w)", name, ErrVariablesFull, err)
		}
		return fmt.Errorf("write EFI variable %s: %w", name, err)
	}
	got, err := v.read(name)
	if err != nil {
		return err
	}
	if !bytes.Equal(got, data) {
		return fmt.Errorf("EFI variable %s reads back differently from what was written (%d and %d bytes): the firmware did not keep it", name, len(got), len(data))
	}
	return nil
}

func (v *Variables) remove(name string) error {
	if err := clearImmutable(v.path(name)); err != nil {
		return err
	}
	if err := os.Remove(v.path(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove EFI variable %s: %w", name, err)
	}
	return nil
}

func (v *Variables) number(name string) (uint16, bool, error) {
	b, err := v.read(name)
	if err != nil || b == nil {
		return 0, false, err
	}
	if len(b) != 2 {
		return 0, false, fmt.Errorf("EFI variable %s has %d bytes, expected 2", name, len(b))
	}
	return binary.LittleEndian.Uint16(b), true, nil
}

func sortedKeys(m map[uint16][]byte) []uint16 {
	keys := make([]uint16, 0, len(m))
	for n := range m {
		keys = append(keys, n)
	}
	slices.Sort(keys)
	return keys
}
