package host

import (
	"encoding/json"
	"errors"
	"os"
	"reflect"
	"strings"
	"testing"
)

func TestReadings(t *testing.T) {
	for text, want := range map[string]Reading{
		"34 C": {34, Known}, "72.05 W": {72, Known}, "81559 MiB": {81559, Known}, "0 %": {0, Known}, "0": {0, Known}, "-3": {-3, Known}, "12%": {12, Known},
		"N/A": {}, "[N/A]": {}, "[Not Supported]": {}, "Not Supported": {}, "": {}, " ": {}, "Requested functionality has been deprecated": {},
		"ERR!": {0, Failed}, "[Unknown Error]": {0, Failed}, "Unknown Error": {0, Failed}, "[GPU requires reset]": {0, Failed}, "GPU is lost": {0, Failed}, "12 parsecs": {0, Failed},
		"99999999999999999999 W": {0, Failed},
	} {
		if got := reading(text, 1); got != want {
			t.Errorf("reading(%q) = %+v, want %+v", text, got, want)
		}
	}
	if got := reading("72.05 W", 1000); got != (Reading{72050, Known}) {
		t.Errorf("milliwatts %+v", got)
	}
	if got := sumReadings("0", "3", "N/A", ""); got != (Reading{3, Known}) {
		t.Errorf("sum %+v", got)
	}
	if got := sumReadings("0", "ERR!"); got != (Reading{0, Failed}) {
		t.Errorf("a clean sum with an unreadable part is not clean: %+v", got)
	}
	for _, r := range []Reading{{}, {7, Known}, {0, Known}, {0, Failed}} {
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var back Reading
		if err := json.Unmarshal(b, &back); err != nil || back != r {
			t.Errorf("%+v: %s, back %+v, %v", r, b, back, err)
		}
	}
}

func TestParseSMI(t *testing.T) {
	read := func(name string) []byte {
		b, err := os.ReadFile("testdata/" + name)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	num := func(n int64) Reading { return Reading{n, Known} }

	s, err := ParseSMI(read("smi-h100.xml"))
	if err != nil || s.Driver != "570.172.08" || len(s.GPUs) != 2 || s.Note != "" {
		t.Fatalf("%+v, %v", s, err)
	}
	want := GPUState{
		GPU:   GPU{UUID: "GPU-5f1c3b1e-9a02-4d1c-8f0e-3b2a1c0d9e8f", Name: "NVIDIA H100 80GB HBM3", Serial: "1654023012345", PCI: "0000:18:00.0", VBIOS: "96.00.99.00.01", MemoryMiB: 81559, MIG: "disabled"},
		Index: 0, BusyPercent: num(87), TemperatureC: num(61), PowerMilliwatts: num(540_120), LimitMilliwatts: num(700_000),
		MemoryUsedMiB: num(72909), MemoryTotalMiB: num(81559), UncorrectableECC: num(0), RemapPending: num(0), RemapFailed: num(0),
		MIGPending: "disabled", RecoveryAction: "None",
	}
	if s.GPUs[0] != want {
		t.Errorf("gpu 0\n got %+v\nwant %+v", s.GPUs[0], want)
	}
	if g := s.GPUs[1]; g.UncorrectableECC != num(2) || g.RemapPending != num(1) || g.RemapFailed != num(0) || g.RecoveryAction != "Drain and Reset" || g.MIG != "disabled" || g.MIGPending != "enabled" {
		t.Errorf("gpu 1 %+v", g)
	}

	// An A100 of the 470 driver, one half sick, the other with MIG instances:
	// older names, no recovery action, remapping cannot be said.
	s, err = ParseSMI(read("smi-a100-mig.xml"))
	if err != nil || len(s.GPUs) != 2 {
		t.Fatalf("%+v, %v", s, err)
	}
	if g := s.GPUs[0]; g.MIG != "enabled" || g.BusyPercent.State != Absent || g.RemapPending.State != Absent || g.RemapFailed.State != Absent || g.PowerMilliwatts != num(51_260) || g.LimitMilliwatts != num(400_000) || g.RecoveryAction != "" || g.Serial != "" {
		t.Errorf("mig %+v", g)
	}
	if g := s.GPUs[1]; g.TemperatureC.State != Failed || g.PowerMilliwatts.State != Failed || g.UncorrectableECC.State != Failed || g.MemoryTotalMiB.State != Failed || g.MemoryMiB != 0 {
		t.Errorf("sick %+v", g)
	}

	// Cut off in the middle: the GPUs before the cut are there.
	whole := read("smi-h100.xml")
	s, err = ParseSMI(whole[:strings.LastIndex(string(whole), "<uuid>")])
	if err != nil || len(s.GPUs) != 1 || s.Note == "" {
		t.Errorf("cut: %+v, %v", s, err)
	}
}

func TestComplaints(t *testing.T) {
	for text, want := range map[string]error{
		"No devices were found\n": ErrNoDevices,
		"Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.172\n":                                                       ErrVersionMismatch,
		"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.\n": ErrDriverNotLoaded,
		"<?xml version=\"1.0\" ?>\n<nvidia_smi_log><driver_version>570.1</driver_version><attached_gpus>0</attached_gpus></nvidia_smi_log>":                 ErrNoDevices,
	} {
		if _, err := ParseSMI([]byte(text)); !errors.Is(err, want) {
			t.Errorf("%q: %v, want %v", text, err, want)
		}
	}
	if _, err := ParseSMI([]byte("Segmentation fault")); err == nil || !strings.Contains(err.Error(), `"Segmentation fault"`) {
		t.Error(err)
	}
	if _, err := ParseSMI([]byte(strings.Repeat("<gpu></gpu>", maxGPUs+1))); err == nil {
		t.Error("no bound on the number of GPUs")
	}
}

func TestNormalPCI(t *testing.T) {
	for in, want := range map[string]string{
		"0000:05:00": "0000:05:00.0", "00000000:05:00.0": "0000:05:00.0", "05:00": "0000:05:00.0", "0000460E:00:00.0": "460e:00:00.0",
		"PCI:0018:01:00": "0018:01:00.0", "00010000:B3:1F.7": "10000:b3:1f.7", "": "", "xyz": "", "5:0": "", "0000:05:00.9": "",
	} {
		if got := NormalPCI(in); got != want {
			t.Errorf("NormalPCI(%q) = %q, want %q", in, got, want)
		}
	}
}

func FuzzParseSMI(f *testing.F) {
	for _, name := range []string{"smi-h100.xml", "smi-a100-mig.xml"} {
		b, err := os.ReadFile("testdata/" + name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte("No devices were found"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := ParseSMI(b)
		if err == nil && len(s.GPUs) == 0 {
			t.Error("no GPU and no error")
		}
		if _, err := Canonical(s); err != nil {
			t.Error(err)
		}
		again, _ := ParseSMI(b)
		if !reflect.DeepEqual(s, again) {
			t.Error("two answers for one text")
		}
	})
}
