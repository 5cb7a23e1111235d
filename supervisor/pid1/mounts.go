package pid1

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// mount is one file system of the running system.
type mount struct {
	source, target, fstype string
	flags                  uintptr
	data                   string
	optional               bool // its absence is no fault
}

const noCTTY = unix.O_NOCTTY

const (
	quietFlags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	tmpFlags   = unix.MS_NOSUID | unix.MS_NODEV
)

// mounts are made in this order at boot. The sizes of the tmpfs are the kernel's
// default, half of the memory each; they take only what is in them.
var mounts = []mount{
	{"proc", "/proc", "proc", quietFlags, "", false},
	{"sysfs", "/sys", "sysfs", quietFlags, "", false},
	{"devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755", false},
	{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "ptmxmode=0666,mode=0620,gid=5", false},
	{"tmpfs", "/dev/shm", "tmpfs", tmpFlags, "mode=1777", false},
	{"tmpfs", "/run", "tmpfs", tmpFlags, "mode=0755", false},
	{"tmpfs", "/tmp", "tmpfs", tmpFlags, "mode=1777", false},
	{"cgroup2", "/sys/fs/cgroup", "cgroup2", quietFlags, "nsdelegate,memory_recursiveprot", false},
	{"securityfs", "/sys/kernel/security", "securityfs", quietFlags, "", true},
}

// lateMounts need modules, or firmware that not every machine has.
var lateMounts = []mount{
	{"efivarfs", "/sys/firmware/efi/efivars", "efivarfs", quietFlags, "", true},
	{"pstore", "/sys/fs/pstore", "pstore", quietFlags, "", true},
}

// do mounts m unless something is mounted there. For an optional one an absent
// mount point, file system type or device is no error.
func (m mount) do() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		// Below /sys and /dev a directory that is not there cannot be made.
		if m.optional {
			return nil
		}
		return fmt.Errorf("mount %s: %w", m.target, err)
	}
	err := unix.Mount(m.source, m.target, m.fstype, m.flags, m.data)
	switch {
	case err == nil, errors.Is(err, unix.EBUSY):
		return nil
	case m.optional && (errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT) ||
		errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL)):
		return nil
	}
	return fmt.Errorf("mount %s (%s): %w", m.target, m.fstype, err)
}

// mountAll mounts all of ms that can be, and returns what went wrong.
func mountAll(ms []mount) error {
	var errs []error
	for _, m := range ms {
		errs = append(errs, m.do())
	}
	return errors.Join(errs...)
}

// MountLate mounts what needs modules: efivarfs and pstore. Give it to the
// module service as its AfterColdplug. What the machine does not have is left
// out without an error; it may be called again.
func MountLate() error {
	seen, err := mountPoints("/proc/self/mounts")
	if err != nil {
		return err
	}
	missing := slices.DeleteFunc(slices.Clone(lateMounts), func(m mount) bool {
		return slices.Contains(seen, m.target)
	})
	return mountAll(missing)
}

// mountPoints reads the targets of a mounts file (fstab(5) format) in the order
// in which they were mounted, with its octal escapes resolved.
func mountPoints(path string) ([]string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	var out []string
	for line := range strings.SplitSeq(string(data), "\n") {
		if f := strings.Fields(line); len(f) >= 3 {
			out = append(out, unescapeMount(f[1]))
		}
	}
	return out, nil
}

func unescapeMount(s string) string {
	for _, e := range [][2]string{{`\040`, " "}, {`\011`, "\t"}, {`\012`, "\n"}, {`\134`, `\`}} {
		s = strings.ReplaceAll(s, e[0], e[1])
	}
	return s
}

// sysctls are written at boot; an absent one is left alone.
var sysctls = []struct{ path, value string }{
	// The kernel limits the rate of what is written to /dev/kmsg unless told
	// otherwise, and drops lines of a boot that fails.
	{"/proc/sys/kernel/printk_devkmsg", "on\n"},
	// A kernel panic, and the end of process 1 is one, restarts the machine.
	{"/proc/sys/kernel/panic", "10\n"},
	// A crash of the supervisor must not end in a core file that holds secrets.
	{"/proc/sys/kernel/core_pattern", "|/bin/false\n"},
	{"/proc/sys/fs/suid_dumpable", "0\n"},
}

func setSysctls() error {
	var errs []error
	for _, s := range sysctls {
		// printk_devkmsg refuses any write once the command line has set it.
		if have, err := os.ReadFile(s.path); err == nil && strings.TrimSpace(string(have)) == strings.TrimSpace(s.value) {
			continue
		}
		if err := os.WriteFile(s.path, []byte(s.value), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("set %s: %w", s.path, err))
		}
	}
	return errors.Join(errs...)
}

// memoryMiB is the memory of the machine as the kernel counts it. It needs no
// file system.
func memoryMiB() int {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0
	}
	return int(uint64(info.Totalram) * uint64(info.Unit) >> 20)
}
