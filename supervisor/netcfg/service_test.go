package netcfg

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/better-compute/bcd/supervisor"
)

// world is a machine and its networks, made up.
type world struct {
	mu      sync.Mutex
	news    chan link
	server  map[string]func(ctx context.Context, everyone bool) (Lease, error) // by NIC
	has     map[string]netip.Prefix
	upErr   map[string]error
	six     map[string]bool
	asked   map[string]int
	dropped int
}

func newWorld() *world {
	return &world{
		news: make(chan link), server: map[string]func(context.Context, bool) (Lease, error){},
		has: map[string]netip.Prefix{}, upErr: map[string]error{}, six: map[string]bool{}, asked: map[string]int{},
	}
}

func (w *world) links(ctx context.Context) (<-chan link, error) { return w.news, nil }

func (w *world) up(n nic) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.upErr[n.name]
}

func (w *world) configure(n nic, l Lease) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.has[n.name] = l.Address
	return nil
}

func (w *world) deconfigure(n nic, l Lease) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.has, n.name)
	w.dropped++
	return nil
}

func (w *world) global6(n nic) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.six[n.name]
}

func (w *world) talk(ctx context.Context, n nic, everyone bool) (Lease, error) {
	w.mu.Lock()
	w.asked[n.name]++
	f := w.server[n.name]
	w.mu.Unlock()
	if f == nil {
		// Nobody there: as long as the real questions take.
		select {
		case <-ctx.Done():
			return Lease{}, ctx.Err()
		case <-time.After(14 * time.Second):
			return Lease{}, errors.New("no answer")
		}
	}
	return f(ctx, everyone)
}

func (w *world) acquire(ctx context.Context, n nic) (Lease, error) { return w.talk(ctx, n, true) }
func (w *world) extend(ctx context.Context, n nic, _ Lease, everyone bool) (Lease, error) {
	return w.talk(ctx, n, everyone)
}

func (w *world) address(name string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if a, ok := w.has[name]; ok {
		return a.String()
	}
	return ""
}

// counts gives how often a NIC has asked, and how many addresses were taken away.
func (w *world) counts(name string) (asked, dropped int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.asked[name], w.dropped
}

func (w *world) serve(name, addr string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.server[name] = func(context.Context, bool) (Lease, error) {
		l := lease(addr, time.Now(), time.Hour)
		l.DNS = []netip.Addr{netip.MustParseAddr("10.0.0.53")}
		l.NTP = []netip.Addr{netip.MustParseAddr("10.0.0.123")}
		return l, nil
	}
}

func (w *world) silence(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.server, name)
}

// tell the service about a link, and let it do what follows at once.
func (w *world) tell(index int, carrier, gone bool) {
	w.news <- link{
		nic:     nic{index, fmt.Sprintf("eth%d", index), net.HardwareAddr{2, 0, 0, 0, 0, byte(index)}},
		carrier: carrier, gone: gone,
	}
	synctest.Wait()
}

// run is a supervisor with the service in a bubble.
func run(t *testing.T, w *world, dir string, static ...Static) (s *Service, ready func() bool, stop func()) {
	t.Helper()
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	s = NewService(Options{Log: log, ResolvConf: filepath.Join(dir, "resolv.conf"), Static: static})
	s.host, s.dhcp = w, w
	s.lo = func() error { return nil }
	s.jitter = func() float64 { return 0.5 }
	sup := supervisor.New(supervisor.Options{Log: log})
	if err := sup.Add(s); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- sup.Run(ctx) }()
	synctest.Wait()
	ready = func() bool { synctest.Wait(); return sup.Snapshot()[0].Ready }
	return s, ready, func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

func TestOneNICWithoutAServerDelaysNoOther(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		s, ready, stop := run(t, w, dir)
		began := time.Now()
		w.tell(1, true, false) // nobody answers there
		w.tell(2, false, false)
		w.serve("eth3", "10.0.3.5/24")
		w.tell(3, true, false)
		if !ready() || time.Since(began) != 0 {
			t.Errorf("ready %v after %s", ready(), time.Since(began))
		}
		if w.address("eth3") != "10.0.3.5/24" || w.address("eth1") != "" {
			t.Errorf("addresses %v", w.has)
		}
		var phases []Phase
		for _, st := range s.Status() {
			phases = append(phases, st.Phase)
		}
		if !slices.Equal(phases, []Phase{Selecting, NoLink, Bound}) {
			t.Errorf("phases %q", phases)
		}
		if got := s.NTPServers(); !slices.Equal(got, []string{"10.0.0.123"}) {
			t.Errorf("ntp servers %q", got)
		}
		resolv, err := os.ReadFile(filepath.Join(dir, "resolv.conf"))
		if err != nil || !strings.Contains(string(resolv), "nameserver 10.0.0.53\n") {
			t.Errorf("resolv.conf %q, %v", resolv, err)
		}
		// A cable is plugged in later.
		w.serve("eth2", "10.0.2.5/24")
		w.tell(2, true, false)
		if w.address("eth2") != "10.0.2.5/24" {
			t.Errorf("addresses %v", w.has)
		}
		stop()
		if _, dropped := w.counts(""); dropped != 0 {
			t.Error("a stop took addresses away")
		}
	})
}

func TestRenewalsOverADayAndExpiry(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.serve("eth1", "10.0.1.5/24")
		s, _, stop := run(t, w, dir)
		w.tell(1, true, false)
		time.Sleep(24*time.Hour + time.Minute)
		if asked, dropped := w.counts("eth1"); asked != 1+48 || dropped != 0 {
			t.Errorf("asked %d times, want 49; dropped %d", asked, dropped)
		}
		w.silence("eth1")
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		if w.address("eth1") != "" || len(s.Leases()) != 0 {
			t.Errorf("kept %s past its end", w.address("eth1"))
		}
		resolv, err := os.ReadFile(filepath.Join(dir, "resolv.conf"))
		if err != nil || strings.Contains(string(resolv), "nameserver") {
			t.Errorf("resolv.conf %q, %v", resolv, err)
		}
		w.serve("eth1", "10.0.1.6/24")
		time.Sleep(2 * time.Minute)
		if w.address("eth1") != "10.0.1.6/24" {
			t.Errorf("address %q", w.address("eth1"))
		}
		stop()
	})
}

func TestUnpluggedHotpluggedAndFlapping(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		s, _, stop := run(t, w, dir)
		for range 20 { // while a question is out
			w.tell(1, true, false)
			w.tell(1, false, false)
		}
		w.serve("eth1", "10.0.1.5/24")
		w.tell(1, true, false)
		if w.address("eth1") != "10.0.1.5/24" {
			t.Errorf("addresses %v", w.has)
		}
		w.tell(1, true, true) // the card is pulled
		if len(s.Status()) != 0 {
			t.Errorf("status %+v", s.Status())
		}
		w.tell(1, true, false) // and is back
		if st := s.Status(); len(st) != 1 || st[0].Phase != Bound {
			t.Errorf("status %+v", st)
		}
		stop()
	})
}

func TestABrokenNICAndAPanicStayTheirOwn(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.upErr["eth1"] = errors.New("firmware missing")
		w.serve("eth2", "10.0.2.5/24")
		w.server["eth3"] = func(context.Context, bool) (Lease, error) { panic("short packet") }
		s, ready, stop := run(t, w, dir)
		for i := 1; i <= 3; i++ {
			w.tell(i, true, false)
		}
		time.Sleep(10 * time.Minute)
		if !ready() || w.address("eth2") != "10.0.2.5/24" {
			t.Errorf("ready %v, addresses %v", ready(), w.has)
		}
		st := s.Status()
		if !strings.Contains(st[0].LastError, "firmware missing") || !strings.Contains(st[2].LastError, "short packet") {
			t.Errorf("status %+v", st)
		}
		w.mu.Lock()
		w.upErr["eth1"] = nil
		w.mu.Unlock()
		w.serve("eth1", "10.0.1.5/24")
		time.Sleep(2 * time.Minute)
		if w.address("eth1") != "10.0.1.5/24" {
			t.Errorf("the NIC did not come back: %+v", s.Status()[0])
		}
		stop()
	})
}

func TestIPv6OnlyIsANetworkToo(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		s, ready, stop := run(t, w, dir)
		w.tell(1, true, false)
		if ready() {
			t.Error("ready without an address")
		}
		time.Sleep(5 * time.Second)
		w.mu.Lock()
		w.six["eth1"] = true
		w.mu.Unlock()
		time.Sleep(2 * time.Second)
		if !ready() || !s.Status()[0].IPv6 {
			t.Errorf("status %+v", s.Status())
		}
		stop()
	})
}

func TestStatic(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		s, ready, stop := run(t, w, dir, Static{
			Match: "02:00:00:00:00:01", Address: netip.MustParsePrefix("192.0.2.7/28"), Router: netip.MustParseAddr("192.0.2.1"),
		})
		w.tell(1, false, false)
		if ready() {
			t.Error("ready without a link")
		}
		w.tell(1, true, false)
		st := s.Status()
		if !ready() || w.address("eth1") != "192.0.2.7/28" || !st[0].Static || st[0].Lease.Routes[0].To != defaultRoute {
			t.Errorf("addresses %v, status %+v", w.has, st)
		}
		time.Sleep(1000 * time.Hour)
		if asked, dropped := w.counts("eth1"); asked != 0 || dropped != 0 {
			t.Error("dhcp on a static NIC")
		}
		stop()
	})
}
