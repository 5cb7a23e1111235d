package rig

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// NewDisk makes an empty sparse raw disk of size bytes.
func NewDisk(dir, name string, size int64) (string, error) {
	path := filepath.Join(dir, name)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o644)
	if err != nil {
		return "", err
	}
	return path, errors.Join(f.Truncate(size), f.Close())
}

// NewFilledDisk is NewDisk with every byte set to fill: what a machine finds
// that somebody else used before.
func NewFilledDisk(dir, name string, size int64, fill byte) (string, error) {
	path, err := NewDisk(dir, name, size)
	if err != nil {
		return "", err
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return "", err
	}
	block := bytes.Repeat([]byte{fill}, 1<<20)
	for at := int64(0); at < size && err == nil; at += int64(len(block)) {
		_, err = f.WriteAt(block[:min(int64(len(block)), size-at)], at)
	}
	return path, errors.Join(err, f.Close())
}

// Overlay makes a qcow2 file on top of a raw image, which stays as it is. size
// in bytes may be larger than the image; 0 keeps its size.
func Overlay(ctx context.Context, dir, name, image string, size int64) (string, error) {
	path := filepath.Join(dir, name)
	backing, err := filepath.Abs(image)
	if err != nil {
		return "", err
	}
	args := []string{"create", "-q", "-f", "qcow2", "-F", "raw", "-b", backing, path}
	if size > 0 {
		args = append(args, fmt.Sprint(size))
	}
	if out, err := exec.CommandContext(ctx, "qemu-img", args...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("qemu-img: %w: %s; it is in the package qemu-utils", err, bytes.TrimSpace(out))
	}
	return path, nil
}
