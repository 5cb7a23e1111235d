package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/better-compute/bcd/image/debian"
	"github.com/better-compute/bcd/image/uki"
)

const (
	mib        = 1 << 20
	sectorSize = 512
	// minESP is where FAT32 is certain with clusters of one sector.
	minESP = 64 * mib
	// window bounds the memory that a deployer needs to decompress the image.
	window = 4 * mib
	// maxStub bounds systemd's EFI stub, which has about 100 kB.
	maxStub = 4 * mib
)

// result is what assemble made.
type result struct {
	raw                 string
	rawBytes, zstdBytes int64
}

// assemble puts bcd into a copy of the base's root and makes the disk of it.
// Files appear in o.out only when whole and checked.
func assemble(ctx context.Context, o options, b base) (result, error) {
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return result{}, err
	}
	work, err := os.MkdirTemp(o.out, ".node-")
	if err != nil {
		return result{}, err
	}
	defer os.RemoveAll(work)
	t := tools{ctx, fmt.Sprintf("%d", o.epoch)}

	root := filepath.Join(work, "root.ext4")
	if err := copySparse(root, b.file("root.ext4"), 0); err != nil {
		return result{}, err
	}
	if err := t.putBinary(root, o.bcd, o.epoch); err != nil {
		return result{}, err
	}
	image, err := makeUKI(ctx, o, b)
	if err != nil {
		return result{}, err
	}
	ukiName := filepath.Join(work, "BOOTX64.EFI")
	if err := os.WriteFile(ukiName, image, 0o644); err != nil {
		return result{}, err
	}
	esp := filepath.Join(work, "esp")
	if err := t.makeESP(esp, ukiName, int64(len(image)), guid(b.key, "esp file system")); err != nil {
		return result{}, err
	}
	disk := filepath.Join(work, "disk.raw")
	if err := t.layOut(disk, esp, root, b.key); err != nil {
		return result{}, err
	}
	packed := disk + ".zst"
	if err := compress(packed, disk); err != nil {
		return result{}, err
	}
	manifest := filepath.Join(work, "manifest")
	if err := copySparse(manifest, b.file("bcd-node.manifest"), 0); err != nil {
		return result{}, err
	}
	res := result{raw: filepath.Join(o.out, "bcd-node-"+o.profile+".raw")}
	for from, to := range map[string]string{disk: res.raw, packed: res.raw + ".zst", manifest: strings.TrimSuffix(res.raw, ".raw") + ".manifest"} {
		if err := os.Rename(from, to); err != nil {
			return result{}, err
		}
	}
	for name, size := range map[string]*int64{res.raw: &res.rawBytes, res.raw + ".zst": &res.zstdBytes} {
		info, err := os.Stat(name)
		if err != nil {
			return result{}, err
		}
		*size = info.Size()
	}
	return res, nil
}

// makeUKI makes kernel, initramfs and command line one EFI program.
func makeUKI(ctx context.Context, o options, b base) ([]byte, error) {
	archive := &debian.Archive{Release: release, Architecture: "amd64", Cache: o.cache, Log: o.log}
	found, err := archive.Find(ctx, "systemd-boot-efi")
	if err != nil {
		return nil, fmt.Errorf("efi stub: %w", err)
	}
	deb, err := archive.Fetch(ctx, found[0])
	if err != nil {
		return nil, fmt.Errorf("efi stub: %w", err)
	}
	parts := uki.Parts{Cmdline: commandLine(b.key)}
	err = debian.Walk(ctx, deb, func(f debian.File, r io.Reader) error {
		if f.Name != "usr/lib/systemd/boot/efi/linuxx64.efi.stub" || f.Link != "" {
			return nil
		}
		var err error
		parts.Stub, err = io.ReadAll(io.LimitReader(r, maxStub))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("efi stub: %w", err)
	}
	if len(parts.Stub) == 0 {
		return nil, fmt.Errorf("package %s %s has no linuxx64.efi.stub", found[0].Name, found[0].Version)
	}
	if parts.Linux, err = os.ReadFile(b.file("vmlinuz")); err != nil {
		return nil, err
	}
	if parts.Initrd, err = os.ReadFile(b.file("initrd")); err != nil {
		return nil, err
	}
	text, err := os.ReadFile(b.file("os-release"))
	if err != nil {
		return nil, err
	}
	parts.OSRelease = string(text)
	if text, err = os.ReadFile(b.file("uname")); err != nil {
		return nil, err
	}
	parts.Uname = strings.TrimSpace(string(text))
	return uki.Assemble(parts)
}

// commandLine names its own root, so that a kernel never starts with another
// version's. firstboot=off: nobody is there to answer questions.
func commandLine(key string) string {
	return "root=PARTUUID=" + guid(key, "root") + " rootfstype=ext4 ro console=tty0 console=ttyS0,115200 panic=30 systemd.firstboot=off"
}

// tools runs the machine's file system programs.
type tools struct {
	ctx   context.Context
	epoch string
}

func (t tools) run(program string, args ...string) error {
	path, err := exec.LookPath(program)
	if err != nil {
		// Not on the path of an ordinary user.
		path = "/usr/sbin/" + program
	}
	cmd := exec.CommandContext(t.ctx, path, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8", "TZ=UTC", "MTOOLSRC=/dev/null",
		// Old releases of e2fsprogs know the one, new ones the other.
		"SOURCE_DATE_EPOCH="+t.epoch, "E2FSPROGS_FAKE_TIME="+t.epoch)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", program, err, bytes.TrimSpace(out))
	}
	return nil
}

// putBinary writes /usr/bin/bcd into an ext4 image without mounting it, reads
// it back, and checks the file system: debugfs tells of no failure by itself.
func (t tools) putBinary(root, bcd string, epoch int64) error {
	want, err := digest(bcd)
	if err != nil {
		return fmt.Errorf("bcd binary: %w", err)
	}
	script := root + ".debugfs"
	source, err := filepath.Abs(bcd)
	if err != nil {
		return err
	}
	back := root + ".bcd"
	if strings.ContainsAny(source+back, " \"\n") {
		return fmt.Errorf("debugfs cannot take a path with blanks or quotes: %q", source)
	}
	const inode = "/usr/bin/bcd"
	lines := []string{"write " + source + " " + inode}
	for _, field := range []string{"mode 0100755", "uid 0", "gid 0",
		fmt.Sprintf("mtime @%d", epoch), fmt.Sprintf("atime @%d", epoch), fmt.Sprintf("ctime @%d", epoch), fmt.Sprintf("crtime @%d", epoch), "generation 1"} {
		lines = append(lines, "set_inode_field "+inode+" "+field)
	}
	lines = append(lines, "dump "+inode+" "+back)
	if err := os.WriteFile(script, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		return err
	}
	if err := t.run("debugfs", "-w", "-f", script, root); err != nil {
		return err
	}
	got, err := digest(back)
	if err != nil {
		return fmt.Errorf("debugfs wrote no %s: %w; is the root full? see -free", inode, err)
	}
	if got != want {
		return fmt.Errorf("%s in the image is not the binary that was given: is the root full? see -free", inode)
	}
	return t.run("e2fsck", "-fn", root)
}

// makeESP makes the EFI system partition with room for a second image.
func (t tools) makeESP(esp, image string, imageSize int64, id string) error {
	size := max(minESP, (2*imageSize+8*mib+mib-1)/mib*mib)
	if err := createSized(esp, size); err != nil {
		return err
	}
	if err := t.run("mkfs.fat", "-F", "32", "-S", fmt.Sprint(sectorSize), "-s", "1", "-n", "BCD-ESP", "-i", strings.ReplaceAll(id, "-", "")[:8], "--invariant", esp); err != nil {
		return err
	}
	if err := t.run("mmd", "-i", esp, "::/EFI", "::/EFI/BOOT", "::/bcd"); err != nil {
		return err
	}
	if err := t.run("mcopy", "-i", esp, image, "::/EFI/BOOT/BOOTX64.EFI"); err != nil {
		return err
	}
	return t.run("fsck.fat", "-n", esp)
}

// layOut makes the disk: a GPT, the EFI system partition, the root.
func (t tools) layOut(disk, esp, root, key string) error {
	espInfo, err := os.Stat(esp)
	if err != nil {
		return err
	}
	rootInfo, err := os.Stat(root)
	if err != nil {
		return err
	}
	if espInfo.Size()%mib != 0 || rootInfo.Size()%mib != 0 {
		return errors.New("partitions are not whole mebibytes")
	}
	espAt := int64(mib)
	rootAt := espAt + espInfo.Size()
	if err := createSized(disk, rootAt+rootInfo.Size()+mib); err != nil {
		return err
	}
	span := func(number, at, size int64) string {
		return fmt.Sprintf("%d:%d:%d", number, at/sectorSize, (at+size)/sectorSize-1)
	}
	if err := t.run("sgdisk", "-U", guid(key, "disk"),
		"-n", span(1, espAt, espInfo.Size()), "-t", "1:ef00", "-c", "1:bcd-esp", "-u", "1:"+guid(key, "esp"),
		// 8304: root of x86-64, of the discoverable partitions specification.
		"-n", span(2, rootAt, rootInfo.Size()), "-t", "2:8304", "-c", "2:bcd-root", "-u", "2:"+guid(key, "root"), disk); err != nil {
		return err
	}
	if err := copySparse(disk, esp, espAt); err != nil {
		return err
	}
	if err := copySparse(disk, root, rootAt); err != nil {
		return err
	}
	return t.run("sgdisk", "-v", disk)
}

func createSized(name string, size int64) error {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(size), f.Close())
}

// copySparse copies the file from into the file to at an offset, leaving out
// blocks of zeros: to must have none but zeros there.
func copySparse(to, from string, at int64) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	if have, err := out.Stat(); err != nil {
		return err
	} else if end := at + info.Size(); have.Size() < end {
		if err := out.Truncate(end); err != nil {
			return err
		}
	}
	buf, zeros := make([]byte, 64<<10), make([]byte, 64<<10)
	for {
		n, err := io.ReadFull(in, buf)
		if n > 0 && !bytes.Equal(buf[:n], zeros[:n]) {
			if _, err := out.WriteAt(buf[:n], at); err != nil {
				return err
			}
		}
		at += int64(n)
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return nil
		case err != nil:
			return err
		}
	}
}

// compress makes the same bytes of the same file on any machine.
func compress(to, from string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	w, err := zstd.NewWriter(out, zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(window), zstd.WithEncoderCRC(true))
	if err != nil {
		return err
	}
	if _, err := io.Copy(w, in); err != nil {
		return err
	}
	return w.Close()
}

func digest(name string) ([sha256.Size]byte, error) {
	var sum [sha256.Size]byte
	f, err := os.Open(name)
	if err != nil {
		return sum, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return sum, err
	}
	h.Sum(sum[:0])
	return sum, nil
}
