package gobuild

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/u-root/gobusybox/src/pkg/bb"
	"github.com/u-root/gobusybox/src/pkg/bb/findpkg"
	"github.com/u-root/gobusybox/src/pkg/golang"
	"github.com/u-root/uio/ulog"
)

// RescueCommands are the u-root commands of the rescue shell: enough to look at
// disks, network and logs on a machine that does not come up, nothing that
// serves the network.
var RescueCommands = []string{
	"cat", "chmod", "cp", "date", "dd", "df", "dmesg", "du", "echo", "false", "find", "free", "gosh", "grep",
	"head", "hexdump", "hostname", "id", "insmod", "ip", "kill", "ln", "ls", "lsmod", "mkdir", "mount", "mv",
	"ping", "ps", "pwd", "rm", "rmmod", "sleep", "sync", "tail", "true", "umount", "uname", "uptime", "wc",
}

const commandPrefix = "github.com/u-root/u-root/cmds/core/"

// Rescue gives the path of one busybox binary with all RescueCommands for
// arch, and the modules that it was made of. It costs half a minute, so it is
// kept in the folder cache under a key of everything it is made of; a binary
// there was checked in this call.
func Rescue(ctx context.Context, root, arch, cache string) (string, []Dependency, error) {
	if arch != "amd64" && arch != "arm64" {
		return "", nil, fmt.Errorf("architecture %q: use amd64 or arm64", arch)
	}
	var paths []string
	for _, name := range RescueCommands {
		paths = append(paths, commandPrefix+name)
	}
	args := append([]string{"list", "-deps", "-f", "{{with .Module}}{{.Path}} {{.Version}} {{.Sum}}{{end}}"}, paths...)
	listed, err := run(ctx, root, environment(arch), "go", args...)
	if err != nil {
		return "", nil, fmt.Errorf("rescue commands: %w", err)
	}
	lines := slices.Compact(slices.Sorted(strings.Lines(listed)))
	var modules []Dependency
	for _, line := range lines {
		if words := strings.Fields(line); len(words) >= 2 {
			d := Dependency{Path: words[0], Version: words[1]}
			if len(words) == 3 {
				d.Sum = words[2]
			}
			modules = append(modules, d)
		}
	}
	key := sha256.New()
	fmt.Fprintln(key, "rescue 1", runtime.Version(), arch, paths, lines)
	dir := filepath.Join(cache, "rescue")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", nil, err
	}
	binary := filepath.Join(dir, hex.EncodeToString(key.Sum(nil))+".bb")
	// Two builds at once would take twice as long for the same bytes.
	lock, err := os.OpenFile(filepath.Join(dir, "build.lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", nil, err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", nil, fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	if checkDigest(binary) == nil {
		return binary, modules, nil
	}
	if err := buildRescue(root, arch, paths, binary); err != nil {
		return "", nil, err
	}
	return binary, modules, nil
}

// buildRescue generates and compiles the busybox into the file binary, and its
// digest beside it.
func buildRescue(root, arch string, paths []string, binary string) error {
	temp, err := os.MkdirTemp("", "bcd-rescue-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp)
	env := golang.Default(golang.DisableCGO(), golang.WithGOARCH(arch), golang.WithGOOS("linux"), golang.WithWorkingDir(root))
	lookup := findpkg.Env{}
	out := binary + ".new"
	defer os.Remove(out)
	// The builder reads these from the process, not from its environment.
	for _, kv := range [][2]string{{"GOAMD64", "v1"}, {"GOARM64", "v8.0"}, {"GOEXPERIMENT", ""}, {"GOFIPS140", "off"}, {"GOWORK", "off"}, {"GOFLAGS", "-buildvcs=false"}} {
		old, had := os.LookupEnv(kv[0])
		if err := os.Setenv(kv[0], kv[1]); err != nil {
			return err
		}
		defer func() {
			if had {
				os.Setenv(kv[0], old)
			} else {
				os.Unsetenv(kv[0])
			}
		}()
	}
	err = bb.BuildBusybox(ulog.Null, &bb.Opts{
		Env: env, LookupEnv: &lookup, GenSrcDir: filepath.Join(temp, "src"),
		CommandPaths: paths, BinaryPath: out, GoBuildOpts: &golang.BuildOpts{},
	})
	if err != nil {
		return fmt.Errorf("build the rescue commands for %s: %w", arch, err)
	}
	if err := os.Chmod(out, 0o755); err != nil {
		return err
	}
	digest, err := digestOf(out)
	if err != nil {
		return err
	}
	text, err := json.Marshal(digest)
	if err != nil {
		return err
	}
	if err := os.WriteFile(binary+".json", text, 0o644); err != nil {
		return err
	}
	return os.Rename(out, binary)
}

// checkDigest compares a cached binary with the digest beside it.
func checkDigest(binary string) error {
	text, err := os.ReadFile(binary + ".json")
	if err != nil {
		return err
	}
	var want string
	if err := json.Unmarshal(text, &want); err != nil {
		return err
	}
	got, err := digestOf(binary)
	if err != nil {
		return err
	}
	if got != want {
		return errors.New("cached rescue binary is damaged")
	}
	return nil
}

func digestOf(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("read %s: %w", name, err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
