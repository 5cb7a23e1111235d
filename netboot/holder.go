package netboot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/durable"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	leaseFile    = "boot-lease.json"
	maxLeaseFile = 4096
	// settleAfter is how long after the answering has stopped the last answer
	// is certainly gone: each is decided and sent within 100 ms.
	settleAfter = 500 * time.Millisecond
)

// keptLease is a standing lease on disk. It counts for the node that was given
// it only: a machine that joined anew is another agent.
type keptLease struct {
	Node  string `json:"node"`
	Site  string `json:"site"`
	Fence int64  `json:"fence"`
}

// Holder is the shell around Lease: its file, its clock and its stops. It is
// safe for concurrent use.
type Holder struct {
	Dir        string
	Node, Site string
	Clock      clock.Clock
	Log        *slog.Logger

	mu    sync.Mutex
	lease Lease
	// forget says that a file that must go is still there.
	forget  bool
	problem string
}

// Load takes up a standing lease of the last run.
func (h *Holder) Load() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	data, err := durable.ReadFile(h.path(), maxLeaseFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var kept keptLease
	if err == nil {
		err = json.Unmarshal(data, &kept)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("the kept boot lease %s is damaged and was dropped: %w", h.path(), err), durable.Remove(h.path()))
	}
	if kept.Node != h.Node || kept.Site != h.Site {
		h.Log.Info("the kept boot lease is another agent's and was dropped", "node", kept.Node)
		return durable.Remove(h.path())
	}
	h.lease.Restore(kept.Fence)
	return nil
}

func (h *Holder) path() string { return filepath.Join(h.Dir, leaseFile) }

// Holding says whether machines may be answered now. It is quick.
func (h *Holder) Holding() bool {
	_, holding := h.Fence()
	return holding
}

// Fence is the lease's, while it is held.
func (h *Holder) Fence() (fence int64, holding bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.lease.fence, h.lease.Holding(h.Clock.Now())
}

// State is for status.
func (h *Holder) State() LeaseState {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.lease.State(h.Clock.Now())
}

// Problem says what is wrong with the lease's file, "" when nothing is.
func (h *Holder) Problem() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.problem
}

// ask fills in the lease's part of a request. Until a file that must go is
// gone, nothing is said to be released.
func (h *Holder) ask(now time.Time, request *bcdv1.SyncRequest) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lease.Ask(now, request)
}

// answered takes the lease of an answer in, and does what follows. Between the
// stop and the word of it the last answers go out.
func (h *Holder) answered(ctx context.Context, sent time.Time, answer *bcdv1.Lease) {
	h.mu.Lock()
	was := h.lease.State(h.Clock.Now())
	do := h.lease.Answered(sent, answer)
	is := h.lease.State(h.Clock.Now())
	h.forget = h.forget || do.Forget
	if do.Keep != 0 {
		h.keep(do.Keep)
	}
	forgotten := h.forgetFile()
	stopping := h.lease.stopping
	h.mu.Unlock()
	if was.Kind != is.Kind || was.Fence != is.Fence {
		h.Log.Info("boot lease", "kind", is.Kind, "fence", is.Fence, "holder", is.Holder, "message", is.Message)
	}
	if !stopping || !forgotten {
		return
	}
	timer := h.Clock.NewTimer(settleAfter)
	defer timer.Stop()
	select {
	case <-timer.C():
	case <-ctx.Done():
		return
	}
	h.mu.Lock()
	h.lease.Stopped()
	h.mu.Unlock()
}

func (h *Holder) keep(fence int64) {
	data, err := json.Marshal(keptLease{Node: h.Node, Site: h.Site, Fence: fence})
	if err == nil {
		err = durable.WriteFile(h.path(), data, 0o600)
	}
	h.forget = false
	if h.problem = ""; err != nil {
		h.problem = fmt.Sprintf("the boot lease cannot be kept on disk, so that this agent answers no machine after a restart without its gateway: %v", err)
		h.Log.Error("the boot lease was not kept", "error", err)
	}
}

// forgetFile removes the file when it must go, and says whether it is gone.
func (h *Holder) forgetFile() bool {
	if !h.forget {
		return true
	}
	if err := durable.Remove(h.path()); err != nil {
		h.problem = fmt.Sprintf("the boot lease on disk cannot be removed, so it is not given back: %v", err)
		h.Log.Error("the kept boot lease was not removed", "error", err)
		return false
	}
	h.forget, h.problem = false, ""
	return true
}
