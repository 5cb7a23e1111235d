package agent

import (
	"context"
	"errors"
	"fmt"

	"github.com/better-compute/bcd/agent/secret"
	"github.com/better-compute/bcd/agent/session"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// errSessionLost ends a request whose answer can no longer come.
var errSessionLost = errors.New("the session was lost")

// FetchSecret fetches the value of a reference that a command carries. It
// waits for a session, and asks again, with a fresh key, when one is lost
// before the answer. The caller destroys the value. After a revocation it
// fails.
func (a *Agent) FetchSecret(ctx context.Context, commandID, reference string) (*secret.Value, error) {
	if a.deps.Secrets == nil {
		return nil, errors.New("this daemon fetches no secrets")
	}
	for {
		lost, err := a.waitSession(ctx)
		if err != nil {
			return nil, err
		}
		try, cancel := context.WithCancelCause(ctx)
		done := make(chan struct{})
		go func() {
			select {
			case <-lost:
				cancel(errSessionLost)
			case <-done:
			}
		}()
		value, err := a.deps.Secrets.Fetch(try, reference, commandID)
		close(done)
		retry := err != nil && ctx.Err() == nil && errors.Is(context.Cause(try), errSessionLost)
		cancel(nil)
		if !retry {
			return value, err
		}
	}
}

// waitSession returns, once there is a session, a channel that closes with it.
func (a *Agent) waitSession(ctx context.Context) (lost <-chan struct{}, err error) {
	for {
		a.mu.Lock()
		connected, lost, revoked := a.connected, a.lost, a.revoked
		a.mu.Unlock()
		if revoked != "" {
			return nil, fmt.Errorf("this node's identity was revoked: %s", revoked)
		}
		select {
		case <-connected:
			select {
			case <-lost: // it went between the two
			default:
				return lost, nil
			}
		case <-ctx.Done():
			return nil, fmt.Errorf("no session: %w", ctx.Err())
		}
	}
}

// sendSecretRequest is the requester's Send.
func (a *Agent) sendSecretRequest(_ context.Context, request *bcdv1.SecretRequest) error {
	if !a.session.Send(session.Control, &bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_SecretRequest{SecretRequest: request}}) {
		return errSessionLost
	}
	return nil
}
