// Package servertime keeps what the daemon knows of its gateway's time: a mark
// and the monotonic time since. Deadlines are judged by it and by nothing
// else: a machine's own clock may be years off.
package servertime

import (
	"fmt"
	"time"
)

// MaxLeap is how far a mark may be ahead of the last one plus the time that
// passed since. More is refused, so that one gateway with a future clock
// cannot poison a node: every later deadline would look passed.
const MaxLeap = 5 * time.Minute

// SkewError is a refused mark.
type SkewError struct {
	// Have is mark + elapsed, Got the refused mark.
	Have, Got time.Time
}

func (e *SkewError) Error() string {
	return fmt.Sprintf("gateway time %s is %s ahead of what this node knows (%s), more than %s is refused: check the gateway's clock",
		e.Got.UTC().Format(time.RFC3339), e.Got.Sub(e.Have).Round(time.Second), e.Have.UTC().Format(time.RFC3339), MaxLeap)
}

// Clock is mark + elapsed. The zero value knows no time. It is not safe for
// concurrent use.
type Clock struct {
	floor  time.Time // never below, once there is a mark
	mark   time.Time
	at     time.Time // the monotonic reading that belongs to mark
	seen   time.Time // when a gateway last told a time that was taken
	marked bool
}

// New returns a clock without a mark that, once it has one, is never below
// floor: the latest server time that the journal remembers. So the mark does
// not go back over a restart either.
func New(floor time.Time) Clock { return Clock{floor: floor} }

// Mark takes server time as the gateway gave it; now is a reading of the
// node's monotonic clock. A mark behind what is known changes nothing; one
// more than MaxLeap ahead is a *SkewError and changes nothing.
func (c *Clock) Mark(now, server time.Time) error {
	server = server.Round(0)
	have, ok := c.Now(now)
	switch {
	case !ok:
		if server.Before(c.floor) {
			server = c.floor
		}
	case server.Sub(have) > MaxLeap:
		return &SkewError{Have: have, Got: server}
	case !server.After(have):
		c.seen = now
		return nil
	}
	c.mark, c.at, c.seen, c.marked = server, now, now, true
	return nil
}

// Now returns server time; false before the first mark.
func (c *Clock) Now(now time.Time) (time.Time, bool) {
	if !c.marked {
		return time.Time{}, false
	}
	elapsed := now.Sub(c.at)
	if elapsed < 0 {
		elapsed = 0
	}
	return c.mark.Add(elapsed), true
}

// Age is how long ago a gateway last told the time; false before the first
// mark.
func (c *Clock) Age(now time.Time) (time.Duration, bool) {
	return now.Sub(c.seen), c.marked
}
