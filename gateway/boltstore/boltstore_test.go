package boltstore

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"

	"github.com/better-compute/bcd/gateway"
	"github.com/better-compute/bcd/gateway/storetest"
)

func TestConformance(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Maker {
		path := filepath.Join(t.TempDir(), "state.db")
		return func(t *testing.T) gateway.Store {
			s, err := Open(path)
			if err != nil {
				t.Fatal(err)
			}
			return s
		}
	})
}

func TestOneOwner(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	first, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", info.Mode(), err)
	}
	if _, err := Open(path); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), "stop the other") {
		t.Errorf("second owner: %v, want ErrInUse with what to do", err)
	}
}

func TestEmptyFileIsNotAFreshStore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path); err == nil || !strings.Contains(err.Error(), "empty file") {
		t.Errorf("opening an empty file: %v", err)
	}
}

// TestDamagedFile: a file that was cut or overwritten is a sentence, neither a
// panic nor a store that has forgotten something.
func TestDamagedFile(t *testing.T) {
	dir := t.TempDir()
	whole := filepath.Join(dir, "whole.db")
	s, err := Open(whole)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.db.Update(func(tx *bolt.Tx) error {
		for i := range 2000 {
			if err := tx.Bucket([]byte(buckets[0])).Put(fmt.Appendf(nil, "key %d", i), make([]byte, 100)); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(whole)
	if err != nil {
		t.Fatal(err)
	}
	page := os.Getpagesize()
	damages := map[string][]byte{"no meta page": bytes.Repeat([]byte{0x5a}, len(content))}
	for _, size := range []int{1, page, 2 * page, 3 * page, 8 * page, 20 * page} {
		damages[fmt.Sprintf("%d bytes", size)] = content[:size]
	}
	for pages := 2; pages < 64; pages += 3 {
		torn := bytes.Clone(content)
		copy(torn[pages*page:], bytes.Repeat([]byte{0x5a}, page))
		damages[fmt.Sprintf("page %d", pages)] = torn
	}
	for name, data := range damages {
		path := filepath.Join(dir, "damaged.db")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		// A page in the middle may be met only when it is read.
		s, err := Open(path)
		switch {
		case err != nil && !strings.Contains(err.Error(), path):
			t.Errorf("%s: %v does not name the file", name, err)
		case err == nil && !strings.HasPrefix(name, "page "):
			t.Errorf("%s: opened", name)
		}
		if s != nil {
			s.Close()
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCrashWhileMakingTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	if err := os.WriteFile(path+".new", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	if _, err := os.Stat(path + ".new"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left over: %v", err)
	}
}
