package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/better-compute/bcd/agent/host"
)

func (in Inputs) config(ctx context.Context) Outcome {
	c, err := in.Config(ctx)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		path := c.Path
		if path == "" {
			path = "the configuration file"
		}
		return warned(path+" does not exist: this host has no gateway to join", "bcd join --help").without("gateway")
	case err != nil:
		return failed(err.Error(), "").without("gateway", "data directory")
	}
	detail := fmt.Sprintf("%s: gateway %s", c.Path, c.Gateway)
	if c.Site != "" {
		detail += ", site " + c.Site
	}
	if c.Gateway == "" {
		return warned(c.Path+": no gateway is set; add gateway = \"https://…\"", "").without("gateway")
	}
	switch perm := c.Mode.Perm(); {
	case perm&0o004 != 0:
		return warned(fmt.Sprintf("%s; others can read it (mode %04o)", detail, perm), "chmod o-rwx,g-w "+c.Path)
	case perm&0o022 != 0:
		who := "its group"
		if perm&0o002 != 0 {
			who = "others"
		}
		return warned(fmt.Sprintf("%s; %s can write it (mode %04o)", detail, who, perm), "chmod o-rwx,g-w "+c.Path)
	}
	return good(detail)
}

// nvml keeps the name that operators know, though the driver is asked through
// nvidia-smi.
func (in Inputs) nvml(ctx context.Context) Outcome {
	s, err := in.GPUs(ctx)
	if err == nil {
		detail := fmt.Sprintf("driver %s, %s", s.Driver, plural(len(s.GPUs), "GPU"))
		if s.Note != "" {
			return warned(detail+"; "+s.Note, "nvidia-smi")
		}
		return good(detail)
	}
	var o Outcome
	switch {
	case errors.Is(err, host.ErrNoGPUReader):
		o = warned(host.ErrNoGPUReader.Error(), "")
	case errors.Is(err, host.ErrNoNVIDIASMI):
		o = warned(host.ErrNoNVIDIASMI.Error(), "")
		if n := in.pciGPUs(ctx); n > 0 {
			o = warned(fmt.Sprintf("%s; the PCI bus shows %s", host.ErrNoNVIDIASMI, plural(n, "GPU")), "apt-get install nvidia-driver")
		}
	case errors.Is(err, host.ErrNoDevices):
		if n := in.pciGPUs(ctx); n > 0 {
			o = failed(fmt.Sprintf("%s; the PCI bus shows %s", err, plural(n, "GPU")), "dmesg | grep -i nvrm")
		} else {
			o = warned(err.Error(), "")
		}
	case errors.Is(err, host.ErrVersionMismatch):
		o = failed(err.Error(), "reboot")
	case errors.Is(err, host.ErrDriverNotLoaded):
		o = failed(err.Error(), "modprobe nvidia")
	case errors.Is(err, host.ErrProbeHung):
		o = failed(err.Error(), "dmesg | grep -i xid")
	default:
		o = failed(err.Error(), "nvidia-smi")
	}
	return o.without("gpus")
}

// pciGPUs counts the GPUs on the bus, 0 where it cannot be known.
func (in Inputs) pciGPUs(ctx context.Context) int {
	if in.Hardware == nil {
		return 0
	}
	h, err := in.Hardware(ctx)
	if err != nil {
		return 0
	}
	return h.PCIGPUs
}

func (in Inputs) hardware(ctx context.Context) Outcome {
	h, err := in.Hardware(ctx)
	if err != nil {
		return failed(err.Error(), "bcd hardware")
	}
	source := "host"
	if host.Fake {
		source = "fakehw"
	}
	var broken []string
	for _, s := range h.Sections {
		if s.Error != "" {
			broken = append(broken, s.Name+" ("+s.Error+")")
		}
	}
	detail := fmt.Sprintf("%s: %s, %s hashed", source, plural(h.PCIGPUs, "GPU"), plural(len(h.Sections), "inventory section"))
	if in.GPUs != nil && h.PCIGPUs > 0 {
		if s, err := in.GPUs(ctx); err == nil && len(s.GPUs) != h.PCIGPUs {
			return failed(fmt.Sprintf("%s; the PCI bus shows %s, nvidia-smi %d: a GPU is lost", detail, plural(h.PCIGPUs, "GPU"), len(s.GPUs)), "dmesg | grep -i xid")
		}
	}
	if len(broken) > 0 {
		return warned(detail+"; not read whole: "+strings.Join(broken, ", "), "bcd hardware")
	}
	return good(detail)
}

func (in Inputs) kvm(context.Context) Outcome {
	if in.KVM() {
		return good("/dev/kvm present")
	}
	return warned("/dev/kvm missing: this host cannot run VPS instances", "modprobe kvm_intel || modprobe kvm_amd")
}

func (in Inputs) iommu(context.Context) Outcome {
	if n := in.IOMMUUnits(); n > 0 {
		return good(plural(n, "IOMMU unit"))
	}
	return warned("no IOMMU: this host cannot pass GPUs through to VPS instances; turn it on in the firmware (VT-d, AMD-Vi) and on the kernel command line", "cat /proc/cmdline")
}

// wayBack is how a broken identity is mended; operators know this text.
const wayBack = "join again as root: bcd join --reset --yes, then bcd join"

func (in Inputs) identity(ctx context.Context) Outcome {
	id, err := in.Identity(ctx)
	switch {
	case errors.Is(err, ErrNotJoined):
		return warned("not joined", "bcd join")
	case err != nil:
		return failed(err.Error()+"; "+wayBack, "bcd join --reset --yes")
	}
	who := fmt.Sprintf("node %s (site %s, role %s)", id.NodeID, id.Site, id.Role)
	now := in.now()
	left := id.NotAfter.Sub(now)
	switch {
	case left <= 0:
		return failed(fmt.Sprintf("%s, certificate expired %s ago; %s", who, coarse(-left), wayBack), "bcd join --reset --yes")
	case now.Before(id.NotBefore):
		return failed(fmt.Sprintf("%s, certificate is valid only in %s: the clock is behind", who, coarse(id.NotBefore.Sub(now))), "timedatectl")
	case left < id.NotAfter.Sub(id.NotBefore)/overdueShare:
		return warned(fmt.Sprintf("%s, certificate valid for %s; its renewal is overdue", who, coarse(left)), "bcd status")
	}
	return good(fmt.Sprintf("%s, certificate valid for %s", who, coarse(left)))
}

// overdueShare: renewal is due at half of the life, so a quarter left means
// that it has been failing for as long.
const overdueShare = 4

// coarse prints a duration to the minute, a short one to the second.
func coarse(d time.Duration) string {
	if d >= time.Minute {
		return d.Truncate(time.Minute).String()
	}
	return d.Truncate(time.Second).String()
}

// Bounds of the clock's offset: a session is refused as CLOCK_SKEW beyond
// five minutes; five seconds is more than any synchronized clock shows.
const (
	offsetWarn = 5 * time.Second
	offsetFail = 5 * time.Minute
)

func (in Inputs) clock(context.Context) Outcome {
	c, err := in.Clock()
	if err != nil {
		return warned(err.Error(), "timedatectl")
	}
	offset, known := time.Duration(0), false
	if in.ServerTime != nil {
		if server, ok := in.ServerTime(); ok {
			offset, known = in.wall().Sub(server), true
		}
	}
	detail := "synchronized"
	if !c.Synchronized {
		detail = "the host clock is not synchronized"
	}
	if known {
		detail += fmt.Sprintf(", %s the gateway's time", offsetText(offset))
	}
	const remedy = "timedatectl set-ntp true"
	switch {
	case known && offset.Abs() > offsetFail:
		return failed(detail, remedy)
	case !c.Synchronized, known && offset.Abs() > offsetWarn:
		return warned(detail, remedy)
	}
	return good(detail)
}

func offsetText(d time.Duration) string {
	switch r := d.Round(time.Millisecond); {
	case r > 0:
		return r.String() + " ahead of"
	case r < 0:
		return (-r).String() + " behind"
	}
	return "equal to"
}

func (in Inputs) tpm(ctx context.Context) Outcome {
	t, err := in.TPM(ctx)
	switch {
	case err != nil:
		return warned(err.Error(), "ls /sys/class/tpm")
	case !t.Present:
		return good("no TPM: the node key is kept in a file")
	case t.Version == "1.2":
		return warned("TPM 1.2 cannot hold the node key, it is kept in a file; turn TPM 2.0 on in the firmware if the machine has it", "bcd hardware")
	}
	detail := "TPM " + t.Version + " present"
	if t.Manufacturer != "" {
		detail += ", " + t.Manufacturer
	}
	return good(detail)
}

// Bounds of free space: the journal may take 64 MiB, and an image of the
// daemon itself some 25 MiB twice.
const (
	diskWarn = 512 << 20
	diskFail = 64 << 20
)

func (in Inputs) disk(context.Context) Outcome {
	d, err := in.Disk()
	if err != nil {
		return failed(err.Error(), "df -h")
	}
	if d.TotalBytes == 0 {
		return good(d.Path + ": in memory")
	}
	detail := fmt.Sprintf("%s: %s of %s free", d.Path, host.Bytes(d.FreeBytes), host.Bytes(d.TotalBytes))
	switch {
	case d.FreeBytes < diskFail:
		return failed(detail+", too little for the journal", "df -h "+d.Path)
	case d.FreeBytes < diskWarn:
		return warned(detail, "df -h "+d.Path)
	}
	return good(detail)
}

// nearlyFull is the share of a bound, in percent, from which there is a
// warning.
const nearlyFull = 80

func (in Inputs) journal(ctx context.Context) Outcome {
	j, err := in.Journal(ctx)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return good("no journal yet")
	case err != nil:
		return failed(err.Error(), "bcd status")
	}
	detail := fmt.Sprintf("%s of %s, %s and %s not acknowledged", host.Bytes(j.Bytes), host.Bytes(j.LimitBytes), plural(j.Commands, "command"), plural(j.Events, "event"))
	switch {
	case j.Lost != "":
		return warned(detail+"; an earlier journal was damaged and is kept in "+j.Lost, "bcd status")
	case j.LimitBytes > 0 && j.Bytes >= j.LimitBytes, j.EventLimit > 0 && j.Events >= j.EventLimit:
		return failed(detail+": full, no command is accepted until the gateway acknowledges", "bcd status")
	case j.LimitBytes > 0 && j.Bytes*100 >= j.LimitBytes*nearlyFull, j.EventLimit > 0 && j.Events*100 >= j.EventLimit*nearlyFull:
		return warned(detail+": nearly full", "bcd status")
	}
	return good(detail)
}

func plural(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}
