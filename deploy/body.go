package deploy

import (
	"bytes"
	"context"
	"crypto/sha256"
	"hash"
	"io"

	"golang.org/x/sync/errgroup"

	"github.com/better-compute/bcd/deploy/disk"
)

const (
	// chunkBytes is one write: large enough for a RAID stripe or an SSD's
	// erase block to be worth it, small enough that three fit a small machine.
	chunkBytes = 4 << 20
	// zeroBlock is the least run of zeros that is worth skipping.
	zeroBlock = 64 << 10
)

var zeroes [zeroBlock]byte

type chunk struct {
	data []byte
	off  int64
}

// body copies what the decoder gives to the disk, from the end of the head
// on, and returns the size of the whole image. One goroutine unpacks and
// hashes while the other writes; two buffers go to and fro, so memory does
// not grow with the image.
func (j *job) body(ctx context.Context, dec *decoder, raw hash.Hash, progress func()) (int64, error) {
	const buffers = 2
	free, full := make(chan []byte, buffers), make(chan chunk, buffers)
	for range buffers {
		free <- disk.Buffer(chunkBytes)
	}
	end := int64(len(j.head))
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		defer close(full)
		if len(j.head) < headBytes {
			return nil // the head is all there is
		}
		for {
			var buf []byte
			select {
			case buf = <-free:
			case <-ctx.Done():
				return ctx.Err()
			}
			n, eof, err := readFull(dec, buf)
			if err != nil {
				return err
			}
			if err := j.fits(end, int64(n)); err != nil {
				return err
			}
			raw.Write(buf[:n])
			if n > 0 {
				select {
				case full <- chunk{buf[:n], end}:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			end += int64(n)
			progress()
			if eof {
				return nil
			}
		}
	})
	g.Go(func() error {
		for c := range full {
			if err := j.writeChunk(c); err != nil {
				return err
			}
			free <- c.data[:chunkBytes]
		}
		return nil
	})
	err := g.Wait()
	return end, err
}

func (j *job) fits(off, n int64) error {
	size, sector := j.target.Size(), int64(j.target.SectorSize())
	switch {
	case n > size-off:
		return fail(ImageTooLarge, "the image is larger than %s, which has %d bytes: choose a larger disk or build a smaller image", j.res.Disk, size)
	case n%sector != 0:
		return fail(ImageInvalid, "the image has %d bytes, which is no multiple of the %d byte sectors of a disk: it was cut off", off+n, sector)
	}
	return nil
}

// writeChunk writes a chunk, but for zeros where the disk has them already.
func (j *job) writeChunk(c chunk) error {
	if c.off+int64(len(c.data)) > j.zeroEnd {
		return j.write(c.data, c.off)
	}
	for start := 0; start < len(c.data); {
		zero := isZero(c.data[start:])
		stop := start
		for stop < len(c.data) && isZero(c.data[stop:]) == zero {
			stop = min(stop+zeroBlock, len(c.data))
		}
		if zero {
			j.res.SkippedBytes += int64(stop - start)
		} else if err := j.write(c.data[start:stop], c.off+int64(start)); err != nil {
			return err
		}
		start = stop
	}
	return nil
}

// isZero looks at the first block of p.
func isZero(p []byte) bool {
	n := min(len(p), zeroBlock)
	return bytes.Equal(p[:n], zeroes[:n])
}

// verify reads the image back, holes too, and compares it with what came.
func (j *job) verify(ctx context.Context) error {
	if err := j.target.DropCaches(); err != nil {
		return fail(DiskIO, "%w", err)
	}
	sum := sha256.New()
	sum.Write(j.head)
	buf := disk.Buffer(chunkBytes)
	for off := int64(len(j.head)); off < j.res.RawBytes; {
		if err := ctx.Err(); err != nil {
			return asError(ctx, err, Failed)
		}
		b := buf[:min(chunkBytes, j.res.RawBytes-off)]
		if err := j.read(b, off); err != nil {
			return err
		}
		sum.Write(b)
		off += int64(len(b))
		j.meter.set(off, j.res.RawBytes)
	}
	j.res.ReadbackDigest = sum.Sum(nil)
	if !bytes.Equal(j.res.ReadbackDigest, j.res.RawDigest) {
		return fail(ReadbackMismatch, "%s gives back other data than was written (SHA-256 %s, not %s): the disk, its cabling or its controller is broken; nothing bootable is left on it", j.res.Disk, j.res.ReadbackDigest, j.res.RawDigest)
	}
	return nil
}

// readFull fills p unless the end comes first. Unlike io.ReadFull it cannot
// make an end out of a body that was cut off: only the decoder's plain io.EOF
// is one.
func readFull(r io.Reader, p []byte) (n int, eof bool, err error) {
	for n < len(p) {
		m, err := r.Read(p[n:])
		n += m
		if err == io.EOF { // not errors.Is: a wrapped EOF is not the end
			return n, true, nil
		}
		if err != nil {
			return n, false, err
		}
	}
	return n, false, nil
}
