package image

import (
	"fmt"
	"strings"
)

// Profile is a kind of machine that an image is for. Profiles differ in kernel,
// modules, firmware and default command line; everything else is the same.
type Profile struct {
	Name string
	// kernel gives the metapackage by architecture.
	kernel map[string]string
	// cmdline is the default kernel command line by architecture.
	cmdline map[string]string
	// modules is a table of patterns by function, see parseModules.
	modules string
	// firmware says whether firmware files are wanted at all.
	firmware bool
}

// panicReboot and what follows stand on every command line: a kernel that
// panics comes back by itself after half a minute (long enough to read the
// screen), and /dev/kmsg, where init writes, is not rate limited.
const panicReboot = "panic=30 printk.devkmsg=on"

// Profiles are the known ones by name.
var Profiles = map[string]*Profile{
	"virtual": {
		Name:   "virtual",
		kernel: map[string]string{"amd64": "linux-image-cloud-amd64", "arm64": "linux-image-cloud-arm64"},
		cmdline: map[string]string{
			"amd64": "console=tty0 console=ttyS0,115200 " + panicReboot,
			"arm64": "console=tty0 console=ttyAMA0,115200 " + panicReboot,
		},
		modules: commonModules + virtualModules,
	},
	"metal": {
		Name:   "metal",
		kernel: map[string]string{"amd64": "linux-image-amd64", "arm64": "linux-image-arm64"},
		// One serial port only: the kernel takes the first that is named, and
		// a port that is not there silences the others. For a BMC on the
		// second port, build with -cmdline.
		cmdline: map[string]string{
			"amd64": "console=tty0 console=ttyS0,115200 " + panicReboot,
			"arm64": "console=tty0 console=ttyAMA0,115200 " + panicReboot,
		},
		modules:  commonModules + metalModules,
		firmware: true,
	},
}

// The tables of modules: an allow-list by function. Each line is a function
// and the patterns that serve it, as kmod.Tree.Select reads them: paths below
// kernel/, "*" within a name, "**" over folders, a leading "-" to leave out
// again, a leading "?" for what only some kernels have. A driver that another
// one needs comes by itself.

const commonModules = `
# what both kinds of machine need
filesystems  fs/fat/fat fs/fat/vfat fs/nls/nls_cp437 fs/nls/nls_ascii fs/nls/nls_iso8859-1 fs/nls/nls_utf8 fs/efivarfs/efivarfs fs/ext4/ext4 fs/overlayfs/overlay fs/isofs/isofs fs/squashfs/squashfs
raid         drivers/md/md-mod drivers/md/raid0 drivers/md/raid1 drivers/md/raid10 drivers/md/raid456
dm           drivers/md/dm-mod drivers/md/dm-mirror drivers/md/dm-snapshot drivers/md/dm-raid drivers/md/dm-crypt drivers/md/dm-thin-pool drivers/md/dm-multipath drivers/md/dm-verity drivers/md/dm-integrity
block        drivers/block/loop drivers/block/nbd drivers/block/virtio_blk drivers/nvme/host/nvme drivers/nvme/host/nvme-core
ata          drivers/ata/libata drivers/ata/ahci ?drivers/ata/ata_piix ?drivers/ata/ata_generic
scsi         drivers/scsi/sd_mod drivers/scsi/sr_mod drivers/scsi/sg drivers/scsi/virtio_scsi ?drivers/scsi/vmw_pvscsi ?drivers/scsi/hv_storvsc
virtio       drivers/net/virtio_net drivers/virtio/* drivers/char/hw_random/virtio-rng ?drivers/char/virtio_console
config       ?drivers/firmware/qemu_fw_cfg ?drivers/firmware/dmi-sysfs
links        net/8021q/8021q drivers/net/bonding/bonding net/packet/af_packet
tpm          ?drivers/char/tpm/* -drivers/char/tpm/tpm_vtpm_proxy -drivers/char/tpm/xen-tpmfront
watchdog     drivers/watchdog/softdog ?drivers/watchdog/i6300esb ?drivers/watchdog/wdat_wdt
pstore       ?drivers/firmware/efi/efi-pstore ?fs/pstore/ramoops
input        ?drivers/input/evdev
`

const virtualModules = `
# hypervisors and clouds
nics         drivers/net/ethernet/amazon/** drivers/net/ethernet/google/** ?drivers/net/ethernet/microsoft/** drivers/net/ethernet/mellanox/** ?drivers/net/ethernet/intel/** ?drivers/net/vmxnet3/*
hyperv       ?drivers/hv/* ?drivers/net/hyperv/* ?drivers/pci/controller/pci-hyperv ?drivers/input/serio/hyperv-keyboard
xen          ?drivers/net/xen-netfront ?drivers/block/xen-blkfront
`

const metalModules = `
# servers: network
nics-intel     drivers/net/ethernet/intel/**
nics-broadcom  drivers/net/ethernet/broadcom/** -drivers/net/ethernet/broadcom/b44 -drivers/net/ethernet/broadcom/cnic
nics-mellanox  drivers/net/ethernet/mellanox/**
nics-marvell   drivers/net/ethernet/qlogic/** ?drivers/net/ethernet/marvell/** drivers/net/ethernet/cavium/** drivers/net/ethernet/aquantia/**
nics-chelsio   drivers/net/ethernet/chelsio/** -drivers/net/ethernet/chelsio/cxgb/*
nics-others    drivers/net/ethernet/amd/xgbe/* drivers/net/ethernet/cisco/** drivers/net/ethernet/emulex/** drivers/net/ethernet/brocade/** drivers/net/ethernet/huawei/** drivers/net/ethernet/myricom/** drivers/net/ethernet/netronome/** drivers/net/ethernet/pensando/** drivers/net/ethernet/sfc/** drivers/net/ethernet/realtek/r8169 drivers/net/ethernet/realtek/8139cp drivers/net/ethernet/realtek/8139too drivers/net/ethernet/amazon/** drivers/net/ethernet/google/** ?drivers/net/ethernet/microsoft/** ?drivers/net/vmxnet3/*
nics-arm       ?drivers/net/ethernet/hisilicon/** ?drivers/net/ethernet/apm/** ?drivers/net/ethernet/freescale/** ?drivers/net/ethernet/stmicro/**
nics-usb       drivers/net/usb/cdc_ether drivers/net/usb/cdc_ncm drivers/net/usb/rndis_host drivers/net/usb/ax88179_178a drivers/net/usb/r8152 drivers/net/usb/asix
phy            drivers/net/phy/* ?drivers/net/mdio/*
# servers: storage
nvme           drivers/nvme/host/* ?drivers/pci/controller/vmd
ata-metal      drivers/ata/libahci ?drivers/ata/ahci_platform ?drivers/ata/sata_* -drivers/ata/sata_sx4 ?drivers/ata/pata_*platform
raid-hba       drivers/scsi/megaraid/megaraid_sas drivers/scsi/mpt3sas/* drivers/scsi/mpi3mr/* drivers/scsi/hpsa drivers/scsi/smartpqi/* drivers/scsi/aacraid/* ?drivers/scsi/arcmsr/* drivers/scsi/3w-sas drivers/scsi/3w-9xxx drivers/scsi/mvsas/* drivers/scsi/pm8001/* ?drivers/scsi/isci/* drivers/scsi/esas2r/* drivers/scsi/stex drivers/scsi/hptiop ?drivers/scsi/hisi_sas/* drivers/message/fusion/mptsas drivers/message/fusion/mptspi drivers/scsi/mvumi ?drivers/scsi/ipr
fibre-channel  drivers/scsi/lpfc/* drivers/scsi/qla2xxx/qla2xxx drivers/scsi/qedf/* drivers/scsi/qedi/* ?drivers/scsi/fnic/* drivers/scsi/snic/*
multipath      drivers/scsi/device_handler/* drivers/scsi/ses drivers/md/dm-round-robin drivers/md/dm-queue-length drivers/md/dm-service-time
# servers: management and console
ipmi           drivers/char/ipmi/ipmi_si drivers/char/ipmi/ipmi_ssif drivers/char/ipmi/ipmi_devintf drivers/char/ipmi/ipmi_watchdog drivers/char/ipmi/ipmi_poweroff drivers/acpi/acpi_ipmi
watchdog-metal ?drivers/watchdog/iTCO_wdt ?drivers/watchdog/sp5100_tco ?drivers/watchdog/hpwdt ?drivers/watchdog/sbsa_gwdt ?drivers/watchdog/nv_tco
smbus          ?drivers/i2c/busses/i2c-i801 ?drivers/i2c/busses/i2c-ismt ?drivers/i2c/busses/i2c-piix4 ?drivers/mfd/lpc_ich
usb            drivers/usb/host/xhci-* drivers/usb/host/ehci-* ?drivers/usb/host/uhci-hcd ?drivers/usb/host/ohci-* drivers/usb/storage/usb-storage drivers/usb/storage/uas
keyboard       drivers/hid/hid drivers/hid/hid-generic drivers/hid/usbhid/usbhid drivers/input/serio/*
screen         drivers/gpu/drm/ast/* ?drivers/gpu/drm/mgag200/*
sensors        ?drivers/hwmon/coretemp ?drivers/hwmon/k10temp drivers/hwmon/drivetemp ?drivers/edac/*
random         ?drivers/char/hw_random/*
`

// alwaysLoad are modules that no modalias asks for: filesystems, layers over
// devices, and what a machine without a matching device would still want.
// init loads them by name from /etc/bcd/modules; a name that is built into
// the kernel of a profile is no error there. bonding is not among them: its
// mere presence makes an interface bond0.
var alwaysLoad = []string{
	"vfat", "nls_cp437", "nls_ascii", "efivarfs", "ext4", "overlay",
	"md_mod", "dm_mod", "8021q", "af_packet", "sd_mod", "sg",
	"ipmi_devintf", "ipmi_watchdog", "qemu_fw_cfg", "efi_pstore",
}

// parseModules gives the patterns of a table, in order.
func parseModules(table string) ([]string, error) {
	var out []string
	for line := range strings.Lines(table) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		words := strings.Fields(line)
		if len(words) < 2 {
			return nil, fmt.Errorf("module table: function %q has no pattern", line)
		}
		out = append(out, words[1:]...)
	}
	return out, nil
}

// firmwarePackages hold firmware for networks, storage and chips that a server
// has. Packages for graphics, sound, wireless and switch chips are left out: no
// driver for those is in an image.
var firmwarePackages = struct{ free, redistributable []string }{
	free: []string{"firmware-linux-free"},
	redistributable: []string{
		"firmware-bnx2", "firmware-bnx2x", "firmware-cavium", "firmware-intel-misc",
		"firmware-misc-nonfree", "firmware-myricom", "firmware-netronome", "firmware-netxen",
		"firmware-qlogic", "firmware-realtek", "firmware-ast",
	},
}
