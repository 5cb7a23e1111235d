package converge

import (
	"context"
	"errors"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Step is one thing that Apply does: small, idempotent, and described well
// enough for a person.
type Step struct {
	// Action and Target are for people, for example "write" and
	// "/etc/sysctl.d/90-bcd.conf".
	Action string
	Target string
	// Do carries what the section needs to apply it.
	Do any
}

// Section makes one part of the machine what the NodeSpec says. A second Plan
// after an Apply of every step is empty. Plan changes nothing.
type Section interface {
	// Name is the section's name in NodeSpec: host, devices, instances,
	// access, telemetry or daemon.
	Name() string
	// DependsOn names sections that must have converged before this one runs.
	DependsOn() []string
	Plan(ctx context.Context, spec *bcdv1.NodeSpec) ([]Step, error)
	Apply(ctx context.Context, step Step) error
}

// Terminal marks an error that trying again cannot mend for this generation.
func Terminal(err error) error { return &terminal{err} }

// IsTerminal tells whether err, or what it wraps, was marked by Terminal.
func IsTerminal(err error) bool {
	var t *terminal
	return errors.As(err, &t)
}

type terminal struct{ err error }

func (t *terminal) Error() string { return t.err.Error() }
func (t *terminal) Unwrap() error { return t.err }
