package gateway_test

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/coder/websocket"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/gateway"
)

func isLost(e *bcdv1.TimelineEntry) bool { return e.GetType() == "lost" }

// TestClone: two machines with one identity never alternate. The first one
// answers the probe, so the second is kept out.
func TestClone(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	first := m.connect(nil)
	second := m.dial()
	reject := second.hello(func(h *bcdv1.Hello) { h.BootId = "boot-of-the-clone" }).GetReject()
	if reject.GetCode() != bcdv1.RejectCode_REJECT_CODE_DUPLICATE_IDENTITY || reject.GetRetryAfterMs() < 60000 || !strings.Contains(reject.GetDetail(), "join --reset") {
		t.Errorf("the clone got %v", reject)
	}
	w.ping("a")
	first.command()
	if timeline := w.machine("a").GetTimeline(); !hasEntry(timeline, "duplicate", "second machine") {
		t.Error(dump(timeline))
	}
}

// TestGhost: a machine that rebooted in a moment must not wait for its own
// ghost longer than the probe takes.
func TestGhost(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	ghost := m.dial()
	ghost.mute = true
	ghost.hello(nil)
	begin := time.Now()
	d := m.connect(func(h *bcdv1.Hello) { h.BootId, h.JournalId = "boot-2", "journal-2" })
	if took := time.Since(begin); took < 2*time.Second {
		t.Errorf("taken over after %v, before the probe could be answered", took)
	}
	for ghost.next() != nil {
	}
	d.heartbeat()
}

// proxy is a path that can turn black: it takes bytes and lets none out.
type proxy struct {
	net.Listener
	black atomic.Bool
	conns sync.Map
}

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{Listener: listener}
	var copies sync.WaitGroup
	copies.Go(func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return
			}
			to, err := net.Dial("tcp", target)
			if err != nil {
				from.Close()
				continue
			}
			p.conns.Store(from, nil)
			p.conns.Store(to, nil)
			copies.Go(func() { p.copy(to, from) })
			copies.Go(func() { p.copy(from, to) })
		}
	})
	t.Cleanup(func() {
		listener.Close()
		p.conns.Range(func(c, _ any) bool {
			c.(net.Conn).Close()
			return true
		})
		copies.Wait()
	})
	return p
}

func (p *proxy) copy(to, from net.Conn) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if p.black.Load() {
			// No FIN, no RST, and nothing read any more.
			return
		}
		if n > 0 {
			if _, err := to.Write(buffer[:n]); err != nil {
				from.Close()
				return
			}
		}
		if err != nil {
			to.Close()
			return
		}
	}
}

func (p *proxy) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "tcp", p.Addr().String())
}

// TestBlackHole: a path that swallows everything is noticed by the pings, also
// while the gateway is blocked in a send.
func TestBlackHole(t *testing.T) {
	for _, flood := range []bool{false, true} {
		name := map[bool]string{false: "idle", true: "while sending"}[flood]
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.stop()
			w.start(func(g *gateway.Gateway) { g.SetPings(300*time.Millisecond, 200*time.Millisecond) })
			defer w.stop()
			m := w.join("a", node)
			p := newProxy(t, strings.TrimPrefix(w.url, "https://"))
			d := m.dialOver(w.clientVia(m, p.dial))
			d.hello(nil)
			d.heartbeat()
			p.black.Store(true)
			if flood {
				w.floodSpecs("a", 2, 3<<20)
			}
			begin := time.Now()
			w.waitFor("lost", isLost)
			if took := time.Since(begin); took > 5*time.Second {
				t.Errorf("noticed after %v", took)
			}
		})
	}
}

// floodSpecs sets n specs of about size bytes.
func (w *world) floodSpecs(machine string, n, size int) {
	w.t.Helper()
	for range n {
		// Random, because the stream compresses what is large.
		value := make([]byte, size/2)
		rand.Read(value)
		_, err := w.op.ApplySpec(w.t.Context(), connect.NewRequest(&bcdv1.ApplySpecRequest{Machine: machine, Spec: &bcdv1.NodeSpec{
			Host: &bcdv1.HostSpec{Sysctl: map[string]string{"k": hex.EncodeToString(value)}},
		}}))
		if err != nil {
			w.t.Fatal(err)
		}
	}
}

// TestSlowReader: one that does not read is ended when its bounded queue is
// full, and nobody else waits for it meanwhile.
func TestSlowReader(t *testing.T) {
	w := newWorld(t)
	w.stop()
	w.start(func(g *gateway.Gateway) { g.SetOutbox(256 << 10) })
	defer w.stop()
	slow, other := w.join("slow", node), w.join("other", node)
	// A client with small windows, so that little data makes it slow.
	client := w.client(slow)
	client.Transport.(*http.Transport).HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerStream: 64 << 10, MaxReceiveBufferPerConnection: 64 << 10}
	s := slow.dialOver(client)
	if err := s.stream.Send(slow.helloFrame(nil)); err != nil {
		t.Fatal(err)
	}
	w.waitFor("connected", func(e *bcdv1.TimelineEntry) bool { return e.GetType() == "connected" })
	d := other.connect(nil)
	for w.g.Sessions() == 2 {
		w.floodSpecs("slow", 1, 40<<10)
		w.ping("other")
		d.outcome(d.command().GetId(), succeeded, "")
	}
	e := w.waitFor("lost", isLost)
	if !strings.Contains(e.GetMessage(), "slow") {
		t.Errorf("lost because: %s", e.GetMessage())
	}
	d.heartbeat()
}

// TestClientsThatVanish: sessions that are cut while the gateway writes to
// them. A late write would panic the whole process.
func TestClientsThatVanish(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	for range 20 {
		w.ping("a")
	}
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			for range 10 {
				d := m.dial()
				if d.stream.Send(m.helloFrame(nil)) != nil {
					continue
				}
				_, _ = d.stream.Receive()
				d.close()
			}
		})
	}
	for range 20 {
		w.ping("a")
	}
	group.Wait()
	// Whoever comes last is served.
	d := m.connect(nil)
	d.heartbeat()
}

func TestDrain(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	d := m.connect(nil)
	stopped := make(chan struct{})
	go func() {
		w.stop()
		close(stopped)
	}()
	expect(d, "Drain", func(f *bcdv1.ServerFrame) (bool, bool) {
		return true, f.GetDrain().GetReason() != "" && f.GetDrain().GetSpreadMs() > 0
	})
	// The daemon goes elsewhere; the gateway need not wait out its limit.
	d.close()
	select {
	case <-stopped:
	case <-time.After(patience):
		t.Fatal("the gateway does not stop")
	}
}

// TestStateSurvivesRestart: the next process knows what the last one promised.
func TestStateSurvivesRestart(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	d := m.connect(nil)
	c := w.ping("a")
	d.command()
	d.accept(c.GetId())
	d.heartbeat()
	d.close()
	w.stop()
	w.start()
	d = m.connect(func(h *bcdv1.Hello) { h.LastEpoch = d.epoch })
	if d.epoch < 2 {
		t.Errorf("epoch %d after a restart", d.epoch)
	}
	if again := d.command(); again.GetId() != c.GetId() {
		t.Errorf("redelivered %s, want %s", again.GetId(), c.GetId())
	}
	w.stop()
}

// socket is a session over WebSocket from the daemon's side.
func (m *member) socket(certificate bool) *websocket.Conn {
	t := m.w.t
	t.Helper()
	as := m
	if !certificate {
		as = nil
	}
	client := m.w.client(as)
	transport := client.Transport.(*http.Transport)
	transport.ForceAttemptHTTP2 = false
	transport.TLSClientConfig.NextProtos = []string{"http/1.1"}
	conn, _, err := websocket.Dial(t.Context(), m.w.url+"/v1/ws", &websocket.DialOptions{HTTPClient: client})
	if err != nil {
		t.Fatal(err)
	}
	conn.SetReadLimit(5 << 20)
	t.Cleanup(func() { conn.CloseNow() })
	return conn
}

func wsSend(t *testing.T, conn *websocket.Conn, frame *bcdv1.ClientFrame) {
	t.Helper()
	data, err := proto.Marshal(frame)
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.Write(t.Context(), websocket.MessageBinary, data); err != nil {
		t.Fatal(err)
	}
}

func wsReceive(t *testing.T, conn *websocket.Conn) *bcdv1.ServerFrame {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, data, err := conn.Read(ctx)
	if err != nil {
		t.Fatal(err)
	}
	frame := new(bcdv1.ServerFrame)
	if err := proto.Unmarshal(data, frame); err != nil {
		t.Fatal(err)
	}
	return frame
}

func TestWebSocket(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	conn := m.socket(true)
	wsSend(t, conn, m.helloFrame(nil))
	welcome := wsReceive(t, conn).GetWelcome()
	if welcome == nil {
		t.Fatal("no Welcome over WebSocket")
	}
	c := w.ping("a")
	if wsReceive(t, conn).GetCommand() == nil {
		t.Fatal("no command over WebSocket")
	}
	wsSend(t, conn, &bcdv1.ClientFrame{Epoch: welcome.GetEpoch(), Body: &bcdv1.ClientFrame_Outcome{Outcome: &bcdv1.Outcome{CommandId: c.GetId(), Status: succeeded}}})
	if got := wsReceive(t, conn).GetOutcomeAck().GetCommandId(); got != c.GetId() {
		t.Errorf("acknowledged %q", got)
	}
	conn.Close(websocket.StatusNormalClosure, "")
	w.waitFor("lost", isLost)

	t.Run("a refusal arrives", func(t *testing.T) {
		conn := m.socket(true)
		wsSend(t, conn, m.helloFrame(func(h *bcdv1.Hello) { h.ProtocolMin = 9; h.ProtocolMax = 9 }))
		if got := wsReceive(t, conn).GetReject().GetCode(); got != bcdv1.RejectCode_REJECT_CODE_UPGRADE_REQUIRED {
			t.Errorf("rejected with %v", got)
		}
		if _, _, err := conn.Read(t.Context()); websocket.CloseStatus(err) != websocket.StatusNormalClosure {
			t.Errorf("then: %v", err)
		}
	})
	t.Run("garbage", func(t *testing.T) {
		conn := m.socket(true)
		if err := conn.Write(t.Context(), websocket.MessageBinary, []byte("\xff\xff\xff")); err != nil {
			t.Fatal(err)
		}
		if _, _, err := conn.Read(t.Context()); err == nil {
			t.Error("garbage was answered")
		}
	})
}

// TestInnerAuth: TLS ended on the way, and the node proves its key inside.
func TestInnerAuth(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	other := w.join("b", node)
	prove := func(signer *member) *bcdv1.ServerFrame {
		conn := m.socket(false)
		wsSend(t, conn, m.helloFrame(nil))
		challenge := wsReceive(t, conn).GetIdentityChallenge()
		if len(challenge.GetNonce()) < 16 {
			t.Fatalf("challenge %v", challenge)
		}
		message := append(append([]byte{}, challenge.GetNonce()...), challenge.GetGateway()...)
		signature, err := pki.SignStatement(signer.key, pki.DomainInnerAuth, message)
		if err != nil {
			t.Fatal(err)
		}
		wsSend(t, conn, &bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_IdentityProof{IdentityProof: &bcdv1.IdentityProof{Signature: signature, CertificateChain: m.chain}}})
		return wsReceive(t, conn)
	}
	if got := prove(m); got.GetWelcome() == nil {
		t.Errorf("with a good proof: %v", got)
	}
	if got := prove(other); got.GetReject() == nil {
		t.Errorf("with another node's proof: %v", got)
	}
}

func TestTrustIsPublic(t *testing.T) {
	w := newWorld(t)
	for path, want := range map[string]string{"roots.pem": string(w.keys.Roots.PEM()), "join-encryption.jwk": string(w.keys.JoinJWK)} {
		answer := w.do(w.client(nil), "GET", w.url+"/v1/trust/"+path, nil, nil)
		body, err := io.ReadAll(answer.Body)
		if err != nil || string(body) != want {
			t.Errorf("%s: %q, %v", path, body, err)
		}
	}
}
