package secret

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

var t0 = time.Date(2026, 12, 1, 8, 0, 0, 0, time.UTC)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// pair is a requester whose frames land in the test's hands.
type pair struct {
	r    *Requester
	key  *ecdsa.PrivateKey
	sent chan *bcdv1.SecretRequest
}

func newPair() *pair {
	p := &pair{key: must(pki.NewKey()), sent: make(chan *bcdv1.SecretRequest, maxPending)}
	p.r = &Requester{
		NodeID: "node_1", Key: func() crypto.Signer { return p.key }, Now: func() time.Time { return t0 }, Registry: &Registry{},
		Send: func(_ context.Context, m *bcdv1.SecretRequest) error { p.sent <- m; return nil },
	}
	return p
}

type fetched struct {
	value *Value
	err   error
}

func (p *pair) fetch(ctx context.Context) chan fetched {
	done := make(chan fetched, 1)
	go func() {
		value, err := p.r.Fetch(ctx, "join/cmd_1", "cmd_1")
		done <- fetched{value, err}
	}()
	return done
}

func TestFetch(t *testing.T) {
	p := newPair()
	done := p.fetch(t.Context())
	request := must(VerifyRequest(p.key.Public(), "node_1", <-p.sent, t0))
	if b := request.Body; b.GetReference() != "join/cmd_1" || b.GetCommandId() != "cmd_1" {
		t.Errorf("%v", b)
	}
	answer := must(request.SealAnswer([]byte("canary-value")))
	if err := p.r.Answer(answer); err != nil {
		t.Fatal(err)
	}
	got := <-done
	if got.err != nil || string(got.value.Bytes()) != "canary-value" {
		t.Fatalf("%v", got.err)
	}
	if err := p.r.Answer(answer); !errors.Is(err, ErrUnasked) {
		t.Errorf("a second answer: %v", err)
	}
	p.r.Registry.View(func(needles [][]byte) {
		if len(needles) != 1 || string(needles[0]) != "canary-value" {
			t.Errorf("live values: %q", needles)
		}
	})
	got.value.Destroy()
	got.value.Destroy()
	if got.value.Bytes() != nil {
		t.Error("alive after Destroy")
	}
	p.r.Registry.View(func(needles [][]byte) {
		if len(needles) != 0 {
			t.Error("still registered after Destroy")
		}
	})
}

func TestFetchRefusals(t *testing.T) {
	p := newPair()
	// The answer to one request never opens another, and spends it.
	a, b := p.fetch(t.Context()), p.fetch(t.Context())
	first := must(VerifyRequest(p.key.Public(), "node_1", <-p.sent, t0))
	second := must(VerifyRequest(p.key.Public(), "node_1", <-p.sent, t0))
	crossed := must(first.SealAnswer([]byte("x")))
	crossed.RequestId = second.Body.GetRequestId()
	if err := p.r.Answer(crossed); !errors.Is(err, pki.ErrWrongRequest) {
		t.Errorf("crossed: %v", err)
	}
	if err := p.r.Answer(first.RefuseAnswer("no such reference")); err != nil {
		t.Fatal(err)
	}
	texts := fmt.Sprint((<-a).err, (<-b).err)
	if !strings.Contains(texts, "no such reference") || !strings.Contains(texts, "another request") {
		t.Error(texts)
	}
	// The context's end ends the wait, and a late answer goes nowhere.
	ctx, cancel := context.WithCancel(t.Context())
	done := p.fetch(ctx)
	third := must(VerifyRequest(p.key.Public(), "node_1", <-p.sent, t0))
	cancel()
	if got := <-done; !errors.Is(got.err, context.Canceled) {
		t.Errorf("%v", got.err)
	}
	if err := p.r.Answer(must(third.SealAnswer([]byte("x")))); !errors.Is(err, ErrUnasked) {
		t.Errorf("late: %v", err)
	}
	p.r.Send = func(context.Context, *bcdv1.SecretRequest) error { return errors.New("no session") }
	if _, err := p.r.Fetch(t.Context(), "join/cmd_1", ""); err == nil || !strings.Contains(err.Error(), "no session") {
		t.Errorf("%v", err)
	}
	if _, err := p.r.Fetch(t.Context(), "../x\n", ""); err == nil {
		t.Error("a malformed reference")
	}
	if len(p.r.pending) != 0 {
		t.Errorf("%d requests leak", len(p.r.pending))
	}
}

func TestVerifyRequest(t *testing.T) {
	p := newPair()
	good := must(p.r.request("sreq_1", "join/cmd_1", "cmd_1", must(pki.NewKey())))
	other := must(pki.NewKey())
	sign := func(change func(*bcdv1.SecretRequestBody)) *bcdv1.SecretRequest {
		body := &bcdv1.SecretRequestBody{}
		must(0, proto.Unmarshal(good.Body, body))
		change(body)
		raw := must(proto.Marshal(body))
		return &bcdv1.SecretRequest{Body: raw, Signature: must(pki.SignStatement(p.key, pki.DomainSecret, bodyDigest(raw)))}
	}
	for name, m := range map[string]*bcdv1.SecretRequest{
		"nothing": nil, "empty": {}, "unsigned": {Body: good.Body},
		"other domain":   {Body: good.Body, Signature: must(pki.SignStatement(p.key, pki.DomainRenew, bodyDigest(good.Body)))},
		"other key":      {Body: good.Body, Signature: must(pki.SignStatement(other, pki.DomainSecret, bodyDigest(good.Body)))},
		"other node":     sign(func(b *bcdv1.SecretRequestBody) { b.NodeId = "node_2" }),
		"old":            sign(func(b *bcdv1.SecretRequestBody) { b.TimeMs -= requestAge.Milliseconds() + 1 }),
		"young":          sign(func(b *bcdv1.SecretRequestBody) { b.TimeMs += requestAge.Milliseconds() + 1 }),
		"no id":          sign(func(b *bcdv1.SecretRequestBody) { b.RequestId = "" }),
		"bad reference":  sign(func(b *bcdv1.SecretRequestBody) { b.Reference = "a b" }),
		"private JWK":    sign(func(b *bcdv1.SecretRequestBody) { b.Jwk = `{"kty":"oct","k":"AA"}` }),
		"garbage signed": {Body: []byte{0xff}, Signature: must(pki.SignStatement(p.key, pki.DomainSecret, bodyDigest([]byte{0xff})))},
	} {
		if _, err := VerifyRequest(p.key.Public(), "node_1", m, t0); !errors.Is(err, ErrBadRequest) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := VerifyRequest(p.key.Public(), "node_1", good, t0); err != nil {
		t.Error(err)
	}
}

func TestValueNeverPrints(t *testing.T) {
	r := &Registry{}
	raw := []byte("canary-value")
	v := must(r.New(raw))
	defer v.Destroy()
	if bytes.Contains(raw, []byte("canary")) {
		t.Error("what it was made from is not zeroed")
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, "%v %+v %#v %s %q %x %d", v, v, v, v, v, v, v)
	slog.New(slog.NewTextHandler(&out, nil)).Info("x", "v", v)
	slog.New(slog.NewJSONHandler(&out, nil)).Info("x", "v", v)
	must(0, json.NewEncoder(&out).Encode(map[string]any{"v": v}))
	if strings.Contains(out.String(), "canary") || strings.Contains(out.String(), "63616e") {
		t.Error(out.String())
	}
	if _, err := r.New(make([]byte, MaxValue+1)); err == nil {
		t.Error("no bound")
	}
}

// TestMemory looks at the kernel's flags of the value's own mapping: dd is
// MADV_DONTDUMP, lo is locked (proc_pid_smaps(5)).
func TestMemory(t *testing.T) {
	v := must((&Registry{}).New([]byte("x")))
	defer v.Destroy()
	smaps := string(must(os.ReadFile("/proc/self/smaps")))
	at := fmt.Sprintf("%x-", uintptrOf(v.mapping))
	_, rest, found := strings.Cut(smaps, at)
	if !found {
		t.Fatalf("no mapping at %s", at)
	}
	_, flags, _ := strings.Cut(rest, "VmFlags:")
	flags, _, _ = strings.Cut(flags, "\n")
	if !strings.Contains(flags, " dd") {
		t.Errorf("flags %q lack dd: it would be in a core file", flags)
	}
	if v.Locked() != strings.Contains(flags, " lo") {
		t.Errorf("locked %v, flags %q", v.Locked(), flags)
	}
}

func TestViewLines(t *testing.T) {
	r := &Registry{}
	v := must(r.New([]byte("#cloud-config\npassword: hunter2hunter2\n\nx\n")))
	defer v.Destroy()
	short := must(r.New([]byte("abc")))
	defer short.Destroy()
	r.View(func(needles [][]byte) {
		if len(needles) != 2 || string(needles[1]) != "password: hunter2hunter2" {
			t.Errorf("%q", needles)
		}
	})
}

func FuzzVerifyRequest(f *testing.F) {
	key := must(pki.NewKey())
	f.Add([]byte("x"))
	f.Fuzz(func(t *testing.T, body []byte) {
		// Signed, so that the parser behind the signature is reached.
		m := &bcdv1.SecretRequest{Body: body, Signature: must(pki.SignStatement(key, pki.DomainSecret, bodyDigest(body)))}
		_, _ = VerifyRequest(key.Public(), "node_1", m, t0)
	})
}
