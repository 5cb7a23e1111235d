package netcfg

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/bcd/supervisor"
)

const (
	// exchangeWithin bounds an exchange: two questions of 14 s each.
	exchangeWithin = 30 * time.Second
	// complainEvery is how often a machine without a network says so.
	complainEvery = 30 * time.Second
	// maxNICs bounds what is configured; no server has as many.
	maxNICs = 128
)

// Options for [NewService]. The zero value does DHCP on every NIC.
type Options struct {
	Log *slog.Logger
	// Static configures NICs without DHCP.
	Static []Static
	// ResolvConf is the file for the name servers. "" means /etc/resolv.conf.
	ResolvConf string
}

// Static is the configuration of a NIC that does not use DHCP.
type Static struct {
	// Match is the name or the MAC address of the NIC.
	Match   string
	Address netip.Prefix
	Router  netip.Addr // may be unset
	DNS     []netip.Addr
	NTP     []netip.Addr
	Search  []string
	MTU     int // 0: leave it
}

func (s Static) lease(now time.Time) Lease {
	l := Lease{Address: s.Address, DNS: s.DNS, NTP: s.NTP, Search: s.Search, MTU: s.MTU,
		Acquired: now, T1: Infinite, T2: Infinite, Length: Infinite}
	if s.Router.IsValid() {
		l.Routes = []Route{{defaultRoute, s.Router}}
	}
	return l
}

// Service configures the network. It is a supervisor service named "network"
// that signals ready as soon as a NIC has an address that reaches further than
// its link.
type Service struct {
	log    *slog.Logger
	opts   Options
	host   host
	dhcp   exchanger
	lo     func() error
	jitter func() float64

	mu   sync.Mutex
	nics map[int]*NICStatus
}

// NICStatus is one NIC's state, for people and the doctor.
type NICStatus struct {
	Name      string `json:"name"`
	MAC       string `json:"mac"`
	Index     int    `json:"index"`
	Carrier   bool   `json:"carrier"`
	Phase     Phase  `json:"phase"`
	Static    bool   `json:"static,omitempty"`
	Lease     *Lease `json:"lease,omitempty"`
	IPv6      bool   `json:"ipv6"` // it has a global address
	LastError string `json:"last_error,omitempty"`
}

// NewService makes the service for this machine.
func NewService(o Options) *Service {
	s := &Service{log: o.Log, opts: o, host: kernel{}, dhcp: dhcp{}, lo: loopbackUp, nics: map[int]*NICStatus{}}
	if s.log == nil {
		s.log = slog.Default()
	}
	if s.opts.ResolvConf == "" {
		s.opts.ResolvConf = "/etc/resolv.conf"
	}
	return s
}

// Name implements supervisor.Service.
func (s *Service) Name() string { return "network" }

// SignalsReady tells the supervisor to wait for this service's word before it
// starts those that need it.
func (s *Service) SignalsReady() {}

// worker is the goroutine of one NIC.
type worker struct {
	nic    nic
	links  chan link
	last   link // the worker's own: the last that it took from links
	cancel context.CancelFunc
	done   chan struct{}
}

// Run implements supervisor.Service. It leaves addresses in place when it ends:
// a supervisor that is started again must not cut its machine off.
func (s *Service) Run(ctx context.Context) error {
	if err := s.lo(); err != nil {
		s.log.Warn("loopback", "err", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	links, err := s.host.links(ctx)
	if err != nil {
		return err
	}
	workers := map[int]*worker{}
	defer func() {
		cancel()
		for _, w := range workers {
			<-w.done
		}
	}()
	complain := time.NewTicker(complainEvery)
	defer complain.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-complain.C:
			s.complain(ctx)
		case l, ok := <-links:
			if !ok {
				if ctx.Err() != nil {
					return nil
				}
				return errors.New("the kernel's reports about links ended")
			}
			s.see(ctx, workers, l)
		}
	}
}

// see gives a link's news to its worker, which it starts or ends as needed.
func (s *Service) see(ctx context.Context, workers map[int]*worker, l link) {
	w := workers[l.index]
	// A renamed NIC, as by udev, starts afresh: sockets are bound by name.
	if w != nil && (l.gone || w.nic.name != l.name || w.nic.mac.String() != l.mac.String()) {
		w.cancel()
		<-w.done
		delete(workers, l.index)
		s.forget(l.index)
		w = nil
	}
	if l.gone {
		return
	}
	if w == nil {
		if len(workers) >= maxNICs {
			return
		}
		wctx, cancel := context.WithCancel(ctx)
		w = &worker{nic: l.nic, links: make(chan link, 1), last: link{nic: l.nic}, cancel: cancel, done: make(chan struct{})}
		workers[l.index] = w
		s.set(l.nic, func(st *NICStatus) { st.Phase = NoLink })
		go func() {
			defer close(w.done)
			s.keep(wctx, w)
		}()
	}
	// Only the latest counts; the worker may be busy.
	select {
	case <-w.links:
	default:
	}
	w.links <- l
}

// keep serves a NIC, again and again with a growing back-off if that fails: a NIC
// without its firmware must not stop the others.
func (s *Service) keep(ctx context.Context, w *worker) {
	run := supervisor.Recovered(supervisor.Func(w.nic.name, func(ctx context.Context) error { return s.serve(ctx, w) }))
	failures := 0
	for {
		began := time.Now()
		err := run.Run(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			err = errors.New("ended by itself")
		}
		var wait time.Duration
		failures, wait = supervisor.Backoff{Rand: s.jitter}.Next(failures, time.Since(began))
		s.log.Warn("network interface failed", "interface", w.nic.name, "again_in", wait.Round(time.Millisecond), "err", err)
		s.set(w.nic, func(st *NICStatus) { st.LastError = err.Error() })
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		// The next round has to hear of the link too.
		select {
		case w.links <- w.last:
		default: // there is newer news
		}
	}
}

// set changes a NIC's status.
func (s *Service) set(n nic, change func(*NICStatus)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.nics[n.index]
	if st == nil {
		st = &NICStatus{Name: n.name, MAC: n.mac.String(), Index: n.index}
		s.nics[n.index] = st
	}
	change(st)
}

func (s *Service) forget(index int) {
	s.mu.Lock()
	delete(s.nics, index)
	s.mu.Unlock()
	s.writeResolv()
}

// Status gives a copy of every NIC's state, in the order of the interfaces.
func (s *Service) Status() []NICStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]NICStatus, 0, len(s.nics))
	for _, st := range s.nics {
		c := *st
		if st.Lease != nil {
			l := *st.Lease
			c.Lease = &l
		}
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b NICStatus) int { return a.Index - b.Index })
	return out
}

// Leases gives the leases there are, in the order of the interfaces.
func (s *Service) Leases() []Lease {
	var out []Lease
	for _, st := range s.Status() {
		if st.Lease != nil {
			out = append(out, *st.Lease)
		}
	}
	return out
}

// NTPServers gives those of all leases, each once; clock.Options.DHCPServers
// takes it.
func (s *Service) NTPServers() []string {
	var out []string
	for _, l := range s.Leases() {
		for _, a := range l.NTP {
			if t := a.String(); !slices.Contains(out, t) {
				out = append(out, t)
			}
		}
	}
	return out
}

func (s *Service) writeResolv() {
	if err := replaceFile(s.opts.ResolvConf, resolvConf(s.Leases())); err != nil {
		s.log.Warn("name servers", "err", err)
	}
}

// complain says, while no NIC has an address, what each is waiting for. A NIC
// with IPv6 only is noticed here too.
func (s *Service) complain(ctx context.Context) {
	var waiting []string
	for _, st := range s.Status() {
		if st.Lease != nil || st.IPv6 {
			return
		}
		text := st.Name + ": "
		switch {
		case !st.Carrier:
			text += "no link"
		case st.LastError != "":
			text += st.LastError
		default:
			text += string(st.Phase)
		}
		waiting = append(waiting, text)
	}
	if len(waiting) == 0 {
		waiting = []string{"no network interface was found; is its module in the image?"}
	}
	if ctx.Err() == nil {
		s.log.Warn("no network yet", "interfaces", strings.Join(waiting, "; "))
	}
}
