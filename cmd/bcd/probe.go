package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/better-compute/bcd/agent/journal"
)

func probeCommand() *cobra.Command {
	return &cobra.Command{
		Use:    probeVerb + " FILE",
		Hidden: true,
		Args:   cobra.ArbitraryArgs,
		Run: func(cmd *cobra.Command, args []string) {
			os.Exit(journal.ProbeMain(args, cmd.ErrOrStderr()))
		},
	}
}
