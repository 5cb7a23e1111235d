// Package dispatch takes commands in: the acceptance checks in their order,
// the three lanes with their fixed worker pools, and the executors that run
// them.
//
// [Core] is a step function: it decides, and neither waits nor writes. What it
// wants done comes back as [Effect]s: a write to the journal, and what follows
// only once that is durable. [Dispatcher] is the shell around it, with the
// journal, the workers and the timer.
package dispatch

import (
	"time"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Bounds of commands.
const (
	// MaxBody is the longest body of a command.
	MaxBody = 1 << 20
	// MaxResult is the longest result message.
	MaxResult = 64 << 10
	// MaxProgress is the longest progress message.
	MaxProgress = 4 << 10
	// MaxAhead is how far ahead a deadline may be.
	MaxAhead = 7 * 24 * time.Hour
	// maxMessage bounds the sentence in an outcome.
	maxMessage = 4 << 10

	maxIDBytes    = 64
	maxNameBytes  = 128
	progressEvery = time.Second
	// retryEvery is how often a write that failed is tried again.
	retryEvery = 5 * time.Second
	// afterGrace is how long an after-acknowledgement action waits for other
	// commands to end: a reboot must not turn them INDETERMINATE needlessly.
	afterGrace = 30 * time.Second
	// afterPatience is how long a machine may take to go down after its
	// reboot was begun, before this process takes commands again.
	afterPatience = 10 * time.Minute
)

// LaneSize is a lane's fixed pool and its bounded queue. A lane's credits are
// both together.
type LaneSize struct{ Workers, Places int }

// Lanes gives each lane's size: workers as the contract has them; the queues
// hold a few minutes of short commands, or a few long ones.
var Lanes = map[bcdv1.Lane]LaneSize{
	bcdv1.Lane_LANE_CONTROL:   {4, 64},
	bcdv1.Lane_LANE_PROVISION: {2, 16},
	bcdv1.Lane_LANE_BULK:      {1, 4},
}

// laneOrder is the order in which lanes are looked at.
var laneOrder = []bcdv1.Lane{bcdv1.Lane_LANE_CONTROL, bcdv1.Lane_LANE_PROVISION, bcdv1.Lane_LANE_BULK}

// LaneName is a lane's name in logs and messages.
func LaneName(l bcdv1.Lane) string {
	switch l {
	case bcdv1.Lane_LANE_CONTROL:
		return "control"
	case bcdv1.Lane_LANE_PROVISION:
		return "provision"
	case bcdv1.Lane_LANE_BULK:
		return "bulk"
	}
	return "unknown"
}
