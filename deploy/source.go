package deploy

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

const (
	// stallAfter is how long no byte may come before the connection is given
	// up for another one: longer than a gateway's restart needs to be seen,
	// shorter than an operator's patience.
	stallAfter = 30 * time.Second
	// backoffBase and backoffCap bound the wait between tries.
	backoffBase = time.Second
	backoffCap  = 30 * time.Second
	// maxIdleTries is how many tries in a row may bring nothing: about six
	// minutes with the waits above, a gateway's restart and a switch's too.
	maxIdleTries = 16
)

// errChanged says that what was read so far and what is there now are not the
// same image, or cannot be shown to be: start again.
var errChanged = errors.New("image changed while it was read")

// source reads an image over HTTP, across broken connections. Bytes that Read
// returned are never from two versions of the image: a later part is asked for
// with If-Range (RFC 9110 section 13.1.5) and a strong validator.
type source struct {
	ctx    context.Context
	client *http.Client
	clock  Clock
	url    string
	note   func(string)

	body   io.ReadCloser
	cancel context.CancelFunc
	etag   string
	// total is the length of the whole; -1 when the server does not say.
	total int64
	// off counts what Read returned; sum is over just that.
	off int64
	sum hash.Hash
	// idle counts tries since the last byte.
	idle int
}

// openSource makes the first request. Its answer's headers are in etag and
// total; nothing of the body is read yet.
func openSource(ctx context.Context, client *http.Client, clock Clock, url string, note func(string)) (*source, error) {
	s := &source{ctx: ctx, client: client, clock: clock, url: url, note: note, total: -1, sum: sha256.New()}
	for {
		err := s.connect()
		if err == nil {
			return s, nil
		}
		if err := s.wait(err); err != nil {
			return nil, err
		}
	}
}

// Read implements io.Reader. io.EOF means that every byte came.
func (s *source) Read(p []byte) (int, error) {
	for {
		if s.body == nil {
			if s.total >= 0 && s.off == s.total {
				return 0, io.EOF
			}
			if err := s.connect(); err != nil {
				if err := s.wait(err); err != nil {
					return 0, err
				}
				continue
			}
		}
		stop := s.clock.AfterFunc(stallAfter, s.cancel)
		n, err := s.body.Read(p)
		stop()
		if n > 0 {
			if s.total >= 0 && int64(n) > s.total-s.off {
				return 0, fail(SizeMismatch, "%s sent more than the %d bytes it announced", redact(s.url), s.total)
			}
			s.sum.Write(p[:n])
			s.off += int64(n)
			s.idle = 0
			if err != nil {
				s.drop()
			}
			return n, nil
		}
		if err == nil {
			continue
		}
		s.drop()
		if errors.Is(err, io.EOF) && (s.total < 0 || s.off == s.total) {
			if s.total < 0 {
				// Chunked and ended properly (net/http makes a cut one
				// io.ErrUnexpectedEOF): now the length is known.
				s.total = s.off
			}
			return 0, io.EOF
		}
		if err := s.wait(err); err != nil {
			return 0, err
		}
	}
}

func (s *source) drop() {
	if s.body != nil {
		s.body.Close()
		s.cancel()
		s.body = nil
	}
}

// Close ends the connection.
func (s *source) Close() { s.drop() }

// wait decides about an error: whether it is final, or when to try again.
func (s *source) wait(err error) error {
	var e *Error
	if errors.As(err, &e) || errors.Is(err, errChanged) {
		return err
	}
	if s.ctx.Err() != nil {
		return asError(s.ctx, err, Failed)
	}
	if s.idle++; s.idle > maxIdleTries {
		if s.off > 0 {
			return fail(ShortBody, "%s ended after %d of %s bytes, and %d tries to get the rest failed: %w", redact(s.url), s.off, sizeText(s.total), maxIdleTries, bare(err))
		}
		return fail(ImageUnreachable, "%s cannot be read after %d tries: %w: check the address, the route and the server", redact(s.url), maxIdleTries, bare(err))
	}
	ceiling := min(backoffCap, backoffBase<<min(s.idle-1, 10))
	// Half fixed, half random: a rack of machines must not come back at once.
	pause := ceiling/2 + rand.N(ceiling/2+1)
	if s.note != nil {
		s.note(fmt.Sprintf("connection to the image lost at byte %d (%v), trying again in %s", s.off, bare(err), pause.Round(time.Second/10)))
	}
	if err := s.clock.Sleep(s.ctx, pause); err != nil {
		return asError(s.ctx, err, Failed)
	}
	return nil
}

// connect asks for the image from off on.
func (s *source) connect() error {
	ctx, cancel := context.WithCancel(s.ctx)
	done := false
	defer func() {
		if !done {
			cancel()
		}
	}()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url, nil)
	if err != nil {
		return fail(BadRequest, "image URL: %w", bare(err))
	}
	// Without this net/http asks for gzip by itself, and offsets and digests
	// would be of something else.
	req.Header.Set("Accept-Encoding", "identity")
	if s.off > 0 {
		if s.etag == "" {
			// Nothing proves that the rest would be of the same image.
			return errChanged
		}
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-", s.off))
		req.Header.Set("If-Range", s.etag)
	}
	stop := s.clock.AfterFunc(stallAfter, cancel)
	resp, err := s.client.Do(req)
	stop()
	if err != nil {
		if untrusted(err) {
			return fail(UntrustedServer, "%s: its certificate is not trusted here: %w: build the ramdisk with its authority in image-roots.pem of the trust folder, or give the image to the gateway (bcd-gateway blob put)", redact(s.url), bare(err))
		}
		return err
	}
	if err := s.accept(resp); err != nil {
		resp.Body.Close()
		return err
	}
	s.body, s.cancel, done = resp.Body, cancel, true
	return nil
}

// untrusted tells a server that is not ours from one that is not there: no
// number of tries helps.
func untrusted(err error) bool {
	var (
		verify    *tls.CertificateVerificationError
		authority x509.UnknownAuthorityError
		invalid   x509.CertificateInvalidError
		name      x509.HostnameError
	)
	return errors.As(err, &verify) || errors.As(err, &authority) || errors.As(err, &invalid) || errors.As(err, &name)
}

func (s *source) accept(resp *http.Response) error {
	switch code := resp.StatusCode; {
	case code == http.StatusOK && s.off > 0:
		// The validator did not match, or the server knows no ranges.
		return errChanged
	case code == http.StatusRequestedRangeNotSatisfiable && s.off > 0:
		return errChanged
	case code == http.StatusOK, code == http.StatusPartialContent && s.off > 0:
	case code >= 500, code == http.StatusTooManyRequests, code == http.StatusRequestTimeout:
		return fmt.Errorf("server answers %s", resp.Status)
	default:
		hint := "check the URL"
		switch code {
		case http.StatusNotFound, http.StatusGone:
			hint = "the image is not there: upload it (bcd-gateway blob put) or correct the URL"
		case http.StatusUnauthorized, http.StatusForbidden:
			hint = "the machine may not read it: make a new signed URL or check the node's identity"
		}
		return fail(Code("HTTP_"+strconv.Itoa(code)), "%s answers %s: %s", redact(s.url), resp.Status, hint)
	}
	if enc := resp.Header.Get("Content-Encoding"); enc != "" && enc != "identity" {
		return fail(ImageInvalid, "%s is sent with Content-Encoding %q: offsets and digests would not be the image's; turn it off for images", redact(s.url), enc)
	}
	etag := resp.Header.Get("ETag")
	if strings.HasPrefix(etag, "W/") {
		etag = "" // RFC 9110 section 13.1.5: a weak one must not be used
	}
	if s.off == 0 {
		s.etag, s.total = etag, resp.ContentLength
		return nil
	}
	if etag != s.etag {
		return errChanged
	}
	start, total, ok := contentRange(resp.Header.Get("Content-Range"))
	if !ok || start != s.off || s.total >= 0 && total >= 0 && total != s.total {
		return errChanged
	}
	if s.total < 0 {
		s.total = total
	}
	return nil
}

// contentRange reads "bytes 5-9/10" or "bytes 5-9/*" (RFC 9110 section 14.4);
// total is -1 for the latter.
func contentRange(v string) (start, total int64, ok bool) {
	rest, ok := strings.CutPrefix(v, "bytes ")
	if !ok {
		return 0, 0, false
	}
	span, all, ok1 := strings.Cut(rest, "/")
	first, last, ok2 := strings.Cut(span, "-")
	start, err1 := strconv.ParseInt(first, 10, 64)
	end, err2 := strconv.ParseInt(last, 10, 64)
	if !ok1 || !ok2 || err1 != nil || err2 != nil || start < 0 || end < start {
		return 0, 0, false
	}
	if all == "*" {
		return start, -1, true
	}
	total, err := strconv.ParseInt(all, 10, 64)
	if err != nil || total <= end {
		return 0, 0, false
	}
	return start, total, true
}

// bare takes the URL out of an HTTP client's error: its query may be a secret.
func bare(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		return u.Err
	}
	return err
}

func sizeText(n int64) string {
	if n < 0 {
		return "an unknown number of"
	}
	return strconv.FormatInt(n, 10)
}
