package clock

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/better-compute/bcd/supervisor"
)

// fake is a machine's clock: an offset from the bubble's.
type fake struct {
	mu     sync.Mutex
	offset time.Duration
	steps  int
	slews  []time.Duration
	hw     time.Time
	hwErr  error
	setHW  time.Time
}

func (f *fake) now() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return time.Now().Add(f.offset)
}

func (f *fake) step(t time.Time) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.offset = time.Until(t)
	f.steps++
	return nil
}

func (f *fake) slew(d time.Duration) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.slews = append(f.slews, d)
	return nil
}

func (f *fake) rtc() (time.Time, error)  { return f.hw, f.hwErr }
func (f *fake) setRTC(t time.Time) error { f.setHW = t; return nil }

// at makes a clock that shows t.
func at(t time.Time) *fake { return &fake{offset: time.Until(t), hw: t} }

// The bubbles of synctest begin at 2000-01-01, which is the truth here.
var truth = func() time.Time { return time.Now() }

func newTest(o Options, f *fake, query func(string) (Sample, error)) *Service {
	o.Log = slog.New(slog.NewTextHandler(io.Discard, nil))
	s := NewService(o)
	s.machine, s.query, s.jitter = f, query, func() float64 { return 0 }
	return s
}

// honest answers with the truth.
func honest(f *fake) func(string) (Sample, error) {
	return func(name string) (Sample, error) {
		return Sample{Server: name, Offset: truth().Sub(f.now()), Error: time.Millisecond}, nil
	}
}

func start(t *testing.T, s *Service) (sup *supervisor.Supervisor, stop func()) {
	t.Helper()
	sup = supervisor.New(supervisor.Options{Log: s.log})
	if err := sup.Add(s); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- sup.Run(ctx) }()
	synctest.Wait()
	return sup, func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

func TestAMachineFrom1970GetsASaneClockAndThenTheTruth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := at(time.Unix(86400, 0))
		build := truth().Add(-30 * 24 * time.Hour)
		var mu sync.Mutex
		var dhcp []string
		s := newTest(Options{BuildTime: build, DHCPServers: func() []string {
			mu.Lock()
			defer mu.Unlock()
			return dhcp
		}}, f, honest(f))
		sup, stop := start(t, s)
		if !sup.Snapshot()[0].Ready {
			t.Error("not ready, although the floor needs no network")
		}
		if d := f.now().Sub(build); d < 0 || d > time.Second {
			t.Errorf("the clock is at %s, want the build time %s", f.now(), build)
		}
		if st := s.Status(); st.Synchronised || st.Source != "build time of the image" {
			t.Errorf("status %+v", st)
		}
		time.Sleep(time.Minute)
		mu.Lock()
		dhcp = []string{"10.0.0.1"}
		mu.Unlock()
		time.Sleep(2 * time.Second)
		if st := s.Status(); !st.Synchronised || st.Server != "10.0.0.1" || st.Source != "ntp" {
			t.Errorf("status %+v", st)
		}
		if d := absolute(f.now().Sub(truth())); d > time.Millisecond {
			t.Errorf("off by %s", d)
		}
		if f.setHW.IsZero() {
			t.Error("the hardware clock was left wrong")
		}
		stop()
	})
}

func TestAnNTPServerCannotGoBelowTheFloor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := at(truth())
		s := newTest(Options{BuildTime: truth().Add(-time.Hour), Servers: []string{"bad"}}, f, func(name string) (Sample, error) {
			return Sample{Server: name, Offset: -2 * time.Hour}, nil
		})
		_, stop := start(t, s)
		time.Sleep(time.Hour)
		if st := s.Status(); st.Synchronised || !strings.Contains(st.LastError, "bad") || !strings.Contains(st.LastError, "before") {
			t.Errorf("status %+v", st)
		}
		if f.steps != 0 {
			t.Error("the clock was set")
		}
		stop()
	})
}

func TestItKeepsTryingAndNoticesSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := at(truth().Add(-time.Minute))
		var mu sync.Mutex
		reachable, asked := false, 0
		good := honest(f)
		s := newTest(Options{BuildTime: truth().Add(-time.Hour), Servers: []string{"a"}}, f, func(name string) (Sample, error) {
			mu.Lock()
			defer mu.Unlock()
			asked++
			if !reachable {
				return Sample{}, errors.New("no route")
			}
			return good(name)
		})
		_, stop := start(t, s)
		time.Sleep(10 * time.Minute)
		mu.Lock()
		if asked < 10 || asked > 20 {
			t.Errorf("asked %d times in ten minutes, want a back-off to 64 s", asked)
		}
		reachable = true
		mu.Unlock()
		time.Sleep(65 * time.Second)
		if !s.Status().Synchronised {
			t.Errorf("status %+v", s.Status())
		}
		mu.Lock()
		reachable = false
		mu.Unlock()
		time.Sleep(pollEvery + staleAfter + 2*time.Minute)
		if st := s.Status(); st.Synchronised || st.LastError == "" {
			t.Errorf("still synchronised: %+v", st)
		}
		stop()
	})
}

func TestServerTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := at(truth().Add(-10 * time.Minute))
		s := newTest(Options{BuildTime: truth().Add(-time.Hour)}, f, nil)
		_, stop := start(t, s)
		if err := s.ServerTime(truth()); err != nil || f.now().Sub(truth()) != 0 || s.Status().Source != "gateway" {
			t.Errorf("%v, off by %s, %+v", err, f.now().Sub(truth()), s.Status())
		}
		if err := s.ServerTime(truth().Add(-2 * time.Hour)); err == nil {
			t.Error("a time below the floor was believed")
		}
		if err := s.ServerTime(truth().Add(time.Second)); err != nil || f.steps != 1 {
			t.Errorf("%v, %d steps: a second is the session's own delay", err, f.steps)
		}
		stop()
	})
}

func TestTheLastGoodTimeIsKept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "clock")
	synctest.Test(t, func(t *testing.T) {
		build := truth().Add(-1000 * time.Hour)
		f := at(time.Unix(0, 0))
		s := newTest(Options{BuildTime: build, StatePath: path, Servers: []string{"a"}}, f, honest(f))
		_, stop := start(t, s)
		time.Sleep(3 * time.Hour)
		stop()
		// The next boot, with a dead battery and no network.
		f = at(time.Unix(0, 0))
		s = newTest(Options{BuildTime: build, StatePath: path}, f, nil)
		_, stop = start(t, s)
		if d := absolute(f.now().Sub(truth())); d > 2*time.Second || s.Status().Source != "last good time" {
			t.Errorf("off by %s, %+v", d, s.Status())
		}
		stop()
	})
}

// What was never confirmed must not become a floor.
func TestAnUnconfirmedTimeIsNotWrittenDown(t *testing.T) {
	path := filepath.Join(t.TempDir(), "clock")
	synctest.Test(t, func(t *testing.T) {
		f := at(truth())
		s := newTest(Options{BuildTime: truth(), StatePath: path}, f, nil)
		_, stop := start(t, s)
		time.Sleep(3 * time.Hour)
		stop()
	})
	if _, err := os.Stat(path); err == nil {
		t.Error("a file was written")
	}
}

func TestReadLastGoodRefusesRubbish(t *testing.T) {
	path := filepath.Join(t.TempDir(), "clock")
	for _, text := range []string{"", "yesterday", strings.Repeat("2", 1000)} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := readLastGood(path); err == nil {
			t.Errorf("%.20q: %s", text, got)
		}
	}
}

// A server of a few lines, over a real socket (RFC 5905 section 7.3).
func TestQueryNTP(t *testing.T) {
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	const ahead = 1000 * time.Second
	go func() {
		buf := make([]byte, 256)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			if n < 48 {
				continue
			}
			out := make([]byte, 48)
			out[0], out[1] = 0x24, 2 // version 4, server; stratum 2
			stamp := func(at int, t time.Time) {
				sec := uint64(t.Unix()+2208988800)<<32 | uint64(t.Nanosecond())<<32/1e9
				for i := range 8 {
					out[at+i] = byte(sec >> (56 - 8*i))
				}
			}
			now := time.Now().Add(ahead)
			stamp(16, now)
			copy(out[24:32], buf[40:48])
			stamp(32, now)
			stamp(40, now)
			if _, err := conn.WriteTo(out, from); err != nil {
				return
			}
		}
	}()
	s, err := queryNTP(conn.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	if absolute(s.Offset-ahead) > 5*time.Second {
		t.Errorf("offset %s, want %s", s.Offset, ahead)
	}
}

func TestTheKernelsClockCanBeRead(t *testing.T) {
	if (kernel{}).now().IsZero() {
		t.Error("no time")
	}
	// A machine may have no RTC; then that must be said.
	if r, err := (kernel{}).rtc(); err == nil && r.Year() < 1970 {
		t.Errorf("rtc %s", r)
	}
}
