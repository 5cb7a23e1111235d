package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/better-compute/bcd/agent/pki"
	"github.com/better-compute/bcd/api/bcd/v1/bcdv1connect"
	"github.com/better-compute/bcd/gateway"
)

// operator is a connection to a gateway's OperatorService and blob store.
type operator struct {
	bcdv1connect.OperatorServiceClient
	http *http.Client
	base string
}

// target says which gateway the verbs talk to: the one whose data directory
// is on this machine, over its unix socket, or one at a URL.
type target struct {
	data, url, trust string
}

func (t *target) flags(cmd *cobra.Command) {
	f := cmd.PersistentFlags()
	f.StringVar(&t.data, "data", gateway.DefaultDataDir(), "data directory of the gateway on this machine")
	f.StringVar(&t.url, "gateway", "", "talk to the gateway at this https URL instead, with the token in BCD_OPERATOR_TOKEN")
	f.StringVar(&t.trust, "trust", "", "roots.pem that the gateway at --gateway is checked against")
}

func (t *target) dial() (*operator, error) {
	if t.url == "" {
		socket := filepath.Join(t.data, "operator.sock")
		if _, err := os.Stat(socket); err != nil {
			return nil, fmt.Errorf("no gateway runs with the data directory %s (%w); start one with bcd-gateway serve, or name another with --data or --gateway", t.data, err)
		}
		client := &http.Client{Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				var d net.Dialer
				return d.DialContext(ctx, "unix", socket)
			},
		}}
		return newOperator(client, "http://operator"), nil
	}
	token := os.Getenv("BCD_OPERATOR_TOKEN")
	if token == "" {
		return nil, errors.New("--gateway needs the operator token in BCD_OPERATOR_TOKEN (the gateway keeps it in keys/operator.token in its data directory)")
	}
	if t.trust == "" {
		return nil, errors.New("--gateway needs --trust FILE, the roots.pem that bcd-gateway keys export-trust writes")
	}
	roots, err := pki.LoadRoots(t.trust)
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{
		ForceAttemptHTTP2: true,
		TLSClientConfig:   pki.ClientTLS(roots, nil, time.Now),
	}
	return newOperator(&http.Client{Transport: bearer{token, transport}}, strings.TrimSuffix(t.url, "/")), nil
}

func newOperator(client *http.Client, base string) *operator {
	return &operator{bcdv1connect.NewOperatorServiceClient(client, base), client, base}
}

// bearer adds the operator token to every request.
type bearer struct {
	token string
	next  http.RoundTripper
}

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+b.token)
	return b.next.RoundTrip(r)
}

// plain takes the transport's wrapping off an error that the gateway wrote for
// a person.
func plain(err error) error {
	var e *connect.Error
	if errors.As(err, &e) {
		if e.Code() == connect.CodeUnavailable {
			return fmt.Errorf("the gateway did not answer: %s; is bcd-gateway serve running?", e.Message())
		}
		return errors.New(e.Message())
	}
	return err
}
