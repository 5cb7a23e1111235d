package netcfg

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// Phase is where a lease stands (RFC 2131, figure 5). REQUESTING is part of
// Selecting here, and INIT-REBOOT is not used: a lease does not outlive the
// memory it is in.
type Phase string

const (
	NoLink    Phase = "no link"
	Selecting Phase = "selecting"
	Bound     Phase = "bound"
	Renewing  Phase = "renewing"
	Rebinding Phase = "rebinding"
)

const (
	// Waits between attempts to get a lease; an attempt itself takes up to 14 s
	// (RFC 2131 section 4.1: exponential, up to 64 s, randomised).
	firstWait = 2 * time.Second
	lastWait  = 64 * time.Second
	// minRetry is the least wait between attempts to keep one (section 4.4.5).
	minRetry = 60 * time.Second
	// refusedWait keeps a server that refuses every request from being asked
	// without pause.
	refusedWait = time.Second
)

// Client is the life of one NIC's lease. It decides and does nothing: [Client.Step]
// is told what happened and answers with what to do. Use [NewClient].
type Client struct {
	jitter func() float64

	link     bool
	phase    Phase
	lease    *Lease
	exchange int // the number of the one in progress; 0 when there is none
	last     int // number given out
	attempts int // in a row that failed
	retryAt  time.Time
}

// NewClient makes a client without a link. jitter gives numbers in [0, 1); nil
// means math/rand.
func NewClient(jitter func() float64) *Client {
	if jitter == nil {
		jitter = rand.Float64
	}
	return &Client{jitter: jitter, phase: NoLink}
}

// What may happen.
type (
	LinkUp   struct{}
	LinkDown struct{}
	// Tick is the passing of time; see the Wake that Step returns.
	Tick struct{}
	// Answered ends the exchange of that number with a lease.
	Answered struct {
		Exchange int
		Lease    Lease
	}
	// Refused ends it with a DHCPNAK.
	Refused struct{ Exchange int }
	// Unanswered ends it with nothing that helps.
	Unanswered struct{ Exchange int }
)

// What to do about it.
type (
	// Acquire a lease (DISCOVER, REQUEST), by broadcast.
	Acquire struct{ Exchange int }
	// Renew asks the lease's server, by unicast.
	Renew struct {
		Exchange int
		Lease    Lease
	}
	// Rebind asks any server, by broadcast.
	Rebind struct {
		Exchange int
		Lease    Lease
	}
	// Cancel the exchange in progress; its end will not be heard.
	Cancel struct{}
	// Configure the NIC so, also when it is so already (lifetimes change).
	Configure struct{ Lease Lease }
	// Deconfigure takes away what that lease gave.
	Deconfigure struct {
		Lease Lease
		Why   string
	}
)

// Step takes one event at one time. It returns what to do, in order, and when to
// call it with a Tick at the latest; the zero time means that only another event
// changes anything.
func (c *Client) Step(now time.Time, event any) (do []any, wake time.Time) {
	switch e := event.(type) {
	case LinkUp:
		do = c.linkUp(now)
	case LinkDown:
		c.link = false
		do = c.cancel()
	case Tick:
	case Answered:
		if c.ends(e.Exchange) {
			do = c.answered(e.Lease)
		}
	case Refused:
		if c.ends(e.Exchange) {
			do = c.drop("a server refused it")
			c.retryAt = now.Add(c.spread(refusedWait << min(c.attempts, 6)))
			c.attempts++
		}
	case Unanswered:
		if c.ends(e.Exchange) {
			c.unanswered(now)
		}
	default:
		panic(fmt.Sprintf("netcfg: no rule for a %T", event))
	}
	do = append(do, c.time(now)...)
	return do, c.wake(now)
}

// Phase and Lease say how it stands; the lease is nil when there is none.
func (c *Client) Phase() Phase  { return c.phase }
func (c *Client) Lease() *Lease { return c.lease }

func (c *Client) ends(exchange int) bool {
	if exchange == 0 || exchange != c.exchange {
		return false // it was cancelled
	}
	c.exchange = 0
	return true
}

func (c *Client) cancel() []any {
	if c.exchange == 0 {
		return nil
	}
	c.exchange = 0
	return []any{Cancel{}}
}

func (c *Client) begin() int {
	c.last++
	c.exchange = c.last
	return c.exchange
}

// linkUp starts afresh. With a lease from before, any server of this network is
// asked whether it still holds: the cable may be in another switch now.
func (c *Client) linkUp(now time.Time) []any {
	if c.link {
		return nil
	}
	c.link = true
	c.attempts, c.retryAt = 0, now
	if c.lease == nil {
		return nil
	}
	c.phase = Rebinding
	return []any{Rebind{c.begin(), *c.lease}}
}

func (c *Client) answered(l Lease) (do []any) {
	if c.lease != nil && c.lease.Address != l.Address {
		do = append(do, Deconfigure{*c.lease, "the server gave another address"})
	}
	c.lease, c.phase, c.attempts = &l, Bound, 0
	c.retryAt = time.Time{}
	return append(do, Configure{l})
}

func (c *Client) drop(why string) (do []any) {
	if c.lease != nil {
		do = []any{Deconfigure{*c.lease, why}}
	}
	c.lease, c.phase = nil, Selecting
	return do
}

// unanswered sets the next attempt (RFC 2131 section 4.4.5: half of what is left
// until the next stage, at least a minute).
func (c *Client) unanswered(now time.Time) {
	c.attempts++
	switch {
	case c.lease == nil:
		wait := lastWait
		if shift := c.attempts - 1; shift < 6 {
			wait = min(firstWait<<shift, lastWait)
		}
		c.retryAt = now.Add(c.spread(wait))
	case c.lease.Length == Infinite:
		c.phase, c.retryAt = Bound, time.Time{}
	case now.Before(c.lease.Acquired.Add(c.lease.T1)):
		// The question after a link came back; the lease's own times hold.
		c.phase, c.retryAt = Bound, time.Time{}
	case now.Before(c.lease.Acquired.Add(c.lease.T2)):
		c.phase = Renewing
		c.retryAt = now.Add(max(minRetry, c.lease.Acquired.Add(c.lease.T2).Sub(now)/2))
	default:
		c.retryAt = now.Add(max(minRetry, c.lease.Expires().Sub(now)/2))
	}
}

// time does what the hour has brought.
func (c *Client) time(now time.Time) (do []any) {
	if c.lease != nil && c.lease.Length != Infinite && !now.Before(c.lease.Expires()) {
		do = append(do, c.cancel()...)
		do = append(do, c.drop("it expired")...)
		c.attempts, c.retryAt = 0, now
	}
	if !c.link {
		c.phase = NoLink
		return do
	}
	if c.lease == nil {
		c.phase = Selecting
		if c.exchange == 0 && !now.Before(c.retryAt) {
			do = append(do, Acquire{c.begin()})
		}
		return do
	}
	if c.phase == NoLink {
		c.phase = Bound
	}
	if c.lease.Length == Infinite {
		return do
	}
	switch {
	case !now.Before(c.lease.Acquired.Add(c.lease.T2)):
		// An error while renewing must not keep it from rebinding.
		if c.phase != Rebinding {
			do = append(do, c.cancel()...)
			c.phase, c.retryAt = Rebinding, now
		}
		if c.exchange == 0 && !now.Before(c.retryAt) {
			do = append(do, Rebind{c.begin(), *c.lease})
		}
	case !now.Before(c.lease.Acquired.Add(c.lease.T1)):
		if c.phase == Bound {
			c.phase, c.retryAt = Renewing, now
		}
		if c.exchange == 0 && !now.Before(c.retryAt) {
			do = append(do, Renew{c.begin(), *c.lease})
		}
	}
	return do
}

// wake is when time has something to do next.
func (c *Client) wake(now time.Time) time.Time {
	var next time.Time
	consider := func(t time.Time) {
		if t.After(now) && (next.IsZero() || t.Before(next)) {
			next = t
		}
	}
	if c.link && c.exchange == 0 {
		consider(c.retryAt)
	}
	if c.lease != nil && c.lease.Length != Infinite {
		consider(c.lease.Acquired.Add(c.lease.T1))
		consider(c.lease.Acquired.Add(c.lease.T2))
		consider(c.lease.Expires())
	}
	return next
}

// spread gives d with up to a quarter more or less.
func (c *Client) spread(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.75 + c.jitter()/2))
}
