// Package pid1 is the process with pid 1 of a machine that has no other init:
// the ramdisk and the appliance.
//
// There are two processes, made of the same binary. Process 1 ([Main]) does what
// only it can do (mounts, reaping, the hardware watchdog, the console, the end
// of the machine) and nothing that could fail for another reason. Everything
// else runs in the supervisor process, which process 1 starts, watches and
// starts again: a panic in a DHCP parser is a restart, not a kernel panic.
//
// The supervisor process calls [Connect] and adds [Client.Service] to its
// services. It speaks to process 1 over an inherited pipe, one short line a
// message (see protocol.go): a heartbeat while it is healthy, and the requests
// to reboot, power off or kexec. Process 1 feeds the watchdog only while the
// heartbeats are fresh.
//
// Only process 1 reaps, and only what it started or inherited: in the
// supervisor process os/exec works as anywhere, and what its children leave
// behind is adopted and reaped by process 1.
package pid1
