package keys

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/bcd/agent/intent"
	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

func TestInitLoadExport(t *testing.T) {
	now := time.Now()
	dir := filepath.Join(t.TempDir(), "keys")
	if _, err := Load(dir); !errors.Is(err, ErrNone) || !strings.Contains(err.Error(), "keys init") {
		t.Errorf("no set: %v, want ErrNone with what to do", err)
	}
	s, made, err := LoadOrInit(dir, now)
	if err != nil || !made {
		t.Fatalf("made %v, %v", made, err)
	}
	again, made, err := LoadOrInit(dir, now)
	if err != nil || made || again.OperatorToken != s.OperatorToken || again.JoinThumbprint != s.JoinThumbprint {
		t.Errorf("second start: made %v, %v; want the same set", made, err)
	}
	if _, err := Init(dir, now); err == nil {
		t.Error("init replaced a key set")
	}
	err = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		secret := strings.HasSuffix(path, ".key") || strings.HasSuffix(path, ".token") || entry.IsDir()
		if secret && info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v", path, info.Mode())
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}

	signed, err := s.Signer.Sign(intent.TypeCommand, &bcdv1.Command{Id: "cmd_1"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := intent.FromRoots(s.Roots).Command(signed, now); err != nil {
		t.Errorf("the root does not vouch for the signer: %v", err)
	}

	trust := filepath.Join(t.TempDir(), "trust")
	if err := s.ExportTrust(trust); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(trust)
	if err != nil || len(entries) != 2 {
		t.Errorf("exported %v, %v; want two files", entries, err)
	}
	if _, err := pki.LoadRoots(filepath.Join(trust, "roots.pem")); err != nil {
		t.Error(err)
	}
	jwk, err := os.ReadFile(filepath.Join(trust, "join-encryption.jwk"))
	if err != nil {
		t.Fatal(err)
	}
	pub, err := pki.ParseJWK(jwk)
	if err != nil || !pub.Equal(&s.Join.PublicKey) {
		t.Errorf("exported join key: %v", err)
	}
}
