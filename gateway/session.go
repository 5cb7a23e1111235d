package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// flushLimit is how long the last frames of a session (a Reject above all)
// may take to leave.
const flushLimit = 2 * time.Second

// transport carries frames: a connect stream or a WebSocket. receive and send
// are each used by one goroutine.
type transport interface {
	receive() (*bcdv1.ClientFrame, error)
	send(*bcdv1.ServerFrame) error
	// stopReceive and stopSend make a receive or send that blocks return, now
	// and for ever. They may be called from anywhere.
	stopReceive()
	stopSend()
}

// session is the shell around a sessionCore: one goroutine that steps it and
// talks to the Store, one that reads, one that writes.
type session struct {
	g    *Gateway
	peer *Peer
	core *sessionCore
	out  *outbox
	log  *slog.Logger

	inputs chan sessionInput
	wake   chan struct{}
	done   chan struct{}

	// Set before promote, constant after.
	epoch     int64
	machineID string
	bootID    string
	hardware  []byte
	journal   string

	mu     sync.Mutex
	probes map[int64]chan struct{}

	reason   string
	draining bool
	helpers  sync.WaitGroup
}

// runSession runs a session to its end and returns when nothing of it uses
// the transport any more: net/http panics the process for a late write.
func (g *Gateway) runSession(ctx context.Context, peer *Peer, t transport, first *bcdv1.ClientFrame) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := &session{
		g: g, peer: peer, out: newOutbox(g.outboxBytes), log: g.log.With("node", peer.NodeID),
		core:   newSessionCore(g.now(), g.name, peer, g.hub.spread),
		inputs: make(chan sessionInput, 16), wake: make(chan struct{}, 1), done: make(chan struct{}),
		probes: map[int64]chan struct{}{},
	}
	if !g.admit(s) {
		return
	}

	frames := make(chan *bcdv1.ClientFrame)
	var received error
	var ends sync.WaitGroup
	ends.Go(func() {
		defer close(frames)
		for {
			frame, err := t.receive()
			if err != nil {
				received = err
				return
			}
			select {
			case frames <- frame:
			case <-s.done:
				return
			}
		}
	})
	written := make(chan struct{})
	ends.Go(func() {
		defer close(written)
		s.write(t, cancel)
	})

	s.loop(ctx, first, frames)

	// Order: nobody finds the session any more, the queue is flushed, both
	// goroutines are joined, and only then may the handler return.
	authoritative := g.hub.leave(s)
	close(s.done)
	cancel()
	s.helpers.Wait()
	s.out.close()
	limit := time.NewTimer(flushLimit)
	select {
	case <-written:
	case <-limit.C:
		t.stopSend()
	}
	limit.Stop()
	t.stopReceive()
	ends.Wait()
	if s.reason == "" {
		s.reason = "the connection ended"
		if received != nil && !errors.Is(received, io.EOF) {
			s.reason = "the connection broke: " + clip(received.Error(), maxNameBytes)
		}
	}
	s.log.Info("session ended", "session", s.epoch, "reason", s.reason)
	if authoritative {
		g.sessionLost(s)
	}
	g.sessions.Done()
}

// loop steps the core until it ends.
func (s *session) loop(ctx context.Context, first *bcdv1.ClientFrame, frames <-chan *bcdv1.ClientFrame) {
	timer := time.NewTimer(helloLimit)
	defer timer.Stop()
	var in sessionInput
	if first != nil {
		in = gotFrame{first}
	}
	for {
		if in != nil && !s.step(ctx, in) {
			return
		}
		if at := s.core.deadline(); !at.IsZero() {
			timer.Reset(max(0, at.Sub(s.g.now())))
		} else {
			timer.Stop()
		}
		select {
		case frame, ok := <-frames:
			if !ok {
				return
			}
			in = gotFrame{frame}
		case in = <-s.inputs:
		case <-s.wake:
			in = gotWake{}
		case <-timer.C:
			in = gotTick{}
		case <-ctx.Done():
			return
		}
	}
}

// step feeds one input, does what follows from it, and says whether the
// session goes on.
func (s *session) step(ctx context.Context, in sessionInput) bool {
	if _, ok := in.(gotDrain); ok {
		s.draining = true
	}
	todo := s.core.Step(s.g.now(), in)
	for len(todo) > 0 {
		out := todo[0]
		todo = todo[1:]
		if end, ok := out.(doEnd); ok {
			s.reason = end.reason
			return false
		}
		answer, err := s.perform(ctx, out)
		switch {
		case errors.Is(err, ErrFenced):
			s.reason = "a newer session of this node took over"
			return false
		case err != nil:
			s.reason = err.Error()
			if ctx.Err() == nil {
				s.log.Error("session cannot go on", "session", s.epoch, "error", err)
			}
			return false
		}
		if answer != nil {
			todo = append(todo, s.core.Step(s.g.now(), answer)...)
		}
	}
	return true
}

// perform does one output. An error ends the session: what could not be made
// durable must not be acknowledged, and comes again on the next session.
func (s *session) perform(ctx context.Context, out sessionOutput) (sessionInput, error) {
	g := s.g
	switch out := out.(type) {
	case doSend:
		return nil, s.out.add(out.priority, out.frame)
	case askProbe:
		// Three seconds are too long to stand still: this client may go away,
		// and the old session may be waiting for us in turn.
		s.helpers.Go(func() {
			alive := g.hub.aliveBefore(ctx, out.hello)
			if alive {
				g.noteDuplicate(s.peer.NodeID, out.hello)
			}
			s.post(ctx, gotProbed{alive}, nil)
		})
		return nil, nil
	case askOpen:
		var result gotOpened
		err := g.update(ctx, func(tx Tx) (err error) {
			result.opened, result.reject, err = openSession(tx, g.now(), s.peer, out.hello)
			return err
		})
		if err != nil || result.reject != nil {
			return result, err
		}
		s.epoch, s.machineID, s.bootID = result.opened.Epoch, result.opened.MachineID, out.hello.GetBootId()
		s.hardware, s.journal = out.hello.GetHardwareKeyHash(), out.hello.GetJournalId()
		if old := g.hub.promote(s); old == s {
			return nil, ErrFenced
		} else if old != nil {
			old.post(ctx, gotReplaced{}, nil)
		}
		// Who waits for this machine to be there can see it only now.
		g.hub.changed()
		s.log.Info("session began", "session", s.epoch, "role", word(s.peer.Role), "version", out.hello.GetVersion(), "remote", s.peer.Remote)
		return result, nil
	case askClaim:
		var result gotClaimed
		if due, err := s.anythingDue(ctx); err != nil || !due {
			return nil, err
		}
		err := g.update(ctx, func(tx Tx) (err error) {
			result.send, result.cancel, err = claim(tx, g.now(), s.peer.NodeID, s.epoch, s.journal, out.room)
			return err
		})
		return result, err
	case askRecord:
		return s.record(ctx, out.frame)
	case askTrust:
		var result gotTrust
		err := g.store.View(ctx, func(tx Tx) error {
			node, err := fenced(tx, s.peer.NodeID, s.epoch)
			if err != nil {
				return err
			}
			result.reject, err = stillTrusted(tx, g.now(), s.peer, node)
			return err
		})
		return result, err
	case askSpec:
		var result gotSpec
		err := g.store.View(ctx, func(tx Tx) error {
			node, err := fenced(tx, s.peer.NodeID, s.epoch)
			if err != nil || node.SpecGeneration <= out.newerThan {
				return err
			}
			result.spec, err = tx.Spec(s.peer.NodeID)
			return err
		})
		return result, err
	case askSecret:
		return gotSecret{g.openSecret(ctx, s.peer, out.request)}, nil
	case doProgress:
		g.hub.setProgress(s.peer.NodeID, s.machineID, out.progress)
	case doProbeAnswered:
		s.mu.Lock()
		if ch := s.probes[out.sequence]; ch != nil {
			close(ch)
			delete(s.probes, out.sequence)
		}
		s.mu.Unlock()
	default:
		return nil, fmt.Errorf("session output %T has no effect written for it", out)
	}
	return nil, nil
}

// anythingDue spares a write when no command waits.
func (s *session) anythingDue(ctx context.Context) (due bool, err error) {
	err = s.g.store.View(ctx, func(tx Tx) error {
		commands, err := tx.OpenCommands(s.peer.NodeID)
		for _, c := range commands {
			due = due || c.State == bcdv1.CommandState_COMMAND_STATE_QUEUED || c.Cancelled
		}
		return err
	})
	return due, err
}

// record makes one frame durable.
func (s *session) record(ctx context.Context, frame *bcdv1.ClientFrame) (sessionInput, error) {
	g, node := s.g, s.peer.NodeID
	result := gotCommitted{frame: frame}
	err := g.update(ctx, func(tx Tx) (err error) {
		now := g.now()
		switch body := frame.GetBody().(type) {
		case *bcdv1.ClientFrame_Accepted:
			var input ledgerInput = inAccepted{}
			if body.Accepted.GetRejection() == bcdv1.Rejection_REJECTION_LANE_FULL {
				input = inReturned{}
			} else if body.Accepted.GetUnknown() {
				input = inNotKnown{}
			}
			return s.advance(tx, now, body.Accepted.GetCommandId(), input)
		case *bcdv1.ClientFrame_Started:
			return s.advance(tx, now, body.Started.GetCommandId(), inStarted{AtMS: body.Started.GetStartedMs()})
		case *bcdv1.ClientFrame_Outcome:
			return s.advance(tx, now, body.Outcome.GetCommandId(), inOutcome{Outcome: body.Outcome})
		case *bcdv1.ClientFrame_Events:
			result.acknowledged, err = recordEvents(tx, now, node, s.epoch, body.Events)
			return err
		case *bcdv1.ClientFrame_SpecStatus:
			return recordSpecStatus(tx, now, node, s.epoch, body.SpecStatus)
		case *bcdv1.ClientFrame_Inventory:
			return recordInventory(tx, now, node, s.epoch, body.Inventory)
		case *bcdv1.ClientFrame_Conditions:
			return recordConditions(tx, now, node, s.epoch, body.Conditions)
		}
		return fmt.Errorf("frame %T is not one that is recorded", frame.GetBody())
	})
	if body, ok := frame.GetBody().(*bcdv1.ClientFrame_Outcome); ok && err == nil {
		g.hub.endProgress(body.Outcome.GetCommandId())
	}
	return result, err
}

// advance moves one of this node's commands. One that is not known is passed
// over: the store may be a restored copy, and the node must get its
// acknowledgement all the same or it would repeat the outcome for ever.
func (s *session) advance(tx Tx, now time.Time, id string, in ledgerInput) error {
	c, err := nodeCommand(tx, s.peer.NodeID, s.epoch, id)
	if err != nil {
		return err
	}
	if c == nil {
		if _, ok := in.(inOutcome); !ok {
			return nil
		}
		return tx.AppendTimeline(&TimelineEntry{
			TimeMS: now.UnixMilli(), MachineID: s.machineID, NodeID: s.peer.NodeID, CommandID: clip(id, 64), Type: "command.unknown", Severity: "warn",
			Message: "the node reports the outcome of a command that this gateway does not know",
		})
	}
	return advance(tx, now, c, in)
}

func (s *session) write(t transport, failed context.CancelFunc) {
	for {
		frame, last := s.out.take()
		if frame == nil {
			if last {
				return
			}
			<-s.out.ready
			continue
		}
		if err := t.send(frame); err != nil {
			failed()
			return
		}
	}
}

// post hands an input to the session's goroutine; false when it ended, or
// limit or ctx came first. A nil limit never comes.
func (s *session) post(ctx context.Context, in sessionInput, limit <-chan time.Time) bool {
	select {
	case s.inputs <- in:
		return true
	case <-s.done:
	case <-ctx.Done():
	case <-limit:
	}
	return false
}

func (s *session) expectProbe(sequence int64) <-chan struct{} {
	ch := make(chan struct{})
	s.mu.Lock()
	s.probes[sequence] = ch
	s.mu.Unlock()
	return ch
}

func (s *session) forgetProbe(sequence int64) {
	s.mu.Lock()
	delete(s.probes, sequence)
	s.mu.Unlock()
}

// sessionLost writes down that a node is gone.
func (g *Gateway) sessionLost(s *session) {
	err := g.update(context.Background(), func(tx Tx) error {
		node, err := fenced(tx, s.peer.NodeID, s.epoch)
		if err != nil {
			return err
		}
		node.LastSeenMS = g.now().UnixMilli()
		if err := tx.PutNode(node); err != nil || s.draining {
			return err
		}
		return tx.AppendTimeline(&TimelineEntry{TimeMS: node.LastSeenMS, MachineID: node.MachineID, NodeID: node.ID, Type: "lost", Severity: "warn", Message: "connection lost: " + s.reason})
	})
	if err != nil && !errors.Is(err, ErrFenced) {
		s.log.Error("loss of the session not recorded", "session", s.epoch, "error", err)
	}
}

func (g *Gateway) noteDuplicate(nodeID string, hello *bcdv1.Hello) {
	err := g.update(context.Background(), func(tx Tx) error {
		node, err := tx.Node(nodeID)
		if err != nil {
			return err
		}
		return tx.AppendTimeline(&TimelineEntry{
			TimeMS: g.now().UnixMilli(), MachineID: node.MachineID, NodeID: nodeID, Type: "duplicate", Severity: "error",
			Message: fmt.Sprintf("a second machine (boot %s) uses this identity while the first still answers; it is kept out", clip(hello.GetBootId(), 64)),
		})
	})
	if err != nil {
		g.log.Error("duplicate identity not recorded", "node", nodeID, "error", err)
	}
}
