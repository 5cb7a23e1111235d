package dhcp

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// rig is a server without sockets: what it sends and tells is kept.
type rig struct {
	*Server
	holding atomic.Bool
	mu      sync.Mutex
	sent    []Reply
	events  []Event
}

func newRig(t testing.TB, decide func(Client) Boot) *rig {
	t.Helper()
	r := &rig{}
	r.holding.Store(true)
	s, err := New(Options{Interfaces: []string{"eth0"}, Decide: decide, Holding: r.holding.Load, Observe: func(e Event) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.events = append(r.events, e)
	}})
	if err != nil {
		t.Fatal(err)
	}
	r.Server = s
	return r
}

func (r *rig) send(reply Reply) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sent = append(r.sent, reply)
	return nil
}

func (r *rig) in(b []byte, at Arrival) { r.take(b, at, r.send) }

func (r *rig) types() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []string
	for _, e := range r.events {
		all = append(all, strings.TrimPrefix(e.Type, "dhcp."))
	}
	return strings.Join(all, " ")
}

func (r *rig) last() Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.events) == 0 {
		return Event{}
	}
	return r.events[len(r.events)-1]
}

func always(b Boot) func(Client) Boot { return func(Client) Boot { return b } }

func TestServerAnswersAndTells(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, always(Boot{Kind: File, Name: "uki.efi", Reason: "unknown machine"}))
		for _, p := range []struct {
			b  []byte
			at Arrival
		}{
			{sent{opts: ovmf(discover, 7)}.bytes(), on67(nobody)},
			{sent{opts: ovmf(request, 7, raw(54, "0a4d0001"), raw(50, "0a4d0037"))}.bytes(), on67(nobody)},
			{sent{ciaddr: "10.77.0.55", opts: ovmf(request, 7)}.bytes(), on4011(leased)},
			{sent{opts: []opt{typ(discover)}}.bytes(), on67(nobody)}, // ordinary, and nobody's business
		} {
			r.in(p.b, p.at)
			synctest.Wait()
		}
		if got := r.types(); got != "discover offer request 4011 ack" {
			t.Errorf("events %q", got)
		}
		if len(r.sent) != 2 {
			t.Errorf("%d packets sent", len(r.sent))
		}
		for _, e := range r.events {
			if e.MAC != testMAC || e.Architecture != "amd64" || e.Firmware != UEFI || e.UUID == "" || len(e.Message) > maxMessage {
				t.Errorf("event %+v", e)
			}
		}
		if e := r.events[2]; e.Address != netip.MustParseAddr("10.77.0.55") || !strings.Contains(e.Message, "to server 10.77.0.1") {
			t.Errorf("event %+v", e)
		}
		if e := r.last(); !strings.Contains(e.Message, "unknown machine") {
			t.Errorf("event %+v", e)
		}
	})
}

func TestNotHolding(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r *rig
		r = newRig(t, func(Client) Boot {
			r.holding.Store(false) // lost in the middle
			return ukiBoot
		})
		r.in(sent{opts: ovmf(discover, 7)}.bytes(), on67(nobody))
		synctest.Wait()
		if len(r.sent) != 0 {
			t.Errorf("answered with a lease that was lost while it was decided")
		}
		r.events = nil
		r.in(sent{opts: ovmf(discover, 7)}.bytes(), on67(nobody))
		r.overheard(sent{op: 2, opts: []opt{typ(offer), str(60, "PXEClient")}}.bytes(), "eth0")
		synctest.Wait()
		if len(r.sent) != 0 || len(r.events) != 0 || len(r.Problems()) != 0 {
			t.Errorf("not silent: sent %v, events %v", r.sent, r.events)
		}
	})
}

// TestSlowDecision is fault 10: a slow backend costs its own answer and nobody
// else's.
func TestSlowDecision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(c Client) Boot {
			if c.MAC == testMAC {
				time.Sleep(answerWithin + time.Millisecond)
			}
			return ukiBoot
		})
		r.in(sent{opts: ovmf(discover, 7)}.bytes(), on67(nobody))
		r.in(sent{mac: "525400000001", opts: ovmf(discover, 7)}.bytes(), on67(nobody))
		synctest.Wait()
		if len(r.sent) != 1 {
			t.Fatalf("%d answers while one decision is slow; want the other's", len(r.sent))
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if e := r.last(); len(r.sent) != 1 || e.Type != EventDropped || e.MAC != testMAC || !strings.Contains(e.Message, "101 ms") {
			t.Errorf("%d answers, %+v", len(r.sent), e)
		}
	})
}

// TestHangingDecisions: the work in hand is bounded, and goes on when it can.
func TestHangingDecisions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		var asked atomic.Int32
		r := newRig(t, func(Client) Boot {
			asked.Add(1)
			<-hang
			return ukiBoot
		})
		for i := range 10 * maxInHand {
			r.in(sent{mac: fmt.Sprintf("52540000%04x", i), opts: ovmf(discover, 7)}.bytes(), on67(nobody))
		}
		synctest.Wait()
		if n := asked.Load(); n != maxInHand {
			t.Errorf("%d decisions at once", n)
		}
		if got := r.types(); got != "dropped" {
			t.Errorf("events %q; want one for all that were dropped", got)
		}
		close(hang)
		synctest.Wait()
		r.in(sent{opts: ovmf(discover, 7)}.bytes(), on67(nobody))
		synctest.Wait()
		if len(r.sent) != maxInHand+1 {
			t.Errorf("%d answers", len(r.sent))
		}
	})
}

func TestRateOfOneClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, always(ukiBoot))
		for range 5 * perSecond {
			r.in(sent{opts: ovmf(discover, 7)}.bytes(), on67(nobody))
			synctest.Wait()
		}
		r.in(sent{mac: "525400000001", opts: ovmf(discover, 7)}.bytes(), on67(nobody))
		synctest.Wait()
		if len(r.sent) != perSecond+1 {
			t.Errorf("%d answers in a second; want %d and another client's one", len(r.sent), perSecond)
		}
		time.Sleep(time.Second)
		r.in(sent{opts: ovmf(discover, 7)}.bytes(), on67(nobody))
		synctest.Wait()
		if len(r.sent) != perSecond+2 {
			t.Errorf("%d answers; want one more in the next second", len(r.sent))
		}
	})
}

func TestMalformedPackets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, always(ukiBoot))
		for range 1000 {
			r.in([]byte("rubbish"), on67(nobody))
			synctest.Wait()
		}
		time.Sleep(time.Second)
		r.in([]byte("rubbish"), on67(nobody))
		synctest.Wait()
		if got := r.types(); got != "malformed malformed" || !strings.Contains(r.last().Message, "1000 since") {
			t.Errorf("events %q, %+v", got, r.last())
		}
	})
}

// TestNotHonoured is fault 7: offer after offer and no follow-up.
func TestNotHonoured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, always(ukiBoot))
		again := func(n int) {
			for range n {
				r.in(sent{opts: ovmf(discover, 7)}.bytes(), on67(nobody))
				time.Sleep(4 * time.Second)
			}
			synctest.Wait()
		}
		told := func() (n int) { return strings.Count(r.types(), "not-honoured") }

		again(notHonouredAfter - 1)
		if told() != 0 {
			t.Fatal("told too early")
		}
		again(1)
		if told() != 1 || !strings.Contains(r.last().Message, "no DHCP server of this network") {
			t.Fatalf("told %d times, %+v", told(), r.last())
		}
		again(notHonouredAfter - 1)
		if told() != 1 {
			t.Error("told again before twice as many")
		}

		// It takes an address from somebody, and comes back.
		r.in(sent{opts: ovmf(request, 7, raw(54, "0a4d0001"), raw(50, "0a4d0037"))}.bytes(), on67(nobody))
		synctest.Wait()
		again(1)
		if e := r.last(); told() != 2 || !strings.Contains(e.Message, "took an address from 10.77.0.1") || !strings.Contains(e.Message, "full DHCP") {
			t.Errorf("told %d times, %+v", told(), e)
		}

		// Each kind of follow-up ends it.
		r.in(sent{ciaddr: "10.77.0.55", opts: ovmf(request, 7)}.bytes(), on4011(leased))
		synctest.Wait()
		again(notHonouredAfter - 1)
		r.Fetched(testMAC)
		again(notHonouredAfter - 1)
		if told() != 2 {
			t.Errorf("told %d times for a client that follows up", told())
		}
	})
}

// TestForeignOffers is fault 3 as the operator sees it.
func TestForeignOffers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, always(ukiBoot))
		leak := sent{op: 2, yiaddr: "10.77.0.55", opts: []opt{typ(offer), raw(54, "0a4d0001"), str(60, "PXEClient")}}.bytes()
		r.overheard(leak, "eth0")
		r.overheard(leak, "eth0")
		r.overheard(sent{op: 2, yiaddr: "10.77.0.55", opts: []opt{typ(offer), raw(54, "0a4d0001")}}.bytes(), "eth0")
		if got := r.types(); got != "foreign-offer foreign-offer" || r.last().MAC != testMAC {
			t.Errorf("events %q, %+v", got, r.last())
		}
		if p := r.Problems(); len(p) != 1 || !strings.Contains(p[0], "10.77.0.1") {
			t.Errorf("problems %q", p)
		}
		r.setServing("eth0", ourAddr)
		r.overheard(sent{op: 2, opts: []opt{typ(offer), raw(54, "0a4d0002"), str(60, "PXEClient")}}.bytes(), "eth1")
		if got := r.types(); got != "foreign-offer foreign-offer serving" || len(r.Problems()) != 1 {
			t.Errorf("our own other interface is foreign: %q, %q", got, r.Problems())
		}
		for i := range 10 * maxProblems { // hostile: a new server each time
			r.overheard(sent{op: 2, mac: fmt.Sprintf("52540000%04x", i), yiaddr: "10.77.0.55",
				opts: []opt{typ(offer), raw(54, fmt.Sprintf("0a4d%04x", i)), str(60, "PXEClient")}}.bytes(), "eth0")
		}
		if p := r.Problems(); len(p) != maxProblems {
			t.Errorf("%d problems; at most %d", len(p), maxProblems)
		}
		time.Sleep(foreignKept)
		if p := r.Problems(); len(p) != 0 {
			t.Errorf("problems %q an hour later", p)
		}
	})
}

func TestDeclined(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, always(Boot{Lease: testLease()}))
		for _, b := range []byte{decline, release} {
			r.in(sent{opts: append(ramdisk(b), raw(54, "0a4d0002"), raw(50, "0a4d0007"))}.bytes(), on67(nobody))
			synctest.Wait()
		}
		if got := r.types(); got != "declined released" || len(r.sent) != 0 {
			t.Errorf("events %q, %d sent", got, len(r.sent))
		}
	})
}

// TestManyMACs: what is remembered of clients has an end.
func TestManyMACs(t *testing.T) {
	var tr tracker
	now := time.Unix(1000, 0)
	for i := range 3 * maxTracked {
		mac := fmt.Sprint(i)
		tr.allow(mac, now)
		tr.offered(mac)
	}
	if len(tr.clients) != maxTracked || tr.recent.Len() != maxTracked {
		t.Errorf("%d clients are remembered, in a list of %d", len(tr.clients), tr.recent.Len())
	}
	if _, ok := tr.clients[fmt.Sprint(3*maxTracked-1)]; !ok {
		t.Error("the one heard last is forgotten")
	}
}

func TestNewRefuses(t *testing.T) {
	for _, o := range []Options{
		{Decide: always(Boot{}), Holding: func() bool { return true }},
		{Interfaces: []string{"eth0"}, Holding: func() bool { return true }},
		{Interfaces: []string{"eth0"}, Decide: always(Boot{})},
	} {
		if _, err := New(o); err == nil {
			t.Errorf("%+v is taken", o)
		}
	}
}

func TestCut(t *testing.T) {
	for in, want := range map[string]int{"": 0, strings.Repeat("a", 256): 256, strings.Repeat("a", 257): 256, strings.Repeat("a", 255) + "é": 255} {
		if got := cut(in); len(got) != want {
			t.Errorf("%d bytes are cut to %d, want %d", len(in), len(got), want)
		}
	}
}

func TestInodesOf(t *testing.T) {
	const text = `   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops
  123: 00000000:0043 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4711 2 0000000000000000 0
  124: 0100007F:0FAB 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4712 2 0000000000000000 0
  125: short
`
	if got := inodesOf(strings.NewReader(text), 67); len(got) != 1 || got[0] != "4711" {
		t.Errorf("port 67: %q", got)
	}
	if got := inodesOf(strings.NewReader(text), 4011); len(got) != 1 || got[0] != "4712" {
		t.Errorf("port 4011: %q", got)
	}
	if got := inodesOf(strings.NewReader(text), 68); got != nil {
		t.Errorf("port 68: %q", got)
	}
}
