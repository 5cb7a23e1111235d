package dispatch

import (
	"time"

	"github.com/better-compute/bcd/agent/journal"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Input is one thing that happened.
type Input interface{ input() }

// The inputs of [Core.Step].
type (
	// Offer is a command from the gateway.
	Offer struct{ Signed *bcdv1.Signed }
	// Cancel asks to stop a command.
	Cancel struct{ ID, Reason string }
	// Acked says that the gateway has an outcome durably.
	Acked struct{ ID string }
	// Ended is a worker's end. Err nil is success.
	Ended struct {
		ID     string
		Result Result
		Err    error
	}
	// Recovered is what an executor said of an interrupted run.
	Recovered struct {
		ID       string
		Recovery Recovery
		Err      error
	}
	// Reported is progress, marshalled.
	Reported struct {
		ID   string
		Body []byte
	}
	// Restore is an entry that the journal held at the start. Command is nil
	// for a finished one, and for one whose bytes cannot be read.
	Restore struct {
		Entry   journal.Entry
		Command *bcdv1.Command
	}
	// Connected says that a session is up: everything not acknowledged is
	// sent again.
	Connected struct{}
	// Revoked says that the identity was revoked, or, with Not, that there is
	// a new one.
	Revoked struct{ Not bool }
	// Failed says that a write was not made.
	Failed struct {
		Write Write
		Err   error
	}
	// AfterEnded says that an after-acknowledgement action returned.
	AfterEnded struct {
		ID  string
		Err error
	}
	// Tick says that time has passed.
	Tick struct{}
)

func (Offer) input()      {}
func (Cancel) input()     {}
func (Acked) input()      {}
func (Ended) input()      {}
func (Recovered) input()  {}
func (Reported) input()   {}
func (Restore) input()    {}
func (Connected) input()  {}
func (Revoked) input()    {}
func (Failed) input()     {}
func (AfterEnded) input() {}
func (Tick) input()       {}

// Effect is a write, and what is done only once it is durable. A failed write
// comes back as [Failed], and nothing of Then is done.
type Effect struct {
	Write Write // nil writes nothing
	Then  []Output
}

// Write is one step in the journal.
type Write interface{ write() }

// The writes of an [Effect]; each is the journal's method of that name.
type (
	WriteAccept struct {
		Entry  journal.Entry
		Signed *bcdv1.Signed
	}
	WriteRefuse struct {
		Entry   journal.Entry
		Outcome []byte
	}
	WriteStart struct {
		ID        string
		StartedMS int64
		BootID    string
	}
	WriteFinish struct {
		ID     string
		Finish journal.Finish
	}
	WriteAck        struct{ ID string }
	WriteBeginAfter struct{ ID string }
	WriteEndAfter   struct{ ID string }
)

func (WriteAccept) write()     {}
func (WriteRefuse) write()     {}
func (WriteStart) write()      {}
func (WriteFinish) write()     {}
func (WriteAck) write()        {}
func (WriteBeginAfter) write() {}
func (WriteEndAfter) write()   {}

// Output is something for the shell to do.
type Output interface{ output() }

// The outputs of an [Effect].
type (
	// Send sends a frame, if there is a session.
	Send struct{ Frame *bcdv1.ClientFrame }
	// SendOutcome sends an outcome as the journal has it.
	SendOutcome struct{ ID string }
	// Run gives a command to a worker of its lane; there is one free. With
	// Recover the executor is first asked what became of the earlier run.
	Run struct {
		Lane    bcdv1.Lane
		Command *bcdv1.Command
		BootID  string
		Recover bool
	}
	// Interrupt ends the context of a running command.
	Interrupt struct{ ID string }
	// DoAfter begins an after-acknowledgement action.
	DoAfter struct {
		ID     string
		Action After
	}
	// Note is a durable event.
	Note struct{ Type, ID, Message string }
	// Complain logs a command that was refused. ID is empty for one that
	// cannot even be answered.
	Complain struct{ ID, Kind, Message string }
)

func (Send) output()        {}
func (SendOutcome) output() {}
func (Run) output()         {}
func (Interrupt) output()   {}
func (DoAfter) output()     {}
func (Note) output()        {}
func (Complain) output()    {}

func plain(outputs ...Output) Effect { return Effect{Then: outputs} }

func ms(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}
