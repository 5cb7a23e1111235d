package main

import (
	"fmt"
	"io"
	"log/slog"

	"github.com/better-compute/bcd/agent/logs"
	"github.com/better-compute/bcd/agent/secret"
)

// ringBytes is how much of its own log a daemon keeps in memory for
// logs.collect: some hours of a quiet one, some minutes of a noisy one.
const ringBytes = 1 << 20

// logging is a daemon's log: lines without secrets, on standard error and in
// a ring.
type logging struct {
	log      *slog.Logger
	level    *slog.LevelVar
	ring     *logs.Ring
	redactor *logs.Redactor
	secrets  *secret.Registry
}

func newLogging(w io.Writer, level, format string) (*logging, error) {
	l := &logging{level: new(slog.LevelVar), ring: logs.NewRing(ringBytes), secrets: &secret.Registry{}}
	var at slog.Level
	if err := at.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("log level %q: must be debug, info, warn or error", level)
	}
	l.level.Set(at)
	l.redactor = &logs.Redactor{Registry: l.secrets}
	l.log = slog.New(logs.NewHandler(format, l.level, l.redactor, w, l.ring))
	return l, nil
}
