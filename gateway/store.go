package gateway

import (
	"context"
	"errors"
)

// Store is everything that must outlive a gateway process. It is a set of
// typed records behind serializable transactions; what the records mean, which
// change may follow which, is decided in this package (see ledger.go), so that
// every implementation decides alike. storetest.Run is its conformance suite.
//
// An implementation makes a transaction durable before Update returns nil, and
// may gather the transactions of several callers into one commit.
type Store interface {
	// Update runs fn in a transaction that reads and writes. fn may run more
	// than once (a conflict, a shared commit that failed) and must therefore
	// set, never add to, what it captures. An error from fn undoes all of it
	// and is returned as it is.
	Update(ctx context.Context, fn func(Tx) error) error
	// View runs fn on a consistent state. Writes in it fail.
	View(ctx context.Context, fn func(Tx) error) error
	// Close ends the use of the store. Transactions after it fail.
	Close() error
}

// ErrNotFound is returned for a record that is not in the store.
var ErrNotFound = errors.New("not found")

// ErrReadOnly is returned for a write within View.
var ErrReadOnly = errors.New("write in a read-only transaction")

// Tx reads and writes records within one transaction. Records it returns are
// the caller's own; a change counts only once it was put back. Lookups of what
// is not there return ErrNotFound; Each and list methods find nothing instead.
type Tx interface {
	Token(id string) (*Token, error)
	PutToken(*Token) error
	EachToken(func(*Token) error) error

	DeleteToken(id string) error

	Machine(id string) (*Machine, error)
	// FindMachine looks up one of the names in a machine's Keys.
	FindMachine(key string) (*Machine, error)
	// PutMachine stores the machine and makes it findable by its Keys, and by
	// no key it had before and has no more.
	PutMachine(*Machine) error
	EachMachine(func(*Machine) error) error

	Node(id string) (*Node, error)
	PutNode(*Node) error
	// NodesOf lists a machine's nodes, oldest first.
	NodesOf(machineID string) ([]*Node, error)

	Certificate(serial string) (*Certificate, error)
	PutCertificate(*Certificate) error

	Command(id string) (*Command, error)
	// CommandByKey finds a machine's command by its idempotency key.
	CommandByKey(machineID, key string) (*Command, error)
	// PutCommand stores the command; a new one (Sequence 0) gets the next
	// sequence.
	PutCommand(*Command) error
	// OpenCommands lists a node's commands that have not ended, in the order
	// they were queued; those of all nodes when nodeID is empty.
	OpenCommands(nodeID string) ([]*Command, error)
	// CommandsOf lists a machine's newest commands, newest first; those of all
	// machines when machineID is empty.
	CommandsOf(machineID string, limit int) ([]*Command, error)

	// PutEvent stores an event once: false says that the (node, journal,
	// sequence) was there already, and nothing changed.
	PutEvent(*Event) (bool, error)
	Events(nodeID, journalID string, after int64, limit int) ([]*Event, error)

	// AppendTimeline gives the entry the next sequence and stores it.
	AppendTimeline(*TimelineEntry) error
	// Timeline lists entries with a sequence over after, oldest first; of one
	// machine, or of all when machineID is empty.
	Timeline(machineID string, after int64, limit int) ([]*TimelineEntry, error)
	// TimelineTail lists the newest entries, oldest first.
	TimelineTail(machineID string, limit int) ([]*TimelineEntry, error)
	// LastTimeline is the highest sequence given so far, 0 for none.
	LastTimeline() (int64, error)

	// Section is an inventory section's canonical JSON by its SHA-256.
	Section(sha256 []byte) ([]byte, error)
	PutSection(sha256, canonicalJSON []byte) error

	Spec(nodeID string) (*Spec, error)
	PutSpec(*Spec) error

	Secret(reference string) (*Secret, error)
	PutSecret(*Secret) error
	DeleteSecret(reference string) error

	Blob(sha256Hex string) (*Blob, error)
	PutBlob(*Blob) error
	DeleteBlob(sha256Hex string) error
	EachBlob(func(*Blob) error) error

	Site(name string) (*Site, error)
	PutSite(*Site) error
	EachSite(func(*Site) error) error

	// Artefact is the one that is served of a kind and architecture.
	Artefact(name ArtefactName) (*Artefact, error)
	PutArtefact(*Artefact) error
	DeleteArtefact(name ArtefactName) error
	EachArtefact(func(*Artefact) error) error

	// Boots are a MAC's newest boots on a site.
	Boots(site, mac string) (*Boots, error)
	PutBoots(*Boots) error
	DeleteBoots(site, mac string) error
	EachBoots(site string, fn func(*Boots) error) error

	BootGrant(bootID string) (*BootGrant, error)
	PutBootGrant(*BootGrant) error
	DeleteBootGrant(bootID string) error
	EachBootGrant(func(*BootGrant) error) error
}
