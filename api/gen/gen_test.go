package main

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestGeneratedCodeIsCurrent makes the code again and compares.
func TestGeneratedCodeIsCurrent(t *testing.T) {
	t.Chdir("../..")
	out := t.TempDir()
	if err := run(out); err != nil {
		t.Fatal(err)
	}
	made := map[string]bool{}
	err := filepath.WalkDir(out, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(out, path)
		if err != nil {
			return err
		}
		made[rel] = true
		want, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		got, err := os.ReadFile(filepath.Join("api", rel))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("api/%s is not what the .proto files say (%v); run make generate", rel, err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, pattern := range []string{"api/bcd/v1/*.pb.go", "api/bcd/v1/bcdv1connect/*.go"} {
		committed, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range committed {
			if !made[strings.TrimPrefix(path, "api/")] {
				t.Errorf("%s belongs to no .proto file; delete it", path)
			}
		}
	}
}

// TestABreakIsSeen changes a recorded fact and expects the refusal.
func TestABreakIsSeen(t *testing.T) {
	t.Chdir("../..")
	request, err := compile("api")
	if err != nil {
		t.Fatal(err)
	}
	recorded := filepath.Join(t.TempDir(), "contract.txt")
	if err := os.WriteFile(recorded, []byte("field bcd.v1.Hello.node_id 99 string\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	err = recordFacts(recorded, filepath.Join(t.TempDir(), "out"), request)
	if err == nil || !strings.Contains(err.Error(), "bcd.v1.Hello.node_id 99") {
		t.Errorf("a changed field number passed: %v", err)
	}
}
