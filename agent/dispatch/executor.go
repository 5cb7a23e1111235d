package dispatch

import (
	"context"
	"time"

	"google.golang.org/protobuf/proto"
)

// Command is an accepted command as its executor sees it.
type Command struct {
	ID             string
	Kind           string
	NodeID         string
	IdempotencyKey string
	IssuedBy       string
	// Body is the kind's body message, at most 1 MiB.
	Body []byte
	// Deadline is server time.
	Deadline time.Time
	// BootID is the boot in which the run was started. In Recover it differs
	// from the machine's own when the machine went down in between.
	BootID string
	// StillDue says whether the effect may begin now: it compares the deadline
	// with server time once more. An executor that prepares for a while calls
	// it right before its first effect and returns the error as it is.
	StillDue func() error
}

// Progress takes a kind's progress message. The latest wins; at most one a
// second reaches the gateway; none is journaled. It never blocks.
type Progress func(proto.Message)

// After is what a node does once the gateway acknowledged the outcome, and
// not before.
type After string

// The actions a result may carry.
const (
	AfterNothing After = ""
	AfterReboot  After = "reboot"
	AfterKexec   After = "kexec"
)

// Result is a success.
type Result struct {
	// Body is the kind's result message, at most 64 KiB marshalled; may be nil.
	Body proto.Message
	// Message is a sentence for people.
	Message string
	After   After
}

// Failure is an error with what an operator needs: a word for programs and a
// sentence that names the value and the remedy. Any other error returned by an
// executor becomes a Failure with the code FAILED.
type Failure struct {
	Code    string
	Message string
	// Indeterminate: the effect may have happened, in part or whole.
	Indeterminate bool
	// Body is a result message that is worth keeping all the same; may be nil.
	Body proto.Message
	Err  error
}

func (f *Failure) Error() string { return f.Message }
func (f *Failure) Unwrap() error { return f.Err }

// Recovery is what an executor says of a run that was started and never
// finished: the process, or the machine, went down in between.
type Recovery struct {
	Action RecoveryAction
	// Result counts when Action is Done.
	Result Result
	// Message says why, for the outcome.
	Message string
}

// RecoveryAction is one of Unknown, Resume and Done.
type RecoveryAction int

const (
	// Unknown ends the command as INDETERMINATE. It is the zero value.
	Unknown RecoveryAction = iota
	// Resume runs it again under the same idempotency key.
	Resume
	// Done is for what is provably done, for example a reboot whose boot id
	// changed.
	Done
)

// Executor is one command kind. Run is called at most once for a command, but
// for those whose Recover answered Resume. Its context ends when the command
// is cancelled or the daemon stops.
type Executor interface {
	Kind() string
	Run(ctx context.Context, cmd Command, progress Progress) (Result, error)
	Recover(ctx context.Context, cmd Command) (Recovery, error)
}
