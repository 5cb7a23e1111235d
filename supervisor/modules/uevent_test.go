package modules

import (
	"strings"
	"testing"
)

func TestParseUevent(t *testing.T) {
	// As Linux 6.12 sent it when a virtio NIC was hot-plugged.
	in := "add@/devices/pci0000:00/0000:00:04.0/virtio2\x00ACTION=add\x00DEVPATH=/devices/pci0000:00/0000:00:04.0/virtio2\x00" +
		"SUBSYSTEM=virtio\x00MODALIAS=virtio:d00000001v00001AF4\x00SEQNUM=1234\x00"
	e, err := parseUevent([]byte(in))
	want := uevent{"add", "/devices/pci0000:00/0000:00:04.0/virtio2", "virtio:d00000001v00001AF4"}
	if err != nil || e != want {
		t.Errorf("%+v, %v", e, err)
	}
	for _, bad := range []string{"", "add", "add@/x", "@/x\x00", "add@x\x00", "libudev\x00\xfe\xed", "add@/" + strings.Repeat("x", maxUevent) + "\x00"} {
		if e, err := parseUevent([]byte(bad)); err == nil {
			t.Errorf("%.20q: parsed as %+v", bad, e)
		}
	}
}

func FuzzParseUevent(f *testing.F) {
	f.Add([]byte("add@/devices/x\x00MODALIAS=a\x00"))
	f.Fuzz(func(t *testing.T, in []byte) {
		e, err := parseUevent(in)
		if err == nil && (e.action == "" || e.devpath == "") {
			t.Fatalf("%+v", e)
		}
	})
}

func TestTheKernelLetsUsListen(t *testing.T) {
	s, err := listenUevents()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.close(); err != nil {
		t.Error(err)
	}
}
