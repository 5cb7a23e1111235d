package modules

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// Bounds of depmod's files. A Debian 6.12 generic kernel has 25,000 aliases,
// 4,500 modules, lines of up to 1,500 bytes.
const (
	maxLine    = 64 << 10
	maxEntries = 500_000
)

// Index answers which modules take an alias and what a module needs.
type Index struct {
	files    map[string]string   // name -> path relative to the release's directory
	deps     map[string][]string // name -> names, in the order to be loaded
	pre      map[string][]string // soft dependencies: names or aliases
	post     map[string][]string
	builtin  map[string]bool
	patterns map[string][]alias // by their literal beginning
	lengths  []int              // of those beginnings, ascending
}

type alias struct{ pattern, module string }

// ReadIndex reads modules.dep, modules.alias, modules.softdep and
// modules.builtin from a release's directory. All but modules.dep may be absent.
func ReadIndex(dir fs.FS) (*Index, error) {
	x := &Index{
		files: map[string]string{}, deps: map[string][]string{},
		pre: map[string][]string{}, post: map[string][]string{},
		builtin: map[string]bool{}, patterns: map[string][]alias{},
	}
	for _, f := range []struct {
		name     string
		line     func(string)
		required bool
	}{
		{"modules.dep", x.addDep, true},
		{"modules.alias", x.addAlias, false},
		{"modules.softdep", x.addSoftdep, false},
		{"modules.builtin", x.addBuiltin, false},
	} {
		file, err := dir.Open(f.name)
		if errors.Is(err, fs.ErrNotExist) && !f.required {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read module index: %w", err)
		}
		err = eachLine(file, f.line)
		file.Close()
		if err != nil {
			return nil, fmt.Errorf("read module index %s: %w", f.name, err)
		}
	}
	for prefix := range x.patterns {
		if i, found := slices.BinarySearch(x.lengths, len(prefix)); !found {
			x.lengths = slices.Insert(x.lengths, i, len(prefix))
		}
	}
	return x, nil
}

// eachLine calls f for each line that is neither empty nor a comment.
func eachLine(r io.Reader, f func(string)) error {
	in := bufio.NewScanner(r)
	in.Buffer(make([]byte, 0, 4096), maxLine)
	for n := 0; in.Scan(); {
		line := strings.TrimSpace(in.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		if n++; n > maxEntries {
			return fmt.Errorf("more than %d lines", maxEntries)
		}
		f(line)
	}
	return in.Err()
}

// normal is a module's name as the kernel has it.
func normal(name string) string { return strings.ReplaceAll(name, "-", "_") }

// nameOf gives the module's name for its file, "" for what is no module.
func nameOf(file string) string {
	base := path.Base(file)
	i := strings.Index(base, ".ko")
	if i <= 0 || !fs.ValidPath(file) {
		return ""
	}
	switch base[i:] {
	case ".ko", ".ko.xz", ".ko.zst", ".ko.gz":
		return normal(base[:i])
	}
	return ""
}

// addDep takes "kernel/a.ko.xz: kernel/b.ko.xz kernel/c.ko.xz": what a needs,
// what is needed first last.
func (x *Index) addDep(line string) {
	file, rest, ok := strings.Cut(line, ":")
	name := nameOf(file)
	if !ok || name == "" {
		return
	}
	x.files[name] = file
	var deps []string
	for f := range strings.FieldsSeq(rest) {
		if dep := nameOf(f); dep != "" {
			deps = append(deps, dep)
		}
	}
	slices.Reverse(deps)
	x.deps[name] = deps
}

// addAlias takes "alias pci:v00001AF4d00001000sv*sd*bc*sc*i* virtio_pci".
func (x *Index) addAlias(line string) {
	f := strings.Fields(line)
	if len(f) != 3 || f[0] != "alias" {
		return
	}
	prefix := f[1]
	if i := strings.IndexAny(prefix, `*?[\`); i >= 0 {
		prefix = prefix[:i]
	}
	x.patterns[prefix] = append(x.patterns[prefix], alias{f[1], normal(f[2])})
}

// addSoftdep takes "softdep NAME pre: a b post: c".
func (x *Index) addSoftdep(line string) {
	f := strings.Fields(line)
	if len(f) < 3 || f[0] != "softdep" {
		return
	}
	name := normal(f[1])
	var into map[string][]string
	for _, word := range f[2:] {
		switch {
		case word == "pre:":
			into = x.pre
		case word == "post:":
			into = x.post
		case into != nil:
			into[name] = append(into[name], word)
		}
	}
}

func (x *Index) addBuiltin(line string) {
	if name := nameOf(line); name != "" {
		x.builtin[name] = true
	}
}

// Match gives the modules that take a modalias, in the order of modules.alias
// for patterns that begin alike, each once, and without built-in ones.
func (x *Index) Match(modalias string) []string {
	var out []string
	for _, n := range x.lengths {
		if n > len(modalias) {
			break
		}
		for _, a := range x.patterns[modalias[:n]] {
			if !x.builtin[a.module] && !slices.Contains(out, a.module) && matches(a.pattern, modalias) {
				out = append(out, a.module)
			}
		}
	}
	return out
}

// matches is fnmatch(3) without flags, as depmod and modprobe have it: '*' and
// '?' match any character, '/' too. It takes len(pattern)*len(s) at most.
func matches(pattern, s string) bool {
	p, i := 0, 0
	star, mark := -1, 0 // the last '*', and how much of s it stands for ends there
	for i < len(s) {
		if p < len(pattern) && pattern[p] == '*' {
			star, mark = p, i
			p++
			continue
		}
		if n, ok := matchOne(pattern[p:], s[i]); ok {
			p += n
			i++
			continue
		}
		if star < 0 {
			return false
		}
		mark++
		p, i = star+1, mark
	}
	for p < len(pattern) && pattern[p] == '*' {
		p++
	}
	return p == len(pattern)
}

// matchOne matches c with the pattern's first element and gives its length.
func matchOne(pattern string, c byte) (n int, ok bool) {
	if pattern == "" {
		return 0, false
	}
	switch pattern[0] {
	case '?':
		return 1, true
	case '\\':
		if len(pattern) > 1 {
			return 2, pattern[1] == c
		}
	case '[':
		if n, ok := matchClass(pattern, c); n > 0 {
			return n, ok
		}
	}
	return 1, pattern[0] == c
}

// matchClass matches c with a bracket expression; n is 0 if it is not closed.
func matchClass(pattern string, c byte) (n int, ok bool) {
	i := 1
	negate := i < len(pattern) && (pattern[i] == '!' || pattern[i] == '^')
	if negate {
		i++
	}
	for first := true; i < len(pattern); first = false {
		if pattern[i] == ']' && !first {
			return i + 1, ok != negate
		}
		lo, hi := pattern[i], pattern[i]
		if i+2 < len(pattern) && pattern[i+1] == '-' && pattern[i+2] != ']' {
			hi = pattern[i+2]
			i += 2
		}
		if lo <= c && c <= hi {
			ok = true
		}
		i++
	}
	return 0, false
}

// Order gives what has to be loaded for a module, itself included, in order:
// soft dependencies before it, hard ones, the module, soft ones after it. A soft
// dependency that does not exist is left out. Cycles are cut.
func (x *Index) Order(name string) ([]string, error) {
	name = normal(name)
	if x.builtin[name] {
		return nil, nil
	}
	if x.files[name] == "" {
		return nil, fmt.Errorf("module %q: %w", name, fs.ErrNotExist)
	}
	var out []string
	x.visit(name, map[string]bool{}, &out)
	return out, nil
}

func (x *Index) visit(name string, seen map[string]bool, out *[]string) {
	if seen[name] || x.builtin[name] || x.files[name] == "" {
		return
	}
	seen[name] = true
	for _, d := range x.soft(x.pre[name]) {
		x.visit(d, seen, out)
	}
	for _, d := range x.deps[name] {
		x.visit(d, seen, out)
	}
	*out = append(*out, name)
	for _, d := range x.soft(x.post[name]) {
		x.visit(d, seen, out)
	}
}

// soft gives the modules for a list of soft dependencies, which may be names or,
// as btrfs's "crypto-crc32c" is, aliases.
func (x *Index) soft(list []string) []string {
	var out []string
	for _, d := range list {
		out = append(out, x.Resolve(d)...)
	}
	return out
}

// Resolve gives the module of that name or else those of that alias; none for
// what is built in or not there.
func (x *Index) Resolve(nameOrAlias string) []string {
	name := normal(nameOrAlias)
	switch {
	case x.builtin[name]:
		return nil
	case x.files[name] != "":
		return []string{name}
	}
	return x.Match(nameOrAlias)
}

// File gives a module's file, relative to the release's directory.
func (x *Index) File(name string) string { return x.files[normal(name)] }
