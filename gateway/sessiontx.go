package gateway

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sort"
	"time"

	"google.golang.org/protobuf/proto"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// ErrFenced says that another session of the node, perhaps on another gateway,
// has taken over: what an older one still wants to write has no effect.
var ErrFenced = errors.New("a newer session of this node has taken over")

const (
	// keptBoots bounds Node.PastBoots; a clone comes back within a few.
	keptBoots = 16
	// clockNote is the difference between a machine's clock and ours that is
	// worth a line: TLS and logs begin to suffer at about this.
	clockNote = 5 * time.Minute
	// quarantineRetry is how long the second machine with one identity is told
	// to stay away.
	quarantineRetry = 10 * time.Minute
)

// opened is a session's beginning as the store has it.
type opened struct {
	Epoch       int64
	MachineID   string
	MachineName string
	Site        string
	Resume      int64
	Want        []string
	// Redeliver are commands sent before whose outcome is not known; the
	// node's journal answers those it has.
	Redeliver []*Command
	Spec      *Spec
}

// openSession makes this Hello's session the node's one authoritative session.
// A refusal is returned as a Reject and is in the timeline too.
func openSession(tx Tx, now time.Time, peer *Peer, hello *bcdv1.Hello) (*opened, *bcdv1.Reject, error) {
	node, err := tx.Node(peer.NodeID)
	if errors.Is(err, ErrNotFound) {
		return nil, &bcdv1.Reject{Code: bcdv1.RejectCode_REJECT_CODE_REVOKED, Detail: fmt.Sprintf("node %s is not known to this gateway; join again with a new token", peer.NodeID)}, nil
	}
	if err != nil {
		return nil, nil, err
	}
	if reject, err := stillTrusted(tx, now, peer, node); reject != nil || err != nil {
		return nil, reject, err
	}
	machine, err := tx.Machine(node.MachineID)
	if err != nil {
		return nil, nil, err
	}
	note := func(kind, severity, message string) error {
		return tx.AppendTimeline(&TimelineEntry{TimeMS: now.UnixMilli(), MachineID: machine.ID, NodeID: node.ID, Type: kind, Severity: severity, Message: message})
	}
	if hello.GetBootId() != node.BootID && slices.Contains(node.PastBoots, hello.GetBootId()) {
		return nil, duplicate(node.ID, "boot "+hello.GetBootId()+" came back after a later one"), note("duplicate", "error",
			"a second machine uses this identity: it went back to an earlier boot id; it is kept out")
	}

	rebooted := node.BootID != "" && node.BootID != hello.GetBootId()
	if rebooted {
		node.PastBoots = append(node.PastBoots, node.BootID)
		node.PastBoots = node.PastBoots[max(0, len(node.PastBoots)-keptBoots):]
	}
	if node.BootMS == 0 || node.BootID != hello.GetBootId() {
		node.BootMS = now.UnixMilli()
	}
	node.BootID = hello.GetBootId()

	lost := ""
	switch {
	case node.JournalID != "" && node.JournalID != hello.GetJournalId() && rebooted:
		lost = "the machine restarted and its journal is gone"
	case node.JournalID != "" && node.JournalID != hello.GetJournalId():
		lost = "the node's journal was replaced by a new one"
	case hello.GetJournalSequence() != 0 && hello.GetJournalSequence() < node.EventSequence:
		lost = fmt.Sprintf("the node's journal went back from event %d to %d", node.EventSequence, hello.GetJournalSequence())
	}
	if node.JournalID != hello.GetJournalId() {
		node.JournalID, node.EventSequence = hello.GetJournalId(), 0
	}
	commands, err := tx.OpenCommands(node.ID)
	if err != nil {
		return nil, nil, err
	}
	result := &opened{}
	for _, c := range commands {
		if lost != "" {
			if err := advance(tx, now, c, inJournalLost{Reason: lost}); err != nil {
				return nil, nil, err
			}
		}
		if c.State != bcdv1.CommandState_COMMAND_STATE_QUEUED && c.State != bcdv1.CommandState_COMMAND_STATE_ENDED {
			result.Redeliver = append(result.Redeliver, c)
		}
	}

	// The highest epoch either side knows: a store restored from a copy must
	// not hand out one that the node has seen.
	node.Epoch = max(node.Epoch, hello.GetLastEpoch()) + 1
	node.LastSeenMS = now.UnixMilli()
	node.Version, node.Kinds, node.Remote = hello.GetVersion(), hello.GetKinds(), peer.Remote
	result.Want, err = wantedSections(tx, node, hello.GetInventoryHashes())
	if err != nil {
		return nil, nil, err
	}
	if err := tx.PutNode(node); err != nil {
		return nil, nil, err
	}
	machine.CurrentNode = node.ID
	once := bootedOnce(machine, node.Role, node.BootID)
	if err := tx.PutMachine(machine); err != nil {
		return nil, nil, err
	}
	message := fmt.Sprintf("%s connected, version %s", word(node.Role), node.Version)
	if rebooted {
		message += ", after a restart"
	}
	if once {
		message += "; the order to boot the ramdisk once is done"
	}
	if err := note("connected", "", message); err != nil {
		return nil, nil, err
	}
	if hello.GetJournalLost() != "" || lost != "" && !rebooted {
		if err := note("journal.lost", "error", "journal lost: "+reasonOr(lost, "the node reports the loss of journal "+hello.GetJournalLost())); err != nil {
			return nil, nil, err
		}
	}
	if line := clockLine(now, hello.GetWallClockMs()); line != "" {
		if err := note("clock", "warn", line); err != nil {
			return nil, nil, err
		}
	}
	if node.SpecGeneration > hello.GetAcceptedGeneration() {
		if result.Spec, err = tx.Spec(node.ID); err != nil {
			return nil, nil, err
		}
	}
	result.Epoch, result.Resume, result.Site = node.Epoch, node.EventSequence, node.Site
	result.MachineID, result.MachineName = machine.ID, machine.Name
	return result, nil, nil
}

func duplicate(nodeID, why string) *bcdv1.Reject {
	return &bcdv1.Reject{
		Code: bcdv1.RejectCode_REJECT_CODE_DUPLICATE_IDENTITY, RetryAfterMs: int32(quarantineRetry.Milliseconds()),
		Detail: fmt.Sprintf("another machine uses the identity %s (%s); on the copy run: bcd join --reset --yes, then bcd join", nodeID, why),
	}
}

// stillTrusted is checked at Hello and at every heartbeat.
func stillTrusted(tx Tx, now time.Time, peer *Peer, node *Node) (*bcdv1.Reject, error) {
	if node.Revoked {
		return &bcdv1.Reject{Code: bcdv1.RejectCode_REJECT_CODE_REVOKED, Detail: fmt.Sprintf("node %s was revoked: %s", node.ID, reasonOr(node.RevokeReason, "no reason given"))}, nil
	}
	if !now.Before(peer.NotAfter) {
		return &bcdv1.Reject{Code: bcdv1.RejectCode_REJECT_CODE_IDENTITY_EXPIRED, Detail: fmt.Sprintf("the certificate of %s ended at %s; renew it, or join again", node.ID, peer.NotAfter.UTC().Format(time.RFC3339))}, nil
	}
	certificate, err := tx.Certificate(peer.Serial)
	if errors.Is(err, ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if certificate.Revoked {
		return &bcdv1.Reject{Code: bcdv1.RejectCode_REJECT_CODE_REVOKED, Detail: fmt.Sprintf("certificate %s of node %s was revoked; join again with a new token", peer.Serial, node.ID)}, nil
	}
	return nil, nil
}

func clockLine(now time.Time, wallMS int64) string {
	if wallMS == 0 {
		return ""
	}
	off := time.UnixMilli(wallMS).Sub(now)
	if off.Abs() <= clockNote {
		return ""
	}
	direction := "ahead of"
	if off < 0 {
		direction = "behind"
	}
	return fmt.Sprintf("the machine's clock (%s) is %s %s the gateway's", time.UnixMilli(wallMS).UTC().Format(time.RFC3339), roughly(off.Abs()), direction)
}

func roughly(d time.Duration) string {
	switch day := 24 * time.Hour; {
	case d >= 2*365*day:
		return fmt.Sprintf("%d years", d/(365*day))
	case d >= 2*day:
		return fmt.Sprintf("%d days", d/day)
	}
	return d.Round(time.Second).String()
}

// wantedSections takes the hashes of a Hello into the node and names the
// sections whose content the store lacks.
func wantedSections(tx Tx, node *Node, hashes map[string][]byte) ([]string, error) {
	current := map[string][]byte{}
	var want []string
	for name, hash := range hashes {
		if len(hash) != sha256.Size || len(current) >= maxSections {
			continue
		}
		if _, err := tx.Section(hash); errors.Is(err, ErrNotFound) {
			want = append(want, name)
			// Until it comes, what was known before stays shown.
			if old := node.Inventory[name]; old != nil {
				current[name] = old
			}
			continue
		} else if err != nil {
			return nil, err
		}
		current[name] = hash
	}
	sort.Strings(want)
	node.Inventory = current
	return want, nil
}

// fenced gets the node if the epoch is still the authoritative one.
func fenced(tx Tx, nodeID string, epoch int64) (*Node, error) {
	node, err := tx.Node(nodeID)
	if err != nil {
		return nil, err
	}
	if node.Epoch != epoch {
		return nil, ErrFenced
	}
	return node, nil
}

// claim marks queued commands as sent, in their order, as far as each lane has
// room, and ends those that expired. It also lists cancels that are due.
func claim(tx Tx, now time.Time, nodeID string, epoch int64, journal string, room map[bcdv1.Lane]int) (send, cancel []*Command, err error) {
	node, err := fenced(tx, nodeID, epoch)
	if err != nil {
		return nil, nil, err
	}
	if node.Revoked {
		return nil, nil, ErrFenced
	}
	commands, err := tx.OpenCommands(nodeID)
	if err != nil {
		return nil, nil, err
	}
	left := map[bcdv1.Lane]int{}
	for lane, n := range room {
		left[lane] = n
	}
	for _, c := range commands {
		if err := advance(tx, now, c, inClock{Connected: true}); err != nil {
			return nil, nil, err
		}
		switch {
		case c.State == bcdv1.CommandState_COMMAND_STATE_ENDED:
		case c.State == bcdv1.CommandState_COMMAND_STATE_QUEUED && left[c.Lane] > 0:
			left[c.Lane]--
			if err := advance(tx, now, c, inSent{Journal: journal}); err != nil {
				return nil, nil, err
			}
			send = append(send, c)
		case c.State != bcdv1.CommandState_COMMAND_STATE_QUEUED && c.Cancelled:
			cancel = append(cancel, c)
		}
	}
	return send, cancel, nil
}

// nodeCommand gets a command of this node in this epoch. A command that is not
// known, or another node's, is nil.
func nodeCommand(tx Tx, nodeID string, epoch int64, id string) (*Command, error) {
	if _, err := fenced(tx, nodeID, epoch); err != nil {
		return nil, err
	}
	c, err := tx.Command(id)
	if errors.Is(err, ErrNotFound) || err == nil && c.NodeID != nodeID {
		return nil, nil
	}
	return c, err
}

// recordEvents stores what is new of a batch and returns the sequence up to
// which everything is stored. A batch of another journal than the session's
// stores nothing.
func recordEvents(tx Tx, now time.Time, nodeID string, epoch int64, batch *bcdv1.EventBatch) (int64, error) {
	node, err := fenced(tx, nodeID, epoch)
	if err != nil {
		return 0, err
	}
	if batch.GetJournalId() != node.JournalID {
		return 0, nil
	}
	before := node.EventSequence
	for _, e := range batch.GetEvents() {
		if e.GetSequence() <= node.EventSequence {
			continue
		}
		if e.GetSequence() != node.EventSequence+1 {
			// The journal has no holes, so what lies between is still to come.
			break
		}
		node.EventSequence = e.GetSequence()
		isNew, err := tx.PutEvent(&Event{
			NodeID: nodeID, JournalID: node.JournalID, Sequence: e.GetSequence(), Class: e.GetClass(), Type: e.GetType(),
			JSON: e.GetJson(), TimeMS: e.GetTimeMs(), Message: e.GetMessage(), CommandID: e.GetCommandId(),
		})
		if err != nil {
			return 0, err
		}
		if !isNew {
			continue
		}
		severity := ""
		if e.GetClass() == bcdv1.EventClass_EVENT_CLASS_GAP {
			severity = "warn"
		}
		message := e.GetType()
		if e.GetMessage() != "" {
			message += ": " + e.GetMessage()
		}
		if err := tx.AppendTimeline(&TimelineEntry{
			TimeMS: now.UnixMilli(), MachineID: node.MachineID, NodeID: nodeID, CommandID: e.GetCommandId(),
			Type: "event", Severity: severity, Message: message,
		}); err != nil {
			return 0, err
		}
	}
	if node.EventSequence == before {
		return before, nil
	}
	return node.EventSequence, tx.PutNode(node)
}

func recordInventory(tx Tx, now time.Time, nodeID string, epoch int64, report *bcdv1.InventoryReport) error {
	node, err := fenced(tx, nodeID, epoch)
	if err != nil {
		return err
	}
	if node.Inventory == nil {
		node.Inventory = map[string][]byte{}
	}
	if node.Unreadable == nil {
		node.Unreadable = map[string]string{}
	}
	changed := 0
	for _, s := range report.GetSections() {
		if len(node.Inventory) >= maxSections && node.Inventory[s.GetName()] == nil {
			continue
		}
		if s.GetError() != "" {
			node.Unreadable[s.GetName()] = s.GetError()
		} else {
			delete(node.Unreadable, s.GetName())
		}
		if err := tx.PutSection(s.GetSha256(), s.GetCanonicalJson()); err != nil {
			return err
		}
		if !sameHash(node.Inventory[s.GetName()], s.GetSha256()) {
			changed++
		}
		node.Inventory[s.GetName()] = s.GetSha256()
	}
	if err := tx.PutNode(node); err != nil {
		return err
	}
	machine, err := tx.Machine(node.MachineID)
	if err != nil {
		return err
	}
	if err := describeMachine(tx, machine, node); err != nil {
		return err
	}
	if changed == 0 {
		return nil
	}
	return tx.AppendTimeline(&TimelineEntry{
		TimeMS: now.UnixMilli(), MachineID: node.MachineID, NodeID: nodeID, Type: "inventory",
		Message: fmt.Sprintf("inventory: %d sections changed", changed),
	})
}

func recordConditions(tx Tx, now time.Time, nodeID string, epoch int64, report *bcdv1.ConditionReport) error {
	node, err := fenced(tx, nodeID, epoch)
	if err != nil {
		return err
	}
	old := map[string]Condition{}
	for _, c := range node.Conditions {
		old[c.Type] = c
	}
	note := func(severity, message string) error {
		return tx.AppendTimeline(&TimelineEntry{TimeMS: now.UnixMilli(), MachineID: node.MachineID, NodeID: nodeID, Type: "condition", Severity: severity, Message: message})
	}
	node.Conditions = nil
	for _, c := range report.GetConditions() {
		condition := Condition{Type: c.GetType(), Status: c.GetStatus(), Reason: c.GetReason(), Message: c.GetMessage(), SinceMS: c.GetSinceMs(), Severe: c.GetSevere()}
		node.Conditions = append(node.Conditions, condition)
		before, was := old[c.GetType()]
		delete(old, c.GetType())
		if was && equalConditions(before, condition) || !was && condition.Status == bcdv1.ConditionStatus_CONDITION_STATUS_FALSE {
			continue
		}
		severity := ""
		if condition.Status == bcdv1.ConditionStatus_CONDITION_STATUS_TRUE {
			severity = "warn"
			if condition.Severe {
				severity = "error"
			}
		}
		if err := note(severity, fmt.Sprintf("%s is %s: %s", condition.Type, word(condition.Status), reasonOr(condition.Message, condition.Reason))); err != nil {
			return err
		}
	}
	gone := make([]string, 0, len(old))
	for name := range old {
		gone = append(gone, name)
	}
	sort.Strings(gone)
	for _, name := range gone {
		if err := note("", name+" is gone"); err != nil {
			return err
		}
	}
	return tx.PutNode(node)
}

// recordSpecStatus keeps what the node says of its spec. The observed
// generation never goes back.
func recordSpecStatus(tx Tx, now time.Time, nodeID string, epoch int64, status *bcdv1.SpecStatus) error {
	node, err := fenced(tx, nodeID, epoch)
	if err != nil {
		return err
	}
	spec, err := tx.Spec(nodeID)
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	had := new(bcdv1.SpecStatus)
	if err := proto.Unmarshal(spec.Status, had); err != nil {
		return fmt.Errorf("spec status of %s: %w", nodeID, err)
	}
	status = proto.Clone(status).(*bcdv1.SpecStatus)
	status.ObservedGeneration = max(status.GetObservedGeneration(), had.GetObservedGeneration())
	encoded, err := proto.MarshalOptions{Deterministic: true}.Marshal(status)
	if err != nil {
		return err
	}
	if bytes.Equal(encoded, spec.Status) {
		return nil
	}
	spec.Status = encoded
	if err := tx.PutSpec(spec); err != nil {
		return err
	}
	note := func(severity, message string) error {
		return tx.AppendTimeline(&TimelineEntry{TimeMS: now.UnixMilli(), MachineID: node.MachineID, NodeID: nodeID, Type: "spec", Severity: severity, Message: message})
	}
	before := map[string]*bcdv1.SectionStatus{}
	for _, s := range had.GetSections() {
		before[s.GetName()] = s
	}
	for _, s := range status.GetSections() {
		failed := s.GetState() == bcdv1.SectionState_SECTION_STATE_FAILED || s.GetState() == bcdv1.SectionState_SECTION_STATE_FAILED_TERMINALLY
		if b := before[s.GetName()]; failed && (b.GetState() != s.GetState() || b.GetMessage() != s.GetMessage()) {
			if err := note("error", fmt.Sprintf("spec section %s %s: %s", s.GetName(), word(s.GetState()), s.GetMessage())); err != nil {
				return err
			}
		}
	}
	if status.GetRefused() != "" && status.GetRefused() != had.GetRefused() {
		if err := note("error", "the node refused the spec: "+status.GetRefused()); err != nil {
			return err
		}
	}
	if status.GetObservedGeneration() > had.GetObservedGeneration() {
		return note("", fmt.Sprintf("spec generation %d is in effect", status.GetObservedGeneration()))
	}
	return nil
}

// hashHex is how hardware hashes are keyed.
func hashHex(hash []byte) string { return hex.EncodeToString(hash) }
