// Package clock gives a machine a sane wall clock, in three steps that each take
// over from the one before: a floor at boot, so that a machine whose hardware
// clock says 1970 can check certificates at all; NTP; and the gateway's time.
//
// The floor is the latest of when the image was built and the last good time
// that was written down. Neither can lie in the future of the truth, so nothing,
// not the hardware clock, not NTP and not the gateway, sets the clock below it.
package clock

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

const (
	// horizon is how far past the floor a time may be. Images are replaced much
	// sooner; an RTC with a bit flipped in its year, or a hostile NTP server, is
	// usually further off. It also lies well within an NTP era (RFC 5905
	// section 6: 136 years).
	horizon = 20 * 365 * 24 * time.Hour
	// stepAbove is the offset above which the clock is stepped, below which it is
	// slewed (RFC 5905 section 10: STEPT).
	stepAbove = 128 * time.Millisecond
	// serverTolerance is the error of a time that came over a session, whose
	// delay is not measured.
	serverTolerance = 2 * time.Second
)

// Evidence is what a machine knows about the time at boot. Zero values are
// unknown.
type Evidence struct {
	Build    time.Time // when the image was built
	LastGood time.Time // written down when the clock was last known to be right
	RTC      time.Time // the hardware clock
	System   time.Time // the clock now, as the kernel set it from an RTC or from nothing
}

// Floor is below what no time is believed.
func (e Evidence) Floor() time.Time { return latest(e.Build, e.LastGood) }

// Start is the time to begin with, and where it comes from: the latest of all
// that is known, without what lies beyond the horizon. The caller sets the clock
// if step is true.
func (e Evidence) Start() (t time.Time, source string, step bool) {
	floor := e.Floor()
	for _, c := range []struct {
		t      time.Time
		source string
	}{
		// On a tie the first stands: the running clock needs no step.
		{e.System, "system clock"},
		{e.RTC, "hardware clock"},
		{e.LastGood, "last good time"},
		{e.Build, "build time of the image"},
	} {
		beyond := !floor.IsZero() && c.t.After(floor.Add(horizon))
		if c.t.After(t) && !beyond {
			t, source = c.t, c.source
		}
	}
	// A second of difference between the RTC and the clock is only its grain.
	step = source != "system clock" && absolute(t.Sub(e.System)) > time.Second
	return t, source, step
}

// Action is what to do with a proposed time.
type Action int

const (
	Keep Action = iota // it is right enough as it is
	Slew               // move it gently
	Step               // set it
)

// Judge decides about a time proposed by NTP. The error says why it is not
// believed.
func Judge(now, floor, proposed time.Time) (Action, error) {
	if err := sane(floor, proposed); err != nil {
		return Keep, err
	}
	switch d := absolute(proposed.Sub(now)); {
	case d >= stepAbove:
		return Step, nil
	case d >= time.Millisecond:
		return Slew, nil
	}
	return Keep, nil
}

// JudgeServer decides about a time that came over an authenticated session. With
// NTP at work it changes nothing: NTP is the better clock.
func JudgeServer(now, floor, proposed time.Time, synchronised bool) (Action, error) {
	if err := sane(floor, proposed); err != nil {
		return Keep, err
	}
	if synchronised || absolute(proposed.Sub(now)) < serverTolerance {
		return Keep, nil
	}
	return Step, nil
}

func sane(floor, t time.Time) error {
	switch {
	case t.Before(floor):
		return fmt.Errorf("time %s is before %s, when this image already existed or was last run", stamp(t), stamp(floor))
	case !floor.IsZero() && t.After(floor.Add(horizon)):
		return fmt.Errorf("time %s is more than %d years after %s", stamp(t), horizon/(365*24*time.Hour), stamp(floor))
	}
	return nil
}

// Sample is one server's answer.
type Sample struct {
	Server string
	Offset time.Duration // what to add to the local clock
	Error  time.Duration // at most this far off (RFC 5905: root distance)
}

// Choose picks the sample to follow: of three or more the median, which one
// liar cannot move past an honest server; of fewer the one with the least error.
func Choose(samples []Sample) (Sample, bool) {
	if len(samples) == 0 {
		return Sample{}, false
	}
	s := slices.Clone(samples)
	if len(s) < 3 {
		return slices.MinFunc(s, func(a, b Sample) int { return cmp.Compare(a.Error, b.Error) }), true
	}
	slices.SortFunc(s, func(a, b Sample) int { return cmp.Compare(a.Offset, b.Offset) })
	return s[(len(s)-1)/2], true
}

func latest(ts ...time.Time) (out time.Time) {
	for _, t := range ts {
		if t.After(out) {
			out = t
		}
	}
	return out
}

func absolute(d time.Duration) time.Duration {
	if d < 0 {
		return -d
	}
	return d
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
