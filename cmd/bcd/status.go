package main

import (
	"github.com/spf13/cobra"

	"github.com/better-compute/bcd/agent/config"
	"github.com/better-compute/bcd/agent/status"
	"github.com/better-compute/bcd/cmd/internal/cli"
)

func statusCommand() *cobra.Command {
	var asJSON bool
	var socket string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "say what the running daemon does",
		Args:  cli.NoArgs(""),
	}
	configPath := configFlag(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().StringVar(&socket, "socket", "", "status socket (default: the configuration's)")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		path := socket
		if path == "" {
			path = config.Default().SocketPath
			if p, err := localPlace(*configPath); err == nil {
				path = p.SocketPath
			}
		}
		s, err := status.Client{Path: path}.Status(cmd.Context())
		if err != nil {
			return err
		}
		if asJSON {
			return cli.JSON(cmd.OutOrStdout(), s)
		}
		return s.WriteText(cmd.OutOrStdout())
	}
	return cmd
}
