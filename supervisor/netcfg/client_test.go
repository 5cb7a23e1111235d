package netcfg

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// play drives a client through time; answer is its network.
type play struct {
	t      *testing.T
	c      *Client
	began  time.Time
	now    time.Time
	wake   time.Time
	story  []string
	answer func(p *play, d any) any // the event that ends an exchange, nil for cancelled
	held   *Lease                   // what is configured
}

func newPlay(t *testing.T, answer func(*play, any) any) *play {
	now := time.Unix(1_000_000, 0)
	return &play{t: t, c: NewClient(func() float64 { return 0.5 }), began: now, now: now, answer: answer}
}

func lease(addr string, acquired time.Time, length time.Duration) Lease {
	return Lease{
		Address: netip.MustParsePrefix(addr), Server: netip.MustParseAddr("10.0.0.1"),
		Acquired: acquired, T1: length / 2, T2: length / 8 * 7, Length: length,
	}
}

// give an event, and do what it leads to. An exchange ends 14 s later when
// nothing answers and at once when something does.
func (p *play) give(event any) {
	p.t.Helper()
	do, wake := p.c.Step(p.now, event)
	p.wake = wake
	var next any
	for _, d := range do {
		text := strings.TrimPrefix(fmt.Sprintf("%T", d), "netcfg.")
		switch d := d.(type) {
		case Configure:
			l := d.Lease
			p.held = &l
			text += " " + d.Lease.Address.String()
		case Deconfigure:
			p.held = nil
			text += " " + d.Why
		case Acquire, Renew, Rebind:
			next = p.answer(p, d)
		}
		p.story = append(p.story, fmt.Sprintf("%s %s", p.now.Sub(p.began).Round(time.Second), text))
	}
	if next == nil {
		return
	}
	if _, ok := next.(Unanswered); ok {
		// Time may bring something while the question is out.
		end := p.now.Add(14 * time.Second)
		for !p.wake.IsZero() && p.wake.Before(end) {
			p.now = p.wake
			p.give(Tick{})
		}
		p.now = end
	}
	p.give(next)
}

// until lets time go by.
func (p *play) until(d time.Duration) {
	p.t.Helper()
	end := p.began.Add(d)
	for !p.wake.IsZero() && !p.wake.After(end) {
		if !p.wake.After(p.now) && p.now != p.wake {
			p.t.Fatalf("asked to be woken in the past: %s at %s", p.wake, p.now)
		}
		p.now = p.wake
		p.give(Tick{})
	}
	if p.now.Before(end) {
		p.now = end
	}
}

func (p *play) want(story ...string) {
	p.t.Helper()
	if !slices.Equal(p.story, story) {
		p.t.Errorf("got\n  %s\nwant\n  %s", strings.Join(p.story, "\n  "), strings.Join(story, "\n  "))
	}
	p.story = nil
}

// number of an exchange.
func number(d any) int {
	switch d := d.(type) {
	case Acquire:
		return d.Exchange
	case Renew:
		return d.Exchange
	case Rebind:
		return d.Exchange
	}
	return 0
}

// willing answers everything with an hour's lease.
func willing(p *play, d any) any {
	return Answered{number(d), lease("10.0.0.5/24", p.now, time.Hour)}
}

func deaf(p *play, d any) any { return Unanswered{number(d)} }

func TestAcquireAndRenewForEver(t *testing.T) {
	p := newPlay(t, willing)
	p.give(LinkUp{})
	p.want("0s Acquire", "0s Configure 10.0.0.5/24")
	p.until(95 * time.Minute)
	p.want("30m0s Renew", "30m0s Configure 10.0.0.5/24", "1h0m0s Renew", "1h0m0s Configure 10.0.0.5/24",
		"1h30m0s Renew", "1h30m0s Configure 10.0.0.5/24")
	if p.c.Phase() != Bound {
		t.Errorf("phase %s", p.c.Phase())
	}
}

// go-dhclient PR#8: an error while renewing kept the client from rebinding.
func TestASilentServerLeadsToRebindingAndExpiry(t *testing.T) {
	p := newPlay(t, willing)
	p.give(LinkUp{})
	p.answer = deaf
	p.story = nil
	p.until(61 * time.Minute)
	p.want(
		// half of what is left until T2 at 52m30s, at least a minute
		"30m0s Renew", "41m22s Renew", "47m3s Renew", "49m54s Renew", "51m19s Renew", "52m30s Rebind",
		// half of what is left until the end, at least a minute
		"56m22s Rebind", "58m18s Rebind", "59m32s Rebind", "1h0m0s Deconfigure it expired",
		"1h0m0s Acquire", "1h0m16s Acquire", "1h0m34s Acquire", "1h0m56s Acquire",
	)
	if p.held != nil || p.c.Phase() != Selecting {
		t.Errorf("holds %v, phase %s", p.held, p.c.Phase())
	}
}

func TestAnotherServerAnswersTheRebind(t *testing.T) {
	p := newPlay(t, willing)
	p.give(LinkUp{})
	p.answer = func(p *play, d any) any {
		if _, ok := d.(Rebind); ok {
			return willing(p, d)
		}
		return deaf(p, d)
	}
	p.story = nil
	p.until(53 * time.Minute)
	if last := p.story[len(p.story)-1]; last != "52m30s Configure 10.0.0.5/24" || p.c.Phase() != Bound {
		t.Errorf("%s, phase %s", last, p.c.Phase())
	}
}

func TestARefusalMeansStartingOver(t *testing.T) {
	p := newPlay(t, willing)
	p.give(LinkUp{})
	p.answer = func(p *play, d any) any {
		if _, ok := d.(Renew); ok {
			return Refused{number(d)}
		}
		return Answered{number(d), lease("10.0.0.6/24", p.now, time.Hour)}
	}
	p.story = nil
	p.until(31 * time.Minute)
	p.want("30m0s Renew", "30m0s Deconfigure a server refused it", "30m1s Acquire", "30m1s Configure 10.0.0.6/24")
}

func TestAnotherAddressReplacesTheFirst(t *testing.T) {
	p := newPlay(t, willing)
	p.give(LinkUp{})
	p.answer = func(p *play, d any) any { return Answered{number(d), lease("10.0.0.9/24", p.now, time.Hour)} }
	p.story = nil
	p.until(31 * time.Minute)
	p.want("30m0s Renew", "30m0s Deconfigure the server gave another address", "30m0s Configure 10.0.0.9/24")
}

func TestNoServerIsAskedEverMoreSeldom(t *testing.T) {
	p := newPlay(t, deaf)
	p.give(LinkUp{})
	p.until(5 * time.Minute)
	// 14 s of asking, then 2, 4, 8, 16, 32, 64 s of waiting.
	p.want("0s Acquire", "16s Acquire", "34s Acquire", "56s Acquire", "1m26s Acquire", "2m12s Acquire", "3m30s Acquire", "4m48s Acquire")
}

func TestLinkLossAndReturn(t *testing.T) {
	p := newPlay(t, willing)
	p.give(LinkUp{})
	p.give(LinkUp{}) // said twice
	p.until(10 * time.Minute)
	p.give(LinkDown{})
	p.until(20 * time.Minute)
	if p.held == nil || p.c.Phase() != NoLink {
		t.Errorf("holds %v, phase %s", p.held, p.c.Phase())
	}
	p.story = nil
	p.give(LinkUp{})
	p.want("20m0s Rebind", "20m0s Configure 10.0.0.5/24")

	// The cable is in another network now, whose server says no.
	p.give(LinkDown{})
	p.answer = func(p *play, d any) any {
		if _, ok := d.(Rebind); ok {
			return Refused{number(d)}
		}
		return Answered{number(d), lease("192.168.7.7/24", p.now, time.Hour)}
	}
	p.give(LinkUp{})
	p.until(21 * time.Minute)
	p.want("20m0s Rebind", "20m0s Deconfigure a server refused it", "20m1s Acquire", "20m1s Configure 192.168.7.7/24")

	// The server does not answer: the lease's own times hold.
	p.give(LinkDown{})
	p.answer = deaf
	p.give(LinkUp{})
	p.until(50 * time.Minute)
	p.want("21m0s Rebind")
	if p.c.Phase() != Bound {
		t.Errorf("phase %s", p.c.Phase())
	}
	p.until(51 * time.Minute)
	p.want("50m1s Renew")
}

func TestALeaseExpiresWithoutALink(t *testing.T) {
	p := newPlay(t, willing)
	p.give(LinkUp{})
	p.give(LinkDown{})
	p.until(3 * time.Hour)
	p.want("0s Acquire", "0s Configure 10.0.0.5/24", "1h0m0s Deconfigure it expired")
}

func TestLinkLossCancelsAndLateAnswersAreNotHeard(t *testing.T) {
	p := newPlay(t, func(*play, any) any { return nil })
	p.give(LinkUp{})
	p.give(LinkDown{})
	p.give(Answered{1, lease("10.0.0.5/24", p.now, time.Hour)})
	p.give(Refused{1})
	p.give(Unanswered{1})
	p.want("0s Acquire", "0s Cancel")
	p.give(LinkUp{})
	p.give(Answered{1, lease("10.0.0.5/24", p.now, time.Hour)}) // of the first
	p.give(Answered{2, lease("10.0.0.6/24", p.now, time.Hour)})
	p.give(Answered{2, lease("10.0.0.7/24", p.now, time.Hour)}) // twice
	p.want("0s Acquire", "0s Configure 10.0.0.6/24")
}

func TestAnInfiniteLeaseIsKept(t *testing.T) {
	p := newPlay(t, func(p *play, d any) any {
		l := lease("10.0.0.5/24", p.now, time.Hour)
		l.Length, l.T1, l.T2 = Infinite, Infinite, Infinite
		return Answered{number(d), l}
	})
	p.give(LinkUp{})
	if !p.wake.IsZero() {
		t.Errorf("wants to be woken at %s", p.wake)
	}
	p.until(1000 * time.Hour)
	p.want("0s Acquire", "0s Configure 10.0.0.5/24")
}

// Whatever a network does: at most one exchange at a time, an address is never
// held past its end, and a client with a link always has something to wait for.
func TestClientProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(1_000_000, 0)
		c := NewClient(func() float64 { return rapid.Float64Range(0, 0.999).Draw(t, "jitter") })
		var open int // the exchange in progress
		var held *Lease
		link := false
		var wake time.Time
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			var event any = Tick{}
			switch rapid.IntRange(0, 9).Draw(t, "event") {
			case 0:
				event, link = LinkUp{}, true
			case 1:
				event, link = LinkDown{}, false
			case 2, 3:
				length := rapid.SampledFrom([]time.Duration{30 * time.Second, 2 * time.Minute, time.Hour, Infinite}).Draw(t, "length")
				l := lease(rapid.SampledFrom([]string{"10.0.0.5/24", "10.0.0.6/24"}).Draw(t, "addr"), now, length)
				if length == Infinite {
					l.T1, l.T2 = Infinite, Infinite
				}
				event = Answered{open, l}
			case 4:
				event = Refused{open}
			case 5:
				event = Unanswered{open}
			case 6:
				event = Answered{open - 1, lease("10.9.9.9/24", now, time.Hour)} // a late one
			default:
				if !wake.IsZero() {
					now = wake
				}
			}
			ends := 0
			switch e := event.(type) {
			case Answered:
				ends = e.Exchange
			case Refused:
				ends = e.Exchange
			case Unanswered:
				ends = e.Exchange
			}
			if ends == open {
				open = 0
			}
			var do []any
			do, wake = c.Step(now, event)
			for _, d := range do {
				switch d := d.(type) {
				case Acquire, Renew, Rebind:
					if open != 0 {
						t.Fatalf("exchange %d begins while %d is open", number(d), open)
					}
					open = number(d)
				case Cancel:
					if open == 0 {
						t.Fatal("nothing to cancel")
					}
					open = 0
				case Configure:
					l := d.Lease
					held = &l
				case Deconfigure:
					if held == nil || held.Address != d.Lease.Address {
						t.Fatalf("takes away %v, holds %v", d.Lease.Address, held)
					}
					held = nil
				}
			}
			if held != nil && held.Length != Infinite && !now.Before(held.Expires()) {
				t.Fatalf("holds %v at %s, past its end", held, now)
			}
			if link && open == 0 && wake.IsZero() && (held == nil || held.Length != Infinite) {
				t.Fatal("nothing to wait for")
			}
			if !wake.IsZero() && !wake.After(now) {
				t.Fatalf("to be woken at %s, now is %s", wake, now)
			}
		}
	})
}
