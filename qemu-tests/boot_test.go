package qemutests

import (
	"testing"
)

func TestRamdiskBootsAndJoins(t *testing.T) {
	w := newWorld(t)
	vm := w.ramdisk("bare", nil)
	m := w.connected(vm, "ramdisk", nil)
	if m.State != "ramdisk" {
		t.Errorf("the machine's state is %q (%s)", m.State, m.StateMessage)
	}
	ping := w.ended(vm, w.send("send", "diag.ping", m.ID, "--payload", "hello").ID)
	if ping.Outcome.Status != "succeeded" {
		t.Errorf("diag.ping: %+v", ping.Outcome)
	}
	t.Log(w.timeline())
}
