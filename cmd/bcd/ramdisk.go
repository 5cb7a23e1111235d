package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/better-compute/bcd/agent/config"
	"github.com/better-compute/bcd/agent/identity"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/boot"
	"github.com/better-compute/bcd/cmd/internal/cli"
	"github.com/better-compute/bcd/supervisor"
	"github.com/better-compute/bcd/supervisor/clock"
	"github.com/better-compute/bcd/supervisor/modules"
	"github.com/better-compute/bcd/supervisor/netcfg"
	"github.com/better-compute/bcd/supervisor/pid1"
)

func ramdiskCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "ramdisk",
		Short: "run the agent of a machine that was booted from the network",
		Long: `Runs the agent of the PXE ramdisk alone: gateway and join token come from SMBIOS
type 11 strings (bcd.gateway=, bcd.token=), the kernel command line or the image.
In the image itself it is started by bcd as init, with what a machine needs besides.`,
		Args: cli.NoArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			logs, err := newLogging(cmd.ErrOrStderr(), "info", "text")
			if err != nil {
				return err
			}
			noInit := func(context.Context, string) error {
				return errors.New("this agent was not started by bcd's init, so it cannot restart the machine; restart it by hand")
			}
			return ramdiskAgent(cmd.Context(), logs, ramdiskWorld{restart: noInit})
		},
	}
}

func superviseCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "supervise",
		Short:  "run what a machine needs that was started by bcd as init",
		Hidden: true,
		Args:   cli.NoArgs(""),
		RunE:   func(cmd *cobra.Command, _ []string) error { return supervise(cmd.Context()) },
	}
}

// supervise is the supervisor process of the ramdisk: drivers, clock, network,
// and the agent once there are all three.
func supervise(ctx context.Context) error {
	logs, err := newLogging(os.Stderr, "info", "text")
	if err != nil {
		return err
	}
	init, err := pid1.Connect()
	if err != nil {
		return err
	}
	s := supervisor.New(supervisor.Options{Log: logs.log})
	network := netcfg.NewService(netcfg.Options{Log: logs.log})
	wall := clock.NewService(clock.Options{Log: logs.log, BuildTime: imageBuildTime(), DHCPServers: network.NTPServers})
	world := ramdiskWorld{
		restart: func(_ context.Context, reason string) error { return init.Reboot(reason) },
		serverTime: func(t time.Time) {
			if err := wall.ServerTime(t); err != nil {
				logs.log.Warn("the gateway's time was not taken", "error", err)
			}
		},
		extra: func() map[string]any {
			return map[string]any{"services": s.Snapshot(), "network": network.Status(), "clock": wall.Status()}
		},
	}
	agent := supervisor.Func("bcd", func(ctx context.Context) error { return ramdiskAgent(ctx, logs, world) })
	if err := errors.Join(
		s.Add(init.Service(s.Healthy)),
		s.Add(modules.NewService(modules.Options{Log: logs.log, AfterColdplug: pid1.MountLate})),
		s.Add(wall),
		s.Add(network, supervisor.Needs("modules")),
		s.Add(agent, supervisor.Needs("network", "clock"), supervisor.StopWithin(20*time.Second),
			supervisor.WithBackoff(supervisor.Backoff{Initial: time.Second, Max: 30 * time.Second})),
	); err != nil {
		return err
	}
	return s.Run(ctx)
}

// imageBuildTime is when this image was made, zero when it does not say.
func imageBuildTime() time.Time {
	told, err := boot.ReadConfig(os.DirFS("/"))
	if err != nil {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339, told.Image.BuildTime)
	if err != nil {
		return time.Time{}
	}
	return t
}

// ramdiskWorld is what the init gives to the agent.
type ramdiskWorld struct {
	restart    func(ctx context.Context, reason string) error
	serverTime func(time.Time)
	extra      func() map[string]any
}

// ramdiskAgent reads what this machine was told and runs the agent for it.
// Mistakes in what it was told are errors, tried again with a back-off: the
// sentence is on the console, where a person can mend its cause.
func ramdiskAgent(ctx context.Context, logs *logging, world ramdiskWorld) error {
	p, told, err := ramdiskPlace("/")
	if err != nil {
		return err
	}
	for _, key := range told.Unknown {
		logs.log.Warn("nobody knows this boot setting; is it misspelt?", "key", key)
	}
	d := newDaemon(p, logs)
	d.restart, d.serverTime, d.extra = world.restart, world.serverTime, world.extra
	switch p.role {
	case bcdv1.Role_ROLE_RAMDISK:
		d.executors = deployExecutors
		d.token = func() (*identity.Token, error) { return bootToken(told) }
	case bcdv1.Role_ROLE_NODE:
		if err := nodeOnOwnDisk(d); err != nil {
			return err
		}
	default:
		return fmt.Errorf("this image does not run as %s; bcd.role takes ramdisk or node", told.Role)
	}
	s := supervisor.New(supervisor.Options{Log: logs.log})
	if err := d.addTo(s); err != nil {
		return err
	}
	return s.Run(ctx)
}

// bootToken is the join token that the firmware handed over.
func bootToken(told boot.Config) (*identity.Token, error) {
	if !told.Token.Present() {
		return nil, errors.New("there is no join token: give the SMBIOS type 11 string bcd.token=bcjt_…, which bcd-gateway token create --role ramdisk makes")
	}
	return identity.ParseToken(append([]byte(nil), told.Token.Reveal()...))
}

// Where our image keeps what lasts when it runs from its own disk.
const (
	ownData = "/var/lib/bcd"
	ownESP  = "/run/esp"
)

// nodeOnOwnDisk makes d an installed node whose system is this image: the
// identity is on the data partition, the seed on the EFI system partition.
func nodeOnOwnDisk(d *daemon) error {
	if err := boot.MountOwn("/sys", "/dev", ownData, ownESP); err != nil {
		return err
	}
	configPath := filepath.Join(ownData, "config.toml")
	seed := newSeedSource(configPath, config.Default().TrustDir, ownData, []string{ownESP})
	if err := seed.install(); err != nil {
		return err
	}
	p, err := installedPlace(configPath, bcdv1.Role_ROLE_NODE)
	if err != nil {
		return err
	}
	p.floor = d.place.floor
	d.place, d.token, d.joined = p, seed.token, seed.done
	d.sections = nodeSections
	return nil
}
