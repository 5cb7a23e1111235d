// Package dispatch takes commands in: the acceptance checks in their order,
// the three lanes with their fixed worker pools, and the executors that run
// them.
package dispatch
