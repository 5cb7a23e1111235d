package hostconf

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Bounds of a host section. A real one has a few dozen entries.
const (
	maxSysctls     = 512
	maxModules     = 256
	maxEnvironment = 64
	maxKey         = 128
	maxValue       = 256
	maxEnvValue    = 1024
)

const header = "# Written by bcd from the node's spec; changes are undone. See bcd status.\n"

var (
	sysctlKey  = regexp.MustCompile(`^(net|vm|fs|kernel|user)([./][A-Za-z0-9_-]+(:[A-Za-z0-9_-]+)?)+(@[A-Za-z0-9_-]+)?$`)
	sysctlText = regexp.MustCompile(`^[ -~\t]+$`)
	moduleName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$`)
	memoryMax  = regexp.MustCompile(`^([0-9]{1,18}[KMGT]?|[0-9]{1,3}(\.[0-9]{1,2})?%|infinity)$`)
	cpuQuota   = regexp.MustCompile(`^[1-9][0-9]{0,5}%$`)
	envName    = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,63}$`)
)

// forbidden are parameters through which the kernel would start a program of
// the writer's choice, or switch off what keeps the machine apart. A spec is
// signed; a mistake in it is signed too.
var forbidden = []string{
	"kernel.core_pattern", "kernel.core_pipe_limit", "kernel.modprobe", "kernel.hotplug", "kernel.poweroff_cmd",
	"kernel.usermodehelper.", "fs.binfmt_misc.", "kernel.modules_disabled", "kernel.kexec_load_disabled", "kernel.firmware_config.",
}

type sysctl struct{ key, value string }

// wanted is a host section that was checked, in a fixed order.
type wanted struct {
	sysctls []sysctl
	modules []string
	dropIn  []string // lines below [Service]
}

func parse(spec *bcdv1.HostSpec) (*wanted, error) {
	w := &wanted{}
	if n := len(spec.GetSysctl()); n > maxSysctls {
		return nil, fmt.Errorf("host.sysctl has %d entries; at most %d are allowed", n, maxSysctls)
	}
	for _, key := range slices.Sorted(maps.Keys(spec.GetSysctl())) {
		value := spec.GetSysctl()[key]
		if err := checkSysctl(key, value); err != nil {
			return nil, err
		}
		w.sysctls = append(w.sysctls, sysctl{key, strings.TrimSpace(value)})
	}
	if n := len(spec.GetModules()); n > maxModules {
		return nil, fmt.Errorf("host.modules has %d entries; at most %d are allowed", n, maxModules)
	}
	for _, name := range spec.GetModules() {
		if !moduleName.MatchString(name) {
			return nil, fmt.Errorf("host.modules: %.80q is not the name of a kernel module", name)
		}
		if !slices.Contains(w.modules, name) {
			w.modules = append(w.modules, name)
		}
	}
	var err error
	w.dropIn, err = parseDropIn(spec.GetBcdService())
	return w, err
}

func checkSysctl(key, value string) error {
	if len(key) > maxKey || !sysctlKey.MatchString(key) {
		return fmt.Errorf("host.sysctl: %.140q is not a kernel parameter below net, vm, fs, kernel or user", key)
	}
	dotted := strings.ReplaceAll(procPath(key)[len(procRoot):], "/", ".")
	for _, f := range forbidden {
		if dotted == f || strings.HasSuffix(f, ".") && strings.HasPrefix(dotted, f) {
			return fmt.Errorf("host.sysctl: %s is not allowed: it starts programs or unlocks the kernel", key)
		}
	}
	if len(value) > maxValue || !sysctlText.MatchString(value) || strings.TrimSpace(value) == "" {
		return fmt.Errorf("host.sysctl: the value of %s must be 1 to %d printable characters, got %.80q", key, maxValue, value)
	}
	return nil
}

const procRoot = "proc/sys/"

// procPath is where a parameter is. As in sysctl.d(5), the first separator
// decides: after a dot, dots separate and a slash stands for a dot within a
// name; after a slash it is the other way round.
func procPath(key string) string {
	if at := strings.IndexAny(key, "./"); at >= 0 && key[at] == '.' {
		key = strings.Map(func(r rune) rune {
			switch r {
			case '.':
				return '/'
			case '/':
				return '.'
			}
			return r
		}, key)
	}
	return procRoot + key
}

func parseDropIn(spec *bcdv1.ServiceDropIn) (lines []string, err error) {
	if v := spec.GetMemoryMax(); v != "" {
		if !memoryMax.MatchString(v) {
			return nil, fmt.Errorf("host.bcd_service.memory_max: %.80q is not like 512M, 20%% or infinity (systemd.resource-control(5))", v)
		}
		lines = append(lines, "MemoryMax="+v)
	}
	if v := spec.GetCpuQuota(); v != "" {
		if !cpuQuota.MatchString(v) {
			return nil, fmt.Errorf("host.bcd_service.cpu_quota: %.80q is not like 50%% (systemd.resource-control(5))", v)
		}
		lines = append(lines, "CPUQuota="+v)
	}
	if v := spec.GetNice(); v != "" {
		nice, err := strconv.Atoi(v)
		if err != nil || nice < -20 || nice > 19 || strconv.Itoa(nice) != v {
			return nil, fmt.Errorf("host.bcd_service.nice: %.80q is not a number between -20 and 19", v)
		}
		lines = append(lines, "Nice="+v)
	}
	env := spec.GetEnvironment()
	if len(env) > maxEnvironment {
		return nil, fmt.Errorf("host.bcd_service.environment has %d entries; at most %d are allowed", len(env), maxEnvironment)
	}
	for _, name := range slices.Sorted(maps.Keys(env)) {
		line, err := environmentLine(name, env[name])
		if err != nil {
			return nil, err
		}
		lines = append(lines, line)
	}
	return lines, nil
}

// environmentLine quotes as systemd.syntax(7) and systemd.unit(5) want it.
func environmentLine(name, value string) (string, error) {
	if !envName.MatchString(name) || strings.HasPrefix(name, "LD_") || name == "PATH" || strings.HasSuffix(name, "_TOKEN") {
		return "", fmt.Errorf("host.bcd_service.environment: the name %.80q is not allowed: letters, digits and '_'; no LD_*, PATH or *_TOKEN, and secrets travel by reference", name)
	}
	if len(value) > maxEnvValue || value != "" && !sysctlText.MatchString(value) {
		return "", fmt.Errorf("host.bcd_service.environment: the value of %s must be at most %d printable characters", name, maxEnvValue)
	}
	quoted := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "%", "%%").Replace(value)
	return `Environment="` + name + "=" + quoted + `"`, nil
}

// The three files; nil is no file.

func (w *wanted) sysctlFile() []byte {
	if len(w.sysctls) == 0 {
		return nil
	}
	var b strings.Builder
	b.WriteString(header)
	for _, s := range w.sysctls {
		b.WriteString(s.key + " = " + s.value + "\n")
	}
	return []byte(b.String())
}

func (w *wanted) modulesFile() []byte {
	if len(w.modules) == 0 {
		return nil
	}
	return []byte(header + strings.Join(w.modules, "\n") + "\n")
}

func (w *wanted) dropInFile() []byte {
	if len(w.dropIn) == 0 {
		return nil
	}
	return []byte(header + "[Service]\n" + strings.Join(w.dropIn, "\n") + "\n")
}
