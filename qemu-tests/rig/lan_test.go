package rig

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// device is what is plugged in at the far end of a port's cable.
type device struct {
	address [6]byte
	port    *Port
	far     *stream
	got     chan []byte
}

func plug(t *testing.T, l *LAN, number byte) *device {
	t.Helper()
	near, far := net.Pipe()
	d := &device{address: [6]byte{0x52, 0x54, 0, 0, 0, number}, far: newStream(far), got: make(chan []byte, 10_000)}
	var err error
	if d.port, err = l.add(string('a'+rune(number)), newStream(near)); err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			frame, err := d.far.readFrame()
			if err != nil {
				return
			}
			d.got <- bytes.Clone(frame)
		}
	}()
	return d
}

// send writes a frame to an address, which the switch then has forwarded.
func (d *device) send(t *testing.T, to [6]byte, text string) {
	t.Helper()
	frame := append(append(append([]byte{}, to[:]...), d.address[:]...), 0x88, 0xb5)
	if err := d.far.writeFrame(append(frame, text...)); err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
}

// texts takes what the device got.
func (d *device) texts() string {
	var all []string
	for len(d.got) > 0 {
		all = append(all, string((<-d.got)[headerLength:]))
	}
	return strings.Join(all, " ")
}

var everybody = [6]byte{255, 255, 255, 255, 255, 255}

// onLAN runs a test with three devices and a clock that only waits move.
func onLAN(t *testing.T, seed uint64, f func(l *LAN, a, b, c *device)) {
	t.Helper()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		l, err := NewLAN(dir, seed)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		f(l, plug(t, l, 1), plug(t, l, 2), plug(t, l, 3))
	})
}

func TestSwitchLearns(t *testing.T) {
	onLAN(t, 1, func(l *LAN, a, b, c *device) {
		a.send(t, b.address, "unknown")
		b.send(t, a.address, "answer")
		a.send(t, b.address, "known")
		c.send(t, everybody, "all")
		if got := [3]string{a.texts(), b.texts(), c.texts()}; got != [3]string{"answer all", "unknown known all", "unknown"} {
			t.Errorf("got %q", got)
		}
		// A machine that moved is found at its new port.
		c.address = b.address
		c.send(t, everybody, "moved")
		a.texts()
		b.texts()
		a.send(t, b.address, "there")
		if b.texts() != "" || c.texts() != "there" {
			t.Error("the switch has not learned that an address moved")
		}
		// A group is nobody's source address.
		a.address = everybody
		a.send(t, b.address, "odd")
		c.texts()
		b.send(t, everybody, "all")
		if c.texts() != "all" {
			t.Error("a group as source address took all broadcasts")
		}
	})
}

func TestAddressesAreBounded(t *testing.T) {
	onLAN(t, 1, func(l *LAN, a, b, _ *device) {
		for i := range maxAddresses + 10 {
			frame := make([]byte, headerLength)
			frame[6] = 2
			binary.BigEndian.PutUint32(frame[8:], uint32(i))
			l.forward(a.port, frame, time.Now())
		}
		l.forward(a.port, make([]byte, headerLength-1), time.Now())
		if len(l.addresses) != maxAddresses || a.port.Counts().Sent != maxAddresses+10 {
			t.Errorf("%d addresses, %+v", len(l.addresses), a.port.Counts())
		}
	})
}

func TestCutAndMend(t *testing.T) {
	onLAN(t, 1, func(_ *LAN, a, b, c *device) {
		b.port.SetFaults(Faults{Cut: true})
		a.send(t, everybody, "one")
		b.send(t, everybody, "two")
		if a.texts() != "" || b.texts() != "" || c.texts() != "one" {
			t.Error("frames passed a port that is cut")
		}
		if n := b.port.Counts(); n != (Counts{Sent: 1, Lost: 2}) {
			t.Errorf("counts %+v", n)
		}
		b.port.SetFaults(Faults{})
		a.send(t, everybody, "three")
		if b.texts() != "three" {
			t.Error("the port stays cut")
		}
	})
}

// TestLoss shows that about the asked share is lost, and the same frames with
// the same seed.
func TestLoss(t *testing.T) {
	const frames = 2000
	run := func(seed uint64) (received string) {
		onLAN(t, seed, func(_ *LAN, a, b, _ *device) {
			b.port.SetFaults(Faults{Loss: 0.1})
			for i := range frames {
				a.send(t, everybody, string(rune('a'+i%26)))
			}
			received = b.texts()
		})
		return received
	}
	first := run(7)
	if n := len(strings.Fields(first)); n < frames*85/100 || n > frames*95/100 {
		t.Errorf("%d of %d frames came through with a loss of 0.1", n, frames)
	}
	if run(7) != first {
		t.Error("other frames were lost with the same seed")
	}
	if run(8) == first {
		t.Error("the seed makes no difference")
	}
}

func TestDuplicateAndDelay(t *testing.T) {
	onLAN(t, 1, func(_ *LAN, a, b, c *device) {
		b.port.SetFaults(Faults{Duplicate: 1, Delay: time.Second})
		a.send(t, everybody, "x")
		if b.texts() != "" || c.texts() != "x" {
			t.Error("the delay is not the port's alone")
		}
		time.Sleep(time.Second - 1)
		synctest.Wait()
		if got := b.texts(); got != "" {
			t.Errorf("got %q before the delay was over", got)
		}
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		if got := b.texts(); got != "x x" {
			t.Errorf("got %q, want it twice", got)
		}
	})
}

func TestCaptureHasWhatWasSent(t *testing.T) {
	dir := t.TempDir()
	l, err := NewLAN(dir, 1)
	if err != nil {
		t.Fatal(err)
	}
	p, err := l.add("a", nil)
	if err != nil {
		t.Fatal(err)
	}
	p.SetFaults(Faults{Cut: true})
	frame := bytes.Repeat([]byte{0xaa}, snapLength+50)
	l.forward(p, frame, time.Unix(5, 6000))
	l.capture.size = maxLANCapture - 20
	l.forward(p, frame, time.Unix(5, 6000))
	if err := errors.Join(l.Close(), l.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := l.add("late", nil); err == nil {
		t.Error("a closed LAN takes a port")
	}
	raw, err := os.ReadFile(filepath.Join(dir, LANCapture))
	if err != nil {
		t.Fatal(err)
	}
	if len(raw) != 24+16+snapLength {
		t.Fatalf("%d bytes: want one frame, although it was lost, and none over the limit", len(raw))
	}
	for i, want := range []uint32{5, 6, snapLength, snapLength + 50} {
		if got := binary.LittleEndian.Uint32(raw[24+4*i:]); got != want {
			t.Errorf("field %d of the record is %d, want %d", i, got, want)
		}
	}
}

// TestMachineComesBack has a machine's socket opened a second time, as after a
// power cut.
func TestMachineComesBack(t *testing.T) {
	l := RunLAN(t, t.TempDir(), 1)
	p, err := l.Port("machine")
	if err != nil {
		t.Fatal(err)
	}
	other, far := net.Pipe()
	if _, err := l.add("other", newStream(other)); err != nil {
		t.Fatal(err)
	}
	listener := newStream(far)
	for _, text := range []string{"first", "again"} {
		conn, err := net.Dial("unix", p.Socket())
		if err != nil {
			t.Fatal(err)
		}
		if err := newStream(conn).writeFrame(append(append(everybody[:6:6], make([]byte, headerLength-6)...), text...)); err != nil {
			t.Fatal(err)
		}
		frame, err := listener.readFrame()
		if err != nil || string(frame[headerLength:]) != text {
			t.Fatalf("got %q, %v", frame, err)
		}
		conn.Close()
	}
}

func FuzzStream(f *testing.F) {
	f.Add([]byte{0, 0, 0, 3, 'a', 'b', 'c', 0, 0, 0, 0})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Add([]byte{0, 0, 0, 9, 'a'})
	f.Fuzz(func(t *testing.T, in []byte) {
		s := newStream(struct {
			io.ReadWriter
			io.Closer
		}{bytes.NewBuffer(in), nil})
		var out bytes.Buffer
		back := &stream{conn: struct {
			io.ReadWriter
			io.Closer
		}{&out, nil}}
		for {
			frame, err := s.readFrame()
			if err != nil {
				break
			}
			if err := back.writeFrame(frame); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.HasPrefix(in, out.Bytes()) {
			t.Errorf("frames of %x were written again as %x", in, out.Bytes())
		}
	})
}

// TestNamespacesReachEachOther sends through two TAP devices, and through one
// that is cut.
func TestNamespacesReachEachOther(t *testing.T) {
	l := RunLAN(t, t.TempDir(), 1)
	one, two := RunNamespace(t), RunNamespace(t)
	if _, err := l.Join(one, "lan0", "10.77.0.1/24"); err != nil {
		t.Fatal(err)
	}
	port, err := l.Join(two, "lan0", "10.77.0.2/24")
	if err != nil {
		t.Fatal(err)
	}
	var listen net.Listener
	if err := one.Do(func() (err error) { listen, err = net.Listen("tcp", "10.77.0.1:80"); return err }); err != nil {
		t.Fatal(err)
	}
	defer listen.Close()
	go func() {
		for {
			conn, err := listen.Accept()
			if err != nil {
				return
			}
			io.WriteString(conn, "hello")
			conn.Close()
		}
	}()
	var conn net.Conn
	if err := two.Do(func() (err error) { conn, err = net.Dial("tcp", "10.77.0.1:80"); return err }); err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if got, err := io.ReadAll(conn); string(got) != "hello" || err != nil {
		t.Fatalf("got %q, %v", got, err)
	}
	if out, err := two.Command(t.Context(), "ip", "-brief", "address").CombinedOutput(); err != nil || !strings.Contains(string(out), "10.77.0.2/24") {
		t.Errorf("%s, %v", out, err)
	}

	port.SetFaults(Faults{Cut: true})
	before := port.Counts()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- two.Do(func() error {
			conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", "10.77.0.1:80")
			if err == nil {
				conn.Close()
			}
			return err
		})
	}()
	for port.Counts().Lost == before.Lost {
		if err := t.Context().Err(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
	cancel()
	if err := <-ended; err == nil {
		t.Error("a connection came through a port that is cut")
	}
	if after := port.Counts(); after.Delivered != before.Delivered {
		t.Errorf("%+v became %+v", before, after)
	}
}

func TestCardOnALAN(t *testing.T) {
	c, err := Config{Name: "x", Dir: "/d", NICs: []NIC{{Socket: "/s,t", BootIndex: 1}}}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := c.NICs[0].args(0, c.Dir, c.Firmware)[1], "stream,id=net0,server=off,addr.type=unix,addr.path=/s,,t"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if _, err := (Config{Name: "x", Dir: "/d", NICs: []NIC{{Socket: "/s", TFTPDir: "/t"}}}).withDefaults(); err == nil {
		t.Error("a card on a LAN took QEMU's own TFTP server")
	}
}

// TestNamespaceLeavesProcessesAlone enters namespaces often, from threads that
// have started processes: each of those must live on.
func TestNamespaceLeavesProcessesAlone(t *testing.T) {
	n := RunNamespace(t)
	type echo struct {
		in  io.WriteCloser
		out io.Reader
	}
	var echoes []echo
	for range 20 {
		c := n.Command(t.Context(), "cat")
		in, err := c.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := c.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { in.Close(); c.Wait() })
		echoes = append(echoes, echo{in, out})
		for range 20 {
			if err := n.Do(func() error { return nil }); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i, e := range echoes {
		if _, err := io.WriteString(e.in, "alive"); err != nil {
			t.Fatalf("process %d: %v", i, err)
		}
		if _, err := io.ReadFull(e.out, make([]byte, len("alive"))); err != nil {
			t.Fatalf("process %d: %v", i, err)
		}
	}
}

// TestDHCPServer starts the server that is not ours, and one that cannot start.
func TestDHCPServer(t *testing.T) {
	l, n, dir := RunLAN(t, t.TempDir(), 1), RunNamespace(t), t.TempDir()
	if _, err := l.Join(n, "lan0", "10.77.0.1/24"); err != nil {
		t.Fatal(err)
	}
	RunDHCP(t, n, dir, "--interface=lan0", "--dhcp-range=10.77.0.100,10.77.0.200,1h")
	if err := n.Do(func() error {
		conn, err := net.ListenPacket("udp4", "10.77.0.1:67")
		if err == nil {
			conn.Close()
		}
		return err
	}); err == nil {
		t.Error("the DHCP port is free beside a DHCP server")
	}
	if _, err := startDHCP(t.Context(), n, t.TempDir(), []string{"--no-such-option"}); err == nil || !strings.Contains(err.Error(), "command line options") {
		t.Errorf("got %v, want dnsmasq's own words", err)
	}
}
