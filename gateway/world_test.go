package gateway_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/api/bcd/v1/bcdv1connect"
	"github.com/better-compute/bcd/gateway"
	"github.com/better-compute/bcd/gateway/boltstore"
	"github.com/better-compute/bcd/gateway/keys"
)

const (
	node    = bcdv1.Role_ROLE_NODE
	ramdisk = bcdv1.Role_ROLE_RAMDISK
)

// patience bounds every wait of these tests; it is never reached when they
// pass.
const patience = 10 * time.Second

// world is a gateway that listens, and those who talk to it.
type world struct {
	t    *testing.T
	dir  string
	keys *keys.Set
	g    *gateway.Gateway
	url  string
	op   bcdv1connect.OperatorServiceClient
	http *http.Client // the operators' socket
	logs *logBuffer

	mu     sync.Mutex
	offset time.Duration
	stop   func()
}

// logBuffer keeps the gateway's log, for the canary and for failed tests.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newWorld(t *testing.T) *world {
	t.Helper()
	// Unix socket paths are short; a test's own directory is not.
	dir, err := os.MkdirTemp("", "gw")
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, dir: dir, logs: &logBuffer{}}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(w.logs.String())
		}
		os.RemoveAll(dir)
	})
	w.start()
	t.Cleanup(func() { w.stop() })
	return w
}

// now is the gateway's clock, which a test may move.
func (w *world) now() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return time.Now().Add(w.offset)
}

func (w *world) advance(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.offset += d
}

// start starts a gateway on the world's state; stop ends it.
func (w *world) start(change ...func(*gateway.Gateway)) {
	t := w.t
	t.Helper()
	store, err := boltstore.Open(filepath.Join(w.dir, "state.db"))
	if err != nil {
		t.Fatal(err)
	}
	if w.keys, _, err = keys.LoadOrInit(filepath.Join(w.dir, "keys"), time.Now()); err != nil {
		t.Fatal(err)
	}
	network, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(w.dir, "operator.sock")
	local, err := gateway.ListenLocal(socket)
	if err != nil {
		t.Fatal(err)
	}
	w.url = "https://" + network.Addr().String()
	w.g, err = gateway.New(gateway.Config{
		Store: store, Keys: w.keys, Advertise: w.url, BlobDir: filepath.Join(w.dir, "blobs"), BlobBytes: 64 << 20,
		Now: w.now, Log: slog.New(slog.NewTextHandler(w.logs, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range change {
		c(w.g)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- w.g.Serve(ctx, network, local) }()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}
	w.http = &http.Client{Transport: transport}
	w.op = bcdv1connect.NewOperatorServiceClient(w.http, "http://operator")
	w.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
		transport.CloseIdleConnections()
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
}

func (w *world) token(request *bcdv1.CreateTokenRequest) string {
	w.t.Helper()
	answer, err := w.op.CreateToken(w.t.Context(), connect.NewRequest(request))
	if err != nil {
		w.t.Fatal(err)
	}
	return answer.Msg.GetToken()
}

// hardware is a machine's hash, by name.
func hardware(name string) []byte {
	sum := sha256.Sum256([]byte(name))
	return sum[:]
}

// member is a machine that joined.
type member struct {
	w         *world
	name      string
	key       *ecdsa.PrivateKey
	chain     [][]byte
	nodeID    string
	machineID string
	role      bcdv1.Role
	record    *bcdv1.Signed
}

func claimsOf(name, token string, role bcdv1.Role) *bcdv1.JoinClaims {
	return &bcdv1.JoinClaims{
		Token: token, Role: role, Hostname: name, SystemSerial: "SN-" + name, HardwareKeyHash: hardware(name),
		BootId: "boot-1", Version: "test", WallClockMs: time.Now().UnixMilli(),
	}
}

// tryJoin joins with claims as they are, but for the CSR.
func (w *world) tryJoin(claims *bcdv1.JoinClaims) (*member, error) {
	w.t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		w.t.Fatal(err)
	}
	if claims.Csr == nil {
		if claims.Csr, err = pki.NewCSR(key); err != nil {
			w.t.Fatal(err)
		}
	}
	plain, err := proto.Marshal(claims)
	if err != nil {
		w.t.Fatal(err)
	}
	sealed, err := pki.Seal(&w.keys.Join.PublicKey, plain, "")
	if err != nil {
		w.t.Fatal(err)
	}
	client := bcdv1connect.NewJoinServiceClient(w.client(nil), w.url)
	answer, err := client.Join(w.t.Context(), connect.NewRequest(&bcdv1.JoinRequest{Sealed: sealed, KeyThumbprint: w.keys.JoinThumbprint}))
	if err != nil {
		return nil, err
	}
	return &member{
		w: w, name: claims.GetHostname(), key: key, chain: answer.Msg.GetCertificateChain(), nodeID: answer.Msg.GetNodeId(),
		machineID: answer.Msg.GetMachineId(), role: answer.Msg.GetRole(), record: answer.Msg.GetJoinRecord(),
	}, nil
}

func (w *world) join(name string, role bcdv1.Role) *member {
	w.t.Helper()
	m, err := w.tryJoin(claimsOf(name, w.token(&bcdv1.CreateTokenRequest{Role: role}), role))
	if err != nil {
		w.t.Fatalf("join %s: %v", name, err)
	}
	return m
}

// client is an HTTP/2 client with a connection of its own.
func (w *world) client(m *member) *http.Client { return w.clientVia(m, nil) }

func (w *world) clientVia(m *member, dial func(ctx context.Context, network, address string) (net.Conn, error)) *http.Client {
	w.t.Helper()
	var certificate func() (*tls.Certificate, error)
	if m != nil {
		certificate = func() (*tls.Certificate, error) { return pki.TLSCertificate(m.chain, m.key) }
	}
	transport := &http.Transport{
		ForceAttemptHTTP2: true, DialContext: dial,
		TLSClientConfig: pki.ClientTLS(w.keys.Roots, certificate, time.Now),
	}
	w.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// daemon is one session from the daemon's side.
type daemon struct {
	t       *testing.T
	m       *member
	stream  *connect.BidiStreamForClient[bcdv1.ClientFrame, bcdv1.ServerFrame]
	frames  chan *bcdv1.ServerFrame
	err     error // after frames is closed
	epoch   int64
	welcome *bcdv1.Welcome
	close   func()
	mute    bool // does not answer probes
	sending sync.Mutex
}

// dial opens a session without a Hello.
func (m *member) dial() *daemon {
	var mu sync.Mutex
	var conn net.Conn
	d := m.dialOver(m.w.clientVia(m, func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, address)
		mu.Lock()
		conn = c
		mu.Unlock()
		return c, err
	}))
	// The end of a context does not reach the other side on a stream of
	// connect's; the end of the connection does.
	cancel := d.close
	d.close = func() {
		mu.Lock()
		defer mu.Unlock()
		if conn != nil {
			conn.Close()
		}
		cancel()
	}
	d.t.Cleanup(d.close)
	return d
}

func (m *member) dialOver(client *http.Client) *daemon {
	t := m.w.t
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	d := &daemon{t: t, m: m, frames: make(chan *bcdv1.ServerFrame, 4096)}
	d.stream = bcdv1connect.NewSessionServiceClient(client, m.w.url).Session(ctx)
	d.close = func() {
		cancel()
		client.Transport.(*http.Transport).CloseIdleConnections()
	}
	t.Cleanup(d.close)
	return d
}

func (d *daemon) read() {
	defer close(d.frames)
	for {
		frame, err := d.stream.Receive()
		if err != nil {
			d.err = err
			return
		}
		if p := frame.GetProbe(); p != nil && !d.mute {
			d.send(&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_ProbeAnswer{ProbeAnswer: &bcdv1.ProbeAnswer{Sequence: p.GetSequence()}}})
			continue
		}
		d.frames <- frame
	}
}

func (m *member) helloFrame(change func(*bcdv1.Hello)) *bcdv1.ClientFrame {
	hello := &bcdv1.Hello{
		ProtocolMin: 1, ProtocolMax: 1, NodeId: m.nodeID, Role: m.role, BootId: "boot-1", Version: "test", JournalId: "journal-1",
		HardwareKeyHash: hardware(m.name), WallClockMs: time.Now().UnixMilli(),
		Kinds: []string{"diag.ping", "inventory.refresh", "node.reboot", "logs.collect", "deploy.image"},
	}
	if change != nil {
		change(hello)
	}
	return &bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Hello{Hello: hello}}
}

// hello says Hello; the answer is the first frame.
func (d *daemon) hello(change func(*bcdv1.Hello)) *bcdv1.ServerFrame {
	d.t.Helper()
	if err := d.stream.Send(d.m.helloFrame(change)); err != nil {
		d.t.Fatalf("hello: %v", err)
	}
	go d.read()
	first := d.next()
	d.welcome = first.GetWelcome()
	d.epoch = d.welcome.GetEpoch()
	return first
}

// connect dials and expects Welcome.
func (m *member) connect(change func(*bcdv1.Hello)) *daemon {
	m.w.t.Helper()
	d := m.dial()
	if first := d.hello(change); first.GetWelcome() == nil {
		m.w.t.Fatalf("the answer to Hello is %v, want Welcome", first)
	}
	return d
}

func (d *daemon) send(frame *bcdv1.ClientFrame) {
	d.t.Helper()
	frame.Epoch = d.epoch
	d.sendRaw(frame)
}

// sendRaw sends a frame with the epoch that it has.
func (d *daemon) sendRaw(frame *bcdv1.ClientFrame) {
	d.sending.Lock()
	defer d.sending.Unlock()
	if err := d.stream.Send(frame); err != nil {
		d.t.Logf("send: %v", err)
	}
}

// next waits for a frame; nil when the session ended.
func (d *daemon) next() *bcdv1.ServerFrame {
	d.t.Helper()
	select {
	case frame := <-d.frames:
		return frame
	case <-time.After(patience):
		d.t.Fatal("no frame came")
		return nil
	}
}

// expect skips frames until want says yes.
func expect[T any](d *daemon, what string, want func(*bcdv1.ServerFrame) (T, bool)) T {
	d.t.Helper()
	for {
		frame := d.next()
		if frame == nil {
			d.t.Fatalf("the session ended (%v) while waiting for %s", d.err, what)
		}
		if v, ok := want(frame); ok {
			return v
		}
	}
}

func (d *daemon) command() *bcdv1.Command {
	d.t.Helper()
	return expect(d, "a command", func(f *bcdv1.ServerFrame) (*bcdv1.Command, bool) {
		if f.GetCommand() == nil {
			return nil, false
		}
		c := new(bcdv1.Command)
		if err := proto.Unmarshal(f.GetCommand().GetPayload(), c); err != nil {
			d.t.Fatal(err)
		}
		return c, true
	})
}

func (d *daemon) accept(id string) {
	d.send(&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Accepted{Accepted: &bcdv1.CommandAccepted{CommandId: id}}})
}

func (d *daemon) started(id string) {
	d.send(&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Started{Started: &bcdv1.CommandStarted{CommandId: id, StartedMs: time.Now().UnixMilli()}}})
}

func (d *daemon) outcome(id string, status bcdv1.OutcomeStatus, message string) {
	d.send(&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Outcome{Outcome: &bcdv1.Outcome{CommandId: id, Status: status, Message: message}}})
}

func (d *daemon) acked(id string) {
	d.t.Helper()
	expect(d, "the acknowledgement of "+id, func(f *bcdv1.ServerFrame) (bool, bool) {
		return true, f.GetOutcomeAck().GetCommandId() == id
	})
}

// heartbeat is a round trip: what was sent before it has been handled.
func (d *daemon) heartbeat() {
	d.t.Helper()
	sequence := time.Now().UnixNano()
	d.send(&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Heartbeat{Heartbeat: &bcdv1.Heartbeat{Sequence: sequence}}})
	expect(d, "the answer to a heartbeat", func(f *bcdv1.ServerFrame) (bool, bool) {
		return true, f.GetHeartbeat().GetSequence() == sequence
	})
}

func (d *daemon) rejected(code bcdv1.RejectCode) *bcdv1.Reject {
	d.t.Helper()
	return expect(d, "a Reject", func(f *bcdv1.ServerFrame) (*bcdv1.Reject, bool) {
		if r := f.GetReject(); r != nil {
			if r.GetCode() != code {
				d.t.Fatalf("rejected with %v (%s), want %v", r.GetCode(), r.GetDetail(), code)
			}
			return r, true
		}
		return nil, false
	})
}

func (w *world) ping(machine string) *bcdv1.CommandInfo {
	w.t.Helper()
	body, err := proto.Marshal(&bcdv1.DiagPing{Payload: []byte("x")})
	if err != nil {
		w.t.Fatal(err)
	}
	answer, err := w.op.SendCommand(w.t.Context(), connect.NewRequest(&bcdv1.SendCommandRequest{Machine: machine, Kind: "diag.ping", Body: body}))
	if err != nil {
		w.t.Fatal(err)
	}
	return answer.Msg.GetCommand()
}

func (w *world) get(id string) *bcdv1.CommandInfo {
	w.t.Helper()
	answer, err := w.op.GetCommand(w.t.Context(), connect.NewRequest(&bcdv1.GetCommandRequest{Id: id}))
	if err != nil {
		w.t.Fatal(err)
	}
	return answer.Msg.GetCommand()
}

func (w *world) machine(name string) *bcdv1.GetMachineResponse {
	w.t.Helper()
	answer, err := w.op.GetMachine(w.t.Context(), connect.NewRequest(&bcdv1.GetMachineRequest{Name: name}))
	if err != nil {
		w.t.Fatal(err)
	}
	return answer.Msg
}

// waitFor watches until the timeline has an entry that is wanted.
func (w *world) waitFor(what string, want func(*bcdv1.TimelineEntry) bool) *bcdv1.TimelineEntry {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	stream, err := w.op.Watch(ctx, connect.NewRequest(&bcdv1.WatchRequest{}))
	if err != nil {
		w.t.Fatal(err)
	}
	defer stream.Close()
	for stream.Receive() {
		if e := stream.Msg().GetEntry(); e != nil && want(e) {
			return e
		}
	}
	w.t.Fatalf("no timeline entry: %s (%v)", what, stream.Err())
	return nil
}

func joinCode(err error) bcdv1.JoinErrorCode {
	var e *connect.Error
	if errors.As(err, &e) {
		for _, d := range e.Details() {
			if v, valueErr := d.Value(); valueErr == nil {
				if j, ok := v.(*bcdv1.JoinError); ok {
					return j.GetCode()
				}
			}
		}
	}
	return bcdv1.JoinErrorCode_JOIN_ERROR_CODE_UNSPECIFIED
}

func hasEntry(timeline []*bcdv1.TimelineEntry, kind string, words ...string) bool {
	for _, e := range timeline {
		ok := e.GetType() == kind
		for _, word := range words {
			ok = ok && strings.Contains(e.GetMessage(), word)
		}
		if ok {
			return true
		}
	}
	return false
}

func dump(timeline []*bcdv1.TimelineEntry) string {
	var out strings.Builder
	for _, e := range timeline {
		fmt.Fprintf(&out, "\n%4d %-16s %-5s %s", e.GetSequence(), e.GetType(), e.GetSeverity(), e.GetMessage())
	}
	return out.String()
}
