package gateway

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

func goodAsk(tb testing.TB) *bcdv1.BootConfigAsk {
	tb.Helper()
	key, err := pki.NewKey()
	if err != nil {
		tb.Fatal(err)
	}
	jwk, err := pki.MarshalJWK(&key.PublicKey)
	if err != nil {
		tb.Fatal(err)
	}
	return &bcdv1.BootConfigAsk{
		Macs: []string{"52:54:00:aa:00:01", "00:00:00:00:00:00"}, SystemUuid: "11111111-2222-3333-4444-555555555501", SystemSerial: "SN",
		BootId: "0b6bbc56-11c4-4a1e-8d2d-6f4c6c8a0a01", Jwk: string(jwk), Nonce: make([]byte, askNonceBytes), Version: "1",
	}
}

// FuzzBootConfigAsk: whatever a host on a site's network sends, what is taken
// is within its bounds, and its key is one that a token can be sealed to.
func FuzzBootConfigAsk(f *testing.F) {
	good := goodAsk(f)
	for _, change := range []func(*bcdv1.BootConfigAsk){
		func(*bcdv1.BootConfigAsk) {},
		func(a *bcdv1.BootConfigAsk) { a.Jwk = `{"kty":"EC","crv":"P-256","x":"AA","y":"AA"}` },
		func(a *bcdv1.BootConfigAsk) { a.BootId = "a b" },
		func(a *bcdv1.BootConfigAsk) { a.Macs = make([]string, 65) },
		func(a *bcdv1.BootConfigAsk) { a.SystemUuid = "ffffffff-ffff-ffff-ffff-ffffffffffff" },
	} {
		ask := proto.CloneOf(good)
		change(ask)
		raw, err := proto.Marshal(ask)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Add([]byte{0xff})
	f.Add([]byte(nil))
	f.Fuzz(func(t *testing.T, raw []byte) {
		ask, key, err := parseAsk(raw)
		if err != nil {
			if ask != nil || key != nil || len(err.Error()) > 512 {
				t.Fatalf("refused, and yet %v; %d bytes of error", ask, len(err.Error()))
			}
			return
		}
		if len(raw) > maxAskBytes || len(ask.GetMacs()) > maxMACs || len(ask.GetNonce()) != askNonceBytes || len(ask.GetBootId()) > maxBootID {
			t.Fatalf("taken, and out of bounds: %v", ask)
		}
		for _, mac := range cleanMACs(ask.GetMacs()) {
			if cleanMAC(mac) != mac || len(mac) != 17 {
				t.Fatalf("MAC %q is not clean", mac)
			}
		}
		if uuid := cleanUUID(ask.GetSystemUuid()); uuid != "" && (len(uuid) != 36 || cleanUUID(uuid) != uuid) {
			t.Fatalf("UUID %q is not clean", uuid)
		}
		if _, err := pki.Seal(key, []byte("x"), ask.GetBootId()); err != nil {
			t.Fatalf("a key or boot id that nothing can be sealed to: %v", err)
		}
	})
}

func TestPlaceholders(t *testing.T) {
	for in, want := range map[string]string{
		"11111111-2222-3333-4444-55555555550A": "11111111-2222-3333-4444-55555555550a",
		"00000000-0000-0000-0000-000000000000": "", "FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF": "",
		"03000200-0400-0500-0006-000700080009": "", "Not Settable": "", "": "",
		"11111111-2222-3333-4444-55555555550g": "", "111111112222-3333-4444-555555555501-": "",
	} {
		if got := cleanUUID(in); got != want {
			t.Errorf("UUID %q is %q, want %q", in, got, want)
		}
	}
	for in, want := range map[string]string{
		"52:54:00:AA:00:01": "52:54:00:aa:00:01", "52-54-00-aa-00-01": "52:54:00:aa:00:01",
		"00:00:00:00:00:00": "", "ff:ff:ff:ff:ff:ff": "", "01:00:5e:00:00:01": "", "52:54:00:aa:00": "", "": "",
		"02:00:5e:10:00:00:00:01": "",
	} {
		if got := cleanMAC(in); got != want {
			t.Errorf("MAC %q is %q, want %q", in, got, want)
		}
	}
}
