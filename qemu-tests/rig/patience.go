package rig

import (
	"fmt"
	"time"
)

// Patience is how long a machine may show no sign of life (no byte on the
// console, no block read or written) before a wait for it fails.
type Patience time.Duration

// The figures are Tailscale's for the same kind of test; a busy host without
// KVM has been seen to need two minutes for one step of a boot.
const (
	patienceKVM = Patience(45 * time.Second)
	patienceTCG = Patience(4 * time.Minute)
)

func patience(accel string) Patience {
	if accel == KVM {
		return patienceKVM
	}
	return patienceTCG
}

// signs are what tells whether a machine does something.
type signs struct {
	console int64
	blocks  uint64
}

// vigil watches signs of life as a step function.
type vigil struct {
	limit Patience
	last  signs
	since time.Time
}

// step takes what is seen now; it fails when nothing changed for too long.
func (v *vigil) step(now time.Time, seen signs) error {
	if v.since.IsZero() || seen != v.last {
		v.last, v.since = seen, now
		return nil
	}
	if silent := now.Sub(v.since); silent > time.Duration(v.limit) {
		return fmt.Errorf("the machine is silent: nothing on the console, nothing on its disks for %s", silent.Round(time.Second))
	}
	return nil
}
