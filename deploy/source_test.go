package deploy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/bcd/deploy/faultdisk"
)

// good deploys and checks the disk byte by byte.
func (r *rig) good(raw []byte) Result {
	r.t.Helper()
	res, err := r.run()
	if err != nil {
		r.t.Fatal(err)
	}
	deployed(r.t, r.disk.Bytes(), raw, 512, nil)
	return res
}

func httpRig(t *testing.T, f Format) (*server, *rig, []byte) {
	raw := makeImage(t, imageSize, 512)
	packed := pack(t, raw, f)
	s := serve(t, packed)
	r := newRig(t, s, faultdisk.New(28*mib, 512, 0xAA))
	r.req.ImageDigest = sum(packed)
	return s, r, raw
}

func TestResumeAfterCuts(t *testing.T) {
	for _, f := range []Format{Raw, Zstd, Gzip} {
		s, r, raw := httpRig(t, f)
		half := len(s.content) / 2
		s.cuts = []int{half, 1, half / 2, 0}
		r.good(raw)
		want := fmt.Sprintf("[bytes=%d- bytes=%d- bytes=%d- bytes=%d-]", half, half+1, half+1+half/2, half+1+half/2)
		if got := fmt.Sprint(s.ranges); got != want {
			t.Errorf("%s: ranges %s, want %s", f, got, want)
		}
	}
}

// One try after another brings nothing: the waits grow, are bounded, and the
// end is a clear failure, not a short success.
func TestShortBodyIsAFailure(t *testing.T) {
	for _, f := range []Format{Raw, Zstd} {
		s, r, _ := httpRig(t, f)
		s.cuts = append([]int{len(s.content) / 2}, make([]int, 100)...)
		r.fails(ShortBody, fmt.Sprintf("ended after %d of %d bytes", len(s.content)/2, len(s.content)))
		if n := len(r.clock.slept); n != maxIdleTries {
			t.Errorf("%d waits, want %d", n, maxIdleTries)
		}
		for i, d := range r.clock.slept {
			ceiling := min(backoffCap, backoffBase<<i)
			if d < ceiling/2 || d > ceiling {
				t.Errorf("wait %d is %s, want %s to %s", i, d, ceiling/2, ceiling)
			}
		}
	}
}

// The server says more than it has.
func TestWrongContentLength(t *testing.T) {
	s, r, raw := httpRig(t, Raw)
	s.handle = func(w http.ResponseWriter, q *http.Request, n int) bool {
		if n > 1 {
			http.Error(w, "no", http.StatusRequestedRangeNotSatisfiable)
			return true
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(raw)+512))
		w.Header().Set("ETag", `"v1"`)
		w.Write(raw)
		return true
	}
	// The second answer cannot be of the image: it is asked for from the
	// start again, and that is refused.
	r.fails("HTTP_416", "answers 416")
}

func TestChangedImageIsStartedAgain(t *testing.T) {
	s, r, raw := httpRig(t, Raw)
	other := bytes.Clone(raw)
	for i := range other[10*mib : 20*mib] {
		other[10*mib+i] ^= 0x55
	}
	good := s.content
	s.content, s.cuts = other, []int{18 * mib}
	s.change = func(s *server, n int) {
		if n == 2 {
			s.content, s.etag = good, `"v2"`
		}
	}
	res := r.good(raw)
	if !strings.Contains(strings.Join(res.Notes, "\n"), "starting again") {
		t.Errorf("notes %q", res.Notes)
	}
	// BeforeWrite marks the first write only.
	if r.before != 1 {
		t.Errorf("BeforeWrite called %d times", r.before)
	}
	// It never settles.
	s, r, _ = httpRig(t, Raw)
	s.change = func(s *server, n int) {
		s.etag = fmt.Sprintf(`"%d"`, n)
		s.cuts = []int{5 * mib}
	}
	r.fails(ImageChanged, "changed 4 times")
}

// A server that answers a range with other bytes than asked for, or with the
// whole again, or with a weak validator, never gets them onto the disk.
func TestServersThatCannotResume(t *testing.T) {
	for name, answer := range map[string]func(http.ResponseWriter, []byte){
		"200 for a range": func(w http.ResponseWriter, raw []byte) { w.Write(raw) },
		"wrong start": func(w http.ResponseWriter, raw []byte) {
			w.Header().Set("Content-Range", fmt.Sprintf("bytes 0-%d/%d", len(raw)-1, len(raw)))
			w.WriteHeader(http.StatusPartialContent)
			w.Write(raw)
		},
		"no Content-Range": func(w http.ResponseWriter, raw []byte) {
			w.WriteHeader(http.StatusPartialContent)
			w.Write(raw)
		},
		"other ETag": func(w http.ResponseWriter, raw []byte) {
			w.Header().Set("ETag", `"v9"`)
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", 5*mib, len(raw)-1, len(raw)))
			w.WriteHeader(http.StatusPartialContent)
			w.Write(bytes.Repeat([]byte{0x42}, len(raw)-5*mib))
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, r, raw := httpRig(t, Raw)
			s.cuts = []int{5 * mib}
			s.handle = func(w http.ResponseWriter, q *http.Request, n int) bool {
				if q.Header.Get("Range") == "" {
					return false
				}
				w.Header().Set("ETag", `"v1"`)
				answer(w, raw)
				return true
			}
			r.good(raw)
			if s.requests != 3 {
				t.Errorf("%d requests, want the cut one, the range, and the whole", s.requests)
			}
		})
	}
	for _, etag := range []string{"", `W/"weak"`} {
		s, r, raw := httpRig(t, Raw)
		s.etag, s.cuts = etag, []int{5 * mib}
		r.good(raw)
		if len(s.ranges) != 0 {
			t.Errorf("ETag %q: asked for %v", etag, s.ranges)
		}
	}
}

func TestStatusCodes(t *testing.T) {
	for code, hint := range map[int]string{404: "upload it", 410: "upload it", 403: "signed URL", 400: "check the URL", 206: "check the URL"} {
		s, r, _ := httpRig(t, Raw)
		r.req.URL += "?signature=canary"
		s.handle = func(w http.ResponseWriter, _ *http.Request, _ int) bool {
			w.WriteHeader(code)
			return true
		}
		e := r.fails(Code(fmt.Sprintf("HTTP_%d", code)), hint)
		if e.Wrote || s.requests != 1 || strings.Contains(e.Message, "canary") {
			t.Errorf("%d: wrote %v, %d requests: %s", code, e.Wrote, s.requests, e.Message)
		}
	}
	// A gateway that is busy or restarting is asked again.
	for _, code := range []int{500, 502, 503, 429, 408} {
		s, r, raw := httpRig(t, Raw)
		s.handle = func(w http.ResponseWriter, _ *http.Request, n int) bool {
			if n <= 3 {
				w.WriteHeader(code)
			}
			return n <= 3
		}
		r.good(raw)
	}
	s, r, _ := httpRig(t, Raw)
	s.handle = func(w http.ResponseWriter, _ *http.Request, _ int) bool {
		w.Header().Set("Content-Encoding", "gzip")
		return false
	}
	r.fails(ImageInvalid, "Content-Encoding")
}

// The gateway's address is the same after its restart, its connections are
// gone, and for a while nobody answers.
func TestServerRestart(t *testing.T) {
	raw := makeImage(t, imageSize, 512)
	h := &server{content: raw, etag: `"v1"`, cuts: []int{11 * mib}}
	first := httptest.NewServer(h)
	address := first.Listener.Addr().String()
	r := newRig(t, &server{Server: first}, faultdisk.New(28*mib, 512, 0xAA))
	r.deps.Client = &http.Client{Transport: &http.Transport{}}
	r.req.RawDigest = sum(raw)
	var second *httptest.Server
	r.deps.Clock = hookClock{r.clock, func() {
		switch len(r.clock.slept) {
		case 1:
			first.Close()
		case 4:
			l, err := net.Listen("tcp", address)
			if err != nil {
				t.Error(err)
				return
			}
			second = &httptest.Server{Listener: l, Config: &http.Server{Handler: h}}
			second.Start()
		}
	}}
	r.good(raw)
	if second == nil {
		t.Fatal("the server was never away")
	}
	second.Close()
	if len(h.ranges) != 1 {
		t.Errorf("ranges %v", h.ranges)
	}
}

type hookClock struct {
	*clock
	onSleep func()
}

func (c hookClock) Sleep(ctx context.Context, d time.Duration) error {
	err := c.clock.Sleep(ctx, d)
	c.onSleep()
	return err
}

func TestStalledConnectionIsGivenUp(t *testing.T) {
	for _, at := range []int{0, 9 * mib} {
		s, r, raw := httpRig(t, Raw)
		s.handle = func(w http.ResponseWriter, q *http.Request, n int) bool {
			if n > 1 {
				return false
			}
			if at > 0 {
				w.Header().Set("ETag", `"v1"`)
				w.Header().Set("Content-Length", fmt.Sprint(len(raw)))
				w.Write(raw[:at])
				w.(http.Flusher).Flush()
			}
			for q.Context().Err() == nil {
				r.clock.fire()
			}
			return true
		}
		r.good(raw)
	}
}

func TestChunkedBodies(t *testing.T) {
	s, r, raw := httpRig(t, Raw)
	s.handle = func(w http.ResponseWriter, q *http.Request, n int) bool {
		if q.Header.Get("Range") != "" {
			return false
		}
		w.Header().Set("ETag", `"v1"`)
		w.(http.Flusher).Flush() // no length from here on
		w.Write(raw[:9*mib])
		panic(http.ErrAbortHandler)
	}
	r.good(raw)
	s, r, raw = httpRig(t, Raw)
	s.handle = func(w http.ResponseWriter, q *http.Request, n int) bool {
		w.(http.Flusher).Flush()
		w.Write(raw)
		return true
	}
	r.good(raw)
}

func TestUntrustedServer(t *testing.T) {
	raw := makeImage(t, imageSize, 512)
	s := &server{content: raw}
	s.Server = httptest.NewUnstartedServer(s)
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	defer s.Close()
	r := newRig(t, s, faultdisk.New(28*mib, 512, 0))
	r.deps.Client = &http.Client{Transport: &http.Transport{}}
	r.req.RawDigest = sum(raw)
	r.fails(UntrustedServer, "certificate is not trusted")
}

func TestUnreachableServer(t *testing.T) {
	s, r, _ := httpRig(t, Raw)
	s.Close()
	r.req.URL += "?sig=canary"
	e := r.fails(ImageUnreachable, "cannot be read after 16 tries")
	if strings.Contains(e.Message, "canary") {
		t.Errorf("the URL's query is in %q", e.Message)
	}
	for u := error(e); u != nil; u = errors.Unwrap(u) {
		if strings.Contains(u.Error(), "canary") {
			t.Errorf("the URL's query is in %q", u)
		}
	}
}

func FuzzContentRange(f *testing.F) {
	f.Add("bytes 5-9/10")
	f.Add("bytes 5-9/*")
	f.Add("bytes */10")
	f.Fuzz(func(t *testing.T, v string) {
		start, total, ok := contentRange(v)
		if ok && (start < 0 || total < -1 || total >= 0 && start >= total) {
			t.Fatalf("%q gave %d/%d", v, start, total)
		}
	})
}

func FuzzReadHeader(f *testing.F) {
	for _, format := range []Format{Raw, Zstd, Gzip, Xz} {
		b := pack(f, []byte(strings.Repeat("some text ", 100)), format)
		f.Add(b[:min(len(b), sniffBytes)])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		b = b[:min(len(b), sniffBytes)]
		h, err := readHeader(b)
		if err == nil && (h.window < 0 || h.rawSize < 0 || h.format == Unknown) {
			t.Fatalf("%+v", h)
		}
	})
}
