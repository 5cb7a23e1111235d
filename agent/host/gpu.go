package host

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"strconv"
	"strings"
)

// Why there is no sample of the GPUs. Each is a different thing to do.
var (
	// ErrNoGPUReader: this build does not read GPUs (build tag nonvml).
	ErrNoGPUReader = errors.New("NVML is not available in this build")
	// ErrNoNVIDIASMI: the driver's tool is not installed.
	ErrNoNVIDIASMI = errors.New("nvidia-smi not found (no NVIDIA driver on this host)")
	// ErrNoDevices: the driver runs and sees no GPU.
	ErrNoDevices = errors.New("nvidia-smi: No devices were found")
	// ErrVersionMismatch: library and kernel module are of different versions.
	ErrVersionMismatch = errors.New("nvidia-smi: driver and library versions differ; the kernel module of another version is loaded")
	// ErrDriverNotLoaded: the tool is there and the kernel module is not.
	ErrDriverNotLoaded = errors.New("nvidia-smi: the NVIDIA kernel module is not loaded")
	// ErrProbeHung: nvidia-smi did not answer and was abandoned. On a sick
	// GPU it sleeps in the kernel where no signal reaches it.
	ErrProbeHung = errors.New("nvidia-smi does not answer and was abandoned; a GPU is probably hung")
)

// Reading is a value that nvidia-smi may not have: a number, not available
// (N/A, Not Supported), or failed (ERR!, Unknown Error). Absent is never 0.
type Reading struct {
	N int64
	// State is known, absent or failed. The zero Reading is absent.
	State ReadingState
}

// ReadingState tells the three cases of a [Reading] apart.
type ReadingState uint8

// The states of a reading.
const (
	Absent ReadingState = iota
	Known
	Failed
)

// Get returns the number and whether there is one.
func (r Reading) Get() (int64, bool) { return r.N, r.State == Known }

// MarshalJSON gives a number, null (absent) or the string "error".
func (r Reading) MarshalJSON() ([]byte, error) {
	switch r.State {
	case Known:
		return strconv.AppendInt(nil, r.N, 10), nil
	case Failed:
		return []byte(`"error"`), nil
	}
	return []byte("null"), nil
}

// UnmarshalJSON reads what MarshalJSON writes.
func (r *Reading) UnmarshalJSON(b []byte) error {
	switch string(b) {
	case "null":
		*r = Reading{}
	case `"error"`:
		*r = Reading{State: Failed}
	default:
		var n int64
		if err := json.Unmarshal(b, &n); err != nil {
			return fmt.Errorf("reading %s: %w", b, err)
		}
		*r = Reading{N: n, State: Known}
	}
	return nil
}

// GPUState is one GPU as it is now.
type GPUState struct {
	GPU
	Index           int     `json:"index"`
	BusyPercent     Reading `json:"busy_percent"`
	TemperatureC    Reading `json:"temperature_c"`
	PowerMilliwatts Reading `json:"power_mw"`
	LimitMilliwatts Reading `json:"power_limit_mw"`
	MemoryUsedMiB   Reading `json:"memory_used_mib"`
	MemoryTotalMiB  Reading `json:"memory_total_mib"`
	// UncorrectableECC counts errors since the driver was loaded.
	UncorrectableECC Reading `json:"uncorrectable_ecc"`
	// RemapPending and RemapFailed are 1 for yes and 0 for no. While MIG
	// instances are active the driver cannot say: absent, not a failure.
	RemapPending Reading `json:"remap_pending"`
	RemapFailed  Reading `json:"remap_failed"`
	// MIGPending is the MIG mode after the next reset: enabled, disabled or
	// empty.
	MIGPending string `json:"mig_pending,omitempty"`
	// RecoveryAction is what the driver advises (None, Reset, Reboot, Drain
	// P2P, Drain and Reset); empty when the driver has no such field.
	RecoveryAction string `json:"recovery_action,omitempty"`
}

// GPUSample is what nvidia-smi said.
type GPUSample struct {
	Driver string     `json:"driver"`
	GPUs   []GPUState `json:"gpus"`
	// Note has nvidia-smi's own complaint when it listed GPUs and still
	// failed, which is how a lost GPU shows while the others serve.
	Note string `json:"note,omitempty"`
}

// Bounds of nvidia-smi's answer: 8 GPUs with their processes are some
// 400 KiB; no machine has more than 64 GPUs.
const (
	maxSMIOutput = 16 << 20
	maxGPUs      = 64
)

// smiGPU names the elements of `nvidia-smi -q -x` that are read. Newer
// drivers renamed some; each alternative has its own field.
type smiGPU struct {
	ID      string `xml:"id,attr"`
	Name    string `xml:"product_name"`
	Serial  string `xml:"serial"`
	UUID    string `xml:"uuid"`
	VBIOS   string `xml:"vbios_version"`
	PCI     string `xml:"pci>pci_bus_id"`
	MIG     string `xml:"mig_mode>current_mig"`
	MIGNext string `xml:"mig_mode>pending_mig"`
	Action  string `xml:"gpu_recovery_action"`

	MemTotal string `xml:"fb_memory_usage>total"`
	MemUsed  string `xml:"fb_memory_usage>used"`
	Busy     string `xml:"utilization>gpu_util"`
	Temp     string `xml:"temperature>gpu_temp"`

	// 470 to 525: power_readings; from 530: gpu_power_readings, where from
	// 570 power_draw became average and instant.
	Power1 string `xml:"gpu_power_readings>power_draw"`
	Power2 string `xml:"gpu_power_readings>instant_power_draw"`
	Power3 string `xml:"gpu_power_readings>average_power_draw"`
	Power4 string `xml:"power_readings>power_draw"`
	Limit1 string `xml:"gpu_power_readings>current_power_limit"`
	Limit2 string `xml:"power_readings>power_limit"`
	Limit3 string `xml:"power_readings>enforced_power_limit"`

	// Ampere and later split SRAM and DRAM; Hopper splits SRAM again.
	ECC1 string `xml:"ecc_errors>volatile>dram_uncorrectable"`
	ECC2 string `xml:"ecc_errors>volatile>sram_uncorrectable"`
	ECC3 string `xml:"ecc_errors>volatile>sram_uncorrectable_parity"`
	ECC4 string `xml:"ecc_errors>volatile>sram_uncorrectable_secded"`
	ECC5 string `xml:"ecc_errors>volatile>double_bit>total"`

	RemapPending string `xml:"remapped_rows>remapped_row_pending"`
	RemapFailed  string `xml:"remapped_rows>remapped_row_failure"`
}

// ParseSMI reads the output of `nvidia-smi -q -x`. It takes what it can: a
// field it cannot read is absent or failed, and a document that is cut off
// still gives the GPUs before the cut, with Note saying so. Without any GPU
// the error says which of the known complaints the text is.
func ParseSMI(out []byte) (GPUSample, error) {
	var s GPUSample
	if len(out) > maxSMIOutput {
		return s, fmt.Errorf("nvidia-smi printed more than %d bytes", maxSMIOutput)
	}
	dec := xml.NewDecoder(strings.NewReader(string(out)))
	dec.Strict = false
	dec.CharsetReader = func(_ string, r io.Reader) (io.Reader, error) { return r, nil }
	for {
		token, err := dec.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			s.Note = clean("nvidia-smi's answer ends early: " + err.Error())
			break
		}
		start, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		switch start.Name.Local {
		case "driver_version":
			var v string
			if dec.DecodeElement(&v, &start) == nil {
				s.Driver = clean(v)
			}
		case "gpu":
			var raw smiGPU
			if err := dec.DecodeElement(&raw, &start); err != nil {
				s.Note = clean(fmt.Sprintf("gpu %d of nvidia-smi's answer: %v", len(s.GPUs), err))
				continue
			}
			if len(s.GPUs) == maxGPUs {
				return s, fmt.Errorf("nvidia-smi lists more than %d GPUs", maxGPUs)
			}
			s.GPUs = append(s.GPUs, raw.state(len(s.GPUs)))
		}
	}
	if len(s.GPUs) == 0 {
		return s, complaint(string(out))
	}
	return s, nil
}

// complaint finds which of nvidia-smi's refusals a text is.
func complaint(text string) error {
	switch {
	case strings.Contains(text, "No devices were found"):
		return ErrNoDevices
	case strings.Contains(text, "version mismatch"):
		return ErrVersionMismatch
	case strings.Contains(text, "couldn't communicate with the NVIDIA driver"), strings.Contains(text, "Driver Not Loaded"):
		return ErrDriverNotLoaded
	case strings.Contains(text, "<nvidia_smi_log"):
		return ErrNoDevices
	}
	return fmt.Errorf("nvidia-smi: not understood: %q", clean(text))
}

func (raw smiGPU) state(index int) GPUState {
	g := GPUState{
		Index: index,
		GPU: GPU{
			UUID: known(raw.UUID), Name: known(raw.Name), Serial: known(raw.Serial), VBIOS: known(raw.VBIOS),
			PCI: NormalPCI(firstNonEmpty(raw.PCI, raw.ID)), MIG: mode(raw.MIG),
		},
		BusyPercent:      reading(raw.Busy, 1),
		TemperatureC:     reading(raw.Temp, 1),
		PowerMilliwatts:  firstReading(1000, raw.Power1, raw.Power2, raw.Power3, raw.Power4),
		LimitMilliwatts:  firstReading(1000, raw.Limit1, raw.Limit2, raw.Limit3),
		MemoryUsedMiB:    reading(raw.MemUsed, 1),
		MemoryTotalMiB:   reading(raw.MemTotal, 1),
		UncorrectableECC: sumReadings(raw.ECC1, raw.ECC2, raw.ECC3, raw.ECC4, raw.ECC5),
		RemapPending:     yesNo(raw.RemapPending),
		RemapFailed:      yesNo(raw.RemapFailed),
		MIGPending:       mode(raw.MIGNext),
		RecoveryAction:   known(raw.Action),
	}
	g.MemoryMiB = g.MemoryTotalMiB.N
	return g
}

// unitSuffix is what nvidia-smi puts behind a number.
var unitSuffix = regexp.MustCompile(`^(-?[0-9]+(?:\.[0-9]+)?)\s*(%|C|W|MiB|MB)?$`)

// reading parses one field into units of 1/scale.
func reading(text string, scale int64) Reading {
	text = strings.TrimSpace(text)
	if m := unitSuffix.FindStringSubmatch(text); m != nil {
		f, err := strconv.ParseFloat(m[1], 64)
		if f = math.Round(f * float64(scale)); err == nil && math.Abs(f) < maxSafeInt {
			return Reading{N: int64(f), State: Known}
		}
		return Reading{State: Failed}
	}
	return notANumber(text)
}

// notANumber tells "the GPU has no such thing" from "the GPU could not say".
// nvidia-smi has several spellings of each, with brackets and without.
func notANumber(text string) Reading {
	switch strings.ToLower(strings.Trim(strings.TrimSpace(text), "[]")) {
	case "", "n/a", "not supported", "none", "not available", "insufficient permissions",
		"requested functionality has been deprecated", "not active", "disabled":
		return Reading{}
	}
	return Reading{State: Failed} // ERR!, Unknown Error, GPU is lost, GPU requires reset …
}

func firstReading(scale int64, texts ...string) Reading {
	failed := false
	for _, t := range texts {
		r := reading(t, scale)
		if r.State == Known {
			return r
		}
		failed = failed || r.State == Failed
	}
	if failed {
		return Reading{State: Failed}
	}
	return Reading{}
}

// sumReadings adds what is known; one failed part makes an otherwise clean
// sum failed, since it might have been the one that counts.
func sumReadings(texts ...string) Reading {
	var sum Reading
	failed := false
	for _, t := range texts {
		r := reading(t, 1)
		switch r.State {
		case Known:
			sum.N, sum.State = sum.N+r.N, Known
		case Failed:
			failed = true
		}
	}
	if failed && sum.N == 0 {
		return Reading{State: Failed}
	}
	return sum
}

func yesNo(text string) Reading {
	switch strings.ToLower(strings.TrimSpace(text)) {
	case "yes":
		return Reading{N: 1, State: Known}
	case "no":
		return Reading{State: Known}
	}
	return notANumber(text)
}

// known empties the spellings of "none", which are not names.
func known(text string) string {
	text = clean(text)
	if text == "None" {
		return text // gpu_recovery_action None is an answer
	}
	switch r := notANumber(text); {
	case r.State == Absent:
		return ""
	case strings.HasPrefix(text, "ERR!") || strings.EqualFold(strings.Trim(text, "[]"), "unknown error"):
		return ""
	}
	return text
}

func mode(text string) string {
	switch strings.ToLower(strings.TrimSpace(text)) {
	case "enabled":
		return "enabled"
	case "disabled":
		return "disabled"
	}
	return ""
}

func firstNonEmpty(texts ...string) string {
	for _, t := range texts {
		if strings.TrimSpace(t) != "" {
			return t
		}
	}
	return ""
}

// pciForm takes a PCI address apart: optional domain, bus, device, optional
// function.
var pciForm = regexp.MustCompile(`^(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?$`)

// NormalPCI turns each spelling of a PCI address (0000:05:00,
// 00000000:05:00.0, 05:00, 0000460E:00:00.0) into the kernel's: a domain of
// at least four digits, lower case, with function. What is no address gives "".
func NormalPCI(s string) string {
	m := pciForm.FindStringSubmatch(strings.TrimPrefix(strings.TrimSpace(s), "PCI:"))
	if m == nil {
		return ""
	}
	domain, _ := strconv.ParseUint(firstNonEmpty(m[1], "0"), 16, 32)
	return fmt.Sprintf("%04x:%s:%s.%s", domain, strings.ToLower(m[2]), strings.ToLower(m[3]), firstNonEmpty(m[4], "0"))
}
