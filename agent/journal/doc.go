// Package journal is what a daemon must not forget: the commands it took,
// what became of them, and the events its gateway has not yet acknowledged.
//
// A command's life is accepted, started, finished, acknowledged; each step is
// on disk before what follows it happens. An id stays known at least until
// its deadline has passed, acknowledged or not. Events have a sequence
// without holes and are deleted only when the gateway acknowledged them.
//
// [Open] keeps all that in one bbolt file of at most 64 MiB and mode 0600;
// [NewMemory] is its twin for simulations. Both are the same ledger and pass
// the suite in package journaltest. Nothing is written while nothing happens.
//
// # Damage
//
// A journal that is silently empty would do everything twice. So its id and
// how far it had come are also kept outside it, by an [Anchor]; a file that is
// missing, of length zero, damaged, or younger than the anchor is moved aside
// and reported as a [Loss]. bbolt crashes the whole process on a truncated
// file (SIGBUS), so a child process opens it first, see [ProbeMain].
package journal

import (
	"errors"
	"fmt"
)

// The bounds of a journal.
const (
	// MaxBytes is the file's bound. bbolt stops growing one AllocSize before.
	MaxBytes = 64 << 20
	// allocBytes is bbolt's growth step. The default of 16 MiB would stop the
	// file near 50 MiB.
	allocBytes = 1 << 20

	// MaxEvents bounds the events that are not acknowledged. Telemetry stops
	// at maxTelemetryEvents, so that the rest is there for what is never
	// dropped, and acceptance stops at acceptEvents.
	MaxEvents          = 10000
	maxTelemetryEvents = 8000
	acceptEvents       = 9500
	// The same in bytes. An event of 4 KiB costs bbolt up to 6 KiB, because a
	// page holds at least two keys.
	maxEventBytes     = 24 << 20
	maxTelemetryBytes = 16 << 20
	acceptEventBytes  = 20 << 20

	// MaxEventBytes bounds one event, marshalled: 4 KiB of JSON and its
	// envelope.
	MaxEventBytes = 8 << 10
	// MaxOutcomeBytes bounds one outcome, marshalled: a result of 64 KiB, a
	// message of 4 KiB and the rest.
	MaxOutcomeBytes = 72 << 10
	// MaxSignedBytes bounds one signed command: a body of 1 MiB, chains and
	// the rest.
	MaxSignedBytes = 1<<20 + 128<<10

	// maxCommandBytes bounds what all commands take, room reserved for
	// outcomes included. Half of it again is lost to bbolt's pages at worst,
	// and what events and commands take together stays below MaxBytes.
	maxCommandBytes = 16 << 20
	// maxCommands bounds the ids that are known at once.
	maxCommands = 20000
	// maxKeptOutcomes bounds the outcomes kept after acknowledgement; the
	// oldest are reduced to their status.
	maxKeptOutcomes = 2 << 20
	// entryBytes is what an entry without bodies is counted as.
	entryBytes = 512
)

// Errors of a journal. They are wrapped with the id or value.
var (
	// ErrKnown: the id is in the journal already.
	ErrKnown = errors.New("command is known already")
	// ErrUnknown: no such id.
	ErrUnknown = errors.New("command is not known")
	// ErrState: the step does not follow from the state the command is in.
	ErrState = errors.New("command is in another state")
	// ErrFull: the bound, or the disk's end, is reached. Acknowledgements make
	// room.
	ErrFull = errors.New("journal is full")
	// ErrTooLarge: more than one record may hold.
	ErrTooLarge = errors.New("too large for the journal")
	// ErrClosed: the journal was closed.
	ErrClosed = errors.New("journal is closed")
)

// State is where a command is in its life.
type State int

// The states, in order.
const (
	Unknown State = iota
	Accepted
	Started
	Finished
	Acknowledged
)

func (s State) String() string {
	switch s {
	case Unknown:
		return "unknown"
	case Accepted:
		return "accepted"
	case Started:
		return "started"
	case Finished:
		return "finished"
	case Acknowledged:
		return "acknowledged"
	}
	return fmt.Sprintf("State(%d)", int(s))
}

// AfterState is where an after-acknowledgement action is in its life.
type AfterState int

// The states of an after-acknowledgement action.
const (
	AfterNone AfterState = iota
	// AfterPending: waits for the acknowledgement, or for its turn after it.
	AfterPending
	// AfterBegun is on disk before the action begins. It never begins again.
	AfterBegun
	// AfterDone: happened, or was given up.
	AfterDone
)

// Entry is what the journal knows of a command beside its bodies. Times are
// server time in milliseconds; 0 is not known.
type Entry struct {
	ID         string     `json:"id"`
	Kind       string     `json:"kind,omitempty"`
	Lane       int32      `json:"lane,omitempty"`
	State      State      `json:"state"`
	DeadlineMS int64      `json:"deadline_ms,omitempty"`
	AcceptedMS int64      `json:"accepted_ms,omitempty"`
	StartedMS  int64      `json:"started_ms,omitempty"`
	FinishedMS int64      `json:"finished_ms,omitempty"`
	Status     int32      `json:"status,omitempty"` // bcd.v1.OutcomeStatus
	Rejection  int32      `json:"rejection,omitempty"`
	After      string     `json:"after,omitempty"`
	AfterState AfterState `json:"after_state,omitempty"`
	// BootID is the boot in which the run was started, and later the one in
	// which it finished.
	BootID string `json:"boot_id,omitempty"`
	// SignedBytes and OutcomeBytes are the sizes of the bodies that are kept.
	SignedBytes  int `json:"signed_bytes,omitempty"`
	OutcomeBytes int `json:"outcome_bytes,omitempty"`
}

// Finish is the end of a command.
type Finish struct {
	// Outcome is sent to the gateway exactly as it is here.
	Outcome    []byte
	Status     int32
	Rejection  int32
	After      string
	FinishedMS int64
	BootID     string
}

// EventClass says what may be done to an event at the bound.
type EventClass int

// The classes of events.
const (
	// Durable events are never dropped.
	Durable EventClass = iota
	// Telemetry is dropped at the bound, and counted.
	Telemetry
)

// Loss says that an earlier journal is gone.
type Loss struct {
	// JournalID is the lost one's id, or "unknown".
	JournalID string
	// Reason is a sentence.
	Reason string
	// MovedTo is where the damaged file is now; empty when there was none.
	MovedTo string
}

// Stats is how full a journal is.
type Stats struct {
	Accepted, Started, Unacknowledged, Known int
	Events                                   int
	EventBytes                               int64
	// DroppedEvents were not yet reported by a GAP marker.
	DroppedEvents int64
	// Bytes is what bodies and reservations take.
	Bytes int64
	// FileBytes is the file's size; 0 in memory.
	FileBytes int64
	// WriteError is the last write's, when it failed.
	WriteError string
}
