package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/better-compute/bcd/agent/pki"
)

const (
	// maxStreams bounds what one connection may ask for at once: a session,
	// an upload, a download and a renewal are four.
	maxStreams = 32
	// writeByteTimeout ends a connection on which nothing can be written.
	writeByteTimeout = 20 * time.Second
	readHeaderLimit  = 10 * time.Second
	idleLimit        = 2 * time.Minute
	// drainLimit is how long sessions have to go elsewhere when we stop.
	drainLimit = 5 * time.Second
)

// server is an http.Server with the figures of the contract. There is no read
// or write timeout: a session is one request that lasts for days.
func (g *Gateway) server(handler http.Handler) *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: readHeaderLimit,
		IdleTimeout:       idleLimit,
		MaxHeaderBytes:    64 << 10,
		Protocols:         protocols,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          maxStreams,
			SendPingTimeout:               g.pingIdle,
			PingTimeout:                   g.pingAnswer,
			WriteByteTimeout:              writeByteTimeout,
			MaxReceiveBufferPerConnection: 1 << 20,
			MaxReceiveBufferPerStream:     512 << 10,
		},
		ErrorLog: log.New(&strangers{g: g}, "", 0),
	}
}

// TLSConfig is how the gateway meets daemons and operators.
func (g *Gateway) TLSConfig() *tls.Config {
	config := pki.ServerTLS(g.tlsCertificate)
	config.NextProtos = []string{"h2", "http/1.1"}
	return config
}

// Serve answers on network (TLS is added here) and, when it is not nil, on
// local, the operators' unix socket, until ctx ends. Then it drains: sessions
// are asked to go elsewhere and have a few seconds for it.
func (g *Gateway) Serve(ctx context.Context, network, local net.Listener) error {
	daemons := g.server(g.Handler())
	daemons.TLSConfig = g.TLSConfig()
	servers := []*http.Server{daemons}
	failed := make(chan error, 2)
	go func() { failed <- daemons.ServeTLS(network, "", "") }()
	if local != nil {
		operators := g.server(g.OperatorHandler())
		servers = append(servers, operators)
		go func() { failed <- operators.Serve(local) }()
	}
	background, stopBackground := context.WithCancel(context.WithoutCancel(ctx))
	swept := make(chan struct{})
	go func() {
		defer close(swept)
		g.Run(background)
	}()

	running := len(servers)
	var err error
	select {
	case err = <-failed:
		running--
	case <-ctx.Done():
	}
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainLimit)
	defer cancel()
	g.Stop(drain, "the gateway stops")
	for _, s := range servers {
		// What is left after the drain is cut.
		if shutdownErr := s.Shutdown(drain); shutdownErr != nil {
			s.Close()
		}
	}
	for ; running > 0; running-- {
		<-failed
	}
	g.sessions.Wait()
	stopBackground()
	<-swept
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// DefaultDataDir is where a gateway keeps its state unless it is told
// otherwise: $BCD_GATEWAY_DATA, else /var/lib/bcd-gateway for root, else
// bcd-gateway in the user's data directory.
func DefaultDataDir() string {
	if dir := os.Getenv("BCD_GATEWAY_DATA"); dir != "" {
		return dir
	}
	if os.Geteuid() == 0 {
		return "/var/lib/bcd-gateway"
	}
	if dir := os.Getenv("XDG_DATA_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "bcd-gateway")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "bcd-gateway-data"
	}
	return filepath.Join(home, ".local", "share", "bcd-gateway")
}

// ListenLocal opens the operators' socket, mode 0600 from its first moment:
// it is made in a private directory and renamed into place. One that a dead
// process left is replaced; the store's lock says that it is dead.
func ListenLocal(path string) (net.Listener, error) {
	private, err := os.MkdirTemp(filepath.Dir(path), ".socket-")
	if err != nil {
		return nil, fmt.Errorf("operator socket: %w", err)
	}
	defer os.RemoveAll(private)
	temp := filepath.Join(private, "s")
	listener, err := net.Listen("unix", temp)
	if err != nil {
		return nil, fmt.Errorf("operator socket: %w", err)
	}
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := errors.Join(os.Chmod(temp, 0o600), os.Rename(temp, path)); err != nil {
		listener.Close()
		return nil, fmt.Errorf("operator socket %s: %w", path, err)
	}
	return listener, nil
}
