package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestMedian(t *testing.T) {
	for want, of := range map[time.Duration][]time.Duration{1: {1}, 3: {9, 1, 3}, 4: {1, 5, 3, 9}} {
		if got := median(of); got != want {
			t.Errorf("%v: %d, want %d", of, got, want)
		}
	}
}

func TestReport(t *testing.T) {
	text := report([]time.Duration{4 * time.Second, 2 * time.Second, 3 * time.Second}, []time.Duration{6 * time.Second})
	if !strings.HasSuffix(text, "\nbench-boot: ratio 2.00, within the aim of 3\n") {
		t.Error(text)
	}
	if text := report([]time.Duration{time.Second}, []time.Duration{4 * time.Second}); !strings.Contains(text, "ratio 4.00, above the aim") {
		t.Error(text)
	}
}

// The text may come in pieces, to a file that was not there before.
func TestLook(t *testing.T) {
	path := filepath.Join(t.TempDir(), "console")
	seen := make(chan time.Time, 1)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	go look(ctx, path, "session up", seen)
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, piece := range []string{"some sess", "ion", " up more"} {
		if _, err := f.WriteString(piece); err != nil {
			t.Fatal(err)
		}
	}
	<-seen
}
