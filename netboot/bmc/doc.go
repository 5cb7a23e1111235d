// Package bmc turns machines on and off, sets where they boot from, and reads
// what they are, through their management controllers; and it makes single HTTP
// requests to other services that stand on the same network.
//
// Parties: the gateway, which signed the command; this site, whose
// bmc_networks are the only addresses ever reached; and the BMC (or PDU, or
// switch), whose answers are hostile input: bounded, never followed to another
// host, and never believed when they say that something was set: it is read
// back.
//
// Credentials come as a reference inside the command and live in memory while
// the command runs. A BMC that puts them into an answer does not bring them
// further: every text that leaves this package is searched for them. Over
// Redfish they go only to the holder of the pinned certificate, unless the
// command says insecure. IPMI has nothing to pin.
//
// An effect is asked for once. A request whose answer is lost is not repeated:
// the state is read, and where that does not show what happened the command
// ends as INDETERMINATE. The same holds for a run that a crash interrupted:
// it looks, and asks for nothing.
package bmc
