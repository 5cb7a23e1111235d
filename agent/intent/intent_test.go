package intent

import (
	"bytes"
	"encoding/hex"
	"errors"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

var t0 = time.Date(2026, 12, 1, 8, 0, 0, 0, time.UTC)

type world struct {
	root   *pki.Authority
	roots  *pki.Roots
	signer *Signer
}

func newWorld() *world {
	root := must(pki.NewRoot("test", t0))
	key := must(pki.NewKey())
	chain := must(root.IssueCommandSigner("control", key.Public(), t0, 30*24*time.Hour))
	return &world{root: root, roots: must(pki.NewRoots(root.Certificate)), signer: &Signer{Key: key, Chain: chain}}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func TestPAE(t *testing.T) {
	// The example of DSSE's protocol.md.
	if got := string(PAE("http://example.com/HelloWorld", []byte("hello world"))); got != "DSSEv1 29 http://example.com/HelloWorld 11 hello world" {
		t.Errorf("%q", got)
	}
	if a, b := PAE("a", []byte("b c")), PAE("a b", []byte("c")); bytes.Equal(a, b) {
		t.Error("two statements with one encoding")
	}
}

func TestVerify(t *testing.T) {
	w, other := newWorld(), newWorld()
	command := &bcdv1.Command{Id: "cmd_1", NodeId: "node_1", Kind: "diag.ping"}
	signed := must(w.signer.Sign(TypeCommand, command))
	edit := func(f func(*bcdv1.Signed)) *bcdv1.Signed {
		s := proto.Clone(signed).(*bcdv1.Signed)
		f(s)
		return s
	}
	issuer := must(w.root.NewIssuer("online", t0))
	nodeKey := must(pki.NewKey())
	node := &Signer{Key: nodeKey, Chain: must(issuer.IssueNode(must(pki.NewCSR(nodeKey)), pki.NodeName{Role: bcdv1.Role_ROLE_NODE, NodeID: "node_1"}, t0, time.Hour))}
	gateway := &Signer{Key: nodeKey, Chain: must(issuer.IssueGateway("gw", nodeKey.Public(), t0, time.Hour))}
	pinned := FromRoots(w.roots)
	digest := pki.Digest(w.root.Certificate)

	for _, test := range []struct {
		name   string
		roots  *Roots
		signed *bcdv1.Signed
		now    time.Time
		want   error
	}{
		{"good", pinned, signed, t0, nil},
		{"pinned by digest, root in roots.pem", must(FromDigests([][]byte{digest[:]}, w.roots)), signed, t0, nil},
		{"pinned by digest, root in the chain", must(FromHex([]string{hex.EncodeToString(digest[:])}, nil)),
			edit(func(s *bcdv1.Signed) { s.Signatures[0].Chain = append(s.Signatures[0].Chain, w.root.Certificate.Raw) }), t0, nil},
		{"pinned by digest, root nowhere", must(FromDigests([][]byte{digest[:]}, nil)), signed, t0, pki.ErrUntrusted},
		{"root in roots.pem but not pinned", must(FromDigests([][]byte{make([]byte, 32)}, w.roots)), signed, t0, pki.ErrUntrusted},
		{"two roots while they rotate", FromRoots(must(pki.NewRoots(other.root.Certificate, w.root.Certificate))), signed, t0, nil},
		{"second signature counts", pinned, edit(func(s *bcdv1.Signed) {
			foreign := must(other.signer.SignBytes(TypeCommand, s.Payload))
			s.Signatures = append(foreign.Signatures, s.Signatures...)
		}), t0, nil},
		{"nothing", pinned, nil, t0, ErrMalformed},
		{"unsigned", pinned, edit(func(s *bcdv1.Signed) { s.Signatures = nil }), t0, ErrUnsigned},
		{"another type", pinned, must(w.signer.Sign(TypeNodeSpec, command)), t0, ErrWrongType},
		{"type changed after signing", pinned, func() *bcdv1.Signed {
			s := must(w.signer.Sign(TypeNodeSpec, command))
			s.PayloadType = TypeCommand
			return s
		}(), t0, ErrBadSignature},
		{"payload changed", pinned, edit(func(s *bcdv1.Signed) { s.Payload[0] ^= 1 }), t0, ErrBadSignature},
		{"foreign root", FromRoots(other.roots), signed, t0, pki.ErrUntrusted},
		{"no roots", &Roots{}, signed, t0, ErrNoRoots},
		{"nil roots", nil, signed, t0, ErrNoRoots},
		{"signed by a node", pinned, must(node.Sign(TypeCommand, command)), t0, pki.ErrWrongPurpose},
		{"signed by a gateway", pinned, must(gateway.Sign(TypeCommand, command)), t0, pki.ErrWrongPurpose},
		{"signer expired", pinned, signed, t0.Add(31 * 24 * time.Hour), pki.ErrExpired},
		{"signer not yet valid", pinned, signed, t0.Add(-time.Hour), pki.ErrNotYetValid},
		{"nine signatures", pinned, edit(func(s *bcdv1.Signed) {
			for len(s.Signatures) < 9 {
				s.Signatures = append(s.Signatures, s.Signatures[0])
			}
		}), t0, ErrMalformed},
		{"five certificates", pinned, edit(func(s *bcdv1.Signed) {
			for len(s.Signatures[0].Chain) < 5 {
				s.Signatures[0].Chain = append(s.Signatures[0].Chain, w.root.Certificate.Raw)
			}
		}), t0, ErrMalformed},
		{"no certificate", pinned, edit(func(s *bcdv1.Signed) { s.Signatures[0].Chain = nil }), t0, ErrMalformed},
		{"garbage certificate", pinned, edit(func(s *bcdv1.Signed) { s.Signatures[0].Chain = [][]byte{[]byte("x")} }), t0, ErrMalformed},
		{"empty signature", pinned, edit(func(s *bcdv1.Signed) { s.Signatures[0].Signature = nil }), t0, ErrMalformed},
		{"nil signature", pinned, &bcdv1.Signed{PayloadType: TypeCommand, Payload: signed.Payload, Signatures: []*bcdv1.Signature{nil}}, t0, ErrMalformed},
		{"too large", pinned, edit(func(s *bcdv1.Signed) { s.Payload = make([]byte, MaxPayload+1) }), t0, ErrTooLarge},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := test.roots.Command(test.signed, test.now)
			if !errors.Is(err, test.want) {
				t.Fatalf("error %v, want %v", err, test.want)
			}
			if test.want != nil && got != nil || test.want == nil && !proto.Equal(got, command) {
				t.Errorf("got %v", got)
			}
		})
	}
}

func TestOtherPayloads(t *testing.T) {
	w := newWorld()
	roots := FromRoots(w.roots)
	spec := &bcdv1.NodeSpec{NodeId: "node_1", Generation: 7}
	if got, err := roots.NodeSpec(must(w.signer.Sign(TypeNodeSpec, spec)), t0); err != nil || !proto.Equal(got, spec) {
		t.Errorf("%v, %v", got, err)
	}
	record := &bcdv1.JoinRecord{NodeId: "node_1"}
	if got, err := roots.JoinRecord(must(w.signer.Sign(TypeJoinRecord, record)), t0); err != nil || !proto.Equal(got, record) {
		t.Errorf("%v, %v", got, err)
	}
	table := &bcdv1.BootTable{Site: "a", Generation: 2}
	if got, err := roots.BootTable(must(w.signer.Sign(TypeBootTable, table)), t0); err != nil || !proto.Equal(got, table) {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := roots.BootConfig(must(w.signer.Sign(TypeBootTable, table)), t0); !errors.Is(err, ErrWrongType) {
		t.Errorf("a table taken for a config: %v", err)
	}
	config := &bcdv1.BootConfig{Site: "a"}
	if got, err := roots.BootConfig(must(w.signer.Sign(TypeBootConfig, config)), t0); err != nil || !proto.Equal(got, config) {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := roots.NodeSpec(must(w.signer.SignBytes(TypeNodeSpec, []byte{0xff})), t0); !errors.Is(err, ErrMalformed) {
		t.Errorf("signed garbage: %v", err)
	}
	if _, err := w.signer.SignBytes(TypeNodeSpec, make([]byte, MaxPayload+1)); !errors.Is(err, ErrTooLarge) {
		t.Errorf("too large: %v", err)
	}
	for name, err := range map[string]error{
		"no digests":    second(FromDigests(nil, w.roots)),
		"short digest":  second(FromDigests([][]byte{{1}}, w.roots)),
		"many digests":  second(FromDigests(make([][]byte, maxDigests+1), w.roots)),
		"not hex":       second(FromHex([]string{"zz"}, w.roots)),
		"not PEM":       second(FromPEM([]byte("x"))),
		"no digest hex": second(FromHex(nil, w.roots)),
	} {
		if err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// FuzzVerify: whatever arrives, only what the signer signed gets through.
func FuzzVerify(f *testing.F) {
	w := newWorld()
	roots := FromRoots(w.roots)
	good := must(w.signer.Sign(TypeCommand, &bcdv1.Command{Id: "cmd_1"}))
	f.Add(must(proto.Marshal(good)))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		var signed bcdv1.Signed
		if proto.Unmarshal(data, &signed) != nil {
			return
		}
		if payload, err := roots.Verify(&signed, TypeCommand, t0); err == nil && !bytes.Equal(payload, good.Payload) {
			t.Errorf("a payload that nobody signed: %x", payload)
		}
	})
}
