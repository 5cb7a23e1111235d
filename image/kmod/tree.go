package kmod

import (
	"bytes"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
)

// Tree is all modules of one kernel, still compressed.
type Tree struct {
	// files maps a path such as "kernel/drivers/net/veth.ko.xz" to its bytes.
	files map[string][]byte
	// byName maps a module's name to its path.
	byName map[string]string
	// builtin names the modules that are part of the kernel.
	builtin map[string]bool
	// order is the path's place in modules.order, which decides between
	// modules with the same alias.
	order map[string]int
	// raw index files of the kernel that are passed on as they are.
	raw map[string][]byte
}

// NewTree reads a kernel's module folder: paths relative to
// /lib/modules/<release> with their bytes.
func NewTree(files map[string][]byte) (*Tree, error) {
	t := &Tree{files: map[string][]byte{}, byName: map[string]string{}, builtin: map[string]bool{}, order: map[string]int{}, raw: map[string][]byte{}}
	for name, data := range files {
		switch {
		case name == "modules.builtin":
			t.raw[name] = data
			for line := range strings.Lines(string(data)) {
				t.builtin[moduleName(strings.TrimSpace(line))] = true
			}
		case name == "modules.order":
			for line := range strings.Lines(string(data)) {
				t.order[strings.TrimSpace(line)] = len(t.order)
			}
		case name == "modules.builtin.modinfo":
			t.raw[name] = data
		case strings.HasSuffix(name, ".ko") || strings.HasSuffix(name, ".ko.xz"):
			t.files[name] = data
			t.byName[moduleName(name)] = name
		}
	}
	if len(t.files) == 0 || len(t.builtin) == 0 {
		return nil, fmt.Errorf("kernel package has %d modules and %d built-in ones: its layout is not the known one", len(t.files), len(t.builtin))
	}
	return t, nil
}

// moduleName gives the name of the module in a file.
func moduleName(file string) string {
	base := path.Base(file)
	base = strings.TrimSuffix(base, ".xz")
	return canonical(strings.TrimSuffix(base, ".ko"))
}

// plain is the path of the decompressed module.
func plain(file string) string { return strings.TrimSuffix(file, ".xz") }

// Selection is the modules of an image.
type Selection struct {
	// Modules are sorted by Path.
	Modules []Module
	tree    *Tree
}

// Module is one chosen module, decompressed.
type Module struct {
	// Path is relative to /lib/modules/<release>, without .xz.
	Path string
	Data []byte
	Info Modinfo
}

// Select takes every module that a pattern names and all that those need.
//
// A pattern is a path below kernel/ without ".ko"; "*" stands for any part of a
// name, "**" for any number of folders; a leading "-" takes away again what an
// earlier pattern took, except where another module needs it. A pattern that
// matches nothing, neither module nor built-in, is an error unless it begins
// with "-" or "?": a kernel update that renames a driver should break the
// build, not the boot.
func (t *Tree) Select(patterns []string) (*Selection, error) {
	wanted := map[string]bool{}
	for _, pattern := range patterns {
		rest, remove := strings.CutPrefix(pattern, "-")
		optional := remove || strings.HasPrefix(rest, "?")
		form, err := compile(strings.TrimPrefix(rest, "?"))
		if err != nil {
			return nil, err
		}
		hit := false
		for file := range t.files {
			if form.MatchString(strings.TrimSuffix(plain(file), ".ko")) {
				hit = true
				if remove {
					delete(wanted, file)
				} else {
					wanted[file] = true
				}
			}
		}
		if !hit && !optional && !t.builtinMatch(form) {
			return nil, fmt.Errorf("module pattern %q matches nothing in this kernel: correct the table of the profile", pattern)
		}
	}
	queue := make([]string, 0, len(wanted))
	for file := range wanted {
		queue = append(queue, file)
	}
	chosen := map[string]Module{}
	for len(queue) > 0 {
		file := queue[len(queue)-1]
		queue = queue[:len(queue)-1]
		if _, done := chosen[file]; done {
			continue
		}
		data, err := decompress(file, t.files[file])
		if err != nil {
			return nil, err
		}
		info, err := ReadModinfo(data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if info.Name == "" {
			info.Name = moduleName(file)
		}
		chosen[file] = Module{Path: plain(file), Data: data, Info: info}
		for _, name := range info.Depends {
			needed, ok := t.byName[name]
			if !ok && !t.builtin[name] {
				return nil, fmt.Errorf("module %s needs %s, which the kernel package does not have", info.Name, name)
			}
			if ok {
				queue = append(queue, needed)
			}
		}
		for _, name := range info.softNames() {
			if needed, ok := t.byName[name]; ok {
				queue = append(queue, needed)
			}
		}
	}
	s := &Selection{tree: t}
	for _, m := range chosen {
		s.Modules = append(s.Modules, m)
	}
	slices.SortFunc(s.Modules, func(a, b Module) int { return strings.Compare(a.Path, b.Path) })
	return s, nil
}

func (t *Tree) builtinMatch(form *regexp.Regexp) bool {
	for line := range strings.Lines(string(t.raw["modules.builtin"])) {
		if form.MatchString(strings.TrimSuffix(strings.TrimSpace(line), ".ko")) {
			return true
		}
	}
	return false
}

// compile makes a matcher of whole paths below kernel/.
func compile(pattern string) (*regexp.Regexp, error) {
	if pattern == "" {
		return nil, fmt.Errorf("module pattern is empty")
	}
	quoted := regexp.QuoteMeta(pattern)
	quoted = strings.ReplaceAll(quoted, `/\*\*`, `/.*`)
	quoted = strings.ReplaceAll(quoted, `\*`, `[^/]*`)
	return regexp.Compile("^kernel/" + quoted + "$")
}

// Firmware is every firmware file that the chosen modules name, sorted, with
// the modules that name it. A name may hold "*", as a few modules' do.
func (s *Selection) Firmware() map[string][]string {
	out := map[string][]string{}
	for _, m := range s.Modules {
		for _, f := range m.Info.Firmware {
			if !slices.Contains(out[f], m.Info.Name) {
				out[f] = append(out[f], m.Info.Name)
			}
		}
	}
	return out
}

// Index gives the index files for the chosen modules, by name.
//
// modules.dep lists all modules that one needs, direct and indirect, in the
// order in which depmod writes them: the last is to be loaded first.
// modules.alias is in the order of modules.order, so that the first match wins
// as it does with the whole tree.
func (s *Selection) Index() map[string][]byte {
	byName := map[string]Module{}
	for _, m := range s.Modules {
		byName[moduleName(m.Path)] = m
	}
	ordered := slices.Clone(s.Modules)
	place := func(m Module) int {
		if n, ok := s.tree.order[m.Path]; ok {
			return n
		}
		return len(s.tree.order)
	}
	slices.SortStableFunc(ordered, func(a, b Module) int { return place(a) - place(b) })
	var dep, alias, soft, order bytes.Buffer
	alias.WriteString("# Aliases extracted from modules themselves.\n")
	soft.WriteString("# Soft dependencies extracted from modules themselves.\n")
	for _, m := range s.Modules {
		dep.WriteString(m.Path + ":")
		for _, needed := range closure(byName, m) {
			dep.WriteString(" " + needed.Path)
		}
		dep.WriteByte('\n')
	}
	for _, m := range ordered {
		order.WriteString(m.Path + "\n")
		for _, a := range m.Info.Aliases {
			fmt.Fprintf(&alias, "alias %s %s\n", a, m.Info.Name)
		}
		for _, line := range m.Info.Softdeps {
			fmt.Fprintf(&soft, "softdep %s %s\n", m.Info.Name, line)
		}
	}
	out := map[string][]byte{
		"modules.dep": dep.Bytes(), "modules.alias": alias.Bytes(),
		"modules.softdep": soft.Bytes(), "modules.order": order.Bytes(),
	}
	for name, data := range s.tree.raw {
		out[name] = data
	}
	return out
}

// closure gives what m needs so that each comes before what it needs itself.
func closure(byName map[string]Module, m Module) []Module {
	var post []Module
	seen := map[string]bool{moduleName(m.Path): true}
	var visit func(m Module)
	visit = func(m Module) {
		for _, name := range slices.Backward(m.Info.Depends) {
			needed, ok := byName[name]
			if !ok || seen[name] {
				continue
			}
			seen[name] = true
			visit(needed)
			post = append(post, needed)
		}
	}
	visit(m)
	slices.Reverse(post)
	return post
}
