package bmc

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/better-compute/bcd/agent/dispatch"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// service is a PDU of sorts, with a pinned certificate.
func service(t *testing.T, handler http.HandlerFunc) (url string, digest []byte) {
	server := httptest.NewTLSServer(handler)
	t.Cleanup(server.Close)
	sum := sha256.Sum256(server.Certificate().Raw)
	return server.URL, sum[:]
}

func (w *world) proxy(body *bcdv1.SiteHttpProxy) (*bcdv1.SiteHttpProxyResult, *dispatch.Failure) {
	w.t.Helper()
	result, failure := w.run(HTTPProxyKind, body)
	r, _ := result.Body.(*bcdv1.SiteHttpProxyResult)
	return r, failure
}

// TestHTTPProxy: the secret header arrives, and what comes back of it does not
// leave.
func TestHTTPProxy(t *testing.T) {
	var got *http.Request
	var content []byte
	url, digest := service(t, func(w http.ResponseWriter, r *http.Request) {
		got = r
		content, _ = io.ReadAll(r.Body)
		w.Header().Set("X-Echo", r.Header.Get("X-Token"))
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, "you said "+r.Header.Get("X-Token")+" and "+r.Header.Get("Authorization"))
	})
	w := newWorld(t, nil)
	w.secrets.values["pdu/token"] = canary
	w.secrets.values["pdu/bearer"] = "Bearer " + canary
	r, failure := w.proxy(&bcdv1.SiteHttpProxy{
		Method: "POST", Url: url + "/outlets/7?x=1", Content: []byte("on"), CertificateSha256: digest,
		Headers:       []*bcdv1.HttpHeader{{Name: "X-A", Value: "a"}, {Name: "X-A", Value: "b"}},
		SecretHeaders: []*bcdv1.SecretHeader{{Name: "X-Token", Reference: "pdu/token"}, {Name: "Authorization", Reference: "pdu/bearer"}},
	})
	if failure != nil {
		t.Fatal(failure)
	}
	if got.Method != "POST" || got.URL.String() != "/outlets/7?x=1" || got.Header.Get("X-Token") != canary || got.Header.Get("Authorization") != "Bearer "+canary || len(got.Header["X-A"]) != 2 || string(content) != "on" {
		t.Errorf("%s %s %v %q", got.Method, got.URL, got.Header, content)
	}
	if r.GetStatus() != 201 || !strings.HasPrefix(string(r.GetBody()), "you said [redacted]") || r.GetTruncated() {
		t.Errorf("%v", r)
	}
}

// TestHTTPProxyBounds: a redirect is an answer; a long one is cut; headers are
// bounded.
func TestHTTPProxyBounds(t *testing.T) {
	var visited atomic.Int32
	url, digest := service(t, func(w http.ResponseWriter, r *http.Request) {
		visited.Add(1)
		switch r.URL.Path {
		case "/away":
			http.Redirect(w, r, "https://192.0.2.1/", http.StatusTemporaryRedirect)
		case "/long":
			for range 200 {
				w.Header().Add("X-Long", strings.Repeat("h", 100))
			}
			_, _ = io.WriteString(w, strings.Repeat("x", maxProxyAnswer+1))
		case "/cut":
			w.Header().Set("Content-Length", "100")
			_, _ = io.WriteString(w, "short")
		case "/drop":
			panic(http.ErrAbortHandler)
		case "/silent":
			<-r.Context().Done()
		}
	})
	w := newWorld(t, nil)
	body := func(method, path string) *bcdv1.SiteHttpProxy {
		return &bcdv1.SiteHttpProxy{Method: method, Url: url + path, CertificateSha256: digest}
	}
	if r, failure := w.proxy(body("GET", "/away")); failure != nil || r.GetStatus() != 307 {
		t.Errorf("redirect: %v, %v", r, failure)
	}
	r, failure := w.proxy(body("GET", "/long"))
	if failure != nil || len(r.GetBody()) != maxProxyAnswer || !r.GetTruncated() || len(r.GetHeaders()) > maxAnswerHeaders {
		t.Errorf("long: %d bytes, %d headers, %v", len(r.GetBody()), len(r.GetHeaders()), failure)
	}
	for _, path := range []string{"/cut", "/drop"} {
		if _, failure := w.proxy(body("GET", path)); failure == nil || failure.Indeterminate {
			t.Errorf("GET %s: %v", path, failure)
		}
		visited.Store(0)
		if _, failure := w.proxy(body("POST", path)); failure == nil || !failure.Indeterminate || visited.Load() != 1 {
			t.Errorf("POST %s: %v after %d visits", path, failure, visited.Load())
		}
	}
	silent := body("GET", "/silent")
	silent.TimeoutMs = 50
	if _, failure := w.proxy(silent); failure == nil || !errors.Is(failure, context.DeadlineExceeded) {
		t.Errorf("silence: %v", failure)
	}
	untrusted := body("GET", "/")
	untrusted.CertificateSha256 = make([]byte, 32)
	visited.Store(0)
	if _, failure := w.proxy(untrusted); failure == nil || failure.Code != "UNTRUSTED_SERVICE" || visited.Load() != 0 {
		t.Errorf("%v after %d visits", failure, visited.Load())
	}
}

func TestHTTPProxyRefuses(t *testing.T) {
	w := newWorld(t, func(o *Options) {
		o.Resolve = func(context.Context, string) ([]netip.Addr, error) {
			return []netip.Addr{netip.MustParseAddr("192.0.2.1")}, nil
		}
	})
	w.secrets.values["x/line"] = "a\nb"
	header := func(name, value string) []*bcdv1.HttpHeader {
		return []*bcdv1.HttpHeader{{Name: name, Value: value}}
	}
	for name, c := range map[string]struct {
		code string
		body *bcdv1.SiteHttpProxy
	}{
		"method":       {"MALFORMED", &bcdv1.SiteHttpProxy{Method: "CONNECT", Url: "https://127.0.0.1/"}},
		"scheme":       {"MALFORMED", &bcdv1.SiteHttpProxy{Method: "GET", Url: "file:///etc/passwd"}},
		"user":         {"MALFORMED", &bcdv1.SiteHttpProxy{Method: "GET", Url: "https://u:p@127.0.0.1/"}},
		"http":         {"MALFORMED", &bcdv1.SiteHttpProxy{Method: "GET", Url: "http://127.0.0.1/"}},
		"host header":  {"MALFORMED", &bcdv1.SiteHttpProxy{Method: "GET", Url: "https://127.0.0.1/", Headers: header("host", "x")}},
		"smuggling":    {"MALFORMED", &bcdv1.SiteHttpProxy{Method: "GET", Url: "https://127.0.0.1/", Headers: header("Transfer-Encoding", "chunked")}},
		"header value": {"MALFORMED", &bcdv1.SiteHttpProxy{Method: "GET", Url: "https://127.0.0.1/", Headers: header("X-A", "a\r\nX-B: b")}},
		"header name":  {"MALFORMED", &bcdv1.SiteHttpProxy{Method: "GET", Url: "https://127.0.0.1/", SecretHeaders: []*bcdv1.SecretHeader{{Name: "X A"}}}},
		"secret value": {"SECRET_UNAVAILABLE", &bcdv1.SiteHttpProxy{Method: "GET", Url: "https://127.0.0.1/", SecretHeaders: []*bcdv1.SecretHeader{{Name: "X-A", Reference: "x/line"}}}},
		"no secret":    {"SECRET_UNAVAILABLE", &bcdv1.SiteHttpProxy{Method: "GET", Url: "https://127.0.0.1/", SecretHeaders: []*bcdv1.SecretHeader{{Name: "X-A", Reference: "x/none"}}}},
		"body":         {"TOO_LARGE", &bcdv1.SiteHttpProxy{Method: "PUT", Url: "https://127.0.0.1/", Content: make([]byte, maxProxyBody+1)}},
		"time":         {"MALFORMED", &bcdv1.SiteHttpProxy{Method: "GET", Url: "https://127.0.0.1/", TimeoutMs: 120_001}},
		"outside":      {"OUTSIDE_NETWORKS", &bcdv1.SiteHttpProxy{Method: "GET", Url: "https://pdu/"}},
		"outside v6":   {"OUTSIDE_NETWORKS", &bcdv1.SiteHttpProxy{Method: "GET", Url: "https://[::1]/"}},
	} {
		_, failure := w.proxy(c.body)
		if failure == nil || failure.Code != c.code {
			t.Errorf("%s: %v, want %s", name, failure, c.code)
		}
	}
}

func TestHTTPProxyInterrupted(t *testing.T) {
	w := newWorld(t, nil)
	for method, want := range map[string]dispatch.RecoveryAction{"GET": dispatch.Resume, "HEAD": dispatch.Resume, "POST": dispatch.Unknown, "DELETE": dispatch.Unknown} {
		r, err := w.executors[HTTPProxyKind].Recover(t.Context(), w.command(HTTPProxyKind, &bcdv1.SiteHttpProxy{Method: method}))
		if err != nil || r.Action != want {
			t.Errorf("%s: %v, %v", method, r, err)
		}
	}
}

// TestExpired: a command whose time is over reaches nobody.
func TestExpired(t *testing.T) {
	w := newWorld(t, nil)
	w.deadline = time.Now().Add(-time.Second)
	if _, failure := w.proxy(&bcdv1.SiteHttpProxy{Method: "GET", Url: "http://127.0.0.1:1/", Insecure: true}); failure == nil || !errors.Is(failure, context.DeadlineExceeded) {
		t.Errorf("%v", failure)
	}
}
