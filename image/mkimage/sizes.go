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

// printSizes writes "name bytes" lines for the results in dir: programs first,
// then each image's parts. amd64 is not named; another architecture is.
func printSizes(w io.Writer, dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var lines []string
	for _, e := range entries {
		name := sizeName(e.Name())
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
		return fmt.Errorf("%s holds no image: build one first", dir)
	}
	slices.SortStableFunc(lines, func(a, b string) int { return strings.Count(a, "-") - strings.Count(b, "-") })
	_, err = fmt.Fprintln(w, strings.Join(lines, "\n"))
	return err
}

func sizeName(file string) string {
	switch file {
	case "bcd", "bcd-gateway", "bcd-linux-amd64":
		return strings.TrimSuffix(file, "-linux-amd64")
	case "bcd-linux-arm64":
		return "bcd-arm64"
	}
	for _, s := range sizeNames {
		rest, ok := strings.CutSuffix(file, s.suffix)
		parts := strings.Split(rest, "-")
		if !ok || len(parts) != 3 || parts[0] != "bcd" {
			continue
		}
		name := parts[1] + "-" + s.word
		if parts[2] != "amd64" {
			name += "-" + parts[2]
		}
		return name
	}
	return ""
}
