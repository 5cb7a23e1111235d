// Package clock is the one way in which the agent's rooms learn the time and
// wait. The daemon uses [System]; a simulator hands in its own.
package clock

import "time"

// Clock tells the time and makes timers. Only differences of its readings are
// used for logic; what a deadline is compared with is server time (package
// servertime), never a clock.
type Clock interface {
	// Now has a monotonic part that never goes back.
	Now() time.Time
	NewTimer(d time.Duration) Timer
}

// Timer is a time.Timer as an interface. After Stop or Reset no stale value is
// received from C (the behaviour of package time since Go 1.23).
type Timer interface {
	C() <-chan time.Time
	Reset(d time.Duration) bool
	Stop() bool
}

// System is the process's own clock.
func System() Clock { return system{} }

type system struct{}

func (system) Now() time.Time                 { return time.Now() }
func (system) NewTimer(d time.Duration) Timer { return timer{time.NewTimer(d)} }

type timer struct{ *time.Timer }

func (t timer) C() <-chan time.Time { return t.Timer.C }
