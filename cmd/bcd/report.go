package main

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/better-compute/bcd/agent/doctor"
	"github.com/better-compute/bcd/agent/identity"
	"github.com/better-compute/bcd/agent/journal"
	"github.com/better-compute/bcd/agent/pki"
	"github.com/better-compute/bcd/agent/status"
)

// status is what the socket tells about the running daemon.
func (d *daemon) status(context.Context) *status.Status {
	now := d.now()
	out := &status.Status{
		Schema: status.Schema, Time: now,
		Agent: status.Agent{
			Version: version, Role: pki.RoleWord(d.place.role), Site: d.place.Site,
			PID: os.Getpid(), Started: d.started,
		},
		Session: status.Session{Gateway: d.place.GatewayURL},
	}
	at := d.phase.Load()
	out.Agent.State, out.Agent.Problem = at.state, at.problem
	if id := d.current.Get(); id != nil {
		out.Agent.NodeID, out.Agent.NotAfter = id.NodeID, id.NotAfter()
	}
	if d.extra != nil {
		out.Sections = map[string]json.RawMessage{}
		for name, value := range d.extra() {
			if raw, err := json.Marshal(value); err == nil {
				out.Sections[name] = raw
			}
		}
	}
	a := d.running.Load()
	if a == nil {
		return out
	}
	s := a.Status()
	out.Agent.State, out.Agent.Problem = "connecting", s.Session.LastError
	if s.Session.Connected {
		out.Agent.State, out.Agent.Problem = "connected", ""
	}
	if s.Refusal != "" {
		out.Agent.Problem = s.Refusal
	}
	if s.Revoked != "" {
		out.Agent.Problem = "this identity was revoked: " + s.Revoked
	}
	out.Agent.NodeID, out.Agent.BootID, out.Agent.Machine = s.NodeID, s.BootID, s.MachineName
	if s.Site != "" {
		out.Agent.Site = s.Site
	}
	out.Session.Connected, out.Session.Since, out.Session.Epoch = s.Session.Connected, s.Session.Since, s.Session.Epoch
	out.Session.LastError, out.Session.NextTry, out.Session.ServerTime = s.Session.LastError, s.Session.NextTry, s.ServerTime
	out.Journal = status.Journal{ID: s.JournalID, Events: int64(s.Journal.Events), Bytes: s.Journal.Bytes}
	if s.Spec != nil {
		out.Spec = status.Spec{Accepted: s.Spec.Accepted, Observed: s.Spec.Observed, Refused: s.Spec.Refused}
	}
	for _, c := range s.Commands {
		out.Commands = append(out.Commands, status.Command{ID: c.ID, Kind: c.Kind, Lane: c.Lane, State: c.State})
	}
	for _, c := range s.Conditions {
		out.Conditions = append(out.Conditions, status.Condition{Type: c.Type, Status: c.Status, Reason: c.Reason, Message: c.Message, Since: c.Since})
	}
	return out
}

// doctor is the report of the running daemon.
func (d *daemon) doctor(ctx context.Context) (any, error) {
	in := doctorInputs(d.place)
	in.ServerTime = func() (time.Time, bool) {
		if a := d.running.Load(); a != nil {
			return a.ServerTime()
		}
		return time.Time{}, false
	}
	in.Journal = func(context.Context) (doctor.Journal, error) {
		a := d.running.Load()
		if a == nil {
			return doctor.Journal{}, fs.ErrNotExist
		}
		s := a.Status()
		return doctor.Journal{
			Path:  filepath.Join(d.place.DataDir, "journal.db"),
			Bytes: s.Journal.Bytes, LimitBytes: journal.MaxBytes,
			Commands: len(s.Commands), Events: s.Journal.Events, EventLimit: journal.MaxEvents,
		}, nil
	}
	return doctor.Run(ctx, in), nil
}

// doctorInputs are what the doctor asks of a machine that stands at p.
func doctorInputs(p *place) doctor.Inputs {
	in := doctor.FromHost(p.hardware())
	in.Config = func(context.Context) (doctor.Config, error) {
		c := doctor.Config{Path: p.source, Gateway: p.GatewayURL, Site: p.Site}
		if info, err := os.Stat(p.source); err == nil {
			c.Mode = info.Mode()
		}
		return c, nil
	}
	in.Identity = func(context.Context) (doctor.Identity, error) {
		id, err := p.store().Load()
		if errors.Is(err, identity.ErrNotJoined) {
			return doctor.Identity{}, doctor.ErrNotJoined
		}
		if err != nil {
			return doctor.Identity{}, err
		}
		return doctor.Identity{NodeID: id.NodeID, Site: id.Site, Role: pki.RoleWord(id.Role), NotBefore: id.Leaf().NotBefore, NotAfter: id.NotAfter()}, nil
	}
	in.Disk = func() (doctor.Disk, error) { return doctor.StatDisk(p.DataDir) }
	if p.roots != nil {
		in.TLS = pki.ClientTLS(p.roots, nil, time.Now)
	}
	if request, err := http.NewRequest(http.MethodGet, p.GatewayURL, nil); err == nil {
		if proxy, err := http.ProxyFromEnvironment(request); err == nil && proxy != nil {
			in.Proxy = proxy.Redacted()
		}
	}
	return in
}
