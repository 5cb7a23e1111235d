package journal_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/bcd/agent/journal"
	"github.com/better-compute/bcd/agent/journal/journaltest"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// probeVerb makes the test binary the probe's child.
const probeVerb = "journal-probe-child"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == probeVerb {
		os.Exit(journal.ProbeMain(os.Args[2:], os.Stderr))
	}
	os.Exit(m.Run())
}

func options(t *testing.T, dir string) journal.Options {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return journal.Options{
		Path:   filepath.Join(dir, "journal.db"),
		Anchor: journal.AnchorIn(dir),
		Probe:  journal.ExecProbe(self, probeVerb),
		Now:    func() time.Time { return time.Date(2026, 5, 1, 0, 0, 0, 0, time.UTC) },
	}
}

func openIn(t *testing.T, dir string) *journal.Journal {
	t.Helper()
	j, err := journal.Open(context.Background(), options(t, dir))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	return j
}

func TestFile(t *testing.T) {
	dirs := map[*journal.Journal]string{}
	journaltest.Run(t, journaltest.Maker{
		New: func(t *testing.T) *journal.Journal {
			dir := t.TempDir()
			j := openIn(t, dir)
			dirs[j] = dir
			return j
		},
		Reopen: func(t *testing.T, j *journal.Journal) *journal.Journal {
			if err := j.Close(); err != nil {
				t.Fatal(err)
			}
			again := openIn(t, dirs[j])
			if loss := again.Loss(); loss != nil {
				t.Fatalf("reopening lost the journal: %+v", loss)
			}
			if again.ID() != j.ID() {
				t.Fatalf("reopened as %s, was %s", again.ID(), j.ID())
			}
			dirs[again] = dirs[j]
			return again
		},
	})
}

func TestMemory(t *testing.T) {
	journaltest.Run(t, journaltest.Maker{
		New: func(t *testing.T) *journal.Journal {
			j, err := journal.NewMemory(nil, &journal.MemoryAnchor{})
			if err != nil {
				t.Fatal(err)
			}
			return j
		},
		Reopen: func(t *testing.T, j *journal.Journal) *journal.Journal { return j },
	})
}

func TestMode(t *testing.T) {
	dir := t.TempDir()
	openIn(t, dir)
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 2 {
		t.Fatalf("files: %v, %v", files, err)
	}
	for _, f := range files {
		info, err := f.Info()
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %o", f.Name(), info.Mode().Perm())
		}
	}
}

// TestIdle: nothing is written while nothing happens.
func TestIdle(t *testing.T) {
	dir := t.TempDir()
	j := openIn(t, dir)
	if err := j.SetEpoch(3); err != nil {
		t.Fatal(err)
	}
	before := snapshot(t, dir)
	for range 100 {
		j.Stats()
		j.Open()
		if err := j.SetEpoch(3); err != nil {
			t.Fatal(err)
		}
		if err := j.AckEvents(0); err != nil {
			t.Fatal(err)
		}
	}
	if after := snapshot(t, dir); !bytes.Equal(before, after) {
		t.Fatal("an idle journal wrote")
	}
}

func snapshot(t *testing.T, dir string) []byte {
	t.Helper()
	var all []byte
	for _, name := range []string{"journal.db", "journal-position.json"} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		all = fmt.Appendf(all, "%s %s\n", name, info.ModTime())
		all = append(all, data...)
	}
	return all
}

func TestSecondProcess(t *testing.T) {
	dir := t.TempDir()
	openIn(t, dir)
	_, err := journal.Open(context.Background(), options(t, dir))
	if err == nil || !strings.Contains(err.Error(), "another process holds the journal") {
		t.Fatalf("a second process got %v", err)
	}
	if files, _ := filepath.Glob(filepath.Join(dir, "*.damaged-*")); len(files) > 0 {
		t.Fatalf("the journal in use was moved aside: %v", files)
	}
}

// fill gives a journal a bit of everything.
func fill(t *testing.T, j *journal.Journal) {
	t.Helper()
	for n := range 6 {
		id := fmt.Sprintf("cmd_%d", n)
		if err := j.Accept(journal.Entry{ID: id, Kind: "k", DeadlineMS: 1 << 50, AcceptedMS: 10}, bytes.Repeat([]byte{byte(n)}, 300)); err != nil {
			t.Fatal(err)
		}
		if n > 0 {
			if err := j.Start(id, 20, "boot"); err != nil {
				t.Fatal(err)
			}
		}
		if n > 2 {
			if err := j.Finish(id, journal.Finish{Outcome: bytes.Repeat([]byte{byte(n)}, n*1000)}); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := j.Append(journal.Durable, &bcdv1.Event{Type: "x", Message: id}); err != nil {
			t.Fatal(err)
		}
	}
}

// image is what a journal says, whole.
func image(t *testing.T, j *journal.Journal) string {
	t.Helper()
	var b strings.Builder
	fmt.Fprintln(&b, j.ID(), j.Sequence())
	for _, e := range j.Open() {
		signed, _ := j.Signed(e.ID)
		outcome, _ := j.Outcome(e.ID)
		fmt.Fprintf(&b, "%+v %x %x\n", e, sha256.Sum256(signed), sha256.Sum256(outcome))
	}
	events, err := j.Events(0, 1000, 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events {
		fmt.Fprintln(&b, e.GetSequence(), e.GetMessage())
	}
	return b.String()
}

// TestDamage truncates, zeroes and flips at every page. Whatever is done, the
// journal is the same as before or its loss is reported: never a fresh one
// without a word, never another content.
func TestDamage(t *testing.T) {
	dir := t.TempDir()
	j := openIn(t, dir)
	fill(t, j)
	want, id := image(t, j), j.ID()
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(filepath.Join(dir, "journal.db"))
	if err != nil {
		t.Fatal(err)
	}
	position, err := os.ReadFile(filepath.Join(dir, "journal-position.json"))
	if err != nil {
		t.Fatal(err)
	}
	page := os.Getpagesize()
	damages := map[string]func(data []byte, at int) []byte{
		"truncate": func(data []byte, at int) []byte { return data[:at] },
		"cut":      func(data []byte, at int) []byte { return data[:at+page/2] },
		"zero":     func(data []byte, at int) []byte { clear(data[at : at+page]); return data },
		"flip":     func(data []byte, at int) []byte { data[at+16+at/page%64] ^= 0x10; return data },
		"flip-end": func(data []byte, at int) []byte { data[at+page-100] ^= 0x01; return data },
		"garbage": func(data []byte, at int) []byte {
			for n := range page {
				data[at+n] = byte(n*7 + at)
			}
			return data
		},
	}
	// A child a damage: each kind that was measured to hurt at every page, the
	// others at every third.
	stride := map[string]int{"cut": 3, "flip-end": 3, "garbage": 3}
	lost := 0
	for name, damage := range damages {
		for at := 0; at < len(good); at += page * max(1, stride[name]) {
			sub := t.TempDir()
			bad := damage(append([]byte(nil), good...), at)
			write(t, filepath.Join(sub, "journal.db"), bad)
			write(t, filepath.Join(sub, "journal-position.json"), position)
			again, err := journal.Open(context.Background(), options(t, sub))
			if err != nil {
				t.Fatalf("%s at page %d: %v", name, at/page, err)
			}
			if loss := again.Loss(); loss == nil {
				if got := image(t, again); got != want {
					t.Errorf("%s at page %d: unnoticed, content is\n%s\nwant\n%s", name, at/page, got, want)
				}
			} else {
				lost++
				if loss.JournalID != id || loss.MovedTo == "" || again.ID() == id {
					t.Errorf("%s at page %d: %+v", name, at/page, loss)
				}
				if kept, err := os.ReadFile(loss.MovedTo); err != nil || !bytes.Equal(kept, bad) {
					t.Errorf("%s at page %d: the damaged file was not kept: %v", name, at/page, err)
				}
				if got, reason := again.Lost(); got != id || reason == "" {
					t.Errorf("%s at page %d: the new journal says %q, %q", name, at/page, got, reason)
				}
			}
			again.Close()
		}
	}
	if lost < len(good)/page { // truncation alone is noticed at nearly all
		t.Fatalf("only %d of %d damages were noticed", lost, len(damages)*len(good)/page)
	}
}

func write(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestLost(t *testing.T) {
	for name, lose := range map[string]func(t *testing.T, dir, early string){
		"missing":      func(t *testing.T, dir, _ string) { os.Remove(filepath.Join(dir, "journal.db")) },
		"empty":        func(t *testing.T, dir, _ string) { os.Truncate(filepath.Join(dir, "journal.db"), 0) },
		"rolled back":  func(t *testing.T, dir, early string) { os.Rename(early, filepath.Join(dir, "journal.db")) },
		"not a bbolt":  func(t *testing.T, dir, _ string) { write(t, filepath.Join(dir, "journal.db"), []byte("hello")) },
		"another node": func(t *testing.T, dir, _ string) { other(t, filepath.Join(dir, "journal.db")) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			j := openIn(t, dir)
			id := j.ID()
			early := filepath.Join(t.TempDir(), "early")
			data, err := os.ReadFile(filepath.Join(dir, "journal.db"))
			if err != nil {
				t.Fatal(err)
			}
			write(t, early, data)
			fill(t, j)
			j.Close()
			lose(t, dir, early)
			j = openIn(t, dir)
			if j.Loss() == nil || j.Loss().JournalID != id {
				t.Fatalf("loss is %+v, want that of %s", j.Loss(), id)
			}
			// The report survives a restart until the gateway was told.
			j.Close()
			j = openIn(t, dir)
			if lost, _ := j.Lost(); j.Loss() != nil || lost != id {
				t.Fatalf("after a restart: loss %+v, lost %q", j.Loss(), lost)
			}
			if err := j.SettleLoss(123456); err != nil {
				t.Fatal(err)
			}
			j.Close()
			j = openIn(t, dir)
			if lost, _ := j.Lost(); lost != "" || j.IssuedFloorMS() != 123456 {
				t.Fatalf("after it was told: lost %q, floor %d", lost, j.IssuedFloorMS())
			}
		})
	}
}

func other(t *testing.T, path string) {
	t.Helper()
	dir := t.TempDir()
	j := openIn(t, dir)
	j.Close()
	if err := os.Rename(filepath.Join(dir, "journal.db"), path); err != nil {
		t.Fatal(err)
	}
}

// TestAnchorDamaged: a position that cannot be read never turns a missing
// journal into a first start.
func TestAnchorDamaged(t *testing.T) {
	dir := t.TempDir()
	j := openIn(t, dir)
	fill(t, j)
	id := j.ID()
	j.Close()
	write(t, filepath.Join(dir, "journal-position.json"), []byte("{"))
	j = openIn(t, dir)
	if j.Loss() != nil || j.ID() != id {
		t.Fatalf("a good journal was given up: %+v", j.Loss())
	}
	j.Close()
	write(t, filepath.Join(dir, "journal-position.json"), []byte("{"))
	os.Remove(filepath.Join(dir, "journal.db"))
	j = openIn(t, dir)
	if j.Loss() == nil || j.Loss().JournalID != "unknown" {
		t.Fatalf("loss is %+v, want unknown", j.Loss())
	}
}

func TestProbeThatCannotStart(t *testing.T) {
	dir := t.TempDir()
	openIn(t, dir).Close()
	o := options(t, dir)
	o.Probe = journal.ExecProbe(filepath.Join(dir, "no-such-program"))
	_, err := journal.Open(context.Background(), o)
	if err == nil || errors.As(err, new(*journal.DamageError)) {
		t.Fatalf("got %v", err)
	}
	if j := openIn(t, dir); j.Loss() != nil {
		t.Fatal("a probe that could not start gave up the journal")
	}
}
