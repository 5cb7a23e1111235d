package logs

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/dispatch"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

func text(name, content string) Source {
	return Source{Name: name, Write: func(_ context.Context, w io.Writer, _ time.Time) error {
		_, err := io.WriteString(w, content)
		return err
	}}
}

// store is an Uploader that keeps what it gets; the first fails tries fail.
type store struct {
	fails atomic.Int32
	err   error
	got   []byte
	hex   string
}

func (s *store) Upload(_ context.Context, sum string, size int64, body io.Reader, progress func(int64)) error {
	if s.fails.Add(-1) >= 0 {
		return s.err
	}
	data, err := io.ReadAll(body)
	if err != nil || int64(len(data)) != size {
		return fmt.Errorf("%d bytes, %w", len(data), err)
	}
	progress(size)
	s.got, s.hex = data, sum
	return nil
}

// unpack gives the files of a bundle.
func unpack(t *testing.T, data []byte) (names []string, files map[string]string) {
	t.Helper()
	z := must(zstd.NewReader(bytes.NewReader(data)))
	defer z.Close()
	files = map[string]string{}
	for archive := tar.NewReader(z); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return names, files
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, header.Name)
		files[header.Name] = string(must(io.ReadAll(archive)))
	}
}

func command(body *bcdv1.LogsCollect) dispatch.Command {
	return dispatch.Command{ID: "cmd_1/../x", Kind: "logs.collect", Body: must(proto.Marshal(body)), StillDue: func() error { return nil }}
}

func quiet(proto.Message) {}

func newExecutor(t *testing.T, up Uploader, sources ...Source) *Executor {
	return &Executor{Dir: filepath.Join(t.TempDir(), "bundle"), Sources: sources, Redactor: newRedactor(t, live), Uploader: up, Clock: clock.System()}
}

func TestCollect(t *testing.T) {
	up := &store{}
	e := newExecutor(t, up,
		JSONSource("status.json", func(context.Context) (any, error) { return map[string]string{"token": "bcjt_a_CANARY"}, nil }),
		text("log.txt", "line\nvalue "+live+"\nhttp://u:CANARY@h/\n"),
		JSONSource("doctor.json", func(context.Context) (any, error) { return nil, errors.New("doctor fell ill at http://u:CANARY@h/") }),
		JournalSource("journal.txt", "bcd.service", func(_ context.Context, w io.Writer, name string, args ...string) error {
			_, err := fmt.Fprintln(w, name, strings.Join(args, " "))
			return err
		}),
	)
	// What a crash left behind is cleared away.
	must(0, os.MkdirAll(e.Dir, 0o700))
	must(0, os.WriteFile(filepath.Join(e.Dir, "logs-spool-1"), []byte("x"), 0o600))
	var phases []string
	result, err := e.Run(t.Context(), command(&bcdv1.LogsCollect{SinceMs: 1_700_000_000_000}), func(m proto.Message) {
		phases = append(phases, m.(*bcdv1.TransferProgress).GetPhase())
	})
	if err != nil {
		t.Fatal(err)
	}
	r := result.Body.(*bcdv1.LogsCollectResult)
	sum := sha256.Sum256(up.got)
	if r.GetBlobSha256() != hex.EncodeToString(sum[:]) || up.hex != r.GetBlobSha256() || r.GetSize() != int64(len(up.got)) || r.GetTruncated() || r.GetRedactions() != 4 {
		t.Errorf("%v", r)
	}
	names, files := unpack(t, up.got)
	if want := "[status.json log.txt doctor.json journal.txt bundle.json]"; fmt.Sprint(names) != want || fmt.Sprint(r.GetFiles()) != "[status.json log.txt doctor.json journal.txt]" {
		t.Errorf("%v, %v", names, r.GetFiles())
	}
	for name, content := range files {
		for _, telltale := range telltales {
			if strings.Contains(content, telltale) {
				t.Errorf("%s: %s", name, content)
			}
		}
	}
	if !strings.Contains(files["journal.txt"], "journalctl --no-pager") || !strings.Contains(files["journal.txt"], "--unit=bcd.service --since=@1700000000") {
		t.Error(files["journal.txt"])
	}
	var m manifest
	if err := json.Unmarshal([]byte(files["bundle.json"]), &m); err != nil || m.Files[2].Error != "doctor fell ill at http://u:[redacted]@h/" {
		t.Errorf("%v, %s", err, files["bundle.json"])
	}
	if left := must(os.ReadDir(e.Dir)); len(left) != 0 {
		t.Errorf("left on disk: %v", left)
	}
	if len(phases) != 5 || phases[4] != "uploading" {
		t.Errorf("%v", phases)
	}
	if recovery, err := e.Recover(t.Context(), command(nil)); err != nil || recovery.Action != dispatch.Resume {
		t.Errorf("%v, %v", recovery, err)
	}
}

func TestCollectBounds(t *testing.T) {
	up := &store{}
	big := strings.Repeat("0123456789", 10_000)
	e := newExecutor(t, up, text("first.txt", big), text("second.txt", "small"), text("third.txt", big))
	result, err := e.Run(t.Context(), command(&bcdv1.LogsCollect{MaxBytes: 50_000}), quiet)
	if err != nil {
		t.Fatal(err)
	}
	_, files := unpack(t, up.got)
	if len(files["first.txt"]) != 25_000 || files["second.txt"] != "small" || len(files["third.txt"]) != 24_995 {
		t.Errorf("%d, %d, %d", len(files["first.txt"]), len(files["second.txt"]), len(files["third.txt"]))
	}
	if !result.Body.(*bcdv1.LogsCollectResult).GetTruncated() {
		t.Error("truncated and not said")
	}
	for _, bad := range []int64{-1, MaxBytes + 1} {
		var failure *dispatch.Failure
		if _, err := e.Run(t.Context(), command(&bcdv1.LogsCollect{MaxBytes: bad}), quiet); !errors.As(err, &failure) || failure.Code != "MALFORMED" {
			t.Errorf("%d: %v", bad, err)
		}
	}
	late := errors.New("deadline passed")
	cmd := command(&bcdv1.LogsCollect{})
	cmd.StillDue = func() error { return late }
	if _, err := e.Run(t.Context(), cmd, quiet); !errors.Is(err, late) {
		t.Errorf("%v", err)
	}
}

func TestUploadRetries(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		for _, test := range []struct {
			fails int32
			err   error
			want  string
		}{
			{0, nil, ""}, {uploadTries - 1, errors.New("connection reset"), ""},
			{uploadTries, errors.New("connection reset"), "5 tries: connection reset"},
			{1, &permanent{errors.New("403 Forbidden")}, "403 Forbidden"},
		} {
			up := &store{err: test.err}
			up.fails.Store(test.fails)
			e := newExecutor(t, up, text("a", "b"))
			e.Dir = dir
			_, err := e.Run(t.Context(), command(&bcdv1.LogsCollect{}), quiet)
			var failure *dispatch.Failure
			if test.want == "" && err != nil || test.want != "" && (!errors.As(err, &failure) || failure.Code != "UPLOAD_FAILED" || !strings.HasSuffix(failure.Message, test.want)) {
				t.Errorf("%d failures: %v, want %q", test.fails, err, test.want)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		up := &store{err: errors.New("x")}
		up.fails.Store(100)
		e := newExecutor(t, up, text("a", "b"))
		e.Dir = dir
		if _, err := e.Run(ctx, command(&bcdv1.LogsCollect{}), quiet); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("cancelled: %v", err)
		}
	})
	if left := must(os.ReadDir(dir)); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestBlobUploader(t *testing.T) {
	code := http.StatusCreated
	var path, body string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		data, _ := io.ReadAll(r.Body)
		path, body = r.Method+" "+r.URL.Path, string(data)
		w.WriteHeader(code)
	}))
	defer server.Close()
	u := &BlobUploader{Client: server.Client(), GatewayURL: server.URL + "/"}
	var sent int64
	upload := func() error {
		return u.Upload(t.Context(), "abc", 5, strings.NewReader("hello"), func(n int64) { sent = n })
	}
	if err := upload(); err != nil || path != "PUT /v1/blobs/sha256/abc" || body != "hello" || sent != 5 {
		t.Errorf("%v, %s, %q, %d", err, path, body, sent)
	}
	for c, want := range map[int]string{200: "", 204: "", 409: "", 403: "permanent", 404: "permanent", 500: "again", 429: "again"} {
		code = c
		err := upload()
		var final *permanent
		got := ""
		if errors.As(err, &final) {
			got = "permanent"
		} else if err != nil {
			got = "again"
		}
		if got != want {
			t.Errorf("%d: %v", c, err)
		}
	}
}
