package logs

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"testing"

	"github.com/better-compute/bcd/agent/pki"
	"github.com/better-compute/bcd/agent/secret"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// stream writes text in pieces of n bytes.
func stream(t testing.TB, r *Redactor, text string, n int) (string, int) {
	t.Helper()
	var out bytes.Buffer
	w := r.NewWriter(&out)
	for at := 0; at < len(text); at += n {
		if _, err := w.Write([]byte(text[at:min(at+n, len(text))])); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.String(), w.Count()
}

func newRedactor(t testing.TB, values ...string) *Redactor {
	registry := &secret.Registry{}
	for _, value := range values {
		v := must(registry.New([]byte(value)))
		t.Cleanup(v.Destroy)
	}
	return &Redactor{Registry: registry}
}

// The value is no pattern's; it is told by being alive.
const live = "Plain\"Ca nary+9/q"

func samples(t testing.TB) map[string]string {
	key := must(pki.NewKey())
	pem := string(must(pki.EncodeKey(key)))
	sealed := must(pki.Seal(&key.PublicKey, []byte("CANARY"), ""))
	return map[string]string{
		"token":         "join with bcjt_jt01_CANARYcanarycanary now",
		"cut token":     "bcjt_CANARY",
		"jwt":           "got eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJDQU5BUlkifQ.CANARY-sig ok",
		"jwe":           "sealed=" + strings.ReplaceAll(sealed, sealed[len(sealed)-6:], "CANARY") + " end",
		"pem":           "key:\n" + strings.Replace(pem, "\n", "\nCANARY", 1) + "after\n",
		"ec pem":        "-----BEGIN EC PRIVATE KEY-----\nCANARY\n-----END EC PRIVATE KEY-----",
		"cut pem":       "-----BEGIN PRIVATE KEY-----\nCANARY\n",
		"url":           "proxy http://user:CANARY@proxy.example:3128/ used",
		"authorization": "Authorization: Bearer CANARY==\nnext",
		"json header":   `{"authorization":"Bearer CANARY","x":1}`,
		"proxy header":  "Proxy-Authorization: Basic Q0FOQVJZ CANARY\r\nHost: x",
		"cookie":        "Cookie: a=CANARY; b=CANARY\n",
		"password":      "password=CANARY, user=x",
		"argument":      "process x --token=CANARY --secret=\"CANARY\" y",
		"yaml password": "passwd: 'CANARY'\n",
		"live":          "value is " + live + " CANARY"[:0] + " there",
		"live base64":   "x=" + base64.StdEncoding.EncodeToString([]byte(live)),
		"live json":     `{"v":"Plain\"Ca nary+9/q"}`,
		"live percent":  "u=" + url.QueryEscape(live) + "&x",
		"live twice":    live + live,
	}
}

var telltales = []string{"CANARY", "Plain", "UGxhaW4iQ2Eg", "MHcCAQEE"}

func TestRedact(t *testing.T) {
	r := newRedactor(t, live)
	for name, text := range samples(t) {
		got, n := r.Redact([]byte(text))
		if n == 0 || !bytes.Contains(got, []byte(Mark)) {
			t.Errorf("%s: nothing redacted: %s", name, got)
		}
		for _, telltale := range telltales {
			if bytes.Contains(got, []byte(telltale)) {
				t.Errorf("%s: %s", name, got)
			}
		}
	}
	for in, want := range map[string]string{
		"join with bcjt_jt01_CANARYcanarycanary now":                "join with [redacted] now",
		"http://user:CANARY@proxy:3128/ used":                       "http://user:[redacted]@proxy:3128/ used",
		"Authorization: Bearer CANARY\nnext":                        "Authorization: [redacted]\nnext",
		"http://host:80/a@b, 12:34:56, mail a:b@c.de":               "http://host:80/a@b, 12:34:56, mail a:b@c.de",
		"-----BEGIN CERTIFICATE-----\nabc\n":                        "-----BEGIN CERTIFICATE-----\nabc\n",
		"the password is wrong; token id jt01":                      "the password is wrong; token id jt01",
		"a -----BEGIN PRIVATE KEY-----x-----END PRIVATE KEY----- b": "a [redacted] b",
	} {
		if got, _ := r.Redact([]byte(in)); string(got) != want {
			t.Errorf("%q became %q, want %q", in, got, want)
		}
	}
}

// TestBorders puts each sample across the border of what is judged at once, at
// many offsets, written in pieces of several sizes.
func TestBorders(t *testing.T) {
	r := newRedactor(t, live)
	filler := strings.Repeat("2026-12-01 node says nothing of interest in this line.\n", 2500)
	for name, text := range samples(t) {
		whole, _ := r.Redact([]byte(text))
		for _, back := range []int{0, 1, 5, len(text) / 2, len(text) - 1, len(text)} {
			for _, size := range []int{4099, 1 << 20} {
				for _, border := range []int{chunk, chunk + hold} {
					before := filler[:max(border-back, 0)]
					after := "\n" + filler[:hold+100]
					if strings.HasPrefix(name, "cut pem") {
						continue // reaches to whatever follows, up to 64 KiB
					}
					got, _ := stream(t, r, before+text+after, size)
					if want := before + string(whole) + after; got != want {
						at := 0
						for at < min(len(got), len(want)) && got[at] == want[at] {
							at++
						}
						t.Fatalf("%s, %d before %d, pieces of %d: differs at %d: %.80q, want %.80q", name, back, border, size, at, got[at:], want[at:])
					}
				}
			}
		}
	}
}

func TestEndless(t *testing.T) {
	r := newRedactor(t)
	for name, text := range map[string]string{
		"token":  "a bcjt_" + strings.Repeat("CANARY", 600_000) + " b\n",
		"header": "a\nAuthorization: " + strings.Repeat("CANARY ", 500_000) + "\nb\n",
		"pem":    "a -----BEGIN PRIVATE KEY-----\n" + strings.Repeat("CANARY", 5_000) + "\n-----END PRIVATE KEY----- b\n",
	} {
		got, n := stream(t, r, text, 4096)
		if strings.Contains(got, "CANARY") || n == 0 || len(got) > 100 || !strings.HasPrefix(got, "a") || !strings.HasSuffix(got, "b\n") {
			t.Errorf("%s: %d bytes, %d redactions: %.100q", name, len(got), n, got)
		}
	}
}

func TestLongLiveValue(t *testing.T) {
	var b strings.Builder
	for i := range 40_000 {
		fmt.Fprintf(&b, "%x.", i*2654435761)
	}
	value := b.String()
	r := newRedactor(t, value)
	got, n := stream(t, r, "before "+value+" after", 5000)
	if n == 0 || len(got) > len(value)/50 || !strings.HasPrefix(got, "before [redacted]") || !strings.HasSuffix(got, " after") {
		t.Errorf("%d of %d bytes are left", len(got), len(value))
	}
}

func TestHandler(t *testing.T) {
	r := newRedactor(t, live)
	ring := NewRing(500)
	for _, format := range []string{"text", "json"} {
		var out bytes.Buffer
		log := slog.New(NewHandler(format, slog.LevelInfo, r, &out, failing{}, ring))
		log.Debug("not shown")
		log.With("a", "bcjt_x_CANARY").WithGroup("g").Info("proxy http://u:CANARY@h", "value", live, "error", fmt.Errorf("x: %s", "bcjt_x_CANARY"))
		for _, telltale := range telltales {
			if strings.Contains(out.String(), telltale) {
				t.Errorf("%s: %s", format, out.String())
			}
		}
		if strings.Count(out.String(), Mark) != 4 || strings.Contains(out.String(), "not shown") {
			t.Errorf("%s: %s", format, out.String())
		}
	}
	text, dropped := ring.Snapshot()
	if len(text) == 0 || len(text) > 500 || dropped != 0 {
		t.Errorf("%d bytes, %d dropped", len(text), dropped)
	}
	for i := range 100 {
		fmt.Fprintf(ring, "record %d\n", i)
	}
	if text, dropped := ring.Snapshot(); len(text) > 500 || dropped == 0 || !strings.HasSuffix(string(text), "record 99\n") || !strings.HasPrefix(string(text), "record ") {
		t.Errorf("%d bytes, %d dropped", len(text), dropped)
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, fmt.Errorf("closed") }

// FuzzRedact: in pieces or at once, no live value and no token survives, and
// what is left is what Redact leaves.
func FuzzRedact(f *testing.F) {
	for _, text := range samples(f) {
		f.Add([]byte(text), uint16(3))
	}
	f.Add([]byte("eyJ"+strings.Repeat("a", 100)), uint16(1))
	f.Fuzz(func(t *testing.T, data []byte, n uint16) {
		r := newRedactor(t, live)
		text := string(data) + "\n" + strings.Repeat("x", hold) + "\n" + string(data)
		once, _ := r.Redact([]byte(text))
		pieces, _ := stream(t, r, text, int(n)+1)
		for _, got := range []string{string(once), pieces} {
			if strings.Contains(got, live) || strings.Contains(got, "bcjt_") {
				t.Errorf("survives: %q", got)
			}
		}
		if len(text) < chunk && string(once) != pieces {
			t.Errorf("in pieces %q, at once %q", pieces, once)
		}
	})
}
