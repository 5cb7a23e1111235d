package identity

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/better-compute/bcd/agent/pki"
)

// requestTimeout bounds one join or renewal, so that a gateway that went
// silent does not hold up the next try.
const requestTimeout = 30 * time.Second

// ClientOptions are the seams of HTTPClient; nil ones take the system's.
type ClientOptions struct {
	Roots *pki.Roots
	// Certificate is nil for a client without one.
	Certificate func() (*tls.Certificate, error)
	Floor       func() time.Time
	Dial        func(ctx context.Context, network, address string) (net.Conn, error)
	Proxy       func(*http.Request) (*url.URL, error)
}

// HTTPClient makes a client for one-off calls to a gateway: join, renewal,
// blobs. It keeps no connection, so that every call shows the certificate of
// the day. The caller's context bounds a call; so does 30 s until the answer's
// header.
func HTTPClient(o ClientOptions) *http.Client {
	transport := &http.Transport{
		TLSClientConfig:       pki.ClientTLS(o.Roots, o.Certificate, o.Floor),
		DialContext:           o.Dial,
		Proxy:                 o.Proxy,
		ForceAttemptHTTP2:     true,
		DisableKeepAlives:     true,
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: requestTimeout,
	}
	if transport.DialContext == nil {
		transport.DialContext = (&net.Dialer{Timeout: 10 * time.Second}).DialContext
	}
	if transport.Proxy == nil {
		transport.Proxy = http.ProxyFromEnvironment
	}
	return &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error {
		// A gateway does not redirect; whoever does wants the request elsewhere.
		return http.ErrUseLastResponse
	}}
}
