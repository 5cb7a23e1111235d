// Command bcd is the daemon: the PXE ramdisk's agent and its init, the
// installed node's agent, and the local commands that go with them.
//
// Modes are assembled here and nowhere else; what they are made of is in the
// rooms below agent, boot, deploy and supervisor.
package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/better-compute/bcd/agent/config"
	"github.com/better-compute/bcd/cmd/internal/cli"
)

// version is set by the linker.
var version = "dev"

func main() {
	if os.Getpid() == 1 {
		runInit()
	}
	os.Exit(cli.Main(newRoot(), os.Args[1:], cli.WithoutTokens(os.Stdout), os.Stderr))
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:     "bcd",
		Short:   "the daemon that turns bare metal into working machines",
		Version: version,
	}
	root.AddCommand(
		nodeCommand(),
		ramdiskCommand(),
		joinCommand(),
		statusCommand(),
		doctorCommand(),
		hardwareCommand(),
		versionCommand(),
		superviseCommand(),
		probeCommand(),
	)
	return root
}

// configFlag adds --config to a verb.
func configFlag(cmd *cobra.Command) *string {
	return cmd.Flags().String("config", config.DefaultPath, "configuration file")
}
