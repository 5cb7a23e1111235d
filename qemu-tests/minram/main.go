// Minram measures how little memory a machine needs to be deployed: it boots
// the ramdisk into machines of different sizes, deploys the synthetic node
// image to each, and prints the smallest in which that works.
//
//	go run ./qemu-tests/minram            # virtual-min-ram-mib N
//	go run ./qemu-tests/minram -firmware  # …-pxe-min-ram-mib N, by OVMF and PXE
//
// It halves the range between -from and -to, which takes six machines by
// default, of less than a minute each without KVM.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/better-compute/bcd/qemu-tests/rig"
)

const (
	// diskBytes is more than the image needs.
	diskBytes = 256 << 20
	// tryLimit ends a try in a machine that neither works nor says why not,
	// such as one whose firmware cannot load the image.
	tryLimit = 4 * time.Minute
)

// fatal are the words of a console on which nothing good follows.
var fatal = []string{"Kernel panic", "too little memory", "Out of memory", "Initramfs unpacking failed", "no space left on device", "BdsDxe: failed to", "BdsDxe: No bootable"}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "minram:", err)
		os.Exit(1)
	}
}

func run() error {
	s := sweep{}
	flag.StringVar(&s.build, "build", "build", "folder of the artefacts that make images made")
	flag.StringVar(&s.profile, "profile", "virtual", "virtual or metal")
	flag.BoolVar(&s.firmware, "firmware", false, "boot the UKI by OVMF and PXE instead of the kernel directly")
	from := flag.Int("from", 64, "MiB that are surely too few")
	to := flag.Int("to", 512, "MiB that surely do")
	step := flag.Int("step", 8, "MiB between two sizes that are told apart")
	flag.Parse()
	if *step < 1 || *from < 1 || *to <= *from {
		return fmt.Errorf("-from %d, -to %d, -step %d: want 0 < from < to and a step of at least 1", *from, *to, *step)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if s.build, err = filepath.Abs(s.build); err != nil {
		return err
	}
	if s.dir, err = os.MkdirTemp("", "bcd-minram-"); err != nil {
		return err
	}
	defer os.RemoveAll(s.dir)

	// low does not do, high does; the first is believed until the end.
	low, high := 0, (*to-*from+*step-1) / *step
	if err := s.try(ctx, *from+high**step); err != nil {
		return fmt.Errorf("%d MiB, the most that -to allows, do not do: %w", *from+high**step, err)
	}
	for high-low > 1 {
		middle := (low + high) / 2
		err := s.try(ctx, *from+middle**step)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err == nil {
			high = middle
			continue
		}
		low = middle
		fmt.Fprintf(os.Stderr, "%d MiB do not do: %v\n", *from+middle**step, err)
	}
	if low == 0 && s.try(ctx, *from) == nil {
		return fmt.Errorf("%d MiB, the least that -from allows, do: give a smaller one", *from)
	}
	name := s.profile
	if s.firmware {
		name += "-pxe"
	}
	fmt.Printf("%s-min-ram-mib %d\n", name, *from+high**step)
	return nil
}

type sweep struct {
	build, dir, profile string
	firmware            bool
	tries               int
}

// try deploys to a machine with so much memory; its error says what went wrong.
func (s *sweep) try(ctx context.Context, mib int) error {
	ctx, cancel := context.WithTimeoutCause(ctx, tryLimit, fmt.Errorf("nothing within %s", tryLimit))
	defer cancel()
	s.tries++
	dir := filepath.Join(s.dir, fmt.Sprint(s.tries))
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	g, err := rig.NewGateway(filepath.Join(s.build, "bcd-gateway"), dir)
	if err != nil {
		return err
	}
	g.Args = append(g.Args, "--keys", filepath.Join(s.build, "keys"))
	if err := g.Start(ctx); err != nil {
		return err
	}
	defer g.Stop()
	token, err := g.Run(ctx, "token", "create", "--role", "ramdisk")
	if err != nil {
		return err
	}
	disk, err := rig.NewDisk(dir, "disk.raw", diskBytes)
	if err != nil {
		return err
	}
	images := filepath.Join(s.build, "images")
	name := "bcd-" + s.profile + "-amd64."
	config := rig.Config{
		Name: "minram", Dir: dir, MemoryMiB: mib,
		SMBIOS: []string{"bcd.gateway=" + g.URL(), "bcd.token=" + strings.TrimSpace(string(token))},
		Disks:  []rig.Disk{{Path: disk, Serial: "minram", BootIndex: 2}},
	}
	if s.firmware {
		config.NICs = []rig.NIC{{TFTPDir: images, BootFile: name + "uki.efi", BootIndex: 1}}
	} else {
		config.Kernel, config.Initrd = filepath.Join(images, name+"vmlinuz"), filepath.Join(images, name+"initramfs")
		config.Cmdline = "console=ttyS0,115200 panic=30 printk.devkmsg=on"
		config.NICs = []rig.NIC{{}}
	}
	began := time.Now()
	vm, err := rig.Start(ctx, config)
	if err != nil {
		return err
	}
	defer vm.Close()
	err = s.deploy(ctx, vm, g, filepath.Join(images, "bcd-virtual-amd64.node.raw.zst"))
	if err == nil {
		fmt.Fprintf(os.Stderr, "%d MiB do, in %s\n", mib, time.Since(began).Round(time.Second))
	}
	return err
}

// deploy waits for the machine to join, and deploys the image to it.
func (s *sweep) deploy(ctx context.Context, vm *rig.VM, g *rig.Gateway, image string) error {
	var id string
	err := vm.Until(ctx, "the machine joins", func(ctx context.Context) (bool, error) {
		var all struct {
			Machines []struct {
				ID      string `json:"id"`
				Current *struct {
					Connected bool `json:"connected"`
				} `json:"current"`
			} `json:"machines"`
		}
		if g.RunJSON(ctx, &all, "machines") == nil && len(all.Machines) == 1 && all.Machines[0].Current != nil && all.Machines[0].Current.Connected {
			id = all.Machines[0].ID
			return true, nil
		}
		return false, trouble(vm)
	})
	if err != nil {
		return err
	}
	var sent struct {
		ID string `json:"id"`
	}
	if err := g.RunJSON(ctx, &sent, "deploy", id, image, "--no-reboot", "--no-wait"); err != nil {
		return err
	}
	return vm.Until(ctx, "the deployment ends", func(ctx context.Context) (bool, error) {
		var info struct {
			Commands []struct {
				ID      string          `json:"id"`
				Outcome json.RawMessage `json:"outcome"`
			} `json:"commands"`
		}
		if err := g.RunJSON(ctx, &info, "machine", id); err != nil {
			return false, err
		}
		for _, c := range info.Commands {
			var outcome *struct{ Status, Code, Message string }
			if c.ID != sent.ID || json.Unmarshal(c.Outcome, &outcome) != nil || outcome == nil {
				continue
			}
			if outcome.Status != "succeeded" {
				return false, fmt.Errorf("the deployment: %s %s: %s", outcome.Status, outcome.Code, outcome.Message)
			}
			return true, nil
		}
		return false, trouble(vm)
	})
}

// trouble looks for a word on the console, or a reset, that ends a try early.
func trouble(vm *rig.VM) error {
	console, err := vm.Console(0)
	if err != nil {
		return err
	}
	for line := range strings.Lines(console) {
		for _, word := range fatal {
			if strings.Contains(line, word) {
				return errors.New(strings.TrimSpace(line))
			}
		}
	}
	return nil
}
