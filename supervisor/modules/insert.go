package modules

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
	"golang.org/x/sys/unix"
)

const (
	// maxModule bounds a decompressed module. The largest in Debian's 6.12,
	// amdgpu, has 26 MB.
	maxModule = 128 << 20
	// compressedFile is MODULE_INIT_COMPRESSED_FILE (linux/module.h).
	compressedFile = 4
)

// kernelCompression is the one algorithm that this kernel can decompress
// modules with (CONFIG_MODULE_DECOMPRESS), "" for none.
func kernelCompression() string {
	b, err := os.ReadFile("/sys/module/compression")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// insert loads a module's file into the kernel. That it is there already is no
// error.
func insert(file, params, kernelCan string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	algorithm := map[string]string{".ko": "", ".xz": "xz", ".zst": "zstd", ".gz": "gzip"}[filepath.Ext(file)]
	if algorithm == "" || algorithm == kernelCan {
		flags := 0
		if algorithm != "" {
			flags = compressedFile
		}
		err := unix.FinitModule(int(f.Fd()), params, flags)
		// The kernel may know the algorithm and still not this file's variant.
		if algorithm == "" || !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EINVAL) {
			return present(err)
		}
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return err
		}
	}
	image, err := decompress(f, algorithm, maxModule)
	if err != nil {
		return fmt.Errorf("decompress: %w", err)
	}
	return present(unix.InitModule(image, params))
}

func present(err error) error {
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

// decompress reads all of r, at most limit bytes of it decompressed.
func decompress(r io.Reader, algorithm string, limit int64) ([]byte, error) {
	var in io.Reader
	var err error
	switch algorithm {
	case "xz":
		// The dictionary is as large as the file says, 1 MiB for the kernel's
		// modules; a larger DictCap would only be allocated in vain.
		in, err = xz.ReaderConfig{DictCap: 64 << 10}.NewReader(r)
	case "zstd":
		var z *zstd.Decoder
		z, err = zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(uint64(limit)),
			zstd.WithDecoderMaxWindow(uint64(limit)))
		if err == nil {
			defer z.Close()
			in = z
		}
	case "gzip":
		in, err = gzip.NewReader(r)
	default:
		return nil, fmt.Errorf("unknown algorithm %q", algorithm)
	}
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if _, err := io.Copy(&out, io.LimitReader(in, limit+1)); err != nil {
		return nil, err
	}
	if int64(out.Len()) > limit {
		return nil, fmt.Errorf("larger than %d bytes", limit)
	}
	return out.Bytes(), nil
}
