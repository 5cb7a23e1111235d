package rig

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestFirmware(t *testing.T) {
	for _, c := range []struct {
		firmware, boot, want, never string
	}{
		{"", "", "OVMF_CODE_4M.fd", "fw_cfg"},
		{UEFI, PXE, "IPv6PXESupport,string=n", "IPv4PXESupport"},
		{UEFI, HTTPBoot, "IPv4PXESupport,string=n", "smm=on"},
		{SecureBoot, "", "q35,smm=on", "OVMF_CODE_4M.fd"},
		{SecureBoot, "", "property=secure", "fw_cfg"},
		{BIOS, "", "virtio-net-pci,netdev=net0", "pflash"},
	} {
		config, err := Config{Name: "x", Dir: t.TempDir(), Firmware: c.firmware, NetworkBoot: c.boot, NICs: []NIC{{BootIndex: 1}}}.withDefaults()
		if err != nil {
			t.Fatal(err)
		}
		code, _, err := config.firmwareFiles()
		if err != nil {
			t.Fatal(err)
		}
		args, err := config.args(TCG, "/q", code, nil)
		if err != nil {
			t.Fatal(err)
		}
		if line := strings.Join(args, " "); !strings.Contains(line, c.want) || strings.Contains(line, c.never) {
			t.Errorf("%q, %q: want %s, never %s in %s", c.firmware, c.boot, c.want, c.never, line)
		}
		// Only a BIOS needs the ROM of a virtio card.
		if rom := !slices.ContainsFunc(args, func(a string) bool { return strings.HasSuffix(a, ",romfile=") }); rom != (c.firmware == BIOS) {
			t.Errorf("%q: boot ROM %v", c.firmware, rom)
		}
		if err := config.writeVars(); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(filepath.Join(config.Dir, varsFile)); (err == nil) == (c.firmware == BIOS) {
			t.Errorf("%q: variables: %v", c.firmware, err)
		}
	}
	for _, c := range []Config{{Firmware: "coreboot"}, {NetworkBoot: "tape"}, {Firmware: BIOS, NetworkBoot: PXE}} {
		c.Name, c.Dir = "x", t.TempDir()
		if _, err := c.withDefaults(); err == nil || !strings.Contains(err.Error(), "use ") {
			t.Errorf("firmware %q, network boot %q: %v", c.Firmware, c.NetworkBoot, err)
		}
	}
}
