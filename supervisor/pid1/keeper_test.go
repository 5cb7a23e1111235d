package pid1

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/bcd/supervisor"
)

// life drives a keeper second by second and notes what it asks for.
type life struct {
	t     *testing.T
	k     *keeper
	now   time.Time
	began time.Time
	notes []string
}

func newLife(t *testing.T) *life {
	now := time.Unix(1_000_000, 0)
	b := supervisor.Backoff{Initial: time.Second, Max: 8 * time.Second, Jitter: -1, StableAfter: 30 * time.Second}
	return &life{t: t, k: newKeeper(now, b), now: now, began: now}
}

// do gives the keeper an event; it returns whether the watchdog was fed.
func (l *life) do(event any) (fed bool) {
	at := l.now.Sub(l.began).Round(time.Second)
	for _, e := range l.k.step(l.now, event) {
		switch e := e.(type) {
		case feed:
			fed = true
		case startIt:
			l.notes = append(l.notes, fmt.Sprintf("%s start %d", at, e.generation))
		case killIt:
			l.notes = append(l.notes, fmt.Sprintf("%s kill %d", at, e.generation))
		case end:
			l.notes = append(l.notes, fmt.Sprintf("%s %s: %s", at, e.action, e.reason))
		}
	}
	return fed
}

// pass lets seconds go by, with a heartbeat in each if beating, and returns how
// many of them saw the watchdog fed.
func (l *life) pass(seconds int, beating bool) (fed int) {
	for range seconds {
		f := l.do(tick{})
		if beating {
			f = l.do(said{generation: l.k.generation}) || f
		}
		if f {
			fed++
		}
		l.now = l.now.Add(time.Second)
	}
	return fed
}

func (l *life) want(notes ...string) {
	l.t.Helper()
	if !slices.Equal(l.notes, notes) {
		l.t.Errorf("got\n  %s\nwant\n  %s", strings.Join(l.notes, "\n  "), strings.Join(notes, "\n  "))
	}
}

func TestAHealthySupervisorKeepsTheWatchdogFed(t *testing.T) {
	l := newLife(t)
	if fed := l.pass(3600, true); fed != 3600 {
		t.Errorf("fed in %d seconds of 3600", fed)
	}
	l.want("0s start 1")
}

func TestASilentSupervisorStarvesTheWatchdog(t *testing.T) {
	l := newLife(t)
	l.pass(20, true)
	// The last heartbeat was a second ago.
	if fed := l.pass(60, false); fed != 15 {
		t.Errorf("fed for %d s after the last heartbeat, want 15", fed)
	}
	l.pass(60, false)
	l.want("0s start 1", "1m50s kill 1")
	// One that had only been slow is taken back.
	if !l.do(said{generation: 1}) {
		t.Error("a heartbeat does not feed")
	}
}

func TestOneThatNeverAnswersIsKilledAndStartedAgain(t *testing.T) {
	l := newLife(t)
	if fed := l.pass(91, false); fed != 61 {
		t.Errorf("fed for %d s, want the grace of 61", fed)
	}
	l.pass(1, false)
	l.do(exited{1, "killed by SIGKILL"})
	l.pass(3, false)
	l.want("0s start 1", "1m31s kill 1", "1m33s start 2")
}

func TestRestartsBackOffAndTheMachineStaysUp(t *testing.T) {
	l := newLife(t)
	for range 6 {
		for !l.k.running {
			if fed := l.pass(1, false); fed != 1 {
				t.Error("not fed while process 1 waits to start the next one")
			}
		}
		l.do(exited{l.k.generation, "exit status 2"})
	}
	l.want("0s start 1", "2s start 2", "5s start 3", "10s start 4", "19s start 5", "28s start 6")
}

func TestStabilityForgetsFailures(t *testing.T) {
	l := newLife(t)
	for range 4 {
		l.pass(1, true)
		l.do(exited{l.k.generation, "exit status 2"})
		for !l.k.running {
			l.pass(1, true)
		}
	}
	l.notes = nil
	l.pass(40, true)
	l.do(exited{l.k.generation, "exit status 2"})
	before := l.now
	for !l.k.running {
		l.pass(1, true)
	}
	if d := l.now.Sub(before); d > 2*time.Second {
		t.Errorf("after 40 good seconds the next start took %s", d)
	}
}

func TestABootThatNeverGetsHealthyIsEnded(t *testing.T) {
	l := newLife(t)
	for range 2000 {
		l.pass(1, false)
		if l.k.running {
			l.do(exited{l.k.generation, "exit status 1"})
		}
	}
	last := l.notes[len(l.notes)-1]
	if want := "10m0s reboot: the supervisor has not been healthy for 10m0s"; last != want {
		t.Errorf("ended with %q, want %q", last, want)
	}
}

func TestWhatADeadOneSaidIsNotHeard(t *testing.T) {
	l := newLife(t)
	l.pass(2, true)
	l.do(exited{1, "killed by SIGKILL"})
	if l.do(said{generation: 1}) {
		t.Error("a heartbeat of a dead process feeds")
	}
	l.do(said{generation: 1, message: message{Reboot, "late"}})
	l.pass(3, false)
	l.do(said{generation: 1, message: message{Reboot, "later"}})
	l.do(exited{1, "again"})
	l.want("0s start 1", "3s start 2")
}

func TestRequestsAndSignalsEnd(t *testing.T) {
	for _, c := range []struct {
		event any
		want  string
	}{
		{said{generation: 1, message: message{Reboot, "deployed"}}, "1s reboot: deployed"},
		{said{generation: 1, message: message{PowerOff, "asked"}}, "1s poweroff: asked"},
		{said{generation: 1, message: message{Kexec, "asked"}}, "1s kexec: asked"},
		{signalled{PowerOff, "signal SIGUSR2"}, "1s poweroff: signal SIGUSR2"},
	} {
		l := newLife(t)
		l.pass(1, true)
		l.do(c.event)
		l.pass(1000, false)
		l.do(c.event)
		l.want("0s start 1", c.want)
	}
}

func TestStartFailuresAndNonsenseAreSurvived(t *testing.T) {
	l := newLife(t)
	l.do(tick{})
	l.do(startFailed{errors.New("no memory")})
	l.pass(3, false)
	for range 1000 {
		l.do(said{generation: 2, err: errors.New("not a message")})
	}
	l.do(42)
	l.want("0s start 1", "1s start 2")
}
