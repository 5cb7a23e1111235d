package modules

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// maxUevent is the kernel's UEVENT_BUFFER_SIZE with room for its header.
const maxUevent = 8 << 10

// errLost says that the kernel had more events than the socket could hold.
var errLost = errors.New("uevents were lost")

// uevent is a message of the kernel about a device
// (lib/kobject_uevent.c: "ACTION@DEVPATH", then KEY=VALUE, NUL after each).
type uevent struct {
	action, devpath, modalias string
}

func parseUevent(b []byte) (uevent, error) {
	if len(b) > maxUevent {
		return uevent{}, fmt.Errorf("uevent of %d bytes, want at most %d", len(b), maxUevent)
	}
	head, rest, ok := strings.Cut(string(b), "\x00")
	action, devpath, at := strings.Cut(head, "@")
	if !ok || !at || action == "" || !strings.HasPrefix(devpath, "/") {
		return uevent{}, fmt.Errorf("uevent begins with %.60q, want action@/path", head)
	}
	e := uevent{action: action, devpath: devpath}
	for pair := range strings.SplitSeq(rest, "\x00") {
		if v, ok := strings.CutPrefix(pair, "MODALIAS="); ok {
			e.modalias = v
		}
	}
	return e, nil
}

// ueventSocket listens to the kernel's uevents.
type ueventSocket struct{ file *os.File }

func listenUevents() (*ueventSocket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return nil, fmt.Errorf("listen to uevents: %w", err)
	}
	// A server's coldplug is some thousand events of about 300 bytes. Without
	// the privilege for it the default has to do, and lost events are noticed.
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20)
	const kernelGroup = 1 // group 2 is udevd's
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: kernelGroup}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("listen to uevents: %w", err)
	}
	return &ueventSocket{os.NewFile(uintptr(fd), "uevents")}, nil
}

// next waits for an event of the kernel; others' messages are passed over. The
// error is errLost, or the end of ctx or of the socket.
func (s *ueventSocket) next(ctx context.Context) (uevent, error) {
	raw, err := s.file.SyscallConn()
	if err != nil {
		return uevent{}, err
	}
	stop := context.AfterFunc(ctx, func() { s.file.Close() })
	defer stop()
	buf := make([]byte, maxUevent)
	for {
		var n int
		var from unix.Sockaddr
		var recvErr error
		err := raw.Read(func(fd uintptr) bool {
			n, from, recvErr = unix.Recvfrom(int(fd), buf, 0)
			return !errors.Is(recvErr, unix.EAGAIN) && !errors.Is(recvErr, unix.EINTR)
		})
		switch {
		case ctx.Err() != nil:
			return uevent{}, ctx.Err()
		case err != nil:
			return uevent{}, fmt.Errorf("read uevent: %w", err)
		case errors.Is(recvErr, unix.ENOBUFS):
			return uevent{}, errLost
		case recvErr != nil:
			return uevent{}, fmt.Errorf("read uevent: %w", recvErr)
		}
		if a, ok := from.(*unix.SockaddrNetlink); !ok || a.Pid != 0 {
			continue // not from the kernel
		}
		if e, err := parseUevent(buf[:n]); err == nil {
			return e, nil
		}
	}
}

func (s *ueventSocket) close() error { return s.file.Close() }
