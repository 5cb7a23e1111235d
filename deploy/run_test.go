package deploy

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/bcd/boot"
	"github.com/better-compute/bcd/deploy/disk"
	"github.com/better-compute/bcd/deploy/faultdisk"
	"github.com/better-compute/bcd/deploy/gpt"
)

func TestDeployEveryFormatOverOldData(t *testing.T) {
	raw := makeImage(t, imageSize, 512)
	for _, f := range []Format{Raw, Zstd, Gzip, Xz} {
		for _, zeroing := range []bool{true, false} {
			t.Run(string(f)+map[bool]string{true: " zeroing", false: " writing zeros"}[zeroing], func(t *testing.T) {
				packed := pack(t, raw, f)
				s := serve(t, packed)
				d := faultdisk.New(28*mib, 512, 0xAA)
				d.NoZeroing = !zeroing
				r := newRig(t, s, d)
				secret := []byte("bcjt_id_canary")
				r.req.Seed = map[string][]byte{"join-token": secret, "config.toml": []byte("role = 'node'\n")}
				r.req.ImageDigest, r.req.RawDigest = sum(packed), sum(raw)
				r.req.RawSize, r.req.ImageSize = int64(len(raw)), int64(len(packed))
				var phases []Phase
				r.deps.Progress = func(p Progress) {
					if n := len(phases); n == 0 || phases[n-1] != p.Phase {
						phases = append(phases, p.Phase)
					}
					if p.Done > p.Total && p.Total > 0 {
						t.Errorf("progress %+v", p)
					}
				}
				res, err := r.run()
				if err != nil {
					t.Fatal(err)
				}
				deployed(t, d.Bytes(), raw, 512, map[string]string{"join-token": "bcjt_id_canary", "config.toml": "role = 'node'\n"})
				if !bytes.Equal(res.ReadbackDigest, sum(raw)) || !bytes.Equal(res.RawDigest, sum(raw)) || !bytes.Equal(res.ImageDigest, sum(packed)) {
					t.Errorf("digests: image %s raw %s read back %s", res.ImageDigest, res.RawDigest, res.ReadbackDigest)
				}
				if res.RawBytes != imageSize || res.ImageBytes != int64(len(packed)) || res.ESP != "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee" || res.BootEntry != "Boot0000" {
					t.Errorf("result %+v", res)
				}
				if skipped := res.SkippedBytes > 15*mib; skipped != zeroing {
					t.Errorf("%d bytes of zeros skipped, zeroing is %v", res.SkippedBytes, zeroing)
				}
				if strings.Trim(string(secret), "\x00") != "" {
					t.Errorf("the secret is still in memory: %q", secret)
				}
				want := []Phase{PhaseSelect, PhasePreflight, PhaseWipe, PhaseStream, PhaseVerify, PhaseSeed, PhaseCommit, PhaseRescan, PhaseBoot}
				if !slices.Equal(phases, want) {
					t.Errorf("phases %v", phases)
				}
				for i, p := range res.Phases {
					if p.Phase != want[i] || p.Duration <= 0 {
						t.Errorf("phase record %d: %+v", i, p)
					}
				}
				v, err := boot.OpenVariables(r.vars)
				if err != nil {
					t.Fatal(err)
				}
				e, err := v.Entry(0)
				if err != nil || e.Label != "bcd test" || e.Loader != removableLoader() || e.Start != 2048 || e.Size != 16384 || e.Number != 1 {
					t.Errorf("boot entry %+v, %v", e, err)
				}
				if next, ok, _ := v.Next(); !ok || next != 0 {
					t.Error("BootNext is not set")
				}
			})
		}
	}
}

// Sending the same deployment again is safe and gives the same disk.
func TestDeployTwice(t *testing.T) {
	raw := makeImage(t, imageSize, 512)
	s := serve(t, raw)
	d := faultdisk.New(28*mib, 512, 0xAA)
	r := newRig(t, s, d)
	r.req.RawDigest = sum(raw)
	if _, err := r.run(); err != nil {
		t.Fatal(err)
	}
	first := bytes.Clone(d.Bytes())
	res, err := r.run()
	if err != nil || res.BootEntry != "Boot0000" {
		t.Fatalf("%+v, %v", res, err)
	}
	// The free space past the image is not part of what was asked for.
	if !bytes.Equal(first[:imageSize], d.Bytes()[:imageSize]) {
		t.Error("the second deployment left another disk")
	}
}

func TestSameSizeAndOneSectorMore(t *testing.T) {
	raw := makeImage(t, imageSize, 512)
	for _, more := range []int64{0, 512, 33 * 512} {
		s := serve(t, raw)
		d := faultdisk.New(imageSize+more, 512, 0xAA)
		r := newRig(t, s, d)
		r.req.RawDigest = sum(raw)
		if _, err := r.run(); err != nil {
			t.Fatalf("%d bytes more: %v", more, err)
		}
		deployed(t, d.Bytes(), raw, 512, nil)
	}
}

func TestNothingIsWrittenWhatCannotEndWell(t *testing.T) {
	raw := makeImage(t, imageSize, 512)
	zst := pack(t, raw, Zstd)
	cut := raw[:len(raw)-mib]
	damaged := bytes.Clone(raw)
	damaged[512+60] ^= 1
	noESP := bytes.Clone(raw)
	noESP = setType(t, noESP)
	odd := raw[:len(raw)-100]

	for name, tc := range map[string]struct {
		content  []byte
		size     int64
		sector   int
		change   func(*rig)
		code     Code
		sentence string
	}{
		"no digest":            {raw, 28 * mib, 512, func(r *rig) { r.req.ImageDigest = nil }, BadRequest, "no expected SHA-256"},
		"short digest":         {raw, 28 * mib, 512, func(r *rig) { r.req.RawDigest = Digest{1} }, BadRequest, "each must have 32"},
		"no URL":               {raw, 28 * mib, 512, func(r *rig) { r.req.URL = "ftp://x" }, BadRequest, "http://HOST"},
		"seed name":            {raw, 28 * mib, 512, func(r *rig) { r.req.Seed = map[string][]byte{"../x": nil} }, BadRequest, "seed file name"},
		"format name":          {raw, 28 * mib, 512, func(r *rig) { r.req.Format = "bzip2" }, BadRequest, "raw, zstd, gzip or xz"},
		"disk too small":       {raw, 20 * mib, 512, nil, ImageTooLarge, "needs 25165824 bytes"},
		"disk too small, zstd": {zst, 20 * mib, 512, nil, ImageTooLarge, "needs 25165824 bytes"},
		"disk a sector short":  {raw, imageSize - 512, 512, nil, ImageTooLarge, "choose a larger disk"},
		"4Kn disk":             {raw, 28 * mib, 4096, nil, SectorSize, "made for sectors of 512 bytes"},
		"image size":           {raw, 28 * mib, 512, func(r *rig) { r.req.ImageSize = 7 }, SizeMismatch, "the command says 7"},
		"raw size":             {raw, 28 * mib, 512, func(r *rig) { r.req.RawSize = 512 }, SizeMismatch, "the command says"},
		"zstd size":            {zst, 28 * mib, 512, func(r *rig) { r.req.RawSize = 512 }, SizeMismatch, ""},
		"format":               {raw, 28 * mib, 512, func(r *rig) { r.req.Format = Zstd }, FormatMismatch, "first bytes are those of raw"},
		"little memory":        {zst, 28 * mib, 512, func(r *rig) { r.deps.Memory = func() (int64, error) { return 8 * mib, nil } }, InsufficientMemory, "8 MiB of memory available"},
		"empty":                {nil, 28 * mib, 512, nil, ImageInvalid, "empty"},
		"not an image":         {[]byte(strings.Repeat("<html>", 4096)), 28 * mib, 512, nil, ImageInvalid, "not a disk image"},
		"damaged table":        {damaged, 28 * mib, 512, nil, ImageInvalid, "checksum"},
		"truncated raw":        {cut, 28 * mib, 512, nil, ImageInvalid, "its partition table is for 25165824"},
		"odd size":             {odd, 28 * mib, 512, nil, ImageInvalid, "cut off"},
		"seed without ESP":     {noESP, 28 * mib, 512, func(r *rig) { r.req.Seed = map[string][]byte{"x": {1}} }, NoESP, "no EFI system partition"},
		"damaged zstd":         {append(bytes.Clone(zst[:20]), raw[:5000]...), 28 * mib, 512, nil, ImageInvalid, "cannot be unpacked"},
		"no disk":              {raw, 28 * mib, 512, func(r *rig) { r.deps.Disks = func(context.Context) ([]disk.Disk, error) { return nil, nil } }, NoDisk, "shows none"},
		"no disk matches":      {raw, 28 * mib, 512, func(r *rig) { r.req.Disk.Serial = "OTHER" }, NoDisk, `serial is not "OTHER"`},
		"bound to another":     {raw, 28 * mib, 512, func(r *rig) { r.req.Binding.Serial = "OTHER" }, DiskMismatch, "SERIAL1"},
		"two disks":            {raw, 28 * mib, 512, two, AmbiguousDisk, "/dev/vdb"},
		"disk busy":            {raw, 28 * mib, 512, func(r *rig) { r.deps.Open = func(disk.Disk) (Target, error) { return nil, disk.ErrBusy } }, DiskBusy, "in use"},
		"BeforeWrite says no":  {raw, 28 * mib, 512, func(r *rig) { r.deps.BeforeWrite = func(disk.Disk) error { return errors.New("too late") } }, Failed, "too late"},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, tc.content)
			d := faultdisk.New(tc.size, tc.sector, 0xAA)
			r := newRig(t, s, d)
			r.req.ImageDigest = sum(tc.content)
			if tc.change != nil {
				tc.change(r)
			}
			e := r.fails(tc.code, tc.sentence)
			if e.Wrote || d.Writes() != 0 {
				t.Errorf("%d writes", d.Writes())
			}
		})
	}
}

func two(r *rig) {
	r.deps.Disks = func(context.Context) ([]disk.Disk, error) {
		return []disk.Disk{testDisk("vda", 28*mib, "A"), testDisk("vdb", 28*mib, "B")}, nil
	}
}

// setType makes the ESP a partition of another type.
func setType(t testing.TB, b []byte) []byte {
	name := filepath.Join(t.TempDir(), "x")
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	tool(t, "sgdisk", "-t", "1:8300", name)
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestWhatIsFoundLateLeavesNothingBootable(t *testing.T) {
	raw := makeImage(t, imageSize, 512)
	zst, gz := pack(t, raw, Zstd), pack(t, raw, Gzip)
	flipped := bytes.Clone(raw)
	flipped[12*mib] ^= 1
	long := append(bytes.Clone(raw), make([]byte, 20*mib)...)
	for name, tc := range map[string]struct {
		content  []byte
		digest   []byte
		change   func(*rig, *faultdisk.Disk)
		code     Code
		sentence string
	}{
		"wrong digest":          {flipped, sum(raw), nil, DigestMismatch, "nothing bootable is left"},
		"truncated zstd":        {zst[:len(zst)/2], sum(zst), nil, ShortBody, "cut off before it was served"},
		"truncated gzip":        {gz[:len(gz)/2], sum(gz), nil, ShortBody, "cut off before it was served"},
		"larger than it said":   {pack(t, long, Gzip), nil, nil, ImageTooLarge, "larger than /dev/vda"},
		"wrong raw digest":      {zst, sum(zst), func(r *rig, _ *faultdisk.Disk) { r.req.RawDigest = sum(nil) }, DigestMismatch, "unpacked image"},
		"wrong raw size":        {gz, sum(gz), func(r *rig, _ *faultdisk.Disk) { r.req.RawSize = imageSize + mib }, SizeMismatch, "unpacked to"},
		"bad sector on write":   {raw, sum(raw), func(_ *rig, d *faultdisk.Disk) { d.FailAt = 15 * mib }, DiskIO, "input/output error"},
		"disk forgets":          {raw, sum(raw), func(_ *rig, d *faultdisk.Disk) { d.CorruptAt = 15 * mib }, ReadbackMismatch, "gives back other data"},
		"disk lies about zeros": {raw, sum(raw), func(_ *rig, d *faultdisk.Disk) { d.LyingZeroing = true }, ReadbackMismatch, "gives back other data"},
		"table does not stick":  {raw, sum(raw), func(_ *rig, d *faultdisk.Disk) { d.CorruptAt = 700 }, ReadbackMismatch, ""},
		"no loader":             {raw, sum(raw), func(r *rig, _ *faultdisk.Disk) { r.req.Loader = `\EFI\none.efi` }, LoaderMissing, `\EFI\none.efi`},
		"seed name not for FAT": {raw, sum(raw), func(r *rig, _ *faultdisk.Disk) {
			r.req.Seed = map[string][]byte{"ünusable": []byte("x"), "join-token": []byte("canary")}
		}, SeedFailed, "file name"},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, tc.content)
			d := faultdisk.New(28*mib, 512, 0xAA)
			r := newRig(t, s, d)
			if r.req.ImageDigest = tc.digest; tc.digest == nil {
				r.req.ImageDigest = sum(tc.content)
			}
			if tc.change != nil {
				tc.change(r, d)
			}
			if e := r.fails(tc.code, tc.sentence); !e.Wrote {
				t.Error("says that nothing was written")
			}
			if bytes.Contains(d.Bytes(), []byte("canary")) {
				t.Error("a secret stays on a disk that was not finished")
			}
			v, err := boot.OpenVariables(r.vars)
			if err != nil {
				t.Fatal(err)
			}
			if order, err := v.Order(); order != nil || err != nil {
				t.Errorf("a boot entry was made: %v %v", order, err)
			}
		})
	}
}

func TestReadOnlyDisk(t *testing.T) {
	raw := makeImage(t, imageSize, 512)
	d := faultdisk.New(28*mib, 512, 0xAA)
	d.ReadOnly = true
	r := newRig(t, serve(t, raw), d)
	r.req.RawDigest = sum(raw)
	_, err := r.run()
	var e *Error
	if !errors.As(err, &e) || e.Code != DiskIO || !strings.Contains(e.Message, "read-only") || d.Bytes()[0] != 0xAA {
		t.Errorf("%v", err)
	}
}

func TestBIOSMachine(t *testing.T) {
	raw := makeImage(t, imageSize, 512)
	r := newRig(t, serve(t, raw), faultdisk.New(28*mib, 512, 0))
	r.req.RawDigest = sum(raw)
	r.deps.Variables = func() (*boot.Variables, error) { return nil, boot.ErrNoVariables }
	res, err := r.run()
	if err != nil || res.BootEntry != "" || !strings.Contains(strings.Join(res.Notes, " "), "BIOS") {
		t.Errorf("%+v, %v", res, err)
	}
}

func TestFirmwareThatCannotStoreAnEntry(t *testing.T) {
	raw := makeImage(t, imageSize, 512)
	broken := func() (*boot.Variables, error) { return nil, boot.ErrVariablesFull }
	r := newRig(t, serve(t, raw), faultdisk.New(28*mib, 512, 0))
	r.req.RawDigest, r.deps.Variables = sum(raw), broken
	res, err := r.run()
	if err != nil || !strings.Contains(strings.Join(res.Notes, " "), "by itself") {
		t.Errorf("default loader: %v %v", res.Notes, err)
	}
	r = newRig(t, serve(t, raw), faultdisk.New(28*mib, 512, 0))
	r.req.RawDigest, r.deps.Variables, r.req.Loader = sum(raw), broken, `\EFI\other\loader.efi`
	_, err = r.run()
	var e *Error
	if !errors.As(err, &e) || e.Code != BootEntryFailed || e.Phase != PhaseBoot {
		t.Errorf("other loader: %v", err)
	}
}

func TestPartitionsThatDoNotShow(t *testing.T) {
	raw := makeImage(t, imageSize, 512)
	r := newRig(t, serve(t, raw), faultdisk.New(28*mib, 512, 0))
	r.req.RawDigest = sum(raw)
	r.deps.PartitionReady = func(_ disk.Disk, p gpt.Partition, _ int) bool { return p.Number == 1 }
	res, err := r.run()
	if err != nil || !strings.Contains(strings.Join(res.Notes, " "), "did not show partition 2") {
		t.Errorf("%v %v", res.Notes, err)
	}
}

func TestCancelAndDeadline(t *testing.T) {
	raw := makeImage(t, imageSize, 512)
	for name, tc := range map[string]struct {
		cause error
		code  Code
	}{"cancel": {context.Canceled, Cancelled}, "deadline": {context.DeadlineExceeded, DeadlineExceeded}} {
		ctx, cancel := testContext(tc.cause)
		s := serve(t, raw)
		s.handle = func(w http.ResponseWriter, q *http.Request, _ int) bool {
			w.Header().Set("Content-Length", "25165824")
			w.Write(raw[:10*mib])
			w.(http.Flusher).Flush()
			cancel()
			<-q.Context().Done()
			return true
		}
		d := faultdisk.New(28*mib, 512, 0xAA)
		r := newRig(t, s, d)
		r.req.RawDigest = sum(raw)
		_, err := Run(ctx, r.req, r.deps)
		var e *Error
		if !errors.As(err, &e) || e.Code != tc.code {
			t.Errorf("%s: %v", name, err)
		}
		if d.Writes() > 0 {
			noTable(t, d.Bytes())
		}
	}
}

// testContext ends with the cause that a test wants, when it wants.
func testContext(cause error) (context.Context, func()) {
	ctx, cancel := context.WithCancel(context.Background())
	return contextWith{ctx, cause}, cancel
}

type contextWith struct {
	context.Context
	cause error
}

func (c contextWith) Err() error {
	if c.Context.Err() != nil {
		return c.cause
	}
	return nil
}
