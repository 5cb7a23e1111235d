// Package disk finds the disks of this machine that an image may be written
// to, chooses one, and writes to it. What a disk is called today (/dev/sda)
// plays no part in the choice.
package disk

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/better-compute/bcd/agent/host"
)

// Roots is where the machine is read from; "" stands for the usual place.
type Roots struct{ Sys, Proc, Dev string }

func (r Roots) withDefaults() Roots {
	for p, def := range map[*string]string{&r.Sys: "/sys", &r.Proc: "/proc", &r.Dev: "/dev"} {
		if *p == "" {
			*p = def
		}
	}
	return r
}

// Disk is one disk of this machine, as the inventory shows it.
type Disk struct {
	host.Block
	// Node is its device file.
	Node string
	// Refused says why nothing may be written to it; empty when it may.
	Refused string
}

// String is what error messages and logs call the disk.
func (d Disk) String() string {
	s := fmt.Sprintf("%s (%s", d.Node, host.Bytes(d.SizeBytes))
	for _, p := range []struct{ name, value string }{{"", d.Transport}, {"model ", d.Model}, {"serial ", d.Serial}, {"WWN ", d.WWN}, {"at ", d.Path}} {
		if p.value != "" {
			s += ", " + p.name + p.value
		}
	}
	return s + ")"
}

// List reads the machine's disks. Those that must not be written to are in
// the list too, with the reason, so that a refusal can name it.
func List(ctx context.Context, roots Roots) ([]Disk, error) {
	r := roots.withDefaults()
	facts, err := host.Read(ctx, host.Roots{Sys: r.Sys, Proc: r.Proc, Dev: r.Dev})
	if err != nil {
		return nil, err
	}
	if msg := facts.Errors["block"]; msg != "" && len(facts.Block) == 0 {
		return nil, errors.New(msg)
	}
	inUse, err := r.inUse()
	if err != nil {
		return nil, err
	}
	var out []Disk
	for _, b := range facts.Block {
		d := Disk{Block: b, Node: filepath.Join(r.Dev, b.Name)}
		d.Refused, err = r.refuse(d, inUse)
		if err != nil {
			return nil, err
		}
		out = append(out, d)
	}
	return out, nil
}

// refuse looks at the disk and its partitions.
func (r Roots) refuse(d Disk, inUse map[string]string) (string, error) {
	switch {
	case d.ReadOnly:
		return "it is read-only", nil
	case d.Removable:
		return "it is removable", nil
	case d.Transport == "usb":
		return "it is a USB disk", nil
	}
	dir := filepath.Join(r.Sys, "block", d.Name)
	parts := []string{dir}
	names, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return "it went away", nil
	}
	if err != nil {
		return "", fmt.Errorf("read disk %s: %w", d.Name, err)
	}
	for _, n := range names {
		// A partition's directory lies in its disk's and begins with its name.
		if strings.HasPrefix(n.Name(), d.Name) {
			parts = append(parts, filepath.Join(dir, n.Name()))
		}
	}
	for _, p := range parts {
		name := filepath.Base(p)
		if what := inUse[readWord(filepath.Join(p, "dev"))]; what != "" {
			return fmt.Sprintf("%s is %s", name, what), nil
		}
		if what := inUse[name]; what != "" {
			return fmt.Sprintf("%s is %s", name, what), nil
		}
		holders, err := os.ReadDir(filepath.Join(p, "holders"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("read holders of %s: %w", name, err)
		}
		for _, h := range holders {
			return fmt.Sprintf("%s is part of %s: stop it first (%s)", name, h.Name(), stopHint(h.Name())), nil
		}
	}
	return "", nil
}

func stopHint(holder string) string {
	if strings.HasPrefix(holder, "md") {
		return "mdadm --stop /dev/" + holder
	}
	return "vgchange -an, or dmsetup remove /dev/" + holder
}

// inUse maps "major:minor" of mounted file systems and names of swap devices
// to what they are used for.
func (r Roots) inUse() (map[string]string, error) {
	out := map[string]string{}
	err := eachLine(filepath.Join(r.Proc, "self/mountinfo"), func(f []string) {
		// proc(5): id, parent, major:minor, root, mount point, …
		if len(f) > 4 {
			out[f[2]] = "mounted at " + f[4]
		}
	})
	if err != nil {
		return nil, err
	}
	err = eachLine(filepath.Join(r.Proc, "swaps"), func(f []string) {
		if len(f) > 1 && strings.HasPrefix(f[0], "/dev/") {
			out[filepath.Base(f[0])] = "used as swap"
		}
	})
	return out, err
}

func eachLine(name string, do func(fields []string)) error {
	f, err := os.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read what is mounted: %w", err)
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	// A line of an overlay mount can name hundreds of lower directories.
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		do(strings.Fields(s.Text()))
	}
	if err := s.Err(); err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	return nil
}

func readWord(name string) string {
	b, err := os.ReadFile(name)
	if err != nil {
		return "?" // matches nothing in the map
	}
	return strings.TrimSpace(string(b))
}
