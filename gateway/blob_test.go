package gateway_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
)

func digestOf(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

func (w *world) do(client *http.Client, method, url string, body io.Reader, header http.Header) *http.Response {
	w.t.Helper()
	r, err := http.NewRequestWithContext(w.t.Context(), method, url, body)
	if err != nil {
		w.t.Fatal(err)
	}
	for k, v := range header {
		r.Header[k] = v
	}
	answer, err := client.Do(r)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { answer.Body.Close() })
	return answer
}

func (w *world) put(client *http.Client, base string, data []byte) int {
	w.t.Helper()
	return w.do(client, http.MethodPut, base+"/v1/blobs/sha256/"+digestOf(data), bytes.NewReader(data), nil).StatusCode
}

func TestBlobs(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	data := bytes.Repeat([]byte("0123456789abcdef"), 4096)
	sum := digestOf(data)
	url := w.url + "/v1/blobs/sha256/" + sum
	if got := w.put(w.http, "http://operator", data); got != http.StatusCreated {
		t.Fatalf("put: %d", got)
	}
	if got := w.put(w.http, "http://operator", data); got != http.StatusOK {
		t.Errorf("put again: %d", got)
	}
	client := w.client(m)
	for _, test := range []struct {
		name   string
		method string
		header http.Header
		status int
		body   string
	}{
		{"whole", "GET", nil, 200, string(data)},
		{"head", "HEAD", nil, 200, ""},
		{"range", "GET", http.Header{"Range": {"bytes=5-9"}}, 206, "56789"},
		{"tail", "GET", http.Header{"Range": {"bytes=-3"}}, 206, "def"},
		{"resume", "GET", http.Header{"Range": {"bytes=65530-"}, "If-Range": {`"` + sum + `"`}}, 206, "abcdef"},
		{"changed meanwhile", "GET", http.Header{"Range": {"bytes=65530-"}, "If-Range": {`"other"`}}, 200, string(data)},
		{"past the end", "GET", http.Header{"Range": {"bytes=99999999-"}}, 416, "invalid range"},
	} {
		answer := w.do(client, test.method, url, nil, test.header)
		body, err := io.ReadAll(answer.Body)
		if answer.StatusCode != test.status || err != nil || !strings.Contains(string(body), test.body) && test.body != string(body) {
			t.Errorf("%s: %d with %d bytes, %v; want %d", test.name, answer.StatusCode, len(body), err, test.status)
		}
		if answer.StatusCode < 300 && answer.Header.Get("ETag") != `"`+sum+`"` {
			t.Errorf("%s: ETag %q", test.name, answer.Header.Get("ETag"))
		}
	}
	anonymous := w.client(nil)
	if got := w.do(anonymous, "GET", url, nil, nil).StatusCode; got != http.StatusUnauthorized {
		t.Errorf("without a certificate: %d", got)
	}
	signed := w.g.SignedBlobURL(sum, time.Minute)
	if got := w.do(anonymous, "GET", w.url+signed, nil, nil).StatusCode; got != http.StatusOK {
		t.Errorf("signed URL: %d", got)
	}
	if got := w.do(anonymous, "GET", w.url+strings.Replace(signed, sum, digestOf(nil), 1), nil, nil).StatusCode; got != http.StatusUnauthorized {
		t.Errorf("signed URL of another blob: %d", got)
	}
	w.advance(2 * time.Minute)
	if got := w.do(anonymous, "GET", w.url+signed, nil, nil).StatusCode; got != http.StatusUnauthorized {
		t.Errorf("signed URL past its time: %d", got)
	}
	if got := w.do(client, "GET", w.url+"/v1/blobs/sha256/"+digestOf([]byte("none")), nil, nil).StatusCode; got != http.StatusNotFound {
		t.Errorf("a blob that is not there: %d", got)
	}
	if got := w.do(client, "GET", w.url+"/v1/blobs/sha256/..%2f..%2fkeys%2fissuer.key", nil, nil).StatusCode; got != http.StatusBadRequest {
		t.Errorf("a name that is a path: %d", got)
	}
}

func TestBlobUploadsThatAreRefused(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	client := w.client(m)
	wrong := w.url + "/v1/blobs/sha256/" + digestOf([]byte("something else"))
	if got := w.do(client, "PUT", wrong, strings.NewReader("content"), nil).StatusCode; got != http.StatusUnprocessableEntity {
		t.Errorf("wrong digest: %d", got)
	}
	if got := w.do(client, "GET", wrong, nil, nil).StatusCode; got != http.StatusNotFound {
		t.Errorf("the wrong content can be read: %d", got)
	}
	if got := w.put(w.client(nil), w.url, []byte("x")); got != http.StatusUnauthorized {
		t.Errorf("without a certificate: %d", got)
	}
	// 64 MiB in all, a quarter of it for nodes.
	if got := w.put(client, w.url, make([]byte, 17<<20)); got != http.StatusInsufficientStorage {
		t.Errorf("an upload beyond a node's share: %d", got)
	}
	if got := w.put(w.http, "http://operator", make([]byte, 65<<20)); got != http.StatusInsufficientStorage {
		t.Errorf("an upload beyond the bound: %d", got)
	}
	// A broken upload leaves nothing.
	half := io.MultiReader(strings.NewReader("half"), errReader{})
	r, err := http.NewRequest(http.MethodPut, w.url+"/v1/blobs/sha256/"+digestOf([]byte("half and half")), half)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Do(r); err == nil {
		t.Error("the broken upload went through")
	}
}

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, errors.New("cut") }

// TestNodeUploadsMakeRoom: the oldest uploads of nodes go, an operator's stay.
func TestNodeUploadsMakeRoom(t *testing.T) {
	w := newWorld(t)
	m := w.join("a", node)
	client := w.client(m)
	random := rand.New(rand.NewPCG(1, 2))
	blob := func(size int) []byte {
		b := make([]byte, size)
		for i := range b {
			b[i] = byte(random.Uint32())
		}
		return b
	}
	image := blob(1 << 20)
	if got := w.put(w.http, "http://operator", image); got != http.StatusCreated {
		t.Fatal(got)
	}
	var uploads [][]byte
	for range 4 {
		b := blob(6 << 20)
		uploads = append(uploads, b)
		if got := w.put(client, w.url, b); got != http.StatusCreated {
			t.Fatalf("upload %d: %d", len(uploads), got)
		}
		w.advance(time.Second)
	}
	for i, want := range []int{404, 404, 200, 200} {
		if got := w.do(client, "HEAD", w.url+"/v1/blobs/sha256/"+digestOf(uploads[i]), nil, nil).StatusCode; got != want {
			t.Errorf("upload %d: %d, want %d", i, got, want)
		}
	}
	if got := w.do(client, "HEAD", w.url+"/v1/blobs/sha256/"+digestOf(image), nil, nil).StatusCode; got != 200 {
		t.Errorf("the operator's image: %d", got)
	}
}

// image is a zstd image and what it unpacks to.
func image(t *testing.T, size int) (packed, raw []byte) {
	t.Helper()
	raw = bytes.Repeat([]byte("disk"), size/4)
	encoder, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer encoder.Close()
	return encoder.EncodeAll(raw, nil), raw
}
