package debian

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Package is one exact Debian package. Its SHA-256 says what its bytes are; the
// rest says what to call it.
type Package struct {
	Name         string `json:"name"`
	Version      string `json:"version"`
	Architecture string `json:"architecture"`
	// Size is in bytes.
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
	// Source is the source package, for a bill of materials.
	Source string `json:"source,omitempty"`
	// Depends is the raw field, used to follow metapackages.
	Depends string `json:"-"`
}

var (
	hashForm    = regexp.MustCompile(`^[0-9a-f]{64}$`)
	versionForm = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z.+:~-]{0,127}$`)
)

func (p Package) check() error {
	if !wordForm(p.Name) || !versionForm.MatchString(p.Version) || !wordForm(p.Architecture) || !hashForm.MatchString(p.SHA256) || p.Size <= 0 {
		return fmt.Errorf("package %q version %q architecture %q size %d sha256 %q is not well formed", p.Name, p.Version, p.Architecture, p.Size, p.SHA256)
	}
	return nil
}

// parseIndex reads stanzas as apt-cache show prints them.
func parseIndex(text string) ([]Package, error) {
	var out []Package
	for _, f := range stanzas(text) {
		size, _ := strconv.ParseInt(f["size"], 10, 64)
		source, _, _ := strings.Cut(f["source"], " ")
		if source == "" {
			source = f["package"]
		}
		p := Package{Name: f["package"], Version: f["version"], Architecture: f["architecture"], Size: size, SHA256: f["sha256"], Source: source, Depends: f["depends"]}
		if err := p.check(); err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

// dependsOn gives the first dependency whose name starts with prefix: how a
// metapackage names the concrete one.
func (p Package) dependsOn(prefix string) (string, error) {
	for dependency := range strings.SplitSeq(p.Depends, ",") {
		name, _, _ := strings.Cut(strings.TrimSpace(dependency), " ")
		if strings.HasPrefix(name, prefix) && wordForm(name) {
			return name, nil
		}
	}
	return "", fmt.Errorf("metapackage %s %s depends on no package %s…: %q", p.Name, p.Version, prefix, p.Depends)
}

// Lock demands exact packages. A nil Lock demands nothing.
type Lock struct {
	Packages []Package `json:"packages"`
}

// ReadLock reads a lock file: an image's manifest, or any JSON object with the
// same "packages" list.
func ReadLock(name string) (*Lock, error) {
	b, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("lock file: %w", err)
	}
	var l Lock
	if err := json.Unmarshal(b, &l); err != nil {
		return nil, fmt.Errorf("lock file %s: %w", name, err)
	}
	if len(l.Packages) == 0 {
		return nil, fmt.Errorf("lock file %s names no package: give the manifest.json of an earlier image", name)
	}
	for _, p := range l.Packages {
		if err := p.check(); err != nil {
			return nil, fmt.Errorf("lock file %s: %w", name, err)
		}
	}
	return &l, nil
}

// find gives the locked package of that name that runs on arch.
func (l *Lock) find(name, arch string) (Package, bool) {
	i := slices.IndexFunc(l.Packages, func(p Package) bool {
		return p.Name == name && (p.Architecture == arch || p.Architecture == "all")
	})
	if i < 0 {
		return Package{}, false
	}
	return l.Packages[i], true
}

// findMatch is find by the form of the name.
func (l *Lock) findMatch(form *regexp.Regexp, arch string) (Package, bool) {
	i := slices.IndexFunc(l.Packages, func(p Package) bool {
		return form.MatchString(p.Name) && p.Architecture == arch
	})
	if i < 0 {
		return Package{}, false
	}
	return l.Packages[i], true
}
