package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/coder/websocket"
	"google.golang.org/protobuf/proto"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// webSocketPath is where a gateway takes a session over WebSocket (RFC 6455).
const webSocketPath = "/v1/ws"

// webSocketLink is one frame a binary message.
type webSocketLink struct {
	conn   *websocket.Conn
	ctx    context.Context
	cancel context.CancelFunc
}

// dialWebSocket uses a plain GET with standard headers alone: proxies strip or
// refuse others.
func (n *Net) dialWebSocket(ctx context.Context) (Link, error) {
	u, err := url.Parse(n.URL)
	if err != nil {
		return nil, fmt.Errorf("gateway URL: %w", err)
	}
	u.Path = webSocketPath
	seen := &seenTLS{}
	conn, response, err := websocket.Dial(ctx, u.String(), &websocket.DialOptions{
		HTTPClient:      &http.Client{Transport: n.transport("http/1.1", seen), CheckRedirect: noRedirect},
		CompressionMode: websocket.CompressionDisabled,
	})
	if err != nil {
		d := &DialError{Class: Network, Err: err}
		if response != nil && (response.StatusCode == http.StatusUnauthorized || response.StatusCode == http.StatusForbidden) {
			d.Class = Auth
		}
		return nil, d
	}
	conn.SetReadLimit(MaxFrame)
	linkCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	return &webSocketLink{conn: conn, ctx: linkCtx, cancel: cancel}, nil
}

func (l *webSocketLink) Send(f *bcdv1.ClientFrame) error {
	data, err := proto.Marshal(f)
	if err != nil {
		return fmt.Errorf("send: %w", err)
	}
	if len(data) > MaxFrame {
		return fmt.Errorf("send: a frame of %d bytes, at most %d are allowed", len(data), MaxFrame)
	}
	return l.conn.Write(l.ctx, websocket.MessageBinary, data)
}

func (l *webSocketLink) Receive() (*bcdv1.ServerFrame, error) {
	kind, data, err := l.conn.Read(l.ctx)
	var closed websocket.CloseError
	if errors.As(err, &closed) && closed.Code == websocket.StatusNormalClosure {
		return nil, io.EOF
	}
	if err != nil {
		return nil, err
	}
	if kind != websocket.MessageBinary {
		return nil, fmt.Errorf("%w: a text message on the WebSocket", ErrProtocol)
	}
	return decodeServerFrame(data)
}

func decodeServerFrame(data []byte) (*bcdv1.ServerFrame, error) {
	if len(data) > MaxFrame {
		return nil, fmt.Errorf("%w: a frame of %d bytes, at most %d are allowed", ErrProtocol, len(data), MaxFrame)
	}
	frame := new(bcdv1.ServerFrame)
	if err := proto.Unmarshal(data, frame); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrProtocol, err)
	}
	return frame, nil
}

func (l *webSocketLink) Close() {
	l.cancel()
	_ = l.conn.CloseNow()
}
