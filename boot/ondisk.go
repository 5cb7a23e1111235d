package boot

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// DataPartition is the GPT name of bcd's own data partition, and with it the
// mark of a disk from which our image runs as a node.
const DataPartition = "bcd-data"

// ErrNoDataPartition says that no disk has a partition of that name.
var ErrNoDataPartition = errors.New("no disk has a partition named " + DataPartition)

// MountOwn mounts what our image left on its disk when it runs from there:
// the data partition at data and the EFI system partition beside it at esp.
// It may be called again. With two such disks it refuses: a machine that
// wrote its identity to one and read it from the other would be two nodes.
func MountOwn(sys, dev, data, esp string) error {
	dataName, espName, err := ownPartitions(sys)
	if err != nil {
		return err
	}
	for _, m := range []struct{ name, at, fs, options string }{
		{dataName, data, "ext4", ""},
		{espName, esp, "vfat", "umask=0077"},
	} {
		if mounted(m.at) {
			continue
		}
		if err := os.MkdirAll(m.at, 0o700); err != nil {
			return err
		}
		source := filepath.Join(dev, m.name)
		if err := unix.Mount(source, m.at, m.fs, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, m.options); err != nil {
			return fmt.Errorf("mount %s (%s) at %s: %w", source, m.fs, m.at, err)
		}
	}
	return os.Chmod(data, 0o700)
}

// ownPartitions gives the kernel names of the data partition and of the first
// partition of the same disk.
func ownPartitions(sys string) (data, esp string, err error) {
	uevents, err := filepath.Glob(filepath.Join(sys, "class/block/*/uevent"))
	if err != nil {
		return "", "", err
	}
	for _, path := range uevents {
		values, err := readUevent(path)
		if err != nil || values["PARTNAME"] != DataPartition {
			continue
		}
		if data != "" {
			return "", "", fmt.Errorf("%s and %s are both named %s: take one of the disks out, or deploy it anew", data, values["DEVNAME"], DataPartition)
		}
		data = values["DEVNAME"]
		// The partition's folder is below its disk's.
		real, err := filepath.EvalSymlinks(filepath.Dir(path))
		if err != nil {
			return "", "", err
		}
		siblings, err := filepath.Glob(filepath.Join(filepath.Dir(real), "*/uevent"))
		if err != nil {
			return "", "", err
		}
		for _, s := range siblings {
			if v, err := readUevent(s); err == nil && v["PARTN"] == "1" {
				esp = v["DEVNAME"]
			}
		}
		if esp == "" {
			return "", "", fmt.Errorf("the disk of %s has no first partition to be the EFI system partition", data)
		}
	}
	if data == "" {
		return "", "", ErrNoDataPartition
	}
	return data, esp, nil
}

// maxUevent bounds a uevent file: the kernel writes at most a page.
const maxUevent = 4096

func readUevent(path string) (map[string]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	values := map[string]string{}
	lines := bufio.NewScanner(f)
	lines.Buffer(make([]byte, 0, maxUevent), maxUevent)
	for lines.Scan() {
		if key, value, ok := strings.Cut(lines.Text(), "="); ok {
			values[key] = value
		}
	}
	return values, lines.Err()
}

// mounted says whether path is a mount point.
func mounted(path string) bool {
	var here, above unix.Stat_t
	return unix.Stat(path, &here) == nil && unix.Stat(filepath.Dir(path), &above) == nil && here.Dev != above.Dev
}
