package dhcp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

const (
	// answerWithin is how old a packet may be when its answer leaves. iPXE gives
	// up on a proxy after 2 s; an answer that is late for that is worth nothing.
	answerWithin = 100 * time.Millisecond
	// maxInHand packets are worked on at once: all machines of some racks that are
	// switched on together, at some 10 KiB each. A decision that hangs holds one
	// place, and the others go on.
	maxInHand = 512
	// retryEvery is the wait before an interface that cannot be served is tried
	// again.
	retryEvery = 2 * time.Second
	// maxProblems are what a site's status has room for.
	maxProblems = 16
	// foreignKept is for how long a server that took the boot away is a problem:
	// an operator who took its option 60 out sees it go.
	foreignKept = time.Hour
)

// foreign is a server that takes the boot away, and when it was heard last.
type foreign struct {
	why  string
	last time.Time
}

// Options make a [Server]. Interfaces, Decide and Holding are needed.
type Options struct {
	// Interfaces are served, and no others; each needs an IPv4 address.
	Interfaces []string
	// Decide is called for each packet of a client, by several goroutines at
	// once. It must decide from local state: what comes after 100 ms is thrown
	// away.
	Decide func(Client) Boot
	// Holding says whether this agent may answer at all. While it is false the
	// server is silent, on the wire and in events.
	Holding func() bool
	// Observe is called for each packet, inline. May be nil.
	Observe func(Event)
	Log     *slog.Logger
}

// Server answers on UDP ports 67 and 4011 of its interfaces. Use [New].
type Server struct {
	opt     Options
	clients tracker
	inHand  chan struct{}

	dropped, malformed, unsent seldom

	mu      sync.Mutex
	trouble map[string]string // by interface
	foreign []foreign
	serving map[string]netip.Addr
}

// New makes a server. It opens nothing before Run.
func New(opt Options) (*Server, error) {
	if len(opt.Interfaces) == 0 {
		return nil, errors.New("dhcp: no interface to serve is named")
	}
	if opt.Decide == nil || opt.Holding == nil {
		return nil, errors.New("dhcp: Decide and Holding are needed")
	}
	if opt.Observe == nil {
		opt.Observe = func(Event) {}
	}
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	opt.Interfaces = slices.Compact(slices.Sorted(slices.Values(opt.Interfaces)))
	return &Server{opt: opt, inHand: make(chan struct{}, maxInHand),
		trouble: map[string]string{}, serving: map[string]netip.Addr{}}, nil
}

// Name is the service's.
func (s *Server) Name() string { return "dhcp" }

// Run serves until ctx ends. An interface that cannot be served (its port taken,
// no address, not there) is told by an event and in Problems, and tried again.
func (s *Server) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	for _, name := range s.opt.Interfaces {
		wg.Go(func() {
			for ctx.Err() == nil {
				err := s.serveLink(ctx, name)
				if ctx.Err() != nil {
					return
				}
				s.setTrouble(name, err)
				select {
				case <-ctx.Done():
				case <-time.After(retryEvery):
				}
			}
		})
	}
	wg.Wait()
	return nil
}

// Fetched tells that a client fetched a file, so that its offers led to something.
func (s *Server) Fetched(mac string) { s.clients.followed(mac) }

// Problems are sentences for the operator, at most 16: interfaces that are not
// served, and servers that take the boot away.
func (s *Server) Problems() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []string
	for _, name := range s.opt.Interfaces {
		if why := s.trouble[name]; why != "" {
			all = append(all, why)
		}
	}
	for _, f := range s.foreign {
		if time.Since(f.last) < foreignKept {
			all = append(all, f.why)
		}
	}
	return all[:min(len(all), maxProblems)]
}

// Serving are the addresses that are answered from, one for each interface that
// is served.
func (s *Server) Serving() []netip.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []netip.Addr
	for _, name := range s.opt.Interfaces {
		if a, ok := s.serving[name]; ok {
			all = append(all, a)
		}
	}
	return all
}

func (s *Server) setTrouble(name string, err error) {
	why := cut(fmt.Sprintf("dhcp on %s: %v", name, err))
	s.mu.Lock()
	news := s.trouble[name] != why
	s.trouble[name] = why
	delete(s.serving, name)
	s.mu.Unlock()
	if news {
		s.opt.Log.Warn("an interface is not served", "interface", name, "error", err)
		s.tell(EventTrouble, name, why)
	}
}

func (s *Server) setServing(name string, a netip.Addr) {
	s.mu.Lock()
	delete(s.trouble, name)
	s.serving[name] = a
	s.mu.Unlock()
	s.tell(EventServing, name, fmt.Sprintf("ports %d and %d on %s from %s", ServerPort, BINLPort, name, a))
}

func (s *Server) tell(kind, iface, message string) {
	s.opt.Observe(Event{Type: kind, Message: cut(message), Time: time.Now(), Interface: iface})
}

func (s *Server) about(c *Client, kind, message string) {
	s.opt.Observe(Event{Type: kind, Message: cut(message), Time: time.Now(), Interface: c.Interface,
		MAC: c.MAC, UUID: c.UUID, Architecture: c.Architecture(), Firmware: c.Firmware, Address: c.Address})
}

// sometimes tells of what anyone can cause at any rate.
func (s *Server) sometimes(of *seldom, kind, iface, message string) {
	if n, ok := of.next(time.Now()); ok {
		s.tell(kind, iface, fmt.Sprintf("%s (%d since the last time)", message, n))
	}
}

// take hands a packet on without waiting. b is the caller's again when it returns.
func (s *Server) take(b []byte, at Arrival, send func(Reply) error) {
	received := time.Now()
	select {
	case s.inHand <- struct{}{}:
	default:
		s.sometimes(&s.dropped, EventDropped, at.Interface, fmt.Sprintf("packets were dropped: %d are in hand already", maxInHand))
		return
	}
	b = slices.Clone(b)
	go func() {
		defer func() { <-s.inHand }()
		s.handle(b, at, received, send)
	}()
}

// handle is what happens to one packet.
func (s *Server) handle(b []byte, at Arrival, received time.Time, send func(Reply) error) {
	if !s.opt.Holding() {
		return
	}
	c, err := Parse(b, at)
	if err != nil {
		s.sometimes(&s.malformed, EventMalformed, at.Interface, fmt.Sprintf("from %s: %v", at.From, err))
		return
	}
	if !s.clients.allow(c.MAC, received) {
		s.sometimes(&s.dropped, EventDropped, at.Interface, fmt.Sprintf("%s sends more than %d packets a second", c.MAC, perSecond))
		return
	}
	boot := s.opt.Decide(c)
	known := c.Firmware != OtherClient || c.Port == BINLPort || boot.Lease != nil
	if known {
		s.observe(&c)
	}
	reply, err := Answer(c, boot)
	if d := time.Since(received); d > answerWithin {
		s.about(&c, EventDropped, fmt.Sprintf("not answered: the decision took %d ms; at most %d", d.Milliseconds(), answerWithin.Milliseconds()))
		return
	}
	if !s.opt.Holding() {
		return // lost while it was decided
	}
	if err != nil {
		if known {
			s.silent(&c, boot, err)
		}
		return
	}
	if err := send(reply); err != nil {
		s.sometimes(&s.unsent, EventDropped, at.Interface, fmt.Sprintf("send to %s: %v", reply.To, err))
		return
	}
	s.sent(&c, boot, reply)
}

// observe tells of a packet that came.
func (s *Server) observe(c *Client) {
	switch {
	case c.Port == BINLPort:
		s.clients.followed(c.MAC)
		s.about(c, EventBINL, fmt.Sprintf("from %s: %s", c.From, c))
	case c.Message == dhcpv4.MessageTypeDiscover:
		s.about(c, EventDiscover, c.String())
	case c.Message == dhcpv4.MessageTypeRequest:
		if c.Server.IsValid() && c.Server != c.Local {
			s.clients.requested(c.MAC, c.Server)
		}
		s.about(c, EventRequest, c.String())
	case c.Message == dhcpv4.MessageTypeInform:
		s.about(c, EventInform, c.String())
	}
}

func (s *Server) silent(c *Client, boot Boot, why error) {
	kind := EventSilent
	switch {
	case c.Port == BINLPort || c.Message == dhcpv4.MessageTypeDiscover:
	case boot.Lease == nil:
		return // between the client and the network's DHCP server
	case c.Message == dhcpv4.MessageTypeDecline:
		kind = EventDeclined
	case c.Message == dhcpv4.MessageTypeRelease:
		kind = EventReleased
	}
	text := why.Error()
	if boot.Reason != "" {
		text += ": " + boot.Reason
	}
	s.about(c, kind, text)
}

func (s *Server) sent(c *Client, boot Boot, r Reply) {
	kind := EventAck
	switch r.Type {
	case dhcpv4.MessageTypeOffer:
		kind = EventOffer
	case dhcpv4.MessageTypeNak:
		kind = EventNak
	}
	text := fmt.Sprintf("to %s: %s", r.To, r.About)
	if boot.Reason != "" {
		text += ", " + boot.Reason
	}
	s.about(c, kind, text)
	if kind == EventOffer && boot.Lease == nil && c.Firmware != Ramdisk {
		if why := s.clients.offered(c.MAC); why != "" {
			s.about(c, EventNotHonoured, why)
		}
	}
}

// overheard looks at another server's packet.
func (s *Server) overheard(b []byte, iface string) {
	if !s.opt.Holding() {
		return // the one who answers may be our site's other agent
	}
	mac, server, why, ok := Foreign(b)
	// Two of our interfaces may be on one network.
	if !ok || slices.Contains(s.Serving(), server) || !s.clients.allow("from a server to "+mac, time.Now()) {
		return
	}
	why = cut(why)
	s.mu.Lock()
	s.foreign = slices.DeleteFunc(s.foreign, func(f foreign) bool { return f.why == why })
	if len(s.foreign) >= maxProblems {
		s.foreign = s.foreign[1:]
	}
	s.foreign = append(s.foreign, foreign{why, time.Now()})
	s.mu.Unlock()
	s.opt.Observe(Event{Type: EventForeign, Message: why, Time: time.Now(), Interface: iface, MAC: mac})
}
