package image

import (
	"github.com/better-compute/bcd/image/cpio"
	"github.com/better-compute/bcd/image/gobuild"
)

// rescueEntries is the busybox with a link for each of its commands.
func rescueEntries(binary []byte) []cpio.Entry {
	out := []cpio.Entry{cpio.File("bbin/bb", 0o755, binary)}
	for _, name := range gobuild.RescueCommands {
		out = append(out, cpio.Symlink("bbin/"+name, "bb"))
	}
	return append(out, cpio.Symlink("bbin/sh", "gosh"))
}
