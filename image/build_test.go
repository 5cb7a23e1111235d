package image_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"io"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	ucpio "github.com/u-root/u-root/pkg/cpio"

	"github.com/better-compute/bcd/image"
	"github.com/better-compute/bcd/image/gobuild"
	"github.com/better-compute/bcd/image/uki"
	"github.com/better-compute/bcd/supervisor/modules"
	"github.com/better-compute/bcd/supervisor/selfcheck"
)

const epoch = 1767323045

// trustFolder makes what `bcd-gateway keys init` makes, as far as an image
// needs it.
func trustFolder(t *testing.T) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test root"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Unix(epoch, 0), NotAfter: time.Unix(epoch, 0).AddDate(10, 0, 0),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, data := range map[string][]byte{
		"roots.pem":           pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		"join-encryption.jwk": []byte(`{"kty":"EC","crv":"P-256","x":"eA","y":"eQ"}`),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// program builds the trivial init to stand for bcd.
func program(t *testing.T, arch string) string {
	t.Helper()
	root, err := gobuild.Root(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "bcd")
	if err := gobuild.Build(t.Context(), root, "./image/trivial", arch, "0.0.1-test", out); err != nil {
		t.Fatal(err)
	}
	return out
}

func options(t *testing.T, profile, arch string) image.Options {
	t.Helper()
	cache, err := image.DefaultCache()
	if err != nil {
		t.Fatal(err)
	}
	return image.Options{
		Profile: profile, Arch: arch, BCD: program(t, arch), Trust: trustFolder(t), Version: "0.0.1-test",
		Gateway: "https://gateway.example:7443", Out: t.TempDir(), Cache: cache, Epoch: epoch,
	}
}

func read(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// unpack unpacks an initramfs as the kernel does, segment after segment, and
// gives the names in order.
func unpack(t *testing.T, initramfs []byte, root string) []string {
	t.Helper()
	// The base segment is one zstd frame; what follows it begins with the
	// magic number of the next archive.
	second := bytes.LastIndex(initramfs, []byte("070701"+"00000001"))
	if second < 0 || second%4 != 0 {
		t.Fatalf("the trust segment is at %d: not where the kernel looks", second)
	}
	frame := bytes.TrimRight(initramfs[:second], "\x00")
	r, err := zstd.NewReader(nil, zstd.WithDecoderMaxWindow(8<<20))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	base, err := r.DecodeAll(frame, nil)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, segment := range [][]byte{base, initramfs[second:]} {
		records, err := ucpio.ReadAllRecords(ucpio.Newc.Reader(bytes.NewReader(segment)))
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range records {
			names = append(names, r.Name)
			at := filepath.Join(root, r.Name)
			if r.MTime != epoch || r.UID != 0 || r.GID != 0 {
				t.Errorf("%s has time %d, owner %d:%d", r.Name, r.MTime, r.UID, r.GID)
			}
			switch r.Mode & 0o170000 {
			case 0o040000:
				if r.Mode&0o002 != 0 && r.Mode&0o1000 == 0 {
					t.Errorf("folder %s has mode %o: anyone may remove what others put there", r.Name, r.Mode)
				}
				err = os.MkdirAll(at, 0o755)
			case 0o100000:
				var data []byte
				if data, err = io.ReadAll(io.NewSectionReader(r, 0, int64(r.FileSize))); err == nil {
					err = os.WriteFile(at, data, fs.FileMode(r.Mode&0o777)|0o200)
				}
			case 0o120000:
				var target []byte
				if target, err = io.ReadAll(io.NewSectionReader(r, 0, int64(r.FileSize))); err == nil {
					err = os.Symlink(string(target), at)
				}
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	return names
}

// TestImages builds each profile and reads it as firmware, kernel and init
// will: the parts of the UKI, the root file system, init's own check of it,
// and the modules that devices ask for.
func TestImages(t *testing.T) {
	for _, tc := range []struct {
		profile, arch string
		limit         int
		// devices maps a modalias to the module that must take it.
		devices map[string]string
		cmdline string
	}{
		{"virtual", "amd64", 32_000_000, map[string]string{
			"virtio:d00000001v00001AF4":                             "virtio_net",
			"virtio:d00000002v00001AF4":                             "virtio_blk",
			"virtio:d00000008v00001AF4":                             "virtio_scsi",
			"pci:v00008086d00002922sv00001AF4sd00001100bc01sc06i01": "ahci",
			"pci:v00008086d000025ABsv00001AF4sd00001100bc08sc80i00": "i6300esb",
			"acpi:QEMU0002:":                                        "qemu_fw_cfg",
			"pci:v00001D0Fd0000EC20sv00000000sd00000000bc02sc00i00": "ena",
		}, "console=tty0 console=ttyS0,115200"},
		{"metal", "amd64", 60_000_000, map[string]string{
			"pci:v00001B36d00000010sv00001AF4sd00001100bc01sc08i02": "nvme",
			"pci:v00008086d00002922sv00001AF4sd00001100bc01sc06i01": "ahci",
			"pci:v00001000d00000060sv00001000sd00001013bc01sc04i00": "megaraid_sas",
			"pci:v00001000d00000097sv00001028sd00001F45bc01sc07i00": "mpt3sas",
			"pci:v00009005d0000028Fsv0000103Csd00000600bc01sc07i00": "smartpqi",
			"pci:v00008086d000010D3sv00008086sd00000000bc02sc00i00": "e1000e",
			"pci:v00008086d00001592sv00008086sd00000002bc02sc00i00": "ice",
			"pci:v000015B3d00001021sv000015B3sd00000001bc02sc00i00": "mlx5_core",
			"pci:v000014E4d000016D7sv000014E4sd00001402bc02sc00i00": "bnxt_en",
			"pci:v000014E4d0000168Esv00000000sd00000000bc02sc00i00": "bnx2x",
			"pci:v00008086d000025ABsv00001AF4sd00001100bc08sc80i00": "i6300esb",
			"usb:v0627p0001d0000dc00dsc00dp00ic03isc01ip01in00":     "usbhid",
			"acpi:IPI0001:":             "ipmi_si",
			"virtio:d00000001v00001AF4": "virtio_net",
		}, "console=tty0 console=ttyS0,115200"},
		{"virtual", "arm64", 64_000_000, map[string]string{
			"virtio:d00000001v00001AF4": "virtio_net",
			"virtio:d00000002v00001AF4": "virtio_blk",
		}, "console=tty0 console=ttyAMA0,115200"},
	} {
		t.Run(tc.profile+"-"+tc.arch, func(t *testing.T) {
			o := options(t, tc.profile, tc.arch)
			result, err := image.Build(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			unified, initramfs := read(t, result.UKI), read(t, result.Initramfs)
			if len(unified) > tc.limit {
				t.Errorf("UKI has %d bytes, the aim is %d", len(unified), tc.limit)
			}
			if arch, err := uki.Architecture(unified); err != nil || arch != tc.arch {
				t.Errorf("UKI is for %q, %v", arch, err)
			}
			sections, err := uki.Inspect(unified)
			if err != nil {
				t.Fatal(err)
			}
			parts := map[string][]byte{}
			for _, s := range sections {
				parts[s.Name] = s.Data
			}
			if !bytes.Equal(parts[".linux"], read(t, result.Vmlinuz)) || !bytes.Equal(parts[".initrd"], initramfs) {
				t.Error("the UKI's kernel and initramfs are not the two files")
			}
			if !strings.HasPrefix(string(parts[".cmdline"]), tc.cmdline) || !strings.Contains(string(parts[".osrel"]), "ID=bcd\n") {
				t.Errorf("command line %q, os-release %q", parts[".cmdline"], parts[".osrel"])
			}
			root := t.TempDir()
			names := unpack(t, initramfs, root)
			if names[2] != "etc/bcd/MANIFEST" {
				t.Errorf("archive begins with %q: the manifest must be its first file", names[:3])
			}
			if target, err := os.Readlink(filepath.Join(root, "init")); err != nil || target != "/bbin/bcd" {
				t.Errorf("/init leads to %q, %v", target, err)
			}
			checkRoot(t, root, o)
			checkModules(t, root, string(parts[".uname"]), tc.devices)
			checkManifest(t, result, tc.profile == "metal")
		})
	}
}

// checkRoot runs init's own check of the unpacked root, and breaks it once.
func checkRoot(t *testing.T, root string, o image.Options) {
	t.Helper()
	m, warning, err := selfcheck.Verify(root, 1<<20)
	if err != nil || warning != "" {
		t.Errorf("init's check of the root: %v %s", err, warning)
	}
	if m != nil && (m.MinMemMiB < 128 || m.MinMemMiB > 512) {
		t.Errorf("image asks for %d MiB", m.MinMemMiB)
	}
	var facts struct {
		Version   string `json:"version"`
		Profile   string `json:"profile"`
		BuildTime string `json:"build_time"`
		Gateway   string `json:"gateway"`
	}
	if err := json.Unmarshal(read(t, filepath.Join(root, "etc/bcd/image.json")), &facts); err != nil {
		t.Fatal(err)
	}
	if facts.Version != o.Version || facts.Profile != o.Profile || facts.Gateway != o.Gateway || facts.BuildTime != "2026-01-02T03:04:05Z" {
		t.Errorf("image.json says %+v", facts)
	}
	for _, name := range []string{"roots.pem", "join-encryption.jwk"} {
		if !bytes.Equal(read(t, filepath.Join(root, "etc/bcd/trust", name)), read(t, filepath.Join(o.Trust, name))) {
			t.Errorf("%s is not the operator's", name)
		}
	}
	if b := read(t, filepath.Join(root, "etc/resolv.conf")); len(b) != 0 {
		t.Errorf("resolv.conf says %q before any network", b)
	}
	if err := os.Truncate(filepath.Join(root, "bbin/bcd"), 1000); err != nil {
		t.Fatal(err)
	}
	if _, _, err := selfcheck.Verify(root, 64); err == nil || !strings.Contains(err.Error(), "too little memory: have 64 MiB") {
		t.Errorf("init's check of a root that was cut short: %v", err)
	}
}

// checkModules asks the module loader for the drivers of devices.
func checkModules(t *testing.T, root, release string, devices map[string]string) {
	t.Helper()
	dir := os.DirFS(filepath.Join(root, "lib/modules", release))
	index, err := modules.ReadIndex(dir)
	if err != nil {
		t.Fatal(err)
	}
	for alias, want := range devices {
		if got := index.Match(alias); !slices.Contains(got, want) {
			t.Errorf("%s: modules %q, want %s", alias, got, want)
		}
	}
	for line := range strings.Lines(string(read(t, filepath.Join(root, modules.ListPath)))) {
		if name := strings.TrimSpace(line); name != "" && !strings.HasPrefix(name, "#") {
			if found := index.Resolve(name); len(found) == 0 {
				t.Errorf("%s lists %s, which the image does not have", modules.ListPath, name)
			}
		}
	}
	for line := range strings.Lines(string(read(t, filepath.Join(root, "lib/modules", release, "modules.dep")))) {
		for file := range strings.FieldsSeq(strings.Replace(line, ":", "", 1)) {
			if _, err := fs.Stat(dir, file); err != nil {
				t.Errorf("modules.dep names %s: %v", file, err)
			}
		}
	}
}

// checkManifest compares manifest and bill of materials with the files.
func checkManifest(t *testing.T, r image.Result, firmware bool) {
	t.Helper()
	var m image.Manifest
	if err := json.Unmarshal(read(t, r.Manifest), &m); err != nil {
		t.Fatal(err)
	}
	for _, out := range m.Outputs {
		data := read(t, filepath.Join(filepath.Dir(r.Manifest), out.Name))
		if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != out.SHA256 || int64(len(data)) != out.Size {
			t.Errorf("%s is not what the manifest says", out.Name)
		}
	}
	if len(m.Outputs) != 5 || len(m.Inputs) != 3 || len(m.Packages) < 2 || len(m.BCDModules) < 2 || m.Go == "" {
		t.Errorf("manifest names %d results, %d inputs, %d packages, %d modules, go %q", len(m.Outputs), len(m.Inputs), len(m.Packages), len(m.BCDModules), m.Go)
	}
	if firmware != (len(m.Firmware) > 50) {
		t.Errorf("image has %d firmware files", len(m.Firmware))
	}
	var bill struct {
		BOMFormat, SerialNumber string
		Components              []struct{ Type, Name, Version, PURL string }
	}
	if err := json.Unmarshal(read(t, r.SBOM), &bill); err != nil || bill.BOMFormat != "CycloneDX" || !strings.HasPrefix(bill.SerialNumber, "urn:uuid:") {
		t.Errorf("bill of materials: %v, %+v", err, bill)
	}
	for _, p := range m.Packages {
		if !slices.ContainsFunc(bill.Components, func(c struct{ Type, Name, Version, PURL string }) bool {
			return c.Name == p.Name && c.Version == p.Version && strings.HasPrefix(c.PURL, "pkg:deb/debian/")
		}) {
			t.Errorf("bill of materials lacks %s", p.Name)
		}
	}
	missing := string(read(t, r.FirmwareMissing))
	for _, f := range m.Firmware {
		if strings.Contains(missing, "\n"+f.Path+"\t") {
			t.Errorf("%s is in the image and among what is left out", f.Path)
		}
	}
}

// TestRefusals: nothing is written when an input is wrong.
func TestRefusals(t *testing.T) {
	good := options(t, "virtual", "amd64")
	for want, change := range map[string]func(*image.Options){
		"use virtual or metal": func(o *image.Options) { o.Profile = "other" },
		"use amd64 or arm64":   func(o *image.Options) { o.Arch = "i386" },
		"not an https URL":     func(o *image.Options) { o.Gateway = "http://gateway.example" },
		"seconds since 1970":   func(o *image.Options) { o.Epoch = 0 },
		"give one word":        func(o *image.Options) { o.Version = "a b" },
		"join token":           func(o *image.Options) { o.ExtraCmdline = "bcd.token=bcjt_x_y" },
		"bcd binary":           func(o *image.Options) { o.BCD += ".gone" },
		"no trust folder":      func(o *image.Options) { o.Trust = "" },
		"roots.pem":            func(o *image.Options) { put(t, o, "roots.pem", "nothing") },
		"holds a EC PRIVATE KEY": func(o *image.Options) {
			put(t, o, "roots.pem", "-----BEGIN EC PRIVATE KEY-----\nAAAA\n-----END EC PRIVATE KEY-----\n")
		},
		"image-roots.pem":          func(o *image.Options) { put(t, o, "image-roots.pem", "nothing") },
		`private key (member "d")`: func(o *image.Options) { put(t, o, "join-encryption.jwk", `{"kty":"EC","d":"x"}`) },
		"is not a JWK":             func(o *image.Options) { put(t, o, "join-encryption.jwk", "PEM") },
		"want an EC key":           func(o *image.Options) { put(t, o, "join-encryption.jwk", `{"kty":"RSA"}`) },
	} {
		o := good
		change(&o)
		if _, err := image.Build(t.Context(), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	if left, err := os.ReadDir(good.Out); err != nil || len(left) > 0 {
		t.Errorf("%d files were written (%v)", len(left), err)
	}
}

// put replaces one file of a fresh trust folder.
func put(t *testing.T, o *image.Options, name, text string) {
	t.Helper()
	o.Trust = trustFolder(t)
	if err := os.WriteFile(filepath.Join(o.Trust, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestMinMem(t *testing.T) {
	for unpacked, want := range map[int64]int{0: 128, 40 << 20: 192, 80 << 20: 256, 200 << 20: 432, 300 << 20: 640} {
		if got := image.MinMemMiB(unpacked); got != want {
			t.Errorf("%d MiB unpacked: %d MiB of memory, want %d", unpacked>>20, got, want)
		}
	}
}
