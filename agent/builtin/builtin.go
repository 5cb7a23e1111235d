// Package builtin has the executors that every mode has: diag.ping,
// inventory.refresh and node.reboot.
package builtin

import (
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/dispatch"
	"github.com/better-compute/bcd/agent/host"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Node is what the executors ask of the daemon; *agent.Agent is one.
type Node interface {
	Version() string
	BootID() string
	Uptime() time.Duration
	// RefreshInventory reads the machine again and reports what changed, or
	// all.
	RefreshInventory(ctx context.Context, all bool) (sections []host.Section, changed []string, err error)
}

// maxPayload and maxReason are the contract's bounds.
const (
	maxPayload = 4 << 10
	maxReason  = 256
)

// Executors returns all of them.
func Executors(n Node) []dispatch.Executor {
	return []dispatch.Executor{&Ping{n}, &Refresh{n}, &Reboot{n}}
}

// body decodes a command's body, which acceptance has decoded once before.
func body(cmd dispatch.Command, m proto.Message) error {
	if err := proto.Unmarshal(cmd.Body, m); err != nil {
		return &dispatch.Failure{Code: "MALFORMED", Message: fmt.Sprintf("the body of %s cannot be read: %v", cmd.Kind, err), Err: err}
	}
	return nil
}

// Ping is diag.ping: it answers, and has no effect.
type Ping struct{ Node Node }

func (*Ping) Kind() string { return "diag.ping" }

func (p *Ping) Run(_ context.Context, cmd dispatch.Command, _ dispatch.Progress) (dispatch.Result, error) {
	m := new(bcdv1.DiagPing)
	if err := body(cmd, m); err != nil {
		return dispatch.Result{}, err
	}
	if n := len(m.GetPayload()); n > maxPayload {
		return dispatch.Result{}, &dispatch.Failure{Code: "TOO_LARGE", Message: fmt.Sprintf("payload of %d bytes, at most %d are allowed", n, maxPayload)}
	}
	return dispatch.Result{
		Message: "pong from " + p.Node.Version(),
		Body: &bcdv1.DiagPingResult{
			Payload: m.GetPayload(), Version: p.Node.Version(), BootId: p.Node.BootID(), UptimeMs: p.Node.Uptime().Milliseconds(),
		},
	}, nil
}

func (*Ping) Recover(context.Context, dispatch.Command) (dispatch.Recovery, error) {
	return dispatch.Recovery{Action: dispatch.Resume}, nil
}

// Refresh is inventory.refresh: reading again changes nothing.
type Refresh struct{ Node Node }

func (*Refresh) Kind() string { return "inventory.refresh" }

func (r *Refresh) Run(ctx context.Context, cmd dispatch.Command, _ dispatch.Progress) (dispatch.Result, error) {
	m := new(bcdv1.InventoryRefresh)
	if err := body(cmd, m); err != nil {
		return dispatch.Result{}, err
	}
	sections, changed, err := r.Node.RefreshInventory(ctx, m.GetAll())
	if err != nil {
		return dispatch.Result{}, fmt.Errorf("read the inventory: %w", err)
	}
	result := &bcdv1.InventoryRefreshResult{Sha256: map[string][]byte{}, Changed: changed}
	for _, s := range sections {
		result.Sha256[s.Name] = s.SHA256[:]
		if s.Error != "" {
			result.Unreadable = append(result.Unreadable, s.Name)
		}
	}
	slices.Sort(result.Changed)
	return dispatch.Result{
		Message: fmt.Sprintf("%d sections read, %d changed, %d not whole", len(sections), len(changed), len(result.Unreadable)),
		Body:    result,
	}, nil
}

func (*Refresh) Recover(context.Context, dispatch.Command) (dispatch.Recovery, error) {
	return dispatch.Recovery{Action: dispatch.Resume}, nil
}

// Reboot is node.reboot. Its run only says so: the machine restarts once the
// outcome is acknowledged, so that a success is never lost with the memory it
// was written in.
type Reboot struct{ Node Node }

func (*Reboot) Kind() string { return "node.reboot" }

func (r *Reboot) Run(_ context.Context, cmd dispatch.Command, _ dispatch.Progress) (dispatch.Result, error) {
	m := new(bcdv1.NodeReboot)
	if err := body(cmd, m); err != nil {
		return dispatch.Result{}, err
	}
	if n := len(m.GetReason()); n > maxReason {
		return dispatch.Result{}, &dispatch.Failure{Code: "TOO_LARGE", Message: fmt.Sprintf("reason of %d bytes, at most %d are allowed", n, maxReason)}
	}
	message := "the machine restarts once this is acknowledged"
	if m.GetReason() != "" {
		message += ": " + m.GetReason()
	}
	return dispatch.Result{Message: message, Body: &bcdv1.NodeRebootResult{BootId: r.Node.BootID()}, After: dispatch.AfterReboot}, nil
}

// Recover: a run that never finished has not restarted the machine, because
// that comes after the acknowledgement. When the boot id changed all the same,
// what was asked for has happened; otherwise it may still be done.
func (r *Reboot) Recover(_ context.Context, cmd dispatch.Command) (dispatch.Recovery, error) {
	if cmd.BootID != "" && cmd.BootID != r.Node.BootID() {
		return dispatch.Recovery{
			Action:  dispatch.Done,
			Result:  dispatch.Result{Body: &bcdv1.NodeRebootResult{BootId: cmd.BootID}},
			Message: "the machine has restarted since: boot id " + r.Node.BootID() + " after " + cmd.BootID,
		}, nil
	}
	return dispatch.Recovery{Action: dispatch.Resume}, nil
}
