// Package host says what this machine is: its inventory as typed sections
// with hashes, its GPUs, its clock, its pressure and what its kernel says
// about its GPUs.
//
// Everything is read below the directories of [Roots], so that a test reads a
// recorded machine and the daemon reads the one it runs on. Nothing here
// needs cgo, and nothing here waits for a device: nvidia-smi has a deadline
// and is abandoned at it (see [GPUProbe]).
//
// # Sections and hashes
//
// A [Section] is a name, a value in canonical JSON (see [Canonical]) and the
// SHA-256 of those bytes. The same machine gives the same hashes each time it
// is asked and after each boot of the same system: kernel names of disks and
// NICs, which depend on probe order, are not hashed but in [Facts]; free
// memory, temperatures and counters are not in sections at all; and what a
// cable can change (carrier, speed, LLDP neighbour) is in the section "link"
// alone.
//
// # Build tags
//
//   - fakehw replaces the machine by a made-up one: an 8-GPU HGX H100 server
//     whose ids come from [Roots.Seed], with its boot id in [Roots.DataDir].
//   - nonvml builds without the reading of GPUs: [GPUProbe.Sample] always
//     returns [ErrNoGPUReader]. GPUs are still counted on the PCI bus.
//
// The API is the same in each build.
package host

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
)

// Roots is where a machine is read from. The zero value of a function or
// pointer field means that the source is not available, which is never an
// error: it leaves the fields it would have given empty.
type Roots struct {
	// Sys, Proc, Dev and Etc are the directories that stand for /sys, /proc,
	// /dev and /etc.
	Sys, Proc, Dev, Etc string
	// PermanentMACs returns the permanent hardware addresses of interfaces by
	// name. sysfs shows only the current ones, which bonding and
	// administrators change.
	PermanentMACs func() (map[string]net.HardwareAddr, error)
	// GPUs reads the GPUs through the driver's tool.
	GPUs *GPUProbe
	// Neighbours returns what LLDP heard, by interface name.
	Neighbours func() map[string]Neighbour
	// DataDir is where a fakehw build keeps its boot id.
	DataDir string
	// Seed is which machine a fakehw build makes up.
	Seed uint64
}

// Live returns the roots of the machine this process runs on. LLDP
// neighbours are not in it: the caller that runs an [LLDPListener] adds them.
func Live() Roots {
	return Roots{
		Sys: "/sys", Proc: "/proc", Dev: "/dev", Etc: "/etc",
		PermanentMACs: PermanentMACs,
		GPUs:          &GPUProbe{},
	}
}

// Section is one part of the inventory.
type Section struct {
	Name string
	// JSON is the canonical encoding of the value. Where the section could
	// not be read whole it holds what could, at least {}.
	JSON []byte
	// SHA256 is the hash of JSON.
	SHA256 [sha256.Size]byte
	// Error says why the section is not whole; empty when it is. It is not
	// part of the hash.
	Error string
}

// Hex returns the hash in lower-case hexadecimal.
func (s Section) Hex() string { return hex.EncodeToString(s.SHA256[:]) }

// MaxSectionBytes is the longest section that the contract carries
// (bcd.v1.InventorySection).
const MaxSectionBytes = 512 << 10

// Collect reads the machine and returns its sections in a fixed order, the
// order of [SectionNames]. A section that cannot be read carries its error
// and never costs another one; the returned error is for ctx alone.
func Collect(ctx context.Context, roots Roots) ([]Section, error) {
	facts, err := Read(ctx, roots)
	if err != nil {
		return nil, err
	}
	return facts.Sections(), nil
}

// Read reads the machine whole. Errors of sections are in [Facts.Errors]; the
// returned error is ctx's.
func Read(ctx context.Context, roots Roots) (Facts, error) {
	facts := readFacts(ctx, roots)
	if err := ctx.Err(); err != nil {
		return Facts{}, fmt.Errorf("read the hardware: %w", err)
	}
	facts.HardwareKey, facts.HardwareKeyNote = facts.hardwareKey()
	return facts, nil
}

// maxFile bounds what is read of a file of sysfs, procfs or the firmware;
// the largest legitimate one is /proc/cpuinfo of a machine with some hundred
// CPUs, about 1 MiB.
const maxFile = 8 << 20

// readFile reads a file below a root, bounded.
func readFile(parts ...string) ([]byte, error) {
	path := filepath.Join(parts...)
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readBounded(f, path, maxFile)
}

// readString returns a file's text without surrounding space, or "" when it
// cannot be read: most sysfs attributes are optional.
func readString(parts ...string) string {
	b, err := readFile(parts...)
	if err != nil {
		return ""
	}
	return clean(string(b))
}

// readInt returns a file's number; ok is false when there is none. Base
// prefixes (0x) are understood.
func readInt(parts ...string) (n int64, ok bool) {
	return parseInt(readString(parts...))
}

// linkBase returns the last element of a symbolic link's target, or "".
func linkBase(parts ...string) string {
	target, err := os.Readlink(filepath.Join(parts...))
	if err != nil {
		return ""
	}
	return filepath.Base(target)
}

// entries lists a directory's names, sorted. A directory that does not exist
// is empty: this machine has none of those things.
func entries(parts ...string) ([]string, error) {
	list, err := os.ReadDir(filepath.Join(parts...))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	names := make([]string, 0, len(list))
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names, nil
}

func exists(parts ...string) bool {
	_, err := os.Stat(filepath.Join(parts...))
	return err == nil
}

// below returns path relative to root, with symbolic links of both resolved,
// or "" when it is not below root.
func below(root, path string) string {
	r, err1 := filepath.EvalSymlinks(root)
	p, err2 := filepath.EvalSymlinks(path)
	if err1 != nil || err2 != nil || !strings.HasPrefix(p, r+"/") {
		return ""
	}
	return strings.TrimPrefix(p, r+"/")
}
