package image

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/better-compute/bcd/image/cpio"
	"github.com/better-compute/bcd/image/debian"
	"github.com/better-compute/bcd/image/kmod"
)

// maxMember bounds one file of a package: the largest kernel (arm64, not
// compressed) has about 40 MB.
const maxMember = 256 * mib

// kernel is a Debian kernel reduced to what an image takes from it.
type kernel struct {
	debian.Package
	reducedKernel
}

// reducedKernel is what the cache keeps of a kernel package.
type reducedKernel struct {
	Release string
	Vmlinuz []byte
	Modules []kmod.Module
	// Index is the module index files by name, Firmware the firmware files
	// that modules name, with the modules.
	Index    map[string][]byte
	Firmware map[string][]string
}

// kernelFormat is part of the key under which a reduced kernel is kept: raise
// it when what is taken from the package, or how, changes.
const kernelFormat = "kernel 1"

// fetchKernel brings the profile's kernel and chooses its modules. Unpacking
// costs many seconds, so the result is kept under the package's digest and the
// table of modules.
func fetchKernel(ctx context.Context, archive *debian.Archive, profile *Profile) (*kernel, error) {
	p, err := archive.Kernel(ctx, profile.kernel[archive.Architecture])
	if err != nil {
		return nil, err
	}
	patterns, err := parseModules(profile.modules)
	if err != nil {
		return nil, err
	}
	key := fmt.Appendf(nil, "%s %s %q", kernelFormat, p.SHA256, patterns)
	stored, err := cached(archive.Cache, "kernel", key, func() ([]byte, error) {
		k, err := unpackKernel(ctx, archive, p, patterns)
		if err != nil {
			return nil, err
		}
		var out bytes.Buffer
		err = gob.NewEncoder(&out).Encode(k)
		return out.Bytes(), err
	})
	if err != nil {
		return nil, err
	}
	k := &kernel{Package: p}
	if err := gob.NewDecoder(bytes.NewReader(stored)).Decode(&k.reducedKernel); err != nil {
		return nil, fmt.Errorf("cached kernel: %w", err)
	}
	return k, nil
}

// unpackKernel reads the package and reduces it.
func unpackKernel(ctx context.Context, archive *debian.Archive, p debian.Package, patterns []string) (*reducedKernel, error) {
	deb, err := archive.Fetch(ctx, p)
	if err != nil {
		return nil, err
	}
	k := &reducedKernel{}
	files := map[string][]byte{}
	err = debian.Walk(ctx, deb, func(f debian.File, r io.Reader) error {
		if f.Link != "" {
			return nil
		}
		module, isModule := strings.CutPrefix(strings.TrimPrefix(f.Name, "usr/"), "lib/modules/")
		isKernel := strings.HasPrefix(f.Name, "boot/vmlinuz-")
		if !isModule && !isKernel {
			return nil
		}
		data, err := readMember(f, r)
		if err != nil {
			return err
		}
		if isKernel {
			if k.Vmlinuz != nil {
				return errors.New("package has two kernels")
			}
			k.Vmlinuz, k.Release = data, strings.TrimPrefix(f.Name, "boot/vmlinuz-")
			return nil
		}
		if _, below, ok := strings.Cut(module, "/"); ok {
			files[below] = data
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if k.Vmlinuz == nil || k.Release == "" {
		return nil, fmt.Errorf("package %s %s has no boot/vmlinuz-*", p.Name, p.Version)
	}
	tree, err := kmod.NewTree(files)
	if err != nil {
		return nil, fmt.Errorf("package %s: %w", p.Name, err)
	}
	selection, err := tree.Select(patterns)
	if err != nil {
		return nil, fmt.Errorf("package %s: %w", p.Name, err)
	}
	k.Modules, k.Index, k.Firmware = selection.Modules, selection.Index(), selection.Firmware()
	return k, nil
}

func readMember(f debian.File, r io.Reader) ([]byte, error) {
	if f.Size > maxMember {
		return nil, fmt.Errorf("%s has %d bytes, more than %d", f.Name, f.Size, maxMember)
	}
	data := make([]byte, f.Size)
	if _, err := io.ReadFull(r, data); err != nil {
		return nil, fmt.Errorf("%s: %w", f.Name, err)
	}
	return data, nil
}

// entries is the module tree of the image. Modules are stored decompressed:
// the archive's own compression does better over all of them, and the machine
// decompresses once.
func (k *kernel) entries() []cpio.Entry {
	root := "lib/modules/" + k.Release
	files := []cpio.Entry{}
	for name, data := range k.Index {
		files = append(files, cpio.File(root+"/"+name, 0o644, data))
	}
	for _, m := range k.Modules {
		files = append(files, cpio.File(root+"/"+m.Path, 0o644, m.Data))
	}
	return append(parents(files, "lib/modules"), files...)
}

// parents makes the folders that files need below the folder top, which is
// taken to be there.
func parents(files []cpio.Entry, top string) []cpio.Entry {
	seen := map[string]bool{top: true}
	var out []cpio.Entry
	for _, f := range files {
		for dir := path.Dir(f.Name); !seen[dir] && dir != "."; dir = path.Dir(dir) {
			seen[dir] = true
			out = append(out, cpio.Dir(dir, 0o755))
		}
	}
	return out
}

func (k *kernel) moduleNames() []string {
	var out []string
	for _, m := range k.Modules {
		out = append(out, m.Path)
	}
	return out
}

// moduleList is /etc/bcd/modules: a name a line, those of alwaysLoad that this
// image has as modules.
func moduleList(k *kernel) []byte {
	var out bytes.Buffer
	out.WriteString("# modules that no device asks for; init loads them by name\n")
	for _, name := range alwaysLoad {
		if slices.ContainsFunc(k.Modules, func(m kmod.Module) bool { return m.Info.Name == name }) {
			out.WriteString(name + "\n")
		}
	}
	return out.Bytes()
}

// fetchStub brings systemd's EFI stub for the architecture.
func fetchStub(ctx context.Context, archive *debian.Archive) ([]byte, debian.Package, error) {
	found, err := archive.Find(ctx, "systemd-boot-efi")
	if err != nil {
		return nil, debian.Package{}, err
	}
	deb, err := archive.Fetch(ctx, found[0])
	if err != nil {
		return nil, debian.Package{}, err
	}
	name := "usr/lib/systemd/boot/efi/linux" + map[string]string{"amd64": "x64", "arm64": "aa64"}[archive.Architecture] + ".efi.stub"
	var stub []byte
	err = debian.Walk(ctx, deb, func(f debian.File, r io.Reader) error {
		if f.Name != name || f.Link != "" {
			return nil
		}
		var err error
		stub, err = readMember(f, r)
		return err
	})
	if err != nil {
		return nil, debian.Package{}, err
	}
	if stub == nil {
		return nil, debian.Package{}, fmt.Errorf("package %s %s has no %s", found[0].Name, found[0].Version, name)
	}
	return stub, found[0], nil
}
