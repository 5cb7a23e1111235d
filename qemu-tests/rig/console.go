package rig

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// maxConsole bounds what a wait reads of a console: a machine in a loop writes
// without end.
const maxConsole = 64 << 20

// ConsolePath is the file of the machine's first serial port.
func (vm *VM) ConsolePath() string { return filepath.Join(vm.Dir, ConsoleLog) }

func (vm *VM) consoleSize() int64 {
	info, err := os.Stat(vm.ConsolePath())
	if err != nil {
		return 0
	}
	return info.Size()
}

// Mark is a place on the console: what comes after it is new.
type Mark int64

// ConsoleMark is the console's end now.
func (vm *VM) ConsoleMark() Mark { return Mark(vm.consoleSize()) }

// Console gives what is on the console after a mark; 0 for all of it.
func (vm *VM) Console(from Mark) (string, error) {
	f, err := os.Open(vm.ConsolePath())
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.NewSectionReader(f, int64(from), maxConsole))
	return string(b), err
}

// WaitConsole waits until the text stands anywhere on the console, also when
// it came before the call.
func (vm *VM) WaitConsole(ctx context.Context, text string) error {
	_, err := vm.WaitConsoleAfter(ctx, 0, text)
	return err
}

// WaitConsoleAfter waits for text after a mark and gives the mark behind it.
func (vm *VM) WaitConsoleAfter(ctx context.Context, from Mark, text string) (Mark, error) {
	if text == "" {
		return from, errors.New("wait for an empty text")
	}
	s := search{at: int64(from), want: []byte(text)}
	err := vm.watch(ctx, fmt.Sprintf("%q on the console", text), func() (bool, error) { return s.look(vm.ConsolePath()) })
	if err != nil {
		return from, err
	}
	vm.Booted()
	return Mark(s.at), nil
}

// search looks for a text in a file that grows, reading each byte once.
type search struct {
	at   int64
	want []byte
	// rest is the end of what was read: the text may be cut there.
	rest []byte
}

// look reads what is new. When it finds the text, at is the place behind it.
func (s *search) look(name string) (bool, error) {
	f, err := os.Open(name)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	fresh, err := io.ReadAll(io.NewSectionReader(f, s.at, maxConsole))
	if err != nil {
		return false, err
	}
	begin := s.at - int64(len(s.rest))
	all := append(s.rest, fresh...)
	if i := bytes.Index(all, s.want); i >= 0 {
		s.at, s.rest = begin+int64(i+len(s.want)), nil
		return true, nil
	}
	s.at += int64(len(fresh))
	s.rest = append([]byte(nil), all[max(0, len(all)-len(s.want)+1):]...)
	return false, nil
}
