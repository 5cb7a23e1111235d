package main

import (
	"os"
	"path/filepath"
	"strings"
	"time"
)

const machineUUID = "01234567-89ab-4cde-8f01-23456789abcd"

// machineAddress is 52:54:00:12:34:56, QEMU's first card.
var machineAddress = []byte{0x52, 0x54, 0x00, 0x12, 0x34, 0x56}

// variant is one firmware on one network.
type variant struct {
	name    string
	program string
	qemu    func(dir string) []string
	// dhcp and proxy are options of the two dnsmasq; no proxy when empty.
	dhcp, proxy []string
	wants       []string
	limit       time.Duration
	// script, when given, is boot.ipxe.
	script string
}

const limit = 100 * time.Second // TCG on a busy machine; most take ten

var (
	fullPXE  = []string{"dhcp.discover", "dhcp.request", "tftp.rrq"}
	nothing  = []string{}
	bootEFI  = []string{"--dhcp-boot=boot.efi"}
	leaked60 = []string{"--dhcp-boot=boot.efi", "--dhcp-option-force=60,PXEClient"}
	httpBoot = []string{"--dhcp-vendorclass=set:http,HTTPClient", "--dhcp-option-force=tag:http,60,HTTPClient", "--dhcp-boot=tag:http,http://" + serverIP + "/boot.efi"}
	ipxeBoot = []string{"--dhcp-boot=http://" + serverIP + "/boot.ipxe"}
	bootROM  = []string{"--pxe-service=x86PC,bcd,boot", "--pxe-service=x86-64_EFI,bcd,boot.efi", "--pxe-service=ARM64_EFI,bcd,boot.efi", "--pxe-service=BC_EFI,bcd,boot.efi"}
)

var variants = []variant{
	// x64 UEFI by OVMF's own virtio driver and PXE client.
	{name: "ovmf-pxe", program: x64, qemu: ovmf("virtio-net-pci", "", false), dhcp: bootEFI, wants: append(fullPXE, "tftp.error", "tftp.ack"), limit: limit},
	{name: "ovmf-pxe-leak60", program: x64, qemu: ovmf("virtio-net-pci", "", false), dhcp: leaked60, wants: []string{"dhcp.discover", "dhcp.request", "dhcp.4011"}, limit: limit},
	{name: "ovmf-pxe-proxy", program: x64, qemu: ovmf("virtio-net-pci", "", false), dhcp: nothing, proxy: bootROM, wants: append(fullPXE, "dhcp.4011", "tftp.error"), limit: limit},
	{name: "ovmf-http", program: x64, qemu: ovmf("virtio-net-pci", "", true), dhcp: httpBoot, wants: []string{"dhcp.discover", "dhcp.request", "http.head", "http.get"}, limit: limit},
	// BIOS by SeaBIOS and the iPXE ROM that QEMU's cards have.
	{name: "seabios-ipxe", program: x64, qemu: seabios("virtio-net-pci"), dhcp: []string{"--dhcp-boot=boot"}, wants: fullPXE, limit: limit},
	{name: "seabios-ipxe-http", program: x64, qemu: seabios("virtio-net-pci"), dhcp: ipxeBoot, script: "#!ipxe\nimgfetch http://" + serverIP + "/boot.efi\n", wants: []string{"dhcp.discover", "dhcp.request", "http.get"}, limit: limit},
	{name: "seabios-ipxe-leak60", program: x64, qemu: seabios("e1000"), dhcp: []string{"--dhcp-boot=boot", "--dhcp-option-force=60,PXEClient"}, wants: fullPXE, limit: limit},
	{name: "seabios-ipxe-proxy", program: x64, qemu: seabios("virtio-net-pci"), proxy: bootROM, wants: append(fullPXE, "dhcp.4011"), limit: limit},
	// Plain iPXE, loaded by the iPXE of the ROM, asks by itself again.
	{name: "seabios-undionly", program: x64, qemu: seabios("virtio-net-pci"), dhcp: []string{"--dhcp-boot=undionly.kpxe"}, wants: append(fullPXE, "tftp.ack", "dhcp.again"), limit: limit},
	// x64 UEFI with the same ROM's EFI driver in place of OVMF's.
	{name: "efi-ipxe-rom", program: x64, qemu: ovmf("e1000", "efi-e1000.rom", false), dhcp: bootEFI, wants: fullPXE, limit: limit},
	{name: "efi-ipxe-rom-proxy", program: x64, qemu: ovmf("e1000", "efi-e1000.rom", false), proxy: bootROM, wants: append(fullPXE, "dhcp.4011"), limit: limit},
	// arm64: AAVMF and U-Boot.
	{name: "aavmf-pxe", program: arm64, qemu: aavmf(false), dhcp: bootEFI, wants: append(fullPXE, "tftp.error", "tftp.ack"), limit: limit},
	{name: "aavmf-pxe-leak60", program: arm64, qemu: aavmf(false), dhcp: leaked60, wants: []string{"dhcp.discover", "dhcp.request", "dhcp.4011"}, limit: limit},
	{name: "aavmf-http", program: arm64, qemu: aavmf(true), dhcp: httpBoot, wants: []string{"dhcp.discover", "dhcp.request", "http.head", "http.get"}, limit: limit},
	{name: "uboot-arm64", program: arm64, qemu: uboot, dhcp: []string{"--dhcp-boot=boot"}, wants: fullPXE, limit: limit},
}

const (
	x64   = "qemu-system-x86_64"
	arm64 = "qemu-system-aarch64"
)

func ovmf(card, rom string, http bool) func(string) []string {
	return func(dir string) []string {
		a := []string{"-machine", "q35", "-accel", "tcg", "-cpu", "max", "-m", "512M",
			"-drive", "if=pflash,format=raw,readonly=on,file=/usr/share/OVMF/OVMF_CODE_4M.fd",
			"-drive", "if=pflash,format=raw,snapshot=on,file=/usr/share/OVMF/OVMF_VARS_4M.fd",
			"-device", card + ",netdev=n0,mac=52:54:00:12:34:56,bootindex=1,romfile=" + rom}
		return append(a, onlyOne(http)...)
	}
}

// onlyOne makes edk2 offer IPv4 PXE or, without both PXE, HTTP boot only.
func onlyOne(http bool) []string {
	a := []string{"-fw_cfg", "name=opt/org.tianocore/IPv6PXESupport,string=n"}
	if http {
		a = append(a, "-fw_cfg", "name=opt/org.tianocore/IPv4PXESupport,string=n")
	}
	return a
}

func seabios(card string) func(string) []string {
	return func(string) []string {
		return []string{"-machine", "pc", "-accel", "tcg", "-m", "256M", "-device", card + ",netdev=n0,mac=52:54:00:12:34:56,bootindex=1"}
	}
}

func aavmf(http bool) func(string) []string {
	return func(string) []string {
		return append([]string{"-machine", "virt", "-cpu", "cortex-a57", "-accel", "tcg", "-m", "512M",
			"-bios", "/usr/share/qemu-efi-aarch64/QEMU_EFI.fd",
			"-device", "virtio-net-pci,netdev=n0,mac=52:54:00:12:34:56,bootindex=1,romfile="}, onlyOne(http)...)
	}
}

func uboot(string) []string {
	return []string{"-machine", "virt", "-cpu", "cortex-a57", "-accel", "tcg", "-m", "512M", "-bios", "/usr/lib/u-boot/qemu_arm64/u-boot.bin",
		"-device", "virtio-net-pci,netdev=n0,mac=52:54:00:12:34:56,romfile="}
}

// writeFiles makes what the servers serve: a file of 16 KiB that nothing can
// run, because only how it is asked for is wanted.
func (v variant) writeFiles(dir string) error {
	junk := []byte(strings.Repeat("not a program: ", 16<<10/15+1))[:16<<10]
	for _, name := range []string{"boot.efi", "boot", "boot.0"} {
		if err := os.WriteFile(filepath.Join(dir, name), junk, 0o644); err != nil {
			return err
		}
	}
	if v.script != "" {
		if err := os.WriteFile(filepath.Join(dir, "boot.ipxe"), []byte(v.script), 0o644); err != nil {
			return err
		}
	}
	if b, err := os.ReadFile("/usr/lib/ipxe/undionly.kpxe"); err == nil {
		return os.WriteFile(filepath.Join(dir, "undionly.kpxe"), b, 0o644)
	}
	return nil
}
