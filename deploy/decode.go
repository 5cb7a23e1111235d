package deploy

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

const (
	// maxWindow bounds what a decoder may keep: zstd --long=27, xz -9 has 64 MiB.
	maxWindow = 128 << 20
	// sniffBytes is enough for every header looked at here.
	sniffBytes = 64
	// fixedMemory is what a deployment takes beside the decoder's window:
	// the write buffers, the head, the decoder's tables, TLS. Measured as
	// heap of a 256 MiB zstd stream, rounded up.
	fixedMemory = 32 << 20
)

var (
	magicZstd = []byte{0x28, 0xb5, 0x2f, 0xfd}
	magicGzip = []byte{0x1f, 0x8b, 0x08}
	magicXz   = []byte{0xfd, '7', 'z', 'X', 'Z', 0}
)

// imageHeader is what the first bytes say.
type imageHeader struct {
	format Format
	// window is the decoder's memory, in bytes.
	window int64
	// rawSize is the unpacked size where the header has it, else 0.
	rawSize int64
}

// readHeader looks at the first bytes of an image, at most sniffBytes.
func readHeader(b []byte) (imageHeader, error) {
	switch {
	case bytes.HasPrefix(b, magicZstd):
		var h zstd.Header
		if err := h.Decode(b); err != nil {
			return imageHeader{}, fmt.Errorf("zstd header: %w", err)
		}
		out := imageHeader{format: Zstd, window: int64(min(h.WindowSize, 1<<40))}
		if h.HasFCS && h.FrameContentSize < 1<<60 {
			out.rawSize = int64(h.FrameContentSize)
		}
		if h.SingleSegment {
			// The window is the content then.
			out.window = max(out.window, out.rawSize)
		}
		return out, nil
	case bytes.HasPrefix(b, magicGzip):
		return imageHeader{format: Gzip, window: 32 << 10}, nil
	case bytes.HasPrefix(b, magicXz):
		dict, err := xzDictionary(b)
		return imageHeader{format: Xz, window: dict}, err
	}
	return imageHeader{format: Raw}, nil
}

// xzDictionary reads the dictionary size of the first block (.xz format 1.2.1
// sections 2.1.1, 3.1 and 5.3.1): ours to bound, for the decoder allocates
// whatever the header says. Blocks of one file all have the same.
func xzDictionary(b []byte) (int64, error) {
	const streamHeader = 12
	if len(b) < streamHeader+2 {
		return 0, errors.New("xz header is cut off")
	}
	block := b[streamHeader:]
	if block[0] == 0 {
		return 0, nil // the index: an empty file
	}
	block = block[:min(len(block), (int(block[0])+1)*4)]
	flags, rest := block[1], block[2:]
	for _, bit := range []byte{0x40, 0x80} {
		if flags&bit != 0 {
			n := 0
			for n < len(rest) && n < 9 && rest[n]&0x80 != 0 {
				n++
			}
			if n >= len(rest) {
				return 0, errors.New("xz block header is cut off")
			}
			rest = rest[n+1:]
		}
	}
	if flags&3 != 0 || len(rest) < 3 || rest[0] != 0x21 || rest[1] != 1 || rest[2] > 40 {
		return 0, errors.New("xz block uses filters other than LZMA2: pack it again with plain xz")
	}
	bits := rest[2]
	if bits == 40 {
		return 1<<32 - 1, nil
	}
	return int64(2|bits&1) << (bits/2 + 11), nil
}

// decoder unpacks a source. Its memory does not grow with the image.
type decoder struct {
	header imageHeader
	src    *sticky
	in     *bufio.Reader
	r      io.Reader
	close  func()
}

// sticky keeps the source's error: some decoders replace it by their own.
type sticky struct {
	r   io.Reader
	err error
}

func (s *sticky) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}

// newDecoder sniffs the format and refuses one other than expected.
func newDecoder(src io.Reader, want Format) (*decoder, error) {
	d := &decoder{src: &sticky{r: src}, close: func() {}}
	d.in = bufio.NewReaderSize(d.src, 256<<10)
	first, err := d.in.Peek(sniffBytes)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if len(first) == 0 {
		return nil, fail(ImageInvalid, "the image is empty")
	}
	if d.header, err = readHeader(first); err != nil {
		return nil, fail(ImageInvalid, "the image cannot be unpacked: %w", err)
	}
	h := d.header
	if want != Unknown && want != h.format {
		return nil, fail(FormatMismatch, "the command says that the image is %s, but its first bytes are those of %s", want, h.format)
	}
	if h.window > maxWindow {
		return nil, fail(InsufficientMemory, "unpacking needs a window of %d MiB, the limit is %d MiB: pack the image with less (zstd --long=27 at most, xz -9 at most)", h.window>>20, maxWindow>>20)
	}
	return d, nil
}

// start allocates the decoder: after the memory check.
func (d *decoder) start() error {
	switch d.header.format {
	case Zstd:
		z, err := zstd.NewReader(d.in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderLowmem(true))
		if err != nil {
			return fail(ImageInvalid, "zstd: %w", err)
		}
		d.r, d.close = z, z.Close
	case Gzip:
		z, err := gzip.NewReader(d.in)
		if err != nil {
			return d.wrap(err)
		}
		d.r = z
	case Xz:
		z, err := xz.NewReader(d.in)
		if err != nil {
			return d.wrap(err)
		}
		d.r = z
	default:
		d.r = d.in
	}
	return nil
}

// need is the memory the deployment takes, in bytes.
func (d *decoder) need() int64 { return fixedMemory + 2*d.header.window }

// Read implements io.Reader; io.EOF comes only after the source's own.
func (d *decoder) Read(p []byte) (int, error) {
	n, err := d.r.Read(p)
	if err == nil {
		return n, nil
	}
	if !errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return n, d.wrap(err)
	}
	if n > 0 {
		return n, nil
	}
	// The digest is over the whole file: what follows the packed data counts.
	if _, err := io.Copy(io.Discard, d.in); err != nil {
		return 0, d.wrap(err)
	}
	return 0, io.EOF
}

// wrap says what a decoder's error means. Errors of the source stay theirs.
func (d *decoder) wrap(err error) error {
	switch {
	case d.src.err != nil:
		return d.src.err
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fail(ShortBody, "the image ends in the middle of its %s data: it was cut off before it was served; upload it again", d.header.format)
	case errors.Is(err, zstd.ErrWindowSizeExceeded), errors.Is(err, zstd.ErrDecoderSizeExceeded):
		return fail(InsufficientMemory, "unpacking needs a window over the limit of %d MiB: pack the image with less (%w)", maxWindow>>20, err)
	}
	return fail(ImageInvalid, "the image cannot be unpacked (%s: %w): it is damaged; upload it again", d.header.format, err)
}
