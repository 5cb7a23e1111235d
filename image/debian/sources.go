// Package debian brings packages of one Debian release to an image build.
//
// It uses the machine's own apt: its mirrors, proxies, credentials and keys.
// No host name stands in this repository. The sources of the wanted release
// are the machine's own with the release's name replaced, so a private mirror
// serves an image build as it serves the machine. State and cache are private
// to the build: nothing on the machine is installed or changed.
package debian

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
)

// maxSourcesFile bounds one apt sources file; a real one has a few kilobytes.
const maxSourcesFile = 1 << 20

// pockets are the parts of a release that an image takes packages from.
// Backports and proposed updates are left out: nobody asked for them.
var pockets = []string{"", "-updates", "-security"}

// source is one deb822 stanza, reduced to what the derived file needs.
type source struct {
	uris, suites, components []string
	// signedBy is kept as written: a path, a fingerprint or a whole key.
	signedBy string
	trusted  string
}

// Derive makes a deb822 sources file for release (such as "trixie") from this
// machine's own sources. extra components (such as "non-free-firmware") are
// added to those that the machine uses.
//
// It fails when the machine is not a Debian, or has no source of its own
// release.
func Derive(release string, extra ...string) ([]byte, error) {
	return DeriveFrom(os.DirFS("/"), release, extra...)
}

// DeriveFrom is Derive for the machine whose root is fsys.
func DeriveFrom(fsys fs.FS, release string, extra ...string) ([]byte, error) {
	if !wordForm(release) {
		return nil, fmt.Errorf("%q is not the name of a Debian release: use one like trixie", release)
	}
	codename, err := hostRelease(fsys)
	if err != nil {
		return nil, err
	}
	sources, err := readSources(fsys)
	if err != nil {
		return nil, err
	}
	var kept []source
	for _, s := range sources {
		if s.suites = renamed(s.suites, codename, release); len(s.suites) == 0 || !slices.Contains(s.components, "main") {
			continue
		}
		kept = append(kept, s)
	}
	// Some third parties name their suites after Debian's releases too. Their
	// own key gives them away, when Debian's own sources name Debian's.
	debians := slices.DeleteFunc(slices.Clone(kept), func(s source) bool {
		return strings.HasPrefix(s.signedBy, "/") && !strings.Contains(path.Base(s.signedBy), "debian-archive")
	})
	if len(debians) > 0 {
		kept = debians
	}
	if len(kept) == 0 {
		return nil, fmt.Errorf("no apt source of this machine has the suite %q with the component main: add the Debian archive to /etc/apt/sources.list.d", codename)
	}
	var out bytes.Buffer
	for i, s := range kept {
		if i > 0 {
			out.WriteByte('\n')
		}
		for _, c := range extra {
			if !slices.Contains(s.components, c) {
				s.components = append(s.components, c)
			}
		}
		fmt.Fprintf(&out, "Types: deb\nURIs: %s\nSuites: %s\nComponents: %s\n",
			strings.Join(s.uris, " "), strings.Join(s.suites, " "), strings.Join(s.components, " "))
		if s.trusted != "" {
			fmt.Fprintf(&out, "Trusted: %s\n", s.trusted)
		}
		if s.signedBy != "" {
			fmt.Fprintf(&out, "Signed-By: %s\n", renamedKey(fsys, s.signedBy, codename, release))
		}
	}
	return out.Bytes(), nil
}

// renamed gives the suites of the wanted release that stand for those of the
// machine's own, or nothing.
func renamed(suites []string, codename, release string) []string {
	var out []string
	for _, suite := range suites {
		for _, own := range []string{codename, "stable", "oldstable"} {
			if pocket, ok := strings.CutPrefix(suite, own); ok && slices.Contains(pockets, pocket) && !slices.Contains(out, release+pocket) {
				out = append(out, release+pocket)
			}
		}
	}
	return out
}

// renamedKey replaces a key file that holds only one release's keys by that of
// the wanted release, when the machine has it.
func renamedKey(fsys fs.FS, signedBy, codename, release string) string {
	if !strings.HasPrefix(signedBy, "/") {
		return signedBy
	}
	other := strings.ReplaceAll(signedBy, codename, release)
	if _, err := fs.Stat(fsys, strings.TrimPrefix(other, "/")); err != nil {
		return signedBy
	}
	return other
}

// hostRelease reads the machine's own release name.
func hostRelease(fsys fs.FS) (string, error) {
	b, err := readBounded(fsys, "etc/os-release")
	if errors.Is(err, fs.ErrNotExist) {
		b, err = readBounded(fsys, "usr/lib/os-release")
	}
	if err != nil {
		return "", fmt.Errorf("find this machine's release: %w", err)
	}
	values := map[string]string{}
	for line := range strings.Lines(string(b)) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			values[key] = strings.Trim(value, `"'`)
		}
	}
	if values["ID"] != "debian" || !wordForm(values["VERSION_CODENAME"]) {
		return "", fmt.Errorf("this machine is %q %q: images are built on Debian 12 or 13", values["ID"], values["VERSION_CODENAME"])
	}
	return values["VERSION_CODENAME"], nil
}

// readSources reads all sources as apt does: sources.list, then the .list and
// .sources files of sources.list.d by name.
func readSources(fsys fs.FS) ([]source, error) {
	var out []source
	files := []string{"etc/apt/sources.list"}
	entries, err := fs.ReadDir(fsys, "etc/apt/sources.list.d")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		if ext := path.Ext(e.Name()); ext == ".list" || ext == ".sources" {
			files = append(files, "etc/apt/sources.list.d/"+e.Name())
		}
	}
	for _, file := range files {
		b, err := readBounded(fsys, file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if path.Ext(file) == ".sources" {
			out = append(out, parseStanzas(string(b))...)
		} else {
			out = append(out, parseLines(string(b))...)
		}
	}
	return out, nil
}

func readBounded(fsys fs.FS, name string) ([]byte, error) {
	if info, err := fs.Stat(fsys, name); err != nil {
		return nil, err
	} else if info.Size() > maxSourcesFile {
		return nil, fmt.Errorf("/%s has %d bytes, more than any honest file of its kind (%d)", name, info.Size(), maxSourcesFile)
	}
	return fs.ReadFile(fsys, name)
}

// parseStanzas reads deb822 sources, sources.list(5).
func parseStanzas(text string) []source {
	var out []source
	for _, fields := range stanzas(text) {
		if !slices.Contains(strings.Fields(fields["types"]), "deb") || slices.Contains([]string{"no", "false", "0", "off"}, strings.ToLower(fields["enabled"])) {
			continue
		}
		s := source{
			uris: strings.Fields(fields["uris"]), suites: strings.Fields(fields["suites"]),
			components: strings.Fields(fields["components"]), signedBy: fields["signed-by"], trusted: fields["trusted"],
		}
		if len(s.uris) > 0 {
			out = append(out, s)
		}
	}
	return out
}

// parseLines reads one-line sources: "deb [options] uri suite component...".
func parseLines(text string) []source {
	var out []source
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		words := strings.Fields(strings.NewReplacer("[", " [ ", "]", " ] ").Replace(line))
		if len(words) < 4 || words[0] != "deb" {
			continue
		}
		words = words[1:]
		var s source
		if words[0] == "[" {
			end := slices.Index(words, "]")
			if end < 0 {
				continue
			}
			for _, option := range words[1:end] {
				switch key, value, _ := strings.Cut(option, "="); strings.ToLower(key) {
				case "signed-by":
					s.signedBy = value
				case "trusted":
					s.trusted = value
				}
			}
			words = words[end+1:]
		}
		if len(words) < 3 {
			continue
		}
		s.uris, s.suites, s.components = words[:1], words[1:2], words[2:]
		out = append(out, s)
	}
	return out
}

// stanzas splits deb822 text into fields with lower-case names. A field that
// goes on over several lines keeps its line ends and leading spaces.
func stanzas(text string) []map[string]string {
	var out []map[string]string
	var fields map[string]string
	last := ""
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n \t")
		switch {
		case strings.HasPrefix(line, "#"):
		case line == "":
			fields, last = nil, ""
		case line[0] == ' ' || line[0] == '\t':
			if last != "" {
				fields[last] += "\n" + line
			}
		default:
			key, value, ok := strings.Cut(line, ":")
			if !ok {
				continue
			}
			if fields == nil {
				fields = map[string]string{}
				out = append(out, fields)
			}
			last = strings.ToLower(strings.TrimSpace(key))
			fields[last] = strings.TrimSpace(value)
		}
	}
	return out
}

// wordForm reports whether s can be a release, package or architecture name.
func wordForm(s string) bool {
	if s == "" || len(s) > 128 || s[0] == '-' || s[0] == '.' {
		return false
	}
	for _, r := range s {
		if (r < 'a' || r > 'z') && (r < '0' || r > '9') && !strings.ContainsRune("+-.", r) {
			return false
		}
	}
	return true
}
