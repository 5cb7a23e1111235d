package main

import (
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/better-compute/bcd/cmd/internal/cli"
	"github.com/better-compute/bcd/gateway"
	"github.com/better-compute/bcd/gateway/boltstore"
	"github.com/better-compute/bcd/gateway/keys"
)

// serveOptions are serve's flags.
type serveOptions struct {
	listen, advertise, keys, trust, name, logLevel, logFormat string
	blobGiB                                                   int64
}

func serveCommand() *cobra.Command {
	o := &serveOptions{}
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "run the gateway",
		Long: `Runs the gateway. Without any flag it keeps its state, and the keys that it
makes the first time, in its data directory, listens on loopback, and prints the
one line that joins a first machine. SIGTERM and SIGINT ask the connected
daemons to go elsewhere, and end it within seconds.`,
		Args: cli.NoArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	f.StringVar(&o.listen, "listen", "127.0.0.1:7443", "address for daemons and remote operators")
	f.StringVar(&o.advertise, "advertise", "", "https URL under which machines reach this gateway (default: from --listen)")
	f.StringVar(&o.keys, "keys", "", "directory of the key set (default: keys in the data directory)")
	f.StringVar(&o.trust, "export-trust", "", "write roots.pem and join-encryption.jwk into this directory, for image builds")
	f.StringVar(&o.name, "name", "gateway", "name of this gateway among several")
	f.StringVar(&o.logLevel, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&o.logFormat, "log-format", "text", "text or json")
	f.Int64Var(&o.blobGiB, "blob-gib", 256, "most GiB that stored files may take")
	return cmd
}

func (o *serveOptions) run(cmd *cobra.Command) error {
	log, err := o.logger(cmd)
	if err != nil {
		return err
	}
	if o.advertise != "" {
		u, err := url.Parse(o.advertise)
		if err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil || u.Path != "" && u.Path != "/" {
			return cli.Usagef("--advertise must be an https URL with nothing after the port, for example https://10.0.2.2:7443")
		}
	}
	if o.blobGiB <= 0 {
		return cli.Usagef("--blob-gib must be at least 1")
	}
	data := dataDir(cmd)
	if err := os.MkdirAll(data, 0o700); err != nil {
		return fmt.Errorf("data directory: %w; name one that can be written with --data", err)
	}
	// The store first: its lock says that no other gateway uses the directory.
	store, err := boltstore.Open(filepath.Join(data, "state.db"))
	if err != nil {
		return err
	}
	defer store.Close()
	if o.keys == "" {
		o.keys = filepath.Join(data, "keys")
	}
	set, made, err := keys.LoadOrInit(o.keys, time.Now())
	if err != nil {
		return err
	}
	if made {
		log.Info("made a key set; move offline/root.key to where only you can reach it", "keys", o.keys)
	}
	if o.trust != "" {
		if err := set.ExportTrust(o.trust); err != nil {
			return err
		}
	}
	network, err := net.Listen("tcp", o.listen)
	if err != nil {
		return fmt.Errorf("%w; choose another address with --listen", err)
	}
	defer network.Close()
	local, err := gateway.ListenLocal(filepath.Join(data, "operator.sock"))
	if err != nil {
		return err
	}
	defer local.Close()
	if o.advertise == "" {
		o.advertise = "https://" + reachable(network.Addr().(*net.TCPAddr))
	}
	g, err := gateway.New(gateway.Config{
		Store: store, Keys: set, Name: o.name, Advertise: o.advertise,
		BlobDir: filepath.Join(data, "blobs"), BlobBytes: o.blobGiB << 30, Log: log,
	})
	if err != nil {
		return err
	}
	line, err := g.FirstJoin(cmd.Context())
	if err != nil {
		return err
	}
	log.Info("ready", "listen", network.Addr().String(), "advertise", o.advertise, "data", data, "version", version)
	if line != "" {
		fmt.Fprintln(cmd.OutOrStdout(), line)
	}
	err = g.Serve(cmd.Context(), network, local)
	log.Info("stopped")
	return err
}

func (o *serveOptions) logger(cmd *cobra.Command) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(o.logLevel)); err != nil {
		return nil, cli.Usagef("--log-level must be debug, info, warn or error")
	}
	options := &slog.HandlerOptions{Level: level}
	switch o.logFormat {
	case "text":
		return slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(cmd.ErrOrStderr(), options)), nil
	}
	return nil, cli.Usagef("--log-format must be text or json")
}

// dataDir is the flag that every verb shares.
func dataDir(cmd *cobra.Command) string {
	if dir, err := cmd.Flags().GetString("data"); err == nil && dir != "" {
		return dir
	}
	return gateway.DefaultDataDir()
}

// reachable is the address that machines are told: where we listen, or, when
// that is every address, the first of this machine's that is not loopback.
func reachable(at *net.TCPAddr) string {
	host := at.IP
	if host.IsUnspecified() {
		host = net.IPv4(127, 0, 0, 1)
		addresses, _ := net.InterfaceAddrs()
		for _, a := range addresses {
			if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() {
				host = n.IP
				break
			}
		}
	}
	return net.JoinHostPort(host.String(), fmt.Sprint(at.Port))
}
