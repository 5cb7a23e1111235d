package disk

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Why no disk was chosen.
var (
	ErrNone      = errors.New("no disk")
	ErrAmbiguous = errors.New("ambiguous disk")
	ErrMismatch  = errors.New("disk is not the one the command is bound to")
)

// Hints say which disk is meant; every hint that is set must hold.
type Hints struct {
	// MinBytes and MaxBytes include their ends; 0 is no limit.
	MinBytes, MaxBytes int64
	// Model may have '*' at either end. Case does not count.
	Model string
	// Serial is compared exactly, but for surrounding blanks.
	Serial string
	// WWN is compared without a prefix such as naa., eui., wwn- or 0x.
	WWN string
	// ByPath is where the disk is plugged in, as the inventory shows it.
	ByPath string
	// Rotational is "", "yes" or "no".
	Rotational string
	Transport  string
	// Smallest and First decide between disks that all match: the smallest,
	// or the first by place. Two of the same size are still ambiguous.
	Smallest, First bool
}

// Binding is the disk that a signed command was made for.
type Binding struct{ Serial, WWN string }

// Check says which hint makes no sense.
func (h Hints) Check() error {
	switch {
	case h.MinBytes < 0 || h.MaxBytes < 0 || h.MaxBytes > 0 && h.MinBytes > h.MaxBytes:
		return fmt.Errorf("disk hint: size from %d to %d bytes is an empty range", h.MinBytes, h.MaxBytes)
	case h.Rotational != "" && h.Rotational != "yes" && h.Rotational != "no":
		return fmt.Errorf("disk hint: rotational %q must be yes, no or empty", h.Rotational)
	case strings.Contains(strings.Trim(h.Model, "*"), "*"):
		return fmt.Errorf("disk hint: model %q may have * only at its ends", h.Model)
	}
	return nil
}

// Choose returns the one disk that is meant. The error wraps ErrNone,
// ErrAmbiguous or ErrMismatch and lists the disks that are there.
func Choose(disks []Disk, h Hints, b Binding) (Disk, error) {
	if err := h.Check(); err != nil {
		return Disk{}, err
	}
	var match []Disk
	var why []string
	for _, d := range disks {
		reason := d.Refused
		if reason == "" {
			reason = h.differs(d)
		}
		if reason != "" {
			why = append(why, fmt.Sprintf("%s: %s", d, reason))
			continue
		}
		match = append(match, d)
	}
	if len(match) == 0 {
		if len(disks) == 0 {
			return Disk{}, fmt.Errorf("%w: the machine shows none: check that it has one, that its controller is enabled and that the image has its driver", ErrNone)
		}
		return Disk{}, fmt.Errorf("%w matches the hints: %s", ErrNone, strings.Join(why, "; "))
	}
	if b != (Binding{}) {
		var bound []Disk
		for _, d := range match {
			if b.is(d) {
				bound = append(bound, d)
			}
		}
		if len(bound) == 0 {
			return Disk{}, fmt.Errorf("%w (%s): there is %s: send the command again for the disk that is meant", ErrMismatch, b, names(match))
		}
		match = bound
	}
	if len(match) > 1 {
		match = h.decide(match)
	}
	if len(match) > 1 {
		return Disk{}, fmt.Errorf("%w: %d disks match the hints: %s: name one by serial, WWN or by-path", ErrAmbiguous, len(match), names(match))
	}
	return match[0], nil
}

// differs names the first hint that does not hold, or "".
func (h Hints) differs(d Disk) string {
	rotational := map[bool]string{true: "yes", false: "no"}[d.Rotational]
	switch {
	case h.MinBytes > 0 && d.SizeBytes < h.MinBytes:
		return fmt.Sprintf("smaller than %d bytes", h.MinBytes)
	case h.MaxBytes > 0 && d.SizeBytes > h.MaxBytes:
		return fmt.Sprintf("larger than %d bytes", h.MaxBytes)
	case h.Model != "" && !matchModel(h.Model, d.Model):
		return fmt.Sprintf("model is not %q", h.Model)
	case h.Serial != "" && !sameSerial(h.Serial, d.Serial):
		return fmt.Sprintf("serial is not %q", h.Serial)
	case h.WWN != "" && !sameWWN(h.WWN, d.WWN):
		return fmt.Sprintf("WWN is not %q", h.WWN)
	case h.ByPath != "" && strings.TrimPrefix(h.ByPath, "/dev/disk/by-path/") != d.Path:
		return fmt.Sprintf("not at %s", h.ByPath)
	case h.Rotational != "" && h.Rotational != rotational:
		return "rotational is " + rotational
	case h.Transport != "" && !strings.EqualFold(h.Transport, d.Transport):
		return fmt.Sprintf("transport is %s, not %s", d.Transport, h.Transport)
	}
	return ""
}

func (h Hints) decide(match []Disk) []Disk {
	switch {
	case h.Smallest:
		size := slices.MinFunc(match, func(a, b Disk) int { return cmp.Compare(a.SizeBytes, b.SizeBytes) }).SizeBytes
		match = slices.DeleteFunc(slices.Clone(match), func(d Disk) bool { return d.SizeBytes != size })
	case !h.First:
		return match
	}
	// First: by place, which does not move between boots as names do. Disks
	// whose place is unknown cannot be put in order.
	if h.First && !slices.ContainsFunc(match, func(d Disk) bool { return d.Path == "" }) {
		first := slices.MinFunc(match, func(a, b Disk) int { return strings.Compare(a.Path, b.Path) })
		match = slices.DeleteFunc(slices.Clone(match), func(d Disk) bool { return d.Path != first.Path })
	}
	return match
}

func (b Binding) is(d Disk) bool {
	return (b.Serial == "" || sameSerial(b.Serial, d.Serial)) && (b.WWN == "" || sameWWN(b.WWN, d.WWN))
}

func (b Binding) String() string {
	var s []string
	if b.Serial != "" {
		s = append(s, "serial "+b.Serial)
	}
	if b.WWN != "" {
		s = append(s, "WWN "+b.WWN)
	}
	return strings.Join(s, ", ")
}

func sameSerial(a, b string) bool {
	a, b = strings.TrimSpace(a), strings.TrimSpace(b)
	return a != "" && a == b
}

func sameWWN(a, b string) bool {
	a, b = bareWWN(a), bareWWN(b)
	return a != "" && a == b
}

func bareWWN(s string) string {
	s = strings.ToLower(strings.TrimSpace(s))
	for _, p := range []string{"wwn-", "naa.", "eui.", "0x"} {
		s = strings.TrimPrefix(s, p)
	}
	return s
}

func matchModel(pattern, model string) bool {
	p, m := strings.ToLower(strings.TrimSpace(pattern)), strings.ToLower(strings.TrimSpace(model))
	bare := strings.Trim(p, "*")
	switch front, back := strings.HasPrefix(p, "*"), strings.HasSuffix(p, "*"); {
	case front && back:
		return strings.Contains(m, bare)
	case front:
		return strings.HasSuffix(m, bare)
	case back:
		return strings.HasPrefix(m, bare)
	}
	return m == p
}

func names(disks []Disk) string {
	var s []string
	for _, d := range disks {
		s = append(s, d.String())
	}
	return strings.Join(s, "; ")
}
