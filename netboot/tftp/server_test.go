package tftp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/better-compute/bcd/netboot/tftp/tftptest"
)

var serverAddr = netip.MustParseAddrPort("10.0.0.1:69")

func content(size int) memory {
	b := make([]byte, size)
	rand.NewChaCha8([32]byte{1}).Read(b)
	return memory(b)
}

// world is a server on a wire.
type world struct {
	t      *testing.T
	w      *wire
	server *Server
	files  map[string]memory
	mu     sync.Mutex
	events []Event
	open   int
}

type counted struct {
	memory
	world *world
}

func (c counted) Close() error {
	c.world.mu.Lock()
	defer c.world.mu.Unlock()
	c.world.open--
	return nil
}

// inWorld runs test with a server, in a bubble whose time is its own. When it
// has ended there must be no session, no open file and no port left.
func inWorld(t *testing.T, lose func() bool, single bool, files map[string]memory, test func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		x := &world{t: t, w: newWire(lose), files: files}
		x.server = New(Config{
			SinglePort: single,
			Open: func(name string, peer netip.AddrPort) (File, error) {
				x.mu.Lock()
				defer x.mu.Unlock()
				switch file, ok := x.files[name]; {
				case ok:
					x.open++
					return counted{file, x}, nil
				case name == "forbidden":
					return nil, fs.ErrPermission
				case name == "broken":
					return nil, io.ErrUnexpectedEOF
				}
				return nil, fs.ErrNotExist
			},
			Observe: func(e Event) {
				x.mu.Lock()
				defer x.mu.Unlock()
				x.events = append(x.events, e)
			},
		})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- x.server.Serve(ctx, x.w.open(serverAddr)) }()
		synctest.Wait()
		test(x)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		x.mu.Lock()
		defer x.mu.Unlock()
		if x.open != 0 || len(x.server.sessions) != 0 || len(x.server.peers) != 0 {
			t.Errorf("left: %d files, %d sessions, %d peers", x.open, len(x.server.sessions), len(x.server.peers))
		}
	})
}

func (x *world) fetch(from string, ask tftptest.Ask) ([]byte, tftptest.Answer, error) {
	conn := x.w.open(netip.MustParseAddrPort(from))
	defer conn.Close()
	var got bytes.Buffer
	answer, err := tftptest.Fetch(conn, net.UDPAddrFromAddrPort(serverAddr), ask, &got)
	return got.Bytes(), answer, err
}

// types are the events so far, once all is quiet.
func (x *world) types() []string {
	synctest.Wait()
	x.mu.Lock()
	defer x.mu.Unlock()
	var types []string
	for _, e := range x.events {
		types = append(types, e.Type)
	}
	return types
}

func both(t *testing.T, test func(t *testing.T, single bool)) {
	t.Run("own port", func(t *testing.T) { test(t, false) })
	t.Run("single port", func(t *testing.T) { test(t, true) })
}

func TestTransfers(t *testing.T) {
	both(t, func(t *testing.T, single bool) {
		for _, size := range []int{0, 1, 511, 512, 513, 1468, 1468 * 4, 1468*4 + 1, 1_000_000} {
			for _, options := range []string{"", "tsize 0", "blksize 1468", "blksize 1468 windowsize 4", "tsize 0 windowsize 64", "BLKSIZE 8192 WindowSize 65535 timeout 3"} {
				if options == "" && size == 1_000_000 {
					continue
				}
				file := content(size)
				inWorld(t, never, single, map[string]memory{"bcd.efi": file}, func(x *world) {
					got, answer, err := x.fetch("10.0.0.9:1234", tftptest.Ask{Name: `\\BCD.EFI`, Options: strings.Fields(options)})
					if err != nil || string(got) != string(file) {
						t.Fatalf("%q, %d bytes: got %d, %v", options, size, len(got), err)
					}
					if answer.Again != 0 {
						t.Errorf("%d packets came again", answer.Again)
					}
					port := answer.From.(*net.UDPAddr).AddrPort()
					if port.Addr() != serverAddr.Addr() || (port == serverAddr) != single {
						t.Errorf("the transfer came from %s", port)
					}
					if got := x.types(); !slices.Equal(got, []string{EventRequest, EventDone}) {
						t.Errorf("events %q", got)
					}
					if e := x.events[1]; e.Bytes != int64(size) || e.Size != int64(size) || e.Name != "bcd.efi" || e.Peer.String() != "10.0.0.9:1234" || e.Local != serverAddr.Addr() {
						t.Errorf("event %+v", e)
					}
				})
			}
		}
	})
}

// TestUEFI does what UEFI does: it asks for the size, ends that transfer by
// ERROR 8, and asks again (pin/tftp#125).
func TestUEFI(t *testing.T) {
	both(t, func(t *testing.T, single bool) {
		file := content(100_000)
		inWorld(t, never, single, map[string]memory{"bcd.efi": file}, func(x *world) {
			_, answer, err := x.fetch("10.0.0.9:1234", tftptest.Ask{Name: "bcd.efi", Probe: true, Options: []string{"tsize", "0", "blksize", "1468", "windowsize", "4"}})
			if err != nil || answer.Options["tsize"] != "100000" {
				t.Fatalf("%+v, %v", answer, err)
			}
			if strings.Join(answer.Order, " ") != "tsize blksize windowsize" {
				t.Errorf("options %q", answer.Order)
			}
			if got := x.types(); !slices.Equal(got, []string{EventRequest, EventProbed}) {
				t.Errorf("events %q", got)
			}
			got, _, err := x.fetch("10.0.0.9:1235", tftptest.Ask{Name: "bcd.efi", Options: []string{"blksize", "1468", "windowsize", "4"}})
			if err != nil || string(got) != string(file) {
				t.Fatalf("%d bytes, %v", len(got), err)
			}
		})
	})
}

func TestLossyNetwork(t *testing.T) {
	both(t, func(t *testing.T, single bool) {
		for _, options := range []string{"", "blksize 1468", "blksize 1468 windowsize 4", "blksize 1468 windowsize 16"} {
			file := content(700_000)
			inWorld(t, losing(10), single, map[string]memory{"f": file}, func(x *world) {
				got, _, err := x.fetch("10.0.0.9:1234", tftptest.Ask{Name: "f", Options: strings.Fields(options)})
				if err != nil || string(got) != string(file) {
					t.Fatalf("%q: %d bytes, %v", options, len(got), err)
				}
			})
		}
	})
}

// TestWrapOnTheWire has more than 65535 blocks.
func TestWrapOnTheWire(t *testing.T) {
	file := content(8*70_000 + 3)
	inWorld(t, never, false, map[string]memory{"f": file}, func(x *world) {
		got, _, err := x.fetch("10.0.0.9:1234", tftptest.Ask{Name: "f", Options: []string{"blksize", "8", "windowsize", "16"}})
		if err != nil || string(got) != string(file) {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
	})
}

func TestRefusals(t *testing.T) {
	both(t, func(t *testing.T, single bool) {
		for name, code := range map[string]uint16{"none": codeNotFound, "forbidden": codeAccess, "broken": codeUndefined, "../f": codeAccess} {
			inWorld(t, never, single, nil, func(x *world) {
				_, _, err := x.fetch("10.0.0.9:1234", tftptest.Ask{Name: name})
				if refused := (*tftptest.Refused)(nil); !errors.As(err, &refused) || refused.Code != code || refused.Message == "" {
					t.Errorf("%s: %v", name, err)
				}
				if got := x.types(); !slices.Equal(got, []string{EventRefused}) {
					t.Errorf("%s: events %q", name, got)
				}
			})
		}
	})
}

// TestBounds: one address has some sessions and no more, all have more, and
// what is dropped is told; a silent client is given up.
func TestBounds(t *testing.T) {
	both(t, func(t *testing.T, single bool) {
		inWorld(t, never, single, map[string]memory{"f": content(100_000)}, func(x *world) {
			client := func(i, port int) *port { return x.ask(fmt.Sprintf("10.0.%d.%d:%d", 1+i/200, 1+i%200, port), "f") }
			for port := range maxSessionsPerPeer + 3 {
				client(0, 1000+port)
			}
			if n := len(x.server.sessions); n != maxSessionsPerPeer {
				t.Errorf("one address has %d sessions", n)
			}
			for i := range maxSessions + 5 {
				client(1+i, 1000)
			}
			if n := len(x.server.sessions); n != maxSessions {
				t.Errorf("%d sessions", n)
			}
			busy := 0
			for _, kind := range x.types() {
				if kind == EventBusy {
					busy++
				}
			}
			if busy != 3+5+maxSessionsPerPeer {
				t.Errorf("%d requests were dropped", busy)
			}
			x.pass() // until all are given up
			if n := len(x.server.sessions); n != 0 {
				t.Errorf("%d sessions with silent clients", n)
			}
		})
	})
}

// TestImpatientClient: a request that comes twice makes one transfer; a machine
// that starts anew from the same port gets a new one.
func TestImpatientClient(t *testing.T) {
	both(t, func(t *testing.T, single bool) {
		file := content(5000)
		inWorld(t, never, single, map[string]memory{"f": file, "g": file}, func(x *world) {
			p := x.ask("10.0.0.9:1234", "f")
			x.again(p, "f")
			if got := x.types(); !slices.Equal(got, []string{EventRequest}) {
				t.Errorf("events %q", got)
			}
			x.again(p, "g")
			if got := x.types(); !slices.Equal(got, []string{EventRequest, EventRequest, EventAborted}) && !slices.Equal(got, []string{EventRequest, EventAborted, EventRequest}) {
				t.Errorf("events %q", got)
			}
		})
	})
}

// ask sends a request and nothing more.
func (x *world) ask(from, name string) *port {
	p := x.w.open(netip.MustParseAddrPort(from))
	x.again(p, name)
	return p
}

func (x *world) again(p *port, name string) {
	p.put([]byte("\x00\x01"+name+"\x00octet\x00"), serverAddr)
	synctest.Wait()
}

// pass lets more time pass than a client may be silent for.
func (x *world) pass() {
	time.Sleep(time.Minute) // of the bubble
	synctest.Wait()
}
