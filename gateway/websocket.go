package gateway

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/coder/websocket"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// pingIdle and pingAnswer are how a dead path is noticed within 25 s, on
	// both transports.
	pingIdle   = 15 * time.Second
	pingAnswer = 10 * time.Second
	nonceBytes = 32
)

// webSocket is the session for those whose HTTP/2 does not get through: the
// same frames, one a binary message.
func (g *Gateway) webSocket(w http.ResponseWriter, r *http.Request) {
	c := callerOf(r.Context())
	if c.fault != nil {
		http.Error(w, c.fault.Error(), http.StatusUnauthorized)
		return
	}
	conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{CompressionMode: websocket.CompressionDisabled})
	if err != nil {
		// Accept has answered.
		return
	}
	conn.SetReadLimit(maxFrameBytes)
	// The request's context ends when the handler returns, not when the
	// connection breaks; the transport's own does both.
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	t := &socketTransport{conn: conn, ctx: ctx, cancel: cancel, ended: make(chan struct{})}
	g.runSocket(ctx, c, t)
	_ = conn.Close(websocket.StatusNormalClosure, "session ended")
}

// runSocket finds out who is there and runs the session.
func (g *Gateway) runSocket(ctx context.Context, c *caller, t *socketTransport) {
	if wait := g.busy(); wait > 0 {
		_ = t.send(rejectFrame(g.now(), bcdv1.RejectCode_REJECT_CODE_BUSY, wait, "too many sessions begin at once; come back after the given time"))
		return
	}
	pings := make(chan struct{})
	go func() {
		defer close(pings)
		t.keepAlive(g.pingIdle, g.pingAnswer)
	}()
	defer func() {
		close(t.ended)
		<-pings
	}()
	peer := c.peer
	if c.expired != nil {
		_ = t.send(rejectFrame(g.now(), bcdv1.RejectCode_REJECT_CODE_IDENTITY_EXPIRED, 0, c.expired.Error()+"; renew it, or join again"))
		return
	}
	var first *bcdv1.ClientFrame
	if peer == nil {
		var reject *bcdv1.ServerFrame
		peer, first, reject = g.innerAuth(c, t)
		if reject != nil {
			_ = t.send(reject)
		}
		if peer == nil {
			return
		}
	}
	g.runSession(ctx, peer, t, first)
}

// innerAuth is for a path on which TLS ended before the gateway: Hello, then
// the gateway's nonce, then the node's signature over it and its chain.
func (g *Gateway) innerAuth(c *caller, t *socketTransport) (*Peer, *bcdv1.ClientFrame, *bcdv1.ServerFrame) {
	limit := time.AfterFunc(helloLimit, t.cancel)
	defer limit.Stop()
	first, err := t.receive()
	if err != nil {
		return nil, nil, nil
	}
	if first.GetHello() == nil {
		return nil, nil, rejectFrame(g.now(), bcdv1.RejectCode_REJECT_CODE_MALFORMED, 0, "the first frame must be Hello")
	}
	nonce := make([]byte, nonceBytes)
	rand.Read(nonce)
	challenge := &bcdv1.ServerFrame{Critical: true, Body: &bcdv1.ServerFrame_IdentityChallenge{IdentityChallenge: &bcdv1.IdentityChallenge{Nonce: nonce, Gateway: g.name}}}
	if err := t.send(challenge); err != nil {
		return nil, nil, nil
	}
	frame, err := t.receive()
	if err != nil {
		return nil, nil, nil
	}
	peer, err := g.checkProof(frame.GetIdentityProof(), nonce, c.remote)
	switch {
	case peer != nil && errors.Is(err, pki.ErrExpired):
		return nil, nil, rejectFrame(g.now(), bcdv1.RejectCode_REJECT_CODE_IDENTITY_EXPIRED, 0, err.Error()+"; renew it, or join again")
	case err != nil:
		return nil, nil, rejectFrame(g.now(), bcdv1.RejectCode_REJECT_CODE_MALFORMED, 0, err.Error())
	}
	return peer, first, nil
}

func (g *Gateway) checkProof(proof *bcdv1.IdentityProof, nonce []byte, remote string) (*Peer, error) {
	if proof == nil {
		return nil, errors.New("proof of the node's key must follow the challenge")
	}
	chain, err := pki.ParseChain(proof.GetCertificateChain())
	if err != nil {
		return nil, err
	}
	peer, err := peerOf(g.keys.Roots, chain, remote, g.now())
	if peer == nil {
		return nil, err
	}
	if !pki.VerifyStatement(peer.Key, pki.DomainInnerAuth, append(append([]byte(nil), nonce...), g.name...), proof.GetSignature()) {
		return nil, fmt.Errorf("the proof is not by the key of node %s", peer.NodeID)
	}
	peer.InnerAuth = true
	return peer, err
}

// socketTransport is a session over a WebSocket.
type socketTransport struct {
	conn   *websocket.Conn
	ctx    context.Context
	cancel context.CancelFunc
	// ended stops the pings.
	ended chan struct{}
}

func (t *socketTransport) receive() (*bcdv1.ClientFrame, error) {
	kind, data, err := t.conn.Read(t.ctx)
	if err != nil {
		return nil, err
	}
	if kind != websocket.MessageBinary {
		return nil, errors.New("a WebSocket message is text; frames are binary")
	}
	frame := new(bcdv1.ClientFrame)
	if err := proto.Unmarshal(data, frame); err != nil {
		return nil, fmt.Errorf("malformed frame: %w", err)
	}
	return frame, nil
}

func (t *socketTransport) send(frame *bcdv1.ServerFrame) error {
	data, err := proto.Marshal(frame)
	if err != nil {
		return err
	}
	return t.conn.Write(t.ctx, websocket.MessageBinary, data)
}

// stopReceive says goodbye properly, so that the last frames are not lost with
// the connection; against a peer that does not answer it takes 5 s.
func (t *socketTransport) stopReceive() {
	_ = t.conn.Close(websocket.StatusNormalClosure, "session ended")
	t.cancel()
}

func (t *socketTransport) stopSend() {
	t.cancel()
	_ = t.conn.CloseNow()
}

// keepAlive pings, as the server does on HTTP/2. The answer is seen by the
// goroutine that receives.
func (t *socketTransport) keepAlive(idle, answer time.Duration) {
	ticker := time.NewTicker(idle)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-t.ctx.Done():
			return
		case <-t.ended:
			return
		}
		ctx, cancel := context.WithTimeout(t.ctx, answer)
		err := t.conn.Ping(ctx)
		cancel()
		if err != nil {
			t.cancel()
			return
		}
	}
}
