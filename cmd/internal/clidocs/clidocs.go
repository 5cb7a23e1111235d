// Package clidocs makes the man pages of a command and checks that the ones in
// docs/man are what the code says. Only tests import it.
package clidocs

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// Update is the -update flag of the tests that use this package: write the
// files instead of comparing them.
var Update = flag.Bool("update", false, "write the generated documentation")

// CheckMan compares the man pages of root with those in dir, or writes them.
func CheckMan(t *testing.T, root *cobra.Command, dir string) {
	t.Helper()
	made := t.TempDir()
	// The date and the generator's name would change without the command.
	when := time.Unix(0, 0).UTC()
	root.DisableAutoGenTag = true
	disableTags(root)
	if err := doc.GenManTree(root, &doc.GenManHeader{Section: "1", Date: &when, Source: root.Name()}, made); err != nil {
		t.Fatal(err)
	}
	CheckTree(t, made, dir, root.Name()+"*.1")
}

func disableTags(cmd *cobra.Command) {
	cmd.DisableAutoGenTag = true
	for _, sub := range cmd.Commands() {
		disableTags(sub)
	}
}

// CheckTree compares the files of made with those of dir whose names match
// pattern, or replaces these by those.
func CheckTree(t *testing.T, made, dir, pattern string) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(made, "*"))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{}
	for _, path := range names {
		name := filepath.Base(path)
		want[name] = true
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		CheckFile(t, filepath.Join(dir, name), content)
	}
	have, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range have {
		// bcd*.1 matches bcd-gateway's pages too; each command has its own.
		if name := filepath.Base(path); !want[name] && !strings.HasPrefix(name, "bcd-gateway") {
			if *Update {
				if err := os.Remove(path); err != nil {
					t.Fatal(err)
				}
				continue
			}
			t.Errorf("%s belongs to no command; run make docs", path)
		}
	}
}

// CheckFile compares a generated file with the one at path, or writes it.
func CheckFile(t *testing.T, path string, content []byte) {
	t.Helper()
	if *Update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, content, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Errorf("%v; run make docs", err)
		return
	}
	if !bytes.Equal(got, content) {
		t.Errorf("%s is not what the code says; run make docs", path)
	}
}
