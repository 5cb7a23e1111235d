package tftp

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	pin "github.com/pin/tftp/v3"

	"github.com/better-compute/bcd/netboot/tftp/tftptest"
)

// serve runs a server on loopback, on a port that the kernel chose, until the
// test ends. wrap may stand between it and its socket.
func serve(t *testing.T, single bool, files map[string]memory, wrap func(Socket) Socket) (netip.AddrPort, *Server) {
	t.Helper()
	socket, err := Listen(netip.MustParseAddrPort("0.0.0.0:0"), "")
	if err != nil {
		t.Fatal(err)
	}
	addr := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), socket.LocalAddr().Port())
	server := New(Config{SinglePort: single, Open: func(name string, _ netip.AddrPort) (File, error) {
		if file, ok := files[name]; ok {
			return file, nil
		}
		return nil, fs.ErrNotExist
	}})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	var wrapped Socket = socket
	if wrap != nil {
		wrapped = wrap(socket)
	}
	go func() { ended <- server.Serve(ctx, wrapped) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return addr, server
}

// TestRealClients has clients that are not ours fetch a file: pin/tftp, curl
// and tftp-hpa.
func TestRealClients(t *testing.T) {
	both(t, func(t *testing.T, single bool) {
		file := content(300_007)
		addr, _ := serve(t, single, map[string]memory{"boot/bcd.efi": file, "empty": ""}, nil)
		t.Run("pin", func(t *testing.T) {
			for _, block := range []int{0, 1468} {
				client, err := pin.NewClient(addr.String())
				if err != nil {
					t.Fatal(err)
				}
				if block > 0 {
					client.SetBlockSize(block)
				}
				client.RequestTSize(true)
				from, err := client.Receive("//boot/bcd.efi", "octet")
				if err != nil {
					t.Fatal(err)
				}
				if n, ok := from.(pin.IncomingTransfer).Size(); !ok || n != int64(len(file)) {
					t.Errorf("tsize %d, %v", n, ok)
				}
				var got bytes.Buffer
				if _, err := from.WriteTo(&got); err != nil || got.String() != string(file) {
					t.Errorf("block %d: %d bytes, %v", block, got.Len(), err)
				}
			}
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		out := filepath.Join(t.TempDir(), "out")
		for name, command := range map[string][]string{
			"curl":           {"curl", "-s", "-S", "-o", out, fmt.Sprintf("tftp://%s/boot/bcd.efi", addr)},
			"curl 1468":      {"curl", "-s", "-S", "-o", out, "--tftp-blksize", "1468", fmt.Sprintf("tftp://%s/boot/bcd.efi", addr)},
			"curl no option": {"curl", "-s", "-S", "-o", out, "--tftp-no-options", fmt.Sprintf("tftp://%s/boot/bcd.efi", addr)},
			"tftp-hpa":       {"tftp", "-m", "binary", addr.Addr().String(), fmt.Sprint(addr.Port()), "-c", "get", "boot/bcd.efi", out},
		} {
			t.Run(name, func(t *testing.T) {
				if said, err := exec.CommandContext(ctx, command[0], command[1:]...).CombinedOutput(); err != nil {
					t.Fatalf("%v: %s (scripts/setup installs it)", err, said)
				}
				if got, err := os.ReadFile(out); err != nil || string(got) != string(file) {
					t.Errorf("%d bytes, %v", len(got), err)
				}
				if err := os.Remove(out); err != nil {
					t.Error(err)
				}
			})
		}
	})
}

// lossy is a Socket that loses packets both ways.
type lossy struct {
	Socket
	mu   *sync.Mutex
	dice *rand.Rand
}

func (l lossy) lost() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dice.IntN(20) == 0
}

func (l lossy) Receive(b []byte, deadline time.Time) (int, netip.AddrPort, Arrival, error) {
	for {
		n, peer, at, err := l.Socket.Receive(b, deadline)
		if err != nil || !l.lost() {
			return n, peer, at, err
		}
	}
}

func (l lossy) Send(run []byte, size int, peer netip.AddrPort, at Arrival) error {
	for len(run) > 0 {
		n := min(size, len(run))
		if !l.lost() {
			if err := l.Socket.Send(run[:n], size, peer, at); err != nil {
				return err
			}
		}
		run = run[n:]
	}
	return nil
}

func (l lossy) Dial(peer netip.AddrPort, at Arrival) (Socket, error) {
	own, err := l.Socket.Dial(peer, at)
	return lossy{own, l.mu, l.dice}, err
}

// TestRealClientLosesPackets has pin/tftp fetch a file while one packet in
// twenty is lost each way.
func TestRealClientLosesPackets(t *testing.T) {
	both(t, func(t *testing.T, single bool) {
		file := content(60_000)
		addr, _ := serve(t, single, map[string]memory{"f": file}, func(s Socket) Socket {
			return lossy{s, new(sync.Mutex), rand.New(rand.NewPCG(1, 2))}
		})
		client, err := pin.NewClient(addr.String())
		if err != nil {
			t.Fatal(err)
		}
		client.SetBlockSize(1468)
		client.SetRetries(100)
		// It answers no block a second time before its own wait has ended.
		client.SetTimeout(200 * time.Millisecond)
		from, err := client.Receive("f", "octet")
		if err != nil {
			t.Fatal(err)
		}
		var got bytes.Buffer
		if _, err := from.WriteTo(&got); err != nil || got.String() != string(file) {
			t.Errorf("%d bytes, %v", got.Len(), err)
		}
	})
}

// TestManyClients has 200 machines fetch at once, each from an address of its
// own; the heap does not grow with the size of what they fetch.
func TestManyClients(t *testing.T) {
	both(t, func(t *testing.T, single bool) {
		const clients = 200
		file := content(256 << 10)
		addr, _ := serve(t, single, map[string]memory{"f": file}, nil)
		var before, during runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		var wait sync.WaitGroup
		for i := range clients {
			wait.Go(func() {
				conn, err := net.ListenPacket("udp4", fmt.Sprintf("127.1.0.%d:0", i+1))
				if err != nil {
					t.Error(err)
					return
				}
				defer conn.Close()
				answer, err := tftptest.Fetch(conn, net.UDPAddrFromAddrPort(addr), tftptest.Ask{Name: "f", Options: []string{"blksize", "1468", "windowsize", "4"}}, io.Discard)
				if err != nil || answer.Bytes != int64(len(file)) {
					t.Errorf("client %d: %d bytes, %v", i, answer.Bytes, err)
				}
			})
		}
		wait.Wait()
		runtime.GC()
		runtime.ReadMemStats(&during)
		if grown := int64(during.HeapAlloc) - int64(before.HeapAlloc); grown > 8<<20 {
			t.Errorf("the heap grew by %d KiB", grown>>10)
		}
	})
}

// TestAnswersFromWhereItWasAsked: a host has several addresses, and the client
// hears only the one that it asked.
func TestAnswersFromWhereItWasAsked(t *testing.T) {
	both(t, func(t *testing.T, single bool) {
		file := content(5000)
		addr, _ := serve(t, single, map[string]memory{"f": file}, nil)
		conn, err := net.ListenPacket("udp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		asked := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.77"), addr.Port())
		var got bytes.Buffer
		for _, name := range []string{"f", "none"} {
			answer, err := tftptest.Fetch(conn, net.UDPAddrFromAddrPort(asked), tftptest.Ask{Name: name, Options: []string{"windowsize", "4"}}, &got)
			if (err == nil) != (name == "f") {
				t.Fatal(err)
			}
			if name == "f" && answer.From.(*net.UDPAddr).AddrPort().Addr() != asked.Addr() {
				t.Errorf("%s asked, %s answered", asked, answer.From)
			}
		}
		if got.String() != string(file) {
			t.Errorf("%d bytes", got.Len())
		}
	})
}

func TestIPv6(t *testing.T) {
	socket, err := Listen(netip.MustParseAddrPort("[::1]:0"), "lo")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	file := content(100_000)
	server := New(Config{Open: func(string, netip.AddrPort) (File, error) { return file, nil }})
	go func() { ended <- server.Serve(ctx, socket) }()
	conn, err := net.ListenPacket("udp6", "[::1]:0")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var got bytes.Buffer
	_, err = tftptest.Fetch(conn, net.UDPAddrFromAddrPort(socket.LocalAddr()), tftptest.Ask{Name: "f", Options: []string{"blksize", "1428", "windowsize", "16"}}, &got)
	if err != nil || got.String() != string(file) {
		t.Errorf("%d bytes, %v", got.Len(), err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestPortIsTaken(t *testing.T) {
	first, err := Listen(netip.MustParseAddrPort("127.0.0.1:0"), "")
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	if second, err := Listen(first.LocalAddr(), ""); err == nil {
		second.Close()
		t.Error("two servers have one port")
	}
}
