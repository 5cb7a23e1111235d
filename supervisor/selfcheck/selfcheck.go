// Package selfcheck tells whether the initramfs that is running is whole.
//
// A kernel that runs out of memory while it unpacks an initramfs says so in one
// line and boots what there is: files are missing or short. The image therefore
// carries, as the first file of its archive, a manifest of all the others:
//
//	bcd-initramfs-manifest 1 min-mem-mib=384
//	<sha256, 64 hex digits> <size in bytes> /path
//	...
//
// sorted by path, one line for every regular file except the manifest itself
// and the files of later archive segments.
package selfcheck

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Path is where the manifest is in the initramfs.
const Path = "/etc/bcd/MANIFEST"

const magic = "bcd-initramfs-manifest 1 min-mem-mib="

// Bounds of a manifest. A metal image has a few thousand files; 4096 is the
// kernel's PATH_MAX.
const (
	maxFiles   = 100_000
	maxLine    = 4096 + 64 + 24
	maxMinMem  = 1 << 20 // a TiB
	maxFileLen = 1 << 40
)

// Manifest is a parsed manifest.
type Manifest struct {
	// MinMemMiB is how much memory, as the kernel counts it (MemTotal), the
	// image needs to unpack and to do its work, in MiB.
	MinMemMiB int
	Files     []File
}

// File is one line.
type File struct {
	Path string // absolute and clean
	Size int64
	Sum  [sha256.Size]byte
}

// Parse reads a manifest. It refuses one that is cut short in a line, out of
// order, or that names a path twice or an unclean one.
func Parse(r io.Reader) (*Manifest, error) {
	in := bufio.NewReaderSize(r, maxLine)
	first, err := readLine(in)
	if err != nil {
		return nil, fmt.Errorf("manifest line 1: %w", err)
	}
	num, ok := strings.CutPrefix(first, magic)
	if !ok {
		return nil, fmt.Errorf("manifest line 1 is %.60q, want %q and a number", first, magic)
	}
	m := &Manifest{}
	if m.MinMemMiB, err = strconv.Atoi(num); err != nil || m.MinMemMiB < 0 || m.MinMemMiB > maxMinMem {
		return nil, fmt.Errorf("manifest line 1: min-mem-mib is %.20q, want a number from 0 to %d", num, maxMinMem)
	}
	for n := 2; ; n++ {
		line, err := readLine(in)
		if err == io.EOF {
			return m, nil
		}
		if err != nil {
			return nil, fmt.Errorf("manifest line %d: %w", n, err)
		}
		f, err := parseFile(line)
		if err != nil {
			return nil, fmt.Errorf("manifest line %d: %w", n, err)
		}
		if len(m.Files) > 0 && m.Files[len(m.Files)-1].Path >= f.Path {
			return nil, fmt.Errorf("manifest line %d: %q is out of order", n, f.Path)
		}
		if len(m.Files) == maxFiles {
			return nil, fmt.Errorf("manifest has more than %d files", maxFiles)
		}
		m.Files = append(m.Files, f)
	}
}

// readLine returns a line without its newline; io.EOF only at a line's start.
func readLine(in *bufio.Reader) (string, error) {
	b, err := in.ReadSlice('\n')
	switch {
	case err == nil:
		return string(b[:len(b)-1]), nil
	case errors.Is(err, bufio.ErrBufferFull):
		return "", fmt.Errorf("longer than %d bytes", maxLine)
	case err == io.EOF && len(b) > 0:
		return "", fmt.Errorf("cut short: %w", io.ErrUnexpectedEOF)
	}
	return "", err
}

func parseFile(line string) (File, error) {
	var f File
	sum, rest, ok := strings.Cut(line, " ")
	size, name, ok2 := strings.Cut(rest, " ")
	if !ok || !ok2 {
		return f, fmt.Errorf("%.60q is not: sha256 size /path", line)
	}
	if len(sum) != 2*sha256.Size {
		return f, fmt.Errorf("digest %.80q has %d characters, want %d", sum, len(sum), 2*sha256.Size)
	}
	if _, err := hex.Decode(f.Sum[:], []byte(sum)); err != nil {
		return f, fmt.Errorf("digest: %w", err)
	}
	var err error
	if f.Size, err = strconv.ParseInt(size, 10, 64); err != nil || f.Size < 0 || f.Size > maxFileLen {
		return f, fmt.Errorf("size %.30q is not a number from 0 to %d", size, int64(maxFileLen))
	}
	if !path.IsAbs(name) || path.Clean(name) != name || name == "/" || strings.ContainsRune(name, 0) {
		return f, fmt.Errorf("path %.80q is not absolute and clean", name)
	}
	f.Path = name
	return f, nil
}

// DamageError says which files are not as the manifest has them.
type DamageError struct {
	Total int      // files in the manifest
	Bad   []string // "/path: what is wrong", sorted
}

func (e *DamageError) Error() string {
	first := ""
	if len(e.Bad) > 0 {
		first = ", the first: " + e.Bad[0]
	}
	return fmt.Sprintf("%d of %d files are missing or damaged%s", len(e.Bad), e.Total, first)
}

// CheckSizes looks at every file below root ("/" in a real system) without
// reading it: is it there, regular, of its size, and, on a tmpfs, without holes.
// The kernel sets a file's size before it writes it, so what a shortage of memory
// leaves behind is a hole, which a tmpfs shows in the blocks of the file; there,
// and only there (proof is true), whole sizes prove whole files. The error is a
// [*DamageError].
func (m *Manifest) CheckSizes(root string) (proof bool, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(root, &st); err == nil {
		proof = st.Type == unix.TMPFS_MAGIC
	}
	return proof, m.damage(m.each(func(f File) error { return checkSize(root, f, proof) }))
}

// CheckDigests reads and hashes every file below root, on all CPUs. The error is
// a [*DamageError].
func (m *Manifest) CheckDigests(root string) error {
	return m.damage(m.each(func(f File) error { return checkSum(root, f) }))
}

func (m *Manifest) damage(bad []string) error {
	if len(bad) == 0 {
		return nil
	}
	return &DamageError{Total: len(m.Files), Bad: bad}
}

// each calls f for every file on all CPUs and returns what was wrong, sorted.
func (m *Manifest) each(f func(File) error) []string {
	var (
		mu  sync.Mutex
		bad []string
		wg  sync.WaitGroup
	)
	work := make(chan File)
	for range max(1, runtime.GOMAXPROCS(0)) {
		wg.Go(func() {
			for file := range work {
				if err := f(file); err != nil {
					mu.Lock()
					bad = append(bad, file.Path+": "+err.Error())
					mu.Unlock()
				}
			}
		})
	}
	for _, file := range m.Files {
		work <- file
	}
	close(work)
	wg.Wait()
	slices.Sort(bad)
	return bad
}

func checkSize(root string, f File, holes bool) error {
	fi, err := os.Lstat(filepath.Join(root, f.Path))
	switch {
	case errors.Is(err, os.ErrNotExist):
		return errors.New("missing")
	case err != nil:
		return err
	case !fi.Mode().IsRegular():
		return fmt.Errorf("is %s, not a regular file", fi.Mode())
	case fi.Size() != f.Size:
		return fmt.Errorf("has %d bytes of %d", fi.Size(), f.Size)
	}
	// Blocks are of 512 bytes, whatever the file system's own size.
	if st, ok := fi.Sys().(*syscall.Stat_t); ok && holes && st.Blocks*512 < f.Size {
		return fmt.Errorf("has only %d bytes of %d written", st.Blocks*512, f.Size)
	}
	return nil
}

func checkSum(root string, f File) error {
	file, err := os.Open(filepath.Join(root, f.Path))
	if err != nil {
		return err
	}
	defer file.Close()
	h := sha256.New()
	// One byte more than its size is enough to see that it grew.
	n, err := io.Copy(h, io.LimitReader(file, f.Size+1))
	if err != nil {
		return err
	}
	if n != f.Size {
		return fmt.Errorf("has %d bytes of %d", n, f.Size)
	}
	if [sha256.Size]byte(h.Sum(nil)) != f.Sum {
		return errors.New("its content has changed")
	}
	return nil
}

// Verify reads the manifest at [Path] below root and checks the files; haveMiB
// is the machine's memory. Where sizes prove the files whole they are all that it
// looks at, because hashing takes seconds on a slow machine and the boot waits:
// the caller then calls Manifest.CheckDigests when there is time. The warning, if
// any, and the error, a [*Failure], are meant for the console.
func Verify(root string, haveMiB int) (m *Manifest, warning string, err error) {
	file, err := os.Open(filepath.Join(root, Path))
	if err != nil {
		return nil, "", &Failure{HaveMiB: haveMiB, Err: fmt.Errorf("the manifest cannot be read: %w", err)}
	}
	defer file.Close()
	if m, err = Parse(file); err != nil {
		return nil, "", &Failure{HaveMiB: haveMiB, Err: err}
	}
	proof, err := m.CheckSizes(root)
	if err == nil && !proof {
		err = m.CheckDigests(root)
	}
	if err != nil {
		return nil, "", &Failure{HaveMiB: haveMiB, NeedMiB: m.MinMemMiB, Err: err}
	}
	if haveMiB > 0 && haveMiB < m.MinMemMiB {
		warning = fmt.Sprintf("this machine has little memory: have %d MiB, need %d MiB; it may fail later", haveMiB, m.MinMemMiB)
	}
	return m, warning, nil
}

// Failure is why the system must not go on.
type Failure struct {
	HaveMiB, NeedMiB int // NeedMiB is 0 when the manifest could not be read
	Err              error
}

// Error is meant for the person at the console.
func (f *Failure) Error() string {
	text := "this system did not unpack whole: " + f.Err.Error()
	switch {
	case f.NeedMiB == 0:
		return fmt.Sprintf("%s\nhave %d MiB of memory; boot it again, with more memory if that is little", text, f.HaveMiB)
	case f.HaveMiB < f.NeedMiB:
		return fmt.Sprintf("%s\ntoo little memory: have %d MiB, need %d MiB", text, f.HaveMiB, f.NeedMiB)
	}
	return fmt.Sprintf("%s\nmemory is not the cause (have %d MiB, need %d MiB): the image is damaged; fetch or build it again",
		text, f.HaveMiB, f.NeedMiB)
}

func (f *Failure) Unwrap() error { return f.Err }
