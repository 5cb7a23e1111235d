package main

import (
	"github.com/spf13/cobra"

	"github.com/better-compute/bcd/agent/host"
	"github.com/better-compute/bcd/cmd/internal/cli"
)

func hardwareCommand() *cobra.Command {
	var asJSON bool
	var seed uint64
	cmd := &cobra.Command{
		Use:   "hardware",
		Short: "say what this machine really is",
		Args:  cli.NoArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			roots := host.Live()
			roots.Seed = seed
			facts, err := host.Read(cmd.Context(), roots)
			if err != nil {
				return err
			}
			if asJSON {
				return host.RenderHardwareJSON(cmd.OutOrStdout(), facts)
			}
			return host.RenderHardware(cmd.OutOrStdout(), facts)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON, with the hash of each section")
	if host.Fake {
		cmd.Flags().Uint64Var(&seed, "seed", 1, "which made-up machine")
	}
	return cmd
}
