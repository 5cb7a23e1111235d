package session_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/session"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// gateway is a double: each dial is one link that the test plays.
type gateway struct {
	mu     sync.Mutex
	dials  []time.Time
	epoch  int64
	refuse func() error
	// play is the gateway's side of a link; nil is serve.
	play func(g *gateway, end *session.GatewayEnd)
	// wrap changes the daemon's end.
	wrap func(session.Link) session.Link
	ends []*session.GatewayEnd
	skew time.Duration
	beat time.Duration
	got  []*bcdv1.ClientFrame
	t    []session.Transport
}

func (g *gateway) Dial(ctx context.Context, t session.Transport) (session.Link, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.dials = append(g.dials, time.Now())
	g.t = append(g.t, t)
	if g.refuse != nil {
		if err := g.refuse(); err != nil {
			return nil, err
		}
	}
	link, end := session.Pipe()
	g.ends = append(g.ends, end)
	play := g.play
	if play == nil {
		play = (*gateway).serve
	}
	go play(g, end)
	if g.wrap != nil {
		link = g.wrap(link)
	}
	return link, nil
}

func (g *gateway) now() int64 { return time.Now().Add(g.skew).UnixMilli() }

// serve welcomes and answers heartbeats until the link ends.
func (g *gateway) serve(end *session.GatewayEnd) {
	var epoch int64
	for {
		f, err := end.Receive()
		if err != nil {
			return
		}
		g.mu.Lock()
		g.got = append(g.got, f)
		switch {
		case f.GetHello() != nil:
			g.epoch = max(g.epoch, f.GetHello().GetLastEpoch()) + 1
			epoch = g.epoch
			end.Send(g.welcome(epoch))
		case f.GetHeartbeat() != nil:
			end.Send(&bcdv1.ServerFrame{Epoch: epoch, Body: &bcdv1.ServerFrame_Heartbeat{Heartbeat: &bcdv1.HeartbeatAnswer{
				Sequence: f.GetHeartbeat().GetSequence(), ServerTimeMs: g.now()}}})
		}
		g.mu.Unlock()
	}
}

func (g *gateway) welcome(epoch int64) *bcdv1.ServerFrame {
	return &bcdv1.ServerFrame{Epoch: epoch, Body: &bcdv1.ServerFrame_Welcome{Welcome: &bcdv1.Welcome{
		Epoch: epoch, ServerTimeMs: g.now(), HeartbeatIntervalMs: int32(g.beat.Milliseconds()), ReconnectSpreadMs: 10000, Gateway: "gw"}}}
}

// agent is a handler that remembers.
type agent struct {
	mu     sync.Mutex
	ups    []time.Time
	downs  []error
	downAt []time.Time
	frames []*bcdv1.ServerFrame
}

func (a *agent) Hello() *bcdv1.Hello         { return &bcdv1.Hello{NodeId: "node_a"} }
func (a *agent) Heartbeat() *bcdv1.Heartbeat { return &bcdv1.Heartbeat{} }
func (a *agent) Prove(c *bcdv1.IdentityChallenge) (*bcdv1.IdentityProof, error) {
	return &bcdv1.IdentityProof{Signature: c.GetNonce()}, nil
}
func (a *agent) Up(*bcdv1.Welcome) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ups = append(a.ups, time.Now())
}
func (a *agent) Down(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.downs, a.downAt = append(a.downs, err), append(a.downAt, time.Now())
}
func (a *agent) Refused(*bcdv1.Reject) {}
func (a *agent) Frame(f *bcdv1.ServerFrame) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.frames = append(a.frames, f)
}

func (a *agent) counts() (ups, downs, frames int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.ups), len(a.downs), len(a.frames)
}

func run(t *testing.T, g *gateway, config session.Config) (*session.Session, *agent) {
	t.Helper()
	a := &agent{}
	if config.Random == nil {
		config.Random = func() float64 { return 0.5 }
	}
	s := session.New(session.Deps{Config: config, Dialer: g, Handler: a, Clock: clock.System(), Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { s.Run(ctx); close(done) }()
	t.Cleanup(func() {
		cancel()
		<-done
		g.mu.Lock()
		defer g.mu.Unlock()
		for _, end := range g.ends {
			end.Close()
		}
	})
	synctest.Wait()
	return s, a
}

func wait(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestHealthy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gateway{}
		s, a := run(t, g, session.Config{})
		wait(time.Hour)
		if ups, downs, _ := a.counts(); ups != 1 || downs != 0 {
			t.Fatalf("an hour of health: %d ups, %d downs", ups, downs)
		}
		status := s.Status()
		if !status.Connected || status.Epoch != 1 || status.MarkAge > 20*time.Second || status.Gateway != "gw" {
			t.Fatalf("status: %+v", status)
		}
		if now, ok := s.ServerTime(); !ok || time.Until(now).Abs() > time.Millisecond {
			t.Fatalf("server time %s, %v", now, ok)
		}
		beats := 0
		for _, f := range g.got {
			if f.GetHeartbeat() != nil {
				beats++
				if f.GetEpoch() != 1 {
					t.Fatalf("a heartbeat of epoch %d", f.GetEpoch())
				}
			}
		}
		if beats < 218 || beats > 267 { // 3600 s at 15 s ±10 %
			t.Fatalf("%d heartbeats in an hour", beats)
		}
	})
}

// stuck is a link whose Send blocks, as on a path where nothing is read.
type stuck struct {
	session.Link
	after  time.Time
	closed chan struct{}
	once   sync.Once
}

func (s *stuck) Send(f *bcdv1.ClientFrame) error {
	if time.Now().Before(s.after) {
		return s.Link.Send(f)
	}
	<-s.closed
	return errors.New("closed")
}

func (s *stuck) Close() {
	s.once.Do(func() { close(s.closed) })
	s.Link.Close()
}

// TestSilence: a path that swallows everything is noticed within the bound, on
// a Send that blocks too.
func TestSilence(t *testing.T) {
	for name, wrap := range map[string]bool{"mute": false, "blocked send": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := &gateway{}
				mute := time.Now().Add(time.Minute)
				g.play = func(g *gateway, end *session.GatewayEnd) {
					if time.Now().Before(mute) {
						f, _ := end.Receive()
						if f.GetHello() == nil {
							return
						}
						g.mu.Lock()
						g.epoch++
						epoch := g.epoch
						end.Send(g.welcome(epoch))
						g.mu.Unlock()
						for time.Now().Before(mute) {
							f, err := end.Receive()
							if err != nil {
								return
							}
							if time.Now().Before(mute) && f.GetHeartbeat() != nil {
								end.Send(&bcdv1.ServerFrame{Epoch: epoch, Body: &bcdv1.ServerFrame_Heartbeat{Heartbeat: &bcdv1.HeartbeatAnswer{ServerTimeMs: g.now()}}})
							}
						}
						return
					}
					g.serve(end)
				}
				if wrap {
					first := true
					g.wrap = func(l session.Link) session.Link {
						if !first {
							return l
						}
						first = false
						return &stuck{Link: l, after: mute, closed: make(chan struct{})}
					}
				}
				_, a := run(t, g, session.Config{})
				wait(2 * time.Minute)
				a.mu.Lock()
				defer a.mu.Unlock()
				if len(a.downs) != 1 || !errors.Is(a.downs[0], session.ErrSilent) {
					t.Fatalf("downs: %v", a.downs)
				}
				if late := a.downAt[0].Sub(mute); late > session.SilenceBound {
					t.Fatalf("noticed after %s", late)
				}
				if len(a.ups) != 2 {
					t.Fatalf("%d ups", len(a.ups))
				}
			})
		})
	}
}

func TestBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refused := errors.New("connection refused")
		g := &gateway{refuse: func() error { return refused }}
		s, a := run(t, g, session.Config{Random: func() float64 { return 1 - 1e-9 }})
		wait(10 * time.Minute)
		g.mu.Lock()
		var gaps []time.Duration
		for n := 1; n < len(g.dials); n++ {
			gaps = append(gaps, g.dials[n].Sub(g.dials[n-1]).Round(time.Second))
		}
		g.mu.Unlock()
		want := []time.Duration{1, 2, 4, 8, 16, 32, 60, 60}
		for n, w := range want {
			if gaps[n] != w*time.Second {
				t.Fatalf("gaps %v, want them to begin with %v seconds", gaps, want)
			}
		}
		if s.Status().LastError != "connection refused" || s.Status().Class != "network" {
			t.Fatalf("status: %+v", s.Status())
		}
		// A new identity is tried at once, and begins anew.
		g.mu.Lock()
		before := len(g.dials)
		refused = nil
		g.mu.Unlock()
		s.IdentityChanged(context.Background())
		synctest.Wait()
		if ups, _, _ := a.counts(); ups != 1 || len(g.dials) != before+1 {
			t.Fatalf("a new identity: %d ups, %d dials", ups, len(g.dials)-before)
		}
	})
}

func TestRejects(t *testing.T) {
	for _, c := range []struct {
		code     bcdv1.RejectCode
		retry    time.Duration
		min, max time.Duration
	}{
		{bcdv1.RejectCode_REJECT_CODE_BUSY, 20 * time.Second, 20 * time.Second, 30 * time.Second},
		{bcdv1.RejectCode_REJECT_CODE_REVOKED, 0, 0, time.Second},
		{bcdv1.RejectCode_REJECT_CODE_DUPLICATE_IDENTITY, 5 * time.Minute, 5 * time.Minute, 450 * time.Second},
	} {
		t.Run(session.RejectWord(c.code), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := &gateway{play: func(g *gateway, end *session.GatewayEnd) {
					end.Receive()
					end.Send(&bcdv1.ServerFrame{Critical: true, Body: &bcdv1.ServerFrame_Reject{Reject: &bcdv1.Reject{Code: c.code, RetryAfterMs: int32(c.retry.Milliseconds()), Detail: "because"}}})
				}}
				s, a := run(t, g, session.Config{Random: rand.New(rand.NewPCG(1, 2)).Float64})
				var reject *session.RejectError
				if got := s.Status().LastError; got != (&session.RejectError{Reject: &bcdv1.Reject{Code: c.code, Detail: "because"}}).Error() {
					t.Fatalf("last error %q", got)
				}
				_ = reject
				wait(c.max + time.Second)
				g.mu.Lock()
				defer g.mu.Unlock()
				if len(g.dials) < 2 {
					t.Fatalf("not tried again within %s", c.max)
				}
				if gap := g.dials[1].Sub(g.dials[0]); gap < c.min || gap > c.max {
					t.Fatalf("tried again after %s, want %s to %s", gap, c.min, c.max)
				}
				if ups, _, _ := a.counts(); ups != 0 {
					t.Fatal("up in spite of a Reject")
				}
			})
		})
	}
}

func TestDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gateway{}
		s, a := run(t, g, session.Config{})
		wait(time.Minute)
		g.mu.Lock()
		first := g.ends[0]
		g.mu.Unlock()
		first.Send(&bcdv1.ServerFrame{Epoch: 1, Body: &bcdv1.ServerFrame_Drain{Drain: &bcdv1.Drain{SpreadMs: 8000}}})
		wait(time.Second)
		if !s.Status().Connected || s.Status().Epoch != 1 {
			t.Fatal("the old session ended before the new one was made")
		}
		wait(10 * time.Second)
		ups, downs, _ := a.counts()
		if ups != 2 || downs != 0 || s.Status().Epoch != 2 {
			t.Fatalf("make before break: %d ups, %d downs, %+v", ups, downs, s.Status())
		}
		if _, err := first.Receive(); err != nil && !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		// A frame of the old epoch has no effect.
		g.mu.Lock()
		second := g.ends[1]
		g.mu.Unlock()
		second.Send(&bcdv1.ServerFrame{Epoch: 1, Body: &bcdv1.ServerFrame_OutcomeAck{OutcomeAck: &bcdv1.OutcomeAck{CommandId: "cmd_a"}}})
		second.Send(&bcdv1.ServerFrame{Epoch: 2, Body: &bcdv1.ServerFrame_OutcomeAck{OutcomeAck: &bcdv1.OutcomeAck{CommandId: "cmd_b"}}})
		synctest.Wait()
		if _, _, frames := a.counts(); frames != 1 || s.Status().StaleFrames != 1 {
			t.Fatalf("%d frames, %+v", frames, s.Status())
		}
	})
}

// A renewal while the session lives makes another one on the new certificate
// before the old one ends.
func TestRenewedWhileConnected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gateway{}
		s, a := run(t, g, session.Config{})
		wait(time.Minute)
		s.IdentityChanged(t.Context())
		wait(time.Second)
		ups, downs, _ := a.counts()
		if ups != 2 || downs != 0 || !s.Status().Connected || s.Status().Epoch != 2 {
			t.Fatalf("make before break: %d ups, %d downs, %+v", ups, downs, s.Status())
		}
		wait(time.Minute)
		if ups, _, _ := a.counts(); ups != 2 {
			t.Fatalf("%d sessions after one renewal", ups)
		}
	})
}

func TestSkew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gateway{}
		s, a := run(t, g, session.Config{TimeFloor: time.Now()})
		wait(time.Minute)
		g.mu.Lock()
		g.skew = 10 * time.Minute // the gateway's clock leaps
		g.mu.Unlock()
		wait(time.Minute)
		ups, downs, _ := a.counts()
		if ups != 1 || downs != 1 {
			t.Fatalf("%d ups, %d downs after the leap", ups, downs)
		}
		if now, _ := s.ServerTime(); time.Until(now).Abs() > time.Millisecond {
			t.Fatalf("server time went to %s, it is %s", now, time.Now())
		}
		if s.Status().Class != "auth" {
			t.Fatalf("status: %+v", s.Status())
		}
	})
}

func TestProtocol(t *testing.T) {
	unknown := func(critical bool) *bcdv1.ServerFrame { return &bcdv1.ServerFrame{Epoch: 1, Critical: critical} }
	synctest.Test(t, func(t *testing.T) {
		g := &gateway{}
		s, a := run(t, g, session.Config{})
		g.ends[0].Send(unknown(false))
		synctest.Wait()
		if s.Status().UnknownFrames != 1 || !s.Status().Connected {
			t.Fatalf("an unknown frame: %+v", s.Status())
		}
		g.ends[0].Send(&bcdv1.ServerFrame{Epoch: 1, Body: &bcdv1.ServerFrame_Probe{Probe: &bcdv1.Probe{Sequence: 7}}})
		g.ends[0].Send(&bcdv1.ServerFrame{Epoch: 1, Body: &bcdv1.ServerFrame_IdentityChallenge{IdentityChallenge: &bcdv1.IdentityChallenge{Nonce: []byte("n")}}})
		synctest.Wait()
		g.ends[0].Send(unknown(true))
		synctest.Wait()
		if _, downs, _ := a.counts(); downs != 1 || s.Status().Connected {
			t.Fatalf("a critical unknown frame: %+v", s.Status())
		}
		var probe, proof, goodbye bool
		for _, f := range g.got {
			probe = probe || f.GetProbeAnswer().GetSequence() == 7
			proof = proof || string(f.GetIdentityProof().GetSignature()) == "n"
			goodbye = goodbye || f.GetGoodbye() != nil
		}
		if !probe || !proof || !goodbye {
			t.Fatalf("probe answered %v, challenge answered %v, goodbye %v", probe, proof, goodbye)
		}
	})
}

func TestOldEpochRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gateway{play: func(g *gateway, end *session.GatewayEnd) {
			end.Receive()
			end.Send(g.welcome(5))
		}}
		_, a := run(t, g, session.Config{LastEpoch: 5})
		if ups, _, _ := a.counts(); ups != 0 {
			t.Fatal("took a session of an epoch it has seen")
		}
	})
}

// TestHerd: after a gateway's death its nodes come back spread over the window
// it named.
func TestHerd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const nodes = 500
		dead := time.Now().Add(2 * time.Minute)
		var gateways []*gateway
		for n := range nodes {
			g := &gateway{}
			gateways = append(gateways, g)
			run(t, g, session.Config{Random: rand.New(rand.NewPCG(uint64(n), 1)).Float64})
		}
		time.Sleep(time.Until(dead))
		for _, g := range gateways {
			g.ends[0].Close()
		}
		wait(15 * time.Second)
		second := map[int]int{}
		for _, g := range gateways {
			if len(g.dials) < 2 {
				t.Fatal("a node did not come back within the window")
			}
			second[int(g.dials[1].Sub(dead)/time.Second)]++
		}
		for at, n := range second {
			if n > nodes/10*2 { // 10 s window: 50 a second on average
				t.Errorf("%d of %d nodes came in second %d", n, nodes, at)
			}
		}
	})
}

func TestFallback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gateway{}
		broken := true
		g.refuse = func() error {
			if g.t[len(g.t)-1] == session.HTTP2 && broken {
				return &session.DialError{NoHTTP2: true, Err: errors.New("ALPN is http/1.1")}
			}
			return nil
		}
		s, a := run(t, g, session.Config{Fallback: true})
		wait(time.Second)
		if !s.Status().Connected || s.Status().Transport != "websocket" {
			t.Fatalf("status: %+v", s.Status())
		}
		wait(61 * time.Minute) // probed, and still broken: the session stays
		if ups, downs, _ := a.counts(); ups != 1 || downs != 0 || len(g.t) != 3 || g.t[2] != session.HTTP2 {
			t.Fatalf("%d ups, %d downs, dials %v", ups, downs, g.t)
		}
		g.mu.Lock()
		broken = false
		g.mu.Unlock()
		wait(61 * time.Minute)
		if ups, downs, _ := a.counts(); ups != 2 || downs != 0 || s.Status().Transport != "http2" {
			t.Fatalf("%d ups, %d downs, %+v", ups, downs, s.Status())
		}
	})
}
