// Package gateway is the reference gateway: what daemons hold their session
// with, what operators queue commands and set specs through, and what every
// test talks to.
//
// The parties: a daemon dials in with a node certificate (SessionService,
// IdentityService) or, before it has one, with a join token (JoinService); an
// operator calls OperatorService over a unix socket, or over TLS with an
// operator token. Files (images, log bundles) travel as blobs.
//
// What matters is in the Store and is durable before it is acknowledged;
// sessions, heartbeats, lane counters and progress are in memory. Losing the
// process loses open streams and nothing else.
//
// How to read it: records.go, siterecords.go and store.go say what is kept.
// ledger.go decides what may become of a command. sessioncore.go is one session
// as a step function; session.go is the shell of goroutines and I/O around it.
// lease.go decides which agent of a site answers its machines, boottable.go
// what those are given, bootconfig.go what their ramdisks are told; site.go is
// the service around them. join.go, operator.go, siteoperator.go and blob.go
// are the other services; gateway.go puts them together and listen.go opens the
// sockets. The keys are in gateway/keys.
package gateway
