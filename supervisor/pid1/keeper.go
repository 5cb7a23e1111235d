package pid1

import (
	"fmt"
	"time"

	"github.com/better-compute/bcd/supervisor"
)

// The keeper's times. A supervisor process that stops answering costs at most
// beatFresh plus the watchdog's timeout before the machine is reset: 45 s.
const (
	// beatEvery is how often a healthy supervisor process says so.
	beatEvery = 2 * time.Second
	// beatFresh is how old a heartbeat may be. Seven missed ones: a machine
	// without KVM that writes an image has been seen to lose two.
	beatFresh = 15 * time.Second
	// startGrace is how long a new supervisor process has for its first
	// heartbeat.
	startGrace = 60 * time.Second
	// killAfter is when a silent supervisor process is killed, for machines
	// without a watchdog; longer than the watchdog takes, which is surer.
	killAfter = 90 * time.Second
	// giveUpAfter without a healthy supervisor process, whatever was tried,
	// reboots the machine: a failed boot must not sit there for ever.
	giveUpAfter = 10 * time.Minute
	// watchdogTimeout is what the hardware is asked for.
	watchdogTimeout = 30 * time.Second
	// tickEvery is how often the keeper looks at its clock.
	tickEvery = time.Second
)

// keeper decides, and does nothing: it is told what happened and when, and
// answers with what to do. The zero value is no keeper; see newKeeper.
type keeper struct {
	backoff supervisor.Backoff

	running     bool
	generation  int       // of the supervisor process, from 1
	startedAt   time.Time // of the one that runs
	lastBeat    time.Time // of the one that runs; zero before its first
	killed      bool      // it was told to go
	startAt     time.Time // when none runs
	failures    int
	lastHealthy time.Time
	wasHealthy  bool
	starving    bool // the watchdog is not being fed
	badLines    int
	ending      bool
}

func newKeeper(now time.Time, b supervisor.Backoff) *keeper {
	return &keeper{backoff: b, startAt: now, lastHealthy: now}
}

// What may happen.
type (
	tick        struct{}
	startFailed struct{ err error }
	exited      struct {
		generation int
		how        string // for people: "exit status 2", "killed by signal 9"
	}
	said struct {
		generation int
		message    message
		err        error
	}
	signalled struct {
		action Action
		name   string
	}
)

// What to do about it.
type (
	startIt struct{ generation int }
	killIt  struct{ generation int }
	feed    struct{}
	tell    struct{ text string }
	end     struct {
		action Action
		reason string
	}
)

// step takes one event at one time and returns what to do, in order. After an
// end nothing more is asked for.
func (k *keeper) step(now time.Time, event any) []any {
	if k.ending {
		return nil
	}
	switch e := event.(type) {
	case tick:
		return k.tick(now)
	case startFailed:
		return k.down(now, fmt.Sprintf("could not be started: %v", e.err))
	case exited:
		if e.generation != k.generation || !k.running {
			return nil
		}
		return k.down(now, "ended: "+e.how)
	case said:
		if e.generation != k.generation || !k.running {
			return nil // a line that was still in the pipe of a dead one
		}
		return k.said(now, e)
	case signalled:
		return k.end(e.action, e.name)
	}
	return []any{tell{fmt.Sprintf("internal: no rule for a %T", event)}}
}

func (k *keeper) end(a Action, reason string) []any {
	k.ending = true
	return []any{end{a, reason}}
}

// down notes that no supervisor process runs, and when the next one will.
func (k *keeper) down(now time.Time, how string) []any {
	var lasted time.Duration
	if k.running {
		lasted = now.Sub(k.startedAt)
	}
	k.running = false
	var wait time.Duration
	k.failures, wait = k.backoff.Next(k.failures, lasted)
	k.startAt = now.Add(wait)
	return []any{tell{fmt.Sprintf("the supervisor %s; it is started again in %s", how, wait.Round(100*time.Millisecond))}}
}

func (k *keeper) said(now time.Time, e said) []any {
	if e.err != nil {
		// The first is news; a stream of them would fill the console.
		if k.badLines++; k.badLines == 1 {
			return []any{tell{"the supervisor sent something that is no message: " + e.err.Error()}}
		}
		return nil
	}
	if e.message.action != "" {
		return k.end(e.message.action, e.message.reason)
	}
	k.lastBeat, k.lastHealthy = now, now
	out := []any{feed{}}
	if k.starving {
		k.starving = false
		out = append(out, tell{"the supervisor answers again"})
	}
	if !k.wasHealthy {
		k.wasHealthy = true
		out = append(out, tell{"the supervisor is up"})
	}
	return out
}

func (k *keeper) tick(now time.Time) []any {
	if d := now.Sub(k.lastHealthy); d >= giveUpAfter {
		return k.end(Reboot, fmt.Sprintf("the supervisor has not been healthy for %s", d.Round(time.Second)))
	}
	if !k.running {
		if now.Before(k.startAt) {
			return []any{feed{}}
		}
		k.generation++
		k.running, k.killed, k.wasHealthy, k.badLines = true, false, false, 0
		k.startedAt, k.lastBeat = now, time.Time{}
		return []any{feed{}, startIt{k.generation}}
	}
	limit, since := beatFresh, k.lastBeat
	if since.IsZero() {
		limit, since = startGrace, k.startedAt
	}
	silent := now.Sub(since)
	if silent <= limit {
		return []any{feed{}}
	}
	var out []any
	if !k.starving {
		k.starving = true
		out = append(out, tell{fmt.Sprintf("the supervisor has been silent for %s; the watchdog is not fed any more", silent.Round(time.Second))})
	}
	if silent > killAfter && !k.killed {
		k.killed = true
		out = append(out, tell{"the supervisor is killed"}, killIt{k.generation})
	}
	return out
}
