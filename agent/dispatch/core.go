package dispatch

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/journal"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/api/kinds"
)

// Config is what a Core must know.
type Config struct {
	NodeID string
	Role   bcdv1.Role
	BootID string
	// Supported says whether there is an executor; nil is all.
	Supported func(kind string) bool
	Verifier  Verifier
	Ledger    Ledger
}

// Core decides what becomes of commands. It is not safe for concurrent use.
type Core struct {
	config  Config
	lanes   map[bcdv1.Lane]*lane
	jobs    map[string]*job
	revoked bool
	// unwritten are outcomes whose write failed; they are tried again.
	unwritten map[string]journal.Finish
	retryAt   time.Time
	afters    []*after
}

type lane struct {
	size    LaneSize
	queue   []string
	running int
}

type job struct {
	command    *bcdv1.Command
	lane       bcdv1.Lane
	accepted   int64
	started    int64
	bootID     string
	mode       mode
	cancelled  bool
	reason     string
	running    bool
	progress   []byte
	progressAt time.Time
}

// mode is what a worker shall do with a job.
type mode int

const (
	// fresh: accepted, not started.
	fresh mode = iota
	// recovering: started by an earlier process; ask the executor first.
	recovering
	// resuming: the executor said that it may go on.
	resuming
)

// after is an acknowledged outcome whose action waits or runs.
type after struct {
	id       string
	action   After
	deadline time.Time // zero: none
	since    time.Time
	begun    bool
	giveUp   time.Time // zero until the action returned
}

// NewCore returns a core that knows nothing of the journal's entries yet: give
// it each as [Restore].
func NewCore(config Config) *Core {
	c := &Core{config: config, lanes: map[bcdv1.Lane]*lane{}, jobs: map[string]*job{}, unwritten: map[string]journal.Finish{}}
	for id, size := range Lanes {
		c.lanes[id] = &lane{size: size}
	}
	return c
}

// Kinds are the names of the kinds that this daemon accepts, sorted.
func (c *Core) Kinds() []string {
	var names []string
	for _, k := range kinds.All() {
		if k.Allows(c.config.Role) && (c.config.Supported == nil || c.config.Supported(k.GetName())) {
			names = append(names, k.GetName())
		}
	}
	slices.Sort(names)
	return names
}

// Free gives each lane's free workers and queue places.
func (c *Core) Free() *bcdv1.LaneCounts {
	free := func(id bcdv1.Lane) int32 {
		l := c.lanes[id]
		return int32(max(0, l.size.Workers+l.size.Places-l.running-len(l.queue)))
	}
	return &bcdv1.LaneCounts{
		Control:   free(bcdv1.Lane_LANE_CONTROL),
		Provision: free(bcdv1.Lane_LANE_PROVISION),
		Bulk:      free(bcdv1.Lane_LANE_BULK),
	}
}

// Step takes one input at server time now, which is zero before the first
// mark: nothing with a deadline begins until then.
func (c *Core) Step(now time.Time, in Input) []Effect {
	var out []Effect
	switch in := in.(type) {
	case Offer:
		out = c.offer(now, in)
	case Cancel:
		out = c.cancel(now, in)
	case Acked:
		out = c.acked(now, in.ID)
	case Ended:
		out = c.ended(now, in)
	case Recovered:
		out = c.recovered(now, in)
	case Reported:
		out = c.reported(now, in)
	case Restore:
		return c.restore(now, in)
	case Connected:
		out = c.connected()
	case Revoked:
		c.revoked = !in.Not
	case Failed:
		out = c.failed(now, in)
	case AfterEnded:
		out = c.afterEnded(now, in)
	case Tick:
		out = c.tick(now)
	}
	out = append(out, c.schedule(now)...)
	return append(out, c.beginAfter(now)...)
}

func (c *Core) offer(now time.Time, in Offer) []Effect {
	if now.IsZero() {
		return nil // a session brings the mark before it brings commands
	}
	v := c.accept(now, in.Signed)
	id := v.command.GetId()
	if id == "" || len(id) > maxIDBytes || !printable(id) || strings.Contains(id, " ") {
		return []Effect{plain(Complain{Message: v.message})} // an answer would name nothing
	}
	switch v.rejection {
	case bcdv1.Rejection_REJECTION_UNSPECIFIED:
		return c.take(now, v, in.Signed)
	case bcdv1.Rejection_REJECTION_DUPLICATE:
		return c.again(id)
	case bcdv1.Rejection_REJECTION_LANE_FULL:
		return []Effect{plain(Send{&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Accepted{Accepted: &bcdv1.CommandAccepted{
			CommandId: id, Rejection: v.rejection, Message: v.message,
		}}}})}
	}
	outcome := &bcdv1.Outcome{
		CommandId:  id,
		Status:     bcdv1.OutcomeStatus_OUTCOME_STATUS_REJECTED,
		Rejection:  v.rejection,
		Message:    clip(v.message, maxMessage),
		FinishedMs: ms(now),
	}
	switch {
	case v.indeterminate:
		outcome.Status, outcome.Rejection, outcome.Code = bcdv1.OutcomeStatus_OUTCOME_STATUS_INDETERMINATE, 0, "JOURNAL_LOST"
	case v.rejection == bcdv1.Rejection_REJECTION_EXPIRED:
		outcome.Status = bcdv1.OutcomeStatus_OUTCOME_STATUS_EXPIRED
	}
	complaint := Complain{ID: id, Kind: v.command.GetKind(), Message: v.message}
	answer := Send{&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Outcome{Outcome: outcome}}}
	if _, known := c.config.Ledger.Entry(id); !v.authentic || !v.idValid || known {
		return []Effect{plain(answer, complaint)}
	}
	entry := journal.Entry{
		ID: id, Kind: v.command.GetKind(), Lane: int32(v.command.GetLane()),
		DeadlineMS: v.command.GetDeadlineMs(), AcceptedMS: ms(now), FinishedMS: ms(now),
		Status: int32(outcome.GetStatus()), Rejection: int32(outcome.GetRejection()),
	}
	return []Effect{{Write: WriteRefuse{entry, marshal(outcome)}, Then: []Output{SendOutcome{id}, complaint}}}
}

// take accepts a command.
func (c *Core) take(now time.Time, v verdict, signed *bcdv1.Signed) []Effect {
	id, lane := v.command.GetId(), v.kind.GetLane()
	c.jobs[id] = &job{command: v.command, lane: lane, accepted: ms(now)}
	l := c.lanes[lane]
	l.queue = append(l.queue, id)
	return []Effect{{
		Write: WriteAccept{journal.Entry{
			ID: id, Kind: v.command.GetKind(), Lane: int32(lane),
			DeadlineMS: v.command.GetDeadlineMs(), AcceptedMS: ms(now),
		}, signed},
		Then: []Output{sendAccepted(id)},
	}}
}

func sendAccepted(id string) Send {
	return Send{&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Accepted{Accepted: &bcdv1.CommandAccepted{CommandId: id}}}}
}

func sendStarted(id string, startedMS int64) Send {
	return Send{&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Started{Started: &bcdv1.CommandStarted{CommandId: id, StartedMs: startedMS}}}}
}

// again answers a known id with what the journal has.
func (c *Core) again(id string) []Effect {
	entry, _ := c.config.Ledger.Entry(id)
	switch {
	case entry.State >= journal.Finished:
		return []Effect{plain(SendOutcome{id})}
	case entry.State == journal.Started:
		return []Effect{plain(sendAccepted(id), sendStarted(id, entry.StartedMS))}
	default:
		return []Effect{plain(sendAccepted(id))}
	}
}

func (c *Core) cancel(now time.Time, in Cancel) []Effect {
	j := c.jobs[in.ID]
	entry, known := c.config.Ledger.Entry(in.ID)
	switch {
	case j == nil && known && entry.State >= journal.Finished:
		return []Effect{plain(SendOutcome{in.ID})}
	case j == nil:
		return []Effect{plain(Send{&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Accepted{Accepted: &bcdv1.CommandAccepted{
			CommandId: in.ID, Unknown: true, Message: "no such command is known here",
		}}}})}
	case j.running:
		j.cancelled, j.reason = true, in.Reason
		return []Effect{plain(Interrupt{in.ID})}
	case j.mode != fresh:
		// Started before a crash and waiting to go on: an effect has begun.
		c.unqueue(in.ID)
		return c.finish(now, j, ending{status: bcdv1.OutcomeStatus_OUTCOME_STATUS_INDETERMINATE, code: "INTERRUPTED",
			message: "cancelled" + because(in.Reason) + " after an interrupted run"})
	default:
		c.unqueue(in.ID)
		return c.finish(now, j, ending{status: bcdv1.OutcomeStatus_OUTCOME_STATUS_CANCELLED,
			message: "cancelled before it began" + because(in.Reason)})
	}
}

func because(reason string) string {
	if reason == "" {
		return ""
	}
	return ": " + clip(reason, 512)
}

func (c *Core) unqueue(id string) {
	l := c.lanes[c.jobs[id].lane]
	l.queue = slices.DeleteFunc(l.queue, func(q string) bool { return q == id })
}

// schedule gives queued commands to free workers, and ends those whose
// deadline has passed.
func (c *Core) schedule(now time.Time) []Effect {
	var out []Effect
	for _, id := range laneOrder {
		out = append(out, c.scheduleLane(now, id, c.lanes[id])...)
	}
	return out
}

func (c *Core) scheduleLane(now time.Time, laneID bcdv1.Lane, l *lane) []Effect {
	var out []Effect
	for n := 0; n < len(l.queue); {
		id := l.queue[n]
		j := c.jobs[id]
		deadline := time.UnixMilli(j.command.GetDeadlineMs())
		late := !now.IsZero() && !now.Before(deadline)
		switch {
		case late && j.mode == fresh:
			l.queue = slices.Delete(l.queue, n, n+1)
			out = append(out, c.finish(now, j, ending{status: bcdv1.OutcomeStatus_OUTCOME_STATUS_EXPIRED,
				message: fmt.Sprintf("the deadline %s passed before a worker was free", stamp(deadline))})...)
		case late && j.mode == resuming:
			l.queue = slices.Delete(l.queue, n, n+1)
			out = append(out, c.finish(now, j, ending{status: bcdv1.OutcomeStatus_OUTCOME_STATUS_INDETERMINATE, code: "INTERRUPTED",
				message: fmt.Sprintf("the run was interrupted, and its deadline %s passed before it could go on", stamp(deadline))})...)
		case j.mode != recovering && (now.IsZero() || c.revoked || len(c.afters) > 0 || now.Before(c.retryAt)), l.running >= l.size.Workers:
			n++ // waits
		default:
			l.queue = slices.Delete(l.queue, n, n+1)
			l.running++
			j.running = true
			out = append(out, c.run(now, laneID, id, j))
		}
	}
	return out
}

func (c *Core) run(now time.Time, laneID bcdv1.Lane, id string, j *job) Effect {
	work := Run{Lane: laneID, Command: j.command, BootID: j.bootID, Recover: j.mode == recovering}
	if j.mode != fresh {
		return plain(work)
	}
	j.started, j.bootID = ms(now), c.config.BootID
	work.BootID = j.bootID
	return Effect{Write: WriteStart{id, j.started, j.bootID}, Then: []Output{sendStarted(id, j.started), work}}
}

// failed undoes what a write that was not made stood for.
func (c *Core) failed(now time.Time, in Failed) []Effect {
	switch w := in.Write.(type) {
	case WriteAccept:
		id := w.Entry.ID
		if j := c.jobs[id]; j != nil {
			if j.running { // given to a worker in the same step
				c.lanes[j.lane].running--
			}
			c.unqueue(id)
			delete(c.jobs, id)
		}
		return []Effect{plain(Send{&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Accepted{Accepted: &bcdv1.CommandAccepted{
			CommandId: id, Rejection: bcdv1.Rejection_REJECTION_LANE_FULL, Message: clip(in.Err.Error(), maxMessage),
		}}}})}
	case WriteRefuse:
		// Refused all the same; a repeat is refused again.
		outcome := new(bcdv1.Outcome)
		if err := proto.Unmarshal(w.Outcome, outcome); err != nil {
			return nil
		}
		return []Effect{plain(Send{&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Outcome{Outcome: outcome}}})}
	case WriteStart:
		j := c.jobs[w.ID]
		if j == nil {
			return nil
		}
		l := c.lanes[j.lane]
		j.running, j.started = false, 0
		l.running--
		l.queue = slices.Insert(l.queue, 0, w.ID)
		c.retryAt = now.Add(retryEvery)
	case WriteFinish:
		c.unwritten[w.ID] = w.Finish
		c.retryAt = now.Add(retryEvery)
	case WriteBeginAfter:
		for _, a := range c.afters {
			if a.id == w.ID {
				a.begun = false
				c.retryAt = now.Add(retryEvery)
			}
		}
	case WriteAck, WriteEndAfter:
		// The gateway acknowledges again when the outcome is sent again; an
		// action that is over is settled at the next start.
	}
	return nil
}

func (c *Core) connected() []Effect {
	var out []Effect
	for _, id := range sortedIDs(c.jobs) {
		out = append(out, c.again(id)...)
	}
	return out
}

func (c *Core) tick(now time.Time) []Effect {
	var out []Effect
	if !now.IsZero() && !now.Before(c.retryAt) {
		for _, id := range sortedIDs(c.unwritten) {
			finish := c.unwritten[id]
			delete(c.unwritten, id)
			out = append(out, Effect{Write: WriteFinish{id, finish}, Then: []Output{SendOutcome{id}}})
		}
	}
	for _, id := range sortedIDs(c.jobs) {
		if j := c.jobs[id]; j.progress != nil && !now.Before(j.progressAt) {
			out = append(out, c.sendProgress(now, id, j))
		}
	}
	return out
}

// Next is when Step wants a Tick at the latest; false when never.
func (c *Core) Next(now time.Time) (time.Time, bool) {
	var next time.Time
	consider := func(t time.Time) {
		if next.IsZero() || t.Before(next) {
			next = t
		}
	}
	for _, j := range c.jobs {
		if !j.running && j.mode != recovering {
			consider(time.UnixMilli(j.command.GetDeadlineMs()))
		}
		if j.progress != nil {
			consider(j.progressAt)
		}
	}
	if len(c.unwritten) > 0 || now.Before(c.retryAt) {
		consider(c.retryAt)
	}
	for _, a := range c.afters {
		switch {
		case !a.begun && !a.since.IsZero():
			consider(a.since.Add(afterGrace))
		case !a.giveUp.IsZero():
			consider(a.giveUp)
		}
	}
	return next, !next.IsZero()
}

func (c *Core) reported(now time.Time, in Reported) []Effect {
	j := c.jobs[in.ID]
	if j == nil || !j.running || len(in.Body) > MaxProgress {
		return nil
	}
	j.progress = in.Body
	if now.Before(j.progressAt) {
		return nil // the latest wins when its time comes
	}
	return []Effect{c.sendProgress(now, in.ID, j)}
}

func (c *Core) sendProgress(now time.Time, id string, j *job) Effect {
	frame := &bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Progress{Progress: &bcdv1.Progress{CommandId: id, Body: j.progress, TimeMs: ms(now)}}}
	j.progress, j.progressAt = nil, now.Add(progressEvery)
	return plain(Send{frame})
}
