package clock

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const rtcPath = "/dev/rtc0"

// kernel is the clock of the running machine.
type kernel struct{}

func (kernel) now() time.Time { return time.Now() }

func (kernel) step(t time.Time) error {
	ts := unix.NsecToTimespec(t.UnixNano())
	return unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
}

// slew moves the clock by d at the kernel's rate of 0.5 ms a second
// (adjtimex(2), ADJ_OFFSET_SINGLESHOT, in microseconds).
func (kernel) slew(d time.Duration) error {
	tx := &unix.Timex{Modes: unix.ADJ_OFFSET_SINGLESHOT, Offset: d.Microseconds()}
	_, err := unix.Adjtimex(tx)
	return err
}

func (kernel) rtc() (time.Time, error) {
	f, err := os.Open(rtcPath)
	if err != nil {
		return time.Time{}, err
	}
	defer f.Close()
	r, err := unix.IoctlGetRTCTime(int(f.Fd()))
	if err != nil {
		return time.Time{}, fmt.Errorf("read %s: %w", rtcPath, err)
	}
	// The hardware clock of a server runs in UTC; one that was left at local
	// time is within a day, which NTP mends.
	return time.Date(int(r.Year)+1900, time.Month(r.Mon+1), int(r.Mday), int(r.Hour), int(r.Min), int(r.Sec), 0, time.UTC), nil
}

func (kernel) setRTC(t time.Time) error {
	f, err := os.OpenFile(rtcPath, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	t = t.UTC()
	err = unix.IoctlSetRTCTime(int(f.Fd()), &unix.RTCTime{
		Sec: int32(t.Second()), Min: int32(t.Minute()), Hour: int32(t.Hour()),
		Mday: int32(t.Day()), Mon: int32(t.Month()) - 1, Year: int32(t.Year()) - 1900,
	})
	if err != nil {
		return fmt.Errorf("set %s: %w", rtcPath, err)
	}
	return nil
}
