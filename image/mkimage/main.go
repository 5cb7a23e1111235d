// Command mkimage builds bcd's images.
//
//	go run ./image/mkimage -profile virtual -arch amd64 -trust DIR -version 0.1.0 -out build
//
// See package image for what is made and what of.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/better-compute/bcd/image"
	"github.com/better-compute/bcd/image/debian"
	"github.com/better-compute/bcd/image/gobuild"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case errors.Is(err, errUsage):
		fmt.Fprintln(os.Stderr, "mkimage:", err)
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "mkimage:", err)
		os.Exit(1)
	}
}

var errUsage = errors.New("see mkimage -help")

func run(ctx context.Context, args []string) error {
	var o image.Options
	f := flag.NewFlagSet("mkimage", flag.ContinueOnError)
	f.StringVar(&o.Profile, "profile", "virtual", "`kind` of machine: virtual or metal")
	f.StringVar(&o.Arch, "arch", "amd64", "architecture: amd64 or arm64")
	f.StringVar(&o.BCD, "bcd", "", "static bcd `binary` for the architecture; built (see -command) when not given")
	f.StringVar(&o.Trust, "trust", "", "`folder` with roots.pem and join-encryption.jwk")
	f.StringVar(&o.Gateway, "gateway", "", "gateway's https `URL`; empty when machines are told otherwise")
	f.StringVar(&o.Version, "version", "", "`version` of the image, and of bcd when it is built")
	f.StringVar(&o.Out, "out", "build", "`folder` for the results")
	f.StringVar(&o.Cache, "cache", "", "`folder` for downloads and what is costly to make; $BCD_CACHE or ~/.cache/bcd by default")
	f.StringVar(&o.Cmdline, "cmdline", "", "kernel command `line` instead of the profile's")
	f.StringVar(&o.ExtraCmdline, "append", "", "`words` to add to the kernel command line")
	f.Int64Var(&o.Epoch, "source-date-epoch", 0, "build time in `seconds` since 1970; $SOURCE_DATE_EPOCH or the time of the last commit by default")
	f.BoolVar(&o.FreeFirmware, "free-firmware", false, "leave out firmware that may be passed on but is not free (metal)")
	f.BoolVar(&o.NodeDisk, "node-disk", false, "make a small synthetic node disk for boot tests too (.node.raw, .node.raw.zst)")
	rescue := f.Bool("rescue", true, "put a rescue shell into the image")
	lock := f.String("lock", "", "manifest.json of an earlier image, whose Debian packages are demanded exactly")
	quiet := f.Bool("quiet", false, "print errors only")
	build := f.String("build", "", "only build bcd (see -command) for -arch into `file`")
	command := f.String("command", "./cmd/bcd", "`package` that bcd is built from")
	sources := f.String("print-sources", "", "only print apt sources for this Debian `release`, derived from this machine's")
	sizes := f.String("sizes", "", "only print \"name bytes\" lines for the results for -arch in this `folder`")
	if err := f.Parse(args); errors.Is(err, flag.ErrHelp) {
		return err
	} else if err != nil {
		return errUsage
	}
	if f.NArg() > 0 {
		return fmt.Errorf("%d arguments are not flags: %w", f.NArg(), errUsage)
	}
	level := slog.LevelInfo
	if *quiet {
		level = slog.LevelWarn
	}
	o.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level, ReplaceAttr: withoutTime}))

	switch {
	case *sources != "":
		text, err := debian.Derive(*sources)
		if err == nil {
			_, err = os.Stdout.Write(text)
		}
		return err
	case *sizes != "":
		return printSizes(os.Stdout, *sizes, o.Arch)
	}
	if *build != "" {
		root, err := gobuild.Root(ctx)
		if err != nil {
			return err
		}
		return gobuild.Build(ctx, root, *command, o.Arch, o.Version, *build)
	}
	var err error
	if o.Cache == "" {
		if o.Cache, err = image.DefaultCache(); err != nil {
			return err
		}
	}
	if o.Epoch == 0 {
		if o.Epoch, err = defaultEpoch(ctx); err != nil {
			return err
		}
	}
	if *lock != "" {
		if o.Lock, err = debian.ReadLock(*lock); err != nil {
			return err
		}
	}
	var root string
	if o.BCD == "" || *rescue {
		if root, err = gobuild.Root(ctx); err != nil {
			return err
		}
	}
	if o.BCD == "" {
		if err := os.MkdirAll(o.Out, 0o755); err != nil {
			return err
		}
		o.BCD = filepath.Join(o.Out, "bcd-linux-"+o.Arch)
		o.Log.Info("building bcd", "arch", o.Arch)
		if err := gobuild.Build(ctx, root, *command, o.Arch, o.Version, o.BCD); err != nil {
			return err
		}
	}
	if *rescue {
		if o.Rescue, o.RescueModules, err = gobuild.Rescue(ctx, root, o.Arch, o.Cache); err != nil {
			return err
		}
	}
	_, err = image.Build(ctx, o)
	return err
}

// withoutTime keeps a build's log the same from run to run.
func withoutTime(_ []string, a slog.Attr) slog.Attr {
	if a.Key == slog.TimeKey {
		return slog.Attr{}
	}
	return a
}

// defaultEpoch is SOURCE_DATE_EPOCH (reproducible-builds.org), else the time of
// the last commit.
func defaultEpoch(ctx context.Context) (int64, error) {
	text := os.Getenv("SOURCE_DATE_EPOCH")
	if text == "" {
		out, err := exec.CommandContext(ctx, "git", "log", "-1", "--format=%ct").Output()
		if err != nil {
			return 0, fmt.Errorf("no build time: git log: %w; give -source-date-epoch or SOURCE_DATE_EPOCH", err)
		}
		text = strings.TrimSpace(string(out))
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n <= 0 {
		return 0, fmt.Errorf("build time %q is not seconds since 1970", text)
	}
	return n, nil
}
