package deploy

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/better-compute/bcd/deploy/faultdisk"
	"github.com/better-compute/bcd/deploy/gpt"
)

// state says what a machine finds on a disk after a power cut: whether the
// firmware takes it for partitioned.
func bootable(b []byte) bool {
	// UEFI 2.10 section 5.2.3: without the protective MBR's signature there
	// is no GPT, whatever the other sectors hold; without it no BIOS boots
	// either.
	return b[510] == 0x55 && b[511] == 0xaa
}

// Power is cut after each write, and in the middle of it, with everything
// that was not flushed lost or kept in any combination. What is left is the
// old system untouched, no system, or all of the new one.
func TestPowerCutAtEveryWrite(t *testing.T) {
	raw := makeImage(t, imageSize, 512)
	const size = 28 * mib
	for _, zeroing := range []bool{true, false} {
		d := faultdisk.New(size, 512, 0xAA)
		// The old system.
		r := newRig(t, serve(t, raw), d)
		r.req.RawDigest = sum(raw)
		r.req.Seed = map[string][]byte{"config.toml": []byte("old")}
		if _, err := r.run(); err != nil {
			t.Fatal(err)
		}
		old := bytes.Clone(d.Bytes())

		newImage := bytes.Clone(raw)
		rand.NewChaCha8([32]byte{9}).Read(newImage[10*mib : 12*mib])
		d.Record, d.NoZeroing = true, !zeroing
		r = newRig(t, serve(t, newImage), d)
		r.req.RawDigest = sum(newImage)
		r.req.Seed = map[string][]byte{"config.toml": []byte("new"), "join-token": []byte("secret")}
		if _, err := r.run(); err != nil {
			t.Fatal(err)
		}
		complete, ops := d.Bytes(), d.Ops()

		found := map[string]int{}
		scratch := make([]byte, size)
		// check builds what a cut leaves of the stable content and does
		// apply on it; the whole of it only where the first sector says that
		// something might boot.
		check := func(what string, stable []byte, apply func(b []byte)) {
			t.Helper()
			first := bytes.Clone(stable[:512])
			if apply(first); !bootable(first) {
				found["no system"]++
				return
			}
			b := scratch[:copy(scratch, stable)]
			apply(b)
			switch {
			case bytes.Equal(b[:512], old[:512]) && oldUsable(old, b):
				found["old"]++
			case bytes.Equal(b, complete):
				found["new"]++
			default:
				tab, err := gpt.Detect(b[:mib])
				t.Fatalf("%s: the disk boots and is neither old nor new (table %+v, %v)", what, tab, err)
			}
		}
		random := rand.New(rand.NewPCG(1, 2))
		stable := bytes.Clone(old)
		var pending []faultdisk.Op
		for i, op := range ops {
			if op.Flush {
				for _, p := range pending {
					p.Apply(stable, p.Len)
				}
				pending = nil
				check(fmt.Sprintf("after flush %d", i), stable, func([]byte) {})
				continue
			}
			pending = append(pending, op)
			// In order, the last one torn at some sector.
			for _, keep := range []int64{0, 512, op.Len / 512 / 2 * 512, op.Len - 512, op.Len} {
				check(fmt.Sprintf("write %d of %d at %d torn at %d", i, len(ops), op.Off, keep), stable, func(b []byte) {
					for _, p := range pending[:len(pending)-1] {
						p.Apply(b, p.Len)
					}
					op.Apply(b, keep)
				})
			}
			// Out of order: any of what was not flushed is lost.
			for range 8 {
				kept := random.Uint64()
				check(fmt.Sprintf("write %d, of those not flushed only %b kept", i, kept), stable, func(b []byte) {
					for k, p := range pending {
						if kept>>(k%64)&1 == 1 {
							p.Apply(b, p.Len)
						}
					}
				})
			}
		}
		if len(pending) > 0 {
			t.Errorf("%d writes were never flushed", len(pending))
		}
		if found["no system"] == 0 || found["new"] == 0 {
			t.Errorf("the test saw only %v", found)
		}
		t.Logf("zeroing %v: %d operations, states seen: %v", zeroing, len(ops), found)
	}
}

// oldUsable says whether the old system is whole: only its table's entries at
// the very start and its backup at the end may be gone, for those are what a
// wipe takes first, and without the first sector intact it would not be old.
func oldUsable(old, b []byte) bool {
	return bytes.Equal(old[mib:len(old)-tailBytes], b[mib:len(b)-tailBytes])
}

// The machine itself loses power: requests fail from then on. Sending the
// deployment again starts from a checked state.
func TestDeployAgainAfterPowerCut(t *testing.T) {
	raw := makeImage(t, imageSize, 512)
	for _, after := range []int{0, 1, 2, 5, 9} {
		d := faultdisk.New(28*mib, 512, 0xAA)
		d.CutAfter = after
		r := newRig(t, serve(t, raw), d)
		r.req.RawDigest = sum(raw)
		if _, err := r.run(); err == nil {
			t.Fatalf("deployed with power cut after %d writes", after)
		}
		again := faultdisk.New(28*mib, 512, 0)
		copy(again.Bytes(), d.Bytes())
		r = newRig(t, serve(t, raw), again)
		r.req.RawDigest = sum(raw)
		r.good(raw)
	}
}
