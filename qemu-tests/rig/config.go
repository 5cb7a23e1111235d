package rig

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// HostAddress is where a machine reaches the host that runs QEMU.
const HostAddress = "10.0.2.2"

// Config is one machine. The zero value of each field is a sensible machine
// but for Name.
type Config struct {
	// Name is a short word for logs and file names.
	Name string
	// Dir is the folder for console, logs and firmware variables; it must be
	// there. Run makes one; Start needs it.
	Dir string

	// Kernel, when given, is started directly, without firmware's boot order;
	// Initrd and Cmdline belong to it. Else Firmware starts the machine.
	Kernel, Initrd, Cmdline string
	// Firmware is UEFI (default), SecureBoot or BIOS.
	Firmware string
	// NetworkBoot is what UEFI tries on each card: PXE or HTTPBoot, over IPv4
	// only; empty for all that it knows, which takes minutes when nobody
	// answers.
	NetworkBoot string

	// MemoryMiB defaults to 1024.
	MemoryMiB int
	// CPUs defaults to 2 under KVM and 1 under TCG: QEMU 7.2's emulation of
	// several processors lets one run code that another is patching. Seen
	// with Debian's 6.12: "Oops: int3" in a static key, and lost timer
	// interrupts (RCU stalls).
	CPUs int
	// UUID is the SMBIOS system UUID; made from Name when empty.
	UUID string
	// SMBIOS are type 11 strings, such as "bcd.gateway=https://…".
	SMBIOS []string
	// RTC is what the machine's clock starts at, "2006-01-02T15:04:05";
	// empty for the host's time in UTC.
	RTC string
	// Watchdog adds an i6300esb whose bite resets the machine.
	Watchdog bool
	// Keyboard lets Type write to the console's serial port, as somebody does
	// who sits before the machine.
	Keyboard bool
	// Results adds a second serial port, written to results.log.
	Results bool
	// TPM is the control socket of a running swtpm, empty for no TPM.
	TPM string

	NICs  []NIC
	Disks []Disk

	// Accel is "kvm", "tcg", or empty for the best that works here.
	Accel string
}

// NIC is a network card, on QEMU's user network or on a LAN.
type NIC struct {
	// Socket is that of a LAN's port; empty for the user network.
	Socket string
	// Model is "virtio" (default), "e1000e", "e1000" or "igb".
	Model string
	// MAC defaults to one made from the machine's name.
	MAC string
	// BootFile, when given, is offered by DHCP and served by TFTP from TFTPDir.
	TFTPDir, BootFile string
	// BootIndex is the place in the firmware's boot order, 1 first, 0 none. A
	// card with none has no boot ROM, which saves the firmware seconds.
	//
	// A virtio card is booted by OVMF's own driver and PXE client. Any other
	// has QEMU's iPXE ROM, which hands the file's name to the program that it
	// loads as load options; systemd's EFI stub then takes that name for the
	// kernel command line, in place of the one inside the UKI.
	BootIndex int
	// Capture writes the first 512 bytes of each packet to nic<N>.pcap.
	Capture bool
}

// Disk is a disk of a machine.
type Disk struct {
	// Path is a file, or a QEMU URL such as "nbd:unix:/path".
	Path string
	// Format is "raw" (default) or "qcow2".
	Format string
	// Bus is "virtio" (default), "nvme", "ahci" or "megasas".
	Bus string
	// Serial is what the machine sees as serial number, at most 20 characters.
	Serial string
	// BootIndex is as in NIC.
	BootIndex int
	// SectorSize is 512 (default) or 4096, logical and physical.
	SectorSize int
	ReadOnly   bool
}

// Names of the files in Config.Dir.
const (
	ConsoleLog = "console.log"
	ResultsLog = "results.log"
	StderrLog  = "qemu.log"
	varsFile   = "vars.fd"
	smbiosDir  = "smbios"
)

var (
	nameRule   = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,31}$`)
	uuidRule   = regexp.MustCompile(`^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$`)
	serialRule = regexp.MustCompile(`^[A-Za-z0-9_-]{0,20}$`)
	macRule    = regexp.MustCompile(`^[0-9a-f]{2}(:[0-9a-f]{2}){5}$`)
)

func (c Config) processors(accel string) int {
	switch {
	case c.CPUs != 0:
		return c.CPUs
	case accel == KVM:
		return 2
	}
	return 1
}

// withDefaults fills what is empty and checks the rest.
func (c Config) withDefaults() (Config, error) {
	if !nameRule.MatchString(c.Name) {
		return c, fmt.Errorf("machine name %q is not a short lower-case word", c.Name)
	}
	if c.Dir == "" {
		return c, fmt.Errorf("machine %s: no folder given", c.Name)
	}
	if c.MemoryMiB == 0 {
		c.MemoryMiB = 1024
	}
	sum := sha256.Sum256([]byte("bcd rig " + c.Name))
	if c.UUID == "" {
		sum[6], sum[8] = sum[6]&0x0f|0x80, sum[8]&0x3f|0x80
		c.UUID = fmt.Sprintf("%x-%x-%x-%x-%x", sum[:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
	}
	if !uuidRule.MatchString(c.UUID) {
		return c, fmt.Errorf("machine %s: UUID %q is malformed", c.Name, c.UUID)
	}
	if c.Firmware == "" {
		c.Firmware = UEFI
	}
	if c.Kernel == "" {
		if _, _, err := c.firmwareFiles(); err != nil {
			return c, fmt.Errorf("machine %s: %w", c.Name, err)
		}
	}
	if c.NetworkBoot != "" && c.NetworkBoot != PXE && c.NetworkBoot != HTTPBoot || c.NetworkBoot != "" && c.Firmware == BIOS {
		return c, fmt.Errorf("machine %s: network boot %q: use pxe or http, and with UEFI", c.Name, c.NetworkBoot)
	}
	c.NICs = append([]NIC(nil), c.NICs...)
	for i := range c.NICs {
		n := &c.NICs[i]
		if n.Model == "" {
			n.Model = "virtio"
		}
		if n.MAC == "" {
			n.MAC = fmt.Sprintf("52:54:00:%02x:%02x:%02x", sum[16], sum[17], byte(i)+1)
		}
		if _, ok := nicModels[n.Model]; !ok || !macRule.MatchString(n.MAC) {
			return c, fmt.Errorf("machine %s: network card %d: model %q or address %q is unknown", c.Name, i, n.Model, n.MAC)
		}
		if n.BootFile != "" && n.TFTPDir == "" {
			return c, fmt.Errorf("machine %s: network card %d: a boot file needs a folder to serve it from", c.Name, i)
		}
		if n.Socket != "" && n.TFTPDir != "" {
			return c, fmt.Errorf("machine %s: network card %d: a LAN has its own servers; no folder to serve from", c.Name, i)
		}
	}
	c.Disks = append([]Disk(nil), c.Disks...)
	for i := range c.Disks {
		d := &c.Disks[i]
		if d.Format == "" {
			d.Format = "raw"
		}
		if d.Bus == "" {
			d.Bus = "virtio"
		}
		if d.SectorSize == 0 {
			d.SectorSize = 512
		}
		if d.Path == "" || d.Format != "raw" && d.Format != "qcow2" || d.SectorSize != 512 && d.SectorSize != 4096 || !serialRule.MatchString(d.Serial) {
			return c, fmt.Errorf("machine %s: disk %d: path %q, format %q, sector size %d or serial %q is not usable", c.Name, i, d.Path, d.Format, d.SectorSize, d.Serial)
		}
	}
	return c, nil
}

var nicModels = map[string]string{"virtio": "virtio-net-pci", "e1000e": "e1000e", "e1000": "e1000", "igb": "igb"}

// quote doubles commas: in a QEMU option value a single one ends it.
func quote(value string) string { return strings.ReplaceAll(value, ",", ",,") }

// maxSMBIOSString is what fits QEMU's and a firmware's table with room.
const maxSMBIOSString = 4096

// writeSMBIOS puts each string into a file of its own, private to this user,
// and gives the options that name them. No string is in the options.
func writeSMBIOS(dir string, strs []string) ([]string, error) {
	var args []string
	if len(strs) == 0 {
		return nil, nil
	}
	folder := filepath.Join(dir, smbiosDir)
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, err
	}
	for i, s := range strs {
		// The value stays out of the error: it may be a token.
		if s == "" || len(s) > maxSMBIOSString || strings.ContainsAny(s, "\x00\n\r") {
			return nil, fmt.Errorf("SMBIOS string %d of %d bytes is empty, too long or has a control character", i+1, len(s))
		}
		name := filepath.Join(folder, fmt.Sprint(i+1))
		if err := os.WriteFile(name, []byte(s), 0o600); err != nil {
			return nil, err
		}
		args = append(args, "-smbios", "type=11,path="+quote(name))
	}
	return args, nil
}

// args gives QEMU's command line. Everything that the machine has is named:
// nothing comes from QEMU's defaults or the user's configuration.
func (c Config) args(accel, qmpSocket, code string, smbios []string) ([]string, error) {
	a := []string{"-name", "bcd-" + c.Name, "-nodefaults", "-no-user-config", "-display", "none", "-machine", c.machine()}
	switch accel {
	case KVM:
		a = append(a, "-accel", "kvm")
	case TCG:
		a = append(a, "-accel", "tcg,thread=multi")
	default:
		return nil, fmt.Errorf("accelerator %q: use kvm or tcg", accel)
	}
	// -cpu max has RDRAND: without it the kernel waits seconds for entropy.
	a = append(a, "-cpu", "max", "-smp", fmt.Sprint(c.processors(accel)), "-m", fmt.Sprintf("%dM", c.MemoryMiB), "-uuid", c.UUID,
		"-qmp", "unix:"+quote(qmpSocket)+",server=on,wait=off")
	if c.Keyboard {
		// Its output is the console's file, see VM.launch.
		a = append(a, "-chardev", "stdio,id=console,signal=off")
	} else {
		a = append(a, "-chardev", "file,id=console,append=on,path="+quote(filepath.Join(c.Dir, ConsoleLog)))
	}
	a = append(a, "-serial", "chardev:console")
	if c.Results {
		a = append(a, "-chardev", "file,id=results,append=on,path="+quote(filepath.Join(c.Dir, ResultsLog)), "-serial", "chardev:results")
	}
	rtc := "utc"
	if c.RTC != "" {
		rtc = quote(c.RTC)
	}
	a = append(a, "-rtc", "base="+rtc)
	if c.Kernel != "" {
		a = append(a, "-kernel", c.Kernel, "-append", c.Cmdline)
		if c.Initrd != "" {
			a = append(a, "-initrd", c.Initrd)
		}
	} else {
		a = append(a, c.firmwareArgs(code)...)
	}
	a = append(a, smbios...)
	if c.Watchdog {
		a = append(a, "-device", "i6300esb", "-action", "watchdog=reset")
	}
	if c.TPM != "" {
		a = append(a, "-chardev", "socket,id=tpm,path="+quote(c.TPM), "-tpmdev", "emulator,id=tpm0,chardev=tpm", "-device", "tpm-crb,tpmdev=tpm0")
	}
	for i, n := range c.NICs {
		a = append(a, n.args(i, c.Dir, c.Firmware)...)
	}
	for i, d := range c.Disks {
		more, err := d.args(i)
		if err != nil {
			return nil, fmt.Errorf("machine %s: %w", c.Name, err)
		}
		a = append(a, more...)
	}
	return a, nil
}

func (n NIC) args(i int, dir, firmware string) []string {
	netdev := fmt.Sprintf("user,id=net%d", i)
	if n.Socket != "" {
		netdev = fmt.Sprintf("stream,id=net%d,server=off,addr.type=unix,addr.path=%s", i, quote(n.Socket))
	}
	if n.TFTPDir != "" {
		netdev += ",tftp=" + quote(n.TFTPDir)
	}
	if n.BootFile != "" {
		netdev += ",bootfile=" + quote(n.BootFile)
	}
	device := fmt.Sprintf("%s,netdev=net%d,mac=%s", nicModels[n.Model], i, n.MAC)
	if n.BootIndex > 0 {
		device += fmt.Sprintf(",bootindex=%d", n.BootIndex)
	}
	// A BIOS has no network driver: the card's ROM is all there is.
	if n.BootIndex == 0 || n.Model == "virtio" && firmware != BIOS {
		device += ",romfile="
	}
	a := []string{"-netdev", netdev, "-device", device}
	if n.Capture {
		a = append(a, "-object", fmt.Sprintf("filter-dump,id=dump%d,netdev=net%d,maxlen=512,file=%s", i, i, quote(filepath.Join(dir, fmt.Sprintf("nic%d.pcap", i)))))
	}
	return a
}

func (d Disk) args(i int) ([]string, error) {
	drive := fmt.Sprintf("if=none,id=disk%d,format=%s,file=%s,cache=writeback,discard=unmap", i, d.Format, quote(d.Path))
	if d.ReadOnly {
		drive += ",readonly=on"
	}
	common := fmt.Sprintf(",drive=disk%d", i)
	if d.Serial != "" {
		common += ",serial=" + d.Serial
	}
	if d.BootIndex > 0 {
		common += fmt.Sprintf(",bootindex=%d", d.BootIndex)
	}
	if d.SectorSize != 512 {
		common += fmt.Sprintf(",logical_block_size=%d,physical_block_size=%d", d.SectorSize, d.SectorSize)
	}
	a := []string{"-drive", drive}
	switch d.Bus {
	case "virtio":
		return append(a, "-device", "virtio-blk-pci"+common), nil
	case "nvme":
		if d.Serial == "" {
			return nil, errors.New("an NVMe disk needs a serial number")
		}
		return append(a, "-device", "nvme"+common), nil
	case "ahci":
		return append(a, "-device", fmt.Sprintf("ahci,id=ahci%d", i), "-device", fmt.Sprintf("ide-hd,bus=ahci%d.0", i)+common), nil
	case "megasas":
		return append(a, "-device", fmt.Sprintf("megasas,id=sas%d", i), "-device", fmt.Sprintf("scsi-hd,bus=sas%d.0", i)+common), nil
	}
	return nil, fmt.Errorf("disk bus %q: use virtio, nvme, ahci or megasas", d.Bus)
}
