package hostconf

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/better-compute/bcd/agent/converge"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// The converger holds the interval between these, in seconds; the section says
// so instead of leaving a silent difference.
const (
	minIntervalSeconds = 10
	maxIntervalSeconds = 86400
)

// Daemon is the daemon section: the log level; the converge interval, which
// the converger reads out of the spec by itself and which is checked here. The
// wanted version is taken note of by self-update once there is one.
type Daemon struct {
	Level *slog.LevelVar
	// Base is the config file's level, which holds where the spec says none.
	Base slog.Level
}

var _ converge.Section = (*Daemon)(nil)

// Name is "daemon".
func (d *Daemon) Name() string { return "daemon" }

// DependsOn names nothing.
func (d *Daemon) DependsOn() []string { return nil }

// Plan compares the level.
func (d *Daemon) Plan(_ context.Context, spec *bcdv1.NodeSpec) ([]converge.Step, error) {
	want := d.Base
	if word := spec.GetDaemon().GetLogLevel(); word != "" {
		var ok bool
		if want, ok = levels[word]; !ok {
			return nil, converge.Terminal(fmt.Errorf("daemon.log_level: %.40q is not debug, info, warn or error", word))
		}
	}
	if s := spec.GetDaemon().GetConvergeIntervalSeconds(); s != 0 && (s < minIntervalSeconds || s > maxIntervalSeconds) {
		return nil, converge.Terminal(fmt.Errorf("daemon.converge_interval_seconds: %d is not between %d and %d", s, minIntervalSeconds, maxIntervalSeconds))
	}
	if d.Level.Level() == want {
		return nil, nil
	}
	return []converge.Step{{Action: "set", Target: "log level " + want.String(), Do: want}}, nil
}

// Apply sets the level.
func (d *Daemon) Apply(_ context.Context, step converge.Step) error {
	level, ok := step.Do.(slog.Level)
	if !ok {
		return fmt.Errorf("unknown step %T", step.Do)
	}
	d.Level.Set(level)
	return nil
}

var levels = map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError}
