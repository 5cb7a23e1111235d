package rig

import (
	"fmt"
	"os"
	"path/filepath"
)

// What starts a machine: Config.Firmware.
const (
	// UEFI is OVMF, which takes any program.
	UEFI = "uefi"
	// SecureBoot is OVMF that starts only what is signed with Debian's key for
	// tests, SnakeoilKey.
	SecureBoot = "secureboot"
	// BIOS is SeaBIOS, with the iPXE ROM of QEMU's cards.
	BIOS = "bios"
)

// What UEFI tries on each card: Config.NetworkBoot.
const (
	PXE      = "pxe"
	HTTPBoot = "http"
)

// The certificate that SecureBoot trusts, and its key, whose pass phrase is
// "snakeoil": anybody has them.
const (
	SnakeoilCertificate = "/usr/share/ovmf/PkKek-1-snakeoil.pem"
	SnakeoilKey         = "/usr/share/ovmf/PkKek-1-snakeoil.key"
)

// firmwareFiles finds the firmware's code, and the variables that a new
// machine starts with (Debian package ovmf). QEMU brings the BIOS itself.
func (c Config) firmwareFiles() (code, vars string, err error) {
	const dir = "/usr/share/OVMF"
	switch c.Firmware {
	case BIOS:
		return "", "", nil
	case UEFI:
		code, vars = filepath.Join(dir, "OVMF_CODE_4M.fd"), filepath.Join(dir, "OVMF_VARS_4M.fd")
	case SecureBoot:
		code, vars = filepath.Join(dir, "OVMF_CODE_4M.secboot.fd"), filepath.Join(dir, "OVMF_VARS_4M.snakeoil.fd")
	default:
		return "", "", fmt.Errorf("firmware %q: use uefi, secureboot or bios", c.Firmware)
	}
	for _, name := range []string{code, vars} {
		if _, err := os.Stat(name); err != nil {
			return "", "", fmt.Errorf("firmware: %w; install the package ovmf", err)
		}
	}
	return code, vars, nil
}

// writeVars gives the machine variables of its own.
func (c Config) writeVars() error {
	_, vars, err := c.firmwareFiles()
	if err != nil || vars == "" {
		return err
	}
	data, err := os.ReadFile(vars)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(c.Dir, varsFile), data, 0o600)
}

// machine is QEMU's machine type.
func (c Config) machine() string {
	if c.Firmware == SecureBoot {
		// The variables are written in system management mode only.
		return "q35,smm=on"
	}
	return "q35"
}

func (c Config) firmwareArgs(code string) []string {
	if c.Firmware == BIOS {
		return nil
	}
	a := []string{"-drive", "if=pflash,format=raw,readonly=on,file=" + quote(code),
		"-drive", "if=pflash,format=raw,file=" + quote(filepath.Join(c.Dir, varsFile))}
	if c.Firmware == SecureBoot {
		a = append(a, "-global", "driver=cfi.pflash01,property=secure,value=on")
	}
	if c.NetworkBoot != "" {
		a = append(a, "-fw_cfg", "name=opt/org.tianocore/IPv6PXESupport,string=n")
	}
	if c.NetworkBoot == HTTPBoot {
		a = append(a, "-fw_cfg", "name=opt/org.tianocore/IPv4PXESupport,string=n")
	}
	return a
}
