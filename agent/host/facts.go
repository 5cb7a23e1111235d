package host

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
)

// Facts is everything the inventory knows, typed. Sections are made of it;
// `bcd hardware` prints it. JSON names are stable.
type Facts struct {
	System   System     `json:"system"`
	Firmware Firmware   `json:"firmware"`
	CPU      CPU        `json:"cpu"`
	Memory   Memory     `json:"memory"`
	NUMA     []NUMANode `json:"numa"`
	PCI      []PCI      `json:"pci"`
	Block    []Block    `json:"block"`
	Net      []NIC      `json:"net"`
	Link     []Link     `json:"link"`
	TPM      TPM        `json:"tpm"`
	GPU      GPUs       `json:"gpu"`
	Kernel   Kernel     `json:"kernel"`
	Boot     Boot       `json:"boot"`
	// HardwareKey is the machine's hash (see [Facts.hardwareKey]), hex; empty
	// when the machine gives nothing to make it of.
	HardwareKey string `json:"hardware_key,omitempty"`
	// HardwareKeyNote says what the key could not be made of.
	HardwareKeyNote string `json:"hardware_key_note,omitempty"`
	// Errors has, by section name, why a section is not whole.
	Errors map[string]string `json:"errors,omitempty"`
}

// System is the machine as its maker labels it (SMBIOS types 1 to 3), or as
// the device tree does where there is no SMBIOS.
type System struct {
	Vendor        string `json:"vendor,omitempty"`
	Product       string `json:"product,omitempty"`
	Version       string `json:"version,omitempty"`
	Serial        string `json:"serial,omitempty"`
	UUID          string `json:"uuid,omitempty"`
	SKU           string `json:"sku,omitempty"`
	Family        string `json:"family,omitempty"`
	BoardVendor   string `json:"board_vendor,omitempty"`
	BoardProduct  string `json:"board_product,omitempty"`
	BoardSerial   string `json:"board_serial,omitempty"`
	ChassisType   string `json:"chassis_type,omitempty"`
	ChassisVendor string `json:"chassis_vendor,omitempty"`
	ChassisSerial string `json:"chassis_serial,omitempty"`
	AssetTag      string `json:"asset_tag,omitempty"`
	// Source is smbios, devicetree or none.
	Source string `json:"source"`
}

// Firmware is the boot firmware. Mode is uefi or bios; SecureBoot is enabled,
// disabled or unknown (efivarfs not mounted, or no such variable).
type Firmware struct {
	Vendor     string `json:"vendor,omitempty"`
	Version    string `json:"version,omitempty"`
	Date       string `json:"date,omitempty"`
	Mode       string `json:"mode"`
	Bits       int64  `json:"bits,omitempty"`
	SecureBoot string `json:"secure_boot"`
}

// CPU describes the processors. Threads are the present ones, online or not;
// sockets and cores are of those whose topology the kernel shows.
type CPU struct {
	Model     string   `json:"model,omitempty"`
	Vendor    string   `json:"vendor,omitempty"`
	Arch      string   `json:"arch"`
	Sockets   int      `json:"sockets"`
	Cores     int      `json:"cores"`
	Threads   int      `json:"threads"`
	Microcode string   `json:"microcode,omitempty"`
	Flags     []string `json:"flags,omitempty"`
}

// Memory is the installed memory. TotalBytes is the sum of the modules, else
// of the kernel's memory blocks, else MemTotal rounded up to 64 MiB: MemTotal
// itself differs by some KiB from boot to boot. Source says which.
type Memory struct {
	TotalBytes int64  `json:"total_bytes"`
	Source     string `json:"source"`
	DIMMs      []DIMM `json:"dimms"`
	EmptySlots int    `json:"empty_slots"`
}

// NUMANode is one memory node; Distances are to all nodes in order, 10 is
// itself (ACPI 6.5 section 5.2.17).
type NUMANode struct {
	Node        int    `json:"node"`
	CPUs        string `json:"cpus"`
	MemoryBytes int64  `json:"memory_bytes"`
	Distances   []int  `json:"distances"`
}

// PCI is one PCI function; ids and class are lower-case hexadecimal without
// prefix. SR-IOV virtual functions are left out: they are configuration.
type PCI struct {
	Address    string `json:"address"`
	Vendor     string `json:"vendor"`
	Device     string `json:"device"`
	Class      string `json:"class"`
	Revision   string `json:"revision,omitempty"`
	SubVendor  string `json:"subsystem_vendor,omitempty"`
	SubDevice  string `json:"subsystem_device,omitempty"`
	NUMANode   int    `json:"numa_node"` // -1: none
	Driver     string `json:"driver,omitempty"`
	IOMMUGroup string `json:"iommu_group,omitempty"`
}

// Block is one disk. ID names it whatever the kernel calls it today: its
// WWID, else its serial number, else its place (Path).
type Block struct {
	ID            string `json:"id"`
	Name          string `json:"name,omitempty"` // kernel name; not hashed
	WWN           string `json:"wwn,omitempty"`
	Serial        string `json:"serial,omitempty"`
	Model         string `json:"model,omitempty"`
	Firmware      string `json:"firmware,omitempty"`
	SizeBytes     int64  `json:"size_bytes"`
	LogicalBytes  int64  `json:"logical_sector_bytes"`
	PhysicalBytes int64  `json:"physical_sector_bytes"`
	Rotational    bool   `json:"rotational"`
	Removable     bool   `json:"removable"`
	ReadOnly      bool   `json:"read_only"`
	// Transport is nvme, sata, sas, scsi, virtio, usb, mmc, fc, iscsi or
	// unknown.
	Transport string `json:"transport"`
	// Path is where the disk is plugged in: the PCI function and the place
	// behind it, for example pci-0000:01:00.0-nvme-1.
	Path string `json:"path,omitempty"`
}

// NIC is one physical network interface.
type NIC struct {
	// MAC is the permanent address where the driver tells it, else the
	// current one.
	MAC       string `json:"mac"`
	Permanent bool   `json:"permanent"`
	Name      string `json:"name,omitempty"` // kernel name; not hashed
	Driver    string `json:"driver,omitempty"`
	Bus       string `json:"bus,omitempty"` // pci, virtio, usb, platform …
	PCI       string `json:"pci,omitempty"`
	NUMANode  int    `json:"numa_node"`
	// PortID tells ports apart that share one PCI function.
	PortID string `json:"port_id,omitempty"`
}

// Link is what is plugged into a NIC now. It is a section of its own because
// it changes without the machine changing.
type Link struct {
	MAC       string     `json:"mac"`
	Name      string     `json:"name"`
	Carrier   bool       `json:"carrier"`
	SpeedMbps int64      `json:"speed_mbps,omitempty"` // 0: unknown
	MTU       int64      `json:"mtu,omitempty"`
	Neighbour *Neighbour `json:"neighbour,omitempty"`
}

// TPM is the trusted platform module. Version is 2.0, 1.2 or empty.
type TPM struct {
	Present      bool   `json:"present"`
	Version      string `json:"version,omitempty"`
	Manufacturer string `json:"manufacturer,omitempty"`
	Interface    string `json:"interface,omitempty"`
}

// GPUs is the GPUs: those the PCI bus shows and those the driver's tool
// shows. When the counts differ a GPU is lost, whatever the log says.
type GPUs struct {
	PCICount int `json:"pci_count"`
	// Reader is nvidia-smi, none (not installed or not in this build), or
	// failed.
	Reader  string `json:"reader"`
	Driver  string `json:"driver,omitempty"`
	Devices []GPU  `json:"devices"`
}

// GPU is what does not change about a GPU. Its state is in [GPUSample].
type GPU struct {
	UUID      string `json:"uuid"`
	Name      string `json:"name"`
	Serial    string `json:"serial,omitempty"`
	PCI       string `json:"pci"`
	VBIOS     string `json:"vbios,omitempty"`
	MemoryMiB int64  `json:"memory_mib,omitempty"`
	MIG       string `json:"mig,omitempty"` // enabled, disabled or empty
}

// Kernel is the running system.
type Kernel struct {
	Arch      string `json:"arch"`
	Release   string `json:"release,omitempty"`
	Build     string `json:"build,omitempty"`
	OSID      string `json:"os_id,omitempty"`
	OSVersion string `json:"os_version,omitempty"`
	OSName    string `json:"os_name,omitempty"`
	// IOMMUUnits counts the IOMMUs the kernel runs.
	IOMMUUnits int `json:"iommu_units"`
}

// Boot is where this boot came from: the only section that another boot of the
// same machine and system may change. Current and Label are empty where the
// firmware does not say.
type Boot struct {
	// Mode is uefi, bios or devicetree.
	Mode string `json:"mode"`
	// Current is the firmware's boot entry, such as Boot0004; Label is how the
	// entry calls itself.
	Current string `json:"current,omitempty"`
	Label   string `json:"label,omitempty"`
}

// SectionNames is the order in which sections come.
var SectionNames = []string{"system", "firmware", "cpu", "memory", "numa", "pci", "block", "net", "link", "tpm", "gpu", "kernel", "boot"}

// Sections encodes the facts. A list is wrapped in an object under the
// section's own name, so that each section is an object.
func (f Facts) Sections() []Section {
	values := map[string]any{
		"system": f.System, "firmware": f.Firmware, "cpu": f.CPU, "memory": f.Memory,
		"numa": list("numa", f.NUMA), "pci": list("pci", f.PCI),
		"block": list("block", unnamedDisks(f.Block)), "net": list("net", unnamedNICs(f.Net)),
		"link": list("link", f.Link), "tpm": f.TPM, "gpu": f.GPU, "kernel": f.Kernel,
		"boot": f.Boot,
	}
	sections := make([]Section, 0, len(SectionNames))
	for _, name := range SectionNames {
		s := Section{Name: name, Error: f.Errors[name]}
		var err error
		if s.JSON, err = Canonical(values[name]); err == nil && len(s.JSON) > MaxSectionBytes {
			err = fmt.Errorf("section is %d bytes, more than %d", len(s.JSON), MaxSectionBytes)
		}
		if err != nil {
			s.JSON, s.Error = []byte("{}"), joinText(s.Error, err.Error())
		}
		s.SHA256 = sha256.Sum256(s.JSON)
		sections = append(sections, s)
	}
	return sections
}

func list[T any](name string, items []T) map[string][]T {
	if items == nil {
		items = []T{}
	}
	return map[string][]T{name: items}
}

func unnamedDisks(disks []Block) []Block {
	out := slices.Clone(disks)
	for i := range out {
		out[i].Name = ""
	}
	return out
}

func unnamedNICs(nics []NIC) []NIC {
	out := slices.Clone(nics)
	for i := range out {
		out[i].Name = ""
	}
	return out
}

// fail notes an error of a section; a nil error is none.
func (f *Facts) fail(section string, err error) {
	if err == nil {
		return
	}
	if f.Errors == nil {
		f.Errors = map[string]string{}
	}
	f.Errors[section] = joinText(f.Errors[section], err.Error())
}

func joinText(a, b string) string {
	if a == "" {
		return clean(b)
	}
	return clean(a + "; " + b)
}

// hardwareKey makes the hash by which a control plane knows the machine
// again: SHA-256 over the canonical JSON
//
//	{"board_serial":…,"macs":[…],"serial":…,"uuid":…,"v":1}
//
// of the SMBIOS system UUID, system serial, board serial and the sorted
// permanent MACs of the NICs that are part of the machine (not on USB, not
// virtual functions). Vendors' placeholders count as absent, and what is
// absent is an empty string, so the key is still stable. A machine with
// neither a UUID, a serial nor a permanent MAC has no key, and the note says
// so: two of those must not become one machine.
func (f Facts) hardwareKey() (key, note string) {
	macs := []string{}
	for _, n := range f.Net {
		if n.Permanent && n.Bus != "usb" {
			macs = append(macs, n.MAC)
		}
	}
	slices.Sort(macs)
	macs = slices.Compact(macs)
	if f.System.UUID == "" && f.System.Serial == "" && f.System.BoardSerial == "" && len(macs) == 0 {
		return "", "no system UUID, no serial number and no permanent MAC address: nothing tells this machine from another"
	}
	b, err := Canonical(map[string]any{
		"v": 1, "uuid": f.System.UUID, "serial": f.System.Serial, "board_serial": f.System.BoardSerial, "macs": macs,
	})
	if err != nil { // strings and one small integer always encode
		return "", errors.Join(errors.New("hardware key"), err).Error()
	}
	return fmt.Sprintf("%x", sha256.Sum256(b)), ""
}
