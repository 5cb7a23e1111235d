// Command bcd-gateway is the reference gateway: what a small fleet runs in
// production, and what every test runs against.
package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/better-compute/bcd/cmd/internal/cli"
)

// version is set by the linker.
var version = "dev"

func main() { os.Exit(cli.Main(newRoot(), os.Args[1:], os.Stdout, os.Stderr)) }

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:     "bcd-gateway",
		Short:   "the gateway that bcd's daemons connect to",
		Version: version,
	}
	to := &target{}
	to.flags(root)
	root.AddCommand(
		serveCommand(),
		keysCommand(),
		tokenCommand(to),
		machinesCommand(to),
		machineCommand(to),
		sendCommand(to),
		cancelCommand(to),
		deployCommand(to),
		specCommand(to),
		eventsCommand(to),
		blobCommand(to),
		siteCommand(to),
		bootCommand(to),
		bootImageCommand(to),
	)
	return root
}
