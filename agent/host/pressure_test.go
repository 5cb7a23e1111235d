package host

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParsePressure(t *testing.T) {
	p, err := ParsePressure("some avg10=4.29 avg60=2.61 avg300=100.00 total=22559058\nfull avg10=0.00 avg60=0.05 avg300=0.00 total=7\n")
	if want := (Pressure{Stall{429, 261, 10000, 22559058}, Stall{0, 5, 0, 7}}); err != nil || p != want {
		t.Errorf("%+v %v", p, err)
	}
	if p, err := ParsePressure("some avg10=0.10 avg60=0.00 avg300=0.00 total=1\n"); err != nil || p.Some.Avg10 != 10 { // cpu before 5.13
		t.Errorf("%+v %v", p, err)
	}
	for _, bad := range []string{"", "full avg10=0.00", "some avg10=x.00", "some avg10=1.5", "some avg10=-1.00", "some total=x"} {
		if _, err := ParsePressure(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

func FuzzParsePressure(f *testing.F) {
	f.Add("some avg10=4.29 avg60=2.61 avg300=2.80 total=22559058\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")
	f.Fuzz(func(t *testing.T, s string) {
		if p, err := ParsePressure(s); err == nil && p.Some.Avg10 < 0 {
			t.Errorf("%+v", p)
		}
	})
}

func TestReadPressure(t *testing.T) {
	proc := t.TempDir()
	if err := os.Mkdir(filepath.Join(proc, "pressure"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(proc, "pressure/memory"), []byte("some avg10=1.00 avg60=0.00 avg300=0.00 total=1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	got, err := ReadPressure(Roots{Proc: proc})
	if len(got) != 1 || got["memory"].Some.Avg10 != 100 || err == nil {
		t.Errorf("%+v %v", got, err)
	}
}

func TestClockState(t *testing.T) {
	if c := clockOf(0, &unix.Timex{Maxerror: 1500}); !c.Synchronized || c.MaxErrorMicros != 1500 {
		t.Errorf("%+v", c)
	}
	if clockOf(timeError, &unix.Timex{}).Synchronized || clockOf(0, &unix.Timex{Status: statusUnsynchronised}).Synchronized {
		t.Error("an unsynchronized clock passes")
	}
	if _, err := ReadClock(); err != nil {
		t.Error(err)
	}
}

func TestSmallParsers(t *testing.T) {
	for in, want := range map[string]int{"": 0, "0": 1, "0-3": 4, "0-3,8-11\n": 8, "0,2": 2} {
		if n, err := countCPUList(in); err != nil || n != want {
			t.Errorf("countCPUList(%q) = %d, %v", in, n, err)
		}
	}
	for _, bad := range []string{"x", "3-1", "0-", "0-99999999", ",", "1--2"} {
		if _, err := countCPUList(bad); err == nil {
			t.Errorf("countCPUList(%q) was taken", bad)
		}
	}
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 1 << 40: "1 TiB", 7681501126656: "7 TiB", 1<<60 + 1<<59: "1536 PiB"} {
		if got := Bytes(n); got != want {
			t.Errorf("Bytes(%d) = %s, want %s", n, got, want)
		}
	}
	if _, ok := memTotalKiB("MemTotal: x kB", "MemTotal:"); ok {
		t.Error("a number that is none")
	}
}
