package deploy

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/better-compute/bcd/agent/host"
	"github.com/better-compute/bcd/boot"
	"github.com/better-compute/bcd/deploy/disk"
	"github.com/better-compute/bcd/deploy/disk/looptest"
	"github.com/better-compute/bcd/deploy/faultdisk"
	"github.com/better-compute/bcd/deploy/gpt"
)

const mib = 1 << 20

// imageSize holds a table, an 8 MiB ESP with a loader, data, and holes.
const imageSize = 24 * mib

func tool(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

var images sync.Map // "size/sector" -> []byte

// makeImage builds a bootable-looking image with sgdisk, mkfs.vfat and mtools:
// tools that know nothing of this code.
func makeImage(t testing.TB, size int64, sector int) []byte {
	t.Helper()
	key := fmt.Sprint(size, "/", sector)
	if b, ok := images.Load(key); ok {
		return bytes.Clone(b.([]byte))
	}
	var target, file string
	if sector == 512 {
		file = filepath.Join(t.TempDir(), "image")
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(file, size); err != nil {
			t.Fatal(err)
		}
		target = file
	} else {
		target, file = looptest.New(t, size, sector, 0)
	}
	at, espMiB := mib/sector, 8
	if size >= 64*mib {
		espMiB = 40
	}
	tool(t, "sgdisk", "-a", "1", "-o", "-U", "11111111-2222-3333-4444-555555555555",
		"-n", fmt.Sprintf("1:%d:%d", at, at+espMiB*at-1), "-t", "1:ef00", "-u", "1:aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee",
		"-n", fmt.Sprintf("2:%d:0", at+espMiB*at), "-t", "2:8300", target)
	args := []string{"-i", "12345678", "-S", fmt.Sprint(sector), "--offset", fmt.Sprint(at)}
	if espMiB >= 40 && sector == 512 {
		args = append(args, "-F", "32")
	}
	tool(t, "mkfs.vfat", append(args, target, fmt.Sprint(espMiB*1024))...)
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	// The loader, by mtools on the ESP alone.
	esp := filepath.Join(t.TempDir(), "esp")
	if err := os.WriteFile(esp, b[mib:(1+espMiB)*mib], 0o600); err != nil {
		t.Fatal(err)
	}
	loader := filepath.Join(t.TempDir(), "loader")
	random := rand.NewChaCha8([32]byte{1})
	code := make([]byte, 100000)
	random.Read(code)
	if err := os.WriteFile(loader, code, 0o600); err != nil {
		t.Fatal(err)
	}
	tool(t, "mmd", "-i", esp, "::EFI", "::EFI/BOOT", "::EFI/other")
	tool(t, "mcopy", "-i", esp, loader, "::EFI/BOOT/"+filepath.Base(strings.ReplaceAll(removableLoader(), `\`, "/")))
	tool(t, "mcopy", "-i", esp, loader, "::EFI/other/loader.efi")
	espBytes, err := os.ReadFile(esp)
	if err != nil {
		t.Fatal(err)
	}
	copy(b[mib:], espBytes)
	// Three MiB of data with a hole in the middle, then a long hole.
	root := (1 + espMiB) * mib
	random.Read(b[root : root+mib+12345])
	random.Read(b[root+2*mib : root+3*mib])
	images.Store(key, bytes.Clone(b))
	return b
}

func pack(t testing.TB, raw []byte, f Format) []byte {
	t.Helper()
	var out bytes.Buffer
	switch f {
	case Raw, Unknown:
		return raw
	case Zstd:
		w, err := zstd.NewWriter(&out, zstd.WithEncoderConcurrency(1))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(w, bytes.NewReader(raw)); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	case Gzip:
		w := gzip.NewWriter(&out)
		if _, err := w.Write(raw); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	case Xz:
		cmd := exec.Command("xz", "-1", "-c")
		cmd.Stdin, cmd.Stdout = bytes.NewReader(raw), &out
		if err := cmd.Run(); err != nil {
			t.Fatal(err)
		}
	}
	return out.Bytes()
}

func sum(b []byte) Digest {
	s := sha256.Sum256(b)
	return s[:]
}

// server serves one image and misbehaves as told.
type server struct {
	*httptest.Server
	mu sync.Mutex
	// content and etag are what there is now.
	content []byte
	etag    string
	// cuts are the sizes after which successive answers are cut; after the
	// last one they are whole.
	cuts []int
	// change is called with the number of each request, from 1.
	change func(s *server, n int)
	// handle answers instead, if it returns true.
	handle func(w http.ResponseWriter, r *http.Request, n int) bool
	// requests counts; ranges are the Range headers that came.
	requests int
	ranges   []string
}

func serve(t testing.TB, content []byte) *server {
	s := &server{content: content, etag: `"v1"`}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	return s
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.requests++
	n := s.requests
	if v := r.Header.Get("Range"); v != "" {
		s.ranges = append(s.ranges, v)
	}
	if s.change != nil {
		s.change(s, n)
	}
	content, etag, cut := s.content, s.etag, -1
	if len(s.cuts) > 0 {
		cut, s.cuts = s.cuts[0], s.cuts[1:]
	}
	s.mu.Unlock()
	if s.handle != nil && s.handle(w, r, n) {
		return
	}
	if etag != "" {
		w.Header().Set("ETag", etag)
	}
	if cut >= 0 {
		w = &cutter{ResponseWriter: w, left: cut}
	}
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
}

// cutter drops the connection after some bytes.
type cutter struct {
	http.ResponseWriter
	left int
}

func (c *cutter) Write(p []byte) (int, error) {
	if len(p) >= c.left {
		c.ResponseWriter.Write(p[:c.left])
		c.ResponseWriter.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
	c.left -= len(p)
	return c.ResponseWriter.Write(p)
}

// clock does not wait: Sleep moves it on. Timers fire when told.
type clock struct {
	mu     sync.Mutex
	now    time.Time
	slept  []time.Duration
	timers map[*func()]bool
}

func newClock() *clock {
	return &clock{now: time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC), timers: map[*func()]bool{}}
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(time.Millisecond)
	return c.now
}

func (c *clock) AfterFunc(_ time.Duration, f func()) func() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := &f
	c.timers[p] = true
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		was := c.timers[p]
		delete(c.timers, p)
		return was
	}
}

func (c *clock) fire() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for p := range c.timers {
		(*p)()
		delete(c.timers, p)
	}
}

func (c *clock) Sleep(ctx context.Context, d time.Duration) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
	c.slept = append(c.slept, d)
	return ctx.Err()
}

// rig is a machine with one disk and firmware variables.
type rig struct {
	t     testing.TB
	disk  *faultdisk.Disk
	clock *clock
	vars  string
	deps  Deps
	req   Request
	// before counts BeforeWrite.
	before int
}

func newRig(t testing.TB, s *server, d *faultdisk.Disk) *rig {
	r := &rig{t: t, disk: d, clock: newClock(), vars: t.TempDir()}
	if err := os.WriteFile(filepath.Join(r.vars, "Timeout-8be4df61-93ca-11d2-aa0d-00e098032b8c"), []byte{7, 0, 0, 0, 5, 0}, 0o600); err != nil {
		t.Fatal(err)
	}
	r.deps = Deps{
		Client: s.Client(),
		Clock:  r.clock,
		Disks: func(context.Context) ([]disk.Disk, error) {
			return []disk.Disk{testDisk("vda", d.Size(), "SERIAL1")}, nil
		},
		Open:           func(disk.Disk) (Target, error) { return d, nil },
		Variables:      func() (*boot.Variables, error) { return boot.OpenVariables(r.vars) },
		Memory:         func() (int64, error) { return 512 * mib, nil },
		PartitionReady: func(disk.Disk, gpt.Partition, int) bool { return true },
		BeforeWrite:    func(disk.Disk) error { r.before++; return nil },
	}
	r.req = Request{URL: s.URL + "/image", Label: "bcd test"}
	return r
}

func testDisk(name string, size int64, serial string) disk.Disk {
	return disk.Disk{Node: "/dev/" + name, Block: host.Block{Name: name, SizeBytes: size, Serial: serial, Transport: "virtio", Path: "pci-0000:00:04.0-" + name, LogicalBytes: 512}}
}

func (r *rig) run() (Result, error) { return Run(context.Background(), r.req, r.deps) }

// fails expects an error with a code and a part of its sentence.
func (r *rig) fails(code Code, sentence string) *Error {
	r.t.Helper()
	res, err := r.run()
	if err == nil {
		r.t.Fatalf("deployed, want %s", code)
	}
	e, ok := err.(*Error)
	if !ok {
		r.t.Fatalf("%T is no *Error: %v", err, err)
	}
	if e.Code != code || !strings.Contains(e.Message, sentence) {
		r.t.Errorf("got %s: %s\nwant %s with %q", e.Code, e.Message, code, sentence)
	}
	if e.Wrote != (r.disk.Writes() > 0) || e.Wrote != res.Wrote || e.Wrote != (r.before > 0) {
		r.t.Errorf("Wrote = %v after %d writes, BeforeWrite called %d times", e.Wrote, r.disk.Writes(), r.before)
	}
	if e.Wrote {
		noTable(r.t, r.disk.Bytes())
	}
	return e
}

// noTable checks that neither firmware nor kernel finds anything to start:
// the first sector is empty, and so is the header.
func noTable(t testing.TB, b []byte) {
	t.Helper()
	if !bytes.Equal(b[:512], make([]byte, 512)) {
		t.Errorf("the first sector is not empty: % x", b[:64])
	}
}

// deployed checks a disk against the image, by tools that know nothing of
// this code: what the deployer changes is checked by them, all else by bytes.
func deployed(t testing.TB, got, raw []byte, sector int, seed map[string]string) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "deployed")
	if err := os.WriteFile(name, got, 0o600); err != nil {
		t.Fatal(err)
	}
	if sector == 512 {
		if out := tool(t, "sgdisk", "-v", name); !strings.Contains(out, "No problems found") {
			t.Errorf("sgdisk -v:\n%s", out)
		}
	}
	tab, err := gpt.Detect(got)
	if err != nil || tab.DiskBytes() != int64(len(got)) {
		t.Fatalf("table %+v: %v", tab, err)
	}
	esp, _ := tab.Find(gpt.ESP)
	from, to := int(esp.First)*sector, int(esp.Last+1)*sector
	part := filepath.Join(t.TempDir(), "esp")
	if err := os.WriteFile(part, got[from:to], 0o600); err != nil {
		t.Fatal(err)
	}
	tool(t, "fsck.fat", "-n", part)
	for file, want := range seed {
		if have := tool(t, "mtype", "-i", part, "::bcd/seed/"+file); have != want {
			t.Errorf("seed %s is %q, want %q", file, have, want)
		}
	}
	// Between ESP and old backup everything is as in the image; the table's
	// entries too.
	if !bytes.Equal(got[to:len(raw)-64*sector], raw[to:len(raw)-64*sector]) {
		t.Error("data differs from the image")
	}
	if !bytes.Equal(got[2*sector:from], raw[2*sector:from]) {
		t.Error("partition entries differ from the image")
	}
	// The old backup header is gone.
	if len(got) > len(raw) && bytes.HasPrefix(got[len(raw)-sector:], []byte("EFI PART")) {
		t.Error("the image's backup header is still in the middle of the disk")
	}
}

// heap is what the process holds after a collection.
func heap() int64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse)
}
