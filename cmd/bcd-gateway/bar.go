package main

import (
	"context"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"google.golang.org/protobuf/proto"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// transferBar draws a command's progress.
type transferBar struct {
	progress *mpb.Progress
	bar      *mpb.Bar
	text     atomic.Pointer[string]
}

func newTransferBar(ctx context.Context, w io.Writer, kind string) *transferBar {
	t := &transferBar{progress: mpb.NewWithContext(ctx, mpb.WithOutput(w), mpb.WithWidth(64))}
	waiting := "waiting"
	t.text.Store(&waiting)
	t.bar = t.progress.AddBar(0,
		mpb.PrependDecorators(decor.Name(kind+" ")),
		mpb.AppendDecorators(decor.Any(func(decor.Statistics) string { return *t.text.Load() })))
	return t
}

func (t *transferBar) show(c *bcdv1.CommandInfo) {
	text := commandWord(c)
	var p bcdv1.TransferProgress
	if c.Progress != nil && proto.Unmarshal(c.Progress.Body, &p) == nil && p.Phase != "" {
		text = progressText(&p)
		t.bar.SetTotal(p.BytesTotal, false)
		t.bar.SetCurrent(p.BytesDone)
	}
	t.text.Store(&text)
}

// progressText is a transfer in one short line.
func progressText(p *bcdv1.TransferProgress) string {
	text := p.Phase
	if p.BytesTotal > 0 {
		text += fmt.Sprintf(" %d%%", 100*p.BytesDone/p.BytesTotal)
	}
	text += " " + size(p.BytesDone)
	if p.BytesPerSecond > 0 {
		text += ", " + size(p.BytesPerSecond) + "/s"
	}
	if p.EtaSeconds >= 0 && p.BytesPerSecond > 0 {
		text += ", " + short(time.Duration(p.EtaSeconds)*time.Second) + " left"
	}
	return text
}

func (t *transferBar) stop() {
	t.bar.Abort(false)
	t.progress.Wait()
}
