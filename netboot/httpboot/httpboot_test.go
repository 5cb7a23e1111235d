package httpboot

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"

	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// closing is a File's content in memory, which counts how often it is open.
type closing struct {
	*bytes.Reader
	world *world
}

func (c closing) Close() error {
	c.world.mu.Lock()
	defer c.world.mu.Unlock()
	c.world.open--
	return nil
}

// world is a handler with some files.
type world struct {
	handler *Handler
	files   map[string]string

	mu     sync.Mutex
	open   int
	asked  []string
	events []Event
}

func newWorld(t *testing.T) *world {
	x := &world{files: map[string]string{
		"bcd.efi":       strings.Repeat("unified kernel image ", 5000),
		"boot/s.ipxe":   "#!ipxe\nexit\n",
		"appliance.iso": "iso",
		"initramfs":     "cpio",
		"empty":         "",
	}}
	x.handler = New(Config{
		Open: func(name string, _ netip.AddrPort) (File, error) {
			x.mu.Lock()
			defer x.mu.Unlock()
			x.asked = append(x.asked, name)
			switch content, ok := x.files[name]; {
			case ok:
				x.open++
				return File{Content: closing{bytes.NewReader([]byte(content)), x}, Size: int64(len(content)), SHA256: sha256.Sum256([]byte(content))}, nil
			case name == "forbidden":
				return File{}, fs.ErrPermission
			case name == "broken":
				return File{}, io.ErrUnexpectedEOF
			case name == "short":
				return File{Content: bytes.NewReader([]byte("abc")), Size: 10}, nil
			}
			return File{}, fs.ErrNotExist
		},
		Observe: func(e Event) {
			x.mu.Lock()
			defer x.mu.Unlock()
			x.events = append(x.events, e)
		},
		Mounts: map[string]http.Handler{
			"boot/config": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				body, err := io.ReadAll(r.Body)
				if err != nil {
					http.Error(w, "too long", http.StatusRequestEntityTooLarge)
					return
				}
				w.Header().Set("Content-Type", "application/x-protobuf")
				w.Header().Set("X-Empty", "")
				fmt.Fprintf(w, "%s %d", r.Method, len(body))
			}),
			"script": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				fmt.Fprintf(w, "#!ipxe\necho %s\n", r.URL.Query().Get("mac"))
				fmt.Fprint(w, strings.Repeat("#", 10_000))
			}),
			"redirect": http.RedirectHandler("/bcd.efi", http.StatusFound),
			"long": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				for range 1000 {
					fmt.Fprint(w, strings.Repeat("#", 1000))
				}
			}),
		},
	})
	t.Cleanup(func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		if x.open != 0 {
			t.Errorf("%d files are open", x.open)
		}
	})
	return x
}

// listen serves on loopback until the test ends.
func listen(t *testing.T, handler *Handler) string {
	t.Helper()
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- Serve(ctx, listener, handler) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return listener.Addr().String()
}

// say sends a request as it is and reads the answer.
func say(t *testing.T, conn net.Conn, in *bufio.Reader, method, target string, headers ...string) (*http.Response, string) {
	t.Helper()
	fmt.Fprintf(conn, "%s %s HTTP/1.1\r\nHost: 10.0.0.1\r\n%s\r\n", method, target, strings.Join(append(headers, ""), "\r\n"))
	answer, err := http.ReadResponse(in, &http.Request{Method: method})
	if err != nil {
		t.Fatalf("%s %s: %v", method, target, err)
	}
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatalf("%s %s: %v", method, target, err)
	}
	return answer, string(body)
}

// TestOneConnection sends everything over one connection: it never closes, each
// answer has its exact length, no empty header, and none is a redirect.
func TestOneConnection(t *testing.T) {
	x := newWorld(t)
	conn, err := net.Dial("tcp", listen(t, x.handler))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	in := bufio.NewReader(conn)
	uki := x.files["bcd.efi"]
	digest := sha256.Sum256([]byte(uki))
	etag := `"` + hex.EncodeToString(digest[:]) + `"`
	text := "text/plain; charset=utf-8"
	for _, c := range []struct {
		method, target, headers string
		status                  int
		kind, body              string
	}{
		{"HEAD", "/bcd.efi", "", 200, "application/efi", ""},
		{"GET", "/bcd.efi", "", 200, "application/efi", uki},
		{"GET", "//bcd.efi", "", 200, "application/efi", uki},
		{"GET", "///.//BCD.EFI", "", 200, "application/efi", uki},
		{"GET", `/\bcd.efi`, "", 200, "application/efi", uki},
		{"GET", "/bcd.efi?mac=1", "", 200, "application/efi", uki},
		{"GET", "http://10.0.0.1//bcd.efi", "", 200, "application/efi", uki},
		{"GET", "/boot//s.ipxe", "", 200, text, "#!ipxe\nexit\n"},
		{"GET", "/appliance.iso", "", 200, "application/vnd.efi-iso", "iso"},
		{"GET", "/initramfs", "", 200, "application/octet-stream", "cpio"},
		{"GET", "/empty", "", 200, "application/octet-stream", ""},
		{"GET", "/bcd.efi", "Range: bytes=5-9", 206, "application/efi", uki[5:10]},
		{"GET", "/bcd.efi", "Range: bytes=-4", 206, "application/efi", uki[len(uki)-4:]},
		{"GET", "/bcd.efi", "Range: bytes=104990-\r\nIf-Range: " + etag, 206, "application/efi", uki[104990:]},
		{"GET", "/bcd.efi", `Range: bytes=104990-` + "\r\n" + `If-Range: "other"`, 200, "application/efi", uki},
		{"GET", "/bcd.efi", "Range: bytes=0-1,4-5", 200, "application/efi", uki},
		{"GET", "/bcd.efi", "Range: bytes=200000-", 416, text, ""},
		{"HEAD", "/boot/config", "", 200, "application/x-protobuf", ""},
		{"GET", "/none.efi", "", 404, text, "there is no file of this name here\n"},
		{"HEAD", "/none.efi", "", 404, text, ""},
		{"GET", "/", "", 404, text, "the path names no file\n"},
		{"GET", "/forbidden", "", 403, text, ""},
		{"GET", "/broken", "", 503, text, ""},
		{"GET", "/../etc/passwd", "", 400, text, ""},
		{"GET", "/a/%2e%2e/%2e%2e/etc/passwd", "", 400, text, ""},
		{"GET", `/a\..\b`, "", 400, text, ""},
		{"GET", "/bcd.efi%00", "", 400, text, ""},
		{"GET", "/" + strings.Repeat("a", 300), "", 400, text, ""},
		{"PUT", "/bcd.efi", "Content-Length: 0", 405, text, ""},
		{"POST", "/bcd.efi", "Content-Length: 0", 405, text, ""},
		{"DELETE", "/bcd.efi", "", 405, text, ""},
		{"TRACE", "/bcd.efi", "", 405, text, ""},
		{"OPTIONS", "*", "", 405, text, ""},
		{"GET", "/script?mac=52:54:00:00:00:01", "", 200, "application/octet-stream", "#!ipxe\necho 52:54:00:00:00:01\n" + strings.Repeat("#", 10_000)},
		{"GET", "//boot/CONFIG", "", 200, "application/x-protobuf", "GET 0"},
		{"GET", "/redirect", "", 500, text, ""},
		{"GET", "/long", "", 500, text, ""},
	} {
		what := c.method + " " + c.target + " " + c.headers
		var headers []string
		if c.headers != "" {
			headers = []string{c.headers}
		}
		answer, body := say(t, conn, in, c.method, c.target, headers...)
		if answer.StatusCode != c.status || answer.Header.Get("Content-Type") != c.kind || c.body != "" && body != c.body || answer.Close || answer.Proto != "HTTP/1.1" {
			t.Errorf("%s: %s %s, %d bytes, close %v", what, answer.Status, answer.Header.Get("Content-Type"), len(body), answer.Close)
		}
		if len(answer.TransferEncoding) > 0 || c.method != "HEAD" && answer.ContentLength != int64(len(body)) || answer.ContentLength < 0 {
			t.Errorf("%s: length %d, %d bytes came, %v", what, answer.ContentLength, len(body), answer.TransferEncoding)
		}
		if c.method == "HEAD" && c.status == 200 && c.target == "/bcd.efi" && answer.ContentLength != int64(len(uki)) {
			t.Errorf("%s: length %d", what, answer.ContentLength)
		}
		if c.kind == "application/efi" && answer.Header.Get("ETag") != etag {
			t.Errorf("%s: ETag %q", what, answer.Header.Get("ETag"))
		}
		for name, values := range answer.Header {
			if slices.Contains(values, "") || len(values) == 0 || name == "Location" {
				t.Errorf("%s: header %s: %q", what, name, values)
			}
		}
		if c.status == 405 && answer.Header.Get("Allow") != "GET, HEAD" {
			t.Errorf("%s: Allow %q", what, answer.Header.Get("Allow"))
		}
	}
}

func TestEvents(t *testing.T) {
	x := newWorld(t)
	for _, c := range []struct{ method, target, rang, want string }{
		{"HEAD", "/bcd.efi", "", "http.head 200 0/105000"},
		{"GET", "/BCD.efi", "", "http.get 0 0/105000, http.done 200 105000/105000"},
		{"GET", "/bcd.efi", "bytes=10-19", "http.get 0 0/105000, http.done 206 10/105000"},
		{"GET", "/bcd.efi", "bytes=900000-", "http.get 0 0/105000, http.refused 416 0/105000"},
		{"GET", "/short", "", "http.get 0 0/10, http.aborted 200 3/10"},
		{"GET", "/none", "", "http.refused 404 0/0"},
		{"GET", "/../x", "", "http.refused 400 0/0"},
		{"PUT", "/bcd.efi", "", "http.refused 405 0/0"},
		{"POST", "/boot/config", "", "http.get 0 0/0, http.done 200 6/0"},
	} {
		x.events = nil
		r := httptest.NewRequest(c.method, c.target, nil)
		r.RemoteAddr = "10.0.0.9:4321"
		if c.rang != "" {
			r.Header.Set("Range", c.rang)
		}
		x.handler.ServeHTTP(httptest.NewRecorder(), r)
		var got []string
		for _, e := range x.events {
			// What an error's text takes is not counted as the file's.
			if e.Status >= 400 {
				e.Bytes = 0
			}
			got = append(got, fmt.Sprintf("%s %d %d/%d", e.Type, e.Status, e.Bytes, e.Size))
			if e.Peer.String() != "10.0.0.9:4321" {
				t.Errorf("peer %s", e.Peer)
			}
		}
		if strings.Join(got, ", ") != c.want {
			t.Errorf("%+v: %s", c, strings.Join(got, ", "))
		}
	}
}

func TestMountBodyIsBounded(t *testing.T) {
	x := newWorld(t)
	for size, want := range map[int]int{0: 200, MaxBody: 200, MaxBody + 1: 413, 1 << 20: 413} {
		w := httptest.NewRecorder()
		x.handler.ServeHTTP(w, httptest.NewRequest("POST", "/boot/config", bytes.NewReader(make([]byte, size))))
		if w.Code != want {
			t.Errorf("%d bytes: %d", size, w.Code)
		}
	}
}

// TestFileOnDisk serves an *os.File, of the size that was said and of another,
// to curl, in full and resumed.
func TestFileOnDisk(t *testing.T) {
	dir := t.TempDir()
	content := bytes.Repeat([]byte("0123456789abcdef"), 5<<20/16+1)
	file := filepath.Join(dir, "image")
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var events []Event
	addr := listen(t, New(Config{
		Open: func(name string, _ netip.AddrPort) (File, error) {
			f, err := os.Open(file)
			size := int64(len(content))
			if name == "grown" {
				size--
			}
			return File{Content: f, Size: size, SHA256: sha256.Sum256(content)}, err
		},
		Observe: func(e Event) {
			mu.Lock()
			defer mu.Unlock()
			events = append(events, e)
		},
	}))
	out := filepath.Join(dir, "out")
	if err := os.WriteFile(out, content[:12345], 0o600); err != nil {
		t.Fatal(err)
	}
	for _, options := range [][]string{{"-C", "-"}, nil, {"--http1.0"}} {
		arguments := append([]string{"-s", "-S", "-f", "-o", out, "http://" + addr + "//image"}, options...)
		if said, err := exec.CommandContext(t.Context(), "curl", arguments...).CombinedOutput(); err != nil {
			t.Fatalf("curl %q: %v: %s (scripts/setup installs it)", options, err, said)
		}
		if got, err := os.ReadFile(out); err != nil || !bytes.Equal(got, content) {
			t.Errorf("%q: %d bytes, %v", options, len(got), err)
		}
	}
	answer, err := http.Get("http://" + addr + "/grown")
	if err != nil {
		t.Fatal(err)
	}
	answer.Body.Close()
	if answer.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("a file of another size: %s", answer.Status)
	}
}

func TestCleanName(t *testing.T) {
	for in, want := range map[string]string{
		"/a": "a", "//a": "a", "/./a": "a", `\a\b`: "a/b", "/a//b/": "a/b", "": "", "/": "", "*": "*", "/..a": "..a", "/a..": "a..",
		"/..": "!", "/a/..": "!", `/a\..`: "!", "/a\n": "!", "/a\x00": "!", "/" + strings.Repeat("a", 255): "!",
	} {
		got, err := cleanName(in)
		if err != nil {
			got = "!"
		}
		if got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func FuzzHTTPPath(f *testing.F) {
	for _, target := range slices.Sorted(maps.Keys(map[string]bool{
		"/bcd.efi": true, "//BCD.EFI": true, "/../x": true, "/%2e%2e/x": true, `/\..\x`: true, "/boot/config?x=1": true, "*": true, "/%00": true, "http://a//b": true,
	})) {
		f.Add(target)
	}
	f.Fuzz(func(t *testing.T, target string) {
		parsed, err := url.ParseRequestURI(target)
		if err != nil {
			return
		}
		x := newWorld(t)
		w := httptest.NewRecorder()
		x.handler.ServeHTTP(w, &http.Request{Method: http.MethodGet, URL: parsed, Header: http.Header{}, Body: http.NoBody, RemoteAddr: "10.0.0.1:1"})
		if w.Code >= 300 && w.Code < 400 || w.Header().Get("Location") != "" {
			t.Fatalf("%q: %d", target, w.Code)
		}
		for _, name := range x.asked {
			if name == "" || len(name) > maxName || strings.HasPrefix(name, "/") || strings.Contains(name, "//") || strings.Contains("/"+name+"/", "/../") || strings.ContainsAny(name, "\\\x00\n") {
				t.Fatalf("%q asks for %q", target, name)
			}
		}
	})
}
