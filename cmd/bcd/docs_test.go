package main

import (
	"testing"

	"github.com/better-compute/bcd/agent/config"
	"github.com/better-compute/bcd/cmd/internal/clidocs"
)

// TestDocs compares docs/man and docs/config.md with the code; make docs
// writes them.
func TestDocs(t *testing.T) {
	clidocs.CheckMan(t, newRoot(), "../../docs/man")
	clidocs.CheckFile(t, "../../docs/config.md", []byte(config.Reference()))
}
