package main

import (
	"context"
	"errors"
	"os"

	"github.com/spf13/cobra"

	"github.com/better-compute/bcd/agent/config"
	"github.com/better-compute/bcd/agent/doctor"
	"github.com/better-compute/bcd/agent/host"
	"github.com/better-compute/bcd/agent/status"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/cmd/internal/cli"
)

func doctorCommand() *cobra.Command {
	var asJSON, offline bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "check this machine, one line a check; exit 1 when any fails",
		Long: `Checks whether this machine is fit to run bcd. When a daemon runs here, it makes
the report itself, with what only it knows; --offline checks from this process.`,
		Args: cli.NoArgs(""),
	}
	configPath := configFlag(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&offline, "offline", false, "do not ask a running daemon")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		report, err := diagnose(cmd.Context(), *configPath, offline)
		if err != nil {
			return err
		}
		write := report.WriteText
		if asJSON {
			write = report.WriteJSON
		}
		if err := write(cmd.OutOrStdout()); err != nil {
			return err
		}
		if report.Failed {
			return cli.ErrSilent
		}
		return nil
	}
	return cmd
}

// diagnose asks the running daemon or, without one, checks by itself.
func diagnose(ctx context.Context, configPath string, offline bool) (doctor.Report, error) {
	p, err := localPlace(configPath)
	if err == nil && !offline {
		var report doctor.Report
		if (status.Client{Path: p.SocketPath}).Doctor(ctx, &report) == nil {
			return report, nil
		}
	}
	if err == nil {
		return doctor.Run(ctx, doctorInputs(p)), nil
	}
	// There is no configuration that can be used; the rest can be checked.
	in := doctor.FromHost(host.Live())
	in.Config = func(context.Context) (doctor.Config, error) { return doctor.Config{Path: configPath}, err }
	return doctor.Run(ctx, in), nil
}

// localPlace is where this machine stands: what its configuration file says
// or, in the ramdisk, what its boot says.
func localPlace(configPath string) (*place, error) {
	if _, err := os.Stat(configPath); errors.Is(err, os.ErrNotExist) && inRamdisk() {
		p, _, err := ramdiskPlace("/")
		return p, err
	}
	c, err := config.Load(configPath)
	if err != nil {
		return nil, err
	}
	p := &place{Config: c, role: bcdv1.Role_ROLE_NODE, source: configPath}
	// A machine without trust yet is one that has not joined: its own line.
	if err := p.trust(c.RootsPath(), c.JoinKeyPath()); err != nil {
		p.roots = nil
	}
	return p, nil
}

// inRamdisk says whether this system is one of our own images in RAM.
func inRamdisk() bool {
	_, err := os.Stat("/etc/bcd/MANIFEST")
	return err == nil
}
