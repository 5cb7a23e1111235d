//go:build !fakehw

package main

import (
	"testing"

	"github.com/better-compute/bcd/agent/config"
	"github.com/better-compute/bcd/cmd/internal/clidocs"
)

// TestDocs compares docs/man and docs/config.md with the code; make docs
// writes them. A build with made-up hardware has a flag more, which is no
// machine's.
func TestDocs(t *testing.T) {
	clidocs.CheckMan(t, newRoot(), "../../docs/man")
	clidocs.CheckFile(t, "../../docs/config.md", []byte(config.Reference()))
}
