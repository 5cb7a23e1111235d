package gateway

import (
	"cmp"
	"compress/gzip"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	blobPath = "/v1/blobs/sha256/"
	// defaultBlobBytes bounds all blobs together.
	defaultBlobBytes = 256 << 30
	// maxNodeBlob bounds one upload by a node: the largest log bundle.
	maxNodeBlob = 1 << 30
	// nodeShare is the part of the bound that nodes' uploads may take; past it
	// their oldest go first.
	nodeShare = 4
	// imageWindow is the largest zstd window that the deployer unpacks, so an
	// image that needs more is of no use anyway.
	imageWindow = 128 << 20
	// maxSignedURL bounds how long a signed URL may be good for.
	maxSignedURL = 24 * time.Hour
)

var (
	errDigest  = errors.New("the content does not have the SHA-256 in its name")
	errTooMuch = errors.New("the blob store is full")
)

// blobStore keeps files named by their SHA-256.
type blobStore struct {
	dir   string
	limit int64
	// mu guards the room that uploads in progress have been promised.
	mu       sync.Mutex
	reserved int64
}

func newBlobStore(dir string, limit int64) (*blobStore, error) {
	if limit == 0 {
		limit = defaultBlobBytes
	}
	temp := filepath.Join(dir, "tmp")
	// What a crash left half-written is of no use.
	if err := os.RemoveAll(temp); err != nil {
		return nil, fmt.Errorf("blob store %s: %w", dir, err)
	}
	if err := os.MkdirAll(temp, 0o700); err != nil {
		return nil, fmt.Errorf("blob store %s: %w", dir, err)
	}
	return &blobStore{dir: dir, limit: limit}, nil
}

// path is where a blob is; sum must be 64 hex digits.
func (b *blobStore) path(sum string) string { return filepath.Join(b.dir, sum[:2], sum) }

// write streams r into the store under the name sum. With image set it also
// finds out what r unpacks to.
func (b *blobStore) write(r io.Reader, sum string, most int64, image bool) (blob *Blob, err error) {
	f, err := os.CreateTemp(filepath.Join(b.dir, "tmp"), "put-*")
	if err != nil {
		return nil, err
	}
	defer func() {
		f.Close()
		os.Remove(f.Name())
	}()
	digest := sha256.New()
	to := io.Writer(io.MultiWriter(f, digest))
	var raw *unpacker
	if image {
		raw = newUnpacker()
		to = io.MultiWriter(f, digest, raw)
	}
	size, err := io.Copy(to, io.LimitReader(r, most+1))
	blob = &Blob{SHA256: sum, Size: size}
	if raw != nil {
		blob.Format, blob.RawSize, blob.RawSHA256 = raw.finish()
	}
	switch {
	case err != nil:
		return nil, err
	case size > most:
		return nil, fmt.Errorf("%w: at most %d bytes are left for this", errTooMuch, most)
	case hex.EncodeToString(digest.Sum(nil)) != sum:
		return nil, fmt.Errorf("%w: %d bytes with SHA-256 %x arrived", errDigest, size, digest.Sum(nil))
	}
	if err := errors.Join(f.Chmod(0o400), f.Sync()); err != nil {
		return nil, err
	}
	target := b.path(sum)
	if err := os.MkdirAll(filepath.Dir(target), 0o700); err != nil {
		return nil, err
	}
	if err := os.Rename(f.Name(), target); err != nil {
		return nil, err
	}
	return blob, errors.Join(syncDir(filepath.Dir(target)), syncDir(b.dir))
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// unpacker measures what an image unpacks to while it streams by. A file that
// cannot be unpacked gives no raw figures; that is for the reader to judge.
type unpacker struct {
	head   []byte
	pipe   *io.PipeWriter
	done   chan struct{}
	format bcdv1.ImageFormat
	size   int64
	sum    []byte
	err    error
}

func newUnpacker() *unpacker { return &unpacker{done: make(chan struct{})} }

var (
	zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}
	gzipMagic = []byte{0x1f, 0x8b}
	xzMagic   = []byte{0xfd, '7', 'z', 'X', 'Z', 0}
)

// Write never fails: what cannot be unpacked is stored all the same.
func (u *unpacker) Write(p []byte) (int, error) {
	n := len(p)
	if u.pipe == nil {
		u.head = append(u.head, p...)
		if len(u.head) < len(xzMagic) {
			return n, nil
		}
		u.start()
		p, u.head = u.head, nil
	}
	_, _ = u.pipe.Write(p)
	return n, nil
}

func (u *unpacker) start() {
	has := func(magic []byte) bool {
		return len(u.head) >= len(magic) && string(u.head[:len(magic)]) == string(magic)
	}
	switch {
	case has(zstdMagic):
		u.format = bcdv1.ImageFormat_IMAGE_FORMAT_ZSTD
	case has(gzipMagic):
		u.format = bcdv1.ImageFormat_IMAGE_FORMAT_GZIP
	case has(xzMagic):
		// The one that takes too long to unpack while a client waits.
		u.format = bcdv1.ImageFormat_IMAGE_FORMAT_XZ
	default:
		u.format = bcdv1.ImageFormat_IMAGE_FORMAT_RAW
	}
	reader, writer := io.Pipe()
	u.pipe = writer
	go func() {
		defer close(u.done)
		u.size, u.sum, u.err = measure(reader, u.format)
		// Whatever follows must not block the upload.
		_, _ = io.Copy(io.Discard, reader)
	}()
}

func measure(r io.Reader, format bcdv1.ImageFormat) (int64, []byte, error) {
	switch format {
	case bcdv1.ImageFormat_IMAGE_FORMAT_ZSTD:
		d, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(imageWindow))
		if err != nil {
			return 0, nil, err
		}
		defer d.Close()
		r = d
	case bcdv1.ImageFormat_IMAGE_FORMAT_GZIP:
		d, err := gzip.NewReader(r)
		if err != nil {
			return 0, nil, err
		}
		r = d
	case bcdv1.ImageFormat_IMAGE_FORMAT_XZ:
		return 0, nil, errors.New("not measured")
	}
	digest := sha256.New()
	n, err := io.Copy(digest, r)
	return n, digest.Sum(nil), err
}

func (u *unpacker) finish() (bcdv1.ImageFormat, int64, []byte) {
	if u.pipe == nil {
		u.start()
		_, _ = u.pipe.Write(u.head)
	}
	u.pipe.Close()
	<-u.done
	if u.err != nil {
		return u.format, 0, nil
	}
	return u.format, u.size, u.sum
}

// mayGet says whether the caller may read blobs: a node that is still trusted,
// an operator, or whoever holds a signed URL.
func (g *Gateway) mayGet(r *http.Request, sum string) bool {
	c := callerOf(r.Context())
	return c.operator || g.signedURL(r, sum) || g.trustedNode(r.Context(), c)
}

func (g *Gateway) trustedNode(ctx context.Context, c *caller) bool {
	if c.peer == nil || c.expired != nil {
		return false
	}
	trusted := false
	err := g.store.View(ctx, func(tx Tx) error {
		node, err := tx.Node(c.peer.NodeID)
		if err != nil {
			return err
		}
		reject, err := stillTrusted(tx, g.now(), c.peer, node)
		trusted = reject == nil && err == nil
		return err
	})
	return err == nil && trusted
}

func (g *Gateway) blobMAC(sum string, expires int64) string {
	key := sha256.Sum256([]byte("bcd blob url v1\n" + g.keys.OperatorToken))
	mac := hmac.New(sha256.New, key[:])
	fmt.Fprintf(mac, "GET\n%s\n%d", sum, expires)
	return hex.EncodeToString(mac.Sum(nil))
}

// SignedBlobURL gives a path with query that lets anyone read one blob until
// ttl, at most a day, has passed. Every gateway with the same keys honours it.
func (g *Gateway) SignedBlobURL(sum string, ttl time.Duration) string {
	expires := g.now().Add(min(ttl, maxSignedURL)).Unix()
	return fmt.Sprintf("%s%s?expires=%d&signature=%s", blobPath, sum, expires, g.blobMAC(sum, expires))
}

func (g *Gateway) signedURL(r *http.Request, sum string) bool {
	expires, err := strconv.ParseInt(r.URL.Query().Get("expires"), 10, 64)
	if err != nil || g.now().Unix() >= expires || time.Unix(expires, 0).Sub(g.now()) > maxSignedURL {
		return false
	}
	return hmac.Equal([]byte(r.URL.Query().Get("signature")), []byte(g.blobMAC(sum, expires)))
}

// blobName gives the digest in the path as lower-case hex.
func blobName(r *http.Request) (string, bool) {
	raw, err := hex.DecodeString(r.PathValue("sha256"))
	return hex.EncodeToString(raw), err == nil && len(raw) == sha256.Size
}

// getBlob serves GET and HEAD with Range, If-Range and an ETag that is the
// content's digest.
func (g *Gateway) getBlob(w http.ResponseWriter, r *http.Request) {
	sum, ok := blobName(r)
	if !ok {
		http.Error(w, "a blob is named by 64 hex digits", http.StatusBadRequest)
		return
	}
	if !g.mayGet(r, sum) {
		http.Error(w, "reading a blob needs a node certificate, an operator token or a signed URL", http.StatusUnauthorized)
		return
	}
	f, err := os.Open(g.blobs.path(sum))
	if errors.Is(err, os.ErrNotExist) {
		http.Error(w, "blob "+sum+" is not here", http.StatusNotFound)
		return
	}
	if err != nil {
		g.log.Error("blob not readable", "blob", sum, "error", err)
		http.Error(w, "the blob cannot be read", http.StatusInternalServerError)
		return
	}
	defer f.Close()
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("ETag", `"`+sum+`"`)
	h.Set("Cache-Control", "private, max-age=31536000, immutable")
	http.ServeContent(w, r, "", time.Time{}, f)
}

// putBlob stores one file: 201 when it is new, 200 when it was here.
func (g *Gateway) putBlob(w http.ResponseWriter, r *http.Request) {
	c := callerOf(r.Context())
	sum, ok := blobName(r)
	if !ok {
		http.Error(w, "a blob is named by 64 hex digits", http.StatusBadRequest)
		return
	}
	if !c.operator && !g.trustedNode(r.Context(), c) {
		http.Error(w, "storing a blob needs a node certificate or an operator token", http.StatusUnauthorized)
		return
	}
	status, err := g.storeBlob(r.Context(), c, sum, r.Body, r.ContentLength)
	switch {
	case err == nil:
		w.WriteHeader(status)
		return
	case errors.Is(err, errDigest):
		status = http.StatusUnprocessableEntity
	case errors.Is(err, errTooMuch):
		status = http.StatusInsufficientStorage
	case r.Context().Err() != nil:
		return
	default:
		status = http.StatusInternalServerError
		g.log.Error("blob not stored", "blob", sum, "error", err)
	}
	http.Error(w, err.Error(), status)
}

func (g *Gateway) storeBlob(ctx context.Context, c *caller, sum string, body io.Reader, length int64) (int, error) {
	if have, err := g.haveBlob(ctx, sum); err != nil {
		return 0, err
	} else if have {
		// Taken all the same, so that a client in the middle of sending does
		// not meet a closed connection instead of this answer.
		_, err := io.Copy(io.Discard, body)
		return http.StatusOK, err
	}
	node := ""
	if !c.operator {
		node = c.peer.NodeID
	}
	room, release, err := g.blobRoom(ctx, node, length)
	if err != nil {
		return 0, err
	}
	defer release()
	blob, err := g.blobs.write(body, sum, room, node == "")
	if err != nil {
		return 0, err
	}
	blob.CreatedMS, blob.NodeID = g.now().UnixMilli(), node
	return http.StatusCreated, g.update(context.WithoutCancel(ctx), func(tx Tx) error { return tx.PutBlob(blob) })
}

// haveBlob says whether the blob is here, record and file.
func (g *Gateway) haveBlob(ctx context.Context, sum string) (have bool, err error) {
	err = g.store.View(ctx, func(tx Tx) error {
		_, err := tx.Blob(sum)
		have = err == nil
		if errors.Is(err, ErrNotFound) {
			return nil
		}
		return err
	})
	if err != nil || !have {
		return false, err
	}
	_, err = os.Stat(g.blobs.path(sum))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// blobRoom gives how large an upload may be: as long as it says, or, when it
// does not say, half of what is left. A node's may be at most maxNodeBlob, and
// the oldest of all nodes' make room for it.
func (g *Gateway) blobRoom(ctx context.Context, node string, length int64) (room int64, release func(), err error) {
	b := g.blobs
	b.mu.Lock()
	defer b.mu.Unlock()
	var used, nodes int64
	var oldest []*Blob
	err = g.store.View(ctx, func(tx Tx) error {
		used, nodes, oldest = 0, 0, nil
		return tx.EachBlob(func(blob *Blob) error {
			used += blob.Size
			if blob.NodeID != "" {
				nodes += blob.Size
				oldest = append(oldest, blob)
			}
			return nil
		})
	})
	if err != nil {
		return 0, nil, err
	}
	free := b.limit - used - b.reserved
	want := length
	if node == "" {
		if length < 0 {
			want = free / 2
		}
		if free <= 0 || want > free {
			return 0, nil, fmt.Errorf("%w: %d of %d bytes are used", errTooMuch, used, b.limit)
		}
		b.reserved += want
		return want, func() { b.release(want) }, nil
	}
	most := min(maxNodeBlob, b.limit/nodeShare)
	if length < 0 {
		want = most
	}
	if want > most {
		return 0, nil, fmt.Errorf("%w: an upload of %d bytes; a node may store %d at once", errTooMuch, want, most)
	}
	slices.SortFunc(oldest, func(x, y *Blob) int { return cmp.Compare(x.CreatedMS, y.CreatedMS) })
	for len(oldest) > 0 && (nodes+want > b.limit/nodeShare || free < want) {
		if err := g.dropBlob(ctx, oldest[0]); err != nil {
			return 0, nil, err
		}
		nodes, free = nodes-oldest[0].Size, free+oldest[0].Size
		oldest = oldest[1:]
	}
	if free < want {
		return 0, nil, fmt.Errorf("%w: %d of %d bytes are used", errTooMuch, used, b.limit)
	}
	b.reserved += want
	return want, func() { b.release(want) }, nil
}

func (b *blobStore) release(n int64) {
	b.mu.Lock()
	b.reserved -= n
	b.mu.Unlock()
}

func (g *Gateway) dropBlob(ctx context.Context, blob *Blob) error {
	if err := g.update(ctx, func(tx Tx) error { return tx.DeleteBlob(blob.SHA256) }); err != nil {
		return err
	}
	if err := os.Remove(g.blobs.path(blob.SHA256)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	g.log.Info("old upload removed to make room", "blob", blob.SHA256, "node", blob.NodeID)
	return nil
}
