// Command mkosi builds the installed node's operating system: a disk image of
// Debian 13 with systemd and bcd, raw and as zstd.
//
//	go run ./mkosi -bcd build/bcd-amd64 -profile virtual -out build
//
// It has two steps. The first, minutes long, lets Debian's mkosi install the
// packages of mkosi.conf and keeps the result (kernel, initramfs, root file
// system) in the cache under a hash of all that it was made of. The second,
// seconds long, puts bcd into a copy of that root, makes kernel and initramfs
// one unified kernel image, and lays out the disk:
//
//	1  EFI system partition, FAT32: \EFI\BOOT\BOOTX64.EFI, room for a second
//	   one, and for the deployer's \bcd\seed
//	2  root, ext4
//
// The same base, bcd and build time give the same bytes.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

// options are the inputs of one image.
type options struct {
	profile, bcd, out, cache string
	// config is the folder of this command, where mkosi.conf is.
	config string
	// epoch is the time of what is added, in seconds since 1970.
	epoch int64
	// freeMiB is the room in the root file system beside what is installed.
	freeMiB int
	maxAge  time.Duration
	log     *slog.Logger
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	switch {
	case err == nil || errors.Is(err, flag.ErrHelp):
	case errors.Is(err, errUsage):
		fmt.Fprintln(os.Stderr, "mkosi:", err)
		os.Exit(2)
	default:
		fmt.Fprintln(os.Stderr, "mkosi:", err)
		os.Exit(1)
	}
}

var errUsage = errors.New("see go run ./mkosi -help")

func run(ctx context.Context, args []string) error {
	o := options{log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
	f := flag.NewFlagSet("mkosi", flag.ContinueOnError)
	f.StringVar(&o.profile, "profile", "virtual", "`kind` of machine: virtual (cloud kernel) or metal (generic kernel)")
	f.StringVar(&o.bcd, "bcd", "build/bcd-amd64", "static bcd `binary` to put into the image")
	f.StringVar(&o.out, "out", "build", "`folder` for bcd-node-<profile>.raw, .raw.zst and .manifest")
	f.StringVar(&o.cache, "cache", "", "`folder` for packages and the base image; $BCD_CACHE or ~/.cache/bcd by default")
	f.StringVar(&o.config, "config", "mkosi", "`folder` with mkosi.conf")
	f.Int64Var(&o.epoch, "source-date-epoch", 1764547200, "time of the files that are added, in `seconds` since 1970")
	f.IntVar(&o.freeMiB, "free", 160, "`MiB` of room in the root file system")
	f.DurationVar(&o.maxAge, "max-age", 7*24*time.Hour, "`age` from which the base image is made again, for security fixes")
	baseOnly := f.Bool("base-only", false, "only make the base image, if it is not in the cache")
	if err := f.Parse(args); errors.Is(err, flag.ErrHelp) {
		return err
	} else if err != nil {
		return errUsage
	}
	if f.NArg() > 0 {
		return fmt.Errorf("%d arguments are not flags: %w", f.NArg(), errUsage)
	}
	if o.profile != "virtual" && o.profile != "metal" {
		return fmt.Errorf("-profile is neither virtual nor metal: %w", errUsage)
	}
	if o.freeMiB < 64 || o.freeMiB > 64<<10 {
		return fmt.Errorf("-free %d is not between 64 and 65536 MiB: %w", o.freeMiB, errUsage)
	}
	var err error
	if o.cache == "" {
		if o.cache, err = defaultCache(); err != nil {
			return err
		}
	}
	base, err := makeBase(ctx, o)
	if err != nil || *baseOnly {
		return err
	}
	begin := time.Now()
	result, err := assemble(ctx, o, base)
	if err != nil {
		return err
	}
	o.log.Info("node image", "raw", result.raw, "raw_bytes", result.rawBytes, "zstd_bytes", result.zstdBytes, "took", time.Since(begin).Round(time.Millisecond))
	return nil
}

func defaultCache() (string, error) {
	if dir := os.Getenv("BCD_CACHE"); dir != "" {
		return filepath.Abs(dir)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no place for downloads: %w; set BCD_CACHE", err)
	}
	return filepath.Join(dir, "bcd"), nil
}
