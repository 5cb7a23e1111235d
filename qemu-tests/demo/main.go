// Demo takes a virtual machine with an empty disk from power-on to an
// installed node that has joined its gateway, and shows each step as it comes.
//
//	go run ./qemu-tests/demo -build build
//
// The machine is one QEMU process from beginning to end: its firmware boots
// our image over the network, the image joins the gateway, the gateway sends
// it an operating system, and the same machine comes back from its disk.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

func main() { os.Exit(run()) }

func run() int {
	build := flag.String("build", "build", "folder of what make build image-virtual image-node made")
	dir := flag.String("dir", "", "folder for logs, made new (default: demo/TIME in the build folder)")
	keep := flag.Bool("keep", false, "keep the machine's disk and the gateway's data too")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "demo: no arguments are taken, only flags; see -help")
		return 2
	}
	// The first ctrl-C ends the demo in order, a second one at once.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)

	v := newView(os.Stdout)
	s := &story{view: v, keep: *keep}
	sentence, err := s.whole(ctx, *build, *dir)
	interrupted := ctx.Err() != nil
	if err != nil && !interrupted {
		v.heading("what the console said last")
		v.text(s.consoleTail())
	}
	s.cleanUp()
	switch {
	case err == nil:
		v.text("demo: " + sentence)
		return 0
	case interrupted:
		v.text("demo: interrupted; the machine and the gateway are off" + s.where())
	default:
		v.text(fmt.Sprintf("demo: FAILED while %s: %s%s", s.step, oneLine(err), s.where()))
	}
	return 1
}

// oneLine keeps an error on the last line of the output.
func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }

// prepare finds the artefacts and makes the folder of this run.
func (s *story) prepare(build, dir string) error {
	build, err := filepath.Abs(build)
	if err != nil {
		return err
	}
	s.build = build
	for _, name := range []string{gatewayProgram, keyFolder, ramdiskImage, nodeImage, nodeImage + packed} {
		if _, err := os.Stat(filepath.Join(build, name)); err != nil {
			return fmt.Errorf("%w: run make demo, which builds it first", err)
		}
	}
	if dir == "" {
		dir = filepath.Join(build, "demo", time.Now().UTC().Format("20060102T150405"))
	}
	if s.dir, err = filepath.Abs(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(s.dir), 0o755); err != nil {
		return err
	}
	if err := os.Mkdir(s.dir, 0o755); errors.Is(err, os.ErrExist) {
		return fmt.Errorf("%s exists: give another folder with -dir", s.dir)
	} else if err != nil {
		return err
	}
	return nil
}
