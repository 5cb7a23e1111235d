package dhcp

import (
	"net/netip"
	"sync"
	"time"
	"unicode/utf8"
)

// What happened, as the type of an Event.
const (
	EventDiscover = "dhcp.discover"
	EventRequest  = "dhcp.request" // on port 67, to whichever server
	EventInform   = "dhcp.inform"
	EventBINL     = "dhcp.4011"
	EventOffer    = "dhcp.offer"
	EventAck      = "dhcp.ack"
	EventNak      = "dhcp.nak"
	// EventSilent: a packet of a client that boots, or that is listed, which
	// was not answered, and why.
	EventSilent   = "dhcp.silent"
	EventDeclined = "dhcp.declined"
	EventReleased = "dhcp.released"
	// EventDropped: packets that were not looked at, or not in time.
	EventDropped = "dhcp.dropped"
	// EventMalformed: packets that could not be read.
	EventMalformed   = "dhcp.malformed"
	EventForeign     = "dhcp.foreign-offer"
	EventNotHonoured = "dhcp.not-honoured"
	// EventServing: an interface is served. EventTrouble: it is not, and why; a
	// port that another process has, or no address.
	EventServing = "dhcp.serving"
	EventTrouble = "dhcp.trouble"
)

// maxMessage bytes of an Event's message are kept.
const maxMessage = 256

// Event is one packet, or something that was noticed. MAC and what follows are
// empty where no client is known.
type Event struct {
	Type, Message string // the message at most 256 bytes
	Time          time.Time
	Interface     string
	MAC, UUID     string
	Architecture  string // as Go has it
	Firmware      Firmware
	// Address is what the client has or asks for, so that a TFTP request can be
	// brought together with its MAC.
	Address netip.Addr
}

func cut(s string) string {
	if len(s) <= maxMessage {
		return s
	}
	n := maxMessage
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// seldom lets one event a second through and counts the others, for what anyone
// can cause at any rate.
type seldom struct {
	mu    sync.Mutex
	last  time.Time
	count int
}

// next says whether to tell now, and how many it was since it was told last.
func (s *seldom) next(now time.Time) (count int, tell bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count++
	if !s.last.IsZero() && now.Sub(s.last) < time.Second {
		return 0, false
	}
	count, s.count, s.last = s.count, 0, now
	return count, true
}
