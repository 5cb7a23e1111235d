package netboot

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/durable"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// servingFile lists what was served last: a table that came since may name
	// files that are not here yet.
	servingFile    = "serving.bin"
	maxServingFile = 256 << 10
	partSuffix     = ".part"
	// DefaultCacheBytes has room for two versions of two architectures.
	DefaultCacheBytes = 2 << 30
	// checkEvery is how often the files are read again: a bad sector should
	// not be found by a machine that boots.
	checkEvery = 6 * time.Hour
	// fetchRetryFirst and fetchRetryMax bound the wait after a failed fetch.
	fetchRetryFirst = time.Second
	fetchRetryMax   = time.Minute
)

// Artefacts keeps the files that machines boot from. A file is served only
// once its size and SHA-256 were found to be those of the signed table. The
// files of an architecture change together, so that no machine gets a kernel
// of one version and an initramfs of another; until the new ones are whole,
// the last good ones are served. It is safe for concurrent use.
type Artefacts struct {
	// Dir is this cache's alone.
	Dir string
	// Budget bounds the bytes in Dir; 0 is DefaultCacheBytes.
	Budget int64
	// Fetch reads a blob; see Gateway.
	Fetch func(ctx context.Context, sum string, offset int64) (body io.ReadCloser, from int64, err error)
	Clock clock.Clock
	Log   *slog.Logger
	// Changed, when not nil, is called after what is served has changed.
	Changed func()

	mu sync.Mutex
	// wanted are the table's, ready those that are here and were verified, by
	// digest; serving is what machines are offered.
	wanted   []*bcdv1.BootArtefact
	ready    map[string]bool
	serving  []*bcdv1.BootArtefact
	problems map[string]string
	wake     chan struct{}
}

// File is one artefact, open. Close it.
type File struct {
	*os.File
	artefact *bcdv1.BootArtefact
}

// Size is the file's exact length in bytes.
func (f *File) Size() int64 { return f.artefact.GetSize() }

// Artefact is what the file is. It must not be changed.
func (f *File) Artefact() *bcdv1.BootArtefact { return f.artefact }

// Load reads the cache of the last run and verifies every file in it. What is
// damaged is removed, and is a problem until it was fetched again.
func (c *Artefacts) Load() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ready, c.problems = map[string]bool{}, map[string]string{}
	c.wake = make(chan struct{}, 1)
	if c.Budget == 0 {
		c.Budget = DefaultCacheBytes
	}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return fmt.Errorf("artefact cache: %w", err)
	}
	data, err := durable.ReadFile(filepath.Join(c.Dir, servingFile), maxServingFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("artefact cache: %w", err)
	}
	kept := &bcdv1.BootTable{}
	if err := proto.Unmarshal(data, kept); err != nil {
		c.problems["list"] = "the list of served files was damaged and is made anew"
		kept = &bcdv1.BootTable{}
	}
	for _, a := range kept.GetArtefacts() {
		if checkArtefact(a) == nil && c.verify(a) {
			c.serving = append(c.serving, a)
		}
	}
	return nil
}

// Want says what the table names now.
func (c *Artefacts) Want(artefacts []*bcdv1.BootArtefact) {
	c.mu.Lock()
	c.wanted = artefacts
	for key := range c.problems {
		if !slices.ContainsFunc(artefacts, func(a *bcdv1.BootArtefact) bool { return sumOf(a) == key }) {
			delete(c.problems, key)
		}
	}
	for _, a := range artefacts {
		c.verify(a)
	}
	changed := c.settle()
	c.mu.Unlock()
	if changed && c.Changed != nil {
		c.Changed()
	}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// Serving gives what can be offered now. It must not be changed.
func (c *Artefacts) Serving() []*bcdv1.BootArtefact {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.serving
}

// Digests gives the SHA-256 of what can be served now, for Sync.
func (c *Artefacts) Digests() (out [][]byte) {
	for _, a := range c.Serving() {
		if !slices.ContainsFunc(out, func(d []byte) bool { return string(d) == string(a.GetSha256()) }) {
			out = append(out, a.GetSha256())
		}
	}
	return out
}

// Problems are sentences about what could not be fetched or kept.
func (c *Artefacts) Problems() (out []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, problem := range c.problems {
		out = append(out, problem)
	}
	slices.Sort(out)
	return out
}

// Open gives the artefact that is advertised as path (see ArtefactPath). The
// slashes at its front, doubled ones and backward ones count as firmware means
// them. Whatever is not an artefact is fs.ErrNotExist; nothing else in the
// file system can be named.
func (c *Artefacts) Open(path string) (*File, error) {
	clean := cleanPath(path)
	c.mu.Lock()
	var found *bcdv1.BootArtefact
	for _, a := range append(slices.Clip(c.serving), c.wanted...) {
		if c.ready[sumOf(a)] && ArtefactPath(a) == clean {
			found = a
			break
		}
	}
	c.mu.Unlock()
	if found == nil {
		return nil, fmt.Errorf("%.128q: %w", path, fs.ErrNotExist)
	}
	f, err := os.Open(c.path(found))
	if err != nil {
		return nil, err
	}
	return &File{File: f, artefact: found}, nil
}

// maxPath bounds a requested name; ours have less than 100 characters.
const maxPath = 512

func cleanPath(path string) string {
	if len(path) > maxPath {
		return ""
	}
	parts := strings.FieldsFunc(path, func(r rune) bool { return r == '/' || r == '\\' })
	return strings.Join(parts, "/")
}

func sumOf(a *bcdv1.BootArtefact) string               { return hex.EncodeToString(a.GetSha256()) }
func (c *Artefacts) path(a *bcdv1.BootArtefact) string { return filepath.Join(c.Dir, sumOf(a)) }

// verify reads a's file, unless it is known to be good, and removes it when it
// is not what it should be. The caller has the lock.
func (c *Artefacts) verify(a *bcdv1.BootArtefact) bool {
	sum := sumOf(a)
	if c.ready[sum] {
		return true
	}
	size, digest, err := hashFile(c.path(a))
	if errors.Is(err, fs.ErrNotExist) {
		return false
	}
	if err == nil && size == a.GetSize() && digest == sum {
		c.ready[sum] = true
		return true
	}
	c.problems[sum] = fmt.Sprintf("the kept file %s was damaged and is fetched again", a.GetName())
	c.Log.Error("a kept boot artefact was damaged and is fetched again", "name", a.GetName(), "sha256", sum, "error", err)
	if err := durable.Remove(c.path(a)); err != nil {
		c.Log.Error("the damaged artefact was not removed", "name", a.GetName(), "error", err)
	}
	return false
}

func hashFile(path string) (size int64, digest string, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, "", err
	}
	defer f.Close()
	h := sha256.New()
	size, err = io.Copy(h, f)
	return size, hex.EncodeToString(h.Sum(nil)), err
}

// settle makes serving what it should be: for each architecture the table's
// files once all of them are ready, until then what was served before.
func (c *Artefacts) settle() (changed bool) {
	complete := map[string]bool{}
	for _, a := range c.wanted {
		if _, seen := complete[a.GetArchitecture()]; !seen {
			complete[a.GetArchitecture()] = true
		}
		if !c.ready[sumOf(a)] {
			complete[a.GetArchitecture()] = false
		}
	}
	var next []*bcdv1.BootArtefact
	for _, a := range c.wanted {
		if complete[a.GetArchitecture()] {
			next = append(next, a)
		}
	}
	for _, a := range c.serving {
		if whole, named := complete[a.GetArchitecture()]; named && !whole && c.ready[sumOf(a)] {
			next = append(next, a)
		}
	}
	if slices.EqualFunc(next, c.serving, func(a, b *bcdv1.BootArtefact) bool { return proto.Equal(a, b) }) {
		return false
	}
	c.serving = next
	data, err := proto.Marshal(&bcdv1.BootTable{Artefacts: next})
	if err == nil {
		err = durable.WriteFile(filepath.Join(c.Dir, servingFile), data, 0o600)
	}
	if err != nil {
		c.Log.Error("the list of served artefacts was not kept", "error", err)
	}
	return true
}

// Name implements supervisor.Service.
func (c *Artefacts) Name() string { return "artefacts" }

// Run fetches what is wanted and not here, and reads the files again now and
// then, until ctx ends. Load must have been called.
func (c *Artefacts) Run(ctx context.Context) error {
	wait := fetchRetryFirst
	checked := c.Clock.Now()
	for {
		missing := c.missing()
		failed := false
		for _, a := range missing {
			err := c.fetch(ctx, a)
			if ctx.Err() != nil {
				return nil
			}
			failed = failed || err != nil
			c.fetched(a, err)
		}
		c.evict()
		pause := checkEvery
		if failed {
			pause = wait
			wait = min(2*wait, fetchRetryMax)
		} else {
			wait = fetchRetryFirst
		}
		timer := c.Clock.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-c.wake:
			timer.Stop()
		case <-timer.C():
		}
		if now := c.Clock.Now(); now.Sub(checked) >= checkEvery {
			checked = now
			c.checkAll()
		}
	}
}

func (c *Artefacts) missing() (out []*bcdv1.BootArtefact) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, a := range c.wanted {
		if !c.ready[sumOf(a)] {
			out = append(out, a)
		}
	}
	return out
}

// fetched takes the end of one fetch in.
func (c *Artefacts) fetched(a *bcdv1.BootArtefact, err error) {
	c.mu.Lock()
	sum := sumOf(a)
	if err != nil {
		c.problems[sum] = fmt.Sprintf("%s is not fetched: %v", a.GetName(), err)
		if errors.Is(err, syscall.ENOSPC) {
			c.problems[sum] = fmt.Sprintf("the disk of the artefact cache %s is full; %s is not fetched", c.Dir, a.GetName())
		}
		c.Log.Warn("a boot artefact was not fetched; what is here is served on", "name", a.GetName(), "error", err)
	} else {
		delete(c.problems, sum)
		c.ready[sum] = true
		c.Log.Info("boot artefact is here", "name", a.GetName(), "sha256", sum)
	}
	changed := c.settle()
	c.mu.Unlock()
	if changed && c.Changed != nil {
		c.Changed()
	}
}

// checkAll reads every file again.
func (c *Artefacts) checkAll() {
	c.mu.Lock()
	files := append(slices.Clone(c.serving), c.wanted...)
	c.mu.Unlock()
	for _, a := range files {
		// Read without the lock: machines are answered meanwhile.
		size, digest, err := hashFile(c.path(a))
		if err == nil && size == a.GetSize() && digest == sumOf(a) {
			continue
		}
		c.mu.Lock()
		delete(c.ready, sumOf(a))
		c.verify(a)
		changed := c.settle()
		c.mu.Unlock()
		if changed && c.Changed != nil {
			c.Changed()
		}
	}
}

// fetch brings one file, going on where an earlier try ended. The file has its
// name only once it was verified and is durable.
func (c *Artefacts) fetch(ctx context.Context, a *bcdv1.BootArtefact) error {
	sum, part := sumOf(a), c.path(a)+partSuffix
	if err := c.makeRoom(a); err != nil {
		return err
	}
	f, err := os.OpenFile(part, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	have, err := io.Copy(h, f)
	if err != nil {
		return err
	}
	if have < a.GetSize() {
		body, from, err := c.Fetch(ctx, sum, have)
		if errors.Is(err, errNoSuchRange) {
			return errors.Join(err, os.Remove(part))
		}
		if err != nil {
			return err
		}
		defer body.Close()
		if from != have {
			h.Reset()
			if err := f.Truncate(0); err != nil {
				return err
			}
			if have, err = f.Seek(0, io.SeekStart); err != nil {
				return err
			}
		}
		n, err := io.Copy(io.MultiWriter(f, h), io.LimitReader(body, a.GetSize()+1-have))
		have += n
		if err != nil {
			return fmt.Errorf("after %d of %d bytes: %w", have, a.GetSize(), err)
		}
		if have < a.GetSize() {
			return fmt.Errorf("it ended after %d of %d bytes", have, a.GetSize())
		}
	}
	if digest := hex.EncodeToString(h.Sum(nil)); have != a.GetSize() || digest != sum {
		return errors.Join(fmt.Errorf("the gateway's blob is not what the table names: more than %d bytes, or SHA-256 %s instead of %s", a.GetSize(), digest, sum), os.Remove(part))
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(part, c.path(a)); err != nil {
		return err
	}
	dir, err := os.Open(c.Dir)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// makeRoom makes sure that a fits the budget, and evicts what nobody names.
func (c *Artefacts) makeRoom(a *bcdv1.BootArtefact) error {
	used := c.evict()
	if info, err := os.Stat(c.path(a) + partSuffix); err == nil {
		used -= info.Size()
	}
	if used+a.GetSize() > c.Budget {
		return fmt.Errorf("the cache holds %d bytes that are in use and may hold %d; this file has %d: raise [boot] cache_mib", used, c.Budget, a.GetSize())
	}
	return nil
}

// evict removes every file that neither the table nor what is served names,
// and gives the bytes of the rest.
func (c *Artefacts) evict() (used int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	named := map[string]bool{servingFile: true}
	for _, a := range append(slices.Clip(c.serving), c.wanted...) {
		named[sumOf(a)], named[sumOf(a)+partSuffix] = true, !c.ready[sumOf(a)]
	}
	entries, err := os.ReadDir(c.Dir)
	if err != nil {
		c.Log.Error("the artefact cache cannot be read", "error", err)
		return 0
	}
	for _, entry := range entries {
		name := entry.Name()
		if !named[name] {
			// durable's own temporary files are short-lived, and ours to
			// remove after a crash.
			if err := os.Remove(filepath.Join(c.Dir, name)); err != nil {
				c.Log.Warn("a file in the artefact cache that nobody needs was not removed", "name", name, "error", err)
			}
			delete(c.ready, name)
			continue
		}
		if info, err := entry.Info(); err == nil {
			used += info.Size()
		}
	}
	return used
}
