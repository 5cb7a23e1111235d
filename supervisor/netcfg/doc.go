// Package netcfg gives a machine its network: every NIC with a link gets an
// address by DHCPv4, all at once, and IPv6 by the kernel's own SLAAC.
//
// The parts, from the inside out:
//
//   - [Lease]: what a DHCP server said, checked (lease.go);
//   - [Client]: the life of one lease as a step function, RFC 2131 section 4.4:
//     no goroutine, no clock, no I/O (client.go);
//   - exchange: the packets, by insomniacslk/dhcp (exchange.go);
//   - host: addresses, routes and MTU by netlink, resolv.conf (host.go, resolv.go);
//   - [Service]: watches links, runs a Client for each NIC, and says what there is
//     (service.go, nic.go).
//
// A NIC that hears no DHCP server delays no other. Each NIC's routes have a
// metric by the order of the interfaces, so that the first that works is used
// and the next takes over when its lease is gone.
package netcfg
