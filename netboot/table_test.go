package netboot

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/intent"
	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

var t0 = time.Date(2026, 12, 1, 8, 0, 0, 0, time.UTC)

// control is a control plane: what signs tables and configs.
type control struct {
	roots  *intent.Roots
	signer *intent.Signer
}

func newControl(t *testing.T) *control {
	t.Helper()
	root := must(pki.NewRoot("test", t0))
	key := must(pki.NewKey())
	chain := must(root.IssueCommandSigner("control", key.Public(), t0, 30*24*time.Hour))
	return &control{roots: intent.FromRoots(must(pki.NewRoots(root.Certificate))), signer: &intent.Signer{Key: key, Chain: chain}}
}

func (c *control) table(generation int64, edit ...func(*bcdv1.BootTable)) *bcdv1.Signed {
	b := table(ramdiskAction)
	b.Generation, b.IssuedMs = generation, t0.UnixMilli()
	for _, f := range edit {
		f(b)
	}
	return must(c.signer.Sign(intent.TypeBootTable, b))
}

func TestTableTakes(t *testing.T) {
	c, other := newControl(t), newControl(t)
	for _, test := range []struct {
		name   string
		signed *bcdv1.Signed
		want   string
	}{
		{"newer", c.table(5), ""},
		{"the same", c.table(4), "not newer"},
		{"older", c.table(3), "not newer"},
		{"foreign roots", other.table(5), "trusted root"},
		{"of another type", must(c.signer.Sign(intent.TypeCommand, &bcdv1.BootTable{Generation: 9})), "another type"},
		{"of another site", c.table(5, func(b *bcdv1.BootTable) { b.Site = "ber1" }), `site "ber1", and this is fsn1`},
		{"generation 0", c.table(0), "generation 0"},
		{"too many machines", c.table(5, func(b *bcdv1.BootTable) {
			for range maxMachines + 1 {
				b.Machines = append(b.Machines, &bcdv1.MachineBoot{})
			}
		}), "at most 16384"},
		{"too many artefacts", c.table(5, func(b *bcdv1.BootTable) {
			for range maxArtefacts + 1 {
				b.Artefacts = append(b.Artefacts, allArtefacts[0])
			}
		}), "at most 256"},
		{"a name that leaves the folder", c.table(5, func(b *bcdv1.BootTable) {
			b.Artefacts = []*bcdv1.BootArtefact{{Name: "../x", Sha256: make([]byte, 32), Size: 1}}
		}), `"../x" is not 1 to 64`},
		{"a short digest", c.table(5, func(b *bcdv1.BootTable) {
			b.Artefacts = []*bcdv1.BootArtefact{{Name: "x", Sha256: make([]byte, 31), Size: 1}}
		}), "31 bytes"},
		{"an empty artefact", c.table(5, func(b *bcdv1.BootTable) {
			b.Artefacts = []*bcdv1.BootArtefact{{Name: "x", Sha256: make([]byte, 32)}}
		}), "size 0"},
		{"not a table", must(c.signer.SignBytes(intent.TypeBootTable, []byte{0xff})), "proto"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := &Table{Dir: t.TempDir(), Site: "fsn1", Roots: c.roots}
			if err := s.Take(c.table(4), t0); err != nil {
				t.Fatal(err)
			}
			err := s.Take(test.signed, t0)
			want := int64(4)
			if test.want == "" {
				want = 5
			}
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
			if got := s.Get().GetGeneration(); got != want {
				t.Errorf("generation %d, want %d", got, want)
			}
		})
	}
}

func TestTableSurvivesARestart(t *testing.T) {
	c := newControl(t)
	dir := t.TempDir()
	first := &Table{Dir: dir, Site: "fsn1", Roots: c.roots}
	if err := first.Load(); err != nil || first.Get() != nil {
		t.Fatalf("an empty folder: %v, %v", err, first.Get())
	}
	if err := first.Take(c.table(7), t0.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	again := &Table{Dir: dir, Site: "fsn1", Roots: c.roots}
	if err := again.Load(); err != nil || !proto.Equal(again.Get(), first.Get()) {
		t.Fatalf("%v, %v", err, again.Get())
	}
	if err := again.Take(c.table(7), t0); !errors.Is(err, ErrOldTable) {
		t.Errorf("the kept generation does not count: %v", err)
	}
}

func TestADamagedTableIsSaidAndDropped(t *testing.T) {
	c := newControl(t)
	for name, damage := range map[string]func(path string, data []byte) error{
		"a bit":     func(p string, d []byte) error { d[len(d)/2] ^= 1; return os.WriteFile(p, d, 0o600) },
		"cut":       func(p string, d []byte) error { return os.WriteFile(p, d[:len(d)/2], 0o600) },
		"empty":     func(p string, d []byte) error { return os.WriteFile(p, nil, 0o600) },
		"too large": func(p string, d []byte) error { return os.Truncate(p, maxTableFile+1) },
	} {
		t.Run(name, func(t *testing.T) {
			s := &Table{Dir: t.TempDir(), Site: "fsn1", Roots: c.roots}
			if err := s.Take(c.table(7), t0); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(s.Dir, tableFile)
			if err := damage(path, readFile(t, path)); err != nil {
				t.Fatal(err)
			}
			again := &Table{Dir: s.Dir, Site: "fsn1", Roots: c.roots}
			if err := again.Load(); err == nil || !strings.Contains(err.Error(), "damaged and was dropped") || again.Get() != nil {
				t.Errorf("%v, %v", err, again.Get())
			}
			if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the file is still there: %v", err)
			}
			if err := again.Take(c.table(7), t0); err != nil {
				t.Errorf("the same table again: %v", err)
			}
		})
	}
}

func TestATableThatCannotBeKeptCounts(t *testing.T) {
	c := newControl(t)
	s := &Table{Dir: filepath.Join(t.TempDir(), "gone"), Site: "fsn1", Roots: c.roots}
	if err := s.Take(c.table(7), t0); err == nil || s.Get().GetGeneration() != 7 {
		t.Errorf("%v, %v", err, s.Get())
	}
}
