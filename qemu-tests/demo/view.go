package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/sys/unix"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// plainEvery is how often a transfer is told where there is no terminal.
const plainEvery = 5 * time.Second

// view writes what happens, a line a thing, with the time since the start. On
// a terminal a bar below the lines shows a transfer while it runs.
type view struct {
	out      io.Writer
	terminal bool
	begin    time.Time

	mu       sync.Mutex
	progress *mpb.Progress
	bar      *mpb.Bar
	phase    string
	detail   string
	told     time.Time
	whole    bool
}

func newView(f *os.File) *view {
	v := &view{out: f, begin: time.Now()}
	// A terminal without a width, as some recorders give, has no room for a bar.
	if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil && size.Col > 0 && os.Getenv("TERM") != "dumb" {
		v.terminal = true
	}
	return v
}

// line writes one step: who it is from, and what.
func (v *view) line(from, text string) {
	v.text(fmt.Sprintf("%s  %-8s  %s", elapsed(time.Since(v.begin)), from, text))
}

// heading begins a part of the story.
func (v *view) heading(text string) { v.text("\n== " + text) }

// text writes lines as they are, above the bar when there is one.
func (v *view) text(text string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.write(text)
}

func (v *view) write(text string) {
	text = strings.TrimRight(text, "\n") + "\n"
	if v.progress != nil {
		// What is written to the bars' container appears above them.
		if _, err := io.WriteString(v.progress, text); err == nil {
			return
		}
	}
	io.WriteString(v.out, text)
}

// transfer shows how far a transfer has come.
func (v *view) transfer(p *bcdv1.TransferProgress) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if p.Phase != v.phase {
		v.endTransfer()
		v.phase, v.told, v.whole = p.Phase, time.Time{}, false
	}
	if p.BytesTotal <= 0 {
		return
	}
	detail := fmt.Sprintf("%s of %s", size(p.BytesDone), size(p.BytesTotal))
	if p.BytesPerSecond > 0 {
		detail += ", " + size(p.BytesPerSecond) + "/s"
	}
	if p.BytesPerSecond > 0 && p.EtaSeconds > 0 {
		detail += fmt.Sprintf(", %d s left", p.EtaSeconds)
	}
	v.detail = detail
	if !v.terminal {
		now := time.Now()
		whole := p.BytesDone >= p.BytesTotal && !v.whole
		line := fmt.Sprintf("%s  %-8s  %s %d%%  %s", elapsed(now.Sub(v.begin)), "image", p.Phase, 100*p.BytesDone/p.BytesTotal, detail)
		if whole || !v.whole && now.Sub(v.told) >= plainEvery {
			v.told, v.whole = now, whole
			v.write(line)
		}
		return
	}
	if v.bar == nil {
		v.progress = mpb.New(mpb.WithOutput(v.out), mpb.WithWidth(40))
		v.bar = v.progress.AddBar(p.BytesTotal,
			mpb.PrependDecorators(decor.Name("       "+p.Phase+" "), decor.Percentage(decor.WC{W: 5})),
			mpb.AppendDecorators(decor.Any(func(decor.Statistics) string {
				// Drawn by another goroutine, which waits for nothing.
				if !v.mu.TryLock() {
					return ""
				}
				defer v.mu.Unlock()
				return v.detail
			})))
	}
	v.bar.SetCurrent(p.BytesDone)
}

// transferred ends a transfer that is shown.
func (v *view) transferred() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.endTransfer()
	v.phase = ""
}

func (v *view) endTransfer() {
	if v.bar == nil {
		return
	}
	v.bar.Abort(true)
	v.progress.Wait()
	v.bar, v.progress = nil, nil
}

// elapsed is minutes and seconds, of one width.
func elapsed(d time.Duration) string {
	return fmt.Sprintf("%2d:%02d", int(d.Minutes()), int(d.Seconds())%60)
}

// size is a number of bytes in MiB.
func size(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }
