package dhcp

import (
	"container/list"
	"fmt"
	"net/netip"
	"sync"
	"time"
)

const (
	// maxTracked clients are remembered, the ones heard last: more than a
	// provisioning network has, and 1 MiB at most whatever MACs are made up.
	maxTracked = 4096
	// perSecond is how many packets of one MAC are looked at in a second.
	// Firmware sends one in one to sixteen seconds, on both ports.
	perSecond = 10
	// notHonouredAfter is how many offers in a row may lead to nothing. edk2
	// sends four discovers before it gives up, so a fifth is a new attempt.
	notHonouredAfter = 5
)

// tracker remembers what each client did with our offers. It holds no clock.
type tracker struct {
	mu      sync.Mutex
	clients map[string]*list.Element // of *tracked
	recent  list.List                // the one heard last in front
}

type tracked struct {
	mac       string
	second    time.Time
	inSecond  int
	offers    int // since it last did what an offer is for
	nextTell  int
	otherFrom netip.Addr // the server that it took an address from meanwhile
}

// get is called with the lock held.
func (t *tracker) get(mac string) *tracked {
	if e, ok := t.clients[mac]; ok {
		t.recent.MoveToFront(e)
		return e.Value.(*tracked)
	}
	if t.clients == nil {
		t.clients = make(map[string]*list.Element)
	}
	if len(t.clients) >= maxTracked {
		last := t.recent.Back()
		delete(t.clients, t.recent.Remove(last).(*tracked).mac)
	}
	c := &tracked{mac: mac, nextTell: notHonouredAfter}
	t.clients[mac] = t.recent.PushFront(c)
	return c
}

// allow says whether one more packet of this client is to be looked at.
func (t *tracker) allow(mac string, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.get(mac)
	if d := now.Sub(c.second); d < 0 || d >= time.Second {
		c.second, c.inSecond = now, 0
	}
	c.inSecond++
	return c.inSecond <= perSecond
}

// offered counts an offer. why is not empty when it is time to say that offers
// lead to nothing: after notHonouredAfter of them, and after each doubling.
func (t *tracker) offered(mac string) (why string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.get(mac)
	c.offers++
	if c.offers < c.nextTell {
		return ""
	}
	c.nextTell *= 2
	if c.otherFrom.IsValid() {
		return fmt.Sprintf("proxy offers are not honoured: %d of them, it took an address from %s, and never asked port %d nor for a file; list its MAC for full DHCP", c.offers, c.otherFrom, BINLPort)
	}
	return fmt.Sprintf("%d offers and no request for an address: no DHCP server of this network gives it one, or its answers do not arrive", c.offers)
}

// requested: the client takes an address from another server.
func (t *tracker) requested(mac string, server netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.get(mac).otherFrom = server
}

// followed: the client did what an offer is for.
func (t *tracker) followed(mac string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.get(mac)
	c.offers, c.nextTell, c.otherFrom = 0, notHonouredAfter, netip.Addr{}
}
