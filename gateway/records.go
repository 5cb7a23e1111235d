package gateway

import (
	"bytes"
	"strings"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// The records of the Store. Times are milliseconds of the Unix epoch, server
// time. They are stored as JSON, so a field may be added at any time and is
// zero in older records.

// Token is a join token. Its secret is known only to who was given it.
type Token struct {
	ID           string     `json:"id"`
	SecretSHA256 []byte     `json:"secret_sha256"`
	Role         bcdv1.Role `json:"role"`
	Site         string     `json:"site"`
	Uses         int32      `json:"uses"`
	Used         int32      `json:"used"`
	CreatedMS    int64      `json:"created_ms"`
	ExpiresMS    int64      `json:"expires_ms"`
	Revoked      bool       `json:"revoked,omitempty"`
	MachineID    string     `json:"machine_id,omitempty"`
	Note         string     `json:"note,omitempty"`
	// CommandID is the deploy command that it was minted for; the node that
	// joins with it is a new installation.
	CommandID string `json:"command_id,omitempty"`
	// BootID, when set, is the one boot that may join with it.
	BootID string `json:"boot_id,omitempty"`
	// Given maps the hardware (hex hash) that used it to the node it became,
	// so that a join whose answer was lost can be repeated at no cost.
	Given map[string]string `json:"given,omitempty"`
}

// Machine is hardware.
type Machine struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	Site string `json:"site"`
	// HardwareHash (hex) is what makes it the same machine again.
	HardwareHash string   `json:"hardware_hash"`
	Serial       string   `json:"serial,omitempty"`
	UUID         string   `json:"uuid,omitempty"`
	MACs         []string `json:"macs,omitempty"`
	FirstSeenMS  int64    `json:"first_seen_ms"`
	Vendor       string   `json:"vendor,omitempty"`
	Product      string   `json:"product,omitempty"`
	// CurrentNode speaks, or spoke last, for it.
	CurrentNode string `json:"current_node,omitempty"`
	// LastDeploy is the newest deploy.image command.
	LastDeploy string `json:"last_deploy,omitempty"`
	// BootAction is what an operator said it shall boot; unspecified is what
	// its state says. A RAMDISK ends with the first session of a boot that is
	// not BootOrderedIn, the boot id that it ran in when it was ordered.
	BootAction    bcdv1.BootAction `json:"boot_action,omitempty"`
	BootOrderedIn string           `json:"boot_ordered_in,omitempty"`
}

// Keys are the names that FindMachine knows it by. Where two machines share
// one (a vendor that gave every board the same serial), the last one put has
// it; only the hardware key decides which machine a join belongs to.
func (m *Machine) Keys() []string {
	var keys []string
	add := func(kind, value string) {
		if value = strings.ToLower(strings.TrimSpace(value)); value != "" {
			keys = append(keys, kind+":"+value)
		}
	}
	add("name", m.Name)
	add("hardware", m.HardwareHash)
	add("serial", m.Serial)
	add("uuid", m.UUID)
	for _, mac := range m.MACs {
		add("mac", mac)
	}
	return keys
}

// Node is one identity of a machine.
type Node struct {
	ID        string     `json:"id"`
	MachineID string     `json:"machine_id"`
	Role      bcdv1.Role `json:"role"`
	Site      string     `json:"site"`
	Hostname  string     `json:"hostname,omitempty"`
	Version   string     `json:"version,omitempty"`
	// HardwareHash is hex, as in Machine.
	HardwareHash string `json:"hardware_hash"`
	BootID       string `json:"boot_id,omitempty"`
	// BootMS is when the first session of BootID began.
	BootMS int64 `json:"boot_ms,omitempty"`
	// PastBoots are boot ids that were replaced by a later one: a machine
	// never goes back to one, so a Hello that does comes from a clone.
	PastBoots []string `json:"past_boots,omitempty"`
	// JournalID and EventSequence: events up to the sequence are stored.
	JournalID     string   `json:"journal_id,omitempty"`
	EventSequence int64    `json:"event_sequence,omitempty"`
	Epoch         int64    `json:"epoch,omitempty"`
	JoinedMS      int64    `json:"joined_ms"`
	LastSeenMS    int64    `json:"last_seen_ms,omitempty"`
	CertExpiresMS int64    `json:"cert_expires_ms"`
	Revoked       bool     `json:"revoked,omitempty"`
	RevokeReason  string   `json:"revoke_reason,omitempty"`
	Kinds         []string `json:"kinds,omitempty"`
	Remote        string   `json:"remote,omitempty"`
	// SpecGeneration is that of the node's Spec, so that nobody reads 4 MiB to
	// learn that there is nothing new.
	SpecGeneration int64 `json:"spec_generation,omitempty"`
	// Inventory maps a section's name to its SHA-256.
	Inventory  map[string][]byte `json:"inventory,omitempty"`
	Unreadable map[string]string `json:"unreadable,omitempty"`
	Conditions []Condition       `json:"conditions,omitempty"`
}

// Condition is a level that a node reported.
type Condition struct {
	Type    string                `json:"type"`
	Status  bcdv1.ConditionStatus `json:"status"`
	Reason  string                `json:"reason,omitempty"`
	Message string                `json:"message,omitempty"`
	SinceMS int64                 `json:"since_ms,omitempty"`
	Severe  bool                  `json:"severe,omitempty"`
}

// Certificate is one that this gateway issued.
type Certificate struct {
	// Serial is hex.
	Serial    string `json:"serial"`
	NodeID    string `json:"node_id"`
	IssuedMS  int64  `json:"issued_ms"`
	ExpiresMS int64  `json:"expires_ms"`
	// KeySHA256 is over the SubjectPublicKeyInfo.
	KeySHA256 []byte `json:"key_sha256"`
	Revoked   bool   `json:"revoked,omitempty"`
}

// Command is one command's whole life.
type Command struct {
	ID             string             `json:"id"`
	Sequence       int64              `json:"sequence"`
	NodeID         string             `json:"node_id"`
	MachineID      string             `json:"machine_id"`
	Kind           string             `json:"kind"`
	Lane           bcdv1.Lane         `json:"lane"`
	IdempotencyKey string             `json:"idempotency_key,omitempty"`
	State          bcdv1.CommandState `json:"state"`
	QueuedMS       int64              `json:"queued_ms"`
	DeadlineMS     int64              `json:"deadline_ms"`
	IssuedBy       string             `json:"issued_by,omitempty"`
	// Signed is the marshalled bcd.v1.Signed, sent as it is.
	Signed []byte `json:"signed"`
	// SentJournal is the journal it was sent to: another one later knows
	// nothing of it.
	SentJournal  string `json:"sent_journal,omitempty"`
	SentMS       int64  `json:"sent_ms,omitempty"`
	Cancelled    bool   `json:"cancelled,omitempty"`
	CancelReason string `json:"cancel_reason,omitempty"`
	// Outcome is a marshalled bcd.v1.Outcome once State is ENDED.
	Outcome []byte `json:"outcome,omitempty"`
	// UserData says that the Secret "userdata/<id>" lives as long as this.
	UserData bool `json:"user_data,omitempty"`
	// DeploySite is the site of the node that a deploy installs.
	DeploySite string `json:"deploy_site,omitempty"`
	// JoinToken is the token last minted for "join/<id>".
	JoinToken string `json:"join_token,omitempty"`
}

// Event is one that a node's journal held.
type Event struct {
	NodeID    string           `json:"node_id"`
	JournalID string           `json:"journal_id"`
	Sequence  int64            `json:"sequence"`
	Class     bcdv1.EventClass `json:"class"`
	Type      string           `json:"type"`
	JSON      []byte           `json:"json,omitempty"`
	TimeMS    int64            `json:"time_ms,omitempty"`
	Message   string           `json:"message,omitempty"`
	CommandID string           `json:"command_id,omitempty"`
}

// TimelineEntry is one line of a machine's history, or, with an empty
// MachineID, of the gateway's.
type TimelineEntry struct {
	Sequence  int64  `json:"sequence"`
	TimeMS    int64  `json:"time_ms"`
	MachineID string `json:"machine_id,omitempty"`
	NodeID    string `json:"node_id,omitempty"`
	Type      string `json:"type"`
	Message   string `json:"message"`
	CommandID string `json:"command_id,omitempty"`
	Severity  string `json:"severity,omitempty"`
}

// Spec is the newest NodeSpec of a node and what the node said of it.
type Spec struct {
	NodeID     string `json:"node_id"`
	Generation int64  `json:"generation"`
	// Signed is the marshalled bcd.v1.Signed; Status a marshalled
	// bcd.v1.SpecStatus.
	Signed []byte `json:"signed"`
	Status []byte `json:"status,omitempty"`
}

// Secret is a value that a command or spec refers to.
type Secret struct {
	Reference string `json:"reference"`
	// NodeID, when set, is the only node that may have it.
	NodeID    string `json:"node_id,omitempty"`
	Value     []byte `json:"value"`
	CreatedMS int64  `json:"created_ms"`
}

// Blob is what the gateway knows of a stored file.
type Blob struct {
	// SHA256 is of the file as it is, hex.
	SHA256    string `json:"sha256"`
	Size      int64  `json:"size"`
	CreatedMS int64  `json:"created_ms"`
	// NodeID uploaded it; empty for an operator.
	NodeID string `json:"node_id,omitempty"`
	// Format and the raw figures are those of a disk image: raw when the file
	// is not compressed. RawSHA256 is empty when it could not be unpacked.
	Format    bcdv1.ImageFormat `json:"format,omitempty"`
	RawSize   int64             `json:"raw_size,omitempty"`
	RawSHA256 []byte            `json:"raw_sha256,omitempty"`
}

// equalConditions says whether two reports say the same.
func equalConditions(a, b Condition) bool {
	return a.Status == b.Status && a.Reason == b.Reason && a.Severe == b.Severe && a.Message == b.Message
}

// sameHash compares an inventory hash without caring for nil against empty.
func sameHash(a, b []byte) bool { return len(a) > 0 && bytes.Equal(a, b) }
