package session

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/api/bcd/v1/bcdv1connect"
)

// Net dials a real gateway. Each link has a connection of its own, so that
// nothing else can starve its heartbeats, and each dial asks for the
// certificate anew.
type Net struct {
	// URL is the gateway's, https://HOST[:PORT].
	URL string
	// TLS gives the configuration of one handshake; pki.ClientTLS makes it.
	TLS *tls.Config
	// DialContext connects; nil is the system's.
	DialContext func(ctx context.Context, network, address string) (net.Conn, error)
	// Proxy is http.ProxyFromEnvironment when nil: HTTPS_PROXY is honoured.
	Proxy func(*http.Request) (*url.URL, error)
	// PingAfter and PingTimeout are HTTP/2's health check: a ping after that
	// long without a frame, and the end of the connection after that long
	// without its answer. 0 is 15 s and 10 s.
	PingAfter, PingTimeout time.Duration
}

const (
	pingAfter        = 15 * time.Second
	pingTimeout      = 10 * time.Second
	writeByteTimeout = 20 * time.Second
	handshakeTimeout = 10 * time.Second
	// connReceiveBuffer is the window of a connection; idle it costs nothing.
	connReceiveBuffer = 1 << 20
)

func orDefault(d, otherwise time.Duration) time.Duration {
	if d == 0 {
		return otherwise
	}
	return d
}

// Dial makes a link; ctx bounds the dial alone.
func (n *Net) Dial(ctx context.Context, t Transport) (Link, error) {
	if t == WebSocket {
		return n.dialWebSocket(ctx)
	}
	return n.dialHTTP2(ctx)
}

// transport is an http.Transport for one connection with what it saw.
func (n *Net) transport(protocols string, seen *seenTLS) *http.Transport {
	config := n.TLS.Clone()
	config.NextProtos = []string{protocols}
	verify := config.VerifyConnection
	config.VerifyConnection = func(state tls.ConnectionState) error {
		seen.set(state.NegotiatedProtocol)
		if verify == nil {
			return errors.New("gateway: nothing verifies its certificate")
		}
		return verify(state)
	}
	dial := n.DialContext
	if dial == nil {
		dial = (&net.Dialer{Timeout: handshakeTimeout}).DialContext
	}
	proxy := n.Proxy
	if proxy == nil {
		proxy = http.ProxyFromEnvironment
	}
	enabled := new(http.Protocols)
	enabled.SetHTTP2(protocols == "h2")
	enabled.SetHTTP1(protocols != "h2")
	return &http.Transport{
		Protocols:           enabled,
		TLSClientConfig:     config,
		DialContext:         dial,
		Proxy:               proxy,
		TLSHandshakeTimeout: handshakeTimeout,
		DisableCompression:  true,
		HTTP2: &http.HTTP2Config{
			SendPingTimeout:               orDefault(n.PingAfter, pingAfter),
			PingTimeout:                   orDefault(n.PingTimeout, pingTimeout),
			WriteByteTimeout:              writeByteTimeout,
			MaxReceiveBufferPerConnection: connReceiveBuffer,
		},
	}
}

// seenTLS remembers how far a handshake came.
type seenTLS struct {
	mu       sync.Mutex
	done     bool
	protocol string
}

func (s *seenTLS) set(protocol string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done, s.protocol = true, protocol
}

func (s *seenTLS) get() (protocol string, done bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.protocol, s.done
}

// explain sorts a failed dial: by the certificate, by the way, or neither.
func explain(err error, seen *seenTLS) error {
	if err == nil {
		return nil
	}
	protocol, handshake := seen.get()
	d := &DialError{Class: Network, Err: err}
	text := err.Error()
	var op *net.OpError
	switch {
	case errors.As(err, &op) && op.Op == "dial":
		// Nothing listens, or no way there: the WebSocket would not either.
	case handshake && protocol != "h2":
		d.NoHTTP2 = true
	case !handshake && (errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || strings.Contains(text, "no application protocol") ||
		strings.Contains(text, "connection reset by peer")):
		d.NoHTTP2 = true
	case strings.Contains(text, "tls:") || strings.Contains(text, "certificate"):
		d.Class = Auth
	}
	return d
}

// http2Link is a connect bidi stream.
type http2Link struct {
	stream    *connect.BidiStreamForClient[bcdv1.ClientFrame, bcdv1.ServerFrame]
	cancel    context.CancelFunc
	transport *http.Transport
	seen      *seenTLS
}

func (n *Net) dialHTTP2(ctx context.Context) (Link, error) {
	seen := &seenTLS{}
	transport := n.transport("h2", seen)
	// The stream's context is the link's, not the dial's.
	linkCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	client := bcdv1connect.NewSessionServiceClient(&http.Client{Transport: transport, CheckRedirect: noRedirect}, n.URL,
		connect.WithGRPC(), connect.WithReadMaxBytes(MaxFrame), connect.WithSendMaxBytes(MaxFrame))
	l := &http2Link{cancel: cancel, transport: transport, seen: seen}
	stop := context.AfterFunc(ctx, cancel)
	l.stream = client.Session(linkCtx)
	// An empty first Send opens the stream and so makes the connection; Hello
	// follows as the first frame.
	err := l.stream.Send(nil)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		err = explain(l.cause(err), seen)
		l.Close()
		return nil, err
	}
	return l, nil
}

// noRedirect: a gateway does not redirect; whoever does wants the session
// elsewhere.
func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// cause finds out why a Send failed: connect says io.EOF and keeps the reason
// for Receive.
func (l *http2Link) cause(err error) error {
	if errors.Is(err, io.EOF) {
		if _, received := l.stream.Receive(); received != nil {
			return received
		}
	}
	return err
}

func (l *http2Link) Send(f *bcdv1.ClientFrame) error {
	if err := l.stream.Send(f); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	return nil
}

func (l *http2Link) Receive() (*bcdv1.ServerFrame, error) {
	frame, err := l.stream.Receive()
	if err == nil {
		return frame, nil
	}
	if errors.Is(err, io.EOF) {
		return nil, io.EOF
	}
	return nil, explainStream(err, l.seen)
}

// explainStream is explain for a link's end: what the gateway answers with a
// status of its own says nothing about HTTP/2.
func explainStream(err error, seen *seenTLS) error {
	var status *connect.Error
	if errors.As(err, &status) {
		switch status.Code() {
		case connect.CodeUnauthenticated, connect.CodePermissionDenied:
			return &DialError{Class: Auth, Err: err}
		case connect.CodeResourceExhausted:
			return &DialError{Class: Busy, Err: err}
		case connect.CodeInvalidArgument:
			return fmt.Errorf("%w: %w", ErrProtocol, err)
		}
	}
	if _, handshake := seen.get(); !handshake {
		return explain(err, seen)
	}
	return err
}

// Close ends the link. Cancelling the stream's context ends Send and Receive;
// connect's own Close drains the stream and may hang on a dead path
// (connect-go issue 789), and Receive ignores a context's deadline after the
// first answer, so the connection goes too.
func (l *http2Link) Close() {
	l.cancel()
	_ = l.stream.CloseRequest()
	l.transport.CloseIdleConnections()
}
