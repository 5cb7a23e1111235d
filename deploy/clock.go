package deploy

import (
	"context"
	"time"
)

// Clock is time as the deployer sees it. WallClock is the real one.
type Clock interface {
	Now() time.Time
	// AfterFunc calls f once d has passed, unless stop is called first.
	AfterFunc(d time.Duration, f func()) (stop func() bool)
	// Sleep returns ctx's error when that ends first.
	Sleep(ctx context.Context, d time.Duration) error
}

// WallClock is the machine's monotonic clock.
type WallClock struct{}

// Now implements Clock.
func (WallClock) Now() time.Time { return time.Now() }

// AfterFunc implements Clock.
func (WallClock) AfterFunc(d time.Duration, f func()) func() bool {
	return time.AfterFunc(d, f).Stop
}

// Sleep implements Clock.
func (WallClock) Sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
