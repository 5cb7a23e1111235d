package deploy

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/better-compute/bcd/boot"
	"github.com/better-compute/bcd/deploy/disk"
)

type rootsOf struct{ sys, proc, dev string }

func (d Deps) withDefaults() Deps {
	r := rootsOf{cmp.Or(d.Roots.Sys, "/sys"), cmp.Or(d.Roots.Proc, "/proc"), cmp.Or(d.Roots.Dev, "/dev")}
	if d.Client == nil {
		// A transport of its own: no shared connection, no overall timeout
		// (the source has one for silence, ctx one for everything).
		d.Client = &http.Client{Transport: &http.Transport{Proxy: http.ProxyFromEnvironment}}
	}
	if d.Clock == nil {
		d.Clock = WallClock{}
	}
	if d.Disks == nil {
		d.Disks = func(ctx context.Context) ([]disk.Disk, error) { return disk.List(ctx, d.Roots) }
	}
	if d.Open == nil {
		d.Open = func(c disk.Disk) (Target, error) {
			dev, err := disk.Open(c.Node)
			if err != nil {
				return nil, err
			}
			return dev, nil
		}
	}
	if d.Variables == nil {
		d.Variables = func() (*boot.Variables, error) {
			return boot.OpenVariables(filepath.Join(r.sys, "firmware/efi/efivars"))
		}
	}
	if d.Memory == nil {
		d.Memory = r.memory
	}
	if d.PartitionReady == nil {
		d.PartitionReady = r.partitionReady
	}
	if d.Progress == nil {
		d.Progress = func(Progress) {}
	}
	if d.Log == nil {
		d.Log = slog.New(slog.DiscardHandler)
	}
	return d
}

// memory reads MemAvailable, which leaves out what a ramdisk's files take.
func (r rootsOf) memory() (int64, error) {
	f, err := os.Open(filepath.Join(r.proc, "meminfo"))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	for s.Scan() {
		w := strings.Fields(s.Text())
		if len(w) == 3 && w[0] == "MemAvailable:" && w[2] == "kB" {
			kib, err := strconv.ParseInt(w[1], 10, 64)
			if err != nil || kib < 0 || kib > 1<<50 {
				return 0, fmt.Errorf("MemAvailable %q is not a number of kB", w[1])
			}
			return kib << 10, nil
		}
	}
	return 0, errors.Join(errors.New("no MemAvailable in meminfo"), s.Err())
}

// Progress is how far a phase is.
type Progress struct {
	Phase Phase
	// Done and Total are bytes: of the file as it travels in PhaseStream, of
	// the raw image in PhaseVerify. Total is 0 when it is not known.
	Done, Total int64
	// Rate is bytes a second, over the last seconds.
	Rate int64
	// ETA is -1 when it is not known.
	ETA time.Duration
}

// meter turns byte counts into progress.
type meter struct {
	clock  Clock
	report func(Progress)
	phase  Phase
	done   int64
	rate   float64
	lastAt time.Time
	last   int64
}

const (
	// rateEvery is the least span a rate is taken over, and rateWeight what a
	// new one counts: the figure follows within some seconds and does not
	// flicker.
	rateEvery  = time.Second
	rateWeight = 0.4
)

func (m *meter) begin(p Phase) {
	*m = meter{clock: m.clock, report: m.report, phase: p, lastAt: m.clock.Now()}
	m.report(Progress{Phase: p, ETA: -1})
}

func (m *meter) set(done, total int64) {
	m.done = done
	if span := m.clock.Now().Sub(m.lastAt); span >= rateEvery {
		now := float64(done-m.last) / span.Seconds()
		if m.rate == 0 {
			m.rate = now
		}
		m.rate += rateWeight * (now - m.rate)
		m.lastAt, m.last = m.clock.Now(), done
	}
	p := Progress{Phase: m.phase, Done: done, Total: max(total, 0), Rate: int64(m.rate), ETA: -1}
	if total > 0 && m.rate >= 1 {
		p.ETA = time.Duration(float64(total-done) / m.rate * float64(time.Second))
	}
	m.report(p)
}
