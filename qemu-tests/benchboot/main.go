// Benchboot measures how long a machine takes from power-on to its gateway's
// first Welcome, beside a trivial init on the same kernel: what our image adds
// to the least that a boot can be.
//
//	go run ./qemu-tests/benchboot -build build
//
// Both are booted in turn, several times, by QEMU's direct kernel boot. The
// last line has "ratio N.NN", the one median over the other.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/better-compute/bcd/image/cpio"
	"github.com/better-compute/bcd/image/gobuild"
	"github.com/better-compute/bcd/qemu-tests/rig"
)

const (
	kernelFile    = "images/bcd-virtual-amd64.vmlinuz"
	initramfsFile = "images/bcd-virtual-amd64.initramfs"
	// cmdline is what the profile's UKI has, without the screen that these
	// machines lack.
	cmdline = "console=ttyS0,115200 panic=30 printk.devkmsg=on"
	// aim is the ratio that is good.
	aim = 3.0
	// lookEvery is the resolution of what is measured.
	lookEvery = 10 * time.Millisecond
)

// What the console says when each has come to its end.
const (
	trivialSays = "trivial init"
	ramdiskSays = "session up"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "benchboot:", err)
		os.Exit(1)
	}
}

type bench struct {
	build, dir, trivial string
	gateway             *rig.Gateway
	boots               int
}

func run() error {
	build := flag.String("build", "build", "folder of what make image-virtual made")
	runs := flag.Int("runs", 5, "how often each is booted")
	keep := flag.String("keep", "", "folder for the consoles of all boots; removed when not given")
	flag.Parse()
	if *runs < 1 || *runs > 100 || flag.NArg() > 0 {
		return errors.New("-runs is between 1 and 100, and there are no arguments")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	b := bench{dir: *keep}
	var err error
	if b.build, err = filepath.Abs(*build); err != nil {
		return err
	}
	if b.dir == "" {
		if b.dir, err = os.MkdirTemp("", "bcd-bench-"); err != nil {
			return err
		}
		defer os.RemoveAll(b.dir)
	}
	if b.dir, err = filepath.Abs(b.dir); err != nil {
		return err
	}
	if err := b.prepare(ctx); err != nil {
		return err
	}
	defer b.gateway.Stop()
	accel, why := rig.Accelerator()
	fmt.Printf("power-on to the end of a boot by %s (%s), each %d times in turn\n", accel, why, *runs)
	var trivial, ramdisk []time.Duration
	for i := range *runs {
		t, err := b.bootTrivial(ctx)
		if err != nil {
			return err
		}
		r, err := b.bootRamdisk(ctx)
		if err != nil {
			return err
		}
		trivial, ramdisk = append(trivial, t), append(ramdisk, r)
		fmt.Printf("run %d: trivial init %.2f s, first Welcome %.2f s\n", i+1, t.Seconds(), r.Seconds())
	}
	fmt.Print(report(trivial, ramdisk))
	return nil
}

// report compares the medians.
func report(trivial, ramdisk []time.Duration) string {
	t, r := median(trivial), median(ramdisk)
	ratio := r.Seconds() / t.Seconds()
	verdict := "within the aim"
	if ratio > aim {
		verdict = "above the aim"
	}
	return fmt.Sprintf("trivial init   median %6.2f s (%.2f to %.2f)\n", t.Seconds(), slices.Min(trivial).Seconds(), slices.Max(trivial).Seconds()) +
		fmt.Sprintf("first Welcome  median %6.2f s (%.2f to %.2f)\n", r.Seconds(), slices.Min(ramdisk).Seconds(), slices.Max(ramdisk).Seconds()) +
		fmt.Sprintf("bench-boot: ratio %.2f, %s of %.0f\n", ratio, verdict, aim)
}

// median of an even number is the mean of the middle two.
func median(of []time.Duration) time.Duration {
	sorted := slices.Sorted(slices.Values(of))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// prepare makes the trivial init's initramfs and starts a gateway.
func (b *bench) prepare(ctx context.Context) error {
	for _, name := range []string{"bcd-gateway", "keys", kernelFile, initramfsFile} {
		if _, err := os.Stat(filepath.Join(b.build, name)); err != nil {
			return fmt.Errorf("%w: run make bench-boot, which builds it first", err)
		}
	}
	if err := os.MkdirAll(b.dir, 0o755); err != nil {
		return err
	}
	root, err := gobuild.Root(ctx)
	if err != nil {
		return err
	}
	program := filepath.Join(b.dir, "trivial")
	if err := gobuild.Build(ctx, root, "./image/trivial", "amd64", "bench", program); err != nil {
		return err
	}
	binary, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	// As our own image is packed; the kernel gives init its console.
	archive, err := cpio.Marshal([]cpio.Entry{cpio.Dir("dev", 0o755), cpio.CharDevice("dev/console", 0o600, 5, 1), cpio.File("init", 0o755, binary)}, 0)
	if err != nil {
		return err
	}
	z, err := zstd.NewWriter(nil)
	if err != nil {
		return err
	}
	b.trivial = filepath.Join(b.dir, "trivial.initramfs")
	if err := os.WriteFile(b.trivial, z.EncodeAll(archive, nil), 0o644); err != nil {
		return err
	}
	if b.gateway, err = rig.NewGateway(filepath.Join(b.build, "bcd-gateway"), b.dir); err != nil {
		return err
	}
	b.gateway.Args = append(b.gateway.Args, "--keys", filepath.Join(b.build, "keys"))
	return b.gateway.Start(ctx)
}

func (b *bench) bootTrivial(ctx context.Context) (time.Duration, error) {
	return b.boot(ctx, rig.Config{Name: "trivial", Initrd: b.trivial}, trivialSays)
}

// bootRamdisk boots our image, to its session's first Welcome.
func (b *bench) bootRamdisk(ctx context.Context) (time.Duration, error) {
	token, err := b.gateway.Run(ctx, "token", "create", "--role", "ramdisk")
	if err != nil {
		return 0, err
	}
	return b.boot(ctx, rig.Config{
		Name: "ramdisk", Initrd: filepath.Join(b.build, initramfsFile),
		SMBIOS: []string{"bcd.gateway=" + b.gateway.URL(), "bcd.token=" + strings.TrimSpace(string(token))},
	}, ramdiskSays)
}

// boot switches a machine on and gives the time until its console says a text.
// The machines differ in nothing but the initramfs.
func (b *bench) boot(ctx context.Context, c rig.Config, says string) (time.Duration, error) {
	b.boots++
	c.Dir = filepath.Join(b.dir, fmt.Sprintf("boot-%d", b.boots))
	if err := os.Mkdir(c.Dir, 0o755); err != nil {
		return 0, err
	}
	c.MemoryMiB, c.Kernel, c.Cmdline = 512, filepath.Join(b.build, kernelFile), cmdline
	c.NICs = []rig.NIC{{}}
	seen := make(chan time.Time, 1)
	looking, stop := context.WithCancel(ctx)
	defer stop()
	go look(looking, filepath.Join(c.Dir, rig.ConsoleLog), says, seen)
	begin := time.Now()
	vm, err := rig.Start(ctx, c)
	if err != nil {
		return 0, err
	}
	defer vm.Close()
	// The rig decides whether the machine still does something; the clock is
	// the finer look's.
	if err := vm.WaitConsole(ctx, says); err != nil {
		return 0, err
	}
	select {
	case at := <-seen:
		return at.Sub(begin), nil
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
}

// look waits for a text in a file that comes to be and grows, and tells when.
func look(ctx context.Context, path, text string, seen chan<- time.Time) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	var f *os.File
	var rest []byte
	for {
		if f == nil {
			f, _ = os.Open(path) // not there before QEMU makes it
		}
		if f != nil {
			news, err := io.ReadAll(f)
			rest = append(rest, news...)
			if bytes.Contains(rest, []byte(text)) || err != nil {
				seen <- time.Now()
				f.Close()
				return
			}
			rest = rest[max(0, len(rest)-len(text)):]
		}
		select {
		case <-ctx.Done():
			if f != nil {
				f.Close()
			}
			return
		case <-tick.C:
		}
	}
}
