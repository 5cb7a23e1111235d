package host

import (
	"regexp"
	"strconv"
	"strings"
)

// Advice is what NVIDIA's catalogue says to do about an XID. Most XIDs say
// nothing about the GPU: a faulty program makes them. So an XID is not a
// condition by itself; its advice is.
type Advice string

// The advices, from least to most.
const (
	AdviceIgnore     Advice = "ignore"
	AdviceRestartApp Advice = "restart_app"
	// AdviceWorkflow: the number alone decides nothing, the details do.
	AdviceWorkflow  Advice = "workflow"
	AdviceRestartVM Advice = "restart_vm"
	AdviceResetGPU  Advice = "reset_gpu"
	AdviceRestart   Advice = "restart_machine"
	// AdviceUnknown: not in the catalogue.
	AdviceUnknown Advice = "unknown"
)

// NeedsReset reports whether the GPU must not take new work before a reset or
// a restart.
func (a Advice) NeedsReset() bool { return a == AdviceResetGPU || a == AdviceRestart }

// catalogue is NVIDIA's XID catalogue as of October 2025. Of 63 and 64 (row
// remapping recorded, not recorded) the remapping state that nvidia-smi shows
// says more: it survives a lost log.
var catalogue = []struct {
	advice Advice
	ranges [][2]int
}{
	{AdviceResetGPU, [][2]int{{46, 46}, {62, 62}, {64, 64}, {95, 95}, {109, 110}, {119, 120}, {136, 136}, {140, 140}, {143, 143}, {155, 156}, {158, 158}}},
	{AdviceRestart, [][2]int{{79, 79}}},
	{AdviceRestartVM, [][2]int{{151, 151}}},
	{AdviceWorkflow, [][2]int{{45, 45}, {48, 48}, {74, 74}, {144, 150}, {154, 154}}},
	{AdviceIgnore, [][2]int{{37, 38}, {43, 44}, {63, 63}, {66, 67}, {92, 93}, {106, 107}, {121, 121}, {137, 137}, {141, 141}, {152, 153}, {157, 157}, {160, 161}}},
	{AdviceRestartApp, [][2]int{{8, 8}, {11, 11}, {13, 13}, {25, 25}, {31, 32}, {39, 41}, {60, 60}, {68, 72}, {75, 77}, {80, 80}, {82, 86}, {88, 89}, {94, 94}, {96, 105}, {126, 135}, {139, 139}}},
}

// AdviceFor returns the catalogue's advice for an XID.
func AdviceFor(xid int) Advice {
	for _, entry := range catalogue {
		for _, r := range entry.ranges {
			if xid >= r[0] && xid <= r[1] {
				return entry.advice
			}
		}
	}
	return AdviceUnknown
}

// GPUFault is what the kernel log says about a GPU.
type GPUFault struct {
	// XID is the number, or 0 for a GPU that fell off the bus without one.
	XID    int    `json:"xid"`
	PCI    string `json:"pci"` // as [NormalPCI] gives it
	Advice Advice `json:"advice"`
	// SubCode is the NVLink error's sub-code (XIDs 144 to 150), -1: none.
	SubCode int `json:"sub_code"`
	// RecoveryAction is what the driver advises now (XID 154).
	RecoveryAction string `json:"recovery_action,omitempty"`
	Detail         string `json:"detail,omitempty"`
}

var (
	xidLine = regexp.MustCompile(`NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): ([0-9]{1,4})(?:, ?|$)(.*)`)
	// The one-line form of a GPU that is gone.
	goneLine = regexp.MustCompile(`NVRM: GPU ([0-9a-fA-F:.]+): GPU has fallen off the bus`)
	// The three-line form: which GPU, its PCI ids, and what it did.
	goneFirst = regexp.MustCompile(`NVRM: The NVIDIA GPU ([0-9a-fA-F:.]+)\s*$`)
	goneLast  = regexp.MustCompile(`NVRM: fallen off the bus and is not responding`)

	recoveryChange = regexp.MustCompile(`recovery action changed from 0x[0-9a-fA-F]+ \([^)]*\) to (0x[0-9a-fA-F]+) \(([^)]*)\)`)
	firstWord      = regexp.MustCompile(`\(0x([0-9a-fA-F]{1,8})\b`)
)

// recoveryAdvice is by the number, since the words differ between drivers.
var recoveryAdvice = map[string]Advice{
	"0x0": AdviceIgnore, "0x1": AdviceResetGPU, "0x2": AdviceRestart, "0x3": AdviceWorkflow, "0x4": AdviceResetGPU,
}

// goneWindow is how many records may come between the first and the last of
// the three lines: other CPUs log in between.
const goneWindow = 16

// FaultScanner finds GPU faults in the kernel log. It is a step function: it
// holds the state of one log and does no I/O.
type FaultScanner struct {
	pending string // PCI address of the first of three lines
	left    int
}

// Step takes the text of one record and returns the fault it ends, if any.
func (s *FaultScanner) Step(text string) (GPUFault, bool) {
	if s.left > 0 {
		s.left--
	}
	if m := xidLine.FindStringSubmatch(text); m != nil {
		return xidFault(m[1], m[2], m[3])
	}
	if m := goneLine.FindStringSubmatch(text); m != nil {
		return gone(m[1])
	}
	if m := goneFirst.FindStringSubmatch(text); m != nil {
		s.pending, s.left = m[1], goneWindow
		return GPUFault{}, false
	}
	if s.left > 0 && goneLast.MatchString(text) {
		s.left = 0
		return gone(s.pending)
	}
	return GPUFault{}, false
}

func gone(pci string) (GPUFault, bool) {
	pci = NormalPCI(pci)
	return GPUFault{PCI: pci, Advice: AdviceRestart, SubCode: -1, Detail: "GPU has fallen off the bus"}, pci != ""
}

func xidFault(pci, number, detail string) (GPUFault, bool) {
	xid, err := strconv.Atoi(number)
	f := GPUFault{XID: xid, PCI: NormalPCI(pci), Advice: AdviceFor(xid), SubCode: -1, Detail: clean(detail)}
	if err != nil || f.PCI == "" {
		return GPUFault{}, false
	}
	switch {
	case xid >= 144 && xid <= 150:
		// The sub-code is bits 20 to 25 of the first word.
		if m := firstWord.FindStringSubmatch(detail); m != nil {
			if word, err := strconv.ParseUint(m[1], 16, 32); err == nil {
				f.SubCode = int(word >> 20 & 0x3f)
			}
		}
	case xid == 154:
		if m := recoveryChange.FindStringSubmatch(detail); m != nil {
			f.RecoveryAction = clean(m[2])
			if advice, ok := recoveryAdvice[strings.ToLower(m[1])]; ok {
				f.Advice = advice
			}
		}
	}
	return f, true
}
