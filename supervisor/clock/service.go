package clock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/beevik/ntp"

	"github.com/better-compute/bcd/supervisor"
)

const (
	// maxServers are asked at a time.
	maxServers = 4
	// queryWithin bounds one question.
	queryWithin = 3 * time.Second
	// Until the first answer, waits double between these; a DHCP lease with
	// servers in it may come at any time.
	firstRetry = time.Second
	lastRetry  = 64 * time.Second
	// pollEvery is the wait between questions once synchronised (RFC 5905
	// section 7.2: 2^10 s is the default maximum).
	pollEvery = 1024 * time.Second
	// staleAfter without an answer the clock no longer counts as synchronised.
	staleAfter = 4 * pollEvery
	// saveEvery is how often the last good time is written down: one small write
	// an hour bounds what a power cut loses.
	saveEvery = time.Hour
)

// Options for [NewService].
type Options struct {
	Log *slog.Logger
	// BuildTime of the image. Without it and without StatePath nothing can be
	// told about a wrong hardware clock.
	BuildTime time.Time
	// StatePath is a file for the last good time; "" where nothing lasts.
	StatePath string
	// Servers are NTP servers, host or host:port, asked before those of DHCP.
	Servers []string
	// DHCPServers, if not nil, gives those of DHCP (option 42) as they are now;
	// netcfg.Service.NTPServers is meant for it.
	DHCPServers func() []string
}

// Service keeps the clock. It is a supervisor service named "clock" that
// signals ready as soon as the clock is not below the floor.
type Service struct {
	log     *slog.Logger
	opts    Options
	machine machine
	query   func(server string) (Sample, error)
	jitter  func() float64

	mu     sync.Mutex
	floor  time.Time // zero until Run has found it
	status Status
	good   bool      // the clock has been confirmed by NTP or a server
	lastOK time.Time // of NTP, monotonic
}

// machine is the clock of the machine.
type machine interface {
	now() time.Time
	step(time.Time) error
	slew(time.Duration) error
	rtc() (time.Time, error)
	setRTC(time.Time) error
}

// Status is what is known about the clock, for people and the doctor.
type Status struct {
	Floor        time.Time     `json:"floor"`
	Source       string        `json:"source"` // where the time last came from
	Synchronised bool          `json:"synchronised"`
	Server       string        `json:"server,omitempty"`
	Offset       time.Duration `json:"offset_ns"` // at the last answer
	LastError    string        `json:"last_error,omitempty"`
}

// NewService makes the service for this machine's clock.
func NewService(o Options) *Service {
	s := &Service{log: o.Log, opts: o, machine: kernel{}, query: queryNTP, jitter: rand.Float64}
	if s.log == nil {
		s.log = slog.Default()
	}
	if s.opts.DHCPServers == nil {
		s.opts.DHCPServers = func() []string { return nil }
	}
	return s
}

// Name implements supervisor.Service.
func (s *Service) Name() string { return "clock" }

// SignalsReady tells the supervisor to wait for this service's word before it
// starts those that need it.
func (s *Service) SignalsReady() {}

// Run implements supervisor.Service.
func (s *Service) Run(ctx context.Context) error {
	if err := s.begin(); err != nil {
		return err
	}
	supervisor.NotifyReady(ctx)
	defer s.save()
	retry := firstRetry
	lastSave := time.Now()
	for {
		wait := retry
		if s.ask() {
			retry = firstRetry
			wait = pollEvery
		} else if servers := s.servers(); len(servers) > 0 {
			retry = min(2*retry, lastRetry)
		}
		if time.Since(lastSave) >= saveEvery {
			s.save()
			lastSave = time.Now()
		}
		// Up to a tenth more, so that a rack does not ask in step.
		timer := time.NewTimer(wait + time.Duration(s.jitter()*float64(wait)/10))
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		}
	}
}

// begin finds the floor and sets the clock if it is below.
func (s *Service) begin() error {
	e := Evidence{Build: s.opts.BuildTime, System: s.machine.now()}
	var err error
	if e.LastGood, err = readLastGood(s.opts.StatePath); err != nil {
		s.log.Warn("the last good time is not known", "err", err)
	}
	if e.RTC, err = s.machine.rtc(); err != nil {
		s.log.Info("no hardware clock", "err", err)
	}
	t, source, step := e.Start()
	s.mu.Lock()
	s.floor = e.Floor()
	s.status.Floor, s.status.Source = s.floor, source
	s.mu.Unlock()
	if !step {
		return nil
	}
	if err := s.machine.step(t); err != nil {
		return fmt.Errorf("set the clock to the %s, %s: %w", source, stamp(t), err)
	}
	s.log.Warn("the clock was wrong and has been set", "was", stamp(e.System), "now", stamp(t), "from", source)
	return nil
}

// servers gives the configured servers and those of DHCP, each once.
func (s *Service) servers() []string {
	var out []string
	for _, name := range slices.Concat(s.opts.Servers, s.opts.DHCPServers()) {
		if name != "" && !slices.Contains(out, name) && len(out) < maxServers {
			out = append(out, name)
		}
	}
	return out
}

// ask asks all servers at once and follows what they say; false if none gave a
// time that can be believed.
func (s *Service) ask() bool {
	servers := s.servers()
	samples := make([]Sample, len(servers))
	errs := make([]error, len(servers))
	var wg sync.WaitGroup
	for i, name := range servers {
		wg.Go(func() { samples[i], errs[i] = s.query(name) })
	}
	wg.Wait()
	var good []Sample
	for i := range servers {
		if errs[i] == nil {
			good = append(good, samples[i])
		}
	}
	best, ok := Choose(good)
	if !ok {
		s.failed(errors.Join(errs...))
		return false
	}
	if err := s.follow(best); err != nil {
		s.failed(fmt.Errorf("ntp server %s: %w", best.Server, err))
		return false
	}
	return true
}

func (s *Service) failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status.Synchronised && time.Since(s.lastOK) > staleAfter {
		s.status.Synchronised = false
		s.log.Warn("the clock is no longer synchronised")
	}
	if err == nil {
		return // no servers are no fault
	}
	text := strings.ReplaceAll(err.Error(), "\n", "; ")
	if text != s.status.LastError {
		s.log.Info("no time from ntp", "err", text)
	}
	s.status.LastError = text
}

// follow moves the clock by a sample.
func (s *Service) follow(best Sample) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.machine.now()
	t := now.Add(best.Offset)
	action, err := Judge(now, s.floor, t)
	if err != nil {
		return err
	}
	switch action {
	case Step:
		if err := s.machine.step(t); err != nil {
			return fmt.Errorf("set the clock: %w", err)
		}
		s.log.Info("clock set by ntp", "server", best.Server, "offset", best.Offset)
		s.writeRTC(t)
	case Slew:
		if err := s.machine.slew(best.Offset); err != nil {
			return fmt.Errorf("slew the clock: %w", err)
		}
	}
	if !s.status.Synchronised {
		s.log.Info("clock synchronised", "server", best.Server, "offset", best.Offset)
	}
	s.good, s.lastOK = true, time.Now()
	s.status.Synchronised, s.status.Source, s.status.Server = true, "ntp", best.Server
	s.status.Offset, s.status.LastError = best.Offset, ""
	return nil
}

// ServerTime is told the time that came over an authenticated session. It sets
// the clock only while NTP does not, and never below the floor; the error says
// why a time was not believed, which is worth a condition.
func (s *Service) ServerTime(t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.machine.now()
	floor := s.floor
	if floor.IsZero() {
		floor = s.opts.BuildTime // Run has not got there yet
	}
	action, err := JudgeServer(now, floor, t, s.status.Synchronised)
	if err != nil {
		return fmt.Errorf("the gateway's time: %w", err)
	}
	if action == Step {
		if err := s.machine.step(t); err != nil {
			return fmt.Errorf("set the clock to the gateway's time: %w", err)
		}
		s.log.Info("clock set by the gateway", "offset", t.Sub(now))
		s.status.Source = "gateway"
		s.writeRTC(t)
	}
	s.good = true
	return nil
}

// writeRTC makes the next boot start right. A machine without one goes on.
func (s *Service) writeRTC(t time.Time) {
	if err := s.machine.setRTC(t); err != nil {
		s.log.Debug("the hardware clock was not set", "err", err)
	}
}

// Status gives a copy of what is known.
func (s *Service) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status
}

// save writes the time down if it is known to be good.
func (s *Service) save() {
	s.mu.Lock()
	good := s.good
	s.mu.Unlock()
	if s.opts.StatePath == "" || !good {
		return
	}
	if err := writeLastGood(s.opts.StatePath, s.machine.now()); err != nil {
		s.log.Warn("the time was not written down", "err", err)
	}
}

// readLastGood reads the file that writeLastGood writes; the zero time if there
// is none.
func readLastGood(path string) (time.Time, error) {
	if path == "" {
		return time.Time{}, nil
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return time.Time{}, nil
	}
	if err != nil {
		return time.Time{}, err
	}
	defer f.Close()
	buf := make([]byte, 64)
	n, err := f.Read(buf)
	if err != nil {
		return time.Time{}, fmt.Errorf("%s: %w", path, err)
	}
	t, err := time.Parse(time.RFC3339, strings.TrimSpace(string(buf[:n])))
	if err != nil {
		return time.Time{}, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}

// writeLastGood replaces the file so that a power cut leaves the old or the new.
func writeLastGood(path string, t time.Time) error {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, ".clock-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // of no effect once it has its name
	_, err = f.WriteString(stamp(t) + "\n")
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// queryNTP asks one server once.
func queryNTP(server string) (Sample, error) {
	r, err := ntp.QueryWithOptions(server, ntp.QueryOptions{Timeout: queryWithin})
	if err != nil {
		return Sample{}, fmt.Errorf("ntp server %s: %w", server, err)
	}
	// Unsynchronised servers, kisses of death, and times that do not add up.
	if err := r.Validate(); err != nil {
		return Sample{}, fmt.Errorf("ntp server %s: %w", server, err)
	}
	return Sample{Server: server, Offset: r.ClockOffset, Error: r.RootDistance}, nil
}
