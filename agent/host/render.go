package host

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// RenderHardware prints the facts as a table for people.
func RenderHardware(w io.Writer, f Facts) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(t, "%s\t%s\n", name, strings.Join(strings.Fields(fmt.Sprintf(format, args...)), " "))
	}
	row("system", "%s", orNone(join(" ", f.System.Vendor, f.System.Product)))
	if details := join(", ", label("serial", f.System.Serial), label("uuid", f.System.UUID), label("board serial", f.System.BoardSerial), label("chassis", f.System.ChassisType)); details != "" {
		row("", "%s", details)
	}
	row("firmware", "%s, secure boot %s", join(" ", f.Firmware.Vendor, f.Firmware.Version, f.Firmware.Date, f.Firmware.Mode), f.Firmware.SecureBoot)
	row("cpu", "%s, %s", orNone(f.CPU.Model), join(", ", count(f.CPU.Sockets, "socket"), count(f.CPU.Cores, "core"), count(f.CPU.Threads, "thread"), f.CPU.Arch))
	row("memory", "%s%s", Bytes(f.Memory.TotalBytes), dimmSummary(f.Memory))
	for _, n := range f.NUMA {
		row(fmt.Sprintf("numa %d", n.Node), "cpus %s, %s, distances %s", orNone(n.CPUs), Bytes(n.MemoryBytes), strings.Trim(fmt.Sprint(n.Distances), "[]"))
	}
	row("gpus", "%d on the PCI bus%s", f.GPU.PCICount, gpuSummary(f.GPU))
	for _, g := range f.GPU.Devices {
		row("", "%s", join(" ", g.PCI, g.UUID, g.Name))
	}
	row("disks", "%d", len(f.Block))
	for _, b := range f.Block {
		kind := ""
		if b.Rotational {
			kind = "rotational"
		}
		row("", "%s", join(" ", b.Name, Bytes(b.SizeBytes), b.Transport, b.Model, label("serial", b.Serial), kind, b.ID))
	}
	row("nics", "%d", len(f.Net))
	links := map[string]Link{}
	for _, l := range f.Link {
		links[l.Name] = l
	}
	for _, n := range f.Net {
		row("", "%s %s", join(" ", n.Name, n.MAC, n.Driver, n.PCI), linkSummary(links[n.Name]))
	}
	row("pci", "%s", count(len(f.PCI), "function"))
	row("tpm", "%s", tpmSummary(f.TPM))
	row("kernel", "%s", join(" ", f.Kernel.Release, f.Kernel.Arch, f.Kernel.OSName))
	row("boot", "%s", join(" ", f.Boot.Mode, f.Boot.Current, f.Boot.Label))
	row("iommu", "%s", count(f.Kernel.IOMMUUnits, "unit"))
	row("hardware key", "%s", firstNonEmpty(f.HardwareKey, f.HardwareKeyNote))
	fmt.Fprintln(t, "\nsection\tsha256")
	for _, s := range f.Sections() {
		fmt.Fprintf(t, "%s\t%s", s.Name, s.Hex())
		if s.Error != "" {
			fmt.Fprintf(t, "  incomplete: %s", s.Error)
		}
		fmt.Fprintln(t)
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("print the hardware: %w", err)
	}
	return nil
}

// RenderHardwareJSON prints the facts and the hash of each section as one
// JSON object for programs.
func RenderHardwareJSON(w io.Writer, f Facts) error {
	hashes := map[string]string{}
	for _, s := range f.Sections() {
		hashes[s.Name] = s.Hex()
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	err := enc.Encode(struct {
		SchemaVersion int `json:"schema_version"`
		Facts
		Hashes map[string]string `json:"section_sha256"`
	}{1, f, hashes})
	if err != nil {
		return fmt.Errorf("print the hardware: %w", err)
	}
	return nil
}

// Bytes prints a size in binary units with at most one digit behind the
// point.
func Bytes(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	value, unit := float64(n), ""
	for _, unit = range []string{"KiB", "MiB", "GiB", "TiB", "PiB"} {
		value /= 1024
		if value < 1024 {
			break
		}
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", value), ".0") + " " + unit
}

func join(sep string, parts ...string) string {
	var kept []string
	for _, p := range parts {
		if p != "" {
			kept = append(kept, p)
		}
	}
	return strings.Join(kept, sep)
}

func label(name, value string) string {
	if value == "" {
		return ""
	}
	return name + " " + value
}

func orNone(s string) string {
	if s == "" {
		return "unknown"
	}
	return s
}

func count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

func dimmSummary(m Memory) string {
	if len(m.DIMMs) == 0 {
		return ""
	}
	d := m.DIMMs[0]
	return fmt.Sprintf(", %s of %s", count(len(m.DIMMs), "module"), join(" ", Bytes(d.SizeMiB<<20), d.Type))
}

func gpuSummary(g GPUs) string {
	if g.Reader != "nvidia-smi" {
		return ""
	}
	return fmt.Sprintf(", %d in nvidia-smi, driver %s", len(g.Devices), g.Driver)
}

func linkSummary(l Link) string {
	if !l.Carrier {
		return "no link"
	}
	speed := "link"
	if l.SpeedMbps > 0 {
		speed = fmt.Sprintf("%d Mbit/s", l.SpeedMbps)
	}
	if n := l.Neighbour; n != nil {
		speed += ", to " + join(" ", firstNonEmpty(n.SystemName, n.ChassisID), n.PortID)
	}
	return speed
}

func tpmSummary(t TPM) string {
	if !t.Present {
		return "none"
	}
	return join(" ", firstNonEmpty(t.Version, "of unknown version"), t.Manufacturer, t.Interface)
}
