package netboot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/clock"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// real gives an artefact with that content.
func real(kind bcdv1.ArtefactKind, arch, name string, content []byte) *bcdv1.BootArtefact {
	sum := sha256.Sum256(content)
	return &bcdv1.BootArtefact{Kind: kind, Architecture: arch, Name: name, Sha256: sum[:], Size: int64(len(content)), CommandLine: "quiet"}
}

// blobs is a gateway's blob store for Artefacts.Fetch.
type blobs struct {
	byDigest map[string][]byte
	// cut ends a body after so many bytes, with an error.
	cut int

	mu    sync.Mutex
	err   error
	calls []int64
}

func (b *blobs) fails(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.err = err
}

func (b *blobs) tries() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.calls)
}

func (b *blobs) add(content []byte) {
	sum := sha256.Sum256(content)
	b.byDigest[sumOf(&bcdv1.BootArtefact{Sha256: sum[:]})] = content
}

func (b *blobs) fetch(_ context.Context, sum string, offset int64) (io.ReadCloser, int64, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls = append(b.calls, offset)
	content, ok := b.byDigest[sum]
	if b.err != nil {
		return nil, 0, b.err
	}
	if !ok {
		return nil, 0, errors.New("404")
	}
	rest := content[offset:]
	if b.cut > 0 && len(rest) > b.cut {
		return io.NopCloser(io.MultiReader(bytes.NewReader(rest[:b.cut]), iotestErr{})), offset, nil
	}
	return io.NopCloser(bytes.NewReader(rest)), offset, nil
}

type iotestErr struct{}

func (iotestErr) Read([]byte) (int, error) { return 0, errors.New("connection reset") }

func newArtefacts(t *testing.T, dir string, b *blobs) *Artefacts {
	t.Helper()
	c := &Artefacts{Dir: dir, Fetch: b.fetch, Clock: clock.System(), Log: slog.New(slog.DiscardHandler)}
	if err := c.Load(); err != nil {
		t.Fatal(err)
	}
	return c
}

// fetchAll does what Run does until all is there or one fetch failed.
func fetchAll(c *Artefacts) error {
	for _, a := range c.missing() {
		err := c.fetch(context.Background(), a)
		c.fetched(a, err)
		if err != nil {
			return err
		}
	}
	c.evict()
	return nil
}

// filledArtefacts has every kind there is, with its contents by name.
func filledArtefacts(t *testing.T) (*Artefacts, map[string][]byte) {
	t.Helper()
	b := &blobs{byDigest: map[string][]byte{}}
	contents := map[string][]byte{}
	var wanted []*bcdv1.BootArtefact
	for _, a := range allArtefacts {
		content := []byte("content of " + a.Name)
		contents[a.Name] = content
		b.add(content)
		wanted = append(wanted, real(a.Kind, a.Architecture, a.Name, content))
	}
	c := newArtefacts(t, t.TempDir(), b)
	c.Want(wanted)
	if err := fetchAll(c); err != nil {
		t.Fatal(err)
	}
	if len(c.Serving()) != len(allArtefacts) {
		t.Fatalf("serving %v", c.Serving())
	}
	return c, contents
}

const ukiKind, kernelKind, initrdKind = bcdv1.ArtefactKind_ARTEFACT_KIND_UKI, bcdv1.ArtefactKind_ARTEFACT_KIND_KERNEL, bcdv1.ArtefactKind_ARTEFACT_KIND_INITRAMFS

func names(artefacts []*bcdv1.BootArtefact) string {
	var out []string
	for _, a := range artefacts {
		out = append(out, a.GetName())
	}
	return strings.Join(out, " ")
}

func TestTheLastGoodVersionIsServed(t *testing.T) {
	b := &blobs{byDigest: map[string][]byte{}}
	one, two, three := []byte("kernel one"), []byte("initramfs one"), []byte("arm one")
	newKernel, newInitramfs := []byte("kernel two"), []byte("initramfs two")
	for _, content := range [][]byte{one, two, three, newKernel} {
		b.add(content)
	}
	dir := t.TempDir()
	c := newArtefacts(t, dir, b)
	arm := real(ukiKind, "arm64", "arm-1", three)
	c.Want([]*bcdv1.BootArtefact{real(kernelKind, "amd64", "k-1", one), real(initrdKind, "amd64", "i-1", two), arm})
	if names(c.Serving()) != "" {
		t.Fatalf("served before it is here: %s", names(c.Serving()))
	}
	if err := fetchAll(c); err != nil || names(c.Serving()) != "k-1 i-1 arm-1" {
		t.Fatalf("%v, serving %s", err, names(c.Serving()))
	}
	wanted := []*bcdv1.BootArtefact{real(kernelKind, "amd64", "k-2", newKernel), real(initrdKind, "amd64", "i-2", newInitramfs), arm}
	c.Want(wanted)
	if err := fetchAll(c); err == nil || names(c.Serving()) != "arm-1 k-1 i-1" {
		t.Fatalf("a half version: %v, serving %s", err, names(c.Serving()))
	}
	if problems := c.Problems(); len(problems) != 1 || !strings.Contains(problems[0], "i-2 is not fetched") {
		t.Errorf("problems %q", problems)
	}
	// Cut off and started again: the list of the last run counts.
	again := newArtefacts(t, dir, &blobs{err: errors.New("no route")})
	if names(again.Serving()) != "arm-1 k-1 i-1" {
		t.Errorf("after a restart: %s", names(again.Serving()))
	}
	again.Want(wanted)
	if err := fetchAll(again); err == nil || names(again.Serving()) != "arm-1 k-1 i-1" {
		t.Errorf("after a restart, cut off: %v, %s", err, names(again.Serving()))
	}
	if _, err := again.Open(ArtefactPath(real(initrdKind, "amd64", "i-1", two))); err != nil {
		t.Error(err)
	}
	b.add(newInitramfs)
	if err := fetchAll(c); err != nil || names(c.Serving()) != "k-2 i-2 arm-1" || len(c.Problems()) != 0 {
		t.Errorf("%v, serving %s, problems %v", err, names(c.Serving()), c.Problems())
	}
	entries, _ := os.ReadDir(dir)
	if len(entries) != 4 {
		t.Errorf("the old version is still in the cache: %v", entries)
	}
}

func TestFetchGoesOnWhereItEnded(t *testing.T) {
	content := bytes.Repeat([]byte("0123456789"), 1000)
	b := &blobs{byDigest: map[string][]byte{}, cut: 4000}
	b.add(content)
	dir := t.TempDir()
	c := newArtefacts(t, dir, b)
	a := real(ukiKind, "amd64", "uki", content)
	c.Want([]*bcdv1.BootArtefact{a})
	for range 2 {
		if err := fetchAll(c); err == nil || !strings.Contains(err.Error(), "connection reset") {
			t.Fatalf("error %v", err)
		}
	}
	if _, err := c.Open(ArtefactPath(a)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("served while it is incomplete: %v", err)
	}
	// The process starts again in between.
	c = newArtefacts(t, dir, b)
	c.Want([]*bcdv1.BootArtefact{a})
	if err := fetchAll(c); err != nil {
		t.Fatal(err)
	}
	if want := []int64{0, 4000, 8000}; len(b.calls) != 3 || b.calls[1] != want[1] || b.calls[2] != want[2] {
		t.Errorf("asked from %v, want %v", b.calls, want)
	}
	f, err := c.Open(ArtefactPath(a))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if got, err := io.ReadAll(f); err != nil || !bytes.Equal(got, content) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

func TestWhatIsNotTheTablesIsNeverServed(t *testing.T) {
	for name, content := range map[string]string{"changed": "kernel 0ne", "longer": "kernel one and more", "shorter": "kernel"} {
		t.Run(name, func(t *testing.T) {
			a := real(kernelKind, "amd64", "k", []byte("kernel one"))
			c := newArtefacts(t, t.TempDir(), &blobs{byDigest: map[string][]byte{sumOf(a): []byte(content)}})
			c.Want([]*bcdv1.BootArtefact{a})
			if err := fetchAll(c); err == nil || len(c.Serving()) != 0 {
				t.Errorf("%v, serving %v", err, c.Serving())
			}
			if _, err := c.Open(ArtefactPath(a)); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("open: %v", err)
			}
			if len(c.Problems()) != 1 {
				t.Errorf("problems %q", c.Problems())
			}
		})
	}
}

func TestADamagedFileIsFoundAndFetchedAgain(t *testing.T) {
	content := []byte("the whole system")
	b := &blobs{byDigest: map[string][]byte{}}
	b.add(content)
	a := real(ukiKind, "amd64", "uki", content)
	damage := map[string]func(path string) error{
		"a bit":   func(p string) error { return os.WriteFile(p, []byte("the whole sYstem"), 0o600) },
		"cut":     func(p string) error { return os.Truncate(p, 3) },
		"removed": os.Remove,
	}
	for name, f := range damage {
		for _, restart := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				dir := t.TempDir()
				c := newArtefacts(t, dir, b)
				c.Want([]*bcdv1.BootArtefact{a})
				if err := fetchAll(c); err != nil {
					t.Fatal(err)
				}
				if err := f(filepath.Join(dir, sumOf(a))); err != nil {
					t.Fatal(err)
				}
				if restart {
					c = newArtefacts(t, dir, b)
					c.Want([]*bcdv1.BootArtefact{a})
				} else {
					c.checkAll()
				}
				if len(c.Serving()) != 0 {
					t.Fatal("a damaged file is served")
				}
				if name != "removed" && (len(c.Problems()) != 1 || !strings.Contains(c.Problems()[0], "damaged")) {
					t.Errorf("problems %q", c.Problems())
				}
				if err := fetchAll(c); err != nil || len(c.Serving()) != 1 || len(c.Problems()) != 0 {
					t.Errorf("%v, serving %v, problems %q", err, c.Serving(), c.Problems())
				}
			})
		}
	}
}

func TestTheCacheIsBounded(t *testing.T) {
	b := &blobs{byDigest: map[string][]byte{}}
	contents := make([][]byte, 4)
	for i := range contents {
		contents[i] = bytes.Repeat([]byte{byte(i)}, 1000)
		b.add(contents[i])
	}
	dir := t.TempDir()
	c := newArtefacts(t, dir, b)
	c.Budget = 2500
	for i := range contents {
		c.Want([]*bcdv1.BootArtefact{real(ukiKind, "amd64", "uki", contents[i])})
		if err := fetchAll(c); err != nil {
			t.Fatalf("version %d: %v", i, err)
		}
		var held int64
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			if info, err := e.Info(); err == nil {
				held += info.Size()
			}
		}
		if held > c.Budget {
			t.Errorf("%d bytes in the cache", held)
		}
	}
	c.Want([]*bcdv1.BootArtefact{
		real(ukiKind, "amd64", "a", contents[0]), real(ukiKind, "arm64", "b", contents[1]), real(kernelKind, "amd64", "c", contents[2]),
	})
	if err := fetchAll(c); err == nil || !strings.Contains(err.Error(), "cache_mib") {
		t.Errorf("error %v", err)
	}
	if len(c.Serving()) == 0 {
		t.Error("nothing is served any more")
	}
}

func TestAFullDiskIsSaid(t *testing.T) {
	a := real(ukiKind, "amd64", "uki", []byte("x"))
	c := newArtefacts(t, t.TempDir(), &blobs{})
	c.Want([]*bcdv1.BootArtefact{a})
	c.fetched(a, &fs.PathError{Op: "write", Path: "x", Err: syscall.ENOSPC})
	if p := c.Problems(); len(p) != 1 || !strings.Contains(p[0], "is full") {
		t.Errorf("problems %q", p)
	}
}

func TestOpenKnowsOnlyArtefacts(t *testing.T) {
	c, _ := filledArtefacts(t)
	for _, path := range []string{"", "/", "a", "a/", servingFile, "../" + servingFile, "a/../" + servingFile, "/etc/passwd", "a\x00b",
		ArtefactPath(allArtefacts[0]) + "/", strings.ToUpper(ArtefactPath(c.Serving()[0])), strings.Repeat("a/", 1000), sumOf(c.Serving()[0])} {
		if f, err := c.Open(path); !errors.Is(err, fs.ErrNotExist) && !strings.HasPrefix(path, ArtefactPath(c.Serving()[0])) {
			t.Errorf("%q: %v, %v", path, f, err)
		}
	}
}

func TestRunFetchesWithABackOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		content := []byte("uki")
		b := &blobs{byDigest: map[string][]byte{}, err: errors.New("no route")}
		b.add(content)
		var changed atomic.Int32
		c := newArtefacts(t, t.TempDir(), b)
		c.Changed = func() { changed.Add(1) }
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error)
		go func() { done <- c.Run(ctx) }()
		c.Want([]*bcdv1.BootArtefact{real(ukiKind, "amd64", "uki", content)})
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if n := b.tries(); n < 8 || n > 20 {
			t.Errorf("%d tries in ten minutes", n)
		}
		b.fails(nil)
		time.Sleep(fetchRetryMax + time.Second)
		synctest.Wait()
		if len(c.Serving()) != 1 || changed.Load() != 1 {
			t.Errorf("serving %v, changed %d", c.Serving(), changed.Load())
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestGatewayFetch(t *testing.T) {
	content := bytes.Repeat([]byte("blob"), 1000)
	var ignoreRange atomic.Bool
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != blobPath+"00ff" {
			http.NotFound(w, r)
			return
		}
		if ignoreRange.Load() {
			r.Header.Del("Range")
		}
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
	}))
	defer server.Close()
	g := &Gateway{URL: server.URL, Client: server.Client, Clock: clock.System()}
	for _, test := range []struct {
		sum          string
		offset, from int64
		ignore       bool
		want         string
	}{
		{"00ff", 0, 0, false, ""},
		{"00ff", 1234, 1234, false, ""},
		{"00ff", 1234, 0, true, ""},
		{"00ff", 4001, 0, false, "ends before"},
		{"00aa", 0, 0, false, "404"},
	} {
		ignoreRange.Store(test.ignore)
		body, from, err := g.Fetch(context.Background(), test.sum, test.offset)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: %v", test, err)
		}
		if err != nil {
			continue
		}
		got, err := io.ReadAll(body)
		if err != nil || from != test.from || !bytes.Equal(got, content[from:]) {
			t.Errorf("%+v: from %d, %d bytes, %v", test, from, len(got), err)
		}
		body.Close()
	}
}

func TestTheListOfServedFilesMayBeDamaged(t *testing.T) {
	dir := t.TempDir()
	list := must(proto.Marshal(&bcdv1.BootTable{Artefacts: []*bcdv1.BootArtefact{{Name: "../../x", Sha256: make([]byte, 32), Size: 1}}}))
	for _, data := range [][]byte{{0xff}, list} {
		if err := os.WriteFile(filepath.Join(dir, servingFile), data, 0o600); err != nil {
			t.Fatal(err)
		}
		if c := newArtefacts(t, dir, &blobs{}); len(c.Serving()) != 0 {
			t.Errorf("serving %v", c.Serving())
		}
	}
}
