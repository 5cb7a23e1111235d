package logs

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

const (
	// maxSocketLines bounds one table of /proc/net: a busy machine has some
	// tens of thousands.
	maxSocketLines = 1 << 20
	// maxProcesses and maxCommandLine bound processes.txt.
	maxProcesses   = 1 << 15
	maxCommandLine = 4 << 10
)

// The kernel's numbers in /proc/net (include/net/tcp_states.h, and
// SO_ACCEPTCON of a unix socket).
const (
	tcpListen      = 0x0a
	unixAcceptsBit = 1 << 16
)

// socketTables are the tables of /proc/net that hold what waits for others.
var socketTables = []struct {
	name string
	// line says what a line of the table is, "" for nothing that waits.
	line func(fields []string) (string, error)
}{
	{"tcp", inetLine("tcp", true)}, {"tcp6", inetLine("tcp6", true)},
	{"udp", inetLine("udp", false)}, {"udp6", inetLine("udp6", false)},
	{"raw", inetLine("raw", false)}, {"raw6", inetLine("raw6", false)},
	{"packet", packetLine}, {"unix", unixLine},
}

// SocketsSource lists what waits on this machine for others to speak first: a
// line for each listening TCP socket, unconnected UDP or raw socket, packet
// socket and listening unix socket, this one with its mode and its folder's.
// The kernel names a unix socket as it was made; those whose file was renamed
// since are given in renamed and have a line of their own. proc is /proc.
func SocketsSource(name, proc string, renamed ...string) Source {
	return Source{Name: name, Write: func(_ context.Context, w io.Writer, _ time.Time) error {
		var errs []error
		for _, table := range socketTables {
			f, err := os.Open(filepath.Join(proc, "net", table.name))
			if errors.Is(err, fs.ErrNotExist) {
				// A kernel without IPv6, say: nothing can wait there. The line
				// tells that from a table that was not looked at.
				if _, err := fmt.Fprintf(w, "# no %s in this kernel\n", table.name); err != nil {
					return err
				}
				continue
			}
			if err == nil {
				err = readSockets(f, table.line, w)
				f.Close()
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("sockets of /proc/net/%s: %w", table.name, err))
			}
		}
		for _, path := range renamed {
			if _, err := fmt.Fprintln(w, "unix "+path+modes(path)); err != nil {
				return err
			}
		}
		return errors.Join(errs...)
	}}
}

// readSockets writes what a table's lines say; the first is its heading.
func readSockets(r io.Reader, line func([]string) (string, error), w io.Writer) error {
	s := bufio.NewScanner(r)
	for n := 0; s.Scan(); n++ {
		if n == 0 {
			continue
		}
		if n > maxSocketLines {
			return fmt.Errorf("more than %d sockets", maxSocketLines)
		}
		text, err := line(strings.Fields(s.Text()))
		if err != nil {
			return fmt.Errorf("line %d: %w", n+1, err)
		}
		if text == "" {
			continue
		}
		if _, err := fmt.Fprintln(w, text); err != nil {
			return err
		}
	}
	return s.Err()
}

// inetLine reads "sl local remote state …".
func inetLine(proto string, tcp bool) func([]string) (string, error) {
	return func(f []string) (string, error) {
		if len(f) < 4 {
			return "", fmt.Errorf("%d fields", len(f))
		}
		local, err := inetAddress(f[1])
		if err != nil {
			return "", err
		}
		remote, err := inetAddress(f[2])
		if err != nil {
			return "", err
		}
		state, err := strconv.ParseUint(f[3], 16, 8)
		switch {
		case err != nil:
			return "", fmt.Errorf("state %.20q is no hexadecimal number", f[3])
		case tcp && state != tcpListen, !tcp && (remote.Port() != 0 || !remote.Addr().IsUnspecified()):
			return "", nil
		case proto == "raw" || proto == "raw6":
			// The place of the port has the protocol's number.
			return fmt.Sprintf("%s %s protocol %d", proto, local.Addr(), local.Port()), nil
		}
		return proto + " " + local.String(), nil
	}
}

// inetAddress reads "0100007F:0CEA": words in this machine's byte order, and a
// port. Both architectures that bcd is made for are little-endian.
func inetAddress(text string) (netip.AddrPort, error) {
	address, port, _ := strings.Cut(text, ":")
	raw, err := hex.DecodeString(address)
	number, portErr := strconv.ParseUint(port, 16, 16)
	if err != nil || portErr != nil || len(raw) != 4 && len(raw) != 16 {
		return netip.AddrPort{}, fmt.Errorf("address %.60q is not of the form HEX:PORT", text)
	}
	for i := 0; i < len(raw); i += 4 {
		binary.BigEndian.PutUint32(raw[i:], binary.LittleEndian.Uint32(raw[i:]))
	}
	addr, _ := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(addr, uint16(number)), nil
}

// packetLine reads "sk refcnt type proto iface …".
func packetLine(f []string) (string, error) {
	if len(f) < 5 {
		return "", fmt.Errorf("%d fields", len(f))
	}
	return fmt.Sprintf("packet protocol 0x%s interface %s", f[3], f[4]), nil
}

// unixLine reads "num refcount protocol flags type state inode [path]".
func unixLine(f []string) (string, error) {
	if len(f) < 7 {
		return "", fmt.Errorf("%d fields", len(f))
	}
	flags, err := strconv.ParseUint(f[3], 16, 32)
	if err != nil {
		return "", fmt.Errorf("flags %.20q are no hexadecimal number", f[3])
	}
	if flags&unixAcceptsBit == 0 {
		return "", nil
	}
	path := "(unnamed)"
	if len(f) > 7 {
		path = strings.Join(f[7:], " ")
	}
	return "unix " + path + modes(path), nil
}

// modes are those of a socket's file and its folder, as words. The file may be
// of another mount namespace, or be gone.
func modes(path string) string {
	info, err := os.Stat(path)
	if err != nil || !filepath.IsAbs(path) {
		return ""
	}
	words := fmt.Sprintf(" mode %04o", info.Mode().Perm())
	if dir, err := os.Stat(filepath.Dir(path)); err == nil {
		words += fmt.Sprintf(" in %04o", dir.Mode().Perm())
	}
	return words
}

// ProcessesSource is a line for each process: its number and its arguments,
// cut where they are longer than 4 KiB. proc is /proc.
func ProcessesSource(name, proc string) Source {
	return Source{Name: name, Write: func(ctx context.Context, w io.Writer, _ time.Time) error {
		entries, err := os.ReadDir(proc)
		if err != nil {
			return err
		}
		written := 0
		for _, e := range entries {
			if _, err := strconv.Atoi(e.Name()); err != nil || ctx.Err() != nil {
				continue
			}
			if written++; written > maxProcesses {
				return fmt.Errorf("more than %d processes", maxProcesses)
			}
			arguments, ok := commandLine(filepath.Join(proc, e.Name(), "cmdline"))
			if !ok {
				continue // it has ended
			}
			if _, err := fmt.Fprintln(w, e.Name(), arguments); err != nil {
				return err
			}
		}
		return ctx.Err()
	}}
}

func commandLine(path string) (string, bool) {
	f, err := os.Open(path)
	if err != nil {
		return "", false
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxCommandLine))
	if err != nil {
		return "", false
	}
	text := strings.TrimRight(strings.ReplaceAll(string(raw), "\x00", " "), " ")
	if text == "" {
		text = "[kernel]"
	}
	return strings.ToValidUTF8(strings.ReplaceAll(text, "\n", " "), "?"), true
}
