// Package gobuild builds the programs that go into an image, so that the same
// source gives the same bytes from any folder, user, umask and Go cache.
package gobuild

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
)

// Module is the path of this project's module.
const Module = "github.com/better-compute/bcd"

var versionForm = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z.+~-]{0,63}$`)

// Root gives the folder of this project's source from anywhere inside it.
func Root(ctx context.Context) (string, error) {
	out, err := run(ctx, "", nil, "go", "list", "-m", "-f", "{{.Dir}}", Module)
	if err != nil {
		return "", fmt.Errorf("find the source of bcd (run this inside its work tree): %w", err)
	}
	return strings.TrimSpace(out), nil
}

// Build compiles command, such as "./cmd/bcd", found in the source tree root,
// for linux on arch, into the file out, which is replaced at once. version
// becomes main.version.
//
// Nothing of the machine gets in: paths are trimmed, neither build id nor
// version control state is recorded, and variables that choose instruction
// sets or flags are set here.
func Build(ctx context.Context, root, command, arch, version, out string) error {
	if !versionForm.MatchString(version) {
		return fmt.Errorf("version %q: use letters, digits and .+~-, at most 64, as in 0.1.0", version)
	}
	if arch != "amd64" && arch != "arm64" {
		return fmt.Errorf("architecture %q: use amd64 or arm64", arch)
	}
	temp := fmt.Sprintf("%s.%d.new", out, os.Getpid())
	defer os.Remove(temp)
	absolute, err := filepath.Abs(temp)
	if err != nil {
		return err
	}
	_, err = run(ctx, root, environment(arch), "go", "build", "-trimpath", "-buildvcs=false", "-mod=readonly",
		"-ldflags", "-s -w -buildid= -X main.version="+version, "-o", absolute, command)
	if err != nil {
		return fmt.Errorf("build %s for %s: %w", command, arch, err)
	}
	// The linker obeys the umask; a binary in an image does not.
	if err := os.Chmod(temp, 0o755); err != nil {
		return err
	}
	return os.Rename(temp, out)
}

// environment pins what would let a machine's settings into a binary.
func environment(arch string) []string {
	env := slices.DeleteFunc(os.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return slices.Contains([]string{"GOOS", "GOARCH", "GOAMD64", "GOARM64", "GOFLAGS", "GOEXPERIMENT", "GOFIPS140", "GO111MODULE", "GOWORK", "CGO_ENABLED"}, name)
	})
	return append(env, "GOOS=linux", "GOARCH="+arch, "GOAMD64=v1", "GOARM64=v8.0", "CGO_ENABLED=0",
		"GOFLAGS=-mod=readonly -buildvcs=false", "GOEXPERIMENT=", "GOFIPS140=off", "GOWORK=off")
}

// Dependency is one Go module that a program was made of.
type Dependency struct {
	Path    string `json:"path"`
	Version string `json:"version"`
	// Sum is the module's go.sum hash ("h1:…"), empty for our own module.
	Sum string `json:"sum,omitempty"`
}

// Dependencies lists the modules of a built program with the Go version, from
// the build information inside it.
func Dependencies(info *debug.BuildInfo) []Dependency {
	out := []Dependency{{Path: info.Main.Path, Version: info.Main.Version}}
	for _, d := range info.Deps {
		if d.Replace != nil {
			d = d.Replace
		}
		out = append(out, Dependency{d.Path, d.Version, d.Sum})
	}
	return out
}

func run(ctx context.Context, dir string, env []string, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env = dir, env
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		text := strings.TrimSpace(stderr.String())
		if len(text) > 2000 {
			text = text[:2000] + "…"
		}
		return "", errors.Join(fmt.Errorf("%s %s: %w", name, args[0], err), errors.New(text))
	}
	return stdout.String(), nil
}
