package doctor

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"time"
)

// GatewayTimeout is how long the gateway may take to accept a connection; the
// TLS handshake has what is left of [CheckDeadline].
const GatewayTimeout = 5 * time.Second

func (in Inputs) gateway(ctx context.Context) Outcome {
	c, err := in.Config(ctx)
	if err != nil {
		return Outcome{} // the config line says it
	}
	address, name, err := gatewayAddress(c.Gateway)
	if err != nil {
		return failed(err.Error(), "")
	}
	dial := in.Dial
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}
	dialing, cancel := context.WithTimeout(ctx, GatewayTimeout)
	defer cancel()
	start := time.Now()
	conn, err := dial(dialing, "tcp", address)
	took := time.Since(start)
	if err != nil {
		reason := dialReason(err)
		if errors.Is(dialing.Err(), context.DeadlineExceeded) {
			reason = "it did not accept a TCP connection within " + GatewayTimeout.String()
		}
		return failed(fmt.Sprintf("%s not reachable: %s%s", address, reason, in.proxyNote()), "curl -v telnet://"+address)
	}
	defer conn.Close()
	detail := fmt.Sprintf("%s reachable in %s", address, milliseconds(took))
	if in.TLS == nil {
		return good(detail + in.proxyNote())
	}
	return in.handshake(ctx, conn, name, detail)
}

// handshake speaks TLS as the agent would, and says what came of it.
func (in Inputs) handshake(ctx context.Context, conn net.Conn, name, detail string) Outcome {
	config := in.TLS.Clone()
	if config.ServerName == "" {
		config.ServerName = name
	}
	if len(config.NextProtos) == 0 {
		config.NextProtos = []string{"h2", "http/1.1"}
	}
	client := tls.Client(conn, config)
	if err := client.HandshakeContext(ctx); err != nil {
		return failed(fmt.Sprintf("%s, but TLS fails: %s%s", detail, err, in.proxyNote()), "bcd status")
	}
	state := client.ConnectionState()
	detail += ", " + tls.VersionName(state.Version)
	if len(state.PeerCertificates) > 0 {
		leaf := state.PeerCertificates[0]
		issuer := leaf.Issuer.CommonName
		if issuer == "" {
			issuer = leaf.Issuer.String()
		}
		left := leaf.NotAfter.Sub(in.now())
		detail += fmt.Sprintf(", certificate by %s for %s", issuer, coarse(max(left, 0)))
	}
	if state.NegotiatedProtocol != "h2" {
		return warned(detail+": no HTTP/2 (something between terminates TLS?), the session will use WebSocket"+in.proxyNote(), "bcd status")
	}
	return good(detail + ", h2" + in.proxyNote())
}

func (in Inputs) proxyNote() string {
	if in.Proxy == "" {
		return ""
	}
	return ", proxy " + in.Proxy + " is set (this check does not use it)"
}

// gatewayAddress takes host and port from the gateway's URL; the port of
// https is the default.
func gatewayAddress(gateway string) (address, name string, err error) {
	u, err := url.Parse(gateway)
	if err != nil || u.Hostname() == "" || u.User != nil {
		// The text is not repeated: a URL with a user in it has a password.
		return "", "", errors.New("the gateway's address is not a URL such as https://gw.example.com")
	}
	port := u.Port()
	switch {
	case port != "":
	case u.Scheme == "http":
		port = "80"
	default:
		port = "443"
	}
	return net.JoinHostPort(u.Hostname(), port), u.Hostname(), nil
}

// dialReason is the cause without the address, which the line already has.
func dialReason(err error) string {
	var op *net.OpError
	if errors.As(err, &op) && op.Err != nil {
		return op.Err.Error()
	}
	return err.Error()
}

// milliseconds prints a duration in whole milliseconds, at least 1: "0ms"
// would read as not measured.
func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%dms", max(d.Round(time.Millisecond).Milliseconds(), 1))
}
