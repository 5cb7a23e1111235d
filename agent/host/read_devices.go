package host

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

func (r Roots) readPCI() ([]PCI, error) {
	root := filepath.Join(r.Sys, "bus/pci/devices")
	names, err := entries(root)
	if err != nil {
		return nil, fmt.Errorf("pci: %w", err)
	}
	var list []PCI
	for _, address := range names {
		dir := filepath.Join(root, address)
		if _, err := os.Lstat(filepath.Join(dir, "physfn")); err == nil {
			continue
		}
		p := PCI{
			Address: address, NUMANode: -1,
			Vendor: hexID(readString(dir, "vendor")), Device: hexID(readString(dir, "device")),
			Class: hexID(readString(dir, "class")), Revision: hexID(readString(dir, "revision")),
			SubVendor: hexID(readString(dir, "subsystem_vendor")), SubDevice: hexID(readString(dir, "subsystem_device")),
			Driver: linkBase(dir, "driver"), IOMMUGroup: linkBase(dir, "iommu_group"),
		}
		if n, ok := readInt(dir, "numa_node"); ok {
			p.NUMANode = int(n)
		}
		list = append(list, p)
	}
	slices.SortFunc(list, func(a, b PCI) int { return strings.Compare(a.Address, b.Address) })
	return list, nil
}

// nvidiaVendor and the display classes count the GPUs on the bus: 0300 is a
// VGA controller, 0302 a 3D controller (PCI code and id assignment 1.16).
const nvidiaVendor = "10de"

func countPCIGPUs(list []PCI) int {
	n := 0
	for _, p := range list {
		if p.Vendor == nvidiaVendor && (strings.HasPrefix(p.Class, "0300") || strings.HasPrefix(p.Class, "0302")) {
			n++
		}
	}
	return n
}

// sectorBytes is the unit of /sys/block/*/size, whatever the disk's own.
const sectorBytes = 512

// mmcHardwarePartition matches the boot and replay-protected areas of an
// eMMC, which the kernel shows as disks of their own.
var mmcHardwarePartition = regexp.MustCompile(`^mmcblk[0-9]+(boot[0-9]+|rpmb|gp[0-9]+)$`)

func (r Roots) readBlock() ([]Block, error) {
	root := filepath.Join(r.Sys, "block")
	names, err := entries(root)
	if err != nil {
		return nil, fmt.Errorf("block: %w", err)
	}
	var list []Block
	for _, name := range names {
		dir := filepath.Join(root, name)
		// What has no device below it is made of software: loop, ram, dm, md,
		// zram. A hidden disk is one path of a multipath NVMe namespace.
		if !exists(dir, "device") || readString(dir, "hidden") == "1" || mmcHardwarePartition.MatchString(name) || strings.HasPrefix(name, "sr") {
			continue
		}
		sectors, _ := readInt(dir, "size")
		if sectors <= 0 || sectors > 1<<53/sectorBytes {
			continue // an empty card reader, or a virtual drive of a BMC with nothing in it
		}
		list = append(list, r.readDisk(name, dir, sectors))
	}
	slices.SortFunc(list, func(a, b Block) int {
		return cmp.Or(strings.Compare(a.ID, b.ID), strings.Compare(a.Path, b.Path), strings.Compare(a.Name, b.Name))
	})
	return list, nil
}

func (r Roots) readDisk(name, dir string, sectors int64) Block {
	b := Block{
		Name: name, SizeBytes: sectors * sectorBytes, LogicalBytes: sectorBytes, PhysicalBytes: sectorBytes,
		Rotational: readString(dir, "queue/rotational") == "1",
		Removable:  readString(dir, "removable") == "1",
		ReadOnly:   readString(dir, "ro") == "1",
	}
	if n, ok := readInt(dir, "queue/logical_block_size"); ok {
		b.LogicalBytes = n
	}
	if n, ok := readInt(dir, "queue/physical_block_size"); ok {
		b.PhysicalBytes = n
	}
	b.Model = clean(readString(dir, "device/vendor") + " " + readString(dir, "device/model"))
	b.Firmware = cmp.Or(readString(dir, "device/firmware_rev"), readString(dir, "device/rev"))
	b.WWN = cmp.Or(readString(dir, "wwid"), readString(dir, "device/wwid"))
	b.Serial = cmp.Or(meaningful(readString(dir, "device/serial")), meaningful(readString(dir, "serial")), vpdSerial(dir))

	place := below(r.Sys, dir)
	b.Transport = transport(name, place, dir)
	b.Path = diskPath(r.Sys, place)
	switch {
	case b.Transport == "virtio":
		// virtio has no vendor or model; its "vendor" is a PCI vendor number.
		b.Model = ""
	case b.Transport == "sata":
		b.Model = strings.TrimSpace(strings.TrimPrefix(b.Model, "ATA "))
	}
	// A t10 WWID is vendor, model and serial run together, not a world-wide
	// name; it stays usable as an id.
	switch {
	case b.WWN != "":
		b.ID = b.WWN
	case b.Serial != "":
		b.ID = "serial." + b.Serial
	case b.Path != "":
		b.ID = "path." + b.Path
	default:
		b.ID = "name." + name
	}
	return b
}

// vpdSerial reads the unit serial number page (SPC-4 section 7.8.15): four
// bytes of header, then the text.
func vpdSerial(dir string) string {
	page, err := readFile(dir, "device/vpd_pg80")
	if err != nil || len(page) < 4 || page[1] != 0x80 {
		return ""
	}
	n := min(int(page[2])<<8|int(page[3]), len(page)-4)
	return meaningful(string(page[4 : 4+n]))
}

// transport judges by the sysfs path of the disk.
func transport(name, place, dir string) string {
	switch {
	case strings.HasPrefix(name, "nvme"):
		return "nvme"
	case strings.HasPrefix(name, "mmcblk"):
		return "mmc"
	case strings.Contains(place, "/usb"):
		return "usb"
	case strings.HasPrefix(name, "vd") || linkBase(dir, "device/subsystem") == "virtio":
		return "virtio"
	case ataPort.MatchString(place):
		return "sata"
	case strings.Contains(place, "/end_device-") || exists(dir, "device/sas_address"):
		return "sas"
	case strings.Contains(place, "/rport-"):
		return "fc"
	case strings.Contains(place, "/session"):
		return "iscsi"
	case strings.HasPrefix(name, "sd"):
		return "scsi"
	}
	return "unknown"
}

var (
	ataPort     = regexp.MustCompile(`/(ata[0-9]+)/`)
	pciAddress  = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)
	scsiAddress = regexp.MustCompile(`^[0-9]+:([0-9]+):([0-9]+):([0-9]+)$`)
)

// diskPath says where the disk is plugged in, without numbers that the kernel
// gives by probe order (SCSI host, ATA print id).
func diskPath(sys, place string) string {
	if place == "" {
		return ""
	}
	dir := filepath.Join(sys, place)
	address := lastPCI(place)
	if address == "" {
		return ""
	}
	path := "pci-" + address
	if nsid := readString(dir, "nsid"); nsid != "" {
		return path + "-nvme-" + nsid
	}
	if sas := readString(dir, "device/sas_address"); sas != "" {
		return path + "-sas-" + sas
	}
	if m := ataPort.FindStringSubmatchIndex(place); m != nil {
		if port := readString(sys, place[:m[3]], "ata_port", place[m[2]:m[3]], "port_no"); port != "" {
			path += "-ata-" + port
		}
	}
	parts := strings.Split(place, "/")
	for i := len(parts) - 1; i >= 0; i-- {
		if m := scsiAddress.FindStringSubmatch(parts[i]); m != nil {
			return path + "-scsi-" + m[1] + ":" + m[2] + ":" + m[3]
		}
	}
	return path
}

func lastPCI(place string) string {
	parts := strings.Split(place, "/")
	for i := len(parts) - 1; i >= 0; i-- {
		if pciAddress.MatchString(parts[i]) {
			return parts[i]
		}
	}
	return ""
}

// arpHardwareEthernet and its InfiniBand sibling are the kinds of interface
// that have a MAC worth keeping (ARPHRD_ETHER, ARPHRD_INFINIBAND).
const (
	arpEthernet   = 1
	arpInfiniband = 32
)

func (r Roots) readNet() ([]NIC, []Link, error) {
	root := filepath.Join(r.Sys, "class/net")
	names, err := entries(root)
	if err != nil {
		return nil, nil, fmt.Errorf("net: %w", err)
	}
	var permanent map[string]net.HardwareAddr
	if r.PermanentMACs != nil {
		if permanent, err = r.PermanentMACs(); err != nil {
			err = fmt.Errorf("permanent addresses: %w", err)
		}
	}
	var neighbours map[string]Neighbour
	if r.Neighbours != nil {
		neighbours = r.Neighbours()
	}
	var nics []NIC
	var links []Link
	for _, name := range names {
		dir := filepath.Join(root, name)
		kind, _ := readInt(dir, "type")
		// What has no device is software (lo, bridges, tunnels, veth); what
		// has a physfn is a virtual function with a random address.
		if !exists(dir, "device") || exists(dir, "device/physfn") || (kind != arpEthernet && kind != arpInfiniband) {
			continue
		}
		n := NIC{
			Name: name, MAC: strings.ToLower(readString(dir, "address")), NUMANode: -1,
			Driver: linkBase(dir, "device/driver"), Bus: linkBase(dir, "device/subsystem"),
			PCI: lastPCI(below(r.Sys, dir)), PortID: portID(dir),
		}
		if mac := permanent[name]; len(mac) > 0 {
			n.MAC, n.Permanent = strings.ToLower(mac.String()), true
		} else if readString(dir, "addr_assign_type") == "0" {
			// NET_ADDR_PERM: the kernel vouches that the current address is
			// the device's own.
			n.Permanent = true
		}
		if node, ok := readInt(dir, "device/numa_node"); ok {
			n.NUMANode = int(node)
		}
		nics = append(nics, n)
		links = append(links, readLink(dir, n, neighbours))
	}
	slices.SortFunc(nics, func(a, b NIC) int {
		return cmp.Or(strings.Compare(a.MAC, b.MAC), strings.Compare(a.PCI, b.PCI), strings.Compare(a.Name, b.Name))
	})
	slices.SortFunc(links, func(a, b Link) int {
		return cmp.Or(strings.Compare(a.MAC, b.MAC), strings.Compare(a.Name, b.Name))
	})
	return nics, links, err
}

func portID(dir string) string {
	if name := readString(dir, "phys_port_name"); name != "" {
		return name
	}
	if n, ok := readInt(dir, "dev_port"); ok && n > 0 {
		return strconv.FormatInt(n, 10)
	}
	return ""
}

// maxSpeedMbps refuses the 4294967295 that drivers of a NIC without a link
// write for "unknown".
const maxSpeedMbps = 10_000_000

func readLink(dir string, n NIC, neighbours map[string]Neighbour) Link {
	l := Link{MAC: n.MAC, Name: n.Name, Carrier: readString(dir, "carrier") == "1"} // EINVAL while down
	if speed, ok := readInt(dir, "speed"); ok && speed > 0 && speed <= maxSpeedMbps && l.Carrier {
		l.SpeedMbps = speed
	}
	l.MTU, _ = readInt(dir, "mtu")
	if nb, ok := neighbours[n.Name]; ok && l.Carrier {
		l.Neighbour = &nb
	}
	return l
}

// bootID returns the kernel's id of this boot (random(4)).
func (r Roots) bootID() (string, error) {
	b, err := readFile(r.Proc, "sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("boot id: %w", err)
	}
	id := strings.TrimSpace(string(b))
	if len(id) != 36 {
		return "", errors.New("boot id: the kernel gave " + strconv.Quote(clean(id)) + ", not a UUID")
	}
	return id, nil
}
