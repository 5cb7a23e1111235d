// Package rig runs virtual machines for boot tests and for the demo.
//
// Parties: the machine (one QEMU process with its firmware variables, disks and
// network cards), its console (a file, read while it grows), QMP (QEMU's
// control socket), and a gateway (a child process that tests kill and start
// again). Machines reach the host, and with it the gateway, at 10.0.2.2.
//
// What a test must know:
//
//   - QEMU's exit status says nothing: a panic of process 1 ends with 0 too. A
//     test passes by a positive record, on the console or at the gateway.
//   - Without hardware virtualisation QEMU emulates (TCG), ten times slower and
//     never at the same speed twice. So no wait has a time of its own: it ends
//     when the test's deadline comes, or when nothing at all happens in the
//     machine for too long (see Patience).
//   - Only a machine that never said a byte is started again by itself.
//   - SMBIOS strings are given by file, so that a token is in no process list.
package rig
