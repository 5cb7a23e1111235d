package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/better-compute/bcd/image/debian"
)

const (
	release = "trixie"
	// baseEpoch is the latest time of any file in the base image: newer ones
	// are set back to it, so that times do not tell builds apart.
	baseEpoch = 1764547200
	// maxMkosiFile bounds one file of the mkosi package; its largest has 200 kB.
	maxMkosiFile = 16 << 20
)

// base is what mkosi made, in a folder of the cache.
type base struct {
	dir, key string
}

func (b base) file(name string) string { return filepath.Join(b.dir, name) }

// baseFiles are what mkosi.finalize and mkosi leave.
var baseFiles = []string{"vmlinuz", "initrd", "uname", "os-release", "root.ext4", "bcd-node.manifest"}

// guid is the unique GUID of a part of the disk. It depends on the base
// image, so that the same base gives the same disk, and the kernel command
// line can name its root.
func guid(key, what string) string {
	sum := sha256.Sum256([]byte(key + " " + what))
	sum[6] = sum[6]&0x0f | 0x80 // RFC 9562 section 5.8: version 8, custom
	sum[8] = sum[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", sum[:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
}

// makeBase gives the base image of o, from the cache when it is there and
// younger than o.maxAge. Builds of the same user wait for each other.
func makeBase(ctx context.Context, o options) (base, error) {
	key, err := configHash(o)
	if err != nil {
		return base{}, err
	}
	parent := filepath.Join(o.cache, "node")
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return base{}, err
	}
	unlock, err := lock(filepath.Join(parent, "lock"))
	if err != nil {
		return base{}, err
	}
	defer unlock()
	b := base{filepath.Join(parent, o.profile+"-"+key[:16]), key}
	if info, err := os.Stat(b.dir); err == nil && time.Since(info.ModTime()) < o.maxAge {
		return b, nil
	}
	o.log.Info("making the node's base image with mkosi; this takes minutes, once", "profile", o.profile, "cache", b.dir)
	begin := time.Now()
	work, err := os.MkdirTemp(parent, "build-")
	if err != nil {
		return base{}, err
	}
	defer os.RemoveAll(work)
	if err := runMkosi(ctx, o, key, parent, work); err != nil {
		return base{}, err
	}
	out := filepath.Join(work, "out")
	for _, name := range baseFiles {
		if info, err := os.Stat(filepath.Join(out, name)); err != nil || info.Size() == 0 {
			return base{}, fmt.Errorf("mkosi left no %s in its output", name)
		}
	}
	if err := os.RemoveAll(b.dir); err != nil {
		return base{}, err
	}
	if err := os.Rename(out, b.dir); err != nil {
		return base{}, err
	}
	o.log.Info("base image is in the cache", "profile", o.profile, "took", time.Since(begin).Round(time.Second))
	return b, nil
}

// configHash covers everything here that decides what the base image is.
func configHash(o options) (string, error) {
	h := sha256.New()
	fmt.Fprintf(h, "%s %s %d\n", release, o.profile, o.freeMiB)
	err := filepath.WalkDir(o.config, func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || !strings.HasPrefix(rel(o.config, name), "mkosi.") {
			return err
		}
		data, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		fmt.Fprintf(h, "%q %t %x\n", rel(o.config, name), info.Mode()&0o100 != 0, sha256.Sum256(data))
		return nil
	})
	if err != nil {
		return "", fmt.Errorf("configuration: %w", err)
	}
	if _, err := os.Stat(filepath.Join(o.config, "mkosi.conf")); err != nil {
		return "", fmt.Errorf("configuration: %w; run this at the top of the source tree or give -config", err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func rel(root, name string) string {
	r, err := filepath.Rel(root, name)
	if err != nil {
		return name
	}
	return r
}

// runMkosi fetches Debian 13's mkosi (Debian 12 has one that is too old),
// unpacks it, and runs it with this machine's own apt sources.
func runMkosi(ctx context.Context, o options, key, parent, work string) error {
	archive := &debian.Archive{Release: release, Architecture: "amd64", Cache: o.cache, Log: o.log}
	found, err := archive.Find(ctx, "mkosi")
	if err != nil {
		return fmt.Errorf("mkosi: %w", err)
	}
	deb, err := archive.Fetch(ctx, found[0])
	if err != nil {
		return fmt.Errorf("mkosi: %w", err)
	}
	program := filepath.Join(work, "mkosi")
	if err := unpackPython(ctx, deb, program); err != nil {
		return fmt.Errorf("mkosi: %w", err)
	}
	// A file of exactly this name replaces mkosi's own list, which asks for
	// archives that a mirror may not carry.
	sources, err := debian.Derive(release)
	if err != nil {
		return err
	}
	sandbox := filepath.Join(work, "sandbox")
	list := filepath.Join(sandbox, "etc/apt/sources.list.d/mkosi.sources")
	if err := os.MkdirAll(filepath.Dir(list), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(list, sources, 0o644); err != nil {
		return err
	}
	packages := filepath.Join(parent, "packages")
	args := []string{"-m", "mkosi", "--directory", o.config, "--profile", o.profile, "--sandbox-tree", sandbox,
		"--output-dir", filepath.Join(work, "out"), "--workspace-dir", filepath.Join(work, "ws"), "--package-cache-dir", packages,
		"--source-date-epoch", fmt.Sprint(baseEpoch),
		"--environment", "ROOT_UUID=" + guid(key, "root file system"), "--environment", "ROOT_PARTUUID=" + guid(key, "root"),
		"--environment", "ESP_PARTUUID=" + guid(key, "esp"), "--environment", fmt.Sprintf("ROOT_FREE_MIB=%d", o.freeMiB),
		"--force", "build"}
	for _, dir := range []string{"out", "ws", "mkosi"} {
		if err := os.MkdirAll(filepath.Join(work, dir), 0o755); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(packages, 0o755); err != nil {
		return err
	}
	logName := filepath.Join(parent, o.profile+".log")
	log, err := os.Create(logName)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.CommandContext(ctx, "python3", args...)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+program, "PYTHONDONTWRITEBYTECODE=1", "LC_ALL=C.UTF-8",
		"PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	cmd.Stdout, cmd.Stderr = log, log
	// mkosi cleans up after SIGINT; a plain kill leaves its mounts' processes.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	cmd.WaitDelay = 20 * time.Second
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("mkosi: %w; its log is %s, which ends with:\n%s", err, logName, tail(logName, 2000))
	}
	return nil
}

// unpackPython unpacks the Python modules of a package into dir.
func unpackPython(ctx context.Context, deb, dir string) error {
	const prefix = "usr/lib/python3/dist-packages/"
	count := 0
	err := debian.Walk(ctx, deb, func(f debian.File, r io.Reader) error {
		name, ok := strings.CutPrefix(f.Name, prefix)
		if !ok || f.Link != "" {
			return nil
		}
		if !filepath.IsLocal(name) || f.Size > maxMkosiFile {
			return fmt.Errorf("package file %s of %d bytes is not one to unpack", f.Name, f.Size)
		}
		data, err := io.ReadAll(io.LimitReader(r, maxMkosiFile))
		if err != nil {
			return err
		}
		target := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return err
		}
		count++
		return os.WriteFile(target, data, 0o755)
	})
	if err == nil && count == 0 {
		return errors.New("the package has no Python modules")
	}
	return err
}

// tail gives at most n bytes of the end of a file.
func tail(name string, n int64) string {
	f, err := os.Open(name)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > n {
		if _, err := f.Seek(-n, io.SeekEnd); err != nil {
			return err.Error()
		}
	}
	data, err := io.ReadAll(io.LimitReader(f, n))
	if err != nil {
		return err.Error()
	}
	return string(data)
}

// lock takes an exclusive lock that ends with the process.
func lock(name string) (func(), error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", name, err)
	}
	return func() { f.Close() }, nil
}
