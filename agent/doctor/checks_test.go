package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/bcd/agent/host"
)

var noon = time.Date(2026, 9, 26, 12, 0, 0, 0, time.UTC)

func source() string {
	if host.Fake {
		return "fakehw"
	}
	return "host"
}

func value[T any](v T, err error) func(context.Context) (T, error) {
	return func(context.Context) (T, error) { return v, err }
}

func gpus(n int, err error) func(context.Context) (host.GPUSample, error) {
	s := host.GPUSample{Driver: "570.172.08"}
	for range n {
		s.GPUs = append(s.GPUs, host.GPUState{})
	}
	return value(s, err)
}

func hardware(sections, pci int, broken string) func(context.Context) (Hardware, error) {
	h := Hardware{PCIGPUs: pci, Sections: make([]host.Section, sections)}
	if broken != "" {
		h.Sections[0] = host.Section{Name: "cpu", Error: broken}
	}
	return value(h, nil)
}

// The texts are what operators and the source document know: each is exact.
func TestTexts(t *testing.T) {
	config := func(mode fs.FileMode) func(context.Context) (Config, error) {
		return value(Config{Path: "/etc/bcd/config.toml", Gateway: "https://gw.eu-1.example.com", Site: "fsn1", Mode: mode}, nil)
	}
	identity := func(left, life time.Duration) func(context.Context) (Identity, error) {
		return value(Identity{NodeID: "node_01k5w", Site: "fsn1", Role: "node", NotBefore: noon.Add(left - life), NotAfter: noon.Add(left)}, nil)
	}
	clock := func(sync bool, err error) func() (host.Clock, error) {
		return func() (host.Clock, error) { return host.Clock{Synchronized: sync}, err }
	}
	serverAhead := func(d time.Duration) func() (time.Time, bool) {
		return func() (time.Time, bool) { return noon.Add(d), true }
	}
	tpm := func(v host.TPM) func(context.Context) (host.TPM, error) { return value(v, nil) }
	disk := func(free, total int64) func() (Disk, error) {
		return func() (Disk, error) {
			return Disk{Path: "/var/lib/bcd", FreeBytes: free, TotalBytes: total}, nil
		}
	}
	journal := func(j Journal) func(context.Context) (Journal, error) {
		j.LimitBytes, j.EventLimit = 64<<20, 10000
		return value(j, nil)
	}
	for _, test := range []struct {
		check  string
		in     Inputs
		status Status
		detail string
		remedy string
	}{
		{"config", Inputs{Config: config(0o640)}, OK, "/etc/bcd/config.toml: gateway https://gw.eu-1.example.com, site fsn1", ""},
		{"config", Inputs{Config: config(0o600)}, OK, "/etc/bcd/config.toml: gateway https://gw.eu-1.example.com, site fsn1", ""},
		{"config", Inputs{Config: config(0o644)}, Warn, "/etc/bcd/config.toml: gateway https://gw.eu-1.example.com, site fsn1; others can read it (mode 0644)", "chmod o-rwx,g-w /etc/bcd/config.toml"},
		{"config", Inputs{Config: config(0o660)}, Warn, "/etc/bcd/config.toml: gateway https://gw.eu-1.example.com, site fsn1; its group can write it (mode 0660)", "chmod o-rwx,g-w /etc/bcd/config.toml"},
		{"config", Inputs{Config: config(0o602)}, Warn, "/etc/bcd/config.toml: gateway https://gw.eu-1.example.com, site fsn1; others can write it (mode 0602)", "chmod o-rwx,g-w /etc/bcd/config.toml"},
		{"config", Inputs{Config: value(Config{Path: "firmware (SMBIOS type 11)", Gateway: "https://10.0.2.2:8443"}, nil)}, OK, "firmware (SMBIOS type 11): gateway https://10.0.2.2:8443", ""},
		{"config", Inputs{Config: value(Config{Path: "/etc/bcd/config.toml", Mode: 0o600}, nil)}, Warn, `/etc/bcd/config.toml: no gateway is set; add gateway = "https://…"`, ""},
		{"config", Inputs{Config: value(Config{}, errors.New("/etc/bcd/config.toml:3:1: unknown key gatway, did you mean gateway?"))}, Fail, "/etc/bcd/config.toml:3:1: unknown key gatway, did you mean gateway?", ""},
		{"config", Inputs{Config: value(Config{Path: "/etc/bcd/config.toml"}, fs.ErrNotExist)}, Warn, "/etc/bcd/config.toml does not exist: this host has no gateway to join", "bcd join --help"},

		{"nvml", Inputs{GPUs: gpus(8, nil)}, OK, "driver 570.172.08, 8 GPUs", ""},
		{"nvml", Inputs{GPUs: gpus(0, host.ErrNoNVIDIASMI)}, Warn, "nvidia-smi not found (no NVIDIA driver on this host)", ""},
		{"nvml", Inputs{GPUs: gpus(0, host.ErrNoNVIDIASMI), Hardware: hardware(12, 8, "")}, Warn, "nvidia-smi not found (no NVIDIA driver on this host); the PCI bus shows 8 GPUs", "apt-get install nvidia-driver"},
		{"nvml", Inputs{GPUs: gpus(0, host.ErrNoGPUReader)}, Warn, "NVML is not available in this build", ""},
		{"nvml", Inputs{GPUs: gpus(0, host.ErrNoDevices)}, Warn, "nvidia-smi: No devices were found", ""},
		{"nvml", Inputs{GPUs: gpus(0, host.ErrNoDevices), Hardware: hardware(12, 1, "")}, Fail, "nvidia-smi: No devices were found; the PCI bus shows 1 GPU", "dmesg | grep -i nvrm"},
		{"nvml", Inputs{GPUs: gpus(0, host.ErrVersionMismatch)}, Fail, "nvidia-smi: driver and library versions differ; the kernel module of another version is loaded", "reboot"},
		{"nvml", Inputs{GPUs: gpus(0, host.ErrDriverNotLoaded)}, Fail, "nvidia-smi: the NVIDIA kernel module is not loaded", "modprobe nvidia"},
		{"nvml", Inputs{GPUs: gpus(0, fmt.Errorf("%w (no answer in 3s)", host.ErrProbeHung))}, Fail, "nvidia-smi does not answer and was abandoned; a GPU is probably hung (no answer in 3s)", "dmesg | grep -i xid"},
		{"nvml", Inputs{GPUs: value(host.GPUSample{Driver: "570.172.08", GPUs: make([]host.GPUState, 7), Note: "GPU is lost"}, nil)}, Warn, "driver 570.172.08, 7 GPUs; GPU is lost", "nvidia-smi"},
		{"nvml", Inputs{GPUs: gpus(0, errors.New("strange"))}, Fail, "strange", "nvidia-smi"},

		{"hardware", Inputs{Hardware: hardware(12, 8, "")}, OK, source() + ": 8 GPUs, 12 inventory sections hashed", ""},
		{"hardware", Inputs{Hardware: hardware(12, 0, "no cpuinfo")}, Warn, source() + ": 0 GPUs, 12 inventory sections hashed; not read whole: cpu (no cpuinfo)", "bcd hardware"},
		{"hardware", Inputs{Hardware: hardware(12, 8, ""), GPUs: gpus(7, nil)}, Fail, source() + ": 8 GPUs, 12 inventory sections hashed; the PCI bus shows 8 GPUs, nvidia-smi 7: a GPU is lost", "dmesg | grep -i xid"},
		{"hardware", Inputs{Hardware: value(Hardware{}, errors.New("read the hardware: stopped"))}, Fail, "read the hardware: stopped", "bcd hardware"},

		{"kvm", Inputs{KVM: func() bool { return true }}, OK, "/dev/kvm present", ""},
		{"kvm", Inputs{KVM: func() bool { return false }}, Warn, "/dev/kvm missing: this host cannot run VPS instances", "modprobe kvm_intel || modprobe kvm_amd"},
		{"iommu", Inputs{IOMMUUnits: func() int { return 16 }}, OK, "16 IOMMU units", ""},
		{"iommu", Inputs{IOMMUUnits: func() int { return 0 }}, Warn, "no IOMMU: this host cannot pass GPUs through to VPS instances; turn it on in the firmware (VT-d, AMD-Vi) and on the kernel command line", "cat /proc/cmdline"},

		{"identity", Inputs{Identity: identity(14*time.Hour+12*time.Minute+31*time.Second, 24*time.Hour)}, OK, "node node_01k5w (site fsn1, role node), certificate valid for 14h12m0s", ""},
		{"identity", Inputs{Identity: identity(90*time.Minute, 24*time.Hour)}, Warn, "node node_01k5w (site fsn1, role node), certificate valid for 1h30m0s; its renewal is overdue", "bcd status"},
		{"identity", Inputs{Identity: identity(-3*time.Hour, 24*time.Hour)}, Fail, "node node_01k5w (site fsn1, role node), certificate expired 3h0m0s ago; join again as root: bcd join --reset --yes, then bcd join", "bcd join --reset --yes"},
		// The gateway's time counts, not the host's.
		{"identity", Inputs{Identity: identity(time.Hour, 24*time.Hour), ServerTime: serverAhead(2 * time.Hour)}, Fail, "node node_01k5w (site fsn1, role node), certificate expired 1h0m0s ago; join again as root: bcd join --reset --yes, then bcd join", "bcd join --reset --yes"},
		{"identity", Inputs{Identity: identity(48*time.Hour, 24*time.Hour)}, Fail, "node node_01k5w (site fsn1, role node), certificate is valid only in 24h0m0s: the clock is behind", "timedatectl"},
		{"identity", Inputs{Identity: value(Identity{}, ErrNotJoined)}, Warn, "not joined", "bcd join"},
		{"identity", Inputs{Identity: value(Identity{}, errors.New("node key does not match its certificate"))}, Fail, "node key does not match its certificate; join again as root: bcd join --reset --yes, then bcd join", "bcd join --reset --yes"},

		{"clock", Inputs{Clock: clock(true, nil)}, OK, "synchronized", ""},
		{"clock", Inputs{Clock: clock(true, nil), ServerTime: serverAhead(-12 * time.Millisecond)}, OK, "synchronized, 12ms ahead of the gateway's time", ""},
		{"clock", Inputs{Clock: clock(true, nil), ServerTime: serverAhead(0)}, OK, "synchronized, equal to the gateway's time", ""},
		{"clock", Inputs{Clock: clock(false, nil)}, Warn, "the host clock is not synchronized", "timedatectl set-ntp true"},
		{"clock", Inputs{Clock: clock(true, nil), ServerTime: serverAhead(6 * time.Second)}, Warn, "synchronized, 6s behind the gateway's time", "timedatectl set-ntp true"},
		{"clock", Inputs{Clock: clock(false, nil), ServerTime: serverAhead(time.Hour)}, Fail, "the host clock is not synchronized, 1h0m0s behind the gateway's time", "timedatectl set-ntp true"},
		{"clock", Inputs{Clock: clock(false, errors.New("clock: adjtimex: not permitted"))}, Warn, "clock: adjtimex: not permitted", "timedatectl"},

		{"tpm", Inputs{TPM: tpm(host.TPM{Present: true, Version: "2.0", Manufacturer: "IFX"})}, OK, "TPM 2.0 present, IFX", ""},
		{"tpm", Inputs{TPM: tpm(host.TPM{})}, OK, "no TPM: the node key is kept in a file", ""},
		{"tpm", Inputs{TPM: tpm(host.TPM{Present: true, Version: "1.2"})}, Warn, "TPM 1.2 cannot hold the node key, it is kept in a file; turn TPM 2.0 on in the firmware if the machine has it", "bcd hardware"},

		{"disk", Inputs{Disk: disk(10<<30, 100<<30)}, OK, "/var/lib/bcd: 10 GiB of 100 GiB free", ""},
		{"disk", Inputs{Disk: disk(100<<20, 100<<30)}, Warn, "/var/lib/bcd: 100 MiB of 100 GiB free", "df -h /var/lib/bcd"},
		{"disk", Inputs{Disk: disk(1<<20, 100<<30)}, Fail, "/var/lib/bcd: 1 MiB of 100 GiB free, too little for the journal", "df -h /var/lib/bcd"},
		{"disk", Inputs{Disk: disk(0, 0)}, OK, "/var/lib/bcd: in memory", ""},

		{"journal", Inputs{Journal: journal(Journal{Bytes: 1 << 20, Commands: 1, Events: 3})}, OK, "1 MiB of 64 MiB, 1 command and 3 events not acknowledged", ""},
		{"journal", Inputs{Journal: value(Journal{}, fs.ErrNotExist)}, OK, "no journal yet", ""},
		{"journal", Inputs{Journal: journal(Journal{Events: 8000})}, Warn, "0 B of 64 MiB, 0 commands and 8000 events not acknowledged: nearly full", "bcd status"},
		{"journal", Inputs{Journal: journal(Journal{Events: 10000})}, Fail, "0 B of 64 MiB, 0 commands and 10000 events not acknowledged: full, no command is accepted until the gateway acknowledges", "bcd status"},
		{"journal", Inputs{Journal: journal(Journal{Lost: "/var/lib/bcd/journal.db.damaged"})}, Warn, "0 B of 64 MiB, 0 commands and 0 events not acknowledged; an earlier journal was damaged and is kept in /var/lib/bcd/journal.db.damaged", "bcd status"},
		{"journal", Inputs{Journal: value(Journal{}, errors.New("journal: both meta pages are damaged"))}, Fail, "journal: both meta pages are damaged", "bcd status"},
	} {
		test.in.Now = func() time.Time { return noon }
		var check *Check
		for _, c := range Checks(test.in) {
			if c.ID == test.check {
				check = &c
			}
		}
		if check == nil {
			t.Errorf("%s: no such check", test.check)
			continue
		}
		o := check.Run(context.Background())
		want := Line{Status: test.status, Detail: test.detail, Remedy: test.remedy}
		if len(o.Lines) != 1 || o.Lines[0] != want {
			t.Errorf("%s\n got %+v\nwant %+v", test.check, o.Lines, want)
		}
	}
}

func known(n int64) host.Reading { return host.Reading{N: n, State: host.Known} }

func TestGPULines(t *testing.T) {
	base := host.GPUState{
		GPU:         host.GPU{UUID: "GPU-5f1c", Name: "NVIDIA H100 80GB HBM3", MIG: "disabled"},
		BusyPercent: known(87), TemperatureC: known(61), PowerMilliwatts: known(540_100), LimitMilliwatts: known(700_000),
		MemoryUsedMiB: known(72_909), MemoryTotalMiB: known(81_559), UncorrectableECC: known(0), RemapPending: known(0), RemapFailed: known(0),
		MIGPending: "disabled", RecoveryAction: "None",
	}
	const fine = "GPU-5f1c NVIDIA H100 80GB HBM3: 87% busy, 61 C, 540/700 W, 71.2/79.6 GiB"
	const reset = "nvidia-smi --gpu-reset -i GPU-5f1c"
	for _, test := range []struct {
		name   string
		change func(*host.GPUState)
		status Status
		detail string
		remedy string
	}{
		{"healthy", func(*host.GPUState) {}, OK, fine, ""},
		{"remap pending", func(g *host.GPUState) { g.RemapPending = known(1) }, Warn, fine + "; a row remap waits for a GPU reset", reset},
		{"mig pending", func(g *host.GPUState) { g.MIGPending = "enabled" }, Warn, fine + "; a MIG mode change waits for a GPU reset", reset},
		{"remap failed", func(g *host.GPUState) { g.RemapFailed = known(1) }, Fail, fine + "; row remapping failed", "nvidia-smi -q -i GPU-5f1c"},
		{"ecc", func(g *host.GPUState) { g.UncorrectableECC = known(3); g.RemapPending = known(1) }, Fail, fine + "; 3 uncorrectable ECC errors since the driver loaded; a row remap waits for a GPU reset", "nvidia-smi -q -i GPU-5f1c"},
		{"advice", func(g *host.GPUState) { g.RecoveryAction = "Drain and Reset" }, Warn, fine + "; the driver advises: Drain and Reset", reset},
		{"reboot", func(g *host.GPUState) { g.RecoveryAction = "Reboot" }, Warn, fine + "; the driver advises: Reboot", "reboot"},
		// While MIG instances are active the driver cannot say: no failure.
		{"mig active", func(g *host.GPUState) {
			g.MIG, g.MIGPending = "enabled", "enabled"
			g.BusyPercent, g.RemapPending, g.RemapFailed = host.Reading{}, host.Reading{}, host.Reading{}
		}, OK, "GPU-5f1c NVIDIA H100 80GB HBM3: n/a busy, 61 C, 540/700 W, 71.2/79.6 GiB", ""},
		{"sick", func(g *host.GPUState) { g.TemperatureC = host.Reading{State: host.Failed} }, Warn,
			"GPU-5f1c NVIDIA H100 80GB HBM3: 87% busy, error C, 540/700 W, 71.2/79.6 GiB; the driver cannot read its temperature", reset},
	} {
		g := base
		test.change(&g)
		want := Line{ID: "gpu/GPU-5f1c", Name: "gpu", Status: test.status, Detail: test.detail, Remedy: test.remedy}
		if got := gpuLine(g); got != want {
			t.Errorf("%s\n got %+v\nwant %+v", test.name, got, want)
		}
	}
}

// Without a sample there is no gpu line, and without a gateway none for it.
func TestDependents(t *testing.T) {
	r := Run(context.Background(), Inputs{
		GPUs:   gpus(0, host.ErrNoNVIDIASMI),
		Config: value(Config{Path: "c"}, fs.ErrNotExist),
		Disk:   func() (Disk, error) { return Disk{Path: "/var/lib/bcd"}, nil },
	})
	var ids []string
	for _, l := range r.Lines {
		ids = append(ids, l.ID)
	}
	if got := fmt.Sprint(ids); got != "[config nvml disk]" || len(r.Skipped) != 2 || r.Failed {
		t.Errorf("lines %s, skipped %+v", got, r.Skipped)
	}
}

// The machine this test runs on, whatever it is, gives a line for each check
// and none that is about the check itself.
func TestFromHost(t *testing.T) {
	in := FromHost(host.Live())
	in.Disk = func() (Disk, error) { return StatDisk(t.TempDir()) }
	r := Run(context.Background(), in)
	var names []string
	for _, l := range r.Lines {
		if l.Name != "gpu" {
			names = append(names, l.Name)
		}
		if strings.Contains(l.Detail, "the check itself") || l.Detail == "" {
			t.Errorf("%+v", l)
		}
	}
	if got := fmt.Sprint(names); got != "[nvml hardware kvm iommu clock tpm disk]" {
		t.Errorf("checks %s", got)
	}
	if _, err := StatDisk("/nonexistent"); err == nil || !strings.Contains(err.Error(), "/nonexistent") {
		t.Error(err)
	}
}
