package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"connectrpc.com/connect"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// sessionService is bcd.v1.SessionService over HTTP/2.
type sessionService struct{ g *Gateway }

func (s sessionService) Session(ctx context.Context, stream *connect.BidiStream[bcdv1.ClientFrame, bcdv1.ServerFrame]) error {
	c := callerOf(ctx)
	t := &streamTransport{stream, c.control}
	switch {
	case c.fault != nil:
		return connect.NewError(connect.CodeUnauthenticated, c.fault)
	case c.peer == nil:
		return connect.NewError(connect.CodeUnauthenticated, errors.New("a session needs a node certificate; join first"))
	case c.expired != nil:
		return t.send(rejectFrame(s.g.now(), bcdv1.RejectCode_REJECT_CODE_IDENTITY_EXPIRED, 0, c.expired.Error()+"; renew it, or join again"))
	}
	if wait := s.g.busy(); wait > 0 {
		return t.send(rejectFrame(s.g.now(), bcdv1.RejectCode_REJECT_CODE_BUSY, wait, "too many sessions begin at once; come back after the given time"))
	}
	s.g.runSession(ctx, c.peer, t, nil)
	return nil
}

func rejectFrame(now time.Time, code bcdv1.RejectCode, retry time.Duration, detail string) *bcdv1.ServerFrame {
	return &bcdv1.ServerFrame{Critical: true, Body: &bcdv1.ServerFrame_Reject{Reject: &bcdv1.Reject{
		Code: code, RetryAfterMs: int32(retry.Milliseconds()), Detail: detail, ServerTimeMs: now.UnixMilli(),
	}}}
}

// busy is 0 when a session may begin now, else when to come back.
func (g *Gateway) busy() time.Duration {
	g.mu.Lock()
	stopping := g.stopping
	g.mu.Unlock()
	if !stopping && g.helloLimit.AllowN(g.now(), 1) {
		return 0
	}
	return 2*time.Second + g.hub.spread()
}

// streamTransport is a session over a connect stream.
type streamTransport struct {
	stream  *connect.BidiStream[bcdv1.ClientFrame, bcdv1.ServerFrame]
	control *http.ResponseController
}

func (t *streamTransport) receive() (*bcdv1.ClientFrame, error) { return t.stream.Receive() }
func (t *streamTransport) send(f *bcdv1.ServerFrame) error      { return t.stream.Send(f) }

// A deadline in the past ends a read or write that blocks, at once.
func (t *streamTransport) stopReceive() { _ = t.control.SetReadDeadline(time.Unix(1, 0)) }
func (t *streamTransport) stopSend()    { _ = t.control.SetWriteDeadline(time.Unix(1, 0)) }

// operatorOnly keeps everyone else out of OperatorService.
type operatorOnly struct{}

var errNotOperator = connect.NewError(connect.CodeUnauthenticated,
	errors.New("this needs an operator: use the gateway's unix socket, or its operator token (keys/operator.token) as a bearer token"))

func (operatorOnly) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, request connect.AnyRequest) (connect.AnyResponse, error) {
		if !callerOf(ctx).operator {
			return nil, errNotOperator
		}
		return next(ctx, request)
	}
}

func (operatorOnly) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (operatorOnly) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		if !callerOf(ctx).operator {
			return errNotOperator
		}
		return next(ctx, conn)
	}
}

// rpcError dresses an error of this package for a caller.
func rpcError(err error) error {
	var already *connect.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &already):
		return err
	case errors.Is(err, ErrNotFound):
		return connect.NewError(connect.CodeNotFound, err)
	case errors.Is(err, context.Canceled):
		return connect.NewError(connect.CodeCanceled, err)
	}
	return connect.NewError(connect.CodeInternal, err)
}

func invalid(format string, args ...any) error {
	return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf(format, args...))
}
