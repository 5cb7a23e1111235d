package host

import (
	"context"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// A frame as a data-centre switch sends it: chassis id MAC, port id interface
// name, 120 s, description, system name, capabilities, port VLAN 100.
const switchPDU = `0207 04 0c29ef000001  040a 05 45746865726e657437
0602 0078  0806 6c696e6b2037  0a06 6c6561662d31  0e04 0014 0014  fe06 0080c2 01 0064  0000`

func TestParseLLDP(t *testing.T) {
	n, ttl, err := ParseLLDP(unhex(t, switchPDU))
	if want := (Neighbour{ChassisID: "0c:29:ef:00:00:01", PortID: "Ethernet7", SystemName: "leaf-1", Description: "link 7", VLAN: 100}); err != nil || n != want || ttl != 2*time.Minute {
		t.Errorf("%+v %s %v", n, ttl, err)
	}
	for name, test := range map[string]struct{ pdu, chassis, port string }{
		"port id is a MAC, no end": {"0205 07 78636863 0407 03 aabbccddeeff 0602 0000", "xchc", "aa:bb:cc:dd:ee:ff"},
		"chassis id is an address": {"0206 05 01 c0a80101 0402 07 31 0602 0000 0000", "192.168.1.1", "1"},
		"chassis id is an IPv6":    {"0212 05 02 fe800000000000000000000000000001 0402 07 31 0602 0000 0000", "fe80::1", "1"},
		"binary local id":          {"0203 07 0001 0402 07 31 0602 0000 0000", "0001", "1"},
		"address of no family":     {"0206 05 09 c0a80101 0402 07 31 0602 0000 0000", "09c0a80101", "1"},
	} {
		n, ttl, err := ParseLLDP(unhex(t, test.pdu))
		if err != nil || n.ChassisID != test.chassis || n.PortID != test.port || ttl != 0 {
			t.Errorf("%s: %+v %s %v", name, n, ttl, err)
		}
	}
	for name, pdu := range map[string]string{
		"empty": "", "half a header": "02", "ends early": "0207 04 0c29ef000001",
		"wrong order": "0402 07 31 0203 07 0001 0602 0000", "length beyond the frame": "03ff 04 0c29",
		"second chassis id": "0203 07 0001 0402 07 31 0602 0078 0203 07 0001", "short ttl": "0203 07 0001 0402 07 31 0601 00",
		"empty chassis id": "0201 04 0402 07 31 0602 0000",
	} {
		if _, _, err := ParseLLDP(unhex(t, pdu)); !errors.Is(err, ErrLLDP) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Cut at every byte.
	whole := unhex(t, switchPDU)
	for i := range whole {
		if _, _, err := ParseLLDP(whole[:i]); err != nil && !errors.Is(err, ErrLLDP) {
			t.Error(err)
		}
	}
}

func FuzzParseLLDP(f *testing.F) {
	f.Add(unhex(f, switchPDU))
	f.Add([]byte{2, 3, 7, 0, 1, 4, 2, 7, 49, 6, 2, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		n, ttl, err := ParseLLDP(b)
		if err != nil && !errors.Is(err, ErrLLDP) {
			t.Error(err)
		}
		if ttl < 0 || ttl > 65535*time.Second || n.VLAN > 4095 {
			t.Errorf("%+v %s", n, ttl)
		}
		if _, err := Canonical(n); err != nil {
			t.Error(err)
		}
	})
}

// wire is a [FrameConn] fed by a test.
type wire struct {
	frames chan []byte
	closed chan struct{}
	once   sync.Once
}

func newWire() *wire { return &wire{frames: make(chan []byte), closed: make(chan struct{})} }

func (w *wire) ReadFrom(p []byte) (int, net.Addr, error) {
	select {
	case f, ok := <-w.frames:
		if !ok {
			return 0, nil, io.EOF
		}
		return copy(p, f), nil, nil
	case <-w.closed:
		return 0, nil, net.ErrClosed
	}
}

func (w *wire) Close() error { w.once.Do(func() { close(w.closed) }); return nil }

func TestLLDPListener(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second := newWire(), newWire()
		opened := 0
		changes := 0
		l := &LLDPListener{
			Interfaces: func() ([]string, error) { return []string{"eth0", "eth1"}, nil },
			Listen: func(name string) (FrameConn, error) {
				if name == "eth1" {
					return nil, errors.New("not permitted")
				}
				opened++
				if opened == 1 {
					return first, nil
				}
				return second, nil
			},
			Changed: func() { changes++ },
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error)
		go func() { done <- l.Run(ctx) }()

		first.frames <- unhex(t, switchPDU)
		synctest.Wait()
		if n := l.Neighbours()["eth0"]; n.SystemName != "leaf-1" || changes != 1 {
			t.Errorf("%+v, %d changes", n, changes)
		}
		// The same again, and rubbish, change nothing.
		first.frames <- unhex(t, switchPDU)
		first.frames <- []byte("rubbish")
		synctest.Wait()
		if len(l.Neighbours()) != 1 || changes != 1 {
			t.Errorf("%v, %d changes", l.Neighbours(), changes)
		}
		<-time.After(2*time.Minute + time.Second)
		if got := l.Neighbours(); len(got) != 0 {
			t.Errorf("after its time to live: %v", got)
		}
		first.frames <- unhex(t, switchPDU)
		synctest.Wait()
		if len(l.Neighbours()) != 1 || changes != 2 {
			t.Errorf("back again: %v, %d changes", l.Neighbours(), changes)
		}
		// Goodbye.
		first.frames <- unhex(t, "0207 04 0c29ef000001 0402 07 31 0602 0000 0000")
		synctest.Wait()
		if len(l.Neighbours()) != 0 || changes != 3 {
			t.Errorf("after goodbye: %v, %d changes", l.Neighbours(), changes)
		}
		// The interface goes and comes back; the next scan opens it again.
		first.frames <- unhex(t, switchPDU)
		close(first.frames)
		synctest.Wait()
		if len(l.Neighbours()) != 0 {
			t.Error("a neighbour of an interface that is gone")
		}
		<-time.After(defaultRescan)
		second.frames <- unhex(t, switchPDU)
		synctest.Wait()
		if want := map[string]Neighbour{"eth0": {ChassisID: "0c:29:ef:00:00:01", PortID: "Ethernet7", SystemName: "leaf-1", Description: "link 7", VLAN: 100}}; !reflect.DeepEqual(l.Neighbours(), want) || opened != 2 {
			t.Errorf("%v, opened %d times", l.Neighbours(), opened)
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		<-second.closed
	})
}
