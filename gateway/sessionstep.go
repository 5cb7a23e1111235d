package gateway

import (
	"time"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// The inputs of a session.
type sessionInput interface{ sessionInput() }

type (
	// gotFrame: the client sent it.
	gotFrame struct{ frame *bcdv1.ClientFrame }
	// gotProbed: the answer to askProbe. alive says that the old session's
	// daemon answered.
	gotProbed struct{ alive bool }
	// gotOpened: the answer to askOpen.
	gotOpened struct {
		opened *opened
		reject *bcdv1.Reject
	}
	// gotClaimed: the answer to askClaim.
	gotClaimed struct{ send, cancel []*Command }
	// gotCommitted: the answer to askRecord; acknowledged is the event
	// sequence for events.
	gotCommitted struct {
		frame        *bcdv1.ClientFrame
		acknowledged int64
	}
	// gotTrust: the answer to askTrust, nil when all is well.
	gotTrust struct{ reject *bcdv1.Reject }
	// gotSpec: the answer to askSpec; nil is none.
	gotSpec struct{ spec *Spec }
	// gotSecret: the answer to askSecret.
	gotSecret struct{ answer *bcdv1.SecretAnswer }
	// gotTick: the time that deadline named has come.
	gotTick struct{}
	// gotWake: commands, cancels or a spec may be waiting.
	gotWake struct{}
	// gotProbe: another session wants to know whether this one lives.
	gotProbe struct{ sequence int64 }
	// gotDrain: the gateway is about to stop.
	gotDrain struct {
		spread time.Duration
		reason string
	}
	// gotRevoked: the node is no longer trusted.
	gotRevoked struct{ reason string }
	// gotReplaced: a newer session of this node began here.
	gotReplaced struct{}
)

func (gotFrame) sessionInput()     {}
func (gotProbed) sessionInput()    {}
func (gotOpened) sessionInput()    {}
func (gotClaimed) sessionInput()   {}
func (gotCommitted) sessionInput() {}
func (gotTrust) sessionInput()     {}
func (gotSpec) sessionInput()      {}
func (gotSecret) sessionInput()    {}
func (gotTick) sessionInput()      {}
func (gotWake) sessionInput()      {}
func (gotProbe) sessionInput()     {}
func (gotDrain) sessionInput()     {}
func (gotRevoked) sessionInput()   {}
func (gotReplaced) sessionInput()  {}

// The outputs: what the shell shall do, in this order.
type sessionOutput interface{ sessionOutput() }

type (
	// doSend: to the client.
	doSend struct {
		frame    *bcdv1.ServerFrame
		priority priority
	}
	// doEnd: send what is queued, then end the session.
	doEnd struct{ reason string }
	// askProbe: is there another session of this node, and does it live?
	askProbe struct{ hello *bcdv1.Hello }
	// askOpen: become the authoritative session.
	askOpen struct{ hello *bcdv1.Hello }
	// askClaim: commands that may be sent now.
	askClaim struct{ room map[bcdv1.Lane]int }
	// askRecord: make what the frame says durable.
	askRecord struct{ frame *bcdv1.ClientFrame }
	// askTrust: is the certificate still good?
	askTrust struct{}
	// askSpec: a spec newer than the generation.
	askSpec struct{ newerThan int64 }
	// askSecret: open a reference.
	askSecret struct{ request *bcdv1.SecretRequest }
	// doProgress: keep it in memory.
	doProgress struct{ progress *bcdv1.Progress }
	// doProbeAnswered: the client answered the probe.
	doProbeAnswered struct{ sequence int64 }
)

func (doSend) sessionOutput()          {}
func (doEnd) sessionOutput()           {}
func (askProbe) sessionOutput()        {}
func (askOpen) sessionOutput()         {}
func (askClaim) sessionOutput()        {}
func (askRecord) sessionOutput()       {}
func (askTrust) sessionOutput()        {}
func (askSpec) sessionOutput()         {}
func (askSecret) sessionOutput()       {}
func (doProgress) sessionOutput()      {}
func (doProbeAnswered) sessionOutput() {}
