package identity

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/api/bcd/v1/bcdv1connect"
)

const (
	// renewJitter spreads renewals: ± this part of the lifetime around two
	// thirds of it.
	renewJitter = 0.05
	// renewRetryBase and renewRetryCap bound the full-jitter waits between
	// failed tries: hours remain, and a fleet must not press on a gateway that
	// just came back.
	renewRetryBase = 30 * time.Second
	renewRetryCap  = 15 * time.Minute
	// renewLookAgain bounds a sleep: the best known time may have jumped.
	renewLookAgain = 30 * time.Minute
)

// Renewer keeps the certificate in Current fresh. It depends on no session: a
// node that cannot hold one may need exactly this.
type Renewer struct {
	Store      Store
	Current    *Current
	GatewayURL string
	Roots      *pki.Roots
	// HTTP makes a client that shows certificate, or none when it is nil; see
	// HTTPClient.
	HTTP  func(withCertificate bool) connect.HTTPClient
	Clock clock.Clock
	// Now is the best known server time: mark + elapsed or, before the first
	// mark, the later of floor and wall clock.
	Now func() time.Time
	Log *slog.Logger
	// OnRenewed, when not nil, is told of each new identity, saved and set: a
	// session resets its back-off.
	OnRenewed func(*Identity)
	// Rand is for tests; nil is the process's.
	Rand func() float64

	// learned is how far the gateway's clock is ahead of Now, as a refusal
	// said.
	learned time.Duration
}

// Run renews until ctx ends, whose error it returns. A failed renewal is
// logged and tried again; it never ends Run and never harms the identity.
func (r *Renewer) Run(ctx context.Context) error {
	failures := 0
	due := r.due(r.Current.Get())
	for {
		wait := min(max(due.Sub(r.Now()), 0), renewLookAgain)
		if failures > 0 {
			wait = time.Duration(r.random() * float64(min(r.retryCap(), renewRetryBase<<min(failures-1, 8))))
		}
		if err := r.sleep(ctx, wait); err != nil {
			return err
		}
		if failures == 0 && r.Now().Before(due) {
			continue
		}
		i, err := r.Renew(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			failures++
			r.Log.Warn("certificate renewal failed; it is tried again", "node", r.Current.Get().NodeID,
				"not_after", r.Current.Get().NotAfter().UTC(), "error", err)
			continue
		}
		failures = 0
		due = r.due(i)
		r.Log.Info("certificate renewed", "node", i.NodeID, "not_after", i.NotAfter().UTC())
	}
}

// retryCap is renewRetryCap, less for certificates so short that waiting that
// long would waste what is left of them.
func (r *Renewer) retryCap() time.Duration {
	i := r.Current.Get()
	return max(min(renewRetryCap, i.NotAfter().Sub(i.Floor())/20), time.Second)
}

// due is two thirds into the certificate's life, with jitter.
func (r *Renewer) due(i *Identity) time.Time {
	life := float64(i.NotAfter().Sub(i.Floor()))
	return i.Floor().Add(time.Duration(life * (2.0/3 + renewJitter*(2*r.random()-1))))
}

// Renew asks for a certificate for a new key, once; saves and sets it. After
// the certificate expired the request carries proof of the old key instead of
// a client certificate, and may pass within the gateway's grace period.
func (r *Renewer) Renew(ctx context.Context) (*Identity, error) {
	old := r.Current.Get()
	if old == nil {
		return nil, ErrNotJoined
	}
	key, err := pki.NewKey()
	if err != nil {
		return nil, err
	}
	i, err := r.renewOnce(ctx, old, key)
	var refused *Refused
	if errors.As(err, &refused) && refused.Code == bcdv1.JoinErrorCode_JOIN_ERROR_CODE_CLOCK_SKEW && !refused.ServerTime.IsZero() {
		r.learned = refused.ServerTime.Sub(r.Now())
		i, err = r.renewOnce(ctx, old, key)
	}
	if err != nil {
		return nil, fmt.Errorf("renew at %s: %w", r.GatewayURL, err)
	}
	if err := r.Store.Save(i); err != nil {
		return nil, fmt.Errorf("renew: %w", err)
	}
	r.Current.Set(i)
	if r.OnRenewed != nil {
		r.OnRenewed(i)
	}
	return i, nil
}

func (r *Renewer) renewOnce(ctx context.Context, old *Identity, key Key) (*Identity, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	now := r.Now().Add(r.learned)
	csr, err := pki.NewCSR(key)
	if err != nil {
		return nil, err
	}
	proof, err := pki.SignStatement(old.Key, pki.DomainRenew, pki.RenewMessage(csr, now))
	if err != nil {
		return nil, err
	}
	// The proof travels always: whether the certificate has expired is the
	// gateway's clock to say, and it may differ from ours.
	request := &bcdv1.RenewRequest{
		Csr: csr, NodeId: old.NodeID, ExpiredCertificate: old.Leaf().Raw, Proof: proof, ProofTimeMs: now.UnixMilli(),
	}
	valid := now.Before(old.NotAfter())
	client := bcdv1connect.NewIdentityServiceClient(r.HTTP(valid), r.GatewayURL, connect.WithReadMaxBytes(maxAnswer))
	response, err := client.Renew(ctx, connect.NewRequest(request))
	if err != nil {
		return nil, explain(err, r.Now())
	}
	i := &Identity{NodeID: old.NodeID, MachineID: old.MachineID, Role: old.Role, Site: old.Site, Joined: old.Joined, Key: key}
	record := response.Msg.GetJoinRecord()
	if record == nil {
		record = old.SignedRecord
	}
	if err := i.take(response.Msg.GetCertificateChain(), record, r.Roots, latest(old.Floor(), time.UnixMilli(response.Msg.GetServerTimeMs()))); err != nil {
		return nil, fmt.Errorf("the answer is not acceptable: %w", err)
	}
	return i, nil
}

func (r *Renewer) sleep(ctx context.Context, d time.Duration) error {
	timer := r.Clock.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (r *Renewer) random() float64 {
	if r.Rand != nil {
		return r.Rand()
	}
	return rand.Float64()
}
