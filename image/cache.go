package image

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
)

// DefaultCache is the folder for downloads and what is costly to make, outside
// the work tree: $BCD_CACHE, else "bcd" in the user's cache folder.
func DefaultCache() (string, error) {
	if dir := os.Getenv("BCD_CACHE"); dir != "" {
		return filepath.Abs(dir)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no place for downloads: %w; set BCD_CACHE", err)
	}
	return filepath.Join(dir, "bcd"), nil
}

// cached gives what make makes, from the folder cache when it was made before
// from the same key. Files there appear at once and end with their own digest:
// what was torn or rotted is made again. Several builds may share the folder.
func cached(cache, kind string, key []byte, make func() ([]byte, error)) ([]byte, error) {
	sum := sha256.Sum256(key)
	name := filepath.Join(cache, kind, hex.EncodeToString(sum[:]))
	if stored, err := os.ReadFile(name); err == nil && len(stored) > sha256.Size {
		end := len(stored) - sha256.Size
		if sum := sha256.Sum256(stored[:end]); bytes.Equal(sum[:], stored[end:]) {
			return stored[:end:end], nil
		}
	}
	out, err := make()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return nil, err
	}
	sum = sha256.Sum256(out)
	if err := writeAtomic(name, append(bytes.Clone(out), sum[:]...)); err != nil {
		return nil, fmt.Errorf("cache: %w", err)
	}
	return out, nil
}

// compressCached is compress with a cache: an image for other trust roots has
// the same base segment, and is then made in a second.
func compressCached(cache string, archive []byte) ([]byte, error) {
	sum := sha256.Sum256(archive)
	// Raise the number when compress changes.
	key := fmt.Appendf(nil, "zstd-best-8m 1 %s %x", moduleVersion("github.com/klauspost/compress"), sum)
	return cached(cache, "segment", key, func() ([]byte, error) { return compress(archive) })
}

// moduleVersion is the version of a module in this program.
func moduleVersion(path string) string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, d := range info.Deps {
			if d.Path == path {
				return d.Version
			}
		}
	}
	return "unknown"
}
