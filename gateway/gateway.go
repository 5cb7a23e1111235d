package gateway

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/better-compute/bcd/agent/pki"
	"github.com/better-compute/bcd/api/bcd/v1/bcdv1connect"
	"github.com/better-compute/bcd/gateway/keys"

	"connectrpc.com/connect"
)

const (
	// certificateLifetime of nodes: about a day.
	certificateLifetime = 24 * time.Hour
	// renewGrace is how long after its end a node's certificate may still be
	// renewed by proof of its key; longer off means joining again.
	renewGrace = 30 * 24 * time.Hour
	// tlsLifetime and tlsRenewal are of the gateway's own certificate, which
	// is made anew in memory.
	tlsLifetime = 30 * 24 * time.Hour
	tlsRenewal  = 10 * 24 * time.Hour

	// compressFrom leaves heartbeats and commands as they are: what is worth
	// compressing on a session is a large spec.
	compressFrom = 64 << 10

	// joinRate bounds the work that callers without a certificate can cause.
	joinRate  = 50
	joinBurst = 100
	// refusedRate bounds the timeline lines that refused joins write: whoever
	// has the public join key can cause them. The log has them all.
	refusedRate  = 5
	refusedBurst = 200

	// sweepEvery is how often commands whose time has passed are looked for.
	sweepEvery = 10 * time.Second
)

// Config is what a gateway is made of.
type Config struct {
	Store Store
	Keys  *keys.Set
	// Name is this gateway's, in its certificate and in Welcome: lower-case
	// letters, digits, '.', '_' and '-'. Empty is "gateway".
	Name string
	// Advertise is the URL under which machines reach this gateway; it goes
	// into the config of the nodes that are deployed.
	Advertise string
	// BlobDir holds the blobs. BlobBytes bounds them; 0 is 256 GiB.
	BlobDir   string
	BlobBytes int64
	// Now is the clock; nil is time.Now.
	Now func() time.Time
	// Log gets what operators of the gateway should see; nil discards it.
	Log *slog.Logger
}

// Gateway is the reference gateway. New makes it, Handler and OperatorHandler
// are its two faces, Stop drains it.
type Gateway struct {
	store     Store
	keys      *keys.Set
	name      string
	advertise string
	now       func() time.Time
	log       *slog.Logger
	hub       *hub
	sites     sites
	// started bounds what the process before this one may have promised.
	started  time.Time
	blobs    *blobStore
	operator [sha256.Size]byte

	// These are the constants of the same names, but for tests of what happens
	// beyond them.
	pingIdle, pingAnswer time.Duration
	outboxBytes          int

	helloLimit   *rate.Limiter
	joinLimit    *rate.Limiter
	refusedLimit *rate.Limiter

	mu       sync.Mutex
	stopping bool
	stopped  chan struct{}
	sessions sync.WaitGroup

	certificate atomic.Pointer[tls.Certificate]
	renewing    sync.Mutex
}

// New makes a gateway; it opens no socket and starts no goroutine.
func New(config Config) (*Gateway, error) {
	if config.Store == nil || config.Keys == nil || config.BlobDir == "" {
		return nil, errors.New("gateway: a store, keys and a blob directory are needed")
	}
	g := &Gateway{
		store: config.Store, keys: config.Keys, name: config.Name, advertise: strings.TrimSuffix(config.Advertise, "/"),
		now: config.Now, log: config.Log, hub: newHub(), stopped: make(chan struct{}),
		pingIdle: pingIdle, pingAnswer: pingAnswer, outboxBytes: outboxBytes,
		operator:     sha256.Sum256([]byte(config.Keys.OperatorToken)),
		helloLimit:   rate.NewLimiter(welcomeRate, 2*welcomeRate),
		joinLimit:    rate.NewLimiter(joinRate, joinBurst),
		refusedLimit: rate.NewLimiter(refusedRate, refusedBurst),
	}
	if g.name == "" {
		g.name = "gateway"
	}
	if g.now == nil {
		g.now = time.Now
	}
	g.started = g.now()
	if g.log == nil {
		g.log = slog.New(slog.DiscardHandler)
	}
	var err error
	if g.blobs, err = newBlobStore(config.BlobDir, config.BlobBytes); err != nil {
		return nil, err
	}
	if _, err := g.tlsCertificate(); err != nil {
		return nil, err
	}
	if left := config.Keys.SignerExpires.Sub(g.now()); left < 60*24*time.Hour {
		g.log.Warn("the command signer ends soon; make a new one with the offline root", "expires", config.Keys.SignerExpires)
	}
	return g, nil
}

// tlsCertificate gives the gateway's own certificate, a new one when the last
// has had a third of its life. The key never leaves this process.
func (g *Gateway) tlsCertificate() (*tls.Certificate, error) {
	fresh := func() *tls.Certificate {
		if c := g.certificate.Load(); c != nil && g.now().Before(c.Leaf.NotBefore.Add(tlsRenewal)) {
			return c
		}
		return nil
	}
	if c := fresh(); c != nil {
		return c, nil
	}
	g.renewing.Lock()
	defer g.renewing.Unlock()
	if c := fresh(); c != nil {
		return c, nil
	}
	key, err := pki.NewKey()
	if err != nil {
		return nil, fmt.Errorf("gateway certificate: %w", err)
	}
	chain, err := g.keys.Issuer.IssueGateway(g.name, key.Public(), g.now(), tlsLifetime)
	if err != nil {
		return nil, fmt.Errorf("gateway certificate: %w", err)
	}
	c, err := pki.TLSCertificate(chain, key)
	if err != nil {
		return nil, fmt.Errorf("gateway certificate: %w", err)
	}
	g.certificate.Store(c)
	return c, nil
}

// update is Store.Update, and tells those who watch.
func (g *Gateway) update(ctx context.Context, fn func(Tx) error) error {
	err := g.store.Update(ctx, fn)
	if err == nil {
		g.hub.changed()
	}
	return err
}

func (g *Gateway) operatorToken(r *http.Request) bool {
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok {
		return false
	}
	sum := sha256.Sum256([]byte(token))
	return subtle.ConstantTimeCompare(sum[:], g.operator[:]) == 1
}

// Handler is what the network sees: every service over TLS.
func (g *Gateway) Handler() http.Handler {
	mux := http.NewServeMux()
	options := g.options()
	mux.Handle(bcdv1connect.NewSessionServiceHandler(sessionService{g}, options...))
	mux.Handle(bcdv1connect.NewJoinServiceHandler(joinService{g}, options...))
	mux.Handle(bcdv1connect.NewIdentityServiceHandler(identityService{g}, options...))
	mux.Handle(bcdv1connect.NewSiteServiceHandler(siteService{g}, options...))
	mux.HandleFunc("GET /v1/ws", g.webSocket)
	mux.HandleFunc("GET /v1/trust/roots.pem", public("application/x-pem-file", g.keys.Roots.PEM()))
	mux.HandleFunc("GET /v1/trust/join-encryption.jwk", public("application/jwk+json", g.keys.JoinJWK))
	g.common(mux, options)
	return g.identify(mux, false)
}

func (g *Gateway) options() []connect.HandlerOption {
	return []connect.HandlerOption{
		connect.WithReadMaxBytes(maxFrameBytes), connect.WithCompressMinBytes(compressFrom), connect.WithRecover(g.panicked),
	}
}

// OperatorHandler is what the unix socket serves: everyone who may open it is
// an operator.
func (g *Gateway) OperatorHandler() http.Handler {
	mux := http.NewServeMux()
	g.common(mux, g.options())
	return g.identify(mux, true)
}

func (g *Gateway) common(mux *http.ServeMux, options []connect.HandlerOption) {
	mux.Handle(bcdv1connect.NewOperatorServiceHandler(operatorService{g: g}, append(options, connect.WithInterceptors(operatorOnly{}))...))
	mux.HandleFunc("GET "+blobPath+"{sha256}", g.getBlob)
	mux.HandleFunc("PUT "+blobPath+"{sha256}", g.putBlob)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
}

// public serves what is no secret: a machine that was told the root's digest
// learns the rest from here.
func public(kind string, content []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", kind)
		_, _ = w.Write(content)
	}
}

// panicked answers for a handler that panicked. The stack is in the log; the
// caller learns nothing of it.
func (g *Gateway) panicked(_ context.Context, spec connect.Spec, _ http.Header, what any) error {
	g.log.Error("handler panicked", "procedure", spec.Procedure, "panic", fmt.Sprint(what))
	return connect.NewError(connect.CodeInternal, errors.New("internal error; it is in the gateway's log"))
}

// admit lets a session in unless the gateway is stopping.
func (g *Gateway) admit(s *session) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stopping {
		return false
	}
	g.sessions.Add(1)
	g.hub.enter(s)
	return true
}

// Run does what has to be done from time to time until ctx ends.
func (g *Gateway) Run(ctx context.Context) {
	ticker := time.NewTicker(sweepEvery)
	defer ticker.Stop()
	var forgot time.Time
	for {
		if now := g.now(); now.Sub(forgot) >= forgetEvery {
			forgot = now
			if err := g.forgetGrants(ctx); err != nil && ctx.Err() == nil {
				g.log.Error("old boot grants not forgotten", "error", err)
			}
		}
		if err := g.sweep(ctx); err != nil && ctx.Err() == nil {
			g.log.Error("sweep of expired commands failed", "error", err)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// sweep ends the commands whose time has passed. It writes only when there is
// one.
func (g *Gateway) sweep(ctx context.Context) error {
	now := g.now()
	due := map[string]bool{}
	step := func(tx Tx, c *Command) (inClock, bool, error) {
		node, err := tx.Node(c.NodeID)
		if err != nil {
			return inClock{}, false, err
		}
		in := inClock{LastSeenMS: node.LastSeenMS, Connected: g.hub.connected(c.NodeID)}
		_, _, changed := ledgerStep(now, *c, in)
		return in, changed, nil
	}
	err := g.store.View(ctx, func(tx Tx) error {
		commands, err := tx.OpenCommands("")
		if err != nil {
			return err
		}
		for _, c := range commands {
			if _, changed, err := step(tx, c); err != nil {
				return err
			} else if changed {
				due[c.ID] = true
			}
		}
		return nil
	})
	if err != nil || len(due) == 0 {
		return err
	}
	return g.update(ctx, func(tx Tx) error {
		for id := range due {
			c, err := tx.Command(id)
			if err != nil {
				return err
			}
			in, changed, err := step(tx, c)
			if err != nil {
				return err
			}
			if changed {
				if err := advance(tx, now, c, in); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// Stop asks every session to go elsewhere and waits for them, or for ctx. New
// ones are not let in from now on.
func (g *Gateway) Stop(ctx context.Context, reason string) {
	g.mu.Lock()
	if !g.stopping {
		g.stopping = true
		close(g.stopped)
	}
	g.mu.Unlock()
	spread := g.hub.spread()
	for _, s := range g.hub.every() {
		s.post(ctx, gotDrain{spread, reason}, nil)
	}
	gone := make(chan struct{})
	go func() {
		g.sessions.Wait()
		close(gone)
	}()
	select {
	case <-gone:
	case <-ctx.Done():
	}
}
