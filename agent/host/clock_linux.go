package host

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Kernel clock state bits (adjtimex(2)).
const (
	statusUnsynchronised = 0x0040 // STA_UNSYNC
	timeError            = 5      // TIME_ERROR
)

// Clock is the state of the kernel's clock discipline.
type Clock struct {
	// Synchronized says that something (NTP, PTP) keeps the clock and has
	// told the kernel so.
	Synchronized bool `json:"synchronized"`
	// MaxErrorMicros is the kernel's bound of the clock's error.
	MaxErrorMicros int64 `json:"max_error_us"`
}

// ReadClock asks the kernel (adjtimex(2), read only; needs no privilege).
func ReadClock() (Clock, error) {
	var t unix.Timex
	state, err := unix.Adjtimex(&t)
	if err != nil {
		return Clock{}, fmt.Errorf("clock: adjtimex: %w", err)
	}
	return clockOf(state, &t), nil
}

func clockOf(state int, t *unix.Timex) Clock {
	return Clock{
		Synchronized:   state != timeError && t.Status&statusUnsynchronised == 0,
		MaxErrorMicros: int64(t.Maxerror),
	}
}
