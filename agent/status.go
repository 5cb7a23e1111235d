package agent

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/dispatch"
	"github.com/better-compute/bcd/agent/journal"
	"github.com/better-compute/bcd/agent/session"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Status is a snapshot of the agent, for the status socket.
type Status struct {
	NodeID      string         `json:"node_id"`
	Role        string         `json:"role"`
	Version     string         `json:"version"`
	BootID      string         `json:"boot_id"`
	Uptime      time.Duration  `json:"uptime_ns"`
	MachineID   string         `json:"machine_id,omitempty"`
	MachineName string         `json:"machine_name,omitempty"`
	Site        string         `json:"site,omitempty"`
	Session     session.Status `json:"session"`
	// Refusal is the gateway's last, as CODE: detail; empty once it took us.
	Refusal string `json:"refusal,omitempty"`
	// Revoked is why this identity was revoked; empty when it was not.
	Revoked string `json:"revoked,omitempty"`
	// ServerTime is zero before the first mark.
	ServerTime time.Time       `json:"server_time,omitzero"`
	JournalID  string          `json:"journal_id"`
	Journal    journal.Stats   `json:"journal"`
	Lanes      []LaneStatus    `json:"lanes"`
	Commands   []CommandStatus `json:"commands,omitempty"`
	Kinds      []string        `json:"kinds"`
	Conditions []Condition     `json:"conditions,omitempty"`
	Spec       *SpecStatus     `json:"spec,omitempty"`
}

// LaneStatus is one lane's.
type LaneStatus struct {
	Lane    string `json:"lane"`
	Workers int    `json:"workers"`
	// Free is workers and queue places that are free.
	Free int32 `json:"free"`
}

// CommandStatus is a command that is not over.
type CommandStatus struct {
	ID       string    `json:"id"`
	Kind     string    `json:"kind"`
	Lane     string    `json:"lane"`
	State    string    `json:"state"`
	Deadline time.Time `json:"deadline"`
	After    string    `json:"after,omitempty"`
}

// Condition is a condition for people.
type Condition struct {
	Type    string    `json:"type"`
	Status  string    `json:"status"`
	Reason  string    `json:"reason,omitempty"`
	Message string    `json:"message,omitempty"`
	Since   time.Time `json:"since,omitzero"`
	Severe  bool      `json:"severe,omitempty"`
}

// SpecStatus is how far the spec is.
type SpecStatus struct {
	Accepted int64  `json:"accepted_generation"`
	Observed int64  `json:"observed_generation"`
	Refused  string `json:"refused,omitempty"`
}

// Status returns a snapshot.
func (a *Agent) Status() Status {
	s := Status{
		NodeID: a.config.NodeID, Version: a.config.Version, BootID: a.config.BootID, Uptime: a.Uptime(),
		Session: a.session.Status(), JournalID: a.deps.Journal.ID(), Journal: a.deps.Journal.Stats(),
		Kinds: a.dispatcher.Kinds(), Role: roleWord(a.config.Role),
	}
	if now, ok := a.session.ServerTime(); ok {
		s.ServerTime = now
	}
	a.mu.Lock()
	s.MachineID, s.MachineName, s.Site = a.machine.id, a.machine.name, a.machine.site
	s.Refusal, s.Revoked = a.refusal, a.revoked
	a.mu.Unlock()
	free := a.dispatcher.Free()
	for _, l := range []struct {
		id   bcdv1.Lane
		free int32
	}{{bcdv1.Lane_LANE_CONTROL, free.GetControl()}, {bcdv1.Lane_LANE_PROVISION, free.GetProvision()}, {bcdv1.Lane_LANE_BULK, free.GetBulk()}} {
		s.Lanes = append(s.Lanes, LaneStatus{dispatch.LaneName(l.id), dispatch.Lanes[l.id].Workers, l.free})
	}
	for _, e := range a.deps.Journal.Open() {
		s.Commands = append(s.Commands, CommandStatus{
			ID: e.ID, Kind: e.Kind, Lane: dispatch.LaneName(bcdv1.Lane(e.Lane)), State: e.State.String(),
			Deadline: time.UnixMilli(e.DeadlineMS).UTC(), After: e.After,
		})
	}
	for _, c := range a.Conditions() {
		condition := Condition{Type: c.GetType(), Status: statusWord(c.GetStatus()), Reason: c.GetReason(), Message: c.GetMessage(), Severe: c.GetSevere()}
		if c.GetSinceMs() > 0 {
			condition.Since = time.UnixMilli(c.GetSinceMs()).UTC()
		}
		s.Conditions = append(s.Conditions, condition)
	}
	if a.deps.Converger != nil {
		spec := a.deps.Converger.Status()
		s.Spec = &SpecStatus{spec.GetAcceptedGeneration(), spec.GetObservedGeneration(), spec.GetRefused()}
	}
	return s
}

// Conditions are all conditions, sorted by type.
func (a *Agent) Conditions() []*bcdv1.Condition {
	a.mu.Lock()
	defer a.mu.Unlock()
	list := slices.SortedFunc(maps.Values(a.conditions), func(x, y *bcdv1.Condition) int { return cmp.Compare(x.GetType(), y.GetType()) })
	for n := range list {
		list[n] = proto.CloneOf(list[n])
	}
	return list
}

func roleWord(r bcdv1.Role) string {
	switch r {
	case bcdv1.Role_ROLE_NODE:
		return "node"
	case bcdv1.Role_ROLE_SITE:
		return "site"
	case bcdv1.Role_ROLE_RAMDISK:
		return "ramdisk"
	}
	return "unknown"
}
