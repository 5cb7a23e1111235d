package logs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/dispatch"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	uploadTries    = 5
	uploadWaitBase = 2 * time.Second
	// stalePrefix begins the names of files in Dir; what a crash left of them
	// is removed by the next run.
	stalePrefix = "logs-"
)

// Uploader stores a bundle under its digest. It may be called again with the
// same one.
type Uploader interface {
	// Upload sends size bytes of body; progress is told of bytes sent.
	Upload(ctx context.Context, sha256Hex string, size int64, body io.Reader, progress func(sent int64)) error
}

// Executor is logs.collect.
type Executor struct {
	// Dir is a folder for the bundle while it is made, mode 0700.
	Dir      string
	Sources  []Source
	Redactor *Redactor
	Uploader Uploader
	Clock    clock.Clock
}

var _ dispatch.Executor = (*Executor)(nil)

// Kind is logs.collect.
func (e *Executor) Kind() string { return "logs.collect" }

// Recover resumes: collecting again harms nothing, and the blob store is
// content-addressed.
func (e *Executor) Recover(context.Context, dispatch.Command) (dispatch.Recovery, error) {
	return dispatch.Recovery{Action: dispatch.Resume, Message: "logs are collected again"}, nil
}

// Run makes a bundle and uploads it.
func (e *Executor) Run(ctx context.Context, cmd dispatch.Command, progress dispatch.Progress) (dispatch.Result, error) {
	body := &bcdv1.LogsCollect{}
	if err := proto.Unmarshal(cmd.Body, body); err != nil {
		return dispatch.Result{}, &dispatch.Failure{Code: "MALFORMED", Message: "the body is not a LogsCollect", Err: err}
	}
	limit := body.GetMaxBytes()
	switch {
	case limit == 0:
		limit = DefaultMaxBytes
	case limit < 0 || limit > MaxBytes:
		return dispatch.Result{}, &dispatch.Failure{Code: "MALFORMED", Message: fmt.Sprintf("max_bytes %d is not between 0 and %d", limit, int64(MaxBytes))}
	}
	var since time.Time
	if ms := body.GetSinceMs(); ms > 0 {
		since = time.UnixMilli(ms)
	}
	if cmd.StillDue != nil {
		if err := cmd.StillDue(); err != nil {
			return dispatch.Result{}, err
		}
	}
	b, err := e.collect(ctx, cmd.ID, limit, since, progress)
	if err != nil {
		if ctx.Err() != nil {
			return dispatch.Result{}, ctx.Err()
		}
		return dispatch.Result{}, &dispatch.Failure{Code: "BUNDLE_FAILED", Message: fmt.Sprintf("the bundle could not be made in %s: %v", e.Dir, err), Err: err}
	}
	defer os.Remove(b.Path)
	if err := e.upload(ctx, b, progress); err != nil {
		if ctx.Err() != nil {
			return dispatch.Result{}, ctx.Err()
		}
		return dispatch.Result{}, &dispatch.Failure{Code: "UPLOAD_FAILED", Message: "the bundle could not be uploaded: " + err.Error(), Err: err}
	}
	return dispatch.Result{
		Body:    &bcdv1.LogsCollectResult{BlobSha256: b.Hex(), Size: b.Size, Files: b.Files, Redactions: b.Redactions, Truncated: b.Truncated},
		Message: fmt.Sprintf("%d files, %d bytes, %d values redacted; bundle %s", len(b.Files), b.Size, b.Redactions, b.Hex()),
	}, nil
}

var fileSafe = regexp.MustCompile(`[^a-z0-9_]`)

func (e *Executor) collect(ctx context.Context, id string, limit int64, since time.Time, progress dispatch.Progress) (*Bundle, error) {
	if err := os.MkdirAll(e.Dir, 0o700); err != nil {
		return nil, err
	}
	stale, err := filepath.Glob(filepath.Join(e.Dir, stalePrefix+"*"))
	if err != nil {
		return nil, err
	}
	// The bulk lane has one worker: nobody else's are among them.
	for _, path := range stale {
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	path := filepath.Join(e.Dir, fmt.Sprintf("%s%.64s.tar.zst", stalePrefix, fileSafe.ReplaceAllString(id, "")))
	b, err := build(ctx, path, e.Dir, e.Sources, e.Redactor, limit, since, e.Clock.Now(), func(file string, done int64) {
		progress(&bcdv1.TransferProgress{Phase: "collecting " + file, BytesDone: done, EtaSeconds: -1})
	})
	if err != nil {
		os.Remove(path)
	}
	return b, err
}

func (e *Executor) upload(ctx context.Context, b *Bundle, progress dispatch.Progress) error {
	for try := 1; ; try++ {
		err := e.uploadOnce(ctx, b, progress)
		var final *permanent
		if err == nil || ctx.Err() != nil || errors.As(err, &final) {
			return err
		}
		if try == uploadTries {
			return fmt.Errorf("%d tries: %w", try, err)
		}
		timer := e.Clock.NewTimer(uploadWaitBase << (try - 1))
		select {
		case <-timer.C():
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
	}
}

func (e *Executor) uploadOnce(ctx context.Context, b *Bundle, progress dispatch.Progress) error {
	f, err := os.Open(b.Path)
	if err != nil {
		return &permanent{err}
	}
	defer f.Close()
	began := e.Clock.Now()
	return e.Uploader.Upload(ctx, b.Hex(), b.Size, f, func(sent int64) {
		p := &bcdv1.TransferProgress{Phase: "uploading", BytesDone: sent, BytesTotal: b.Size, EtaSeconds: -1}
		if took := e.Clock.Now().Sub(began); took > 0 && sent > 0 {
			p.BytesPerSecond = int64(float64(sent) / took.Seconds())
			if p.BytesPerSecond > 0 {
				p.EtaSeconds = (b.Size - sent) / p.BytesPerSecond
			}
		}
		progress(p)
	})
}

// permanent marks an error that another try cannot mend.
type permanent struct{ err error }

func (p *permanent) Error() string { return p.err.Error() }
func (p *permanent) Unwrap() error { return p.err }

// BlobUploader puts bundles into a gateway's blob store, on connections of its
// own: a bundle never shares one with the session.
type BlobUploader struct {
	// Client shows the node's certificate; it must not be the session's.
	Client *http.Client
	// GatewayURL is https://HOST[:PORT].
	GatewayURL string
}

// Upload is PUT /v1/blobs/sha256/<hex>. A blob that is there already is a
// success.
func (u *BlobUploader) Upload(ctx context.Context, sha256Hex string, size int64, body io.Reader, progress func(int64)) error {
	url := strings.TrimRight(u.GatewayURL, "/") + "/v1/blobs/sha256/" + sha256Hex
	request, err := http.NewRequestWithContext(ctx, http.MethodPut, url, &progressReader{r: body, progress: progress})
	if err != nil {
		return &permanent{err}
	}
	request.ContentLength = size
	request.Header.Set("Content-Type", "application/zstd")
	response, err := u.Client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(response.Body, 400))
	switch code := response.StatusCode; {
	case code == http.StatusOK, code == http.StatusCreated, code == http.StatusNoContent, code == http.StatusConflict:
		return nil
	case code >= 500, code == http.StatusRequestTimeout, code == http.StatusTooManyRequests:
		return fmt.Errorf("PUT %s: %s: %q", url, response.Status, strings.TrimSpace(string(text)))
	default:
		return &permanent{fmt.Errorf("PUT %s: %s: %q", url, response.Status, strings.TrimSpace(string(text)))}
	}
}

type progressReader struct {
	r        io.Reader
	sent     int64
	progress func(int64)
}

func (p *progressReader) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	p.sent += int64(n)
	if n > 0 {
		p.progress(p.sent)
	}
	return n, err
}
