package image

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/better-compute/bcd/image/cpio"
)

const (
	mib = 1 << 20
	// kernelShare is what a kernel takes of MemTotal for itself before it
	// has unpacked anything: slabs, per-CPU areas, page tables.
	kernelShare = 32 * mib
	// workingSet is what bcd and the page cache of a deployment take.
	workingSet = 96 * mib
	// memStep rounds the figure to something that a person remembers.
	memStep = 16 * mib

	manifestPath = "etc/bcd/MANIFEST"
	pageSize     = 4096
)

// skeleton is the root file system without programs: our own, not u-root's,
// whose world-writable folders and public name server have no place here.
func skeleton() []cpio.Entry {
	dir, file := cpio.Dir, cpio.File
	return []cpio.Entry{
		dir("bbin", 0o755), dir("dev", 0o755), dir("efi", 0o700), dir("etc/bcd/trust", 0o755),
		dir("lib", 0o755), dir("lib/firmware", 0o755), dir("lib/modules", 0o755),
		dir("mnt", 0o755), dir("proc", 0o555), dir("root", 0o700), dir("run", 0o755),
		dir("run/bcd", 0o700), dir("sys", 0o555), dir("tmp", 0o1777),
		dir("var", 0o755), dir("var/lib", 0o755), dir("var/lib/bcd", 0o700), dir("var/log", 0o755),
		// The kernel opens /dev/console for init before devtmpfs is mounted.
		cpio.CharDevice("dev/console", 0o600, 5, 1), cpio.CharDevice("dev/null", 0o666, 1, 3),
		cpio.CharDevice("dev/kmsg", 0o600, 1, 11),
		file("etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bbin/gosh\nnobody:x:65534:65534:nobody:/:/bbin/false\n")),
		file("etc/group", 0o644, []byte("root:x:0:\nnogroup:x:65534:\n")),
		file("etc/hosts", 0o644, []byte("127.0.0.1 localhost\n::1 localhost ip6-localhost\n")),
		file("etc/nsswitch.conf", 0o644, []byte("passwd: files\ngroup: files\nhosts: files dns\n")),
		// Empty: what DHCP says is written here, and nothing is assumed.
		file(resolvConf, 0o644, nil),
		// Folders of programs, for people whose fingers know them.
		cpio.Symlink("bin", "bbin"), cpio.Symlink("sbin", "bbin"),
	}
}

// baseSegment puts entries in their order: the manifest as the first regular
// file, then init and the programs, the rest by path. A kernel that runs out
// of memory drops the end of an archive; so init is there to read the manifest
// and say what is missing.
func baseSegment(entries []cpio.Entry, minMem int) ([]cpio.Entry, error) {
	rank := func(e cpio.Entry) int {
		switch {
		case e.Name == "init":
			return 1
		case e.Name == "bbin" || e.Name == "bbin/bcd":
			return 2
		case strings.HasPrefix(e.Name, "lib/"):
			return 4 // the bulk
		}
		return 3
	}
	slices.SortFunc(entries, func(a, b cpio.Entry) int {
		if d := rank(a) - rank(b); d != 0 {
			return d
		}
		return strings.Compare(a.Name, b.Name)
	})
	list, err := fileManifest(entries, minMem)
	if err != nil {
		return nil, err
	}
	head := []cpio.Entry{cpio.Dir("etc", 0o755), cpio.Dir("etc/bcd", 0o755), cpio.File(manifestPath, 0o644, list)}
	return append(head, entries...), nil
}

// resolvConf is the one file of the image that a running machine rewrites: a
// check of its content, which init makes while the machine works, would find
// the image damaged as soon as DHCP has named a server.
const resolvConf = "etc/resolv.conf"

// fileManifest is /etc/bcd/MANIFEST as docs/architecture.md defines it.
func fileManifest(entries []cpio.Entry, minMem int) ([]byte, error) {
	files := slices.DeleteFunc(slices.Clone(entries), func(e cpio.Entry) bool { return !e.Regular() || e.Name == resolvConf })
	slices.SortFunc(files, func(a, b cpio.Entry) int { return strings.Compare(a.Name, b.Name) })
	var out bytes.Buffer
	fmt.Fprintf(&out, "bcd-initramfs-manifest 1 min-mem-mib=%d\n", minMem)
	for _, f := range files {
		if strings.ContainsAny(f.Name, "\n\r") {
			return nil, fmt.Errorf("file name %q has a line end: the manifest has a line a file", f.Name)
		}
		sum := sha256.Sum256(f.Data())
		fmt.Fprintf(&out, "%s %d /%s\n", hex.EncodeToString(sum[:]), len(f.Data()), f.Name)
	}
	return out.Bytes(), nil
}

// MinMemMiB is the memory in MiB, as the kernel counts it (MemTotal, some 50
// MiB less than what is plugged in), that a machine needs for an initramfs
// whose files take unpacked bytes, in whole pages:
//
//	max(2 × unpacked, 1.5 × unpacked + working set) + kernel share
//
// The first: the root file system is a tmpfs, which the kernel limits to half
// of the memory. The second: while the kernel unpacks, the compressed archive
// (less than half of it) is in memory beside the files, and afterwards the
// agent works there. It is rounded up to 16 MiB.
func MinMemMiB(unpacked int64) int {
	need := max(2*unpacked, unpacked+unpacked/2+workingSet) + kernelShare
	return int((need + memStep - 1) / memStep * memStep / mib)
}

// unpackedSize is what entries take as files of whole pages.
func unpackedSize(entries []cpio.Entry) int64 {
	var n int64
	for _, e := range entries {
		if e.Regular() {
			n += (int64(len(e.Data())) + pageSize - 1) / pageSize * pageSize
		}
		n += 1024 // inode and directory entry
	}
	return n
}

// compress gives a zstd frame that the kernel can unpack, padded so that
// another archive may follow. One encoder goroutine and fixed settings: the
// same bytes on any machine with this version of the encoder.
func compress(archive []byte) ([]byte, error) {
	// The window bounds what the kernel allocates to unpack.
	w, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedBestCompression), zstd.WithEncoderConcurrency(1),
		zstd.WithWindowSize(8*mib), zstd.WithEncoderCRC(true))
	if err != nil {
		return nil, err
	}
	out := w.EncodeAll(archive, make([]byte, 0, len(archive)/3))
	if err := w.Close(); err != nil {
		return nil, err
	}
	for len(out)%4 != 0 {
		out = append(out, 0)
	}
	return out, nil
}
