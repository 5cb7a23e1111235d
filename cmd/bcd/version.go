package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/better-compute/bcd/agent/host"
	"github.com/better-compute/bcd/api/kinds"
	"github.com/better-compute/bcd/cmd/internal/cli"
)

// protocol is the version of the session protocol that this daemon speaks.
const protocol = 1

func versionCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "print the version, what it was built from and what it can do",
		Args:  cli.NoArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := struct {
				Version  string   `json:"version"`
				Go       string   `json:"go"`
				Platform string   `json:"platform"`
				Protocol int      `json:"protocol"`
				FakeHW   bool     `json:"fakehw"`
				Kinds    []string `json:"kinds"`
			}{Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH, Protocol: protocol, FakeHW: host.Fake}
			if info, ok := debug.ReadBuildInfo(); ok {
				v.Go = info.GoVersion
			}
			for _, k := range kinds.All() {
				v.Kinds = append(v.Kinds, k.GetName())
			}
			if asJSON {
				return cli.JSON(cmd.OutOrStdout(), v)
			}
			hardware := ""
			if v.FakeHW {
				hardware = ", made-up hardware (fakehw)"
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "bcd %s (%s, %s, protocol %d%s)\n", v.Version, v.Go, v.Platform, v.Protocol, hardware)
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
