// Package hostconf is the host and daemon sections of a NodeSpec: sysctls,
// kernel modules, one systemd drop-in for bcd.service, and settings of the
// daemon itself.
//
// Everything the host section owns is in three files, each one whole at any
// moment, whose content is a function of the spec alone. Planning compares
// files, /proc/sys and loaded modules with the spec, so that drift, a crash in
// the middle and a spec without the part are one and the same case.
package hostconf

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/better-compute/bcd/agent/converge"
	"github.com/better-compute/bcd/agent/durable"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// The files that the section owns, below the root.
const (
	SysctlFile  = "etc/sysctl.d/90-bcd.conf"
	ModulesFile = "etc/modules-load.d/90-bcd.conf"
	DropInFile  = "etc/systemd/system/bcd.service.d/90-bcd.conf"

	// reloadMark says that systemd has not yet read the drop-in as it is. It
	// is written before the drop-in and removed after the reload, so that a
	// crash in between does not lose the reload.
	reloadMark = "etc/systemd/system/bcd.service.d/.90-bcd.reload"

	// maxOwnFile bounds what is read of the three.
	maxOwnFile = 1 << 20
	// maxProcFile bounds what is read of a kernel parameter.
	maxProcFile = 64 << 10
)

// Effects are what the section does beyond files.
type Effects interface {
	// LoadModule loads a kernel module by name, which is in modules-load.d.
	LoadModule(ctx context.Context, name string) error
	// ModuleReady says whether it is loaded or built in.
	ModuleReady(name string) (bool, error)
	// ApplySysctls has systemd set every parameter that is in sysctl.d. asked
	// is false where systemd is not the init, and nothing was done.
	ApplySysctls(ctx context.Context) (asked bool, err error)
	// ReloadServices makes systemd read its units again (daemon-reload).
	ReloadServices(ctx context.Context) error
}

// Host is the host section. A kernel parameter that the spec no longer names
// loses its line and keeps its value until the next boot: what it was before
// is not known.
type Host struct {
	// Root is "/", or a test's folder. Symbolic links below it are refused on
	// the way to what the section writes.
	Root    *os.Root
	Effects Effects
	// Writer is for tests that crash it; the zero value is right.
	Writer durable.Writer
}

var _ converge.Section = (*Host)(nil)

// Name is "host".
func (h *Host) Name() string { return "host" }

// DependsOn names nothing.
func (h *Host) DependsOn() []string { return nil }

// What a step does.
type (
	writeFile struct {
		name string
		data []byte
		// mark: set reloadMark first.
		mark bool
	}
	removeFile struct {
		name string
		mark bool
	}
	loadModule struct{ name string }
	setSysctl  struct{ key, value string }
	reload     struct{}
)

// Plan compares the machine with the spec. A spec that names what is not
// allowed is a terminal error, and nothing of it is applied.
func (h *Host) Plan(_ context.Context, spec *bcdv1.NodeSpec) ([]converge.Step, error) {
	want, err := parse(spec.GetHost())
	if err != nil {
		return nil, converge.Terminal(err)
	}
	var steps []converge.Step
	// Modules come before sysctls: net.bridge.*, for one, exists only once its
	// module is loaded.
	if steps, err = h.planFile(steps, ModulesFile, want.modulesFile(), false); err != nil {
		return nil, err
	}
	for _, name := range want.modules {
		ready, err := h.Effects.ModuleReady(name)
		if err != nil {
			return nil, fmt.Errorf("kernel module %s: %w", name, err)
		}
		if !ready {
			steps = append(steps, converge.Step{Action: "load", Target: "module " + name, Do: loadModule{name}})
		}
	}
	if steps, err = h.planFile(steps, SysctlFile, want.sysctlFile(), false); err != nil {
		return nil, err
	}
	for _, s := range want.sysctls {
		got, err := durable.ReadIn(h.Root, procPath(s.key), maxProcFile)
		// One that is not there may come with its module; writing it tells.
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("kernel parameter %s: %w", s.key, err)
		}
		if err != nil || normal(string(got)) != normal(s.value) {
			steps = append(steps, converge.Step{Action: "set", Target: s.key + " = " + s.value, Do: setSysctl(s)})
		}
	}
	before := len(steps)
	if steps, err = h.planFile(steps, DropInFile, want.dropInFile(), true); err != nil {
		return nil, err
	}
	_, err = h.Root.Lstat(reloadMark)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err == nil || len(steps) > before {
		steps = append(steps, converge.Step{Action: "reload", Target: "systemd units", Do: reload{}})
	}
	return steps, nil
}

// planFile adds the step that makes name hold data; no data is no file.
func (h *Host) planFile(steps []converge.Step, name string, data []byte, mark bool) ([]converge.Step, error) {
	if err := h.checkPath(name); err != nil {
		return nil, err
	}
	have, err := durable.ReadIn(h.Root, name, maxOwnFile)
	missing := errors.Is(err, fs.ErrNotExist)
	switch {
	case err != nil && !missing && !errors.Is(err, durable.ErrTooLarge):
		return nil, err
	case data == nil && !missing:
		return append(steps, converge.Step{Action: "remove", Target: "/" + name, Do: removeFile{name, mark}}), nil
	case data == nil:
		return steps, nil
	case err != nil || !bytes.Equal(have, data) || !h.hasMode(name):
		return append(steps, converge.Step{Action: "write", Target: "/" + name, Do: writeFile{name, data, mark}}), nil
	}
	return steps, nil
}

const fileMode fs.FileMode = 0o644

func (h *Host) hasMode(name string) bool {
	info, err := h.Root.Lstat(name)
	return err == nil && info.Mode() == fileMode
}

// checkPath refuses a symbolic link, and anything that is not a folder, on the
// way to name, and a name that is there and no regular file.
func (h *Host) checkPath(name string) error {
	for at, part := range strings.Split(name, "/") {
		sub := strings.Join(strings.Split(name, "/")[:at+1], "/")
		info, err := h.Root.Lstat(sub)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s: %w", part, err)
		}
		last := sub == name
		if !last && !info.IsDir() || last && !info.Mode().IsRegular() {
			return fmt.Errorf("/%s is a %s; remove it: bcd writes through no link and over nothing but its own files", sub, kindOf(info.Mode()))
		}
	}
	return nil
}

func kindOf(mode fs.FileMode) string {
	switch {
	case mode&fs.ModeSymlink != 0:
		return "symbolic link"
	case mode.IsDir():
		return "folder"
	case mode.IsRegular():
		return "regular file"
	default:
		return "special file"
	}
}

// Apply takes one step of Plan. Every step may be taken again.
func (h *Host) Apply(ctx context.Context, step converge.Step) error {
	switch do := step.Do.(type) {
	case writeFile:
		if err := h.prepare(do.name, do.mark); err != nil {
			return err
		}
		return h.Writer.WriteIn(h.Root, do.name, do.data, fileMode)
	case removeFile:
		if err := h.prepare(do.name, do.mark); err != nil {
			return err
		}
		return h.Writer.RemoveIn(h.Root, do.name)
	case loadModule:
		return h.Effects.LoadModule(ctx, do.name)
	case setSysctl:
		return h.set(ctx, do.key, do.value)
	case reload:
		if err := h.Effects.ReloadServices(ctx); err != nil {
			return err
		}
		return h.Writer.RemoveIn(h.Root, reloadMark)
	}
	return fmt.Errorf("unknown step %T", step.Do)
}

// prepare makes the folder of name and, where asked for, the reload mark.
func (h *Host) prepare(name string, mark bool) error {
	if err := h.checkPath(name); err != nil {
		return err
	}
	if err := h.Root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	if mark {
		return h.Writer.WriteIn(h.Root, reloadMark, nil, 0o600)
	}
	return nil
}

// set gives a kernel parameter its value. A hardened bcd.service cannot write
// /proc/sys, so systemd is asked where there is one: it reads the file that the
// section has written before.
func (h *Host) set(ctx context.Context, key, value string) error {
	// An earlier step may have set them all.
	if h.holds(key, value) {
		return nil
	}
	asked, err := h.Effects.ApplySysctls(ctx)
	if !asked {
		return errors.Join(err, h.write(key, value))
	}
	if h.holds(key, value) {
		return nil // whatever else systemd could not set
	}
	have, readErr := durable.ReadIn(h.Root, procPath(key), maxProcFile)
	if errors.Is(readErr, fs.ErrNotExist) {
		return noParameter(key)
	}
	return errors.Join(fmt.Errorf("%s stays at %.80q: the kernel does not take %q, or a later file in sysctl.d says otherwise", key, normal(string(have)), value), readErr, err)
}

func (h *Host) holds(key, value string) bool {
	have, err := durable.ReadIn(h.Root, procPath(key), maxProcFile)
	return err == nil && normal(string(have)) == normal(value)
}

func noParameter(key string) error {
	return fmt.Errorf("this kernel has no parameter %s; the module that brings it may be missing from host.modules", key)
}

// write writes a kernel parameter in place: a file in /proc/sys cannot be
// replaced, and takes one write whole or refuses it.
func (h *Host) write(key, value string) error {
	f, err := h.Root.OpenFile(procPath(key), os.O_WRONLY|os.O_TRUNC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return noParameter(key)
	}
	if err != nil {
		return err
	}
	_, err = f.WriteString(value + "\n")
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return fmt.Errorf("the kernel does not take %q for %s: %w", value, key, err)
	}
	return nil
}

// normal makes two spellings of a value comparable: the kernel separates
// fields by tabs.
func normal(value string) string { return strings.Join(strings.Fields(value), " ") }
