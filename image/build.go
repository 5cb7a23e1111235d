// Package image builds bcd's images: a kernel and an initramfs as two files,
// and the same as one unified kernel image (UKI).
//
// Parties: Debian, whose kernel, firmware and EFI stub come as packages and
// are checked against the signed index; this project's own binary; and the
// operator, who gives trust roots and gateway address. The result is a pure
// function of those, of the version and of the build time: the same inputs
// give the same bytes anywhere. What went in is in the manifest and the bill
// of materials beside each image.
package image

import (
	"context"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/better-compute/bcd/image/cpio"
	"github.com/better-compute/bcd/image/debian"
	"github.com/better-compute/bcd/image/disk"
	"github.com/better-compute/bcd/image/gobuild"
	"github.com/better-compute/bcd/image/uki"
)

// Release is the Debian release that kernels come from.
const Release = "trixie"

// maxInput bounds a binary that goes into an image.
const maxInput = 256 * mib

// Options are the inputs of one image.
type Options struct {
	// Profile is a key of Profiles, Arch "amd64" or "arm64".
	Profile, Arch string
	// BCD is the path of the static bcd binary for Arch.
	BCD string
	// Rescue is the path of the rescue busybox, or empty for none.
	Rescue string
	// RescueModules are the Go modules of the rescue busybox.
	RescueModules []gobuild.Dependency
	// Trust is a folder with roots.pem and join-encryption.jwk.
	Trust string
	// Gateway is the gateway's https URL, or empty when the machine is told
	// otherwise.
	Gateway string
	// Version names the image.
	Version string
	// Cmdline replaces the profile's kernel command line when not empty.
	Cmdline string
	// ExtraCmdline is added to the command line.
	ExtraCmdline string
	// Out is the folder for the results, Cache the one for downloads.
	Out, Cache string
	// Epoch is the build time in seconds since 1970: the time of each file,
	// and the floor of the machine's clock.
	Epoch int64
	// FreeFirmware leaves out firmware that may be passed on but is not free.
	FreeFirmware bool
	// NodeDisk asks for a synthetic node disk too, see package disk.
	NodeDisk bool
	// Lock, when not nil, demands exactly its packages.
	Lock *debian.Lock
	// Log hears of progress; nil is silent.
	Log *slog.Logger
}

// Result names the files made.
type Result struct {
	Vmlinuz, Initramfs, UKI, Manifest, SBOM, FirmwareMissing string
	// NodeDisk and NodeDiskZstd are the synthetic node disk, raw and
	// compressed, when it was asked for.
	NodeDisk, NodeDiskZstd string
}

// Build makes one image. It fails before it writes anything into Out when an
// input is wrong; each file appears at once and whole.
func Build(ctx context.Context, o Options) (Result, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	profile, err := o.check()
	if err != nil {
		return Result{}, err
	}
	bcd, err := readInput(o.BCD)
	if err != nil {
		return Result{}, fmt.Errorf("bcd binary: %w", err)
	}
	trust, err := readTrust(o.Trust)
	if err != nil {
		return Result{}, err
	}
	archive := &debian.Archive{
		Release: Release, Architecture: o.Arch, Components: []string{"non-free-firmware"},
		Cache: o.Cache, Lock: o.Lock, Log: o.Log,
	}
	kernel, err := fetchKernel(ctx, archive, profile)
	if err != nil {
		return Result{}, err
	}
	firmware, err := fetchFirmware(ctx, archive, profile, kernel.Firmware, o.FreeFirmware)
	if err != nil {
		return Result{}, err
	}
	stub, stubPackage, err := fetchStub(ctx, archive)
	if err != nil {
		return Result{}, err
	}

	entries := skeleton()
	entries = append(entries, cpio.File("bbin/bcd", 0o755, bcd), cpio.Symlink("init", "/bbin/bcd"),
		cpio.File("etc/bcd/modules", 0o644, moduleList(kernel)))
	entries = append(entries, kernel.entries()...)
	entries = append(entries, firmware.entries...)
	var rescue []byte
	if o.Rescue != "" {
		if rescue, err = readInput(o.Rescue); err != nil {
			return Result{}, fmt.Errorf("rescue binary: %w", err)
		}
		entries = append(entries, rescueEntries(rescue)...)
	}
	trustEntries, err := o.trustEntries(trust)
	if err != nil {
		return Result{}, err
	}
	minMem := MinMemMiB(unpackedSize(entries))
	entries, err = baseSegment(entries, minMem)
	if err != nil {
		return Result{}, err
	}
	base, err := cpio.Marshal(entries, uint32(o.Epoch))
	if err != nil {
		return Result{}, err
	}
	o.Log.Info("compressing", "bytes", len(base))
	initramfs, err := compressCached(o.Cache, base)
	if err != nil {
		return Result{}, err
	}
	segment, err := cpio.Marshal(trustEntries, uint32(o.Epoch))
	if err != nil {
		return Result{}, err
	}
	initramfs = append(initramfs, segment...)
	cmdline := o.commandLine(profile)
	parts := uki.Parts{
		Stub: stub, Linux: kernel.Vmlinuz, Initrd: initramfs, Cmdline: cmdline,
		OSRelease: o.osRelease(), Uname: kernel.Release,
	}
	unified, err := uki.Assemble(parts)
	if err != nil {
		return Result{}, err
	}

	name := "bcd-" + o.Profile + "-" + o.Arch
	m := Manifest{
		Format: manifestFormat, Profile: o.Profile, Architecture: o.Arch, Version: o.Version,
		BuildTime: o.buildTime(), SourceDateEpoch: o.Epoch, Gateway: o.Gateway, Cmdline: cmdline,
		DebianRelease: Release, KernelRelease: kernel.Release, MinMemMiB: minMem,
		Packages: append(append([]debian.Package{kernel.Package}, firmware.packages...), stubPackage),
		Firmware: firmware.files, Modules: kernel.moduleNames(),
	}
	m.addInput("bcd", "bcd", bcd)
	if rescue != nil {
		m.addInput("rescue", "rescue", rescue)
	}
	for _, f := range trust {
		m.addInput("trust", f.name, f.data)
	}
	if m.BCDModules, m.Go, err = modulesOf(o.BCD); err != nil {
		return Result{}, err
	}
	m.RescueModules = o.RescueModules
	files := []output{
		{name + ".vmlinuz", kernel.Vmlinuz},
		{name + ".initramfs", initramfs},
		{name + ".uki.efi", unified},
		{name + ".firmware-missing.txt", firmware.missingText()},
	}
	if o.NodeDisk {
		raw, compressed, err := o.nodeDisk(ctx, parts)
		if err != nil {
			return Result{}, err
		}
		files = append(files, output{name + ".node.raw", raw}, output{name + ".node.raw.zst", compressed})
	}
	for _, f := range files {
		m.addOutput(f.name, f.data)
	}
	bill, err := m.sbom()
	if err != nil {
		return Result{}, err
	}
	m.addOutput(name+".sbom.json", bill)
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return Result{}, err
	}
	files = append(files, output{name + ".sbom.json", bill}, output{name + ".manifest.json", append(text, '\n')})
	if err := os.MkdirAll(o.Out, 0o755); err != nil {
		return Result{}, err
	}
	for _, f := range files {
		if err := writeAtomic(filepath.Join(o.Out, f.name), f.data); err != nil {
			return Result{}, err
		}
	}
	at := func(suffix string) string { return filepath.Join(o.Out, name+suffix) }
	o.Log.Info("built", "image", at(".uki.efi"), "bytes", len(unified), "min_mem_mib", minMem)
	r := Result{
		Vmlinuz: at(".vmlinuz"), Initramfs: at(".initramfs"), UKI: at(".uki.efi"),
		Manifest: at(".manifest.json"), SBOM: at(".sbom.json"), FirmwareMissing: at(".firmware-missing.txt"),
	}
	if o.NodeDisk {
		r.NodeDisk, r.NodeDiskZstd = at(".node.raw"), at(".node.raw.zst")
	}
	return r, nil
}

// nodeDisk is the disk of a synthetic installed node: the same image, told by
// its command line to be a node.
func (o Options) nodeDisk(ctx context.Context, parts uki.Parts) (raw, compressed []byte, err error) {
	parts.Cmdline += " bcd.role=node"
	unified, err := uki.Assemble(parts)
	if err != nil {
		return nil, nil, err
	}
	if raw, err = disk.Build(ctx, disk.Options{UKI: unified, Arch: o.Arch, Epoch: o.Epoch}); err != nil {
		return nil, nil, err
	}
	compressed, err = disk.Compress(raw)
	return raw, compressed, err
}

type output struct {
	name string
	data []byte
}

func (o Options) check() (*Profile, error) {
	profile, ok := Profiles[o.Profile]
	switch {
	case !ok:
		return nil, fmt.Errorf("profile %q is not known: use virtual or metal", o.Profile)
	case profile.kernel[o.Arch] == "":
		return nil, fmt.Errorf("architecture %q is not known: use amd64 or arm64", o.Arch)
	case o.Version == "" || strings.ContainsAny(o.Version, " \t\r\n\"'\\$`"):
		return nil, fmt.Errorf("version %q: give one word, as in 0.1.0", o.Version)
	case o.Epoch <= 0 || o.Epoch > 1<<32-1:
		return nil, fmt.Errorf("build time %d: give seconds since 1970 by -source-date-epoch or SOURCE_DATE_EPOCH", o.Epoch)
	case strings.Contains(o.Cmdline+o.ExtraCmdline, "bcd.token="):
		return nil, errors.New("a join token on the kernel command line can be read by anyone who has the image: give it by SMBIOS type 11")
	}
	if o.Gateway != "" {
		u, err := url.Parse(o.Gateway)
		if err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil {
			return nil, fmt.Errorf("gateway %q is not an https URL like https://gateway.example:7443", o.Gateway)
		}
	}
	return profile, nil
}

func (o Options) commandLine(p *Profile) string {
	line := o.Cmdline
	if line == "" {
		line = p.cmdline[o.Arch]
	}
	return strings.TrimSpace(line + " " + o.ExtraCmdline)
}

func (o Options) buildTime() string {
	return time.Unix(o.Epoch, 0).UTC().Format(time.RFC3339)
}

// osRelease names the image in boot menus, os-release(5).
func (o Options) osRelease() string {
	return fmt.Sprintf("ID=bcd\nNAME=bcd\nPRETTY_NAME=\"bcd %s (%s)\"\nVERSION_ID=%s\nIMAGE_ID=bcd-%s\nIMAGE_VERSION=%s\n",
		o.Version, o.Profile, o.Version, o.Profile, o.Version)
}

// readInput reads a binary, bounded.
func readInput(name string) ([]byte, error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() == 0 || info.Size() > maxInput {
		return nil, fmt.Errorf("%s has %d bytes, mode %s: want a program of at most %d bytes", name, info.Size(), info.Mode(), maxInput)
	}
	return os.ReadFile(name)
}

// modulesOf reads what a Go program was made of from the program itself.
func modulesOf(name string) ([]gobuild.Dependency, string, error) {
	info, err := buildinfo.ReadFile(name)
	if err != nil {
		return nil, "", fmt.Errorf("%s does not say what it was made of: %w", name, err)
	}
	return gobuild.Dependencies(info), info.GoVersion, nil
}

// writeAtomic replaces a file at once and durably.
func writeAtomic(name string, data []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	if _, err = f.Write(data); err == nil {
		if err = f.Chmod(fs.FileMode(0o644)); err == nil {
			err = f.Sync()
		}
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	if err = os.Rename(f.Name(), name); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(name))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
