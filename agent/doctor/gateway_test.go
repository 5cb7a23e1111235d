package doctor

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"net"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func gatewayLine(t *testing.T, in Inputs, gateway string) Line {
	t.Helper()
	in.Config = value(Config{Path: "config.toml", Gateway: gateway}, nil)
	o := in.gateway(context.Background())
	if len(o.Lines) != 1 {
		t.Fatalf("lines %+v", o.Lines)
	}
	return o.Lines[0]
}

func TestGatewayReachable(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	line := gatewayLine(t, Inputs{}, "https://"+l.Addr().String())
	if line.Status != OK || !regexp.MustCompile(`^127\.0\.0\.1:[0-9]+ reachable in [0-9]+ms$`).MatchString(line.Detail) {
		t.Errorf("%+v", line)
	}
}

func TestGatewayTexts(t *testing.T) {
	conn := func() (net.Conn, error) { a, b := net.Pipe(); b.Close(); return a, nil }
	refuse := func() (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("connect: connection refused")}
	}
	for _, test := range []struct {
		gateway string
		proxy   string
		dial    func() (net.Conn, error)
		address string
		status  Status
		detail  string
	}{
		{"https://gw.eu-1.example.com", "", conn, "gw.eu-1.example.com:443", OK, "gw.eu-1.example.com:443 reachable in 4ms"},
		{"https://gw.eu-1.example.com:8443/x", "", conn, "gw.eu-1.example.com:8443", OK, "gw.eu-1.example.com:8443 reachable in 4ms"},
		{"http://[fd00::1]", "", conn, "[fd00::1]:80", OK, "[fd00::1]:80 reachable in 4ms"},
		{"https://gw", "http://proxy:3128", conn, "gw:443", OK, "gw:443 reachable in 4ms, proxy http://proxy:3128 is set (this check does not use it)"},
		{"https://gw", "", refuse, "gw:443", Fail, "gw:443 not reachable: connect: connection refused"},
	} {
		synctest.Test(t, func(t *testing.T) {
			in := Inputs{Proxy: test.proxy, Dial: func(_ context.Context, network, address string) (net.Conn, error) {
				if address != test.address || network != "tcp" {
					t.Errorf("dialled %s %s", network, address)
				}
				<-time.After(4 * time.Millisecond)
				return test.dial()
			}}
			if line := gatewayLine(t, in, test.gateway); line.Status != test.status || line.Detail != test.detail {
				t.Errorf("%+v\nwant %s %s", line, test.status, test.detail)
			}
		})
	}
}

// A gateway that swallows packets: the line comes after five seconds.
func TestGatewaySilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		in := Inputs{Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}}
		line := gatewayLine(t, in, "https://gw")
		if line.Status != Fail || line.Detail != "gw:443 not reachable: it did not accept a TCP connection within 5s" {
			t.Errorf("%+v", line)
		}
		if took := time.Since(start); took != GatewayTimeout {
			t.Errorf("took %s", took)
		}
	})
}

func TestGatewayURLIsNotRepeated(t *testing.T) {
	for _, bad := range []string{"https://user:hunter2@gw", "://", "hunter2"} {
		line := gatewayLine(t, Inputs{}, bad)
		if line.Status != Fail || strings.Contains(line.Detail, "hunter2") {
			t.Errorf("%q: %+v", bad, line)
		}
	}
}

func TestGatewayTLS(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "bcd issuing"}, DNSNames: []string{"127.0.0.1"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(48*time.Hour + 30*time.Second), IsCA: true, BasicConstraintsValid: true,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(leaf)
	for _, test := range []struct {
		name   string
		server []string
		client *tls.Config
		status Status
		want   string
	}{
		{"h2", []string{"h2"}, &tls.Config{RootCAs: roots}, OK, `ms, TLS 1\.3, certificate by bcd issuing for 48h0m0s, h2$`},
		{"no h2", []string{"http/1.1"}, &tls.Config{RootCAs: roots}, Warn, `no HTTP/2 .* the session will use WebSocket$`},
		{"another CA", []string{"h2"}, &tls.Config{RootCAs: x509.NewCertPool()}, Fail, `ms, but TLS fails: .*unknown authority`},
	} {
		l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, NextProtos: test.server})
		if err != nil {
			t.Fatal(err)
		}
		served := make(chan struct{})
		go func() {
			defer close(served)
			if c, err := l.Accept(); err == nil {
				_ = c.(*tls.Conn).Handshake() // the client's end is what is judged
				c.Close()
			}
		}()
		line := gatewayLine(t, Inputs{TLS: test.client}, "https://"+l.Addr().String())
		if line.Status != test.status || !regexp.MustCompile(test.want).MatchString(line.Detail) {
			t.Errorf("%s: %+v", test.name, line)
		}
		<-served
		l.Close()
	}
}
