package main

import (
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/better-compute/bcd/agent/pki"
	"github.com/better-compute/bcd/cmd/internal/cli"
	"github.com/better-compute/bcd/gateway/keys"
)

func keysCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "keys", Short: "make the keys of a fleet, and hand out what is public of them"}
	var out, trust string
	initialise := &cobra.Command{
		Use:   "init",
		Short: "make a key set: an offline root, the online keys below it, the join key",
		Long: `Makes a key set. One set serves all gateways of a fleet (serve --keys DIR).
Nodes and images pin its root, so a set is never replaced. Move offline/root.key
to where only you can reach it: it is needed for new online keys only.`,
		Args: cli.NoArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if out == "" {
				out = filepath.Join(dataDir(cmd), "keys")
			}
			set, err := keys.Init(out, time.Now())
			if err != nil {
				return err
			}
			if trust != "" {
				if err := set.ExportTrust(trust); err != nil {
					return err
				}
			}
			return describeKeys(cmd, set)
		},
	}
	initialise.Flags().StringVar(&out, "out", "", "directory for the set (default: keys in the data directory)")
	initialise.Flags().StringVar(&trust, "export-trust", "", "also write roots.pem and join-encryption.jwk into this directory")

	var from string
	export := &cobra.Command{
		Use:   "export-trust DIR",
		Short: "write roots.pem and join-encryption.jwk, which images and nodes need, into DIR",
		Args:  cli.ExactArgs("DIR"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if from == "" {
				from = filepath.Join(dataDir(cmd), "keys")
			}
			set, err := keys.Load(from)
			if err != nil {
				return err
			}
			if err := set.ExportTrust(args[0]); err != nil {
				return err
			}
			return describeKeys(cmd, set)
		},
	}
	export.Flags().StringVar(&from, "keys", "", "directory of the set (default: keys in the data directory)")
	cmd.AddCommand(initialise, export)
	return cmd
}

func describeKeys(cmd *cobra.Command, set *keys.Set) error {
	root := set.Roots.Certificates()[0]
	return cli.Table(cmd.OutOrStdout(), [][]string{
		{"key set", set.Dir},
		{"root sha-256", fmt.Sprintf("%x", pki.Digest(root))},
		{"root until", root.NotAfter.UTC().Format(time.DateOnly)},
		{"signer until", set.SignerExpires.UTC().Format(time.DateOnly)},
		{"join key thumbprint", set.JoinThumbprint},
	})
}
