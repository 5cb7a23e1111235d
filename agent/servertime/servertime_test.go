package servertime

import (
	"errors"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var (
	boot   = time.Date(1970, 1, 1, 0, 0, 7, 0, time.UTC)
	server = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
)

func TestMark(t *testing.T) {
	var c Clock
	if _, ok := c.Now(boot); ok {
		t.Fatal("knows the time before the first mark")
	}
	if err := c.Mark(boot, server); err != nil {
		t.Fatal(err)
	}
	now, _ := c.Now(boot.Add(time.Minute))
	if want := server.Add(time.Minute); !now.Equal(want) {
		t.Fatalf("a minute later: %s, want %s", now, want)
	}
	// A gateway that is behind does not take the node back.
	if err := c.Mark(boot.Add(time.Minute), server.Add(-time.Hour)); err != nil {
		t.Fatal(err)
	}
	if now, _ = c.Now(boot.Add(time.Minute)); !now.Equal(server.Add(time.Minute)) {
		t.Fatalf("went back to %s", now)
	}
	// One that is far ahead is refused and changes nothing.
	var skew *SkewError
	if err := c.Mark(boot.Add(time.Minute), server.Add(7*time.Minute)); !errors.As(err, &skew) {
		t.Fatalf("a mark 6 minutes ahead: %v", err)
	}
	if now, _ = c.Now(boot.Add(time.Minute)); !now.Equal(server.Add(time.Minute)) {
		t.Fatalf("a refused mark moved the clock to %s", now)
	}
	if err := c.Mark(boot.Add(time.Minute), server.Add(6*time.Minute)); err != nil {
		t.Fatalf("a mark 5 minutes ahead: %v", err)
	}
}

func TestFloor(t *testing.T) {
	c := New(server)
	if err := c.Mark(boot, server.Add(-24*time.Hour)); err != nil {
		t.Fatal(err)
	}
	if now, _ := c.Now(boot); !now.Equal(server) {
		t.Fatalf("first mark below the floor gives %s, want %s", now, server)
	}
}

func TestNeverBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := New(server)
		mono, last := boot, time.Time{}
		for range rapid.IntRange(1, 50).Draw(t, "steps") {
			mono = mono.Add(time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "elapsed")))
			offered := server.Add(time.Duration(rapid.Int64Range(-int64(48*time.Hour), int64(48*time.Hour)).Draw(t, "mark")))
			before, known := c.Now(mono)
			err := c.Mark(mono, offered)
			now, _ := c.Now(mono)
			if now.Before(last) {
				t.Fatalf("went back from %s to %s", last, now)
			}
			if known && now.Sub(before) > MaxLeap {
				t.Fatalf("leapt %s", now.Sub(before))
			}
			if err != nil && !now.Equal(before) {
				t.Fatalf("a refused mark moved the clock")
			}
			last = now
		}
	})
}
