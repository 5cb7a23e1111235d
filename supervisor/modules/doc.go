// Package modules finds and loads the kernel modules that a machine's devices
// need.
//
// A device says what it is in its modalias; depmod's files in
// /lib/modules/RELEASE say which modules take which aliases, and what those
// need in turn. So no list of drivers stands anywhere in code: at start every
// device is looked at (coldplug), until loading drivers brings up no new ones;
// then the kernel's uevents name those that come later. What no device asks for
// (file systems, efivarfs) is listed in [ListPath].
package modules
