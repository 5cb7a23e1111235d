package session

import (
	"time"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Input is one thing that happened to the session.
type Input interface{ input() }

// The inputs of [Core.Step]. Link is the number that a [Dial] gave it.
type (
	// Start begins the first dial.
	Start struct{}
	// Dialed says that a link is there.
	Dialed struct{ Link int }
	// Lost says that a dial or a link failed.
	Lost struct {
		Link int
		Err  error
	}
	// Received is a frame.
	Received struct {
		Link  int
		Frame *bcdv1.ServerFrame
	}
	// IdentityChanged says that there is a new certificate: what was refused
	// may work now.
	IdentityChanged struct{}
	// Stop ends everything.
	Stop struct{}
	// Tick says that time has passed.
	Tick struct{}
)

func (Start) input()           {}
func (Dialed) input()          {}
func (Lost) input()            {}
func (Received) input()        {}
func (IdentityChanged) input() {}
func (Stop) input()            {}
func (Tick) input()            {}

// Output is something for the shell to do, in order.
type Output interface{ output() }

// The outputs of [Core.Step].
type (
	// Dial makes a link.
	Dial struct {
		Link      int
		Transport Transport
	}
	// SayHello sends Hello; the shell fills it.
	SayHello struct{ Link int }
	// Beat sends a heartbeat; the shell fills it.
	Beat struct {
		Link            int
		Epoch, Sequence int64
	}
	// SendFrame sends a frame of the session itself.
	SendFrame struct {
		Link  int
		Frame *bcdv1.ClientFrame
	}
	// Prove answers a challenge with the node's key.
	Prove struct {
		Link      int
		Epoch     int64
		Challenge *bcdv1.IdentityChallenge
	}
	// Close ends a link; with Flush it first sends what is queued.
	Close struct {
		Link  int
		Flush bool
	}
	// Up says that a link is the session now. An earlier one is not down: the
	// new one takes its place.
	Up struct {
		Link    int
		Welcome *bcdv1.Welcome
	}
	// Down says that there is no session any more.
	Down struct{ Err error }
	// Deliver hands a frame of the session to the agent.
	Deliver struct{ Frame *bcdv1.ServerFrame }
	// Failed reports a failed try, for status and logs.
	Failed struct {
		Err   error
		Class Class
		Retry time.Duration
	}
)

func (Dial) output()      {}
func (SayHello) output()  {}
func (Beat) output()      {}
func (SendFrame) output() {}
func (Prove) output()     {}
func (Close) output()     {}
func (Up) output()        {}
func (Down) output()      {}
func (Deliver) output()   {}
func (Failed) output()    {}
