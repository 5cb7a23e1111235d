package boltstore

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

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
