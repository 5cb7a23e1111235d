package pki

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

var (
	t0       = time.Date(2026, 12, 1, 8, 0, 0, 0, time.UTC)
	testNode = NodeName{Role: bcdv1.Role_ROLE_NODE, Site: "fsn1", NodeID: "node_06e3a"}
)

// fleet is one of everything.
type fleet struct {
	root, issuer                    *Authority
	roots                           *Roots
	gatewayKey, nodeKey, signerKey  *ecdsa.PrivateKey
	gateway, node, signer, authored []*x509.Certificate
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	f := &fleet{gatewayKey: must(NewKey()), nodeKey: must(NewKey()), signerKey: must(NewKey())}
	f.root = must(NewRoot("test", t0))
	f.issuer = must(f.root.NewIssuer("online", t0))
	f.roots = must(NewRoots(f.root.Certificate))
	f.gateway = must(ParseChain(must(f.issuer.IssueGateway("gw-1", f.gatewayKey.Public(), t0, 30*24*time.Hour))))
	f.node = must(ParseChain(must(f.issuer.IssueNode(must(NewCSR(f.nodeKey)), testNode, t0, 24*time.Hour))))
	f.signer = must(ParseChain(must(f.root.IssueCommandSigner("control", f.signerKey.Public(), t0, 90*24*time.Hour))))
	f.authored = []*x509.Certificate{f.issuer.Certificate}
	return f
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func verifyAs(purpose string, roots *Roots, chain []*x509.Certificate, now time.Time) error {
	var err error
	switch purpose {
	case "gateway":
		_, err = VerifyGateway(roots, chain, now)
	case "node":
		_, err = VerifyNode(roots, chain, now)
	case "signer":
		_, err = VerifyCommandSigner(roots, chain, now)
	}
	return err
}

func TestPurposesAreSeparate(t *testing.T) {
	f := newFleet(t)
	for have, chain := range map[string][]*x509.Certificate{"gateway": f.gateway, "node": f.node, "signer": f.signer, "issuer": f.authored} {
		for _, want := range []string{"gateway", "node", "signer"} {
			err := verifyAs(want, f.roots, chain, t0)
			if have == want && err != nil {
				t.Errorf("%s as itself: %v", have, err)
			}
			if have != want && !errors.Is(err, ErrWrongPurpose) {
				t.Errorf("%s as %s: error %v, want ErrWrongPurpose", have, want, err)
			}
		}
	}
	name, err := VerifyNode(f.roots, f.node, t0)
	if err != nil || name != testNode {
		t.Errorf("%+v, %v", name, err)
	}
	if name, err := VerifyGateway(f.roots, f.gateway, t0); err != nil || name != "gw-1" {
		t.Errorf("%q, %v", name, err)
	}
}

func TestVerifyTimes(t *testing.T) {
	f := newFleet(t)
	for _, test := range []struct {
		name string
		at   time.Time
		want error
	}{
		{"nine minutes early: backdated for slow clocks", t0.Add(-9 * time.Minute), nil},
		{"eleven minutes early", t0.Add(-11 * time.Minute), ErrNotYetValid},
		{"last moment", t0.Add(24 * time.Hour), nil},
		{"after", t0.Add(24*time.Hour + time.Second), ErrExpired},
		{"1970", time.Unix(0, 0), ErrNotYetValid},
		{"after the root too", t0.Add(50 * 365 * 24 * time.Hour), ErrExpired},
	} {
		name, err := VerifyNode(f.roots, f.node, test.at)
		if !errors.Is(err, test.want) {
			t.Errorf("%s: error %v, want %v", test.name, err, test.want)
		}
		if errors.Is(err, ErrExpired) && name != testNode {
			t.Errorf("%s: an expired chain that is sound must still name its node, got %+v", test.name, name)
		}
	}
	other := newFleet(t)
	if name, err := VerifyNode(other.roots, f.node, t0.Add(48*time.Hour)); !errors.Is(err, ErrUntrusted) || name != (NodeName{}) {
		t.Errorf("expired and foreign: %+v, %v; want ErrUntrusted and no name", name, err)
	}
}

func TestForeignRoot(t *testing.T) {
	f, other := newFleet(t), newFleet(t)
	for purpose, chain := range map[string][]*x509.Certificate{"gateway": other.gateway, "node": other.node, "signer": other.signer} {
		if err := verifyAs(purpose, f.roots, chain, t0); !errors.Is(err, ErrUntrusted) {
			t.Errorf("%s: error %v, want ErrUntrusted", purpose, err)
		}
		if err := verifyAs(purpose, &Roots{}, chain, t0); !errors.Is(err, ErrUntrusted) {
			t.Errorf("%s without roots: error %v", purpose, err)
		}
		if err := verifyAs(purpose, nil, chain, t0); !errors.Is(err, ErrUntrusted) {
			t.Errorf("%s with nil roots: error %v", purpose, err)
		}
		if err := verifyAs(purpose, f.roots, nil, t0); err == nil {
			t.Errorf("%s: an empty chain passes", purpose)
		}
	}
	if err := verifyAs("gateway", f.roots, append(f.gateway, f.root.Certificate), t0); err != nil {
		t.Errorf("root last in the chain: %v", err)
	}
}

// TestStolenIssuer: whoever holds the online issuing key can make nodes and
// gateways, but no command signer and no further authority.
func TestStolenIssuer(t *testing.T) {
	f := newFleet(t)
	if _, err := f.issuer.IssueCommandSigner("x", f.signerKey.Public(), t0, time.Hour); err == nil {
		t.Error("an issuer made a command signer")
	}
	if _, err := f.issuer.NewIssuer("x", t0); err == nil {
		t.Error("an issuer made an issuer")
	}
	// The thief does not use our functions.
	forged := must(f.issuer.issue("x", &url.URL{Scheme: "bcd", Host: hostSigner, Path: "/control"}, f.signerKey.Public(), t0, time.Hour))
	if _, err := VerifyCommandSigner(f.roots, must(ParseChain(forged)), t0); err == nil {
		t.Error("a command signer made by the issuing key passes")
	}
	sub := must(template("sub", t0, time.Hour))
	sub.IsCA, sub.KeyUsage = true, x509.KeyUsageCertSign
	subKey := must(NewKey())
	subCert := must(sign(sub, f.issuer.Certificate, subKey.Public(), f.issuer.Key))
	rogue := &Authority{Certificate: subCert, Key: subKey, Parents: f.issuer.chain()}
	chain := must(rogue.IssueGateway("gw-2", f.gatewayKey.Public(), t0, time.Minute))
	if _, err := VerifyGateway(f.roots, must(ParseChain(chain)), t0); err == nil {
		t.Error("an authority below the issuer passes; its path length must be 0")
	}
}

func TestURIs(t *testing.T) {
	for _, raw := range []string{
		"bcd://node/node/fsn1/node_1?x", "bcd://node/node/fsn1/node_1#f", "bcd://u@node/node/fsn1/node_1",
		"bcd://node/node/fsn1", "bcd://node/node/fsn1/node_1/more", "bcd://node/root/fsn1/node_1", "bcd://node//fsn1/node_1",
		"bcd://node/node//node_1", "bcd://node/node/FSN/node_1", "bcd://node/node/fsn1/../x", "bcd://node:1/node/fsn1/node_1",
		"https://node/node/fsn1/node_1", "bcd://gateway/gw-1", "bcd:node/node/fsn1/node_1", "bcd://node/node/fsn1/n%2fx",
		"bcd://node/node/fsn1/" + strings.Repeat("n", 65),
	} {
		u, err := url.Parse(raw)
		if err != nil {
			t.Fatal(err)
		}
		if n, err := ParseNodeURI(&x509.Certificate{URIs: []*url.URL{u}}); err == nil {
			t.Errorf("%s is read as %+v", raw, n)
		}
	}
	good := NodeURI(testNode)
	if _, err := ParseNodeURI(&x509.Certificate{URIs: []*url.URL{good, good}}); !errors.Is(err, ErrWrongPurpose) {
		t.Errorf("two URIs: %v", err)
	}
	for _, n := range []NodeName{testNode, {Role: bcdv1.Role_ROLE_RAMDISK, NodeID: "n"}, {Role: bcdv1.Role_ROLE_SITE, Site: "a-1", NodeID: "n"}} {
		got, err := ParseNodeURI(&x509.Certificate{URIs: []*url.URL{must(url.Parse(NodeURI(n).String()))}})
		if err != nil || got != n {
			t.Errorf("%+v became %+v, %v", n, got, err)
		}
	}
}

func TestIssueRefuses(t *testing.T) {
	f := newFleet(t)
	csr := must(NewCSR(f.nodeKey))
	broken := bytes.Clone(csr)
	broken[len(broken)-1] ^= 1
	p384 := must(ecdsa.GenerateKey(elliptic.P384(), rand.Reader))
	for name, err := range map[string]error{
		"broken CSR":     second(f.issuer.IssueNode(broken, testNode, t0, time.Hour)),
		"other curve":    second(f.issuer.IssueNode(must(NewCSR(p384)), testNode, t0, time.Hour)),
		"huge CSR":       second(f.issuer.IssueNode(make([]byte, maxCSRBytes+1), testNode, t0, time.Hour)),
		"no role":        second(f.issuer.IssueNode(csr, NodeName{NodeID: "n"}, t0, time.Hour)),
		"site with dots": second(f.issuer.IssueNode(csr, NodeName{Role: bcdv1.Role_ROLE_NODE, Site: "..", NodeID: "n"}, t0, time.Hour)),
		"no lifetime":    second(f.issuer.IssueNode(csr, testNode, t0, 0)),
		"too long":       second(f.issuer.IssueNode(csr, testNode, t0, MaxLeafLifetime+1)),
		"issuer expired": second(f.issuer.IssueNode(csr, testNode, t0.Add(issuerLifetime), time.Hour)),
		"gateway name":   second(f.issuer.IssueGateway("a/b", f.gatewayKey.Public(), t0, time.Hour)),
	} {
		if err == nil {
			t.Errorf("%s is issued", name)
		}
	}
	chain := must(ParseChain(must(f.issuer.IssueNode(csr, testNode, f.issuer.Certificate.NotAfter.Add(-time.Hour), 24*time.Hour))))
	if !chain[0].NotAfter.Equal(f.issuer.Certificate.NotAfter) {
		t.Errorf("a leaf ends at %v, after its issuer at %v", chain[0].NotAfter, f.issuer.Certificate.NotAfter)
	}
}

func second[T any](_ T, err error) error { return err }

func TestFiles(t *testing.T) {
	f, dir := newFleet(t), t.TempDir()
	cert, key := filepath.Join(dir, "issuer.crt"), filepath.Join(dir, "issuer.key")
	if err := f.issuer.Save(cert, key); err != nil {
		t.Fatal(err)
	}
	if info := must(os.Stat(key)); info.Mode() != 0o600 {
		t.Errorf("key has mode %v", info.Mode())
	}
	loaded := must(LoadAuthority(cert, key))
	chain := must(ParseChain(must(loaded.IssueGateway("gw", f.gatewayKey.Public(), t0, time.Hour))))
	if _, err := VerifyGateway(f.roots, chain, t0); err != nil {
		t.Errorf("issued after a reload: %v", err)
	}
	if err := SaveKey(key, f.nodeKey); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadAuthority(cert, key); err == nil || !strings.Contains(err.Error(), "is not the key of") {
		t.Errorf("another key: %v", err)
	}
	path := filepath.Join(dir, "roots.pem")
	if err := os.WriteFile(path, append([]byte("our roots\n"), f.roots.PEM()...), 0o644); err != nil {
		t.Fatal(err)
	}
	if roots := must(LoadRoots(path)); !roots.Contains(f.root.Certificate) {
		t.Error("roots lost a root")
	}
	if _, err := NewRoots(f.node[0]); err == nil {
		t.Error("a node passes as a root")
	}
	if _, err := ParseRoots([]byte("hello")); err == nil {
		t.Error("no PEM passes as roots")
	}
	secret := must(EncodeKey(f.nodeKey))
	if _, err := ParseRoots(secret); err == nil || strings.Contains(err.Error(), string(secret[40:80])) {
		t.Errorf("a key as roots: %v", err)
	}
}

// handshake runs TLS over a pipe and gives the client's error.
func handshake(client, server *tls.Config) (tls.ConnectionState, error) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	served := make(chan tls.ConnectionState, 1)
	go func() {
		conn := tls.Server(b, server)
		// The client's error is the one that counts.
		_ = conn.Handshake()
		served <- conn.ConnectionState()
		_ = b.Close()
	}()
	err := tls.Client(a, client).Handshake()
	_ = a.Close()
	return <-served, err
}

func TestClientTLS(t *testing.T) {
	f, other := newFleet(t), newFleet(t)
	gateway := must(tlsCertificate(f.gateway, f.gatewayKey))
	node := must(tlsCertificate(f.node, f.nodeKey))
	server := ServerTLS(func() (*tls.Certificate, error) { return gateway, nil })
	at := func(when time.Time) func() time.Time { return func() time.Time { return when } }
	own := func() (*tls.Certificate, error) { return node, nil }

	state, err := handshake(ClientTLS(f.roots, own, at(t0)), server)
	if err != nil || len(state.PeerCertificates) == 0 || state.Version != tls.VersionTLS13 {
		t.Fatalf("%v, version %x, %d certificates", err, state.Version, len(state.PeerCertificates))
	}
	if name, err := VerifyNode(f.roots, state.PeerCertificates, t0); err != nil || name != testNode {
		t.Errorf("the gateway sees %+v, %v", name, err)
	}
	if _, err := handshake(ClientTLS(f.roots, own, at(time.Unix(0, 0))), server); err != nil {
		t.Errorf("a floor of 1970: %v", err)
	}
	if _, err := handshake(ClientTLS(f.roots, nil, at(t0)), server); err != nil {
		t.Errorf("no client certificate: %v", err)
	}
	if _, err := handshake(ClientTLS(f.roots, nil, at(t0.Add(365*24*time.Hour))), server); !errors.Is(err, ErrExpired) {
		t.Errorf("a floor after the end: %v", err)
	}
	if _, err := handshake(ClientTLS(other.roots, nil, at(t0)), server); !errors.Is(err, ErrUntrusted) {
		t.Errorf("a gateway of another fleet: %v", err)
	}
	if _, err := handshake(ClientTLS(f.roots, nil, at(t0)), ServerTLS(own)); !errors.Is(err, ErrWrongPurpose) {
		t.Errorf("a node that plays gateway: %v", err)
	}
	old := server.Clone()
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	if _, err := handshake(ClientTLS(f.roots, nil, at(t0)), old); err == nil {
		t.Error("TLS 1.2 is spoken")
	}
	if _, err := tlsCertificate(f.node, f.gatewayKey); err == nil {
		t.Error("a certificate with another's key")
	}
}

func TestJWE(t *testing.T) {
	key, other := must(GenerateJoinKey()), must(GenerateJoinKey())
	sealed := must(Seal(&key.PublicKey, []byte("canary"), "req-1"))
	if strings.Contains(sealed, "canary") {
		t.Fatal("not sealed")
	}
	if got, err := Open(key, sealed, "req-1"); err != nil || string(got) != "canary" {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := Open(key, sealed, "req-2"); !errors.Is(err, ErrWrongRequest) {
		t.Errorf("another request: %v", err)
	}
	if _, err := Open(key, sealed, ""); !errors.Is(err, ErrWrongRequest) {
		t.Errorf("no request: %v", err)
	}
	if _, err := Open(other, sealed, "req-1"); err == nil {
		t.Error("another key opens it")
	}
	parts := strings.Split(sealed, ".")
	for i := range parts {
		bent := append([]string(nil), parts...)
		b := []byte(bent[i])
		b[len(b)/2] ^= 1
		bent[i] = string(b)
		if _, err := Open(key, strings.Join(bent, "."), "req-1"); err == nil {
			t.Errorf("part %d can be bent", i)
		}
	}
	if got, err := Open(key, must(Seal(&key.PublicKey, nil, "")), ""); err != nil || len(got) != 0 {
		t.Errorf("empty: %q, %v", got, err)
	}
	if _, err := Seal(&key.PublicKey, make([]byte, MaxSealed), ""); err == nil {
		t.Error("no bound on what is sealed")
	}
}

func TestJWK(t *testing.T) {
	key := must(GenerateJoinKey())
	data := must(MarshalJWK(&key.PublicKey))
	if pub, err := ParseJWK(data); err != nil || !pub.Equal(key.Public()) {
		t.Errorf("%v", err)
	}
	for _, bad := range []string{
		"", "{}", `{"kty":"oct","k":"AAAA"}`, `{"kty":"EC","crv":"P-256","x":"AA","y":"AA"}`,
		strings.Replace(string(data), "}", `,"d":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"}`, 1),
		strings.Replace(string(data), "ECDH-ES+A256KW", "RSA1_5", 1),
	} {
		if _, err := ParseJWK([]byte(bad)); err == nil {
			t.Errorf("%s is read", bad)
		}
	}
	// RFC 7638 does not give an elliptic-curve example; this is the P-256 key
	// of RFC 7517, appendix A.1, hashed by hand with openssl.
	pub := must(ParseJWK([]byte(`{"kty":"EC","crv":"P-256","x":"MKBCTNIcKUSDii11ySs3526iDZ8AiTo7Tu6KPAqv7D4","y":"4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM","use":"enc"}`)))
	if got := must(Thumbprint(pub)); got != "cn-I_WNMClehiVp51i_0VpOENW1upEerA8sEam5hn-s" {
		t.Errorf("thumbprint %s", got)
	}
}

func FuzzOpen(f *testing.F) {
	key := must(GenerateJoinKey())
	f.Add(must(Seal(&key.PublicKey, []byte("x"), "r")))
	f.Add("a.b.c.d.e")
	f.Add("eyJhbGciOiJkaXIifQ....")
	f.Fuzz(func(t *testing.T, s string) { _, _ = Open(key, s, "r") })
}

func FuzzParse(f *testing.F) {
	root := must(NewRoot("fuzz", t0))
	key := must(NewKey())
	f.Add(must(MarshalJWK(&key.PublicKey)))
	f.Add(EncodeCertificates([][]byte{root.Certificate.Raw}))
	f.Add(root.Certificate.Raw)
	f.Add(must(NewCSR(key)))
	f.Add(must(EncodeKey(key)))
	f.Fuzz(func(t *testing.T, data []byte) {
		_, _ = ParseJWK(data)
		_, _ = CheckCSR(data)
		_, _ = DecodeKey(data)
		if roots, err := ParseRoots(data); err == nil {
			_, _ = VerifyNode(roots, roots.Certificates(), t0)
		}
		if chain, err := ParseChain([][]byte{data}); err == nil {
			_, _ = ParseNodeURI(chain[0])
		}
	})
}
