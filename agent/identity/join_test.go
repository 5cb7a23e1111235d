package identity

import (
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/bcd/agent/durable"
	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

func TestJoinOverTLS(t *testing.T) {
	g, dir := newGateway(), dataDir(t)
	url := g.serve(t)
	o := g.options(t, dir)
	o.GatewayURL = url
	o.HTTP = HTTPClient(ClientOptions{Roots: g.roots, Floor: o.Floor})
	i, err := Join(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	claims := g.claims[0]
	if claims.Token != testToken || claims.Hostname != "host-1" || claims.Role != bcdv1.Role_ROLE_NODE || claims.WallClockMs != t0.UnixMilli() {
		t.Errorf("claims %v", claims)
	}
	if o.Claims.Token != "" {
		t.Error("the caller's claims hold the token")
	}

	// The renewed certificate is used on the next dial, and a gateway that
	// sees it by mTLS renews it.
	current := NewCurrent(i)
	r := &Renewer{Store: o.Store, Current: current, GatewayURL: url, Roots: g.roots, Now: func() time.Time { return t0.Add(time.Hour) },
		HTTP: func(with bool) connect.HTTPClient {
			var certificate func() (*tls.Certificate, error)
			if with {
				certificate = current.Certificate
			}
			return HTTPClient(ClientOptions{Roots: g.roots, Certificate: certificate, Floor: o.Floor})
		}}
	g.now = func() time.Time { return t0.Add(time.Hour) }
	renewed, err := r.Renew(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if current.Get() != renewed || !renewed.NotAfter().Equal(t0.Add(25*time.Hour)) || renewed.NodeID != i.NodeID {
		t.Errorf("%+v", renewed)
	}
	if must(current.Certificate()).Leaf != renewed.Leaf() {
		t.Error("the next dial would show the old certificate")
	}
	if got := must(Load(dir)); !got.NotAfter().Equal(renewed.NotAfter()) {
		t.Error("the renewed identity is not on disk")
	}

	other := newGateway()
	o.HTTP = HTTPClient(ClientOptions{Roots: other.roots, Floor: o.Floor})
	if _, err := Join(t.Context(), o); !errors.Is(err, pki.ErrUntrusted) || !strings.Contains(err.Error(), "another root than this machine trusts") {
		t.Errorf("gateway with another CA: %v", err)
	}
	o.GatewayURL = "https://127.0.0.1:1"
	if _, err := Join(t.Context(), o); err == nil || !strings.Contains(err.Error(), "127.0.0.1:1") {
		t.Errorf("no gateway there: %v", err)
	}
}

func TestJoinTwice(t *testing.T) {
	g, dir := newGateway(), dataDir(t)
	first := newIdentity(t, g, dir)
	second := newIdentity(t, g, dir)
	if first.NodeID != second.NodeID || !first.Key.Public().(*ecdsa.PublicKey).Equal(second.Key.Public()) {
		t.Error("the same machine became another node")
	}
	if first.Leaf().Equal(second.Leaf()) {
		t.Error("no new certificate")
	}
}

// TestJoinCutOff: the gateway issued a certificate and the machine died before
// it was saved. The next join asks with the same key.
func TestJoinCutOff(t *testing.T) {
	g, dir := newGateway(), dataDir(t)
	o := g.options(t, dir)
	o.Store.Writer = durable.Writer{Before: func(step, name string) error {
		if name == nameIndex+next {
			return errors.New("power cut")
		}
		return nil
	}}
	if _, err := Join(t.Context(), o); err == nil {
		t.Fatal("not cut off")
	}
	if _, err := Load(dir); !errors.Is(err, ErrNotJoined) {
		t.Fatalf("a join that was cut off must not look like a damaged identity: %v", err)
	}
	newIdentity(t, g, dir)
	a, b := must(pki.CheckCSR(g.claims[0].Csr)), must(pki.CheckCSR(g.claims[1].Csr))
	if !a.Equal(b) {
		t.Error("the second try came with another key")
	}
}

func TestJoinRefused(t *testing.T) {
	for number, name := range bcdv1.JoinErrorCode_name {
		code := bcdv1.JoinErrorCode(number)
		t.Run(name, func(t *testing.T) {
			g, dir := newGateway(), dataDir(t)
			g.refuse = &bcdv1.JoinError{Code: code, Message: "a\x1b[31mword\n"}
			o := g.options(t, dir)
			o.Wall = func() time.Time { return time.Unix(0, 0) }
			_, err := Join(t.Context(), o)
			var refused *Refused
			if !errors.As(err, &refused) || refused.Code != code {
				t.Fatalf("%v", err)
			}
			text := err.Error()
			if strings.ContainsAny(text, "\x1b\n") || strings.Contains(text, "canary") {
				t.Errorf("%q", text)
			}
			if !strings.Contains(text, "56 years behind the gateway's") {
				t.Errorf("no word of the clock: %q", text)
			}
			if code != 0 && joinTexts[code] == "" {
				t.Error("no sentence for this code")
			}
			if _, err := Load(dir); !errors.Is(err, ErrNotJoined) {
				t.Errorf("after a refusal: %v", err)
			}
		})
	}
}

func TestJoinChecksTheAnswer(t *testing.T) {
	g, other := newGateway(), newGateway()
	foreignKey := must(pki.NewKey())
	name := pki.NodeName{Role: bcdv1.Role_ROLE_NODE, Site: "fsn1", NodeID: "node_a"}
	for what, bend := range map[string]func(*bcdv1.JoinResponse){
		"another role":           func(m *bcdv1.JoinResponse) { m.Role = bcdv1.Role_ROLE_SITE },
		"another node id":        func(m *bcdv1.JoinResponse) { m.NodeId = "node_z" },
		"another machine":        func(m *bcdv1.JoinResponse) { m.MachineId = "mach_z" },
		"no chain":               func(m *bcdv1.JoinResponse) { m.CertificateChain = nil },
		"chain cut":              func(m *bcdv1.JoinResponse) { m.CertificateChain = m.CertificateChain[:1] },
		"no record":              func(m *bcdv1.JoinResponse) { m.JoinRecord = nil },
		"unsigned record":        func(m *bcdv1.JoinResponse) { m.JoinRecord.Signatures = nil },
		"record by another root": func(m *bcdv1.JoinResponse) { m.JoinRecord = other.record(name) },
		"record of another node": func(m *bcdv1.JoinResponse) {
			m.JoinRecord = g.record(pki.NodeName{Role: name.Role, Site: "fsn1", NodeID: "node_z"})
		},
		"another key": func(m *bcdv1.JoinResponse) {
			m.CertificateChain = must(g.issuer.IssueNode(must(pki.NewCSR(foreignKey)), name, t0, time.Hour))
		},
		"another CA": func(m *bcdv1.JoinResponse) {
			m.CertificateChain = must(other.issuer.IssueNode(must(pki.NewCSR(foreignKey)), name, t0, time.Hour))
		},
		"a gateway's certificate": func(m *bcdv1.JoinResponse) {
			m.CertificateChain = must(g.issuer.IssueGateway("gw", foreignKey.Public(), t0, time.Hour))
		},
	} {
		t.Run(what, func(t *testing.T) {
			dir := dataDir(t)
			g.bend = bend
			if i, err := Join(t.Context(), g.options(t, dir)); err == nil || i != nil {
				t.Fatalf("accepted: %+v", i)
			} else if !strings.Contains(err.Error(), "not acceptable") {
				t.Errorf("%v", err)
			}
			if _, err := Load(dir); !errors.Is(err, ErrNotJoined) {
				t.Errorf("left behind: %v", err)
			}
		})
	}
}

func TestRenewExpired(t *testing.T) {
	for _, test := range []struct {
		name      string
		later     time.Duration // gateway's clock after the join
		behind    time.Duration // the node's clock behind the gateway's
		want      bcdv1.JoinErrorCode
		withProof bool
	}{
		{"in time", time.Hour, 0, 0, false},
		{"expired, within grace", 3 * 24 * time.Hour, 0, 0, true},
		{"expired, and our clock does not know", 3 * 24 * time.Hour, 3*24*time.Hour - time.Hour, 0, true},
		{"past the grace period", 9 * 24 * time.Hour, 0, bcdv1.JoinErrorCode_JOIN_ERROR_CODE_IDENTITY_EXPIRED, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			g, dir := newGateway(), dataDir(t)
			old := newIdentity(t, g, dir)
			g.now = func() time.Time { return t0.Add(test.later) }
			current := NewCurrent(old)
			r := &Renewer{Store: Store{Dir: dir}, Current: current, Roots: g.roots, GatewayURL: "https://gw.test",
				Now: func() time.Time { return g.now().Add(-test.behind) },
				HTTP: func(with bool) connect.HTTPClient {
					d := direct{g: g}
					if with {
						d.peer = func() []*x509.Certificate { return current.Get().Chain }
					}
					return d
				}}
			i, err := r.Renew(t.Context())
			if test.want != 0 {
				var refused *Refused
				if !errors.As(err, &refused) || refused.Code != test.want || !strings.Contains(err.Error(), WayBack) {
					t.Fatalf("error %v, want %v with the way back", err, test.want)
				}
				if got := must(Load(dir)); got.NodeID != old.NodeID {
					t.Error("a failed renewal harmed the identity")
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if i.NodeID != old.NodeID || !i.NotAfter().Equal(g.now().Add(24*time.Hour)) {
				t.Errorf("%s until %v", i.NodeID, i.NotAfter())
			}
		})
	}
}

func ExampleSkewNote() {
	fmt.Println(SkewNote(-26 * 8766 * time.Hour))
	fmt.Println(SkewNote(time.Minute) == "")
	// Output:
	// this machine's clock is 26 years behind the gateway's; set it (timedatectl set-ntp true, or the firmware's clock)
	// true
}
