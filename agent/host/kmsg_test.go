package host

import (
	"errors"
	"io"
	"reflect"
	"syscall"
	"testing"
)

// reads is a device whose reads are given.
type reads []any

func (r *reads) Read(p []byte) (int, error) {
	if len(*r) == 0 {
		return 0, io.EOF
	}
	next := (*r)[0]
	*r = (*r)[1:]
	if err, ok := next.(error); ok {
		return 0, err
	}
	return copy(p, next.(string)), nil
}

func TestKmsgReader(t *testing.T) {
	dev := &reads{
		"6,100,5000,-;already seen\n",
		"6,101,5001,-;first\n SUBSYSTEM=pci\n DEVICE=+pci:0000:05:00.0\n",
		"rubbish without a header\n",
		syscall.EPIPE, // the kernel overwrote what we had not read
		"4,900,6000,-,caller=T1;after the flood\n",
		syscall.EINVAL,
		syscall.EINTR,
		"3,901,6001,-;back\\x5cslash \\x1b[31m \\xc3\\xa9\n",
		"6,901,6001,-;the same again\n",
	}
	k := NewKmsgReader(dev, "boot", KmsgCursor{BootID: "boot", Next: 101})
	var got []KmsgEvent
	for {
		e, err := k.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, e)
	}
	want := []KmsgEvent{
		{KmsgRecord: KmsgRecord{6, 101, 5001, "first"}},
		{Gap: true},
		{KmsgRecord: KmsgRecord{4, 900, 6000, "after the flood"}},
		{KmsgRecord: KmsgRecord{3, 901, 6001, `back\slash \x1b[31m é`}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
	if k.Malformed != 2 || k.Cursor() != (KmsgCursor{"boot", 902}) {
		t.Errorf("%d malformed, cursor %+v", k.Malformed, k.Cursor())
	}
	// After a reboot numbers start again: the old cursor must hide nothing.
	k = NewKmsgReader(&reads{"6,1,1,-;new boot\n"}, "boot 2", k.Cursor())
	if e, err := k.Next(); err != nil || e.Text != "new boot" {
		t.Errorf("%+v %v", e, err)
	}
}

func FuzzParseKmsg(f *testing.F) {
	f.Add([]byte("6,101,5001,-;first\n SUBSYSTEM=pci\n"))
	f.Add([]byte(`3,901,6001,-;a\x5cb\xff`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ParseKmsg(b)
		if err == nil && (r.Priority > 7 || r.Micros < 0 || len(r.Text) > len(b)*3) {
			t.Errorf("%+v", r)
		}
		var s FaultScanner
		s.Step(r.Text)
	})
}

func TestXIDCorpus(t *testing.T) {
	const first = "NVRM: The NVIDIA GPU 0000:b3:00.0"
	for _, test := range []struct {
		name  string
		lines []string
		want  []GPUFault
	}{
		{"79", []string{"NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."},
			[]GPUFault{{79, "0000:05:00.0", AdviceRestart, -1, "", "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."}}},
		{"old form", []string{"NVRM: Xid (0000:03:00): 14, Channel 00000001"},
			[]GPUFault{{14, "0000:03:00.0", AdviceUnknown, -1, "", "Channel 00000001"}}},
		{"nvlink, double spaces, link -1", []string{"NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link -1 (0x00a00000 0x00000001)"},
			[]GPUFault{{149, "0018:01:00.0", AdviceWorkflow, 10, "", "NETIR_LINK_EVT Fatal XC0 i0 Link -1 (0x00a00000 0x00000001)"}}},
		{"recovery action", []string{"NVRM: Xid (PCI:0000:18:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)"},
			[]GPUFault{{154, "0000:18:00.0", AdviceResetGPU, -1, "Drain and Reset", "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)"}}},
		{"recovery done", []string{"NVRM: Xid (PCI:0000:18:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"},
			[]GPUFault{{154, "0000:18:00.0", AdviceIgnore, -1, "None", "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"}}},
		{"gone, one line", []string{"NVRM: GPU 0000:18:00.0: GPU has fallen off the bus."},
			[]GPUFault{{0, "0000:18:00.0", AdviceRestart, -1, "", "GPU has fallen off the bus"}}},
		{"gone, three lines with others between", []string{first, "usb 1-1: new device", "NVRM: (PCI ID: 10de:2330) installed in this system has", "NVRM: fallen off the bus and is not responding to commands."},
			[]GPUFault{{0, "0000:b3:00.0", AdviceRestart, -1, "", "GPU has fallen off the bus"}}},
		{"last line alone", []string{"NVRM: fallen off the bus and is not responding to commands."}, nil},
		{"no xid", []string{"Xid error: xyz", "NVRM: Xid (PCI:0000:05:00): none, x", "NVRM: Xid (PCI:zz): 79, x", "NVRM: loading NVIDIA UNIX Open Kernel Module"}, nil},
		{"no message", []string{"NVRM: Xid (PCI:0000:05:00): 48"}, []GPUFault{{48, "0000:05:00.0", AdviceWorkflow, -1, "", ""}}},
		{"long domain", []string{"NVRM: Xid (PCI:0000460E:00:00): 31, pid=1, name=x, MMU Fault"},
			[]GPUFault{{31, "460e:00:00.0", AdviceRestartApp, -1, "", "pid=1, name=x, MMU Fault"}}},
	} {
		var s FaultScanner
		var got []GPUFault
		for _, line := range test.lines {
			if f, ok := s.Step(line); ok {
				got = append(got, f)
			}
		}
		if !reflect.DeepEqual(got, test.want) {
			t.Errorf("%s\n got %+v\nwant %+v", test.name, got, test.want)
		}
	}
	// The last line comes too late to belong to the first.
	var s FaultScanner
	s.Step(first)
	for range goneWindow {
		s.Step("something else")
	}
	if f, ok := s.Step("NVRM: fallen off the bus and is not responding"); ok {
		t.Errorf("%+v", f)
	}
}

func TestCatalogue(t *testing.T) {
	for xid := range 400 {
		n := 0
		for _, entry := range catalogue {
			for _, r := range entry.ranges {
				if xid >= r[0] && xid <= r[1] {
					n++
				}
			}
		}
		if n > 1 {
			t.Errorf("xid %d is in the catalogue %d times", xid, n)
		}
	}
	for xid, want := range map[int]Advice{13: AdviceRestartApp, 31: AdviceRestartApp, 43: AdviceIgnore, 45: AdviceWorkflow, 63: AdviceIgnore, 79: AdviceRestart, 94: AdviceRestartApp, 95: AdviceResetGPU, 109: AdviceResetGPU, 151: AdviceRestartVM, 999: AdviceUnknown} {
		if got := AdviceFor(xid); got != want {
			t.Errorf("xid %d: %s, want %s", xid, got, want)
		}
	}
	if AdviceRestartApp.NeedsReset() || AdviceUnknown.NeedsReset() || !AdviceResetGPU.NeedsReset() || !AdviceRestart.NeedsReset() {
		t.Error("needs reset")
	}
}
