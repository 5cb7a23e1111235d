package debian

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"
)

// DefaultMaxAge is how old the package lists may be before a build asks the
// mirror again: stable releases change every few weeks, security fixes sooner.
const DefaultMaxAge = 24 * time.Hour

// Archive is one release and architecture of Debian, seen through a cache.
// Several builds may use the same cache at once.
type Archive struct {
	// Release is a name such as "trixie", Architecture one such as "amd64".
	Release, Architecture string
	// Components are wanted beside those that the machine itself uses.
	Components []string
	// Cache is a folder of this user's; it is made when missing.
	Cache string
	// Lock, when not nil, demands exactly its packages.
	Lock *Lock
	// MaxAge is the age from which package lists are fetched again; 0 means
	// DefaultMaxAge.
	MaxAge time.Duration
	// Log hears of downloads, and of a mirror that cannot be reached while
	// the cache suffices.
	Log *slog.Logger

	fresh bool
}

// Kernel finds the concrete package behind a kernel metapackage, such as
// linux-image-cloud-amd64.
func (a *Archive) Kernel(ctx context.Context, meta string) (Package, error) {
	flavour := strings.TrimPrefix(meta, "linux-image-")
	concrete := regexp.MustCompile(`^linux-image-[0-9][0-9.]*(\+[a-z0-9]+)?-` + regexp.QuoteMeta(flavour) + `$`)
	if a.Lock != nil {
		p, ok := a.Lock.findMatch(concrete, a.Architecture)
		if !ok {
			return Package{}, fmt.Errorf("the lock file names no kernel package for %s: make a lock from an image of the same profile and architecture", meta)
		}
		return p, nil
	}
	found, err := a.Find(ctx, meta)
	if err != nil {
		return Package{}, err
	}
	name, err := found[0].dependsOn("linux-image-")
	if err != nil {
		return Package{}, err
	}
	if !concrete.MatchString(name) {
		return Package{}, fmt.Errorf("metapackage %s depends on %s, which does not look like a kernel of its flavour", meta, name)
	}
	if found, err = a.Find(ctx, name); err != nil {
		return Package{}, err
	}
	return found[0], nil
}

// Find gives the candidate version of each named package, in order. With a
// lock it gives the locked ones and asks nobody.
func (a *Archive) Find(ctx context.Context, names ...string) ([]Package, error) {
	found, missing, err := a.FindSome(ctx, names...)
	if err != nil {
		return nil, err
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("packages %s of %s %s are %s", strings.Join(missing, ", "), a.Release, a.Architecture, a.absent())
	}
	return found, nil
}

func (a *Archive) absent() string {
	if a.Lock != nil {
		return "not in the lock file: make a new lock from an image of the same profile and architecture"
	}
	return "not in this machine's apt sources: see `mkimage -print-sources " + a.Release + "`"
}

// FindSome is Find that also gives the names that are not to be had.
func (a *Archive) FindSome(ctx context.Context, names ...string) (found []Package, missing []string, err error) {
	for _, name := range names {
		if !wordForm(name) {
			return nil, nil, fmt.Errorf("%q is not a package name", name)
		}
	}
	byName := map[string]Package{}
	if a.Lock == nil {
		unlock, err := a.prepare(ctx)
		if err != nil {
			return nil, nil, err
		}
		defer unlock()
		// apt-cache exits with 100 when one of the names is unknown.
		out, err := a.apt(ctx, "", "apt-cache", append([]string{"show", "--no-all-versions"}, names...)...)
		if exit := (*exec.ExitError)(nil); err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 100) {
			return nil, nil, err
		}
		packages, err := parseIndex(out)
		if err != nil {
			return nil, nil, fmt.Errorf("package lists of %s: %w", a.Release, err)
		}
		for _, p := range packages {
			byName[p.Name] = p
		}
	}
	for _, name := range names {
		p, ok := byName[name]
		if a.Lock != nil {
			p, ok = a.Lock.find(name, a.Architecture)
		}
		if !ok {
			missing = append(missing, name)
			continue
		}
		found = append(found, p)
	}
	return found, missing, nil
}

// Fetch gives the path of the package's file in the cache. Its bytes were
// checked against the package's SHA-256 in this call.
func (a *Archive) Fetch(ctx context.Context, p Package) (string, error) {
	if err := p.check(); err != nil {
		return "", err
	}
	file := filepath.Join(a.Cache, "deb", p.SHA256+".deb")
	if err := checkFile(file, p); err == nil {
		return file, nil
	} else if !errors.Is(err, os.ErrNotExist) {
		a.log().Warn("cached package is damaged, fetching it again", "package", p.Name, "err", err)
	}
	unlock, err := a.prepare(ctx)
	if err != nil {
		return "", err
	}
	defer unlock()
	if checkFile(file, p) == nil { // another build was faster
		return file, nil
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp(filepath.Dir(file), "fetch-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	a.log().Info("downloading", "package", p.Name, "version", p.Version, "bytes", p.Size)
	if _, err := a.apt(ctx, dir, "apt-get", "download", p.Name+"="+p.Version); err != nil {
		return "", fmt.Errorf("download %s %s: %w", p.Name, p.Version, err)
	}
	got, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil || len(got) != 1 {
		return "", fmt.Errorf("download %s %s gave %d files", p.Name, p.Version, len(got))
	}
	if err := checkFile(got[0], p); err != nil {
		return "", err
	}
	if err := syncFile(got[0]); err != nil {
		return "", err
	}
	if err := os.Rename(got[0], file); err != nil {
		return "", err
	}
	return file, syncFile(filepath.Dir(file))
}

// state is the private apt state of this release and architecture.
func (a *Archive) state() string {
	return filepath.Join(a.Cache, "apt", a.Release+"-"+a.Architecture)
}

// prepare takes the lock on the private apt state and brings its package lists
// up to date. Lists that are old are used all the same when the mirror cannot
// be reached.
func (a *Archive) prepare(ctx context.Context) (unlock func(), err error) {
	if !wordForm(a.Release) || !wordForm(a.Architecture) {
		return nil, fmt.Errorf("release %q architecture %q: want names like trixie and amd64", a.Release, a.Architecture)
	}
	for _, dir := range []string{"lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(a.state(), dir), 0o755); err != nil {
			return nil, err
		}
	}
	lock, err := os.OpenFile(filepath.Join(a.state(), "build.lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return nil, fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	unlock = func() { lock.Close() }
	if a.fresh {
		return unlock, nil
	}
	sources, err := Derive(a.Release, a.Components...)
	if err != nil {
		return nil, err
	}
	stamp := filepath.Join(a.state(), "updated.sources")
	maxAge := a.MaxAge
	if maxAge == 0 {
		maxAge = DefaultMaxAge
	}
	before, readErr := os.ReadFile(stamp)
	usable := readErr == nil && bytes.Equal(before, sources)
	if info, err := os.Stat(stamp); usable && err == nil && time.Since(info.ModTime()) < maxAge {
		a.fresh = true
		return unlock, nil
	}
	if err := os.WriteFile(filepath.Join(a.state(), "debian.sources"), sources, 0o644); err != nil {
		return nil, err
	}
	a.log().Info("updating package lists", "release", a.Release, "architecture", a.Architecture)
	if _, err := a.apt(ctx, "", "apt-get", "update"); err != nil {
		if !usable {
			return nil, fmt.Errorf("package lists of %s: %w", a.Release, err)
		}
		a.log().Warn("package lists cannot be updated, using the cached ones", "err", err)
		a.fresh = true
		return unlock, nil
	}
	if err := os.WriteFile(stamp+".new", sources, 0o644); err != nil {
		return nil, err
	}
	if err := os.Rename(stamp+".new", stamp); err != nil {
		return nil, err
	}
	a.fresh = true
	return unlock, nil
}

// apt runs one of apt's programs on the private state, and gives its standard
// output.
func (a *Archive) apt(ctx context.Context, dir, program string, args ...string) (string, error) {
	if _, err := exec.LookPath(program); err != nil {
		return "", fmt.Errorf("%w: images are built on Debian 12 or 13", err)
	}
	options := []string{
		"Dir::Etc::sourcelist=" + filepath.Join(a.state(), "debian.sources"),
		"Dir::Etc::sourceparts=/dev/null",
		// The machine's pins are about the machine's release.
		"Dir::Etc::preferences=/dev/null",
		"Dir::Etc::preferencesparts=/dev/null",
		"Dir::State::lists=" + filepath.Join(a.state(), "lists"),
		"Dir::State::status=/dev/null",
		"Dir::Cache=" + filepath.Join(a.state(), "cache"),
		"APT::Architecture=" + a.Architecture,
		"APT::Architectures=" + a.Architecture,
		"Acquire::Languages=none",
		"Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false",
		"Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false",
		// "apt-get update" says 0 on a mirror that does not answer, unless told.
		"APT::Update::Error-Mode=any",
	}
	var full []string
	for _, o := range options {
		full = append(full, "-o", o)
	}
	cmd := exec.CommandContext(ctx, program, append(full, args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s %s: %w: %s", program, strings.Join(args, " "), err, lastLines(stderr.String(), 5))
	}
	return stdout.String(), nil
}

func (a *Archive) log() *slog.Logger {
	if a.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return a.Log
}

// lastLines shortens a program's complaint to what an error can carry.
func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "; ")
}

// checkFile compares a file with what the package index says of it.
func checkFile(name string, p Package) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	n, err := io.Copy(h, io.LimitReader(f, p.Size+1))
	if err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	if sum := hex.EncodeToString(h.Sum(nil)); n != p.Size || sum != p.SHA256 {
		return fmt.Errorf("package %s %s has %d bytes with sha256 %s, want %d with %s", p.Name, p.Version, n, sum, p.Size, p.SHA256)
	}
	return nil
}

// syncFile makes a file or folder durable.
func syncFile(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
