package dhcp

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// holder names the process that has a UDP port, for a person to find it.
func holder(port uint16) string {
	// Of this thread: the namespace may be other than the process's.
	f, err := os.Open("/proc/thread-self/net/udp")
	if err != nil {
		return "another process"
	}
	defer f.Close()
	inodes := inodesOf(f, port)
	if len(inodes) == 0 {
		return "another process"
	}
	fds, err := filepath.Glob("/proc/[0-9]*/fd/[0-9]*")
	if err != nil {
		return "another process"
	}
	for _, fd := range fds {
		target, err := os.Readlink(fd)
		if err != nil {
			continue // gone meanwhile
		}
		inode, ok := strings.CutPrefix(strings.TrimSuffix(target, "]"), "socket:[")
		if !ok || !slices.Contains(inodes, inode) {
			continue
		}
		pid := strings.Split(fd, "/")[2]
		name, err := os.ReadFile(filepath.Join("/proc", pid, "comm"))
		if err != nil {
			continue
		}
		return fmt.Sprintf("%s (pid %s)", strings.TrimSpace(string(name)), pid)
	}
	return "a process in another container"
}

// inodesOf finds the sockets with a local port in the text of /proc/net/udp.
func inodesOf(r io.Reader, port uint16) []string {
	var found []string
	want := fmt.Sprintf(":%04X", port)
	for lines := bufio.NewScanner(r); lines.Scan(); {
		// sl local_address rem_address st queues tr:when retrnsmt uid timeout inode
		if f := strings.Fields(lines.Text()); len(f) > 9 && strings.HasSuffix(f[1], want) {
			found = append(found, f[9])
		}
	}
	return found
}
