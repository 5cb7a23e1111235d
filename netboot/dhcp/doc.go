// Package dhcp tells machines on a network where to boot from, beside a DHCP
// server that is not ours, and gives addresses to the few that are listed for it.
//
// The parties:
//
//   - The client: a machine's firmware (UEFI by PXE or HTTP, BIOS ROM, iPXE,
//     U-Boot), or our ramdisk, which looks for the site agent.
//   - The LAN's DHCP server: it gives the client its address. We see its
//     broadcasts, and say so when what it sends takes the boot away from us.
//   - We: a proxy DHCP server (PXE 2.1 section 2.2.3). We answer a DISCOVER on
//     port 67 with an OFFER that names no address, and a REQUEST on port 4011
//     (which PXE calls BINL) with an ACK. A broadcast REQUEST on port 67 is
//     for the server that it names, and never ours, but for listed clients.
//   - A relay agent: carries a client's packets from another network to us; what
//     it brings is answered to it (RFC 2131 section 4.1).
//
// [Parse] makes a [Client] of a packet; the caller decides on a [Boot];
// [Answer] makes the packet of it. Both are pure. [Server] has the sockets, the
// bounds, and what is remembered of each client.
//
// # What our programs send and expect
//
// An iPXE that is ours says so by user class (option 77) "bcd", raw as iPXE
// sends it or as RFC 3004 has it: "set user-class bcd" in its script. That a
// client is some iPXE is never taken for it, because firmware has an iPXE too.
//
// The ramdisk sends vendor class (option 60) "bcd", in a DISCOVER or, when it
// has an address, in an INFORM. The answer has option 60 "bcd" as well and in
// option 43, whose meaning is the vendor class's own (RFC 2132 section 8.4), as
// sub-option 1 the URL to post to: [ConfigURL] reads it.
package dhcp
