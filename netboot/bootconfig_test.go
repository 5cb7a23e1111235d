package netboot

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/intent"
	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const testToken = "bcjt_1_thisisthetokenthatnobodymaysee"

// answerTo is what a gateway makes of a question, with edits.
func (c *control) answerTo(ask []byte, edit func(*bcdv1.BootConfig)) *bcdv1.Signed {
	q := &bcdv1.BootConfigAsk{}
	if err := proto.Unmarshal(ask, q); err != nil {
		panic(err)
	}
	sum := sha256.Sum256(ask)
	config := &bcdv1.BootConfig{
		AskSha256: sum[:], GatewayUrl: "https://gw:7443", Site: "fsn1", Role: bcdv1.Role_ROLE_RAMDISK,
		SealedToken: must(pki.Seal(must(pki.ParseJWK([]byte(q.Jwk))), []byte(testToken), q.BootId)), ServerTimeMs: t0.Add(time.Hour).UnixMilli(),
	}
	if edit != nil {
		edit(config)
	}
	return must(c.signer.Sign(intent.TypeBootConfig, config))
}

func testAsk(key *ecdsa.PrivateKey) *bcdv1.BootConfigAsk {
	return &bcdv1.BootConfigAsk{
		Macs: []string{macA}, SystemUuid: uuidA, BootId: "boot-1",
		Jwk: string(must(pki.MarshalJWK(&key.PublicKey))), Nonce: bytes.Repeat([]byte{7}, nonceBytes),
	}
}

func TestAHostileAnswerIsNone(t *testing.T) {
	c, other := newControl(t), newControl(t)
	key, otherKey := must(pki.NewKey()), must(pki.NewKey())
	ask := must(proto.Marshal(testAsk(key)))
	another := testAsk(key)
	another.Nonce = bytes.Repeat([]byte{8}, nonceBytes)
	for _, test := range []struct {
		name   string
		answer []byte
		want   string
	}{
		{"good", must(proto.Marshal(c.answerTo(ask, nil))), ""},
		{"signed under other roots", must(proto.Marshal(other.answerTo(ask, nil))), "trusted root"},
		{"not signed", must(proto.Marshal(func() *bcdv1.Signed { s := c.answerTo(ask, nil); s.Signatures = nil; return s }())), "not signed"},
		{"gateway changed", must(proto.Marshal(func() *bcdv1.Signed {
			s := c.answerTo(ask, nil)
			s.Payload = bytes.Replace(s.Payload, []byte("gw:7443"), []byte("evil:66"), 1)
			return s
		}())), "signature"},
		{"of another type", must(proto.Marshal(must(c.signer.Sign(intent.TypeCommand, &bcdv1.BootConfig{ServerTimeMs: t0.UnixMilli()})))), "another type"},
		{"an old answer again", must(proto.Marshal(c.answerTo(must(proto.Marshal(another)), nil))), "another question"},
		{"of before the image", must(proto.Marshal(c.answerTo(ask, func(b *bcdv1.BootConfig) { b.ServerTimeMs = t0.Add(-time.Second).UnixMilli() }))), "this image was made"},
		{"after the signer's end", must(proto.Marshal(c.answerTo(ask, func(b *bcdv1.BootConfig) { b.ServerTimeMs = t0.Add(1000 * time.Hour).UnixMilli() }))), "expired"},
		{"token for another key", must(proto.Marshal(c.answerTo(ask, func(b *bcdv1.BootConfig) {
			b.SealedToken = must(pki.Seal(&otherKey.PublicKey, []byte(testToken), "boot-1"))
		}))), "token"},
		{"token for another boot", must(proto.Marshal(c.answerTo(ask, func(b *bcdv1.BootConfig) {
			b.SealedToken = must(pki.Seal(&key.PublicKey, []byte(testToken), "boot-2"))
		}))), "another request"},
		{"no token", must(proto.Marshal(c.answerTo(ask, func(b *bcdv1.BootConfig) { b.SealedToken = "" }))), "token"},
		{"garbage", []byte{0xff}, "proto"},
		{"nothing", nil, "this image was made"},
		{"endless", make([]byte, maxConfigAnswer+1), "more than"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := openConfig(test.answer, ask, c.roots, t0, key, "boot-1")
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Fatalf("error %v, want %q", err, test.want)
			}
			if err != nil && strings.Contains(err.Error(), "bcjt_") {
				t.Errorf("the error holds the token: %v", err)
			}
			if err == nil && (string(got.Token) != testToken || got.Config.GatewayUrl != "https://gw:7443") {
				t.Errorf("got %v", got.Config)
			}
		})
	}
}

func FuzzBootConfig(f *testing.F) {
	root := must(pki.NewRoot("fuzz", t0))
	signerKey, key := must(pki.NewKey()), must(pki.NewKey())
	c := &control{
		roots:  intent.FromRoots(must(pki.NewRoots(root.Certificate))),
		signer: &intent.Signer{Key: signerKey, Chain: must(root.IssueCommandSigner("control", signerKey.Public(), t0, time.Hour))},
	}
	ask := must(proto.Marshal(testAsk(key)))
	good := must(proto.Marshal(c.answerTo(ask, func(b *bcdv1.BootConfig) { b.ServerTimeMs = t0.UnixMilli() })))
	f.Add(ask)
	f.Add(good)
	f.Add(must(proto.Marshal(&bcdv1.Signed{PayloadType: intent.TypeBootConfig, Payload: []byte{0xff}})))
	f.Fuzz(func(t *testing.T, data []byte) {
		if q, err := parseAsk(data); err == nil && (len(q.Macs) == 0 || len(q.Nonce) != nonceBytes) {
			t.Errorf("accepted %v", q)
		}
		if got, err := openConfig(data, ask, c.roots, t0, key, "boot-1"); err == nil && got.Config.GatewayUrl != "https://gw:7443" {
			t.Errorf("accepted %v", got.Config)
		}
	})
}

func TestParseAsk(t *testing.T) {
	key := must(pki.NewKey())
	for _, test := range []struct {
		name string
		edit func(*bcdv1.BootConfigAsk)
		want string
	}{
		{"good", func(*bcdv1.BootConfigAsk) {}, ""},
		{"no MAC", func(a *bcdv1.BootConfigAsk) { a.Macs = nil }, "0 MACs"},
		{"65 MACs", func(a *bcdv1.BootConfigAsk) { a.Macs = strings.Split(strings.Repeat(macA+" ", 64)+macA, " ") }, "65 MACs"},
		{"MAC in capitals", func(a *bcdv1.BootConfigAsk) { a.Macs = []string{"52:54:00:00:00:0A"} }, "lower case"},
		{"short nonce", func(a *bcdv1.BootConfigAsk) { a.Nonce = a.Nonce[1:] }, "31 bytes"},
		{"no key", func(a *bcdv1.BootConfigAsk) { a.Jwk = "" }, "key of 0 bytes"},
		{"long key", func(a *bcdv1.BootConfigAsk) { a.Jwk = strings.Repeat("x", maxAskJWK+1) }, "key of 1025"},
		{"long serial", func(a *bcdv1.BootConfigAsk) { a.SystemSerial = strings.Repeat("x", maxAskWord+1) }, "text of 129"},
		{"long", func(a *bcdv1.BootConfigAsk) { a.Version = strings.Repeat("x", maxAsk) }, "1 to 16384"},
	} {
		ask := testAsk(key)
		test.edit(ask)
		_, err := parseAsk(must(proto.Marshal(ask)))
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.name, err, test.want)
		}
	}
}

// relayWorld is a relay in front of a control plane.
type relayWorld struct {
	relay   *Relay
	mu      sync.Mutex
	events  []Event
	now     time.Time
	holding bool
	err     error
	asked   []*bcdv1.BootConfigRequest
}

func newRelay(c *control) *relayWorld {
	w := &relayWorld{now: t0, holding: true}
	w.relay = &Relay{
		Fence: func() (int64, bool) { return 5, w.holding },
		Ask: func(_ context.Context, r *bcdv1.BootConfigRequest) (*bcdv1.BootConfigResponse, error) {
			w.asked = append(w.asked, r)
			if w.err != nil {
				return nil, w.err
			}
			return &bcdv1.BootConfigResponse{Config: c.answerTo(r.Ask, nil)}, nil
		},
		Observe: func(e Event) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.events = append(w.events, e)
		},
		Now: func() time.Time { return w.now },
		Log: slog.New(slog.DiscardHandler),
	}
	return w
}

func (w *relayWorld) post(method string, body []byte) *httptest.ResponseRecorder {
	recorder := httptest.NewRecorder()
	w.relay.ServeHTTP(recorder, httptest.NewRequest(method, "/"+BootConfigPath, bytes.NewReader(body)))
	return recorder
}

func TestRelay(t *testing.T) {
	c := newControl(t)
	key := must(pki.NewKey())
	ask := must(proto.Marshal(testAsk(key)))
	for _, test := range []struct {
		name   string
		method string
		body   []byte
		set    func(*relayWorld)
		status int
		event  string
		words  string
	}{
		{"good", http.MethodPost, ask, nil, 200, EventBootConfig, ""},
		{"GET", http.MethodGet, nil, nil, 405, "", "POST"},
		{"garbage", http.MethodPost, []byte("x"), nil, 400, "", "proto"},
		{"too long", http.MethodPost, make([]byte, maxAsk+1), nil, 400, "", "16384"},
		{"no lease", http.MethodPost, ask, func(w *relayWorld) { w.holding = false }, 503, EventBootConfigRefused, "boot lease"},
		{"cut off", http.MethodPost, ask, func(w *relayWorld) { w.err = connect.NewError(connect.CodeUnavailable, errors.New("10.1.2.3 refused")) }, 503, EventBootConfigRefused, "cannot be reached"},
		{"refused", http.MethodPost, ask, func(w *relayWorld) {
			w.err = connect.NewError(connect.CodeFailedPrecondition, errors.New("machine is installed"))
		}, 403, EventBootConfigRefused, "machine is installed"},
		{"answered before", http.MethodPost, ask, func(w *relayWorld) {
			w.err = connect.NewError(connect.CodeAlreadyExists, errors.New("boot has used its token"))
		}, 403, EventBootConfigRefused, "boot has used its token"},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newRelay(c)
			if test.set != nil {
				test.set(w)
			}
			got := w.post(test.method, test.body)
			if got.Code != test.status || !strings.Contains(got.Body.String(), test.words) {
				t.Fatalf("%d %q", got.Code, got.Body)
			}
			if (len(w.events) == 1) != (test.event != "") || len(w.events) == 1 && (w.events[0].Type != test.event || w.events[0].MAC != macA) {
				t.Errorf("events %v", w.events)
			}
			if test.status != 200 {
				return
			}
			if r := w.asked[0]; !bytes.Equal(r.Ask, ask) || r.Fence != 5 || r.RemoteAddress != "192.0.2.1" {
				t.Errorf("asked %v", r)
			}
			if answer, err := openConfig(got.Body.Bytes(), ask, c.roots, t0, key, "boot-1"); err != nil || string(answer.Token) != testToken {
				t.Errorf("%v", err)
			}
			if text := fmt.Sprint(w.events); strings.Contains(text, "bcjt_") || strings.Contains(got.Body.String(), testToken) {
				t.Error("the relay has the token in plain text")
			}
		})
	}
}

func TestRelayIsBoundedForEachMachine(t *testing.T) {
	w := newRelay(newControl(t))
	ask := must(proto.Marshal(testAsk(must(pki.NewKey()))))
	codes := map[int]int{}
	for range 20 {
		codes[w.post(http.MethodPost, ask).Code]++
	}
	if codes[200] != askBurst || codes[429] != 20-askBurst {
		t.Errorf("in one moment: %v", codes)
	}
	w.now = w.now.Add(askEvery)
	if got := w.post(http.MethodPost, ask).Code; got != 200 {
		t.Errorf("after a while: %d", got)
	}
	for i := range 3 * maxAskers {
		w.relay.allow(fmt.Sprint(i), w.now)
	}
	if n := len(w.relay.askers); n > maxAskers {
		t.Errorf("%d machines are counted", n)
	}
	if w.now = w.now.Add(time.Minute); !w.relay.allow("new", w.now) {
		t.Error("nobody new may ask, for ever")
	}
}

// lan answers an Asker without a network: each URL is a host's handler.
type lan map[string]http.HandlerFunc

func (l lan) RoundTrip(r *http.Request) (*http.Response, error) {
	h, ok := l[r.URL.Host]
	if !ok {
		return nil, errors.New("no route to host")
	}
	recorder := httptest.NewRecorder()
	h(recorder, r)
	return recorder.Result(), nil
}

func TestAskerOnAHostileNetwork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, other := newControl(t), newControl(t)
		var logs bytes.Buffer
		var up atomic.Bool
		var mu sync.Mutex
		var heard [][]byte
		read := func(r *http.Request) []byte {
			body := make([]byte, r.ContentLength)
			_, _ = r.Body.Read(body)
			mu.Lock()
			defer mu.Unlock()
			heard = append(heard, body)
			return body
		}
		network := lan{
			// Answers first, with what it likes.
			"evil": func(w http.ResponseWriter, r *http.Request) {
				_, _ = w.Write(must(proto.Marshal(other.answerTo(read(r), func(b *bcdv1.BootConfig) { b.GatewayUrl = "https://evil" }))))
			},
			"moved": func(w http.ResponseWriter, r *http.Request) {
				http.Redirect(w, r, "http://evil/", http.StatusTemporaryRedirect)
			},
			"endless": func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write(make([]byte, 1<<20)) },
			"site": func(w http.ResponseWriter, r *http.Request) {
				if !up.Load() {
					http.Error(w, "the gateway cannot be reached", http.StatusServiceUnavailable)
					return
				}
				_, _ = w.Write(must(proto.Marshal(c.answerTo(read(r), nil))))
			},
		}
		client := AskClient()
		client.Transport = network
		a := &Asker{
			Roots: c.roots, Floor: t0, Machine: &bcdv1.BootConfigAsk{Macs: []string{macA}, BootId: "boot-1"},
			URLs: func(context.Context) []string {
				return []string{"http://evil/b", "http://moved/b", "http://endless/b", "http://gone/b", "http://site/b", "http://evil/b"}
			},
			HTTP: client, Clock: clock.System(), Log: slog.New(slog.NewTextHandler(&logs, nil)),
		}
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		done := make(chan *Answer, 1)
		go func() {
			answer, err := a.Ask(ctx)
			if err != nil {
				t.Error(err)
			}
			done <- answer
		}()
		time.Sleep(time.Hour)
		synctest.Wait()
		select {
		case <-done:
			t.Fatal("a hostile answer was taken")
		default:
		}
		mu.Lock()
		if len(heard) < 100 {
			t.Errorf("%d tries in an hour: it gave up", len(heard))
		}
		mu.Unlock()
		up.Store(true)
		answer := <-done
		if answer.Config.GetGatewayUrl() != "https://gw:7443" || string(answer.Token) != testToken {
			t.Errorf("got %v", answer.Config)
		}
		if text := logs.String(); strings.Contains(text, "bcjt_") || !strings.Contains(text, "trusted root") {
			t.Errorf("log:\n%.2000s", text)
		}
		// The gateway gives one token in a boot, and again only to the same
		// question.
		for _, question := range heard {
			if !bytes.Equal(question, heard[0]) {
				t.Error("it asked another question in the same boot")
			}
		}
	})
}

func TestAskerEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &Asker{URLs: func(context.Context) []string { return nil }, Machine: &bcdv1.BootConfigAsk{}, Clock: clock.System(), Log: slog.New(slog.DiscardHandler)}
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		if _, err := a.Ask(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	})
}
