package deploy

import (
	"encoding/hex"
	"fmt"
	"maps"
	"net/url"
	"runtime"
	"slices"
	"strings"

	"github.com/better-compute/bcd/deploy/disk"
	"github.com/better-compute/bcd/deploy/fat"
)

// Format is how an image travels.
type Format string

// Formats. Unknown is found by content.
const (
	Unknown Format = ""
	Raw     Format = "raw"
	Zstd    Format = "zstd"
	Gzip    Format = "gzip"
	Xz      Format = "xz"
)

// Digest is a SHA-256; nil means that none was given.
type Digest []byte

func (d Digest) String() string { return hex.EncodeToString(d) }

// ZeroPolicy says what becomes of runs of zeros in an image.
type ZeroPolicy int

const (
	// ZeroAuto skips them when the disk can zero a range by itself and did,
	// and writes them otherwise. The read-back covers them either way.
	ZeroAuto ZeroPolicy = iota
	// ZeroWrite always writes them.
	ZeroWrite
)

// Request is one deployment.
type Request struct {
	// URL is an absolute http or https URL. Its query is never logged.
	URL string
	// Format is checked against the content; Unknown takes what the content is.
	Format Format
	// ImageDigest is of the bytes as they travel, RawDigest of the unpacked
	// image. At least one is needed.
	ImageDigest, RawDigest Digest
	// ImageSize and RawSize are checked where they are not 0. Bytes.
	ImageSize, RawSize int64

	Disk    disk.Hints
	Binding disk.Binding

	// Seed files are written to /bcd/seed/ on the EFI system partition; the
	// keys are file names without a directory. They are overwritten in memory
	// when Run returns.
	Seed map[string][]byte

	// Label is the boot entry's; empty is "bcd node".
	Label string
	// Loader is its path on the EFI system partition; empty is the removable
	// media path of this architecture.
	Loader string

	Zeros ZeroPolicy
}

const (
	defaultLabel = "bcd node"
	// SeedDir is where the installed node looks for its first configuration
	// (docs/architecture.md).
	SeedDir = "/bcd/seed/"
	// maxSeed is far more than any seed needs and far less than an ESP has.
	maxSeed = 8 << 20
)

// removableLoader is where firmware looks without any boot entry (UEFI 2.10
// section 3.5.1.1).
func removableLoader() string {
	if runtime.GOARCH == "arm64" {
		return `\EFI\BOOT\BOOTAA64.EFI`
	}
	return `\EFI\BOOT\BOOTX64.EFI`
}

func (r *Request) check() error {
	bad := func(format string, args ...any) error { return fail(BadRequest, format, args...) }
	u, err := url.Parse(r.URL)
	switch {
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
		return bad("image URL must be http://HOST/PATH or https://HOST/PATH")
	case r.ImageDigest == nil && r.RawDigest == nil:
		return bad("image has no expected SHA-256: give that of the file or that of the raw image, else nothing can be trusted")
	case r.ImageDigest != nil && len(r.ImageDigest) != 32, r.RawDigest != nil && len(r.RawDigest) != 32:
		return bad("SHA-256 digests of %d and %d bytes: each must have 32", len(r.ImageDigest), len(r.RawDigest))
	case r.ImageSize < 0 || r.RawSize < 0:
		return bad("image sizes %d and %d must not be negative", r.ImageSize, r.RawSize)
	case !slices.Contains([]Format{Unknown, Raw, Zstd, Gzip, Xz}, r.Format):
		return bad("image format %q is unknown: use raw, zstd, gzip or xz", r.Format)
	}
	if err := r.Disk.Check(); err != nil {
		return bad("%w", err)
	}
	total := 0
	for _, name := range slices.Sorted(maps.Keys(r.Seed)) {
		if strings.ContainsAny(name, `/\`) || name == "" || name[0] == '.' {
			return bad("seed file name %q must not be empty, start with a dot or have a directory", name)
		}
		total += len(r.Seed[name])
	}
	if total > maxSeed || total > fat.MaxFile {
		return bad("seed files have %d bytes, the limit is %d", total, maxSeed)
	}
	if r.Label == "" {
		r.Label = defaultLabel
	}
	if r.Loader == "" {
		r.Loader = removableLoader()
	}
	return nil
}

// redact is a URL as it may be shown: a signed URL's query is a secret.
func redact(raw string) string {
	u, err := url.Parse(raw)
	if err != nil {
		return "the image URL"
	}
	s := fmt.Sprintf("%s://%s%s", u.Scheme, u.Host, u.EscapedPath())
	if u.RawQuery != "" {
		s += "?…"
	}
	return s
}
