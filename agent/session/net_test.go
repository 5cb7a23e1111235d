package session_test

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/coder/websocket"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/session"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/api/bcd/v1/bcdv1connect"
)

// These tests use real TLS connections over loopback, and wait on events, never
// on a clock of their own.

// server is a gateway that welcomes, over HTTP/2 and over the WebSocket.
type server struct {
	epoch  atomic.Int64
	up     chan string   // transports of sessions that were welcomed
	ended  chan struct{} // one for each session that ended
	reject *bcdv1.Reject
}

func newServer() *server {
	return &server{up: make(chan string, 16), ended: make(chan struct{}, 16)}
}

func (s *server) Session(ctx context.Context, stream *connect.BidiStream[bcdv1.ClientFrame, bcdv1.ServerFrame]) error {
	defer func() { s.ended <- struct{}{} }()
	return s.serve("http2", stream.Receive, stream.Send)
}

func (s *server) ws(w http.ResponseWriter, r *http.Request) {
	conn, err := websocket.Accept(w, r, nil)
	if err != nil {
		return
	}
	defer conn.CloseNow()
	s.serve("websocket", func() (*bcdv1.ClientFrame, error) {
		_, data, err := conn.Read(r.Context())
		if err != nil {
			return nil, err
		}
		f := new(bcdv1.ClientFrame)
		return f, proto.Unmarshal(data, f)
	}, func(f *bcdv1.ServerFrame) error {
		data, err := proto.Marshal(f)
		if err != nil {
			return err
		}
		return conn.Write(r.Context(), websocket.MessageBinary, data)
	})
}

func (s *server) serve(name string, receive func() (*bcdv1.ClientFrame, error), send func(*bcdv1.ServerFrame) error) error {
	var epoch int64
	for {
		f, err := receive()
		if err != nil {
			return nil
		}
		switch {
		case f.GetHello() != nil && s.reject != nil:
			return send(&bcdv1.ServerFrame{Body: &bcdv1.ServerFrame_Reject{Reject: s.reject}})
		case f.GetHello() != nil:
			epoch = s.epoch.Add(1)
			if err := send(&bcdv1.ServerFrame{Epoch: epoch, Body: &bcdv1.ServerFrame_Welcome{Welcome: &bcdv1.Welcome{
				Epoch: epoch, ServerTimeMs: time.Now().UnixMilli(), HeartbeatIntervalMs: 15000, ReconnectSpreadMs: 1}}}); err != nil {
				return err
			}
			s.up <- name
		}
	}
}

// listen starts a TLS server; h2 says whether it speaks HTTP/2.
func listen(t *testing.T, s *server, h2 bool) *httptest.Server {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle(bcdv1connect.NewSessionServiceHandler(s))
	mux.HandleFunc("/v1/ws", s.ws)
	ts := httptest.NewUnstartedServer(mux)
	ts.EnableHTTP2 = h2
	ts.Config.HTTP2 = &http.HTTP2Config{SendPingTimeout: 200 * time.Millisecond, PingTimeout: 200 * time.Millisecond}
	ts.Config.ErrorLog = slog.NewLogLogger(slog.NewTextHandler(io.Discard, nil), slog.LevelError)
	ts.StartTLS()
	t.Cleanup(ts.Close)
	return ts
}

// dialer dials ts through via, when it is not nil.
func dialer(ts *httptest.Server, via func(context.Context, string, string) (net.Conn, error)) *session.Net {
	return &session.Net{
		URL: ts.URL,
		TLS: &tls.Config{
			InsecureSkipVerify: true,
			VerifyConnection:   func(tls.ConnectionState) error { return nil },
		},
		DialContext: via,
		PingAfter:   200 * time.Millisecond, PingTimeout: 200 * time.Millisecond,
	}
}

// hold runs a session until the test ends.
func hold(t *testing.T, d session.Dialer, fallback bool) (*session.Session, *watcher) {
	t.Helper()
	w := &watcher{up: make(chan struct{}, 16), down: make(chan error, 16), refused: make(chan *bcdv1.Reject, 16)}
	s := session.New(session.Deps{
		Config: session.Config{Random: rand.Float64, Fallback: fallback}, Dialer: d, Handler: w, Clock: clock.System(),
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { s.Run(ctx); close(done) }()
	t.Cleanup(func() { cancel(); <-done })
	return s, w
}

type watcher struct {
	agent
	up      chan struct{}
	down    chan error
	refused chan *bcdv1.Reject
}

func (w *watcher) Up(*bcdv1.Welcome) { w.up <- struct{}{} }

func (w *watcher) Down(err error)           { w.down <- err }
func (w *watcher) Refused(r *bcdv1.Reject)  { w.refused <- r }
func (w *watcher) Frame(*bcdv1.ServerFrame) {}

func TestHTTP2(t *testing.T) {
	s := newServer()
	ts := listen(t, s, true)
	held, w := hold(t, dialer(ts, nil), true)
	if got := <-s.up; got != "http2" {
		t.Fatalf("came over %s", got)
	}
	<-w.up
	// A large frame gets through both ways of flow control.
	held.Send(session.Bulk, &bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Inventory{Inventory: &bcdv1.InventoryReport{
		Sections: []*bcdv1.InventorySection{{Name: "big", CanonicalJson: make([]byte, 2<<20)}}}}})
	ts.CloseClientConnections()
	if err := <-w.down; err == nil {
		t.Fatal("down without a reason")
	}
	if got := <-s.up; got != "http2" {
		t.Fatalf("came back over %s", got)
	}
}

func TestHTTP2Reject(t *testing.T) {
	s := newServer()
	s.reject = &bcdv1.Reject{Code: bcdv1.RejectCode_REJECT_CODE_REVOKED, Detail: "stolen"}
	_, w := hold(t, dialer(listen(t, s, true), nil), false)
	if r := <-w.refused; r.GetDetail() != "stolen" {
		t.Fatalf("refused with %v", r)
	}
}

// TestWebSocketFallback: a gateway behind something that does no HTTP/2.
func TestWebSocketFallback(t *testing.T) {
	s := newServer()
	ts := listen(t, s, false)
	held, _ := hold(t, dialer(ts, nil), true)
	if got := <-s.up; got != "websocket" {
		t.Fatalf("came over %s", got)
	}
	held.Send(session.Bulk, &bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Goodbye{}})
}

// TestHandshakeCut: a middle box that ends the handshake of HTTP/2 alone.
func TestHandshakeCut(t *testing.T) {
	s := newServer()
	ts := listen(t, s, true)
	n := dialer(ts, nil)
	var dials atomic.Int32
	n.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, address)
		if err == nil && dials.Add(1) == 1 {
			return cutConn{conn}, nil
		}
		return conn, err
	}
	hold(t, n, true)
	if got := <-s.up; got != "websocket" {
		t.Fatalf("came over %s", got)
	}
}

// cutConn ends at the first read, as after a reset.
type cutConn struct{ net.Conn }

func (cutConn) Read([]byte) (int, error) { return 0, io.EOF }

// hole is a connection that, once closed to traffic, swallows what is written
// and never reads again: no FIN, no RST.
type hole struct {
	net.Conn
	state *holeState
}

type holeState struct {
	mu      sync.Mutex
	swallow bool
	closed  chan struct{}
	once    sync.Once
}

func (h *hole) Read(p []byte) (int, error) {
	n, err := h.Conn.Read(p)
	h.state.mu.Lock()
	swallow := h.state.swallow
	h.state.mu.Unlock()
	if swallow {
		<-h.state.closed
		return 0, errors.New("closed")
	}
	return n, err
}

func (h *hole) Write(p []byte) (int, error) {
	h.state.mu.Lock()
	defer h.state.mu.Unlock()
	if h.state.swallow {
		return len(p), nil
	}
	return h.Conn.Write(p)
}

func (h *hole) Close() error {
	h.state.once.Do(func() { close(h.state.closed) })
	return nil // the other end never hears of it
}

// TestBlackHole: a path that goes dead without a word is noticed by the pings
// of both ends, long before the heartbeat's bound.
func TestBlackHole(t *testing.T) {
	s := newServer()
	ts := listen(t, s, true)
	first := &holeState{closed: make(chan struct{})}
	var dials atomic.Int32
	n := dialer(ts, func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, address)
		if err == nil && dials.Add(1) == 1 {
			return &hole{conn, first}, nil
		}
		return conn, err
	})
	held, w := hold(t, n, false)
	<-s.up
	<-w.up
	first.mu.Lock()
	first.swallow = true
	first.mu.Unlock()
	began := time.Now()
	for range 8 { // a flood that nobody reads
		held.Send(session.Bulk, &bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Inventory{Inventory: &bcdv1.InventoryReport{
			Sections: []*bcdv1.InventorySection{{Name: "big", CanonicalJson: make([]byte, 1<<20)}}}}})
	}
	err := <-w.down // the daemon's end
	t.Logf("the daemon noticed after %s: %v", time.Since(began), err)
	<-s.ended
	t.Logf("the gateway noticed after %s", time.Since(began))
	if took := time.Since(began); took > session.SilenceBound {
		t.Fatalf("both ends noticed after %s", took)
	}
	<-s.up // and it is back
}
