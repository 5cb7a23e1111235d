package supervisor

import (
	"math/rand/v2"
	"time"
)

// Backoff says how long to wait before a failed service is started again. The
// zero value works and is what a service has that asks for nothing.
type Backoff struct {
	// Initial is the wait after the first failure. Zero means [DefaultInitial].
	Initial time.Duration
	// Max caps the wait. Zero means [DefaultMax].
	Max time.Duration
	// Jitter spreads each wait over [1-Jitter, 1+Jitter] of itself, so that a
	// rack that lost its gateway does not come back in step. Zero means
	// [DefaultJitter]; a negative value means none.
	Jitter float64
	// StableAfter is how long a run must have lasted for the next failure to
	// count as the first. Zero means [DefaultStableAfter].
	StableAfter time.Duration
	// Rand gives numbers in [0, 1). Nil means math/rand; tests give their own.
	Rand func() float64
}

// The waits of a service that gives none. A minute's cap keeps a machine that
// came back reachable within a minute of whatever was wrong being mended.
const (
	DefaultInitial     = 500 * time.Millisecond
	DefaultMax         = time.Minute
	DefaultJitter      = 0.2
	DefaultStableAfter = 30 * time.Second
)

// WithDefaults returns b with its zero fields filled in.
func (b Backoff) WithDefaults() Backoff {
	if b.Initial <= 0 {
		b.Initial = DefaultInitial
	}
	if b.Max <= 0 {
		b.Max = DefaultMax
	}
	if b.Max < b.Initial {
		b.Max = b.Initial
	}
	if b.Jitter == 0 {
		b.Jitter = DefaultJitter
	}
	if b.Jitter < 0 {
		b.Jitter = 0
	}
	if b.Jitter > 1 {
		b.Jitter = 1
	}
	if b.StableAfter <= 0 {
		b.StableAfter = DefaultStableAfter
	}
	if b.Rand == nil {
		b.Rand = rand.Float64
	}
	return b
}

// Next is a step function: given the failures counted so far and how long the
// run that just ended had lasted, it returns the new count and the wait before
// the next start.
func (b Backoff) Next(failures int, lasted time.Duration) (count int, wait time.Duration) {
	b = b.WithDefaults()
	if lasted >= b.StableAfter {
		failures = 0
	}
	failures++
	wait = b.Max
	// Doubling past 2^30 would overflow long after any sensible cap.
	if shift := failures - 1; shift < 30 {
		if d := b.Initial << shift; d > 0 && d < b.Max {
			wait = d
		}
	}
	spread := 1 + b.Jitter*(2*b.Rand()-1)
	wait = time.Duration(float64(wait) * spread)
	return failures, wait
}
