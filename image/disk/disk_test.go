package disk

import (
	"bytes"
	"context"
	"crypto/sha256"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/filesystem/fat32"
	"github.com/klauspost/compress/zstd"
)

// fakeUKI looks like a PE file to Build and does not compress to nothing.
func fakeUKI(size int) []byte {
	out := make([]byte, 0, size+sha256.Size)
	for sum := sha256.Sum256(nil); len(out) < size; sum = sha256.Sum256(sum[:]) {
		out = append(out, sum[:]...)
	}
	out = out[:size]
	copy(out, "MZ")
	return out
}

func build(t *testing.T, o Options) []byte {
	t.Helper()
	image, err := Build(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return image
}

// tool runs a checker and demands that it is content.
func tool(t *testing.T, name string, args ...string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		path = "/usr/sbin/" + name
	}
	out, err := exec.CommandContext(t.Context(), path, args...).CombinedOutput()
	if err != nil {
		t.Errorf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}

func TestCheckersAreContent(t *testing.T) {
	uki := fakeUKI(20<<20 + 77)
	image := build(t, Options{UKI: uki, Arch: "amd64", Epoch: 1767323045, Files: map[string][]byte{
		"BCD/SEED/TOKEN": []byte("x"), "BCD/EMPTY": nil, "README.TXT": bytes.Repeat([]byte("line\n"), 500),
	}})
	if len(image) > MaxSize || len(image)%mib != 0 {
		t.Errorf("image has %d bytes", len(image))
	}
	dir := t.TempDir()
	whole, esp, data := filepath.Join(dir, "disk"), filepath.Join(dir, "esp"), filepath.Join(dir, "data")
	dataAt := len(image) - mib - dataSize
	for name, b := range map[string][]byte{whole: image, esp: image[mib:dataAt], data: image[dataAt : dataAt+dataSize]} {
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out := tool(t, "sgdisk", "-v", whole); !strings.Contains(out, "No problems found") {
		t.Errorf("sgdisk: %s", out)
	}
	info := tool(t, "sgdisk", "-i", "2", whole)
	if !strings.Contains(strings.ToLower(info), DataType) || !strings.Contains(info, DataLabel) {
		t.Errorf("data partition: %s", info)
	}
	if info := tool(t, "sgdisk", "-i", "1", whole); !strings.Contains(strings.ToLower(info), ESPType) {
		t.Errorf("esp: %s", info)
	}
	out := tool(t, "fsck.fat", "-n", "-v", esp)
	for _, complaint := range []string{"differ", "wrong", "Dirty", "not match", "Free cluster summary", "bad"} {
		if strings.Contains(out, complaint) {
			t.Errorf("fsck.fat says %q:\n%s", complaint, out)
		}
	}
	tool(t, "e2fsck", "-f", "-n", data)

	// Another implementation reads the same bytes back.
	f, err := os.Open(esp)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fs, err := fat32.Read(file.New(f, true), int64(dataAt-mib), 0, sectorSize)
	if err != nil {
		t.Fatal(err)
	}
	// (An empty file has no cluster, which that implementation does not read.)
	for name, want := range map[string][]byte{"EFI/BOOT/BOOTX64.EFI": uki, "BCD/SEED/TOKEN": []byte("x"), "README.TXT": bytes.Repeat([]byte("line\n"), 500)} {
		got, err := fs.ReadFile(name)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %d bytes, %v; want %d", name, len(got), err, len(want))
		}
	}
}

func TestSameBytes(t *testing.T) {
	o := Options{UKI: fakeUKI(5 << 20), Arch: "arm64", Epoch: 1767323045}
	a := build(t, o)
	t.Setenv("TZ", "Pacific/Chatham")
	old := time.Local
	time.Local = time.FixedZone("far", 45900)
	defer func() { time.Local = old }()
	b := build(t, o)
	if !bytes.Equal(a, b) {
		t.Error("two builds of one image differ")
	}
	ca, err := Compress(a)
	if err != nil {
		t.Fatal(err)
	}
	cb, err := Compress(b)
	if err != nil || !bytes.Equal(ca, cb) {
		t.Errorf("compressed images differ (%v)", err)
	}
	r, err := zstd.NewReader(nil, zstd.WithDecoderMaxWindow(8<<20))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if back, err := r.DecodeAll(ca, nil); err != nil || !bytes.Equal(back, a) {
		t.Errorf("decompressed image differs (%v)", err)
	}
	o.UKI[len(o.UKI)-1]++
	if c := build(t, o); bytes.Equal(c[mib/2:mib], a[mib/2:mib]) && bytes.Equal(c[512:1024], a[512:1024]) {
		t.Error("another kernel gives the same disk id")
	}
}

func TestBadInput(t *testing.T) {
	good := fakeUKI(1 << 20)
	for name, tc := range map[string]struct {
		o    Options
		want string
	}{
		"no pe file":    {Options{UKI: []byte("ELF"), Arch: "amd64"}, "not a pe file"},
		"architecture":  {Options{UKI: good, Arch: "riscv64"}, "use amd64 or arm64"},
		"too large":     {Options{UKI: fakeUKI(50 << 20), Arch: "amd64"}, "more than"},
		"long name":     {Options{UKI: good, Arch: "amd64", Files: map[string][]byte{"CONFIGURATION": nil}}, "8.3"},
		"small letters": {Options{UKI: good, Arch: "amd64", Files: map[string][]byte{"bcd/X": nil}}, "characters"},
		"twice":         {Options{UKI: good, Arch: "amd64", Files: map[string][]byte{"EFI/BOOT": nil}}, "twice"},
		"below a file":  {Options{UKI: good, Arch: "amd64", Files: map[string][]byte{"A": nil, "A/B": nil}}, "is a file"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := Build(context.Background(), tc.o); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
		})
	}
}
