package image

import (
	"bytes"
	"context"
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
	release   string
	vmlinuz   []byte
	selection *kmod.Selection
}

// fetchKernel brings the profile's kernel and chooses its modules.
func fetchKernel(ctx context.Context, archive *debian.Archive, profile *Profile) (*kernel, error) {
	p, err := archive.Kernel(ctx, profile.kernel[archive.Architecture])
	if err != nil {
		return nil, err
	}
	deb, err := archive.Fetch(ctx, p)
	if err != nil {
		return nil, err
	}
	k := &kernel{Package: p}
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
			if k.vmlinuz != nil {
				return errors.New("package has two kernels")
			}
			k.vmlinuz, k.release = data, strings.TrimPrefix(f.Name, "boot/vmlinuz-")
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
	if k.vmlinuz == nil || k.release == "" {
		return nil, fmt.Errorf("package %s %s has no boot/vmlinuz-*", p.Name, p.Version)
	}
	tree, err := kmod.NewTree(files)
	if err != nil {
		return nil, fmt.Errorf("package %s: %w", p.Name, err)
	}
	patterns, err := parseModules(profile.modules)
	if err != nil {
		return nil, err
	}
	if k.selection, err = tree.Select(patterns); err != nil {
		return nil, fmt.Errorf("package %s: %w", p.Name, err)
	}
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
	root := "lib/modules/" + k.release
	files := []cpio.Entry{}
	for name, data := range k.selection.Index() {
		files = append(files, cpio.File(root+"/"+name, 0o644, data))
	}
	for _, m := range k.selection.Modules {
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
	for _, m := range k.selection.Modules {
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
		if slices.ContainsFunc(k.selection.Modules, func(m kmod.Module) bool { return m.Info.Name == name }) {
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
