package gateway

import (
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/gateway/keys"
)

// FuzzClientFrame: whatever a node sends, the core answers within its bounds,
// and once it has ended it stays ended.
func FuzzClientFrame(f *testing.F) {
	for _, frame := range []*bcdv1.ClientFrame{
		helloFrame(),
		{Epoch: 7, Body: &bcdv1.ClientFrame_Heartbeat{Heartbeat: &bcdv1.Heartbeat{Sequence: 1}}},
		{Epoch: 7, Body: &bcdv1.ClientFrame_Outcome{Outcome: &bcdv1.Outcome{CommandId: "c", Status: didSucceed}}},
		{Epoch: 7, Body: &bcdv1.ClientFrame_Events{Events: &bcdv1.EventBatch{JournalId: "j", Events: []*bcdv1.Event{{Sequence: 1}}}}},
		{Epoch: 7, Body: &bcdv1.ClientFrame_Goodbye{Goodbye: &bcdv1.Goodbye{Reason: "x"}}},
		{Epoch: 7, Critical: true},
	} {
		data, err := proto.Marshal(frame)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, true)
		f.Add(data, false)
	}
	f.Fuzz(func(t *testing.T, data []byte, welcomed bool) {
		frame := new(bcdv1.ClientFrame)
		if proto.Unmarshal(data, frame) != nil {
			return
		}
		s := newTestCore(epochStart)
		if welcomed {
			s = liveCore(epochStart)
		}
		for _, o := range s.Step(epochStart, gotFrame{frame}) {
			if send, ok := o.(doSend); ok && proto.Size(send.frame) > maxFrameBytes {
				t.Fatalf("an answer of %d bytes", proto.Size(send.frame))
			}
			if record, ok := o.(askRecord); ok && (record.frame.GetEpoch() != 7 || frameFault(record.frame) != "") {
				t.Fatal("a frame is recorded that should not be")
			}
		}
		if s.phase == over {
			if out := s.Step(epochStart, gotFrame{frame}); len(out) != 0 {
				t.Fatalf("an ended session does %v", out)
			}
		}
	})
}

func fuzzGateway(f *testing.F) *Gateway {
	f.Helper()
	set, err := keys.Init(filepath.Join(f.TempDir(), "keys"), time.Now())
	if err != nil {
		f.Fatal(err)
	}
	return &Gateway{keys: set, now: time.Now}
}

// FuzzJoinRequest: the sealed request as it comes from the network.
func FuzzJoinRequest(f *testing.F) {
	g := fuzzGateway(f)
	sealed, err := pki.Seal(&g.keys.Join.PublicKey, []byte("x"), "")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(sealed, g.keys.JoinThumbprint)
	f.Add("a.b.c.d.e", "")
	f.Fuzz(func(t *testing.T, sealed, thumbprint string) {
		claims, err := g.openClaims(&bcdv1.JoinRequest{Sealed: sealed, KeyThumbprint: thumbprint})
		if err == nil && claimsFault(claims) != "" {
			t.Fatal("claims beyond their bounds were accepted")
		}
	})
}

// FuzzJoinClaims: the claims inside, which anyone with the public join key can
// make.
func FuzzJoinClaims(f *testing.F) {
	g := fuzzGateway(f)
	seed, err := proto.Marshal(&bcdv1.JoinClaims{Token: "bcjt_a_b", Hostname: "h", HardwareKeyHash: make([]byte, 32), Role: bcdv1.Role_ROLE_NODE})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Fuzz(func(t *testing.T, plain []byte) {
		sealed, err := pki.Seal(&g.keys.Join.PublicKey, plain, "")
		if err != nil {
			return
		}
		claims, err := g.openClaims(&bcdv1.JoinRequest{Sealed: sealed})
		if err == nil && (len(claims.GetHardwareKeyHash()) != 32 || len(claims.GetHostname()) > maxNameBytes) {
			t.Fatalf("accepted %v", claims)
		}
	})
}
