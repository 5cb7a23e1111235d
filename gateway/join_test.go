package gateway_test

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/bcd/agent/intent"
	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/api/bcd/v1/bcdv1connect"
)

func TestJoinGivesCertificateAndRecord(t *testing.T) {
	w := newWorld(t)
	m, err := w.tryJoin(claimsOf("rack1-u1.example.com", w.token(&bcdv1.CreateTokenRequest{Role: node, Site: "fra1"}), node))
	if err != nil {
		t.Fatal(err)
	}
	chain, err := pki.ParseChain(m.chain)
	if err != nil {
		t.Fatal(err)
	}
	name, err := pki.VerifyNode(w.keys.Roots, chain, w.now())
	if err != nil || name != (pki.NodeName{Role: node, Site: "fra1", NodeID: m.nodeID}) {
		t.Errorf("certificate for %+v, %v", name, err)
	}
	if left := chain[0].NotAfter.Sub(w.now()); left > 24*time.Hour || left < 23*time.Hour {
		t.Errorf("certificate for %v, want about a day", left)
	}
	record, err := intent.FromRoots(w.keys.Roots).JoinRecord(m.record, w.now())
	root := pki.Digest(w.keys.Roots.Certificates()[0])
	if err != nil || record.GetNodeId() != m.nodeID || record.GetMachineId() != m.machineID || !bytes.Equal(record.GetCommandRootSha256()[0], root[:]) {
		t.Errorf("join record %v, %v", record, err)
	}
	if got := w.machine(m.nodeID).GetMachine(); got.GetName() != "rack1-u1" || got.GetState() != "discovered" || got.GetSite() != "fra1" {
		t.Errorf("machine %v", got)
	}
}

func TestJoinRefusals(t *testing.T) {
	w := newWorld(t)
	known := w.join("known", ramdisk)
	token := func(change func(*bcdv1.CreateTokenRequest)) string {
		r := &bcdv1.CreateTokenRequest{Role: node}
		if change != nil {
			change(r)
		}
		return w.token(r)
	}
	used := token(nil)
	if _, err := w.tryJoin(claimsOf("first", used, node)); err != nil {
		t.Fatal(err)
	}
	revoked := token(nil)
	id, _, _ := pki.SplitToken(revoked)
	if _, err := w.op.RevokeToken(t.Context(), connect.NewRequest(&bcdv1.RevokeTokenRequest{Id: id})); err != nil {
		t.Fatal(err)
	}
	good := token(nil)
	old := token(func(r *bcdv1.CreateTokenRequest) { r.TtlSeconds = 60 })
	for _, test := range []struct {
		name   string
		code   bcdv1.JoinErrorCode
		claims func() *bcdv1.JoinClaims
		say    string
	}{
		{"no token", bcdv1.JoinErrorCode_JOIN_ERROR_CODE_UNKNOWN_TOKEN, func() *bcdv1.JoinClaims { return claimsOf("known", "", node) }, "token create"},
		{"unknown token", bcdv1.JoinErrorCode_JOIN_ERROR_CODE_UNKNOWN_TOKEN, func() *bcdv1.JoinClaims { return claimsOf("known", "bcjt_none_"+strings.Repeat("a", 40), node) }, "token create"},
		{"wrong secret", bcdv1.JoinErrorCode_JOIN_ERROR_CODE_UNKNOWN_TOKEN, func() *bcdv1.JoinClaims { return claimsOf("known", good[:len(good)-4]+"xxxx", node) }, "token create"},
		{"used up", bcdv1.JoinErrorCode_JOIN_ERROR_CODE_TOKEN_USED_UP, func() *bcdv1.JoinClaims { return claimsOf("known", used, node) }, "has been used"},
		{"revoked", bcdv1.JoinErrorCode_JOIN_ERROR_CODE_TOKEN_REVOKED, func() *bcdv1.JoinClaims { return claimsOf("known", revoked, node) }, "revoked"},
		{"wrong role", bcdv1.JoinErrorCode_JOIN_ERROR_CODE_WRONG_ROLE, func() *bcdv1.JoinClaims { return claimsOf("known", good, ramdisk) }, "--role ramdisk"},
		{"wrong machine", bcdv1.JoinErrorCode_JOIN_ERROR_CODE_WRONG_MACHINE, func() *bcdv1.JoinClaims {
			return claimsOf("first", token(func(r *bcdv1.CreateTokenRequest) { r.MachineId = known.machineID }), node)
		}, known.machineID},
		{"bound, and not known", bcdv1.JoinErrorCode_JOIN_ERROR_CODE_WRONG_MACHINE, func() *bcdv1.JoinClaims {
			c := claimsOf("stranger", token(func(r *bcdv1.CreateTokenRequest) { r.MachineId = known.machineID }), node)
			c.SystemSerial = ""
			return c
		}, "not known"},
		{"no hardware key", bcdv1.JoinErrorCode_JOIN_ERROR_CODE_MALFORMED, func() *bcdv1.JoinClaims {
			c := claimsOf("known", good, node)
			c.HardwareKeyHash = nil
			return c
		}, "hardware key"},
		{"no csr", bcdv1.JoinErrorCode_JOIN_ERROR_CODE_MALFORMED, func() *bcdv1.JoinClaims {
			c := claimsOf("known", good, node)
			c.Csr = []byte("x")
			return c
		}, "certificate request"},
		{"clock off by years", bcdv1.JoinErrorCode_JOIN_ERROR_CODE_TOKEN_USED_UP, func() *bcdv1.JoinClaims {
			c := claimsOf("known", used, node)
			c.WallClockMs = 0x1000
			return c
		}, "behind"},
	} {
		t.Run(test.name, func(t *testing.T) {
			claims := test.claims()
			_, err := w.tryJoin(claims)
			if joinCode(err) != test.code {
				t.Fatalf("refused with %v: %v; want %v", joinCode(err), err, test.code)
			}
			list := w.machine("known").GetTimeline()
			if claims.GetHostname() != "known" {
				list = list[:0]
				e := w.waitFor("the refusal", func(e *bcdv1.TimelineEntry) bool {
					return e.GetType() == "join.refused" && strings.Contains(e.GetMessage(), test.say)
				})
				list = append(list, e)
			}
			if !hasEntry(list, "join.refused", test.say) {
				t.Errorf("no entry with %q:%s", test.say, dump(list))
			}
		})
	}
	t.Run("expired", func(t *testing.T) {
		w.advance(2 * time.Minute)
		defer w.advance(-2 * time.Minute)
		if _, err := w.tryJoin(claimsOf("known", old, node)); joinCode(err) != bcdv1.JoinErrorCode_JOIN_ERROR_CODE_TOKEN_EXPIRED {
			t.Errorf("an old token: %v", err)
		}
	})
	t.Run("sealed to another key", func(t *testing.T) {
		client := bcdv1connect.NewJoinServiceClient(w.client(nil), w.url)
		for _, r := range []*bcdv1.JoinRequest{{Sealed: "a.b.c.d.e"}, {Sealed: "x", KeyThumbprint: "other"}} {
			if _, err := client.Join(t.Context(), connect.NewRequest(r)); joinCode(err) != bcdv1.JoinErrorCode_JOIN_ERROR_CODE_WRONG_JOIN_KEY {
				t.Errorf("%v: %v", r, err)
			}
		}
	})
	if strings.Contains(w.logs.String(), good) || strings.Contains(w.logs.String(), used) {
		t.Error("the log holds a join token")
	}
}

func TestOneMachineManyNodes(t *testing.T) {
	w := newWorld(t)
	first := w.join("m", ramdisk)
	again := w.join("m", ramdisk)
	if again.nodeID != first.nodeID || again.machineID != first.machineID {
		t.Errorf("the next boot of the same ramdisk is %s on %s, was %s on %s", again.nodeID, again.machineID, first.nodeID, first.machineID)
	}
	installed := w.join("m", node)
	if installed.nodeID == first.nodeID || installed.machineID != first.machineID {
		t.Errorf("the installed node is %s on %s", installed.nodeID, installed.machineID)
	}
	// The same token again, by the same hardware: an answer was lost. By
	// another: used up.
	token := w.token(&bcdv1.CreateTokenRequest{Role: node})
	for range 3 {
		m, err := w.tryJoin(claimsOf("m", token, node))
		if err != nil || m.nodeID != installed.nodeID {
			t.Fatalf("repeated join: %v, %v", m, err)
		}
	}
	if _, err := w.tryJoin(claimsOf("other", token, node)); joinCode(err) != bcdv1.JoinErrorCode_JOIN_ERROR_CODE_TOKEN_USED_UP {
		t.Errorf("the token's second machine: %v", err)
	}
	if nodes := w.machine("m").GetMachine().GetNodes(); len(nodes) != 2 {
		t.Errorf("%d nodes, want 2", len(nodes))
	}
	// Two machines with the same host name have two names.
	twin := claimsOf("m", w.token(&bcdv1.CreateTokenRequest{Role: node}), node)
	twin.HardwareKeyHash = hardware("twin")
	if _, err := w.tryJoin(twin); err != nil {
		t.Fatal(err)
	}
	if got := w.machine("m-2").GetMachine(); got.GetName() != "m-2" {
		t.Errorf("the twin is %v", got)
	}
}

func TestRenew(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	next, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	csr, err := pki.NewCSR(next)
	if err != nil {
		t.Fatal(err)
	}
	proved := func(at time.Time) *bcdv1.RenewRequest {
		proof, err := pki.SignStatement(m.key, pki.DomainRenew, pki.RenewMessage(csr, at))
		if err != nil {
			t.Fatal(err)
		}
		return &bcdv1.RenewRequest{Csr: csr, NodeId: m.nodeID, ExpiredCertificate: m.chain[0], Proof: proof, ProofTimeMs: at.UnixMilli()}
	}
	renew := func(as *member, r *bcdv1.RenewRequest) (*bcdv1.RenewResponse, error) {
		answer, err := bcdv1connect.NewIdentityServiceClient(w.client(as), w.url).Renew(t.Context(), connect.NewRequest(r))
		if err != nil {
			return nil, err
		}
		return answer.Msg, nil
	}
	answer, err := renew(m, &bcdv1.RenewRequest{Csr: csr, NodeId: m.nodeID})
	if err != nil {
		t.Fatal(err)
	}
	chain, err := pki.ParseChain(answer.GetCertificateChain())
	if err != nil || !next.PublicKey.Equal(chain[0].PublicKey) {
		t.Fatalf("renewed chain: %v", err)
	}
	if _, err := intent.FromRoots(w.keys.Roots).JoinRecord(answer.GetJoinRecord(), w.now()); err != nil {
		t.Error(err)
	}
	want := func(name string, code bcdv1.JoinErrorCode, as *member, r *bcdv1.RenewRequest) {
		t.Helper()
		if _, err := renew(as, r); joinCode(err) != code {
			t.Errorf("%s: %v, want %v", name, err, code)
		}
	}
	want("no certificate at all", bcdv1.JoinErrorCode_JOIN_ERROR_CODE_MALFORMED, nil, &bcdv1.RenewRequest{Csr: csr})
	want("another node's name", bcdv1.JoinErrorCode_JOIN_ERROR_CODE_MALFORMED, m, &bcdv1.RenewRequest{Csr: csr, NodeId: "node_x"})
	forged := proved(w.now())
	forged.Proof[len(forged.Proof)-1] ^= 1
	want("forged proof", bcdv1.JoinErrorCode_JOIN_ERROR_CODE_MALFORMED, nil, forged)
	want("old proof", bcdv1.JoinErrorCode_JOIN_ERROR_CODE_CLOCK_SKEW, nil, proved(w.now().Add(-time.Hour)))

	w.advance(10 * 24 * time.Hour)
	if _, err := renew(nil, proved(w.now())); err != nil {
		t.Errorf("within the grace period, with proof: %v", err)
	}
	w.advance(30 * 24 * time.Hour)
	want("past the grace period", bcdv1.JoinErrorCode_JOIN_ERROR_CODE_IDENTITY_EXPIRED, nil, proved(w.now()))
	w.advance(-30 * 24 * time.Hour)
	if _, err := w.op.RevokeNode(t.Context(), connect.NewRequest(&bcdv1.RevokeNodeRequest{NodeId: m.nodeID})); err != nil {
		t.Fatal(err)
	}
	want("revoked", bcdv1.JoinErrorCode_JOIN_ERROR_CODE_REVOKED, nil, proved(w.now()))
}

func TestOperatorsOnly(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	for name, client := range map[string]bcdv1connect.OperatorServiceClient{
		"nobody": bcdv1connect.NewOperatorServiceClient(w.client(nil), w.url),
		"a node": bcdv1connect.NewOperatorServiceClient(w.client(m), w.url),
	} {
		if _, err := client.ListMachines(t.Context(), connect.NewRequest(&bcdv1.ListMachinesRequest{})); connect.CodeOf(err) != connect.CodeUnauthenticated {
			t.Errorf("%s lists machines: %v", name, err)
		}
		stream, err := client.Watch(t.Context(), connect.NewRequest(&bcdv1.WatchRequest{NoFollow: true}))
		if err != nil {
			t.Fatal(err)
		}
		if stream.Receive() || connect.CodeOf(stream.Err()) != connect.CodeUnauthenticated {
			t.Errorf("%s watches: %v", name, stream.Err())
		}
	}
	remote := bcdv1connect.NewOperatorServiceClient(w.client(nil), w.url)
	request := connect.NewRequest(&bcdv1.ListMachinesRequest{})
	request.Header().Set("Authorization", "Bearer "+w.keys.OperatorToken)
	if answer, err := remote.ListMachines(t.Context(), request); err != nil || len(answer.Msg.GetMachines()) != 1 {
		t.Errorf("an operator by token: %v, %v", answer, err)
	}
}

func TestWatch(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	stream, err := w.op.Watch(ctx, connect.NewRequest(&bcdv1.WatchRequest{Machine: "a", AfterSequence: -1, Progress: true}))
	if err != nil {
		t.Fatal(err)
	}
	d := m.connect(nil)
	c := w.ping("a")
	d.command()
	for i := range 3 {
		d.send(&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Progress{Progress: &bcdv1.Progress{CommandId: c.GetId(), Body: fmt.Append(nil, i)}}})
	}
	// Progress of a command that is not this node's goes nowhere.
	d.send(&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Progress{Progress: &bcdv1.Progress{CommandId: "cmd_other", Body: []byte("x")}}})
	last := ""
	for last != "2" && stream.Receive() {
		if p := stream.Msg().GetProgress(); p != nil {
			if p.GetId() != c.GetId() {
				t.Errorf("progress of %s", p.GetId())
			}
			last = string(p.GetProgress().GetBody())
		}
	}
	if last != "2" {
		t.Fatalf("the last progress is %q: %v", last, stream.Err())
	}
	d.outcome(c.GetId(), succeeded, "")
	for stream.Receive() {
		if stream.Msg().GetEntry().GetType() == "command.finished" {
			return
		}
	}
	t.Fatal(stream.Err())
}
