package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"

	"github.com/spf13/cobra"

	"github.com/better-compute/bcd/agent/config"
	"github.com/better-compute/bcd/agent/converge"
	"github.com/better-compute/bcd/agent/hostconf"
	"github.com/better-compute/bcd/agent/identity"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/cmd/internal/cli"
	"github.com/better-compute/bcd/supervisor"
	"github.com/better-compute/bcd/supervisor/sdnotify"
)

func nodeCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "node",
		Short: "run the agent of an installed machine",
		Long: `Runs the agent of an installed machine until SIGTERM: it holds one session to its
gateway, runs commands at most once, and converges the machine to its NodeSpec.
Under systemd it reports readiness and feeds the service watchdog. On the first
start after a deployment it takes its configuration and its single-use join token
from bcd/seed on the EFI system partition.`,
		Args: cli.NoArgs(""),
	}
	configPath := configFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return runNode(cmd.Context(), *configPath) }
	return cmd
}

// espDirs are where an installed system may have its EFI system partition.
var espDirs = []string{"/boot", "/efi", "/boot/efi"}

func runNode(ctx context.Context, configPath string) error {
	early, err := newLogging(os.Stderr, "info", "text")
	if err != nil {
		return err
	}
	seed := newSeedSource(configPath, config.Default().TrustDir, config.Default().DataDir, espDirs)
	if err := seed.install(); err != nil {
		early.log.Error("the seed that the deployment left cannot be used", "error", err)
	}
	p, err := installedPlace(configPath, bcdv1.Role_ROLE_NODE)
	if err != nil {
		return err
	}
	logs, err := newLogging(os.Stderr, p.LogLevel, p.LogFormat)
	if err != nil {
		return err
	}
	d := newDaemon(p, logs)
	d.token, d.joined = seed.token, seed.done
	d.sections = nodeSections
	d.restart = func(ctx context.Context, reason string) error {
		if out, err := exec.CommandContext(ctx, "systemctl", "reboot", "--message=bcd: "+reason).CombinedOutput(); err != nil {
			return fmt.Errorf("systemctl reboot: %w: %s", err, out)
		}
		return nil
	}

	s := supervisor.New(supervisor.Options{Log: logs.log})
	notify := supervisor.Func("sd-notify", func(ctx context.Context) error {
		if err := sdnotify.Notify(sdnotify.Ready, sdnotify.Status("bcd "+version+", gateway "+p.GatewayURL)); err != nil {
			return err
		}
		return sdnotify.Feed(ctx, s.Healthy, sdnotify.Notify)
	})
	if err := errors.Join(d.addTo(s), s.Add(notify)); err != nil {
		return err
	}
	err = s.Run(ctx)
	if stopErr := sdnotify.Notify(sdnotify.Stopping); stopErr != nil {
		logs.log.Warn("systemd was not told", "error", stopErr)
	}
	return err
}

// nodeSections are the NodeSpec sections of an installed node.
func nodeSections(d *daemon) ([]converge.Section, error) {
	root, err := os.OpenRoot("/")
	if err != nil {
		return nil, err
	}
	return []converge.Section{
		&hostconf.Host{Root: root, Effects: hostconf.System{Root: root}},
		&hostconf.Daemon{Level: d.logs.level, Base: d.logs.level.Level()},
	}, nil
}

// seedSource is where a node that has not joined gets its join token: what a
// deployment left on the EFI system partition or, failing that, the
// environment and systemd's credentials.
type seedSource struct {
	target identity.SeedTarget
	esps   []string

	mu   sync.Mutex
	kept []byte
}

func newSeedSource(configPath, trustDir, dataDir string, esps []string) *seedSource {
	return &seedSource{esps: esps, target: identity.SeedTarget{
		ConfigPath: configPath, TrustDir: trustDir, DataDir: dataDir,
		CheckConfig: func(data []byte) error {
			_, err := config.Parse("bcd/seed/config.toml", data)
			return err
		},
	}}
}

// esp is the mounted partition that holds a seed, "" for none.
func (s *seedSource) esp() string {
	for _, dir := range s.esps {
		if _, err := os.Stat(filepath.Join(dir, identity.SeedDir)); err == nil {
			return dir
		}
	}
	return ""
}

// install puts configuration and trust in place before they are read. Without
// a seed it does nothing.
func (s *seedSource) install() error {
	esp := s.esp()
	if esp == "" {
		return nil
	}
	seed, err := identity.ImportSeed(esp, s.target)
	if errors.Is(err, identity.ErrNoSeed) {
		return nil
	}
	if err == nil {
		seed.Token.Destroy()
	}
	return err
}

// token gives the join token anew for each try.
func (s *seedSource) token() (*identity.Token, error) {
	if esp := s.esp(); esp != "" {
		seed, err := identity.ImportSeed(esp, s.target)
		if err == nil {
			return seed.Token, nil
		}
		if !errors.Is(err, identity.ErrNoSeed) {
			return nil, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.kept == nil {
		token, err := identity.ReadToken(identity.SystemTokenSources(nil))
		if errors.Is(err, identity.ErrNoToken) {
			return nil, identity.ErrNotJoined
		}
		if err != nil {
			return nil, err
		}
		s.kept = append([]byte(nil), token.Reveal()...)
		token.Destroy()
	}
	return identity.ParseToken(append([]byte(nil), s.kept...))
}

// done ends the life of the token, once the identity is durable.
func (s *seedSource) done() error {
	s.mu.Lock()
	clear(s.kept)
	s.kept = nil
	s.mu.Unlock()
	if esp := s.esp(); esp != "" {
		return identity.RemoveToken(esp)
	}
	return nil
}
