package gateway

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/time/rate"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/intent"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// maxSyncWait bounds how long a Sync waits for a change.
	maxSyncWait = 20 * time.Second
	// syncPace is the least time between two looks of one Sync that waits:
	// each change in the fleet wakes it, and a look reads every machine.
	syncPace = 100 * time.Millisecond
	// maxSiteAgents bounds the agents of a site: two are the normal case.
	maxSiteAgents = 16

	maxSyncTraces    = 64
	maxSyncWaiting   = 256
	maxSyncArtefacts = 256
	maxSyncLines     = 16
	maxSyncLine      = 512
)

// siteService is bcd.v1.SiteService.
type siteService struct{ g *Gateway }

// sites is what the gateway keeps of sites in memory.
type sites struct {
	mu     sync.Mutex
	byName map[string]*siteMemory
}

// siteMemory is one site's.
type siteMemory struct {
	// steps is held over a step of the lease and the transaction that keeps
	// it, so that memory and store tell the same. Take it before a
	// transaction, never within one.
	steps sync.Mutex
	// mu guards the rest, for moments only.
	mu sync.Mutex
	// until is when the expiring lease with untilFence ends; see leaseState.
	until      time.Time
	untilFence int64
	agents     map[string]*agentMemory
	table      *bcdv1.Signed
	generation int64
	fault      string
	asks       *rate.Limiter
}

// agentMemory is what an agent last said.
type agentMemory struct {
	seen time.Time
	said *bcdv1.SyncRequest
	// end ends the Sync of the agent that waits.
	end context.CancelFunc
}

func (s *sites) of(name string) *siteMemory {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.byName[name]
	if m == nil {
		m = &siteMemory{agents: map[string]*agentMemory{}, asks: rate.NewLimiter(bootAskRate, bootAskBurst)}
		if s.byName == nil {
			s.byName = map[string]*siteMemory{}
		}
		s.byName[name] = m
	}
	return m
}

// lease is the site's lease as a state. A fence that this process never
// renewed may have been renewed by the one before, until the moment that this
// one started.
func (m *siteMemory) lease(g *Gateway, site *Site) leaseState {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := leaseState{BootLease: site.Lease}
	if s.Kind == bcdv1.LeaseKind_LEASE_KIND_EXPIRING {
		if s.Until = g.started.Add(leaseTTL); m.untilFence == s.Fence && !m.until.IsZero() {
			s.Until = m.until
		}
	}
	return s
}

// stepped remembers a step that was stored.
func (m *siteMemory) stepped(s leaseState) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.until, m.untilFence = s.Until, s.Fence
}

// failed remembers why there is no table, and says whether that is new.
func (m *siteMemory) failed(fault string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	fresh := m.fault != fault
	m.fault = fault
	return fresh
}

// loadSite gets a site, or the beginning of one.
func loadSite(tx Tx, name string) (*Site, error) {
	site, err := tx.Site(name)
	if errors.Is(err, ErrNotFound) {
		return &Site{Name: name, Unknown: bootRamdisk}, nil
	}
	return site, err
}

// siteAgents lists the agents of a site that count: not revoked, and with a
// certificate that can still be renewed.
func siteAgents(tx Tx, now time.Time, site *Site) ([]string, error) {
	var out []string
	for _, id := range site.Agents {
		n, err := tx.Node(id)
		if errors.Is(err, ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if !n.Revoked && now.UnixMilli() < n.CertExpiresMS+renewGrace.Milliseconds() {
			out = append(out, id)
		}
	}
	return out, nil
}

// sitePeer is the agent behind a call.
func sitePeer(ctx context.Context) (*Peer, error) {
	c := callerOf(ctx)
	switch {
	case c.fault != nil:
		return nil, connect.NewError(connect.CodeUnauthenticated, c.fault)
	case c.peer == nil:
		return nil, connect.NewError(connect.CodeUnauthenticated, errors.New("this needs the certificate of a site agent; join with a token that bcd-gateway token create --role site --site NAME made"))
	case c.expired != nil:
		return nil, connect.NewError(connect.CodeUnauthenticated, fmt.Errorf("%w; renew it, or join again", c.expired))
	case c.peer.Role != bcdv1.Role_ROLE_SITE:
		return nil, connect.NewError(connect.CodePermissionDenied, fmt.Errorf("node %s has the role %s; only a site agent boots machines: join with a token of role site", c.peer.NodeID, word(c.peer.Role)))
	case c.peer.Site == "":
		return nil, connect.NewError(connect.CodePermissionDenied, fmt.Errorf("the certificate of %s names no site; join again with a token that has one: bcd-gateway token create --role site --site NAME", c.peer.NodeID))
	}
	return c.peer, nil
}

// trustedSite refuses an agent that was revoked since its certificate was made.
func trustedSite(tx Tx, now time.Time, peer *Peer) (*Node, error) {
	node, err := tx.Node(peer.NodeID)
	if errors.Is(err, ErrNotFound) {
		return nil, connect.NewError(connect.CodePermissionDenied, fmt.Errorf("node %s is not known to this gateway; join again with a new token", peer.NodeID))
	}
	if err != nil {
		return nil, err
	}
	reject, err := stillTrusted(tx, now, peer, node)
	if reject != nil {
		return nil, connect.NewError(connect.CodePermissionDenied, errors.New(reject.GetDetail()))
	}
	return node, err
}

// syncFault says which bound a request breaks. What is only too long within is
// cut later instead: a lease must not be lost to a trace.
func syncFault(r *bcdv1.SyncRequest) string {
	switch {
	case r.GetWaitMs() < 0 || r.GetTableGeneration() < 0 || r.GetFence() < 0 || r.GetReleasedFence() < 0:
		return "sync: a negative number"
	case len(r.GetTraces()) > maxSyncTraces:
		return fmt.Sprintf("sync: %d boot traces; at most %d are allowed at once", len(r.GetTraces()), maxSyncTraces)
	case len(r.GetWaitingMacs()) > maxSyncWaiting:
		return fmt.Sprintf("sync: %d MACs that wait; at most %d are allowed", len(r.GetWaitingMacs()), maxSyncWaiting)
	case len(r.GetArtefacts()) > maxSyncArtefacts:
		return fmt.Sprintf("sync: %d artefacts; at most %d are allowed", len(r.GetArtefacts()), maxSyncArtefacts)
	case len(r.GetProblems()) > maxSyncLines || len(r.GetServing()) > maxSyncLines:
		return fmt.Sprintf("sync: %d problems and %d addresses; at most %d of each are allowed", len(r.GetProblems()), len(r.GetServing()), maxSyncLines)
	}
	return ""
}

// Sync answers as soon as there is something that the agent does not have, or
// when its wait is over. A node's next Sync ends the one before.
func (s siteService) Sync(ctx context.Context, request *connect.Request[bcdv1.SyncRequest]) (*connect.Response[bcdv1.SyncResponse], error) {
	g, in := s.g, request.Msg
	received := g.now()
	peer, err := sitePeer(ctx)
	if err != nil {
		return nil, err
	}
	if fault := syncFault(in); fault != "" {
		return nil, invalid("%s", fault)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	changed, stop := g.hub.watch()
	defer stop()
	look := &siteLook{g: g, peer: peer, memory: g.sites.of(peer.Site), in: in, received: received}
	if err := look.begin(ctx, cancel); err != nil {
		return nil, rpcError(err)
	}
	wait := min(time.Duration(in.GetWaitMs())*time.Millisecond, maxSyncWait)
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		if err := look.once(ctx); err != nil {
			return nil, rpcError(err)
		}
		if look.out.GetLease().GetKind() == bcdv1.LeaseKind_LEASE_KIND_EXPIRING {
			wait = min(wait, expiringWait)
		}
		now := g.now()
		left := received.Add(wait).Sub(now)
		if look.due || left <= 0 {
			return connect.NewResponse(look.out), nil
		}
		if !look.wake.IsZero() {
			left = min(left, look.wake.Sub(now))
		}
		timer.Reset(max(left, syncPace))
		select {
		case <-changed:
			// What comes within the pace is seen by the same look.
			timer.Reset(syncPace)
			select {
			case <-timer.C:
			case <-ctx.Done():
				return nil, look.ended(ctx)
			}
		case <-timer.C:
		case <-g.stopped:
			return nil, connect.NewError(connect.CodeUnavailable, errors.New("the gateway stops; ask again"))
		case <-ctx.Done():
			return nil, look.ended(ctx)
		}
	}
}

// siteLook is one Sync's view of its site.
type siteLook struct {
	g        *Gateway
	peer     *Peer
	memory   *siteMemory
	in       *bcdv1.SyncRequest
	received time.Time

	// heard says that what the agent told has been stored; replaced that a
	// later Sync of the agent came.
	heard    bool
	replaced bool

	out  *bcdv1.SyncResponse
	due  bool
	wake time.Time
}

// begin takes the place of the agent's Sync before, and remembers what it said.
func (l *siteLook) begin(ctx context.Context, cancel context.CancelFunc) error {
	err := l.g.store.View(ctx, func(tx Tx) error {
		_, err := trustedSite(tx, l.g.now(), l.peer)
		return err
	})
	if err != nil {
		return err
	}
	said := proto.CloneOf(l.in)
	said.Traces, said.WaitingMacs = nil, nil
	said.Problems, said.Serving = plainLines(said.GetProblems()), plainLines(said.GetServing())
	l.memory.mu.Lock()
	defer l.memory.mu.Unlock()
	a := l.memory.agents[l.peer.NodeID]
	if a == nil {
		a = &agentMemory{}
		l.memory.agents[l.peer.NodeID] = a
	} else if a.end != nil {
		a.end()
	}
	a.seen, a.said, a.end = l.received, said, func() {
		l.replaced = true
		cancel()
	}
	return nil
}

// ended says why a Sync that waited was cut short.
func (l *siteLook) ended(ctx context.Context) error {
	l.memory.mu.Lock()
	defer l.memory.mu.Unlock()
	if l.replaced {
		return connect.NewError(connect.CodeAborted, errors.New("a later Sync of this agent took the place of this one"))
	}
	return connect.NewError(connect.CodeCanceled, ctx.Err())
}

// once looks at the site, and writes only when something follows from that.
func (l *siteLook) once(ctx context.Context) error {
	l.memory.steps.Lock()
	defer l.memory.steps.Unlock()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var state leaseState
	var dirty bool
	err := l.g.store.View(ctx, func(tx Tx) (err error) {
		state, dirty, err = l.step(tx, false)
		return err
	})
	if err == nil && dirty {
		err = l.g.update(context.WithoutCancel(ctx), func(tx Tx) (err error) {
			state, _, err = l.step(tx, true)
			return err
		})
	}
	if err != nil {
		return err
	}
	l.memory.stepped(state)
	l.heard, l.wake = true, state.wake()
	return nil
}

// step fills out and due from the state of the store. With write it stores
// what follows; without, dirty says that there is something to store.
func (l *siteLook) step(tx Tx, write bool) (state leaseState, dirty bool, err error) {
	g, now := l.g, l.g.now()
	node, err := trustedSite(tx, now, l.peer)
	if err != nil {
		return state, false, err
	}
	site, err := loadSite(tx, l.peer.Site)
	if err != nil {
		return state, false, err
	}
	agents, err := siteAgents(tx, now, site)
	if err != nil {
		return state, false, err
	}
	if !slices.Contains(agents, node.ID) {
		if agents = append(agents, node.ID); len(agents) > maxSiteAgents {
			return state, false, connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("site %s has %d agents already; revoke those that are gone", site.Name, maxSiteAgents))
		}
	}
	if !slices.Equal(site.Agents, agents) {
		site.Agents, dirty = agents, true
	}
	before := site.Lease
	state, lease := leaseStep(now, l.memory.lease(g, site), agents, leaseSync{
		Node: node.ID, Received: l.received, Fence: l.in.GetFence(), Released: l.in.GetReleasedFence(),
	})
	if site.Lease = state.BootLease; site.Lease != before {
		dirty = true
	}
	table, changed, err := currentTable(tx, now, site, l.in.GetTableGeneration())
	var large *errTableTooLarge
	if errors.As(err, &large) {
		lease.Message += "; " + large.Error()
		if fault := large.Error(); l.memory.failed(fault) {
			g.log.Error("boot table not made", "error", fault)
		}
	} else if err != nil {
		return state, false, err
	}
	dirty = dirty || changed
	fresh := !l.heard && (len(l.in.GetTraces()) > 0 || l.in.GetReleasedFence() != 0)
	if len(l.in.GetTraces()) > 0 && !l.heard {
		dirty = true
	}
	if write {
		if !l.heard {
			if err := recordTraces(tx, now, site.Name, l.in.GetTraces()); err != nil {
				return state, false, err
			}
		}
		if err := tx.PutSite(site); err != nil {
			return state, false, err
		}
		if err := noteLease(tx, now, site, before, node); err != nil {
			return state, false, err
		}
	}
	l.out = &bcdv1.SyncResponse{Lease: lease, ServerTimeMs: now.UnixMilli()}
	if l.out.Booted, err = g.booted(tx, site.Name, l.in.GetWaitingMacs()); err != nil {
		return state, false, err
	}
	// A changed table is signed once its generation is stored.
	if table != nil && table.GetGeneration() != l.in.GetTableGeneration() && (write || !dirty) {
		if l.out.Table, err = l.signed(table); err != nil {
			return state, false, err
		}
	}
	l.due = fresh || l.out.GetTable() != nil || len(l.out.GetBooted()) > 0 || leaseIsNews(l.in, lease)
	return state, dirty, nil
}

// signed is the table under the command key. All agents get the same bytes. It
// belongs to who holds steps.
func (l *siteLook) signed(table *bcdv1.BootTable) (*bcdv1.Signed, error) {
	m := l.memory
	if m.table != nil && m.generation == table.GetGeneration() {
		return m.table, nil
	}
	signed, err := l.g.keys.Signer.Sign(intent.TypeBootTable, table)
	if err != nil {
		return nil, err
	}
	m.table, m.generation = signed, table.GetGeneration()
	m.failed("")
	return signed, nil
}

// leaseIsNews says whether the agent acts on something else than it may.
func leaseIsNews(in *bcdv1.SyncRequest, lease *bcdv1.Lease) bool {
	holds := func(k bcdv1.LeaseKind) bool {
		return k == bcdv1.LeaseKind_LEASE_KIND_STANDING || k == bcdv1.LeaseKind_LEASE_KIND_EXPIRING
	}
	acts := in.GetFence() != 0 && holds(in.GetLease())
	if !holds(lease.GetKind()) {
		return acts
	}
	return !acts || lease.GetRelease() || in.GetFence() != lease.GetFence() || in.GetLease() != lease.GetKind()
}

// noteLease writes down that the lease went to another agent.
func noteLease(tx Tx, now time.Time, site *Site, before BootLease, node *Node) error {
	lease := site.Lease
	note := func(n *Node, message string) error {
		return tx.AppendTimeline(&TimelineEntry{TimeMS: now.UnixMilli(), MachineID: n.MachineID, NodeID: n.ID, Type: "lease", Message: message})
	}
	switch {
	case lease.Holder == before.Holder && lease.Kind == before.Kind && lease.Asked == before.Asked && lease.Fence == before.Fence:
		return nil
	case lease.Holder == node.ID && (before.Holder != node.ID || before.Fence != lease.Fence || before.Kind != lease.Kind):
		return note(node, fmt.Sprintf("boots the machines of site %s: boot lease %d, %s", site.Name, lease.Fence, leaseWord(lease.Kind)))
	case before.Holder == node.ID && lease.Holder == "":
		return note(node, fmt.Sprintf("gave back boot lease %d of site %s", before.Fence, site.Name))
	}
	return nil
}

func leaseWord(k bcdv1.LeaseKind) string {
	switch k {
	case bcdv1.LeaseKind_LEASE_KIND_STANDING:
		return "standing"
	case bcdv1.LeaseKind_LEASE_KIND_EXPIRING:
		return "expiring"
	}
	return "none"
}
