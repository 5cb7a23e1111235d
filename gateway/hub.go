package gateway

import (
	"bytes"
	"context"
	"sync"
	"time"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// welcomeRate is how many sessions a second the gateway is ready to begin; the
// daemons spread their return after a loss accordingly.
const welcomeRate = 400

// hub knows the live sessions of this process, the progress of their commands,
// and who watches. All of it is in memory.
type hub struct {
	mu       sync.Mutex
	sessions map[string]*session // by node id: the authoritative one
	all      map[*session]struct{}
	progress map[string]progressEntry
	version  int64
	watchers map[chan struct{}]struct{}
	probes   int64
}

type progressEntry struct {
	progress  *bcdv1.Progress
	nodeID    string
	machineID string
	version   int64
}

func newHub() *hub {
	return &hub{
		sessions: map[string]*session{}, all: map[*session]struct{}{},
		progress: map[string]progressEntry{}, watchers: map[chan struct{}]struct{}{},
	}
}

func (h *hub) enter(s *session) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all[s] = struct{}{}
}

// leave forgets a session and says whether it was its node's authoritative
// one here.
func (h *hub) leave(s *session) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.all, s)
	if h.sessions[s.peer.NodeID] != s {
		return false
	}
	delete(h.sessions, s.peer.NodeID)
	for id, p := range h.progress {
		if p.nodeID == s.peer.NodeID {
			delete(h.progress, id)
		}
	}
	return true
}

// promote makes s its node's authoritative session, unless a newer epoch is
// here already. It returns the session that must end.
func (h *hub) promote(s *session) *session {
	h.mu.Lock()
	defer h.mu.Unlock()
	old := h.sessions[s.peer.NodeID]
	if old != nil && old.epoch > s.epoch {
		return s
	}
	h.sessions[s.peer.NodeID] = s
	return old
}

func (h *hub) session(nodeID string) *session {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.sessions[nodeID]
}

func (h *hub) connected(nodeID string) bool { return h.session(nodeID) != nil }

func (h *hub) every() []*session {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := make([]*session, 0, len(h.all))
	for s := range h.all {
		list = append(list, s)
	}
	return list
}

// spread is the window over which daemons should come back.
func (h *hub) spread() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return max(time.Second, time.Duration(len(h.sessions))*time.Second/welcomeRate)
}

// wake tells a node's session that something may be waiting for it.
func (h *hub) wake(nodeID string) {
	if s := h.session(nodeID); s != nil {
		select {
		case s.wake <- struct{}{}:
		default:
		}
	}
}

// aliveBefore says whether another daemon than the one behind hello holds the
// node's session and answers. The same boot of the same hardware is the same
// daemon, come back before its old connection was noticed to be dead.
func (h *hub) aliveBefore(ctx context.Context, hello *bcdv1.Hello) bool {
	old := h.session(hello.GetNodeId())
	if old == nil || old.bootID == hello.GetBootId() && bytes.Equal(old.hardware, hello.GetHardwareKeyHash()) {
		return false
	}
	h.mu.Lock()
	h.probes++
	sequence := h.probes
	h.mu.Unlock()
	answer := old.expectProbe(sequence)
	defer old.forgetProbe(sequence)
	limit := time.NewTimer(probeLimit)
	defer limit.Stop()
	if !old.post(ctx, gotProbe{sequence}, limit.C) {
		return false
	}
	select {
	case <-answer:
		return true
	case <-old.done:
	case <-limit.C:
	case <-ctx.Done():
	}
	return false
}

func (h *hub) setProgress(nodeID, machineID string, p *bcdv1.Progress) {
	h.mu.Lock()
	h.version++
	h.progress[p.GetCommandId()] = progressEntry{p, nodeID, machineID, h.version}
	h.mu.Unlock()
	h.changed()
}

func (h *hub) endProgress(commandID string) {
	h.mu.Lock()
	delete(h.progress, commandID)
	h.mu.Unlock()
}

func (h *hub) progressOf(commandID string) *bcdv1.Progress {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.progress[commandID].progress
}

// progressSince lists what is newer than version, and the version it is at.
func (h *hub) progressSince(version int64, machineID string) (list []*bcdv1.Progress, at int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, p := range h.progress {
		if p.version > version && (machineID == "" || p.machineID == machineID) {
			list = append(list, p.progress)
		}
	}
	return list, h.version
}

// watch gives a channel that has an element when something changed since the
// last one was taken. A watcher that does not look costs nothing.
func (h *hub) watch() (changed <-chan struct{}, stop func()) {
	ch := make(chan struct{}, 1)
	h.mu.Lock()
	h.watchers[ch] = struct{}{}
	h.mu.Unlock()
	return ch, func() {
		h.mu.Lock()
		delete(h.watchers, ch)
		h.mu.Unlock()
	}
}

func (h *hub) changed() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for ch := range h.watchers {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}
