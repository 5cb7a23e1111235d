// Package netboot decides how other machines boot from a site, on a gateway's
// behalf.
//
// The parties:
//
//   - a machine's firmware, later its ramdisk: nothing that it says is trusted;
//   - the site agent, which is the code here: it answers firmware at once from
//     what it has, and only while it holds the site's boot lease;
//   - the gateway, which signs what the site shall do (BootTable) and what a
//     ramdisk may know (BootConfig), and says who holds the lease;
//   - another site agent of the same site, which must never answer too.
//
// The parts, each knowing only what is above it:
//
//   - Decide (decide.go, script.go): table row × architecture × firmware →
//     what a machine gets, a pure function;
//   - Table (table.go): the signed table, verified, kept over restarts;
//   - Lease (lease.go): the right to answer, a step function;
//   - Artefacts (artefacts.go, fetch.go): the files, verified before a byte of
//     them is served;
//   - Traces (trace.go, verdict.go): what happened to each machine, and which
//     hop failed;
//   - Relay and Ask (relay.go, ask.go): the two ends of a ramdisk's question
//     for its boot config;
//   - Sync (sync.go): the long poll that carries all of it.
//
// The packets are the rooms' below: dhcp, tftp and httpboot know nothing of
// tables or leases, and are given functions.
package netboot
