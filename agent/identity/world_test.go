package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/intent"
	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/api/bcd/v1/bcdv1connect"
)

var t0 = time.Date(2026, 12, 1, 8, 0, 0, 0, time.UTC)

const testToken = "bcjt_jt01_canarycanarycanarycanary"

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// gateway is a join server with real keys and a clock of its own.
type gateway struct {
	root, issuer *pki.Authority
	roots        *pki.Roots
	signer       *intent.Signer
	joinKey      *ecdsa.PrivateKey
	cert         *tls.Certificate
	lifetime     time.Duration
	grace        time.Duration
	now          func() time.Time

	mu sync.Mutex
	// refuse, when set, answers every call.
	refuse *bcdv1.JoinError
	// bend, when set, changes a good join answer.
	bend     func(*bcdv1.JoinResponse)
	claims   []*bcdv1.JoinClaims
	renewals int
	keys     map[string]string // hardware key hash to node id
}

func newGateway() *gateway {
	g := &gateway{lifetime: 24 * time.Hour, grace: 7 * 24 * time.Hour, now: func() time.Time { return t0 }, keys: map[string]string{}}
	g.root = must(pki.NewRoot("test", t0))
	g.issuer = must(g.root.NewIssuer("online", t0))
	g.roots = must(pki.NewRoots(g.root.Certificate))
	signerKey, gatewayKey := must(pki.NewKey()), must(pki.NewKey())
	g.signer = &intent.Signer{Key: signerKey, Chain: must(g.root.IssueCommandSigner("control", signerKey.Public(), t0, 365*24*time.Hour))}
	g.cert = must(pki.TLSCertificate(must(g.issuer.IssueGateway("gw", gatewayKey.Public(), t0, 365*24*time.Hour)), gatewayKey))
	g.joinKey = must(pki.GenerateJoinKey())
	return g
}

func (g *gateway) record(name pki.NodeName) *bcdv1.Signed {
	digest := pki.Digest(g.root.Certificate)
	return must(g.signer.Sign(intent.TypeJoinRecord, &bcdv1.JoinRecord{
		NodeId: name.NodeID, MachineId: "mach_1", Role: name.Role, Site: name.Site,
		CommandRootSha256: [][]byte{digest[:]}, IssuedMs: g.now().UnixMilli(),
	}))
}

func (g *gateway) refused(code connect.Code, e *bcdv1.JoinError) error {
	err := connect.NewError(code, errors.New("refused"))
	if e.ServerTimeMs == 0 {
		e.ServerTimeMs = g.now().UnixMilli()
	}
	err.AddDetail(must(connect.NewErrorDetail(e)))
	return err
}

func (g *gateway) Join(_ context.Context, r *connect.Request[bcdv1.JoinRequest]) (*connect.Response[bcdv1.JoinResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.refuse != nil {
		return nil, g.refused(connect.CodePermissionDenied, g.refuse)
	}
	plain, err := pki.Open(g.joinKey, r.Msg.GetSealed(), "")
	if err != nil {
		return nil, g.refused(connect.CodeInvalidArgument, &bcdv1.JoinError{Code: bcdv1.JoinErrorCode_JOIN_ERROR_CODE_WRONG_JOIN_KEY})
	}
	claims := &bcdv1.JoinClaims{}
	if err := proto.Unmarshal(plain, claims); err != nil {
		return nil, err
	}
	g.claims = append(g.claims, claims)
	id, ok := g.keys[string(claims.HardwareKeyHash)]
	if !ok {
		id = "node_" + string(rune('a'+len(g.keys)))
		g.keys[string(claims.HardwareKeyHash)] = id
	}
	name := pki.NodeName{Role: claims.Role, Site: "fsn1", NodeID: id}
	chain, err := g.issuer.IssueNode(claims.Csr, name, g.now(), g.lifetime)
	if err != nil {
		return nil, err
	}
	m := &bcdv1.JoinResponse{
		NodeId: id, MachineId: "mach_1", Role: claims.Role, Site: "fsn1",
		CertificateChain: chain, JoinRecord: g.record(name), ServerTimeMs: g.now().UnixMilli(),
	}
	if g.bend != nil {
		g.bend(m)
	}
	return connect.NewResponse(m), nil
}

type peerKey struct{}

func (g *gateway) Renew(ctx context.Context, r *connect.Request[bcdv1.RenewRequest]) (*connect.Response[bcdv1.RenewResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.refuse != nil {
		return nil, g.refused(connect.CodePermissionDenied, g.refuse)
	}
	peer, _ := ctx.Value(peerKey{}).([]*x509.Certificate)
	name, err := pki.VerifyNode(g.roots, peer, g.now())
	if err != nil {
		// Without a valid certificate: by proof of its key.
		at := time.UnixMilli(r.Msg.GetProofTimeMs())
		if at.Sub(g.now()).Abs() > 5*time.Minute {
			return nil, g.refused(connect.CodeFailedPrecondition, &bcdv1.JoinError{Code: bcdv1.JoinErrorCode_JOIN_ERROR_CODE_CLOCK_SKEW})
		}
		expired := must(x509.ParseCertificate(r.Msg.GetExpiredCertificate()))
		chain := append([]*x509.Certificate{expired}, g.issuer.Certificate)
		if name, err = pki.VerifyNode(g.roots, chain, g.now()); err != nil && !errors.Is(err, pki.ErrExpired) {
			return nil, err
		}
		if g.now().Sub(expired.NotAfter) > g.grace {
			return nil, g.refused(connect.CodePermissionDenied, &bcdv1.JoinError{Code: bcdv1.JoinErrorCode_JOIN_ERROR_CODE_IDENTITY_EXPIRED})
		}
		if !pki.VerifyStatement(expired.PublicKey, pki.DomainRenew, pki.RenewMessage(r.Msg.GetCsr(), at), r.Msg.GetProof()) {
			return nil, connect.NewError(connect.CodeUnauthenticated, errors.New("no proof"))
		}
	}
	g.renewals++
	chain, err := g.issuer.IssueNode(r.Msg.GetCsr(), name, g.now(), g.lifetime)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&bcdv1.RenewResponse{CertificateChain: chain, JoinRecord: g.record(name), ServerTimeMs: g.now().UnixMilli()}), nil
}

func (g *gateway) renewed() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.renewals
}

func (g *gateway) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle(bcdv1connect.NewJoinServiceHandler(g))
	mux.Handle(bcdv1connect.NewIdentityServiceHandler(g))
	return mux
}

// serve listens on loopback with real TLS.
func (g *gateway) serve(t *testing.T) (url string) {
	t.Helper()
	handler := g.handler()
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handler.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), peerKey{}, r.TLS.PeerCertificates)))
	}))
	listener := must(net.Listen("tcp", "127.0.0.1:0"))
	server.Listener.Close()
	config := pki.ServerTLS(func() (*tls.Certificate, error) { return g.cert, nil })
	server.Listener = tls.NewListener(listener, config)
	server.Start()
	t.Cleanup(server.Close)
	return "https://" + listener.Addr().String()
}

// direct calls the handler without a network, so that synctest can hold the
// clock.
type direct struct {
	g    *gateway
	peer func() []*x509.Certificate
	fail func() error
}

func (d direct) Do(r *http.Request) (*http.Response, error) {
	if d.fail != nil {
		if err := d.fail(); err != nil {
			return nil, err
		}
	}
	if d.peer != nil {
		r = r.WithContext(context.WithValue(r.Context(), peerKey{}, d.peer()))
	}
	recorder := httptest.NewRecorder()
	d.g.handler().ServeHTTP(recorder, r)
	return recorder.Result(), nil
}

func (g *gateway) options(t *testing.T, dir string) JoinOptions {
	t.Helper()
	floor := func() time.Time { return t0 }
	return JoinOptions{
		Store: Store{Dir: dir}, GatewayURL: "https://gw.test", Roots: g.roots, JoinKeyJWK: must(pki.MarshalJWK(&g.joinKey.PublicKey)),
		Token: must(ParseToken([]byte(testToken))), Role: bcdv1.Role_ROLE_NODE,
		Claims: &bcdv1.JoinClaims{Hostname: "host-1", HardwareKeyHash: []byte("hw-1")},
		HTTP:   direct{g: g}, Wall: floor, Floor: floor,
	}
}

func newIdentity(t *testing.T, g *gateway, dir string) *Identity {
	t.Helper()
	i, err := Join(t.Context(), g.options(t, dir))
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func dataDir(t *testing.T) string { return filepath.Join(t.TempDir(), "bcd") }
