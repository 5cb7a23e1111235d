package dhcp

import (
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"time"
)

// Kind is what a client is to do.
type Kind int

const (
	// Nothing is no boot offer at all: UEFI goes on to its own disk.
	Nothing Kind = iota
	// File is a program or an iPXE script to fetch.
	File
	// Exit is a script for iPXE that gives the machine back to its firmware.
	// Firmware other than iPXE is offered nothing.
	Exit
	// Config is the ramdisk's: the URL that it posts its question to.
	Config
)

// Boot is the caller's decision about one client. The zero value is silence.
type Boot struct {
	Kind Kind
	// Name is the file's name for TFTP, at most 127 bytes, for all firmware
	// that does not fetch by HTTP.
	Name string
	// URL is for UEFI HTTP boot, for iPXE (in the place of Name), and for
	// Config. Absolute, with an address for its host, at most 255 bytes.
	URL string
	// Lease makes the answer a full DHCP server's one.
	Lease *Lease
	// Reason says in a few words why, for the trace.
	Reason string
}

// DefaultLeaseTime is how long a fixed address is given for. A machine in its
// ramdisk renews it twice in that time; one that was switched off keeps nothing
// from anyone, because the address is its own.
const DefaultLeaseTime = time.Hour

// Lease is one fixed address (RFC 2131 section 4.3.1). IPv4 only.
type Lease struct {
	Address netip.Prefix
	Router  netip.Addr   // may be the zero Addr
	DNS     []netip.Addr // at most 8
	Time    time.Duration
}

// maxDNS is more than any resolver asks.
const maxDNS = 8

func (l *Lease) check() error {
	if !l.Address.IsValid() || !l.Address.Addr().Is4() || !l.Address.Addr().IsGlobalUnicast() {
		return fmt.Errorf("the listed address %s is not an IPv4 host with its prefix length", l.Address)
	}
	if l.Router.IsValid() && !l.Router.Is4() {
		return fmt.Errorf("the listed router %s is not IPv4", l.Router)
	}
	if len(l.DNS) > maxDNS {
		return fmt.Errorf("%d name servers are listed; at most %d", len(l.DNS), maxDNS)
	}
	for _, a := range l.DNS {
		if !a.Is4() {
			return fmt.Errorf("the listed name server %s is not IPv4", a)
		}
	}
	return nil
}

func (l *Lease) seconds() uint32 {
	d := l.Time
	if d <= 0 {
		d = DefaultLeaseTime
	}
	return uint32(min(d/time.Second, 1<<31))
}

// maxURL is what one DHCP option holds. RFC 3396 could split a longer one, but
// firmware does not read that.
const maxURL = 255

// checkURL wants what firmware can use without a name server.
func checkURL(s string) error {
	if len(s) > maxURL {
		return fmt.Errorf("the URL is %d bytes long; at most %d", len(s), maxURL)
	}
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return fmt.Errorf("%q is not an absolute http URL", s)
	}
	if _, err := netip.ParseAddr(u.Hostname()); err != nil {
		return fmt.Errorf("the URL %q needs an address for its host: a proxy offer brings no name server", s)
	}
	return nil
}

var errNothing = errors.New("nothing to boot for this machine")
