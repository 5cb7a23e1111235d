package main

import (
	"context"
	"crypto"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/bcd/agent"
	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/converge"
	"github.com/better-compute/bcd/agent/dispatch"
	"github.com/better-compute/bcd/agent/host"
	"github.com/better-compute/bcd/agent/identity"
	"github.com/better-compute/bcd/agent/journal"
	"github.com/better-compute/bcd/agent/pki"
	"github.com/better-compute/bcd/agent/secret"
	"github.com/better-compute/bcd/agent/session"
	"github.com/better-compute/bcd/agent/status"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/supervisor"
)

// daemon is what every mode runs: one agent, and what stands beside it. The
// modes differ in the fields.
type daemon struct {
	place *place
	logs  *logging
	// token gives a join token for a machine that is no node yet; nil when
	// there is nothing to join with.
	token func() (*identity.Token, error)
	// joined is called once the identity is durable, at every start.
	joined func() error
	// executors are those of the mode, beside the built-in ones.
	executors func(*daemon, *agent.Agent) ([]dispatch.Executor, error)
	// sections are the NodeSpec sections; nil in modes that take no spec.
	sections func(*daemon) ([]converge.Section, error)
	// restart makes the machine go down and come back.
	restart func(ctx context.Context, reason string) error
	// serverTime is told the gateway's time with each Welcome; may be nil.
	serverTime func(time.Time)
	// extra is more for status: the services of the init, the network.
	extra func() map[string]any

	hardware host.Roots
	lldp     *host.LLDPListener
	current  *identity.Current
	member   chan struct{} // closed once there is an identity in current
	secrets  *secret.Registry
	running  atomic.Pointer[agent.Agent]
	phase    atomic.Pointer[phase]
	started  time.Time
}

// phase is where a daemon without an agent stands.
type phase struct{ state, problem string }

func newDaemon(p *place, logs *logging) *daemon {
	d := &daemon{
		place: p, logs: logs, hardware: host.Live(), lldp: &host.LLDPListener{Log: logs.log},
		current: identity.NewCurrent(nil), member: make(chan struct{}), secrets: logs.secrets, started: time.Now(),
	}
	d.hardware.Neighbours = d.lldp.Neighbours
	d.hardware.DataDir = p.DataDir
	d.setPhase("starting", "")
	return d
}

func (d *daemon) setPhase(state, problem string) { d.phase.Store(&phase{state, problem}) }

// addTo gives a supervisor the daemon's services.
func (d *daemon) addTo(s *supervisor.Supervisor, needs ...string) error {
	retry := supervisor.WithBackoff(supervisor.Backoff{Initial: time.Second, Max: 30 * time.Second})
	return errors.Join(
		s.Add(d.lldp, supervisor.Restart(supervisor.OnFailure)),
		s.Add(&status.Server{Path: d.place.SocketPath, Version: version, Status: d.status, Doctor: d.doctor, Log: d.logs.log}),
		s.Add(supervisor.Func("agent", d.run), supervisor.Needs(needs...), supervisor.StopWithin(15*time.Second), retry),
		s.Add(supervisor.Func("renewal", d.renew)),
	)
}

// run is one life of the agent: become a node, open the journal, hold the
// session until ctx ends.
func (d *daemon) run(ctx context.Context) error {
	if err := os.MkdirAll(d.place.DataDir, 0o700); err != nil {
		return err
	}
	id, err := d.identity(ctx)
	if err != nil {
		d.setPhase("joining", err.Error())
		return err
	}
	if d.joined != nil {
		if err := d.joined(); err != nil {
			return err
		}
	}
	if d.current.Get() == nil {
		d.current.Set(id)
		close(d.member)
	}
	a, closeAgent, err := d.newAgent(ctx, id)
	if err != nil {
		d.setPhase("starting", err.Error())
		return err
	}
	defer closeAgent()
	d.running.Store(a)
	defer d.running.Store(nil)
	supervisor.NotifyReady(ctx)
	return a.Run(ctx)
}

// identity loads this node's, or joins when there is none.
func (d *daemon) identity(ctx context.Context) (*identity.Identity, error) {
	id, err := d.place.store().Load()
	if err == nil {
		if id.Role != d.place.role {
			return nil, fmt.Errorf("the identity in %s is for the role %s, and this is a %s; %s", d.place.DataDir, pki.RoleWord(id.Role), pki.RoleWord(d.place.role), identity.WayBack)
		}
		return id, nil
	}
	if !errors.Is(err, identity.ErrNotJoined) || d.token == nil {
		return nil, err
	}
	token, err := d.token()
	if err != nil {
		return nil, err
	}
	defer token.Destroy()
	live, err := d.secrets.New(append([]byte(nil), token.Reveal()...))
	if err != nil {
		return nil, err
	}
	defer live.Destroy()
	d.setPhase("joining", "")
	d.logs.log.Info("joining", "gateway", d.place.GatewayURL, "token", token.ID())
	joining, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	id, err = joinHere(joining, d.place, token)
	if err != nil {
		return nil, fmt.Errorf("join %s: %w", d.place.GatewayURL, err)
	}
	d.logs.log.Info("joined", "node", id.NodeID, "machine", id.MachineID, "role", pki.RoleWord(id.Role))
	return id, nil
}

// floor is a time that has certainly passed: what TLS chains are checked at
// until the gateway's time is known.
func (d *daemon) floor() time.Time {
	if a := d.running.Load(); a != nil {
		if t, ok := a.ServerTime(); ok {
			return t
		}
	}
	if id := d.current.Get(); id != nil {
		return id.Floor()
	}
	return d.place.floor
}

// now is the best known server time.
func (d *daemon) now() time.Time {
	if a := d.running.Load(); a != nil {
		if t, ok := a.ServerTime(); ok {
			return t
		}
	}
	if floor := d.floor(); floor.After(time.Now()) {
		return floor
	}
	return time.Now()
}

func (d *daemon) key() crypto.Signer { return d.current.Get().Key }

// client makes an HTTP client for calls beside the session: each has
// connections of its own, so that an image never starves a heartbeat.
func (d *daemon) client(withCertificate bool) *http.Client {
	o := identity.ClientOptions{Roots: d.place.roots, Floor: d.floor}
	if withCertificate {
		o.Certificate = d.current.Certificate
	}
	return identity.HTTPClient(o)
}

// newAgent assembles an agent of the parts that this mode has.
func (d *daemon) newAgent(ctx context.Context, id *identity.Identity) (a *agent.Agent, closeAgent func(), err error) {
	commandRoots, err := id.CommandRoots(d.place.roots, d.place.CommandRootSHA256)
	if err != nil {
		return nil, nil, err
	}
	facts, err := host.Read(ctx, d.hardware)
	if err != nil {
		return nil, nil, err
	}
	hardwareKey, err := hex.DecodeString(facts.HardwareKey)
	if err != nil {
		return nil, nil, fmt.Errorf("hardware key: %w", err)
	}
	bootID, err := host.BootID(d.hardware)
	if err != nil {
		return nil, nil, err
	}
	book, err := journal.Open(ctx, journal.Options{
		Path:   filepath.Join(d.place.DataDir, "journal.db"),
		Anchor: journal.AnchorIn(d.place.DataDir),
		Probe:  journal.ExecProbe("/proc/self/exe", probeVerb),
	})
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			book.Close()
		}
	}()
	deps := agent.Deps{
		Clock:    clock.System(),
		Random:   mathrand.Float64,
		Dialer:   &session.Net{URL: d.place.GatewayURL, TLS: pki.ClientTLS(d.place.roots, d.current.Certificate, d.floor)},
		Journal:  book,
		Verifier: commandRoots,
		Inventory: func(ctx context.Context) ([]host.Section, error) {
			return host.Collect(ctx, d.hardware)
		},
		Secrets: &secret.Requester{NodeID: id.NodeID, Key: d.key, Now: d.now, Registry: d.secrets},
		Prove:   d.prove,
		After:   d.after,
		OnSession: func(up bool) {
			if a := d.running.Load(); up && a != nil && d.serverTime != nil {
				if t, ok := a.ServerTime(); ok {
					d.serverTime(t)
				}
			}
		},
		Log: d.logs.log,
	}
	if d.sections != nil {
		sections, err := d.sections(d)
		if err != nil {
			return nil, nil, err
		}
		deps.Converger, err = converge.New(converge.Options{
			NodeID: id.NodeID, Verifier: commandRoots, DataDir: d.place.DataDir, Sections: sections,
			Clock: deps.Clock, ServerTime: d.now, Log: d.logs.log,
			OnChange: func(*bcdv1.SpecStatus) {
				if a := d.running.Load(); a != nil {
					a.SpecChanged()
				}
			},
		})
		if err != nil {
			return nil, nil, err
		}
	}
	var executorsErr error
	deps.Executors = func(a *agent.Agent) []dispatch.Executor {
		var all []dispatch.Executor
		all, executorsErr = d.allExecutors(a)
		return all
	}
	a, err = agent.New(agent.Config{
		NodeID: id.NodeID, Role: id.Role, Version: version, BootID: bootID, HardwareKeyHash: hardwareKey, Fallback: true,
	}, deps)
	if err = errors.Join(err, executorsErr); err != nil {
		return nil, nil, err
	}
	return a, func() {
		if err := book.Close(); err != nil {
			d.logs.log.Error("the journal did not close", "error", err)
		}
	}, nil
}

// prove signs a gateway's nonce where TLS ended in between (IdentityProof).
func (d *daemon) prove(c *bcdv1.IdentityChallenge) (*bcdv1.IdentityProof, error) {
	id := d.current.Get()
	digest := sha256.Sum256(append(append([]byte("bcd inner auth v1\n"), c.Nonce...), c.Gateway...))
	signature, err := id.Key.Sign(rand.Reader, digest[:], crypto.SHA256)
	if err != nil {
		return nil, err
	}
	proof := &bcdv1.IdentityProof{Signature: signature}
	for _, certificate := range id.Chain {
		proof.CertificateChain = append(proof.CertificateChain, certificate.Raw)
	}
	return proof, nil
}

// after does what a result asked for, once its outcome was acknowledged.
func (d *daemon) after(ctx context.Context, action dispatch.After, commandID string) error {
	if action != dispatch.AfterReboot {
		return fmt.Errorf("this mode has no action %q after an acknowledgement", action)
	}
	d.logs.log.Info("the outcome is acknowledged; restarting the machine", "command", commandID)
	return d.restart(ctx, "command "+commandID)
}

// renew keeps the certificate fresh, whether or not there is a session.
func (d *daemon) renew(ctx context.Context) error {
	select {
	case <-d.member:
	case <-ctx.Done():
		return nil
	}
	r := &identity.Renewer{
		Store: d.place.store(), Current: d.current, GatewayURL: d.place.GatewayURL, Roots: d.place.roots,
		HTTP:  func(withCertificate bool) connect.HTTPClient { return d.client(withCertificate) },
		Clock: clock.System(), Now: d.now, Log: d.logs.log,
		OnRenewed: func(*identity.Identity) {
			if a := d.running.Load(); a != nil {
				a.IdentityChanged(ctx)
			}
		},
	}
	return r.Run(ctx)
}

// probeVerb is the hidden verb that opens a journal in a child process, since
// a damaged one can kill the process that maps it.
const probeVerb = "probe-journal"
