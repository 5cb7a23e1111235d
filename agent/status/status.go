// Package status is the root-only socket on which a running daemon tells
// about itself: HTTP over a unix socket, JSON bodies.
//
//	GET /v1/status   what the agent is and does
//	GET /v1/doctor   the doctor's report, made now by the running agent
//	GET /v1/version  version and schema
//
// The socket is made in a private folder and renamed into place, so that it is
// never there with a wider mode; its folder is 0700, it is 0600, and who
// connects must be root or the daemon's own user besides.
package status

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
)

// Schema is the version of the JSON. It changes when a field goes or changes
// its meaning, not when one comes.
const Schema = 1

// Status is GET /v1/status, and bcd status --json.
type Status struct {
	Schema  int       `json:"schema"`
	Time    time.Time `json:"time"`
	Agent   Agent     `json:"agent"`
	Session Session   `json:"session"`
	Spec    Spec      `json:"spec"`
	Journal Journal   `json:"journal"`
	// Commands are those accepted and not yet acknowledged.
	Commands   []Command   `json:"commands"`
	Conditions []Condition `json:"conditions"`
	// Sections are for what a later room has to say, by its name.
	Sections map[string]json.RawMessage `json:"sections,omitempty"`
}

// Agent is the daemon itself.
type Agent struct {
	// State is a word: starting, joining, connecting, connected, stopping.
	State    string    `json:"state"`
	Version  string    `json:"version"`
	Role     string    `json:"role"`
	NodeID   string    `json:"node_id,omitempty"`
	Machine  string    `json:"machine,omitempty"`
	Site     string    `json:"site,omitempty"`
	PID      int       `json:"pid"`
	BootID   string    `json:"boot_id,omitempty"`
	Started  time.Time `json:"started"`
	NotAfter time.Time `json:"certificate_not_after,omitzero"`
	// Problem is a sentence about why State is not better; empty when all is
	// well.
	Problem string `json:"problem,omitempty"`
}

// Session is the connection to the gateway.
type Session struct {
	Gateway   string    `json:"gateway"`
	Connected bool      `json:"connected"`
	Since     time.Time `json:"since,omitzero"`
	Epoch     int64     `json:"epoch,omitempty"`
	// ServerTime is server time by mark + elapsed; zero before the first mark.
	ServerTime time.Time `json:"server_time,omitzero"`
	LastError  string    `json:"last_error,omitempty"`
	NextTry    time.Time `json:"next_try,omitzero"`
}

// Spec is how far convergence got.
type Spec struct {
	Accepted int64     `json:"accepted_generation"`
	Observed int64     `json:"observed_generation"`
	Refused  string    `json:"refused,omitempty"`
	Sections []Section `json:"sections,omitempty"`
}

// Section is one section of the spec.
type Section struct {
	Name    string    `json:"name"`
	State   string    `json:"state"`
	Message string    `json:"message,omitempty"`
	Time    time.Time `json:"time,omitzero"`
}

// Journal is what waits for the gateway.
type Journal struct {
	ID     string `json:"id,omitempty"`
	Events int64  `json:"unacknowledged_events"`
	Bytes  int64  `json:"bytes"`
	// Lost says that an earlier journal was lost, and why.
	Lost string `json:"lost,omitempty"`
}

// Command is one in the journal.
type Command struct {
	ID    string `json:"id"`
	Kind  string `json:"kind"`
	Lane  string `json:"lane"`
	State string `json:"state"`
	// Progress is a short sentence, for example "writing 41 %".
	Progress string `json:"progress,omitempty"`
}

// Condition is as in the contract.
type Condition struct {
	Type    string    `json:"type"`
	Status  string    `json:"status"`
	Reason  string    `json:"reason,omitempty"`
	Message string    `json:"message,omitempty"`
	Since   time.Time `json:"since,omitzero"`
}

// Version is GET /v1/version.
type Version struct {
	Schema  int    `json:"schema"`
	Version string `json:"version"`
}

// WriteText renders s for a person: the agent's state first.
func (s *Status) WriteText(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	line := func(name, format string, args ...any) {
		fmt.Fprintf(t, "%s\t%s\n", name, clean(fmt.Sprintf(format, args...)))
	}
	state := s.Agent.State
	if s.Agent.Problem != "" {
		state += ": " + s.Agent.Problem
	}
	line("agent", "%s", state)
	line("version", "%s, role %s, pid %d, up %s", s.Agent.Version, s.Agent.Role, s.Agent.PID, age(s.Time, s.Agent.Started))
	if s.Agent.NodeID != "" {
		node := s.Agent.NodeID
		if s.Agent.Machine != "" {
			node += " of " + s.Agent.Machine
		}
		if s.Agent.Site != "" {
			node += ", site " + s.Agent.Site
		}
		line("node", "%s", node)
	} else {
		line("node", "not joined; run bcd join as root")
	}
	now := s.Session.ServerTime
	if now.IsZero() {
		now = s.Time
	}
	if end := s.Agent.NotAfter; !end.IsZero() {
		if end.After(now) {
			line("certificate", "valid %s more", age(end, now))
		} else {
			line("certificate", "expired %s ago; bcd doctor says what to do", age(now, end))
		}
	}
	switch {
	case s.Session.Connected:
		line("session", "connected to %s for %s, epoch %d", s.Session.Gateway, age(s.Time, s.Session.Since), s.Session.Epoch)
	case s.Session.Gateway != "":
		text := "not connected to " + s.Session.Gateway
		if s.Session.LastError != "" {
			text += ": " + s.Session.LastError
		}
		if s.Session.NextTry.After(s.Time) {
			text += "; next try in " + age(s.Session.NextTry, s.Time)
		}
		line("session", "%s", text)
	}
	if s.Spec.Accepted > 0 {
		line("spec", "generation %d, observed %d", s.Spec.Accepted, s.Spec.Observed)
	} else {
		line("spec", "none")
	}
	for _, section := range s.Spec.Sections {
		text := section.State
		if section.Message != "" {
			text += ": " + section.Message
		}
		line("  "+section.Name, "%s", text)
	}
	if s.Spec.Refused != "" {
		line("  refused", "%s", s.Spec.Refused)
	}
	line("journal", "%d unacknowledged events, %d KiB", s.Journal.Events, (s.Journal.Bytes+1023)/1024)
	if s.Journal.Lost != "" {
		line("  lost", "%s", s.Journal.Lost)
	}
	for _, c := range s.Commands {
		text := c.State
		if c.Progress != "" {
			text += ", " + c.Progress
		}
		line("command", "%s %s %s", c.ID, c.Kind, text)
	}
	for _, c := range s.Conditions {
		if c.Status == "false" {
			continue
		}
		line("condition", "%s %s: %s", c.Type, c.Status, c.Message)
	}
	return t.Flush()
}

// clean keeps what came from elsewhere on its line and away from the
// terminal's controls.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return ' '
		}
		return r
	}, s)
}

// age gives later - earlier, coarse.
func age(later, earlier time.Time) string {
	d := max(later.Sub(earlier), 0)
	switch {
	case d >= 48*time.Hour:
		return fmt.Sprintf("%dd", d/(24*time.Hour))
	case d >= time.Hour:
		return fmt.Sprintf("%dh%02dm", d/time.Hour, d/time.Minute%60)
	case d >= time.Minute:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d/time.Second%60)
	default:
		return fmt.Sprintf("%ds", d/time.Second)
	}
}
