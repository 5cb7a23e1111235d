package image

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"runtime/debug"
)

// encoderName is part of the cache key: raise it when compress changes, and
// with each version of the encoder that gives other bytes.
const encoderName = "zstd-best-8m-1"

// compressCached is compress with a cache: an image for other trust roots has
// the same base segment, and is then made in a second.
func compressCached(cache string, archive []byte) ([]byte, error) {
	key := sha256.New()
	key.Write([]byte(encoderName + " " + encoderVersion() + "\n"))
	key.Write(archive)
	name := filepath.Join(cache, "segment", hex.EncodeToString(key.Sum(nil))+".zst")
	if stored, err := os.ReadFile(name); err == nil && len(stored) > sha256.Size {
		// The file ends with its own digest: what was torn or rotted is made
		// again.
		body, digest := stored[:len(stored)-sha256.Size], stored[len(stored)-sha256.Size:]
		if sum := sha256.Sum256(body); bytes.Equal(sum[:], digest) {
			return bytes.Clone(body), nil
		}
	}
	out, err := compress(archive)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return nil, err
	}
	sum := sha256.Sum256(out)
	if err := writeAtomic(name, append(bytes.Clone(out), sum[:]...)); err != nil {
		return nil, err
	}
	return out, nil
}

// encoderVersion is the version of the zstd encoder in this program.
func encoderVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, d := range info.Deps {
			if d.Path == "github.com/klauspost/compress" {
				return d.Version
			}
		}
	}
	return "unknown"
}
