package host

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

// readSMBIOS reads the firmware's table; a machine without one gives the
// zero value and no error.
func (r Roots) readSMBIOS() (SMBIOS, error) {
	table, err := readFile(r.Sys, "firmware/dmi/tables/DMI")
	if errors.Is(err, fs.ErrNotExist) {
		return SMBIOS{}, nil
	}
	if err != nil {
		return SMBIOS{}, fmt.Errorf("smbios (readable as root only): %w", err)
	}
	return ParseSMBIOS(table)
}

// chassisTypes names the enclosures that matter (DSP0134 table 17).
var chassisTypes = map[int]string{
	1: "other", 3: "desktop", 4: "low-profile desktop", 6: "mini tower", 7: "tower", 8: "portable", 9: "laptop",
	10: "notebook", 13: "all-in-one", 17: "main server", 23: "rack mount", 25: "multi-system", 28: "blade",
	29: "blade enclosure", 30: "tablet", 34: "embedded", 35: "mini pc",
}

func (r Roots) readSystem(dmi SMBIOS) System {
	s := System{
		Vendor: dmi.Vendor, Product: dmi.Product, Version: dmi.Version, Serial: dmi.Serial, UUID: dmi.UUID,
		SKU: dmi.SKU, Family: dmi.Family,
		BoardVendor: dmi.BoardVendor, BoardProduct: dmi.BoardProduct, BoardSerial: dmi.BoardSerial,
		ChassisVendor: dmi.ChassisVendor, ChassisSerial: dmi.ChassisSerial, AssetTag: dmi.ChassisAssetTag,
		Source: "smbios",
	}
	if dmi.ChassisType != 0 && dmi.ChassisType != 2 { // 2 is "unknown"
		s.ChassisType = chassisTypes[dmi.ChassisType]
		if s.ChassisType == "" {
			s.ChassisType = "type " + strconv.Itoa(dmi.ChassisType)
		}
	}
	if s != (System{Source: "smbios"}) {
		return s
	}
	// Without SMBIOS: boards that boot by device tree say model and, where
	// the boot loader fills it in, serial number.
	tree := filepath.Join(r.Sys, "firmware/devicetree/base")
	s = System{Product: readString(tree, "model"), Serial: meaningful(readString(tree, "serial-number")), Source: "none"}
	if s.Product != "" || s.Serial != "" {
		s.Source = "devicetree"
	}
	return s
}

func (r Roots) readFirmware(dmi SMBIOS) Firmware {
	f := Firmware{Vendor: dmi.BIOSVendor, Version: dmi.BIOSVersion, Date: dmi.BIOSDate, Mode: "bios", SecureBoot: "disabled"}
	if !exists(r.Sys, "firmware/efi") {
		if exists(r.Sys, "firmware/devicetree/base") {
			f.Mode = "devicetree"
		}
		return f
	}
	f.Mode, f.SecureBoot = "uefi", "unknown"
	f.Bits, _ = readInt(r.Sys, "firmware/efi/fw_platform_size")
	if b := r.efiVariable("SecureBoot"); len(b) == 1 {
		f.SecureBoot = "disabled"
		if b[0] == 1 {
			f.SecureBoot = "enabled"
		}
	}
	return f
}

// cpuFlags are the flags that decide what can run here: virtualisation,
// vector and matrix units, confidential computing. All others are the model's.
var cpuFlags = []string{
	"aes", "amx_bf16", "amx_int8", "amx_tile", "avx", "avx2", "avx512_bf16", "avx512_vnni", "avx512f", "hypervisor",
	"lm", "sev", "sev_es", "sev_snp", "sgx", "sha_ni", "svm", "tdx_host_platform", "vmx",
	"asimd", "atomics", "bf16", "crc32", "i8mm", "sha2", "sve", "sve2",
}

// armParts names the cores of arm64 servers, by implementer and part of
// MIDR_EL1; /proc/cpuinfo has no model name there.
var armParts = map[string]string{
	"0x41:0xd0c": "Neoverse-N1", "0x41:0xd40": "Neoverse-V1", "0x41:0xd49": "Neoverse-N2", "0x41:0xd4f": "Neoverse-V2",
	"0x41:0xd84": "Neoverse-V3", "0x41:0xd8e": "Neoverse-N3", "0x41:0xd08": "Cortex-A72", "0x41:0xd0b": "Cortex-A76",
	"0x41:0xd07": "Cortex-A57", "0xc0:0xac3": "Ampere-1", "0xc0:0xac4": "Ampere-1A", "0x4e:0x010": "Olympus",
}

func (r Roots) readCPU() (CPU, error) {
	c := CPU{Arch: runtime.GOARCH}
	info, err := readFile(r.Proc, "cpuinfo")
	if err != nil {
		return c, fmt.Errorf("cpu: %w", err)
	}
	first := map[string]string{}
	processors := 0
	lines := bufio.NewScanner(bytes.NewReader(info))
	lines.Buffer(nil, maxFile)
	for lines.Scan() {
		k, v, ok := strings.Cut(lines.Text(), ":")
		if !ok {
			continue
		}
		k = strings.TrimSpace(k)
		if k == "processor" {
			processors++
		}
		if _, seen := first[k]; !seen {
			first[k] = strings.TrimSpace(v)
		}
	}
	c.Model, c.Vendor, c.Microcode = clean(first["model name"]), clean(first["vendor_id"]), clean(first["microcode"])
	if c.Model == "" && first["CPU part"] != "" {
		id := first["CPU implementer"] + ":" + first["CPU part"]
		if c.Model = armParts[id]; c.Model == "" {
			c.Model = "arm " + clean(id)
		}
	}
	have := strings.Fields(first["flags"] + " " + first["Features"])
	for _, flag := range cpuFlags {
		if slices.Contains(have, flag) {
			c.Flags = append(c.Flags, flag)
		}
	}
	slices.Sort(c.Flags)

	cpus := filepath.Join(r.Sys, "devices/system/cpu")
	if c.Threads, err = countCPUList(readString(cpus, "present")); err != nil {
		return c, err
	}
	if c.Threads == 0 {
		c.Threads = processors
	}
	sockets, cores := map[string]bool{}, map[string]bool{}
	names, err := entries(cpus)
	if err != nil {
		return c, fmt.Errorf("cpu: %w", err)
	}
	for _, name := range names {
		topology := filepath.Join(cpus, name, "topology")
		if !numbered(name, "cpu") || !exists(topology) {
			continue
		}
		pkg := readString(topology, "physical_package_id")
		sockets[pkg] = true
		cores[pkg+"/"+readString(topology, "die_id")+"/"+readString(topology, "cluster_id")+"/"+readString(topology, "core_id")] = true
	}
	c.Sockets, c.Cores = len(sockets), len(cores)
	return c, nil
}

// numbered reports whether name is prefix and a number.
func numbered(name, prefix string) bool {
	digits, ok := strings.CutPrefix(name, prefix)
	_, err := strconv.ParseUint(digits, 10, 32)
	return ok && err == nil
}

func (r Roots) readMemory(dmi SMBIOS) (Memory, error) {
	m := Memory{DIMMs: dmi.DIMMs, EmptySlots: dmi.EmptySlots, Source: "modules"}
	if m.DIMMs == nil {
		m.DIMMs = []DIMM{}
	}
	for _, d := range m.DIMMs {
		m.TotalBytes += d.SizeMiB << 20
	}
	if m.TotalBytes > 0 {
		return m, nil
	}
	blocks := filepath.Join(r.Sys, "devices/system/memory")
	if size := r.memoryBlockSize(); size > 0 {
		names, err := entries(blocks)
		if err != nil {
			return m, fmt.Errorf("memory: %w", err)
		}
		for _, name := range names {
			if numbered(name, "memory") {
				m.TotalBytes += size
			}
		}
	}
	if m.TotalBytes > 0 {
		m.Source = "blocks"
		return m, nil
	}
	b, err := readFile(r.Proc, "meminfo")
	if err != nil {
		return m, fmt.Errorf("memory: %w", err)
	}
	kib, ok := memTotalKiB(string(b), "MemTotal:")
	if !ok {
		return m, errors.New("memory: no MemTotal in meminfo")
	}
	const step = 64 << 20
	m.TotalBytes, m.Source = (kib<<10+step-1)/step*step, "meminfo"
	return m, nil
}

// memoryBlockSize is in hexadecimal without prefix.
func (r Roots) memoryBlockSize() int64 {
	n, err := strconv.ParseInt(readString(r.Sys, "devices/system/memory/block_size_bytes"), 16, 64)
	if err != nil || n < 0 {
		return 0
	}
	return n
}

// memTotalKiB finds "key N kB" in a meminfo text. The keys of a node's own
// meminfo have "Node N " before them.
func memTotalKiB(text, key string) (int64, bool) {
	_, rest, ok := strings.Cut(text, key)
	fields := strings.Fields(rest)
	if !ok || len(fields) < 2 || fields[1] != "kB" {
		return 0, false
	}
	n, err := strconv.ParseInt(fields[0], 10, 64)
	return n, err == nil && n >= 0 && n < 1<<50
}

func (r Roots) readNUMA() ([]NUMANode, error) {
	root := filepath.Join(r.Sys, "devices/system/node")
	names, err := entries(root)
	if err != nil {
		return nil, fmt.Errorf("numa: %w", err)
	}
	var nodes []NUMANode
	blockSize := r.memoryBlockSize()
	for _, name := range names {
		if !numbered(name, "node") {
			continue
		}
		dir := filepath.Join(root, name)
		n := NUMANode{CPUs: readString(dir, "cpulist"), Distances: []int{}}
		n.Node, _ = strconv.Atoi(strings.TrimPrefix(name, "node"))
		for _, d := range strings.Fields(readString(dir, "distance")) {
			if v, err := strconv.Atoi(d); err == nil {
				n.Distances = append(n.Distances, v)
			}
		}
		inside, err := entries(dir)
		if err != nil {
			return nodes, fmt.Errorf("numa: %w", err)
		}
		for _, block := range inside {
			if numbered(block, "memory") {
				n.MemoryBytes += blockSize
			}
		}
		if n.MemoryBytes == 0 {
			if kib, ok := memTotalKiB(readString(dir, "meminfo"), "MemTotal:"); ok {
				const step = 64 << 20
				n.MemoryBytes = (kib<<10 + step - 1) / step * step
			}
		}
		nodes = append(nodes, n)
	}
	slices.SortFunc(nodes, func(a, b NUMANode) int { return a.Node - b.Node })
	return nodes, nil
}

func (r Roots) readTPM(dmi SMBIOS) TPM {
	dir := filepath.Join(r.Sys, "class/tpm/tpm0")
	if !exists(dir) {
		return TPM{}
	}
	t := TPM{Present: true, Manufacturer: dmi.TPMVendor, Interface: linkBase(dir, "device/driver")}
	switch readString(dir, "tpm_version_major") {
	case "2":
		t.Version = "2.0"
	case "1":
		t.Version = "1.2"
	}
	if t.Version == "" && exists(dir, "device/caps") { // before Linux 5.6
		t.Version = "1.2"
	}
	return t
}

func (r Roots) readKernel() (Kernel, error) {
	k := Kernel{
		Arch:       runtime.GOARCH,
		Release:    readString(r.Proc, "sys/kernel/osrelease"),
		Build:      readString(r.Proc, "sys/kernel/version"),
		IOMMUUnits: r.iommuUnits(),
	}
	release, err := readFile(r.Etc, "os-release")
	if errors.Is(err, fs.ErrNotExist) { // our own ramdisk may have none
		err = nil
	}
	for line := range strings.SplitSeq(string(release), "\n") {
		key, value, _ := strings.Cut(line, "=")
		value = clean(strings.Trim(strings.TrimSpace(value), `"'`))
		switch key {
		case "ID":
			k.OSID = value
		case "VERSION_ID":
			k.OSVersion = value
		case "PRETTY_NAME":
			k.OSName = value
		}
	}
	if err != nil {
		err = fmt.Errorf("kernel: %w", err)
	}
	return k, err
}

func (r Roots) iommuUnits() int {
	names, err := entries(r.Sys, "class/iommu")
	if err != nil {
		return 0
	}
	return len(names)
}
