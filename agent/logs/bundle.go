package logs

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

const (
	// DefaultMaxBytes and MaxBytes bound a bundle before compression.
	DefaultMaxBytes = 64 << 20
	MaxBytes        = 1 << 30
	// maxFiles bounds the sources.
	maxFiles = 64
	// sourceTimeout bounds one source: a sick machine's tools may hang, and
	// the rest of the bundle is worth having all the same.
	sourceTimeout = 2 * time.Minute
	// journalLines bounds what is asked of journalctl: the newest ones.
	journalLines = 200_000
)

// Source is one file of a bundle.
type Source struct {
	// Name is the file's, without folders.
	Name string
	// Write writes the content, as young as since where it can tell. What it
	// writes is redacted behind it. An error of w must be returned as it is.
	Write func(ctx context.Context, w io.Writer, since time.Time) error
}

// JSONSource is a value as indented JSON.
func JSONSource(name string, value func(ctx context.Context) (any, error)) Source {
	return Source{Name: name, Write: func(ctx context.Context, w io.Writer, _ time.Time) error {
		v, err := value(ctx)
		if err != nil {
			return err
		}
		encoder := json.NewEncoder(w)
		encoder.SetIndent("", "  ")
		return encoder.Encode(v)
	}}
}

// Exec runs a program with its standard output to w.
type Exec func(ctx context.Context, w io.Writer, name string, args ...string) error

// SystemExec runs a program of this machine.
func SystemExec(ctx context.Context, w io.Writer, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdout = w
	cmd.WaitDelay = time.Second
	return cmd.Run()
}

// JournalSource is the system journal of one unit, or of the whole machine
// when unit is empty; the newest lines.
func JournalSource(name, unit string, run Exec) Source {
	return Source{Name: name, Write: func(ctx context.Context, w io.Writer, since time.Time) error {
		args := []string{"--no-pager", "--quiet", "--output=short-iso-precise", "--lines=" + strconv.Itoa(journalLines)}
		if unit != "" {
			args = append(args, "--unit="+unit)
		}
		if !since.IsZero() {
			args = append(args, "--since=@"+strconv.FormatInt(since.Unix(), 10))
		}
		return run(ctx, w, "journalctl", args...)
	}}
}

// DmesgSource is the kernel's ring buffer (syslog(2)).
func DmesgSource(name string) Source {
	return Source{Name: name, Write: func(_ context.Context, w io.Writer, _ time.Time) error {
		const sizeBuffer, readAll = 10, 3
		size, err := unix.Klogctl(sizeBuffer, nil)
		if err != nil {
			return fmt.Errorf("kernel log: %w", err)
		}
		buf := make([]byte, size)
		n, err := unix.Klogctl(readAll, buf)
		if err != nil {
			return fmt.Errorf("kernel log: %w", err)
		}
		_, err = w.Write(buf[:n])
		return err
	}}
}

// Bundle is a finished one.
type Bundle struct {
	Path       string
	SHA256     [sha256.Size]byte
	Size       int64
	Files      []string
	Redactions int64
	Truncated  bool
}

// manifest is the last file of a bundle.
type manifest struct {
	Schema     int            `json:"schema"`
	Made       time.Time      `json:"made"`
	Since      time.Time      `json:"since,omitzero"`
	Redactions int64          `json:"redactions"`
	Truncated  bool           `json:"truncated"`
	Files      []manifestFile `json:"files"`
}

type manifestFile struct {
	Name      string `json:"name"`
	Bytes     int64  `json:"bytes"`
	Truncated bool   `json:"truncated,omitempty"`
	// Error is why the file lacks something, or all.
	Error string `json:"error,omitempty"`
}

// builder writes one bundle.
type builder struct {
	redactor *Redactor
	tar      *tar.Writer
	dir      string
	now      time.Time
	left     int64
	manifest manifest
}

// build writes the sources, in order, to a file at path: a tar archive, zstd
// compressed. No source may take more than half of what is left, so that one
// does not push out the others; a source that fails leaves its error in the
// manifest. Only redacted bytes ever reach the disk.
func build(ctx context.Context, path, spoolDir string, sources []Source, r *Redactor, maxBytes int64, since, now time.Time, progress func(file string, done int64)) (b *Bundle, err error) {
	if len(sources) > maxFiles {
		return nil, fmt.Errorf("bundle of %d files; at most %d are allowed", len(sources), maxFiles)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() {
		if closeErr := f.Close(); err == nil && closeErr != nil {
			b, err = nil, closeErr
		}
	}()
	hash, counter := sha256.New(), &counting{}
	compressed, err := zstd.NewWriter(io.MultiWriter(f, hash, counter), zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(1<<20))
	if err != nil {
		return nil, err
	}
	defer compressed.Close() // again is harmless
	w := &builder{redactor: r, tar: tar.NewWriter(compressed), dir: spoolDir, now: now, left: maxBytes,
		manifest: manifest{Schema: 1, Made: now.UTC(), Since: since}}
	for i, source := range sources {
		progress(source.Name, maxBytes-w.left)
		share := w.left
		if i < len(sources)-1 {
			share /= 2
		}
		if err := w.add(ctx, source, since, share); err != nil {
			return nil, err
		}
	}
	b = &Bundle{Path: path, Redactions: w.manifest.Redactions, Truncated: w.manifest.Truncated}
	for _, file := range w.manifest.Files {
		b.Files = append(b.Files, file.Name)
	}
	if err := w.finish(); err != nil {
		return nil, err
	}
	if err := compressed.Close(); err != nil {
		return nil, err
	}
	b.Size, b.SHA256 = counter.n, [sha256.Size]byte(hash.Sum(nil))
	return b, nil
}

// errFull ends a source that has used up its share.
var errFull = errors.New("the bundle's size limit is reached")

// add spools one source, for a tar header needs its size first.
func (w *builder) add(ctx context.Context, source Source, since time.Time, share int64) error {
	spool, err := os.CreateTemp(w.dir, "logs-spool-*")
	if err != nil {
		return err
	}
	defer os.Remove(spool.Name())
	defer spool.Close()
	bounded := &limited{to: spool, left: share}
	clean := w.redactor.NewWriter(bounded)
	sourceCtx, cancel := context.WithTimeout(ctx, sourceTimeout)
	sourceErr := source.Write(sourceCtx, clean, since)
	cancel()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err := clean.Close(); sourceErr == nil {
		sourceErr = err
	}
	if bounded.err != nil {
		return bounded.err // the disk's, not the source's
	}
	entry := manifestFile{Name: source.Name, Bytes: share - bounded.left, Truncated: bounded.full}
	w.manifest.Truncated = w.manifest.Truncated || bounded.full
	w.manifest.Redactions += int64(clean.Count())
	if sourceErr != nil && !bounded.full {
		text, n := w.redactor.Redact([]byte(sourceErr.Error()))
		w.manifest.Redactions += int64(n)
		entry.Error = fmt.Sprintf("%.400s", text)
	}
	w.left -= entry.Bytes
	w.manifest.Files = append(w.manifest.Files, entry)
	if _, err := spool.Seek(0, io.SeekStart); err != nil {
		return err
	}
	return w.entry(source.Name, entry.Bytes, spool)
}

func (w *builder) entry(name string, size int64, content io.Reader) error {
	if err := w.tar.WriteHeader(&tar.Header{Name: name, Size: size, Mode: 0o600, ModTime: w.now.Truncate(time.Second)}); err != nil {
		return err
	}
	_, err := io.CopyN(w.tar, content, size)
	return err
}

func (w *builder) finish() error {
	data, err := json.MarshalIndent(w.manifest, "", "  ")
	if err != nil {
		return err
	}
	data = append(data, '\n')
	if err := w.entry("bundle.json", int64(len(data)), bytes.NewReader(data)); err != nil {
		return err
	}
	return w.tar.Close()
}

type counting struct{ n int64 }

func (c *counting) Write(p []byte) (int, error) {
	c.n += int64(len(p))
	return len(p), nil
}

// limited takes left bytes and no more.
type limited struct {
	to   io.Writer
	left int64
	full bool
	err  error
}

func (l *limited) Write(p []byte) (int, error) {
	if l.err != nil {
		return 0, l.err
	}
	take := p
	if int64(len(take)) > l.left {
		take, l.full = p[:l.left], true
	}
	n, err := l.to.Write(take)
	l.left -= int64(n)
	if err != nil {
		l.err = err
		return n, err
	}
	if l.full {
		return n, errFull
	}
	return n, nil
}

// Hex is the bundle's digest in hex, as the blob store names it.
func (b *Bundle) Hex() string { return hex.EncodeToString(b.SHA256[:]) }
