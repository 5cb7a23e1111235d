package clock

import (
	"testing"
	"time"
)

func day(s string) time.Time {
	t, err := time.Parse(time.DateOnly, s)
	if err != nil {
		panic(err)
	}
	return t
}

func TestStart(t *testing.T) {
	build := day("2026-06-01")
	for _, c := range []struct {
		name   string
		e      Evidence
		want   time.Time
		source string
		step   bool
	}{
		{"all well", Evidence{build, time.Time{}, day("2026-09-01"), day("2026-09-01")}, day("2026-09-01"), "system clock", false},
		{"1970", Evidence{build, time.Time{}, day("1970-01-02"), day("1970-01-02")}, build, "build time of the image", true},
		{"2011", Evidence{build, time.Time{}, day("2011-01-01"), day("2011-01-01")}, build, "build time of the image", true},
		{"1970, but written down", Evidence{build, day("2026-08-01"), day("1970-01-02"), day("1970-01-02")}, day("2026-08-01"), "last good time", true},
		{"the image is newer than what was written", Evidence{build, day("2026-05-01"), time.Time{}, day("1970-01-01")}, build, "build time of the image", true},
		{"the kernel did not read the rtc", Evidence{build, time.Time{}, day("2026-09-01"), day("1970-01-01")}, day("2026-09-01"), "hardware clock", true},
		{"saved time never steps back", Evidence{build, day("2026-08-01"), day("2026-09-01"), day("2026-09-01")}, day("2026-09-01"), "system clock", false},
		{"2099 is not believed", Evidence{build, time.Time{}, day("2099-01-01"), day("2099-01-01")}, build, "build time of the image", true},
		{"the rtc's grain is no step", Evidence{build, time.Time{}, day("2026-09-01").Add(time.Second), day("2026-09-01")}, day("2026-09-01").Add(time.Second), "hardware clock", false},
		{"nothing is known", Evidence{System: day("1970-01-01")}, day("1970-01-01"), "system clock", false},
	} {
		got, source, step := c.e.Start()
		if !got.Equal(c.want) || source != c.source || step != c.step {
			t.Errorf("%s: %s from %s, step %v; want %s from %s, step %v", c.name, stamp(got), source, step, stamp(c.want), c.source, c.step)
		}
	}
}

func TestJudge(t *testing.T) {
	floor, now := day("2026-06-01"), day("2026-09-01")
	for _, c := range []struct {
		proposed time.Time
		want     Action
		refused  bool
	}{
		{now, Keep, false},
		{now.Add(20 * time.Millisecond), Slew, false},
		{now.Add(-20 * time.Millisecond), Slew, false},
		{now.Add(time.Second), Step, false},
		{now.Add(-40 * 24 * time.Hour), Step, false}, // back, but not below the floor
		{floor, Step, false},
		{floor.Add(-time.Nanosecond), Keep, true},
		{day("1970-01-01"), Keep, true},
		{day("2046-05-01"), Step, false},
		{day("2046-06-01"), Keep, true},
	} {
		got, err := Judge(now, floor, c.proposed)
		if got != c.want || (err != nil) != c.refused {
			t.Errorf("%s: %v, %v", stamp(c.proposed), got, err)
		}
	}
}

func TestJudgeServer(t *testing.T) {
	floor, now := day("2026-06-01"), day("2026-09-01")
	for _, c := range []struct {
		proposed time.Time
		synced   bool
		want     Action
		refused  bool
	}{
		{now.Add(time.Second), false, Keep, false},
		{now.Add(3 * time.Second), false, Step, false},
		{now.Add(-3 * time.Second), false, Step, false},
		{now.Add(time.Hour), true, Keep, false},
		{floor.Add(-time.Hour), false, Keep, true},
		{floor.Add(-time.Hour), true, Keep, true},
	} {
		got, err := JudgeServer(now, floor, c.proposed, c.synced)
		if got != c.want || (err != nil) != c.refused {
			t.Errorf("%s synced %v: %v, %v", stamp(c.proposed), c.synced, got, err)
		}
	}
}

func TestChoose(t *testing.T) {
	sec := time.Second
	for _, c := range []struct {
		in   []Sample
		want string
	}{
		{nil, ""},
		{[]Sample{{"a", 5 * sec, sec}}, "a"},
		{[]Sample{{"a", 5 * sec, sec}, {"b", 6 * sec, sec / 2}}, "b"},
		{[]Sample{{"liar", 1e6 * sec, 0}, {"a", 5 * sec, sec}, {"b", 6 * sec, sec}}, "b"},
		{[]Sample{{"liar", -1e6 * sec, 0}, {"a", 5 * sec, sec}, {"b", 6 * sec, sec}}, "a"},
		{[]Sample{{"d", 8 * sec, sec}, {"a", 5 * sec, sec}, {"c", 7 * sec, sec}, {"b", 6 * sec, sec}}, "b"},
	} {
		got, ok := Choose(c.in)
		if got.Server != c.want || ok != (c.want != "") {
			t.Errorf("%v: %v", c.in, got)
		}
	}
}
