package hostconf

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"pgregory.net/rapid"

	"github.com/better-compute/bcd/agent/converge"
	"github.com/better-compute/bcd/agent/durable"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// machine is a folder that stands for "/"; loaded modules and reloads are
// files in it, so that they outlive a kill.
type machine struct {
	dir  string
	root *os.Root
	// systemd sets sysctls, and was asked so often.
	systemd bool
	sysctls int
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{dir: t.TempDir()}
	for key, value := range map[string]string{"vm/swappiness": "60\n", "net/ipv4/tcp_rmem": "4096\t131072\t6291456\n", "net/ipv4/conf/eth0.1/forwarding": "0\n"} {
		path := filepath.Join(m.dir, "proc/sys", key)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(value), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{"etc", "sys/module"} {
		if err := os.MkdirAll(filepath.Join(m.dir, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var err error
	if m.root, err = os.OpenRoot(m.dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.root.Close() })
	return m
}

func (m *machine) LoadModule(_ context.Context, name string) error {
	return os.MkdirAll(filepath.Join(m.dir, "sys/module", name), 0o755)
}

func (m *machine) ModuleReady(name string) (bool, error) {
	_, err := os.Stat(filepath.Join(m.dir, "sys/module", name))
	return err == nil, nil
}

// ApplySysctls does what systemd does with the file of the section, on a
// machine that has one; it fails when one of them has no such parameter.
func (m *machine) ApplySysctls(context.Context) (bool, error) {
	if !m.systemd {
		return false, nil
	}
	m.sysctls++
	var failed error
	for line := range strings.Lines(m.read(SysctlFile)) {
		key, value, ok := strings.Cut(strings.TrimSpace(line), " = ")
		path := filepath.Join(m.dir, procPath(key))
		if _, err := os.Stat(path); !ok || err != nil {
			failed = errors.Join(failed, err)
			continue
		}
		if value == "refused" {
			failed = errors.Join(failed, errors.New("one was refused"))
			continue
		}
		failed = errors.Join(failed, os.WriteFile(path, []byte(value+"\n"), 0o644))
	}
	return true, failed
}

// ReloadServices keeps what systemd would then know of the drop-in.
func (m *machine) ReloadServices(context.Context) error {
	data, err := os.ReadFile(filepath.Join(m.dir, DropInFile))
	if err != nil && !os.IsNotExist(err) {
		return err
	}
	return os.WriteFile(filepath.Join(m.dir, "systemd-knows"), data, 0o644)
}

func (m *machine) read(name string) string {
	data, _ := os.ReadFile(filepath.Join(m.dir, name))
	return string(data)
}

func (m *machine) section() *Host { return &Host{Root: m.root, Effects: m} }

func apply(h *Host, spec *bcdv1.NodeSpec) (int, error) {
	steps, err := h.Plan(context.Background(), spec)
	if err != nil {
		return 0, err
	}
	for _, step := range steps {
		if err := h.Apply(context.Background(), step); err != nil {
			return 0, fmt.Errorf("%s %s: %w", step.Action, step.Target, err)
		}
	}
	return len(steps), nil
}

func example() *bcdv1.NodeSpec {
	return &bcdv1.NodeSpec{Host: &bcdv1.HostSpec{
		Sysctl:  map[string]string{"vm.swappiness": "10", "net.ipv4.tcp_rmem": "4096 131072 8388608", "net.ipv4.conf.eth0/1.forwarding": "1"},
		Modules: []string{"br_netfilter", "vfio_pci", "br_netfilter"},
		BcdService: &bcdv1.ServiceDropIn{MemoryMax: "512M", CpuQuota: "50%", Nice: "-5",
			Environment: map[string]string{"GODEBUG": `a="b"\ 100%`}},
	}}
}

func TestHost(t *testing.T) {
	m := newMachine(t)
	h := m.section()
	if n, err := apply(h, example()); err != nil || n != 9 {
		t.Fatalf("%d steps, %v", n, err)
	}
	for name, want := range map[string]string{
		SysctlFile:               header + "net.ipv4.conf.eth0/1.forwarding = 1\nnet.ipv4.tcp_rmem = 4096 131072 8388608\nvm.swappiness = 10\n",
		ModulesFile:              header + "br_netfilter\nvfio_pci\n",
		DropInFile:               header + "[Service]\nMemoryMax=512M\nCPUQuota=50%\nNice=-5\nEnvironment=\"GODEBUG=a=\\\"b\\\"\\\\ 100%%\"\n",
		"proc/sys/vm/swappiness": "10\n",
		"proc/sys/net/ipv4/conf/eth0.1/forwarding": "1\n",
	} {
		if got := m.read(name); got != want {
			t.Errorf("%s:\n%s\nwant\n%s", name, got, want)
		}
	}
	if m.read("systemd-knows") != m.read(DropInFile) {
		t.Error("systemd was not told")
	}
	again := func(what string, want int) {
		t.Helper()
		if n, err := apply(h, example()); err != nil || n != want {
			t.Errorf("%s: %d steps, %v; want %d", what, n, err, want)
		}
		if n, err := apply(h, example()); err != nil || n != 0 {
			t.Errorf("%s, once more: %d steps, %v", what, n, err)
		}
	}
	again("nothing changed", 0)
	write := func(name, data string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(m.dir, name), []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t8388608\n")
	again("as the kernel spells it", 0)
	write("proc/sys/vm/swappiness", "60\n")
	again("sysctl drift", 1)
	write(DropInFile, "x")
	again("drop-in drift", 2)
	if err := os.Chmod(filepath.Join(m.dir, SysctlFile), 0o666); err != nil {
		t.Fatal(err)
	}
	again("mode drift", 1)
	if err := os.RemoveAll(filepath.Join(m.dir, "etc")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(m.dir, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	again("everything removed", 4)

	if n, err := apply(h, &bcdv1.NodeSpec{}); err != nil || n != 4 {
		t.Errorf("spec without the part: %d steps, %v", n, err)
	}
	for _, name := range []string{SysctlFile, ModulesFile, DropInFile, reloadMark, "systemd-knows"} {
		if m.read(name) != "" {
			t.Errorf("%s is left", name)
		}
	}
}

func TestHostRefusesLinks(t *testing.T) {
	for _, name := range []string{"etc/sysctl.d", SysctlFile, "etc/systemd/system", "etc"} {
		m := newMachine(t)
		outside := t.TempDir()
		path := filepath.Join(m.dir, name)
		if name == "etc" {
			_ = os.Remove(path)
		}
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.Symlink(outside, path)); err != nil {
			t.Fatal(err)
		}
		if _, err := apply(m.section(), example()); err == nil || !strings.Contains(err.Error(), "symbolic link") {
			t.Errorf("%s: %v", name, err)
		}
		if left, _ := os.ReadDir(outside); len(left) != 0 {
			t.Errorf("%s: written through the link", name)
		}
	}
}

func TestHostRefusesValues(t *testing.T) {
	m := newMachine(t)
	bad := map[string]*bcdv1.HostSpec{}
	for _, key := range []string{"", "vm", "vm.", "vm..x", "../x", "vm.../x", "net/../../etc/passwd", "dev.cdrom.info", "vm.x\n", "vm.a b",
		"kernel.core_pattern", "kernel/core_pattern", "kernel.usermodehelper.bset", "fs.binfmt_misc.register", "vm." + strings.Repeat("a", 200)} {
		bad["key "+key] = &bcdv1.HostSpec{Sysctl: map[string]string{key: "1"}}
	}
	for _, value := range []string{"", " ", "1\n2", "\x00", strings.Repeat("a", 300), "ü"} {
		bad["value "+value] = &bcdv1.HostSpec{Sysctl: map[string]string{"vm.swappiness": value}}
	}
	for _, module := range []string{"", "-r", "a b", "../x", "x.ko", strings.Repeat("a", 65)} {
		bad["module "+module] = &bcdv1.HostSpec{Modules: []string{module}}
	}
	for name, d := range map[string]*bcdv1.ServiceDropIn{
		"memory": {MemoryMax: "1\n[Unit]"}, "cpu": {CpuQuota: "0%"}, "nice": {Nice: "20"}, "nice spelling": {Nice: "+5"},
		"LD_PRELOAD": {Environment: map[string]string{"LD_PRELOAD": "x"}}, "name": {Environment: map[string]string{"A=B": "x"}},
		"newline": {Environment: map[string]string{"A": "x\nExecStart=/bin/sh"}}, "token": {Environment: map[string]string{"BCD_JOIN_TOKEN": "x"}},
	} {
		bad["drop-in "+name] = &bcdv1.HostSpec{BcdService: d}
	}
	for name, host := range bad {
		if _, err := apply(m.section(), &bcdv1.NodeSpec{Host: host}); !converge.IsTerminal(err) {
			t.Errorf("%s: %v, want a terminal error", name, err)
		}
	}
	if left, _ := os.ReadDir(filepath.Join(m.dir, "etc")); len(left) != 0 {
		t.Errorf("something was written: %v", left)
	}
	_, err := apply(m.section(), &bcdv1.NodeSpec{Host: &bcdv1.HostSpec{Sysctl: map[string]string{"net.bridge.bridge-nf-call-iptables": "1"}}})
	if err == nil || converge.IsTerminal(err) || !strings.Contains(err.Error(), "host.modules") {
		t.Errorf("a parameter whose module is missing: %v", err)
	}
}

// TestTwice: whatever the spec before, and whatever the spec, a second plan is
// empty and the files say what the spec says.
func TestTwice(t *testing.T) {
	m := newMachine(t)
	rapid.Check(t, func(t *rapid.T) {
		host := &bcdv1.HostSpec{Sysctl: map[string]string{}, BcdService: &bcdv1.ServiceDropIn{}}
		for _, key := range []string{"vm.swappiness", "net.ipv4.tcp_rmem"} {
			if rapid.Bool().Draw(t, key) {
				host.Sysctl[key] = rapid.StringMatching(`[0-9]{1,5}( [0-9]{1,5}){0,2}`).Draw(t, "value")
			}
		}
		host.Modules = rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b-c", "d_e"}), 0, 3).Draw(t, "modules")
		host.BcdService.Nice = rapid.SampledFrom([]string{"", "0", "5"}).Draw(t, "nice")
		spec := &bcdv1.NodeSpec{Host: host}
		h := m.section()
		if _, err := apply(h, spec); err != nil {
			t.Fatal(err)
		}
		if steps, err := h.Plan(context.Background(), spec); err != nil || len(steps) != 0 {
			t.Fatalf("second plan: %v, %v", steps, err)
		}
		if got := m.read(ModulesFile); (got != "") != (len(host.Modules) > 0) {
			t.Fatalf("modules %v, file %q", host.Modules, got)
		}
	})
}

// TestKilled kills the process with SIGKILL before each of its steps in turn;
// the next process finds whole files and completes the work.
func TestKilled(t *testing.T) {
	if dir := os.Getenv("BCD_TEST_KILL_DIR"); dir != "" {
		killAt, _ := strconv.Atoi(os.Getenv("BCD_TEST_KILL_AT"))
		root, err := os.OpenRoot(dir)
		if err != nil {
			os.Exit(4)
		}
		at := 0
		step := func() {
			if at++; at == killAt {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
		}
		h := &Host{Root: root, Effects: killing{&machine{dir: dir, root: root}, step},
			Writer: durable.Writer{Before: func(string, string) error { step(); return nil }}}
		if _, err := apply(h, example()); err != nil {
			fmt.Println(err)
			os.Exit(4)
		}
		os.Exit(0)
	}
	kills := 0
	for n := 1; ; n++ {
		m := newMachine(t)
		if _, err := apply(m.section(), &bcdv1.NodeSpec{Host: &bcdv1.HostSpec{Modules: []string{"old"}, BcdService: &bcdv1.ServiceDropIn{Nice: "1"}}}); err != nil {
			t.Fatal(err)
		}
		before := []string{m.read(SysctlFile), m.read(ModulesFile), m.read(DropInFile)}
		cmd := exec.Command(os.Args[0], "-test.run=^TestKilled$")
		cmd.Env = append(os.Environ(), "BCD_TEST_KILL_DIR="+m.dir, "BCD_TEST_KILL_AT="+strconv.Itoa(n))
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		killed := errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL
		if err != nil && !killed {
			t.Fatalf("child: %v: %s", err, out)
		}
		want, _ := parse(example().Host)
		for i, whole := range [][]byte{want.sysctlFile(), want.modulesFile(), want.dropInFile()} {
			name := []string{SysctlFile, ModulesFile, DropInFile}[i]
			if got := m.read(name); got != before[i] && got != string(whole) {
				t.Fatalf("killed at step %d: %s is torn: %q", n, name, got)
			}
		}
		if _, err := apply(m.section(), example()); err != nil {
			t.Fatalf("killed at step %d: %v", n, err)
		}
		if steps, err := m.section().Plan(t.Context(), example()); err != nil || len(steps) != 0 {
			t.Fatalf("killed at step %d: still to do: %v, %v", n, steps, err)
		}
		if m.read("systemd-knows") != string(want.dropInFile()) {
			t.Fatalf("killed at step %d: systemd was never told of the new drop-in", n)
		}
		for _, dir := range []string{"etc/sysctl.d", "etc/modules-load.d", "etc/systemd/system/bcd.service.d"} {
			if entries, _ := os.ReadDir(filepath.Join(m.dir, dir)); len(entries) != 1 {
				t.Fatalf("killed at step %d: leftovers in %s: %v", n, dir, entries)
			}
		}
		if !killed {
			break
		}
		kills++
	}
	if kills < 20 {
		t.Errorf("only %d steps were killed", kills)
	}
}

// killing takes a step before each effect.
type killing struct {
	*machine
	step func()
}

func (k killing) LoadModule(ctx context.Context, name string) error {
	k.step()
	return k.machine.LoadModule(ctx, name)
}

func (k killing) ApplySysctls(ctx context.Context) (bool, error) { return k.machine.ApplySysctls(ctx) }

func (k killing) ReloadServices(ctx context.Context) error {
	k.step()
	return k.machine.ReloadServices(ctx)
}

func TestDaemon(t *testing.T) {
	level := &slog.LevelVar{}
	d := &Daemon{Level: level, Base: slog.LevelWarn}
	for _, test := range []struct {
		spec *bcdv1.DaemonSpec
		want slog.Level
	}{{nil, slog.LevelWarn}, {&bcdv1.DaemonSpec{LogLevel: "debug"}, slog.LevelDebug}, {&bcdv1.DaemonSpec{ConvergeIntervalSeconds: 60}, slog.LevelWarn}} {
		spec := &bcdv1.NodeSpec{Daemon: test.spec}
		steps, err := d.Plan(t.Context(), spec)
		if err != nil || len(steps) != 1 {
			t.Fatalf("%v: %v, %v", test.spec, steps, err)
		}
		if err := d.Apply(t.Context(), steps[0]); err != nil || level.Level() != test.want {
			t.Errorf("%v: %v, %v", test.spec, level.Level(), err)
		}
		if steps, err := d.Plan(t.Context(), spec); err != nil || len(steps) != 0 {
			t.Errorf("%v again: %v, %v", test.spec, steps, err)
		}
	}
	for _, bad := range []*bcdv1.DaemonSpec{{LogLevel: "loud"}, {ConvergeIntervalSeconds: 9}, {ConvergeIntervalSeconds: -1}, {ConvergeIntervalSeconds: 86401}} {
		if _, err := d.Plan(t.Context(), &bcdv1.NodeSpec{Daemon: bad}); !converge.IsTerminal(err) {
			t.Errorf("%v: %v", bad, err)
		}
	}
}

// Where systemd sets parameters it is asked once for all of them, and what it
// could not set is told by name.
func TestSysctlsThroughSystemd(t *testing.T) {
	m := newMachine(t)
	m.systemd = true
	h := m.section()
	if _, err := apply(h, example()); err != nil || m.sysctls != 1 {
		t.Fatalf("asked %d times, %v", m.sysctls, err)
	}
	if got := m.read("proc/sys/vm/swappiness"); got != "10\n" {
		t.Errorf("swappiness %q", got)
	}
	for _, test := range []struct{ key, value, want string }{
		{"vm.swappiness", "refused", `vm.swappiness stays at "10"`},
		{"vm.nothing", "1", "no parameter vm.nothing"},
	} {
		spec := example()
		spec.Host.Sysctl[test.key] = test.value
		if _, err := apply(h, spec); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s = %s: %v", test.key, test.value, err)
		}
	}
}

// TestSystemModuleReady reads this machine's own kernel, and a made-up list.
func TestSystemModuleReady(t *testing.T) {
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	s := System{Root: root}
	if ready, err := s.ModuleReady("br-netfilter"); ready || err != nil {
		t.Errorf("%v, %v", ready, err)
	}
	if err := root.MkdirAll("sys/module/br_netfilter", 0o755); err != nil {
		t.Fatal(err)
	}
	if ready, err := s.ModuleReady("br-netfilter"); !ready || err != nil {
		t.Errorf("%v, %v", ready, err)
	}
	if err := s.ReloadServices(t.Context()); err != nil {
		t.Errorf("no systemd, nothing to reload: %v", err)
	}
}

// FuzzSysctl: what is accepted stays below /proc/sys and on one line.
func FuzzSysctl(f *testing.F) {
	f.Add("vm.swappiness", "10")
	f.Add("net/ipv4/conf/eth0.1/forwarding", "1")
	f.Add("kernel/../../etc", "x\n")
	f.Fuzz(func(t *testing.T, key, value string) {
		w, err := parse(&bcdv1.HostSpec{Sysctl: map[string]string{key: value}, BcdService: &bcdv1.ServiceDropIn{Environment: map[string]string{"A": value}}})
		if err != nil {
			return
		}
		if p := procPath(key); !filepath.IsLocal(p) || filepath.Clean(p) != p || !strings.HasPrefix(p, procRoot) || slices.Contains(strings.Split(p, "/"), "..") {
			t.Errorf("%q is at %q", key, p)
		}
		if n := strings.Count(string(w.sysctlFile()), "\n"); n != 2 {
			t.Errorf("%d lines: %q", n, w.sysctlFile())
		}
		if n := strings.Count(string(w.dropInFile()), "\n"); n != 3 {
			t.Errorf("%d lines: %q", n, w.dropInFile())
		}
	})
}
