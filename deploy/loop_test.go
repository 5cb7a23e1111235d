package deploy

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/better-compute/bcd/deploy/disk"
	"github.com/better-compute/bcd/deploy/disk/looptest"
	"github.com/better-compute/bcd/deploy/faultdisk"
)

// The kernel's own block layer, direct I/O, hole punching and cache dropping,
// with both sector sizes, over a disk full of 0xAA.
func TestDeployToLoopDevices(t *testing.T) {
	for _, sector := range []int{512, 4096} {
		for _, zeros := range []ZeroPolicy{ZeroAuto, ZeroWrite} {
			t.Run(fmt.Sprintf("%d bytes, policy %d", sector, zeros), func(t *testing.T) {
				const size = 96 * mib
				raw := makeImage(t, 64*mib, sector)
				node, file := looptest.New(t, size, sector, 0xAA)
				s := serve(t, pack(t, raw, Zstd))
				s.cuts = []int{len(s.content) / 2}
				r := newRig(t, s, nil)
				r.deps.Open = nil
				d := testDisk("loop", size, "L")
				d.Node = node
				r.deps.Disks = func(context.Context) ([]disk.Disk, error) { return []disk.Disk{d}, nil }
				r.req.RawDigest, r.req.Zeros = sum(raw), zeros
				r.req.Seed = map[string][]byte{"config.toml": []byte("role = 'node'\n"), "user-data": []byte(strings.Repeat("u", 10000))}
				res, err := r.run()
				if err != nil {
					t.Fatal(err)
				}
				if skipped := res.SkippedBytes > 10*mib; skipped != (zeros == ZeroAuto) {
					t.Errorf("%d bytes skipped", res.SkippedBytes)
				}
				got, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				deployed(t, got, raw, sector, map[string]string{"config.toml": "role = 'node'\n", "user-data": strings.Repeat("u", 10000)})
				if out := tool(t, "sgdisk", "-v", node); !strings.Contains(out, "No problems found") {
					t.Errorf("sgdisk -v:\n%s", out)
				}
			})
		}
	}
}

// A 4Kn image for a disk of 512, and the other way round.
func TestSectorSizesOnLoopDevices(t *testing.T) {
	for disksector, imagesector := range map[int]int{512: 4096, 4096: 512} {
		raw := makeImage(t, 64*mib, imagesector)
		node, file := looptest.New(t, 96*mib, disksector, 0xAA)
		r := newRig(t, serve(t, raw), nil)
		r.deps.Open = nil
		d := testDisk("loop", 96*mib, "L")
		d.Node = node
		r.deps.Disks = func(context.Context) ([]disk.Disk, error) { return []disk.Disk{d}, nil }
		r.req.RawDigest = sum(raw)
		_, err := r.run()
		e, ok := err.(*Error)
		if !ok || e.Code != SectorSize || e.Wrote {
			t.Errorf("image %d on disk %d: %v", imagesector, disksector, err)
		}
		b, err := os.ReadFile(file)
		if err != nil || b[0] != 0xAA || b[len(b)-1] != 0xAA {
			t.Errorf("the disk was touched: %x (%v)", b[0], err)
		}
	}
}

// pattern is a disk that holds 256 MiB without holding them: every 4 MiB after
// the first are the same.
type pattern struct {
	*faultdisk.Disk
	size   int64
	block  []byte
	wrong  int
	peak   int64
	before int64
}

const patternBlock = 4 * mib

func (p *pattern) Size() int64 { return p.size }

func (p *pattern) ReadAt(b []byte, off int64) (int, error) {
	return p.each(b, off, p.Disk.ReadAt, func(b, block []byte) { copy(b, block) })
}

func (p *pattern) WriteAt(b []byte, off int64) (int, error) {
	return p.each(b, off, p.Disk.WriteAt, func(b, block []byte) {
		if string(b) != string(block[:len(b)]) {
			p.wrong++
		}
	})
}

// each splits a request at the blocks: the first and the last are on a real
// small disk, all others are the pattern.
func (p *pattern) each(b []byte, off int64, real func([]byte, int64) (int, error), same func(b, block []byte)) (int, error) {
	for n := 0; n < len(b); {
		at := off + int64(n)
		part := b[n:][:min(len(b)-n, int(patternBlock-at%patternBlock))]
		n += len(part)
		switch {
		case at >= p.size-patternBlock:
			at -= p.size - 2*patternBlock
		case at >= patternBlock:
			same(part, p.block[at%patternBlock:])
			continue
		}
		if _, err := real(part, at); err != nil {
			return n, err
		}
	}
	p.peak = max(p.peak, heap()-p.before)
	return len(b), nil
}

func TestMemoryIsFlat(t *testing.T) {
	const size = 260 * mib
	// The image: a head made for this size, then the same 4 MiB again and
	// again, each a zstd frame of its own (which also tries many frames).
	raw := makeImage(t, size, 512)
	head := append([]byte(nil), raw[:patternBlock]...)
	block := append([]byte(nil), raw[mib:mib+patternBlock]...)
	for i := range block {
		block[i] ^= byte(i * 7 >> 3)
	}
	tail := append([]byte(nil), raw[size-patternBlock:]...)
	raw = nil
	images.Clear()
	w, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	first, frame, last := w.EncodeAll(head, nil), w.EncodeAll(block, nil), w.EncodeAll(tail, nil)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	w = nil
	s := serve(t, nil)
	s.handle = func(w http.ResponseWriter, _ *http.Request, _ int) bool {
		w.Header().Set("Content-Length", fmt.Sprint(len(first)+(size/patternBlock-2)*len(frame)+len(last)))
		w.Write(first)
		for range size/patternBlock - 2 {
			w.Write(frame)
		}
		w.Write(last)
		return true
	}
	p := &pattern{Disk: faultdisk.New(2*patternBlock, 512, 0), size: size, block: block}
	p.NoZeroing = true
	r := newRig(t, s, p.Disk)
	r.deps.Open = func(disk.Disk) (Target, error) { return p, nil }
	r.req.ImageDigest = make([]byte, 32) // only known at the end
	debug.FreeOSMemory()
	p.before = heap()
	res, err := r.run()
	e, ok := err.(*Error)
	if !ok || e.Code != DigestMismatch || p.wrong != 0 {
		t.Fatalf("%v, %d wrong writes", err, p.wrong)
	}
	if res.RawBytes != size {
		t.Errorf("%d bytes unpacked, want %d", res.RawBytes, size)
	}
	t.Logf("256 MiB through a heap of at most %d KiB more than before", p.peak>>10)
	if p.peak > fixedMemory {
		t.Errorf("heap grew by %d MiB, the memory check reckons with %d", p.peak>>20, fixedMemory>>20)
	}
}
