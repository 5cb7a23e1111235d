package netboot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/better-compute/bcd/agent/clock"
)

// blobPath is where a gateway has its blobs, by digest.
const blobPath = "/v1/blobs/sha256/"

// stallAfter is how long no byte may come: longer than a gateway's restart
// needs to be seen. The next try goes on where this one ended.
const stallAfter = 30 * time.Second

var errStalled = fmt.Errorf("no byte came for %s", stallAfter)

// Gateway reads blobs from a gateway.
type Gateway struct {
	URL string
	// Client makes a client that shows the node's certificate.
	Client func() *http.Client
	Clock  clock.Clock
}

// Fetch gives the blob's bytes from offset on. from is where they really
// begin: a server may ignore a range (RFC 9110 section 14.2).
func (g *Gateway) Fetch(ctx context.Context, sum string, offset int64) (body io.ReadCloser, from int64, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, g.URL+blobPath+sum, nil)
	if err != nil {
		cancel(nil)
		return nil, 0, err
	}
	if offset > 0 {
		request.Header.Set("Range", fmt.Sprintf("bytes=%d-", offset))
	}
	// The bytes are hashed as they are; nobody may pack them on the way.
	request.Header.Set("Accept-Encoding", "identity")
	answer, err := g.Client().Do(request)
	if err != nil {
		cancel(nil)
		return nil, 0, err
	}
	switch answer.StatusCode {
	case http.StatusOK:
		offset = 0
	case http.StatusPartialContent:
		var first int64
		if _, err := fmt.Sscanf(answer.Header.Get("Content-Range"), "bytes %d-", &first); err != nil || first != offset {
			answer.Body.Close()
			cancel(nil)
			return nil, 0, fmt.Errorf("blob %s: asked for bytes from %d, got Content-Range %.64q", sum, offset, answer.Header.Get("Content-Range"))
		}
	case http.StatusRequestedRangeNotSatisfiable:
		answer.Body.Close()
		cancel(nil)
		return nil, 0, errNoSuchRange
	default:
		answer.Body.Close()
		cancel(nil)
		return nil, 0, fmt.Errorf("blob %s: the gateway says %s", sum, answer.Status)
	}
	s := &stallReader{body: answer.Body, timer: g.Clock.NewTimer(stallAfter), cancel: cancel, ctx: ctx, done: make(chan struct{})}
	go s.watch()
	return s, offset, nil
}

// errNoSuchRange says that what is here is longer than the blob.
var errNoSuchRange = errors.New("the blob ends before the range asked for")

// stallReader ends a body that brings nothing for stallAfter.
type stallReader struct {
	body   io.ReadCloser
	timer  clock.Timer
	cancel context.CancelCauseFunc
	ctx    context.Context
	done   chan struct{}
}

func (s *stallReader) watch() {
	select {
	case <-s.timer.C():
		s.cancel(errStalled)
	case <-s.done:
	}
}

func (s *stallReader) Read(p []byte) (int, error) {
	n, err := s.body.Read(p)
	if n > 0 {
		s.timer.Reset(stallAfter)
	}
	if err != nil && !errors.Is(err, io.EOF) && errors.Is(context.Cause(s.ctx), errStalled) {
		err = errStalled
	}
	return n, err
}

func (s *stallReader) Close() error {
	close(s.done)
	s.timer.Stop()
	s.cancel(nil)
	return s.body.Close()
}
