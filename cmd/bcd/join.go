package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/better-compute/bcd/agent/config"
	"github.com/better-compute/bcd/agent/host"
	"github.com/better-compute/bcd/agent/identity"
	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/cmd/internal/cli"
)

const joinHint = "bcd join reads the join token from BCD_JOIN_TOKEN or stdin, never from arguments"

// joinTimeout bounds one join, the reading of the hardware included.
const joinTimeout = 2 * time.Minute

func joinCommand() *cobra.Command {
	var reset, yes bool
	var role, server, rootPin string
	cmd := &cobra.Command{
		Use:   "join",
		Short: "make this machine a node of its gateway",
		Long: `Reads a join token from the credential join-token (systemd LoadCredential=),
BCD_JOIN_TOKEN or standard input, never from an argument. Joining twice is safe:
the same machine stays the same node and gets a new certificate.

A machine without a configuration file is given one with --server and
--root-sha256, which bcd-gateway serve prints: the trust roots and the join key
are then fetched from the gateway, and count only under that digest.`,
		Args: cli.NoArgs(joinHint),
	}
	configPath := configFlag(cmd)
	f := cmd.Flags()
	f.BoolVar(&reset, "reset", false, "remove the identity that is there first (needs --yes)")
	f.BoolVar(&yes, "yes", false, "yes, remove it")
	f.StringVar(&role, "role", "node", "node or site")
	f.StringVar(&server, "server", "", "gateway URL, for a machine without a configuration file")
	f.StringVar(&rootPin, "root-sha256", "", "SHA-256 of the gateway's root certificate, with --server")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), joinTimeout)
		defer cancel()
		r, err := pki.ParseRole(role)
		if err != nil || r == bcdv1.Role_ROLE_RAMDISK {
			return cli.Usagef("--role must be node or site")
		}
		if reset && !yes {
			return cli.Usagef("--reset removes this machine's identity; add --yes if that is meant")
		}
		if reset {
			if err := resetIdentity(cmd.OutOrStdout(), *configPath); err != nil {
				return err
			}
		}
		token, err := identity.ReadToken(identity.SystemTokenSources(cmd.InOrStdin()))
		if reset && errors.Is(err, identity.ErrNoToken) {
			fmt.Fprintln(cmd.OutOrStdout(), "no join token was given; join with bcd join")
			return nil
		}
		if err != nil {
			return err
		}
		defer token.Destroy()
		if server != "" {
			if err := bootstrap(ctx, *configPath, server, rootPin); err != nil {
				return err
			}
		}
		p, err := installedPlace(*configPath, r)
		if err != nil {
			return err
		}
		id, err := joinHere(ctx, p, token)
		if err != nil {
			return err
		}
		fmt.Fprintf(cmd.OutOrStdout(), "joined as %s\nstart the agent with systemctl start bcd, or bcd node\n", id.Describe(time.Now()))
		return nil
	}
	return cmd
}

func resetIdentity(out io.Writer, configPath string) error {
	dir := config.Default().DataDir
	if c, err := config.Load(configPath); err == nil {
		dir = c.DataDir
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	removed, err := identity.Reset(dir)
	if err != nil {
		return err
	}
	for _, path := range removed {
		fmt.Fprintln(out, "removed", path)
	}
	if len(removed) == 0 {
		fmt.Fprintln(out, "there was no identity in", dir)
	}
	return nil
}

// joinHere joins this machine with token and saves its identity.
func joinHere(ctx context.Context, p *place, token *identity.Token) (*identity.Identity, error) {
	if len(p.joinKey) == 0 {
		return nil, errors.New("join-encryption.jwk is neither beside the configuration file nor in " + p.TrustDir + "; bcd-gateway keys export-trust writes it")
	}
	claims, err := claims(ctx, p.hardware())
	if err != nil {
		return nil, err
	}
	// Not the wall clock: it may be years ahead, and nothing would be valid.
	floor := func() time.Time { return p.floor }
	return identity.Join(ctx, identity.JoinOptions{
		Store:      p.store(),
		GatewayURL: p.GatewayURL,
		Roots:      p.roots,
		JoinKeyJWK: p.joinKey,
		Token:      token,
		Claims:     claims,
		Role:       p.role,
		HTTP:       identity.HTTPClient(identity.ClientOptions{Roots: p.roots, Floor: floor}),
		Wall:       time.Now,
		Floor:      floor,
	})
}

// claims is what this machine says of itself when it joins.
func claims(ctx context.Context, roots host.Roots) (*bcdv1.JoinClaims, error) {
	facts, err := host.Read(ctx, roots)
	if err != nil {
		return nil, err
	}
	c := &bcdv1.JoinClaims{
		SystemSerial:    facts.System.Serial,
		SystemUuid:      facts.System.UUID,
		Version:         version,
		InventoryHashes: map[string][]byte{},
	}
	if c.Hostname, err = os.Hostname(); err != nil {
		return nil, err
	}
	if c.BootId, err = host.BootID(roots); err != nil {
		return nil, err
	}
	if c.HardwareKeyHash, err = hex.DecodeString(facts.HardwareKey); err != nil {
		return nil, fmt.Errorf("hardware key: %w", err)
	}
	for _, nic := range facts.Net {
		c.Macs = append(c.Macs, nic.MAC)
	}
	for _, s := range facts.Sections() {
		c.InventoryHashes[s.Name] = s.SHA256[:]
	}
	return c, nil
}

// bootstrap gives a machine that has none its configuration file and trust.
// It never replaces a file that is there.
func bootstrap(ctx context.Context, configPath, server, rootPin string) error {
	if _, err := os.Stat(configPath); err == nil {
		return cli.Usagef("%s is there already; leave --server away, or remove the file first", configPath)
	}
	if err := config.CheckGatewayURL(server); err != nil {
		return cli.Usagef("--server %v", err)
	}
	pin, err := hex.DecodeString(rootPin)
	if err != nil || len(pin) != 32 {
		return cli.Usagef("--root-sha256 must be 64 hex digits; bcd-gateway serve prints them")
	}
	trust, err := identity.FetchTrust(ctx, server, [32]byte(pin))
	if err != nil {
		return err
	}
	trustDir := config.Default().TrustDir
	if dir := filepath.Dir(configPath); dir != filepath.Dir(config.DefaultPath) {
		trustDir = filepath.Join(dir, "trust")
	}
	text := fmt.Sprintf("gateway_url = %q\n", server)
	if trustDir != config.Default().TrustDir {
		text += fmt.Sprintf("trust_dir = %q\n", trustDir)
	}
	return trust.Install(configPath, trustDir, []byte(text))
}
