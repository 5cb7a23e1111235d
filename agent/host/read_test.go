package host

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestServer(t *testing.T) {
	roots := plant(t, "server.tree")
	roots.PermanentMACs = func() (map[string]net.HardwareAddr, error) {
		return map[string]net.HardwareAddr{"eth0": {0xa0, 0x88, 0xc2, 1, 2, 3}}, nil
	}
	roots.Neighbours = func() map[string]Neighbour {
		return map[string]Neighbour{"eth0": {ChassisID: "0c:29:ef:00:00:01", PortID: "Ethernet7", SystemName: "leaf-1"}}
	}
	f := recordedFacts(context.Background(), roots)
	if len(f.Errors) != 0 {
		t.Errorf("errors: %v", f.Errors)
	}
	wantSystem := System{
		Vendor: "Supermicro", Product: "SYS-821GE-TNHR", Serial: "S512345X4A12345", UUID: "44454c4c-4d00-1052-8046-c7c04f333132",
		Family: "Family", BoardVendor: "Supermicro", BoardProduct: "X13DEG-OAD", BoardSerial: "UM23AS601234",
		ChassisType: "rack mount", ChassisVendor: "Supermicro", ChassisSerial: "C8010MK12AB0001", Source: "smbios",
	}
	if f.System != wantSystem {
		t.Errorf("system\n got %+v\nwant %+v", f.System, wantSystem)
	}
	if want := (Firmware{Vendor: "American Megatrends International, LLC.", Version: "2.4", Date: "03/28/2025", Mode: "uefi", Bits: 64, SecureBoot: "enabled"}); f.Firmware != want {
		t.Errorf("firmware %+v", f.Firmware)
	}
	if f.CPU.Sockets != 2 || f.CPU.Cores != 2 || f.CPU.Threads != 4 || f.CPU.Model != "Intel(R) Xeon(R) Platinum 8480C" || f.CPU.Microcode != "0x2b000639" {
		t.Errorf("cpu %+v", f.CPU)
	}
	if want := []string{"aes", "amx_tile", "avx", "avx2", "avx512f", "lm", "vmx"}; !reflect.DeepEqual(f.CPU.Flags, want) {
		t.Errorf("flags %v, want %v", f.CPU.Flags, want)
	}
	if f.Memory.TotalBytes != 128<<30 || len(f.Memory.DIMMs) != 2 || f.Memory.EmptySlots != 1 || f.Memory.Source != "modules" {
		t.Errorf("memory %+v", f.Memory)
	}
	if want := (DIMM{Locator: "P1-DIMMA1", Bank: "P0_Node0_Channel0", SizeMiB: 65536, Type: "DDR5", SpeedMTs: 4800, Manufacturer: "Samsung", Part: "M321R8GA0BB0-CQKZJ", Serial: "80CE01"}); len(f.Memory.DIMMs) == 0 || f.Memory.DIMMs[0] != want {
		t.Errorf("dimms %+v", f.Memory.DIMMs)
	}
	if want := []NUMANode{{0, "0,2", 2 << 30, []int{10, 21}}, {1, "1,3", 2 << 30, []int{21, 10}}}; !reflect.DeepEqual(f.NUMA, want) {
		t.Errorf("numa %+v", f.NUMA)
	}
	if len(f.PCI) != 5 || f.GPU.PCICount != 1 { // the virtual function is not there
		t.Errorf("pci %+v, %d gpus", f.PCI, f.GPU.PCICount)
	}
	if want := (PCI{Address: "0000:18:00.0", Vendor: "10de", Device: "2330", Class: "030200", Revision: "a1", SubVendor: "10de", SubDevice: "16c1", Driver: "nvidia", IOMMUGroup: "60"}); f.PCI[1] != want {
		t.Errorf("gpu function %+v", f.PCI[1])
	}
	wantDisks := []Block{
		{ID: "eui.36434b3057500123002538450000000b", Name: "nvme0n1", WWN: "eui.36434b3057500123002538450000000b", Serial: "S6CKNE0W500123", Model: "SAMSUNG MZQL27T6HBLA-00A07", Firmware: "GDC5602Q", SizeBytes: 7681501126656, LogicalBytes: 4096, PhysicalBytes: 4096, Transport: "nvme", Path: "pci-0000:61:00.0-nvme-1"},
		{ID: "naa.5000c500c8a1b2c3", Name: "sda", WWN: "naa.5000c500c8a1b2c3", Serial: "WS21ABCD", Model: "ST4000NM000A-2HZ", Firmware: "TN02", SizeBytes: 4000787030016, LogicalBytes: 512, PhysicalBytes: 4096, Rotational: true, Transport: "sata", Path: "pci-0000:00:17.0-ata-3-scsi-0:0:0"},
		{ID: "path.pci-0000:3b:00.0-sas-0x5000c500b1a2c3d5", Name: "sdb", Model: "SEAGATE ST2400MM0129", SizeBytes: 2400476553216, LogicalBytes: 512, PhysicalBytes: 512, Transport: "sas", Path: "pci-0000:3b:00.0-sas-0x5000c500b1a2c3d5"},
	}
	if !reflect.DeepEqual(f.Block, wantDisks) {
		t.Errorf("disks\n got %+v\nwant %+v", f.Block, wantDisks)
	}
	wantNICs := []NIC{
		{MAC: "52:54:00:00:00:99", Permanent: true, Name: "usb0", Bus: "usb", PCI: "0000:00:14.0", NUMANode: -1},
		{MAC: "a0:88:c2:01:02:03", Permanent: true, Name: "eth0", Driver: "mlx5_core", Bus: "pci", PCI: "0000:e1:00.0", NUMANode: 1, PortID: "p0"},
	}
	if !reflect.DeepEqual(f.Net, wantNICs) {
		t.Errorf("nics\n got %+v\nwant %+v", f.Net, wantNICs)
	}
	if l := f.Link[1]; !l.Carrier || l.SpeedMbps != 100000 || l.MTU != 9000 || l.Neighbour == nil || l.Neighbour.PortID != "Ethernet7" {
		t.Errorf("link %+v", l)
	}
	if want := (TPM{Present: true, Version: "2.0", Manufacturer: "IFX", Interface: "tpm_tis"}); f.TPM != want {
		t.Errorf("tpm %+v", f.TPM)
	}
	if f.Kernel.OSName != "Debian GNU/Linux 13 (trixie)" || f.Kernel.IOMMUUnits != 2 {
		t.Errorf("kernel %+v", f.Kernel)
	}
	for _, s := range f.Sections() {
		if bytes.Contains(s.JSON, []byte("SECRET")) {
			t.Errorf("section %s has the join token of the firmware's OEM strings", s.Name)
		}
	}
}

// The same machine after a reboot: disks and NICs came up in another order,
// memory is short of some KiB, and the SCSI hosts have other numbers. Nothing
// of that changes a hash.
func TestHashesSurviveAReboot(t *testing.T) {
	first := plant(t, "server.tree")
	before := recordedFacts(context.Background(), first).Sections()

	again := plant(t, "server.tree")
	swap := map[string]string{
		"block/sdb":      "../devices/pci0000:00/0000:00:17.0/ata5/host4/target4:0:0/4:0:0:0/block/sda",
		"block/sda":      "../devices/pci0000:3a/0000:3b:00.0/host9/port-9:0/end_device-9:0/target9:0:0/9:0:0:0/block/sdb",
		"class/net/eth9": "../../devices/pci0000:e0/0000:e1:00.0/net/eth0",
	}
	for _, old := range []string{"block/sda", "block/sdb", "class/net/eth0"} {
		if err := os.Remove(filepath.Join(again.Sys, old)); err != nil {
			t.Fatal(err)
		}
	}
	for at, target := range swap {
		if err := os.Symlink(target, filepath.Join(again.Sys, at)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(again.Proc, "meminfo"), []byte("MemTotal:       528280112 kB\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	after := recordedFacts(context.Background(), again).Sections()
	for i, s := range before {
		if s.Name != "link" && s.SHA256 != after[i].SHA256 {
			t.Errorf("section %s changed:\n%s\n%s", s.Name, s.JSON, after[i].JSON)
		}
	}
}

func TestDeviceTreeMachine(t *testing.T) {
	f := recordedFacts(context.Background(), plant(t, "arm.tree"))
	if f.System.Product != "Raspberry Pi 5" || f.System.Serial != "1234abcd" || f.System.Source != "devicetree" || f.Firmware.Mode != "devicetree" {
		t.Errorf("system %+v, firmware %+v", f.System, f.Firmware)
	}
	if f.CPU.Model != "Neoverse-V2" || f.CPU.Threads != 2 {
		t.Errorf("cpu %+v", f.CPU)
	}
	if f.Memory.TotalBytes != 7872<<20 || f.Memory.Source != "meminfo" {
		t.Errorf("memory %+v", f.Memory)
	}
	if len(f.Block) != 0 || len(f.Errors) != 0 {
		t.Errorf("disks %+v, errors %v", f.Block, f.Errors)
	}
}

// A machine where nothing can be read still gives every section.
func TestUnreadableSectionCostsNoOther(t *testing.T) {
	roots := plant(t, "server.tree")
	if err := os.WriteFile(filepath.Join(roots.Sys, "firmware/dmi/tables/DMI"), []byte{1, 200, 0, 0}, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(roots.Proc, "cpuinfo")); err != nil {
		t.Fatal(err)
	}
	roots.PermanentMACs = func() (map[string]net.HardwareAddr, error) { return nil, errors.New("no netlink here") }
	sections := recordedFacts(context.Background(), roots).Sections()
	broken := map[string]string{}
	for i, s := range sections {
		if s.Name != SectionNames[i] {
			t.Errorf("section %d is %s", i, s.Name)
		}
		if !json.Valid(s.JSON) {
			t.Errorf("section %s is not JSON: %s", s.Name, s.JSON)
		}
		if s.Error != "" {
			broken[s.Name] = s.Error
		}
	}
	for _, name := range []string{"system", "firmware", "cpu", "memory", "net"} {
		if broken[name] == "" {
			t.Errorf("section %s says nothing is wrong", name)
		}
	}
	if len(broken) != 5 {
		t.Errorf("broken: %v", broken)
	}
}

func TestBootIDOfTheKernel(t *testing.T) {
	roots := plant(t, "server.tree")
	if id, err := roots.bootID(); err != nil || id != "3d3b3f0e-8a8e-4b5c-9d0c-3a8b6e0f6c11" {
		t.Errorf("%q %v", id, err)
	}
	if err := os.WriteFile(filepath.Join(roots.Proc, "sys/kernel/random/boot_id"), []byte("x\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if id, err := roots.bootID(); err == nil {
		t.Errorf("took %q for a boot id", id)
	}
}

func TestCollectStopsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Collect(ctx, Roots{}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

func TestHardwareKey(t *testing.T) {
	base := Facts{
		System: System{UUID: "u", Serial: "s", BoardSerial: "b"},
		Net:    []NIC{{MAC: "02", Permanent: true}, {MAC: "01", Permanent: true}, {MAC: "09", Permanent: true, Bus: "usb"}, {MAC: "08"}},
	}
	key, note := base.hardwareKey()
	if len(key) != 64 || note != "" {
		t.Fatalf("key %q, note %q", key, note)
	}
	other := base
	other.Net = []NIC{{MAC: "01", Permanent: true}, {MAC: "02", Permanent: true}}
	if again, _ := other.hardwareKey(); again != key {
		t.Error("the key depends on order, on USB or on addresses that are not the device's own")
	}
	other.System.Serial = ""
	if again, _ := other.hardwareKey(); again == key || again == "" {
		t.Error("a missing serial must give another key, not none")
	}
	if key, note := (Facts{}).hardwareKey(); key != "" || !strings.Contains(note, "nothing tells this machine") {
		t.Errorf("empty machine: key %q, note %q", key, note)
	}
}

func TestRender(t *testing.T) {
	f := recordedFacts(context.Background(), plant(t, "server.tree"))
	f.fail("gpu", ErrProbeHung)
	var table, object bytes.Buffer
	if err := RenderHardware(&table, f); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Supermicro SYS-821GE-TNHR", "serial S512345X4A12345", "2 sockets, 2 cores, 4 threads", "128 GiB, 2 modules of 64 GiB DDR5", "7 TiB nvme SAMSUNG", "incomplete: nvidia-smi does not answer"} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("table lacks %q:\n%s", want, &table)
		}
	}
	if err := RenderHardwareJSON(&object, f); err != nil {
		t.Fatal(err)
	}
	var back struct {
		Facts
		Schema int               `json:"schema_version"`
		Hashes map[string]string `json:"section_sha256"`
	}
	if err := json.Unmarshal(object.Bytes(), &back); err != nil || back.Schema != 1 || len(back.Hashes) != len(SectionNames) || !reflect.DeepEqual(back.System, f.System) {
		t.Errorf("json: %v %+v", err, back)
	}
}
