// Package doctor checks whether a machine is fit to run bcd and says, for
// each thing that is not, what to do about it.
//
// A check reads only what [Inputs] gives it, so the same checks run in the
// `bcd doctor` command and inside the live agent, which serves the [Report]
// over its status socket. One cause is one line: a check whose prerequisite
// is missing is left out and named in [Report.Skipped], since the line of the
// prerequisite already says what is wrong.
package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"
)

// Status is the judgement of one line.
type Status string

// The judgements. A warning is something this host cannot do; a failure is
// something that is broken.
const (
	OK   Status = "ok"
	Warn Status = "warn"
	Fail Status = "fail"
)

// Line is one line of a report.
type Line struct {
	// ID is stable and for programs: the check's, with a suffix where one
	// check gives several lines, for example gpu/GPU-5f1c….
	ID     string `json:"id"`
	Name   string `json:"name"`
	Status Status `json:"status"`
	Detail string `json:"detail"`
	// Remedy is the command that mends it; empty when nothing needs mending
	// or no command can.
	Remedy string `json:"remedy,omitempty"`
}

// Skipped is a check that was left out because another one already says why.
type Skipped struct {
	ID      string `json:"id"`
	Because string `json:"because"`
}

// Report is what the checks found, in a fixed order.
type Report struct {
	SchemaVersion int       `json:"schema_version"`
	Lines         []Line    `json:"lines"`
	Skipped       []Skipped `json:"skipped,omitempty"`
	// Failed is true when any line fails; `bcd doctor` then exits 1.
	Failed bool `json:"failed"`
}

// Need names something a check cannot do without: a check and what it finds.
type Need struct{ Check, Thing string }

// Outcome is what a check found.
type Outcome struct {
	Lines []Line
	// Missing names the things that other checks need and this one did not
	// find.
	Missing []string
}

// Check is one check. Run must return when its context ends; a check that
// does not is reported as failed and left behind.
type Check struct {
	ID        string
	DependsOn []Need
	Run       func(context.Context) Outcome
}

// CheckDeadline is what one check may take. The longest legitimate wait is
// the gateway's ([GatewayTimeout]); checks run at the same time, so this also
// bounds the report.
const CheckDeadline = 6 * time.Second

// Run runs all the checks that the inputs allow.
func Run(ctx context.Context, in Inputs) Report {
	return RunChecks(ctx, Checks(in))
}

// RunChecks runs checks at the same time, each with [CheckDeadline], and
// reports in the order given. A check may depend on checks before it only.
func RunChecks(ctx context.Context, checks []Check) Report {
	type running struct {
		done    chan struct{}
		outcome Outcome
		// lost: it has no outcome, so that nothing it finds can be relied on.
		lost bool
		skip string
	}
	all := map[string]*running{}
	var wait sync.WaitGroup
	for _, c := range checks {
		r := &running{done: make(chan struct{})}
		needs := map[Need]*running{}
		for _, n := range c.DependsOn {
			if earlier := all[n.Check]; earlier != nil {
				needs[n] = earlier
			}
		}
		all[c.ID] = r
		wait.Go(func() {
			defer close(r.done)
			for _, n := range c.DependsOn {
				dep := needs[n]
				if dep == nil {
					continue
				}
				<-dep.done // bounded: each check is
				if dep.skip != "" || dep.lost || slices.Contains(dep.outcome.Missing, n.Thing) {
					r.skip = n.Check
					return
				}
			}
			r.outcome, r.lost = runOne(ctx, c)
		})
	}
	wait.Wait()

	report := Report{SchemaVersion: 1, Lines: []Line{}}
	for _, c := range checks {
		r := all[c.ID]
		if r.skip != "" {
			report.Skipped = append(report.Skipped, Skipped{ID: c.ID, Because: r.skip})
			continue
		}
		for _, l := range r.outcome.Lines {
			if l.ID == "" {
				l.ID = c.ID
			}
			if l.Name == "" {
				l.Name = c.ID
			}
			l.Detail = oneLine(l.Detail)
			report.Failed = report.Failed || l.Status == Fail
			report.Lines = append(report.Lines, l)
		}
	}
	return report
}

// runOne runs a check within its deadline. A panic in it is its failure, not
// the daemon's.
func runOne(ctx context.Context, c Check) (outcome Outcome, lost bool) {
	ctx, cancel := context.WithTimeout(ctx, CheckDeadline)
	defer cancel()
	type result struct {
		outcome Outcome
		lost    bool
	}
	done := make(chan result, 1)
	go func() {
		defer func() {
			if p := recover(); p != nil {
				done <- result{failed(fmt.Sprintf("the check itself broke: %v", p), "bcd version"), true}
			}
		}()
		done <- result{outcome: c.Run(ctx)}
	}()
	select {
	case r := <-done:
		return r.outcome, r.lost
	case <-ctx.Done():
	}
	// An answer that came at the same moment is better than none.
	select {
	case r := <-done:
		return r.outcome, r.lost
	default:
	}
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return failed("interrupted", ""), true
	}
	return failed(fmt.Sprintf("no answer within %s", CheckDeadline), ""), true
}

// WriteText prints one line a check: status, name, detail, and the command
// that mends it unless the detail already has it.
func (r Report) WriteText(w io.Writer) error {
	for _, l := range r.Lines {
		detail := l.Detail
		if l.Remedy != "" && !strings.Contains(detail, l.Remedy) {
			detail += "; run: " + l.Remedy
		}
		if _, err := fmt.Fprintf(w, "%-5s %-9s %s\n", l.Status, l.Name, detail); err != nil {
			return fmt.Errorf("print the report: %w", err)
		}
	}
	return nil
}

// WriteJSON prints the report as one JSON object.
func (r Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	if err := enc.Encode(r); err != nil {
		return fmt.Errorf("print the report: %w", err)
	}
	return nil
}

// oneLine keeps a detail on its line whatever error text is in it.
func oneLine(s string) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, s)
	return strings.Join(strings.Fields(s), " ")
}

func good(detail string) Outcome {
	return Outcome{Lines: []Line{{Status: OK, Detail: detail}}}
}

func warned(detail, remedy string) Outcome {
	return Outcome{Lines: []Line{{Status: Warn, Detail: detail, Remedy: remedy}}}
}

func failed(detail, remedy string) Outcome {
	return Outcome{Lines: []Line{{Status: Fail, Detail: detail, Remedy: remedy}}}
}

// without marks things as missing for the checks that need them.
func (o Outcome) without(things ...string) Outcome {
	o.Missing = append(o.Missing, things...)
	return o
}
