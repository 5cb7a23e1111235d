package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// sizeNames maps the end of a result's file name to its word.
var sizeNames = []struct{ suffix, word string }{
	{".initramfs", "initramfs"}, {".uki.efi", "uki"}, {".vmlinuz", "kernel"},
}

// printSizes writes "name bytes" lines for what dir holds of one architecture:
// programs first, then each image's parts.
func printSizes(w io.Writer, dir, arch string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var lines []string
	for _, e := range entries {
		name := sizeName(e.Name(), arch)
		if name == "" {
			continue
		}
		info, err := os.Stat(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		lines = append(lines, fmt.Sprintf("%s %d", name, info.Size()))
	}
	if len(lines) == 0 {
		return fmt.Errorf("%s holds no image for %s: build one first", dir, arch)
	}
	slices.SortStableFunc(lines, func(a, b string) int { return strings.Count(a, "-") - strings.Count(b, "-") })
	_, err = fmt.Fprintln(w, strings.Join(lines, "\n"))
	return err
}

// sizeName is the word for a result's file, "" for other files.
func sizeName(file, arch string) string {
	// Programs are bcd-<arch> as make build names them, or bcd-linux-<arch> as
	// this program does when it builds one.
	for _, program := range []string{"bcd", "bcd-gateway"} {
		if file == program+"-"+arch || file == program+"-linux-"+arch {
			return program
		}
	}
	for _, s := range sizeNames {
		rest, ok := strings.CutSuffix(file, s.suffix)
		parts := strings.Split(rest, "-")
		if ok && len(parts) == 3 && parts[0] == "bcd" && parts[2] == arch {
			return parts[1] + "-" + s.word
		}
	}
	return ""
}
