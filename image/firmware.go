package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/better-compute/bcd/image/cpio"
	"github.com/better-compute/bcd/image/debian"
)

// FirmwareFile is one firmware file of an image.
type FirmwareFile struct {
	// Path is relative to /lib/firmware.
	Path    string `json:"path"`
	Package string `json:"package"`
	SHA256  string `json:"sha256"`
	Size    int64  `json:"size"`
	// Link is set for a second name of the same file.
	Link string `json:"link,omitempty"`
}

// firmwareSet is what was found for the names that modules ask for.
type firmwareSet struct {
	entries  []cpio.Entry
	files    []FirmwareFile
	packages []debian.Package
	// missing maps a name to the modules that want it.
	missing map[string][]string
}

// fetchFirmware finds each firmware file that wanted names (file to modules) in
// Debian's firmware packages. With free, only free firmware is taken; what is
// left out is listed either way.
func fetchFirmware(ctx context.Context, archive *debian.Archive, profile *Profile, wanted map[string][]string, free bool) (*firmwareSet, error) {
	set := &firmwareSet{missing: maps.Clone(wanted)}
	if !profile.firmware || len(wanted) == 0 {
		return set, nil
	}
	names := slices.Clone(firmwarePackages.free)
	if !free {
		names = append(names, firmwarePackages.redistributable...)
	}
	packages, absent, err := archive.FindSome(ctx, names...)
	if err != nil {
		return nil, err
	}
	if len(absent) > 0 {
		// A mirror without that component still builds an image; the list of
		// what is missing says what it costs.
		archive.Log.Warn("firmware packages are not to be had, their files are left out", "packages", strings.Join(absent, " "))
	}
	for _, p := range packages {
		if err := set.take(ctx, archive, p); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(set.entries, func(a, b cpio.Entry) int { return strings.Compare(a.Name, b.Name) })
	slices.SortFunc(set.files, func(a, b FirmwareFile) int { return strings.Compare(a.Path, b.Path) })
	set.entries = append(parents(set.entries, "lib/firmware"), set.entries...)
	return set, nil
}

// take adds the wanted files of one package.
func (set *firmwareSet) take(ctx context.Context, archive *debian.Archive, p debian.Package) error {
	deb, err := archive.Fetch(ctx, p)
	if err != nil {
		return err
	}
	// A link may come before or after its target, and its target may be a
	// file that no module names: so all of the package is held once.
	files, links := map[string][]byte{}, map[string]string{}
	err = debian.Walk(ctx, deb, func(f debian.File, r io.Reader) error {
		name, ok := strings.CutPrefix(strings.TrimPrefix(f.Name, "usr/"), "lib/firmware/")
		if !ok {
			return nil
		}
		if f.Link != "" {
			target := path.Join(path.Dir(name), f.Link)
			if path.IsAbs(f.Link) {
				target = strings.TrimPrefix(strings.TrimPrefix(path.Clean(f.Link), "/usr"), "/lib/firmware/")
			}
			links[name] = target
			return nil
		}
		data, err := readMember(f, r)
		files[name] = data
		return err
	})
	if err != nil {
		return err
	}
	used := false
	add := func(name string) {
		if slices.ContainsFunc(set.files, func(f FirmwareFile) bool { return f.Path == name }) {
			return
		}
		data := files[name]
		sum := sha256.Sum256(data)
		set.entries = append(set.entries, cpio.File("lib/firmware/"+name, 0o644, data))
		set.files = append(set.files, FirmwareFile{Path: name, Package: p.Name, SHA256: hex.EncodeToString(sum[:]), Size: int64(len(data))})
		used = true
	}
	for _, want := range slices.Sorted(maps.Keys(set.missing)) {
		found := false
		for _, name := range matching(want, files, links) {
			real := name
			for range 8 { // more links in a row are a loop
				target, ok := links[real]
				if !ok {
					break
				}
				real = target
			}
			if _, ok := files[real]; !ok {
				continue
			}
			found = true
			add(real)
			if real != name && !slices.ContainsFunc(set.files, func(f FirmwareFile) bool { return f.Path == name }) {
				target := relative(path.Dir(name), real)
				set.entries = append(set.entries, cpio.Symlink("lib/firmware/"+name, target))
				set.files = append(set.files, FirmwareFile{Path: name, Package: p.Name, Link: target})
			}
		}
		if found {
			delete(set.missing, want)
		}
	}
	if used {
		set.packages = append(set.packages, p)
	}
	return nil
}

// matching gives the package's names that a module's firmware= means: the name
// itself, or all that fit when it holds "*".
func matching(want string, files map[string][]byte, links map[string]string) []string {
	want = path.Clean(want)
	if !strings.Contains(want, "*") {
		return []string{want}
	}
	var out []string
	for _, names := range []([]string){slices.Collect(maps.Keys(files)), slices.Collect(maps.Keys(links))} {
		for _, name := range names {
			if ok, err := path.Match(want, name); err == nil && ok {
				out = append(out, name)
			}
		}
	}
	slices.Sort(out)
	return out
}

// relative gives the path from folder dir to file target.
func relative(dir, target string) string {
	up := ""
	for dir != "." && !strings.HasPrefix(target, dir+"/") {
		dir, up = path.Dir(dir), up+"../"
	}
	return up + strings.TrimPrefix(target, strings.TrimPrefix(dir+"/", "./"))
}

// missingText is firmware-missing.txt: a file a line, with the modules that
// would like it.
func (set *firmwareSet) missingText() []byte {
	var out bytes.Buffer
	out.WriteString("# firmware files that modules of this image name and that it does not have\n")
	for _, name := range slices.Sorted(maps.Keys(set.missing)) {
		fmt.Fprintf(&out, "%s\t%s\n", name, strings.Join(set.missing[name], " "))
	}
	return out.Bytes()
}
