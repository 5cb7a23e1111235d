package modules

import (
	"context"
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

	"golang.org/x/sys/unix"

	"github.com/better-compute/bcd/supervisor"
)

// ListPath names modules that no device asks for: one a line, its parameters
// behind it, '#' begins a comment. It may be absent.
const ListPath = "/etc/bcd/modules"

const (
	// loaders load at the same time. Many drivers wait for their hardware while
	// they load; more than this gains nothing on the machines measured.
	loaders = 4
	// maxRounds of looking at all devices. Each round follows one level of
	// devices behind devices; no machine has this many.
	maxRounds = 10
	// maxModalias is longer than the longest real one (a DMI modalias has about
	// 600 bytes).
	maxModalias = 4 << 10
)

// Options for [NewService]. The zero value is right for a running system.
type Options struct {
	Log *slog.Logger
	// AfterColdplug is called once the modules of all devices found at start,
	// and those of [ListPath], have been loaded; pid1.MountLate is meant for it.
	AfterColdplug func() error
	// Deny names modules that are never loaded by an alias.
	Deny []string
}

// Service loads modules. It is a supervisor service named "modules" that
// signals ready when the devices found at start have their drivers.
type Service struct {
	log   *slog.Logger
	after func() error
	deny  map[string]bool

	// The system, for tests.
	index    func() (*Index, error)
	devices  func() ([]string, error) // all modaliases
	list     string
	cmdline  string
	insert   func(file, params string) error
	listen   func() (eventSource, error)
	insertMu sync.Mutex
	inserted map[string]*insertion // guarded by insertMu
	current  *loading              // guarded by insertMu; nil unless it runs
}

type eventSource interface {
	next(context.Context) (uevent, error)
	close() error
}

// insertion is one module's, done once.
type insertion struct {
	done chan struct{}
	err  error
}

// Status is what has been loaded, for people and the doctor.
type Status struct {
	Loaded []string          `json:"loaded"`
	Failed map[string]string `json:"failed,omitempty"` // name -> why
}

// NewService makes the service for the running kernel.
func NewService(o Options) *Service {
	s := &Service{
		log: o.Log, after: o.AfterColdplug, deny: map[string]bool{},
		list: ListPath, cmdline: "/proc/cmdline",
		devices: func() ([]string, error) { return modaliases("/sys/devices") },
		listen:  func() (eventSource, error) { return listenUevents() },
	}
	if s.log == nil {
		s.log = slog.Default()
	}
	if s.after == nil {
		s.after = func() error { return nil }
	}
	for _, name := range o.Deny {
		s.deny[normal(name)] = true
	}
	dir := ""
	s.index = func() (*Index, error) {
		var err error
		if dir, err = releaseDir(); err != nil {
			return nil, err
		}
		return ReadIndex(os.DirFS(dir))
	}
	kernelCan := kernelCompression()
	s.insert = func(file, params string) error { return insert(filepath.Join(dir, file), params, kernelCan) }
	return s
}

// releaseDir is where the running kernel's modules are.
func releaseDir() (string, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", fmt.Errorf("find the kernel's release: %w", err)
	}
	return filepath.Join("/lib/modules", unix.ByteSliceToString(u.Release[:])), nil
}

// Name implements supervisor.Service.
func (s *Service) Name() string { return "modules" }

// SignalsReady tells the supervisor to wait for this service's word before it
// starts those that need it.
func (s *Service) SignalsReady() {}

// Run implements supervisor.Service. Modules that cannot be loaded are logged
// and shown in the status; they do not end it.
func (s *Service) Run(ctx context.Context) error {
	index, err := s.index()
	if errors.Is(err, fs.ErrNotExist) {
		// A kernel with everything built in has no modules.
		s.log.Info("this kernel has no modules", "err", err)
		index = &Index{}
	} else if err != nil {
		return err
	}
	// Listen first: a device that appears during the look around is then seen
	// twice rather than not at all.
	events, err := s.listen()
	if err != nil {
		return err
	}
	defer events.close()

	params := readParams(s.cmdline)
	listed, err := readList(s.list)
	if err != nil {
		return err
	}
	names := make([]string, len(listed))
	for i, m := range listed {
		names[i] = m.name
		if m.params != "" {
			params[m.name] = strings.TrimSpace(params[m.name] + " " + m.params)
		}
	}
	l := &loading{s, index, params}
	s.insertMu.Lock()
	s.inserted = map[string]*insertion{} // what failed in an earlier run gets another try
	s.current = l
	s.insertMu.Unlock()
	defer func() {
		s.insertMu.Lock()
		s.current = nil
		s.insertMu.Unlock()
	}()
	l.all(ctx, names)
	seen := map[string]bool{}
	if err := l.coldplug(ctx, seen); err != nil {
		return err
	}
	if err := s.after(); err != nil {
		s.log.Warn("after coldplug", "err", err)
	}
	st := s.Status()
	s.log.Info("devices have their modules", "loaded", len(st.Loaded), "failed", len(st.Failed))
	supervisor.NotifyReady(ctx)

	for {
		e, err := events.next(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, errLost):
			s.log.Warn("looking at all devices again", "err", err)
			if err := l.coldplug(ctx, map[string]bool{}); err != nil {
				return err
			}
		case err != nil:
			return err
		case e.action == "add" && e.modalias != "":
			// Not remembered in seen: the same device may come again after its
			// module has been removed, and a loaded module costs nothing.
			l.all(ctx, l.index.Match(e.modalias))
		}
	}
}

// Load loads modules by name or alias, with what they need; one that is built in
// or loaded already is no error. It serves who needs a module that no device
// asks for, such as a file system, and works only while the service runs.
func (s *Service) Load(ctx context.Context, namesOrAliases ...string) error {
	s.insertMu.Lock()
	l := s.current
	s.insertMu.Unlock()
	if l == nil {
		return errors.New("load modules: the service is not running")
	}
	var errs []error
	for _, n := range namesOrAliases {
		names := l.index.Resolve(n)
		if len(names) == 0 && !l.index.builtin[normal(n)] {
			errs = append(errs, fmt.Errorf("load module %q: %w", n, fs.ErrNotExist))
		}
		l.all(ctx, names)
		for _, name := range names {
			if err := s.result(name); err != nil {
				errs = append(errs, fmt.Errorf("load module %q: %w", name, err))
			}
		}
	}
	return errors.Join(errs...)
}

// result gives the error of a module that has been inserted.
func (s *Service) result(name string) error {
	s.insertMu.Lock()
	ins := s.inserted[name]
	s.insertMu.Unlock()
	if ins == nil {
		return errors.New("it is on the list of denied modules, or loading was cut short")
	}
	<-ins.done
	return ins.err
}

// Status gives a copy of what has been loaded.
func (s *Service) Status() Status {
	s.insertMu.Lock()
	defer s.insertMu.Unlock()
	st := Status{Failed: map[string]string{}}
	for name, i := range s.inserted {
		select {
		case <-i.done:
			switch {
			case i.err == nil:
				st.Loaded = append(st.Loaded, name)
			case !harmless(i.err):
				st.Failed[name] = i.err.Error()
			}
		default:
		}
	}
	slices.Sort(st.Loaded)
	return st
}

// loading is one run of the service.
type loading struct {
	*Service
	index  *Index
	params map[string]string
}

// coldplug loads for all devices until that brings up no new ones. seen holds
// the modaliases that have been looked up.
func (l *loading) coldplug(ctx context.Context, seen map[string]bool) error {
	for range maxRounds {
		all, err := l.devices()
		if err != nil {
			return err
		}
		var names []string
		for _, m := range all {
			if seen[m] {
				continue
			}
			seen[m] = true
			for _, name := range l.index.Match(m) {
				if !slices.Contains(names, name) {
					names = append(names, name)
				}
			}
		}
		if len(names) == 0 || ctx.Err() != nil {
			return nil
		}
		l.all(ctx, names)
	}
	return nil
}

// all loads modules and what they need, several at a time, and waits for them.
func (l *loading) all(ctx context.Context, names []string) {
	work := make(chan string)
	var wg sync.WaitGroup
	for range min(loaders, len(names)) {
		wg.Go(func() {
			for name := range work {
				l.one(name)
			}
		})
	}
	for _, name := range names {
		if l.deny[normal(name)] {
			continue
		}
		if ctx.Err() != nil {
			break
		}
		work <- name
	}
	close(work)
	wg.Wait()
}

// one loads a module and what it needs. Each is inserted once, by whoever comes
// first; the others wait for that insertion and for nothing else, so that no
// cycle of dependencies can block.
func (l *loading) one(name string) {
	order, err := l.index.Order(name)
	if err != nil {
		// An image holds an allow-list of modules: most aliases lead nowhere.
		l.log.Debug("module not in this image", "module", name)
		return
	}
	for _, m := range order {
		l.insertMu.Lock()
		ins, there := l.inserted[m]
		if !there {
			ins = &insertion{done: make(chan struct{})}
			l.inserted[m] = ins
		}
		l.insertMu.Unlock()
		if there {
			<-ins.done
			continue
		}
		ins.err = l.insert(l.index.File(m), l.params[m])
		close(ins.done)
		switch {
		case ins.err == nil:
			l.log.Debug("module loaded", "module", m)
		case harmless(ins.err):
			l.log.Debug("module not here or not needed", "module", m, "err", ins.err)
		default:
			l.log.Warn("module not loaded", "module", m, "err", ins.err)
		}
	}
}

// harmless is true for a driver that looked and found nothing of its own, common
// for the platform's aliases, and for a module that depmod knows and the image's
// allow-list left out.
func harmless(err error) bool {
	return errors.Is(err, unix.ENODEV) || errors.Is(err, fs.ErrNotExist)
}

// modaliases reads every modalias below a directory of sysfs, each once.
func modaliases(root string) ([]string, error) {
	seen := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			if path == root {
				return err
			}
			return nil // a device that went away meanwhile
		}
		if d.Name() != "modalias" || d.IsDir() {
			return nil
		}
		if m, err := readSmall(path, maxModalias); err == nil {
			if m = strings.TrimSpace(m); m != "" {
				seen[m] = true
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look at devices: %w", err)
	}
	out := make([]string, 0, len(seen))
	for m := range seen {
		out = append(out, m)
	}
	slices.Sort(out)
	return out, nil
}

// readSmall reads a file of at most limit bytes.
func readSmall(path string, limit int64) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return "", err
	}
	if int64(len(b)) > limit {
		return "", fmt.Errorf("%s is larger than %d bytes", path, limit)
	}
	return string(b), nil
}

type listedModule struct{ name, params string }

// readList reads a file in the form of [ListPath].
func readList(path string) ([]listedModule, error) {
	text, err := readSmall(path, 64<<10)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the list of modules: %w", err)
	}
	var out []listedModule
	for line := range strings.SplitSeq(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		if f := strings.Fields(line); len(f) > 0 {
			out = append(out, listedModule{normal(f[0]), strings.Join(f[1:], " ")})
		}
	}
	return out, nil
}

// readParams takes module.parameter=value from the kernel command line, which
// the kernel applies to built-in modules only.
func readParams(path string) map[string]string {
	out := map[string]string{}
	text, err := readSmall(path, 64<<10)
	if err != nil {
		return out
	}
	for _, word := range strings.Fields(text) {
		key, _, _ := strings.Cut(word, "=")
		name, _, ok := strings.Cut(key, ".")
		if !ok || name == "" {
			continue
		}
		name = normal(name)
		out[name] = strings.TrimSpace(out[name] + " " + word[strings.Index(word, ".")+1:])
	}
	return out
}
