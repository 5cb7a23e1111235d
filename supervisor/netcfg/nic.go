package netcfg

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/better-compute/bcd/supervisor"
)

// look6 is how often a NIC without an IPv4 lease is looked at for IPv6: an
// address by SLAAC takes the kernel a few seconds.
const look6 = 2 * time.Second

// serve is the life of one NIC: it owns its Client, its timer and its exchange.
func (s *Service) serve(ctx context.Context, w *worker) error {
	if err := s.host.up(w.nic); err != nil {
		return err
	}
	if st, ok := s.static(w.nic); ok {
		return s.serveStatic(ctx, w, st)
	}
	p := &port{Service: s, worker: w, client: NewClient(s.jitter), results: make(chan any)}
	defer p.stop()
	timer := time.NewTimer(look6)
	defer timer.Stop()
	var event any = Tick{}
	for {
		do, wake := p.client.Step(time.Now(), event)
		for _, d := range do {
			if err := p.do(ctx, d); err != nil {
				return err
			}
		}
		p.publish(ctx)
		timer.Reset(p.sleep(wake))
		select {
		case <-ctx.Done():
			return nil
		case l := <-w.links:
			w.last = l
			event = Tick{}
			if l.carrier != p.carrier {
				p.carrier = l.carrier
				event = LinkDown{}
				if l.carrier {
					event = LinkUp{}
				}
				s.log.Info("link", "interface", w.nic.name, "mac", w.nic.mac.String(), "up", l.carrier)
			}
		case event = <-p.results:
		case <-timer.C:
			event = Tick{}
		}
	}
}

// port is a NIC with DHCP.
type port struct {
	*Service
	*worker
	client  *Client
	carrier bool
	six     bool
	results chan any
	abort   context.CancelFunc // of the exchange in progress
	ended   chan struct{}      // closed when it has
}

// sleep is how long nothing has to be done.
func (p *port) sleep(wake time.Time) time.Duration {
	d := time.Hour // only to give the timer a value: without a wake nothing changes with time
	if !wake.IsZero() {
		d = max(0, time.Until(wake))
	}
	if p.carrier && p.client.Lease() == nil && !p.six {
		d = min(d, look6)
	}
	return d
}

// do does what the client decided.
func (p *port) do(ctx context.Context, d any) error {
	switch d := d.(type) {
	case Acquire:
		p.exchange(ctx, d.Exchange, func(ctx context.Context) (Lease, error) { return p.dhcp.acquire(ctx, p.nic) })
	case Renew:
		p.exchange(ctx, d.Exchange, func(ctx context.Context) (Lease, error) { return p.dhcp.extend(ctx, p.nic, d.Lease, false) })
	case Rebind:
		p.exchange(ctx, d.Exchange, func(ctx context.Context) (Lease, error) { return p.dhcp.extend(ctx, p.nic, d.Lease, true) })
	case Cancel:
		p.stop()
	case Configure:
		if err := p.host.configure(p.nic, d.Lease); err != nil {
			return err // a start afresh is the best that can be done
		}
		p.log.Info("address", "interface", p.nic.name, "mac", p.nic.mac.String(), "address", d.Lease.Address,
			"server", d.Lease.Server, "lease", d.Lease.Length.Round(time.Second))
		p.set(p.nic, func(st *NICStatus) { l := d.Lease; st.Lease = &l })
		p.writeResolv()
	case Deconfigure:
		p.log.Warn("address lost", "interface", p.nic.name, "mac", p.nic.mac.String(), "address", d.Lease.Address, "why", d.Why)
		p.set(p.nic, func(st *NICStatus) { st.Lease = nil })
		p.writeResolv()
		return p.host.deconfigure(p.nic, d.Lease)
	}
	return nil
}

// exchange runs f beside the NIC's loop; its end comes back as an event.
func (p *port) exchange(ctx context.Context, number int, f func(context.Context) (Lease, error)) {
	p.stop()
	ctx, cancel := context.WithTimeout(ctx, exchangeWithin)
	p.abort, p.ended = cancel, make(chan struct{})
	ended := p.ended
	go func() {
		defer close(ended)
		var lease Lease
		run := supervisor.Recovered(supervisor.Func("dhcp", func(ctx context.Context) (err error) {
			lease, err = f(ctx)
			return err
		}))
		err := run.Run(ctx)
		var event any = Answered{number, lease}
		switch {
		case errors.Is(err, errRefused):
			event = Refused{number}
		case err != nil:
			event = Unanswered{number}
		}
		if err != nil && ctx.Err() == nil {
			p.complainOf(err)
		}
		select {
		case p.results <- event:
		case <-ctx.Done():
			// Cancelled, or over its time: then the loop must still hear of it.
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				p.results <- event
			}
		}
	}()
}

// complainOf notes an error, and logs it when it is news: an empty network would
// otherwise fill the console.
func (p *port) complainOf(err error) {
	text := strings.ReplaceAll(err.Error(), "\n", "; ")
	p.set(p.nic, func(st *NICStatus) {
		if st.LastError != text {
			p.log.Info("no answer", "err", text)
		}
		st.LastError = text
	})
}

// stop cancels the exchange in progress and waits for its end.
func (p *port) stop() {
	if p.abort == nil {
		return
	}
	p.abort()
	for {
		select {
		case <-p.ended:
			p.abort = nil
			return
		case <-p.results: // its end, which nobody wants to hear
		}
	}
}

// publish shows how the NIC stands.
func (p *port) publish(ctx context.Context) {
	lease := p.client.Lease()
	if lease == nil && p.carrier {
		p.six = p.host.global6(p.nic)
	}
	p.set(p.nic, func(st *NICStatus) {
		st.Phase, st.Carrier, st.IPv6 = p.client.Phase(), p.carrier, p.six
		if lease != nil {
			st.LastError = ""
		}
	})
	if lease != nil || p.six {
		supervisor.NotifyReady(ctx)
	}
}

// static finds a NIC's static configuration.
func (s *Service) static(n nic) (Static, bool) {
	for _, st := range s.opts.Static {
		if st.Match == n.name || strings.EqualFold(st.Match, n.mac.String()) {
			return st, true
		}
	}
	return Static{}, false
}

// serveStatic keeps a static configuration; it is set again when the link comes
// back, since someone may have taken it away.
func (s *Service) serveStatic(ctx context.Context, w *worker, st Static) error {
	lease := st.lease(time.Now())
	s.set(w.nic, func(n *NICStatus) { n.Static = true })
	for {
		select {
		case <-ctx.Done():
			return nil
		case l := <-w.links:
			w.last = l
			s.set(w.nic, func(n *NICStatus) { n.Carrier = l.carrier })
			if !l.carrier {
				s.set(w.nic, func(n *NICStatus) { n.Phase = NoLink })
				continue
			}
			if err := s.host.configure(w.nic, lease); err != nil {
				return err
			}
			s.set(w.nic, func(n *NICStatus) { c := lease; n.Lease, n.Phase = &c, Bound })
			s.writeResolv()
			supervisor.NotifyReady(ctx)
		}
	}
}
