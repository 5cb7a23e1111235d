package identity

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/bcd/agent/durable"
	"github.com/better-compute/bcd/agent/pki"
)

func TestSaveLoad(t *testing.T) {
	g, dir := newGateway(), dataDir(t)
	if _, err := Load(dir); !errors.Is(err, ErrNotJoined) {
		t.Fatalf("no folder: %v", err)
	}
	i := newIdentity(t, g, dir)
	got := must(Load(dir))
	if got.NodeID != i.NodeID || got.MachineID != "mach_1" || got.Site != "fsn1" || got.Role != i.Role || !got.Joined.Equal(t0) {
		t.Errorf("%+v", got)
	}
	if info := must(os.Stat(dir)); info.Mode().Perm() != 0o700 {
		t.Errorf("folder has mode %v", info.Mode())
	}
	for _, name := range names(t, dir) {
		if info := must(os.Stat(filepath.Join(dir, name))); info.Mode() != 0o600 {
			t.Errorf("%s has mode %v", name, info.Mode())
		}
	}
	if want := []string{"identity.json", "join-record.bin", "node.crt", "node.key"}; fmt.Sprint(names(t, dir)) != fmt.Sprint(want) {
		t.Errorf("files %v, want %v", names(t, dir), want)
	}
	if _, err := got.CommandRoots(g.roots, nil); err != nil {
		t.Errorf("command roots: %v", err)
	}
	if text := got.Describe(t0.Add(10 * time.Hour)); text != "node_a, site fsn1, role node, certificate valid 14h00m more" {
		t.Error(text)
	}
	if text := got.Describe(t0.Add(100 * time.Hour)); !strings.Contains(text, "expired 3d ago") {
		t.Error(text)
	}
}

func names(t *testing.T, dir string) (out []string) {
	t.Helper()
	for _, e := range must(os.ReadDir(dir)) {
		out = append(out, e.Name())
	}
	return out
}

// TestSaveCrashes cuts a renewal off at every step, and the one after it too:
// what loads is the old identity or the new one, never a mixture or nothing.
func TestSaveCrashes(t *testing.T) {
	g := newGateway()
	boom := errors.New("power cut")
	crashAt := func(n int, steps *int) durable.Writer {
		return durable.Writer{Before: func(string, string) error {
			if *steps++; *steps == n {
				return boom
			}
			return nil
		}}
	}
	renewed := func(old *Identity, at time.Time) *Identity {
		i := *old
		i.Key = must(pki.NewKey())
		name := pki.NodeName{Role: i.Role, Site: i.Site, NodeID: i.NodeID}
		i.Chain = must(pki.ParseChain(must(g.issuer.IssueNode(must(pki.NewCSR(i.Key)), name, at, time.Hour))))
		return &i
	}
	total := 0
	for n := 1; ; n++ {
		dir := dataDir(t)
		old := newIdentity(t, g, dir)
		second := renewed(old, t0.Add(time.Hour))
		steps := 0
		err := Store{Dir: dir, Writer: crashAt(n, &steps)}.Save(second)
		if err == nil {
			total = steps
			break
		}
		if !errors.Is(err, boom) {
			t.Fatalf("step %d: %v", n, err)
		}
		loaded, err := Load(dir)
		if err != nil {
			t.Fatalf("crash before step %d: %v\nfiles: %v", n, err, names(t, dir))
		}
		if at := loaded.NotAfter(); !at.Equal(old.NotAfter()) && !at.Equal(second.NotAfter()) {
			t.Fatalf("crash before step %d: neither of the two", n)
		}
		if n%3 != 0 {
			continue // the second crash squares the number of fsyncs
		}
		// The machine comes back, renews again, and is cut off again.
		for m := 1; ; m++ {
			third := renewed(loaded, t0.Add(2*time.Hour))
			steps := 0
			err := Store{Dir: dir, Writer: crashAt(m, &steps)}.Save(third)
			again, loadErr := Load(dir)
			if loadErr != nil {
				t.Fatalf("crash before step %d, then %d: %v\nfiles: %v", n, m, loadErr, names(t, dir))
			}
			if err == nil {
				if !again.NotAfter().Equal(third.NotAfter()) || len(names(t, dir)) != 4 {
					t.Fatalf("after a whole save: %v, files %v", again.NotAfter(), names(t, dir))
				}
				break
			}
		}
	}
	if total < 25 {
		t.Errorf("only %d steps were cut; the test does not see them all", total)
	}
}

func TestUnloadable(t *testing.T) {
	g := newGateway()
	for name, damage := range map[string]func(dir string) error{
		"another key":         func(dir string) error { return pki.SaveKey(filepath.Join(dir, nameKey), must(pki.NewKey())) },
		"no key":              func(dir string) error { return os.Remove(filepath.Join(dir, nameKey)) },
		"empty key":           func(dir string) error { return os.Truncate(filepath.Join(dir, nameKey), 0) },
		"cut certificate":     func(dir string) error { return os.Truncate(filepath.Join(dir, nameCertificate), 100) },
		"no record":           func(dir string) error { return os.Remove(filepath.Join(dir, nameRecord)) },
		"empty identity.json": func(dir string) error { return os.Truncate(filepath.Join(dir, nameIndex), 0) },
		"no identity.json":    func(dir string) error { return os.Remove(filepath.Join(dir, nameIndex)) },
		"identity.json is a folder": func(dir string) error {
			path := filepath.Join(dir, nameIndex)
			return errors.Join(os.Remove(path), os.Mkdir(path, 0o700))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := dataDir(t)
			newIdentity(t, g, dir)
			if err := damage(dir); err != nil {
				t.Fatal(err)
			}
			_, err := Load(dir)
			if !errors.Is(err, ErrUnloadable) || !strings.HasSuffix(err.Error(), WayBack) {
				t.Errorf("error %v, want ErrUnloadable that ends in the way back", err)
			}
			before := len(g.claims)
			if _, err := Join(t.Context(), g.options(t, dir)); !errors.Is(err, ErrUnloadable) {
				t.Errorf("join: %v", err)
			}
			if len(g.claims) != before {
				t.Error("a silent new join")
			}
			removed, err := Reset(dir)
			if err != nil || len(removed) < 3 {
				t.Errorf("reset: %v, %v", removed, err)
			}
			if left := names(t, dir); len(left) != 0 {
				t.Errorf("left: %v", left)
			}
			newIdentity(t, g, dir)
		})
	}
}

func FuzzAssemble(f *testing.F) {
	f.Add([]byte(`{"version":1,"node_id":"node_a"}`))
	f.Add([]byte(`{"version":1,"key_sha256":"47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="}`))
	dir := f.TempDir()
	for _, name := range []string{nameKey, nameCertificate, nameRecord} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			f.Fatal(err)
		}
	}
	root := must(os.OpenRoot(dir))
	f.Fuzz(func(t *testing.T, index []byte) {
		if i, err := assemble(root, index); err == nil {
			t.Errorf("an identity out of empty files: %+v", i)
		}
	})
}
