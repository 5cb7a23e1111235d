package host

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Stall is one line of pressure stall information: the share of time that
// tasks waited, over 10, 60 and 300 s, in hundredths of a percent (so 10000
// is always), and the total in microseconds since boot.
type Stall struct {
	Avg10       int64 `json:"avg10"`
	Avg60       int64 `json:"avg60"`
	Avg300      int64 `json:"avg300"`
	TotalMicros int64 `json:"total_us"`
}

// Pressure is one resource's pressure (Documentation/accounting/psi.rst).
// Some is time in which at least one task waited, Full in which all did.
type Pressure struct {
	Some Stall `json:"some"`
	Full Stall `json:"full"`
}

// pressureResources are the files of /proc/pressure that matter here.
var pressureResources = []string{"cpu", "memory", "io"}

// ReadPressure reads the pressure of cpu, memory and io. A kernel without
// pressure stall information gives an error for each.
func ReadPressure(r Roots) (map[string]Pressure, error) {
	out := map[string]Pressure{}
	var failed error
	for _, name := range pressureResources {
		b, err := readFile(r.Proc, "pressure", name)
		if err == nil {
			var p Pressure
			if p, err = ParsePressure(string(b)); err == nil {
				out[name] = p
				continue
			}
		}
		failed = errors.Join(failed, fmt.Errorf("pressure of %s: %w", name, err))
	}
	return out, failed
}

// ParsePressure parses one file of /proc/pressure. The line "full" is missing
// for cpu before Linux 5.13.
func ParsePressure(text string) (Pressure, error) {
	var p Pressure
	seen := false
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		stall, err := parseStall(fields[1:])
		if err != nil {
			return p, err
		}
		switch fields[0] {
		case "some":
			p.Some, seen = stall, true
		case "full":
			p.Full = stall
		}
	}
	if !seen {
		return p, errors.New("no line \"some\"")
	}
	return p, nil
}

func parseStall(fields []string) (Stall, error) {
	var s Stall
	for _, field := range fields {
		key, value, _ := strings.Cut(field, "=")
		var err error
		switch key {
		case "avg10":
			s.Avg10, err = hundredths(value)
		case "avg60":
			s.Avg60, err = hundredths(value)
		case "avg300":
			s.Avg300, err = hundredths(value)
		case "total":
			s.TotalMicros, err = strconv.ParseInt(value, 10, 64)
		}
		if err != nil {
			return s, fmt.Errorf("%s: %w", key, err)
		}
	}
	return s, nil
}

// hundredths parses the kernel's two decimals exactly.
func hundredths(s string) (int64, error) {
	whole, fraction, _ := strings.Cut(s, ".")
	if len(fraction) != 2 {
		return 0, fmt.Errorf("%q is not a number with two decimals", s)
	}
	n, err := strconv.ParseUint(whole+fraction, 10, 31)
	return int64(n), err
}
