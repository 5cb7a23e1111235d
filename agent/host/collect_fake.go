//go:build fakehw

package host

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Fake says whether this build makes its machine up.
const Fake = true

// KVM reports whether the machine can run virtual machines: the made-up one
// can.
func KVM(Roots) bool { return true }

// IOMMUUnits counts the IOMMUs: two for each of the eight PCI roots.
func IOMMUUnits(Roots) int { return fakeIOMMUs }

const (
	fakeIOMMUs   = 16
	fakeGPUs     = 8
	fakeDriver   = "570.172.08"
	fakeVBIOS    = "96.00.99.00.01"
	fakeBootFile = "boot-id"
)

// fake makes ids of a seed. Each id is a hash of the seed and a label, so
// that adding one changes no other.
type fake struct{ seed uint64 }

func (f fake) bytes(label string) []byte {
	sum := sha256.Sum256(fmt.Appendf(nil, "bcd fakehw %d %s", f.seed, label))
	return sum[:]
}

func (f fake) hex(label string, digits int) string {
	return hex.EncodeToString(f.bytes(label))[:digits]
}

func (f fake) uuid(label string) string {
	b := f.bytes(label)[:16]
	b[6] = b[6]&0x0f | 0x40 // RFC 9562 version 4 …
	b[8] = b[8]&0x3f | 0x80 // … and variant
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:16])
}

// digits gives a decimal serial number of n digits.
func (f fake) digits(label string, n int) string {
	return fmt.Sprintf("%0*d", n, binary.BigEndian.Uint64(f.bytes(label))%1_000_000_000_000)[:n]
}

// gpuBuses are the buses of the GPUs of an HGX H100 baseboard in the servers
// of several makers; the first four are on socket 0.
var gpuBuses = [fakeGPUs]string{"18", "2a", "3a", "5d", "9a", "ab", "ba", "db"}

func readFacts(_ context.Context, r Roots) Facts {
	f := fake{r.Seed}
	facts := Facts{
		System: System{
			Vendor: "Better Compute", Product: "HGX H100 8-GPU (fakehw)", Version: "1",
			Serial: "FHW" + strings.ToUpper(f.hex("system serial", 10)), UUID: f.uuid("system uuid"), Family: "fakehw",
			BoardVendor: "Better Compute", BoardProduct: "FHW-8H100", BoardSerial: "FHB" + strings.ToUpper(f.hex("board serial", 10)),
			ChassisType: "rack mount", ChassisVendor: "Better Compute", ChassisSerial: "FHC" + strings.ToUpper(f.hex("chassis serial", 10)),
			Source: "smbios",
		},
		Firmware: Firmware{Vendor: "American Megatrends International, LLC.", Version: "2.4", Date: "03/28/2025", Mode: "uefi", Bits: 64, SecureBoot: "enabled"},
		CPU: CPU{
			Model: "Intel(R) Xeon(R) Platinum 8480C", Vendor: "GenuineIntel", Arch: "amd64",
			Sockets: 2, Cores: 112, Threads: 224, Microcode: "0x2b000639",
			Flags: []string{"aes", "amx_bf16", "amx_int8", "amx_tile", "avx", "avx2", "avx512_bf16", "avx512_vnni", "avx512f", "lm", "sha_ni", "vmx"},
		},
		Memory: Memory{TotalBytes: 2 << 40, Source: "modules"},
		NUMA: []NUMANode{
			{Node: 0, CPUs: "0-55,112-167", MemoryBytes: 1 << 40, Distances: []int{10, 21}},
			{Node: 1, CPUs: "56-111,168-223", MemoryBytes: 1 << 40, Distances: []int{21, 10}},
		},
		Boot:   Boot{Mode: "uefi", Current: "Boot0001", Label: "bcd"},
		TPM:    TPM{Present: true, Version: "2.0", Manufacturer: "IFX", Interface: "tpm_tis"},
		Kernel: Kernel{Arch: "amd64", Release: "6.12.48+deb13-amd64", Build: "#1 SMP PREEMPT_DYNAMIC Debian 6.12.48-1", OSID: "debian", OSVersion: "13", OSName: "Debian GNU/Linux 13 (trixie)", IOMMUUnits: fakeIOMMUs},
	}
	for i := range 32 {
		socket, channel := i/16, i%16
		facts.Memory.DIMMs = append(facts.Memory.DIMMs, DIMM{
			Locator: fmt.Sprintf("P%d-DIMM%c%d", socket+1, 'A'+channel/2, channel%2+1), Bank: fmt.Sprintf("P%d_Node%d_Channel%d", socket, socket, channel/2),
			SizeMiB: 64 << 10, Type: "DDR5", SpeedMTs: 4800, Manufacturer: "Samsung", Part: "M321R8GA0BB0-CQKZJ",
			Serial: strings.ToUpper(f.hex(fmt.Sprintf("dimm %d", i), 8)),
		})
	}
	f.addGPUs(&facts)
	f.addNICs(&facts)
	f.addDisks(&facts)
	slices.SortFunc(facts.PCI, func(a, b PCI) int { return strings.Compare(a.Address, b.Address) })
	slices.SortFunc(facts.Net, func(a, b NIC) int { return strings.Compare(a.MAC, b.MAC) })
	slices.SortFunc(facts.Link, func(a, b Link) int { return strings.Compare(a.MAC, b.MAC) })
	slices.SortFunc(facts.Block, func(a, b Block) int { return strings.Compare(a.ID, b.ID) })
	return facts
}

func (f fake) gpu(i int) GPU {
	return GPU{
		UUID: "GPU-" + f.uuid(fmt.Sprintf("gpu %d", i)), Name: "NVIDIA H100 80GB HBM3", Serial: "16" + f.digits(fmt.Sprintf("gpu serial %d", i), 11),
		PCI: "0000:" + gpuBuses[i] + ":00.0", VBIOS: fakeVBIOS, MemoryMiB: 81559, MIG: "disabled",
	}
}

func (f fake) addGPUs(facts *Facts) {
	facts.GPU = GPUs{PCICount: fakeGPUs, Reader: "nvidia-smi", Driver: fakeDriver}
	for i := range fakeGPUs {
		g := f.gpu(i)
		facts.GPU.Devices = append(facts.GPU.Devices, g)
		facts.PCI = append(facts.PCI, PCI{
			Address: g.PCI, Vendor: nvidiaVendor, Device: "2330", Class: "030200", Revision: "a1", SubVendor: nvidiaVendor, SubDevice: "16c1",
			NUMANode: i / 4, Driver: "nvidia", IOMMUGroup: fmt.Sprint(60 + i),
		})
	}
	for i := range 4 { // NVSwitch 3
		facts.PCI = append(facts.PCI, PCI{
			Address: fmt.Sprintf("0000:%02x:00.0", 0x05+i), Vendor: nvidiaVendor, Device: "22a3", Class: "068000", Revision: "a1",
			SubVendor: nvidiaVendor, SubDevice: "1796", NUMANode: 0, Driver: "nvidia-nvswitch", IOMMUGroup: fmt.Sprint(40 + i),
		})
	}
}

// addNICs adds eight ConnectX-7 for the GPU fabric and a two-port one for
// everything else, each on the bus next to its GPU.
func (f fake) addNICs(facts *Facts) {
	type port struct {
		address, name, port string
		node                int
		mbps                int64
		up                  bool
	}
	var ports []port
	for i, bus := range gpuBuses {
		n, _ := hex.DecodeString(bus)
		ports = append(ports, port{fmt.Sprintf("0000:%02x:00.0", n[0]+2), fmt.Sprintf("ibp%ds0", n[0]+2), "p0", i / 4, 400_000, true})
	}
	ports = append(ports, port{"0000:e1:00.0", "enp225s0f0np0", "p0", 1, 100_000, true}, port{"0000:e1:00.1", "enp225s0f1np1", "p1", 1, 0, false})
	for i, p := range ports {
		raw := f.bytes(fmt.Sprintf("mac %d", i))
		mac := net.HardwareAddr{0xa0, 0x88, 0xc2, raw[0], raw[1], raw[2]}.String()
		facts.PCI = append(facts.PCI, PCI{
			Address: p.address, Vendor: "15b3", Device: "1021", Class: "020000", SubVendor: "15b3", SubDevice: "0041",
			NUMANode: p.node, Driver: "mlx5_core", IOMMUGroup: fmt.Sprint(80 + i),
		})
		facts.Net = append(facts.Net, NIC{MAC: mac, Permanent: true, Name: p.name, Driver: "mlx5_core", Bus: "pci", PCI: p.address, NUMANode: p.node, PortID: p.port})
		l := Link{MAC: mac, Name: p.name, Carrier: p.up, SpeedMbps: p.mbps, MTU: 9000}
		if p.up {
			l.Neighbour = &Neighbour{ChassisID: fmt.Sprintf("0c:29:ef:00:00:%02x", i), PortID: fmt.Sprintf("Ethernet%d", 1+f.seed%64), SystemName: fmt.Sprintf("leaf-%d", i+1)}
		}
		facts.Link = append(facts.Link, l)
	}
}

// addDisks adds two mirrored system disks' worth of M.2 and eight data disks.
func (f fake) addDisks(facts *Facts) {
	for i := range 10 {
		bus, model, firmware, size, device := 0x61+i, "SAMSUNG MZQL27T6HBLA-00A07", "GDC5602Q", int64(7_681_501_126_656), "a80a"
		if i < 2 {
			bus, model, firmware, size, device = 0xc1+i, "SAMSUNG MZ1L21T9HCLS-00A07", "GDC7502Q", 1_920_383_410_176, "a80a"
		}
		address := fmt.Sprintf("0000:%02x:00.0", bus)
		id := "eui.36" + f.hex(fmt.Sprintf("eui %d", i), 30)
		facts.PCI = append(facts.PCI, PCI{
			Address: address, Vendor: "144d", Device: device, Class: "010802", SubVendor: "144d", SubDevice: "a814",
			NUMANode: (bus >> 7) & 1, Driver: "nvme", IOMMUGroup: fmt.Sprint(100 + i),
		})
		facts.Block = append(facts.Block, Block{
			ID: id, WWN: id, Name: fmt.Sprintf("nvme%dn1", i), Serial: "S6" + strings.ToUpper(f.hex(fmt.Sprintf("disk serial %d", i), 12)),
			Model: model, Firmware: firmware, SizeBytes: size, LogicalBytes: 512, PhysicalBytes: 4096, Transport: "nvme", Path: "pci-" + address + "-nvme-1",
		})
	}
}

// SampleGPUs gives the made-up GPUs, idle and healthy.
func SampleGPUs(_ context.Context, r Roots) (GPUSample, error) {
	s := GPUSample{Driver: fakeDriver}
	f := fake{r.Seed}
	num := func(n int64) Reading { return Reading{N: n, State: Known} }
	for i := range fakeGPUs {
		g := f.gpu(i)
		s.GPUs = append(s.GPUs, GPUState{
			GPU: g, Index: i, BusyPercent: num(0), TemperatureC: num(31 + int64(f.bytes(fmt.Sprintf("temperature %d", i))[0]%6)),
			PowerMilliwatts: num(72_000), LimitMilliwatts: num(700_000), MemoryUsedMiB: num(0), MemoryTotalMiB: num(g.MemoryMiB),
			UncorrectableECC: num(0), RemapPending: num(0), RemapFailed: num(0), MIGPending: "disabled", RecoveryAction: "None",
		})
	}
	return s, nil
}

// BootID returns the made-up machine's boot id, which is in a file of
// [Roots.DataDir]. A machine that has none boots for the first time.
func BootID(r Roots) (string, error) {
	b, err := os.ReadFile(filepath.Join(r.DataDir, fakeBootFile))
	if errors.Is(err, fs.ErrNotExist) {
		return NextBoot(r)
	}
	if err != nil {
		return "", fmt.Errorf("boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// NextBoot "reboots" the made-up machine: it writes the boot id that follows
// the present one, and returns it. It exists in fakehw builds only.
func NextBoot(r Roots) (string, error) {
	path := filepath.Join(r.DataDir, fakeBootFile)
	before, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("boot id: %w", err)
	}
	id := fake{r.Seed}.uuid("boot after " + strings.TrimSpace(string(before)))
	if err := writeBootID(path, id); err != nil {
		return "", fmt.Errorf("boot id: %w", err)
	}
	return id, nil
}

// writeBootID replaces the file so that after a crash there is the old id or
// the new one, never half of one.
func writeBootID(path, id string) error {
	f, err := os.CreateTemp(filepath.Dir(path), fakeBootFile+".*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.WriteString(id + "\n")
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
