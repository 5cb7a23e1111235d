package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// landmarks are the lines of a console that tell how far a boot is, and how
// they are told: $1 is what the first bracket found.
var landmarks = []struct {
	line *regexp.Regexp
	from string
	text string
}{
	{regexp.MustCompile(`>>Start PXE over (IPv[46])`), "firmware", "looks for something to boot on the network (PXE, $1)"},
	{regexp.MustCompile(`NBP filename is (\S+)`), "firmware", "is offered $1"},
	{regexp.MustCompile(`NBP filesize is (\d+) Bytes`), "firmware", "fetches $1 over TFTP"},
	{regexp.MustCompile(`BdsDxe: starting (Boot[0-9A-F]{4} "[^"]*")`), "firmware", "starts $1"},
	{regexp.MustCompile(`Linux version (\S+)`), "console", "Linux $1 starts"},
	{regexp.MustCompile(`bcd: (bcd \S+)`), "console", "$1 is process 1, in memory"},
	{regexp.MustCompile(`systemd\[1\]: (systemd \S+) running in system mode`), "console", "$1 is process 1, from the disk"},
	{regexp.MustCompile(`msg="devices have their modules" loaded=(\d+)`), "console", "$1 kernel modules loaded, by what the devices ask for"},
	{regexp.MustCompile(`msg=address interface=(\S+ .*address=\S+)`), "console", "has an address: $1"},
	{regexp.MustCompile(`(Started|Starting) bcd\.service`), "console", "systemd: $1 bcd.service"},
	{regexp.MustCompile(`(Kernel panic .*)`), "console", "$1"},
}

var escapes = regexp.MustCompile(`\x1b\[[0-9;?=]*[A-Za-z]`)

// landmark tells a console line that is worth telling.
func landmark(line string) (from, text string, ok bool) {
	line = escapes.ReplaceAllString(line, "")
	for _, l := range landmarks {
		m := l.line.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		found := m[1]
		if n, err := strconv.ParseInt(found, 10, 64); err == nil && strings.Contains(l.text, "TFTP") {
			found = size(n)
		}
		if len(found) > 120 {
			found = found[:120]
		}
		return l.from, strings.ReplaceAll(l.text, "$1", found), true
	}
	return "", "", false
}

// followConsole tells the landmarks of a console file that grows, until ctx
// ends.
func followConsole(ctx context.Context, path string, tell func(from, text string)) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("console: %w", err)
	}
	defer f.Close()
	poll := time.NewTicker(200 * time.Millisecond)
	defer poll.Stop()
	r := bufio.NewReaderSize(f, 64<<10)
	var part []byte
	for {
		piece, err := r.ReadSlice('\n')
		part = append(part, piece...)
		switch {
		case err == nil || len(part) > 64<<10:
			if from, text, ok := landmark(string(part)); ok {
				tell(from, text)
			}
			part = part[:0]
		case err == io.EOF:
			select {
			case <-ctx.Done():
				return nil
			case <-poll.C:
			}
		case err != bufio.ErrBufferFull:
			return fmt.Errorf("console: %w", err)
		}
	}
}
