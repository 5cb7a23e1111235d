package gateway

import bcdv1 "github.com/better-compute/bcd/api/bcd/v1"

// Site is a network that machines boot on. It comes to be with the first token
// that names it.
type Site struct {
	Name string `json:"name"`
	// Unknown is for a machine that is in no row of the table.
	Unknown  bcdv1.BootAction `json:"unknown"`
	FullDHCP []FullDHCP       `json:"full_dhcp,omitempty"`
	// Agents are the nodes that have asked for the site, the first one first.
	Agents []string  `json:"agents,omitempty"`
	Lease  BootLease `json:"lease"`
	// Generation, of the table whose content has TableSHA256, issued at
	// IssuedMS. The table itself is made anew: it follows from other records.
	Generation  int64  `json:"generation,omitempty"`
	TableSHA256 []byte `json:"table_sha256,omitempty"`
	IssuedMS    int64  `json:"issued_ms,omitempty"`
}

// FullDHCP is one fixed address; see bcd.v1.FullDhcp.
type FullDHCP struct {
	MAC     string   `json:"mac"`
	Address string   `json:"address"`
	Router  string   `json:"router,omitempty"`
	DNS     []string `json:"dns,omitempty"`
}

// ArtefactName says for what an artefact is. There is one of each.
type ArtefactName struct {
	Kind         bcdv1.ArtefactKind `json:"kind"`
	Architecture string             `json:"architecture"`
}

// Artefact is a file that sites serve to booting machines, in the blob store
// under its digest.
type Artefact struct {
	ArtefactName
	SHA256      []byte `json:"sha256"`
	Size        int64  `json:"size"`
	Name        string `json:"name"`
	CommandLine string `json:"command_line,omitempty"`
	Version     string `json:"version,omitempty"`
	PutMS       int64  `json:"put_ms,omitempty"`
}

// Boots are the newest boots of a MAC on a site, the newest first.
type Boots struct {
	Site string `json:"site"`
	MAC  string `json:"mac"`
	// SeenMS is when the newest was last reported.
	SeenMS int64 `json:"seen_ms"`
	// Traces are marshalled bcd.v1.BootTrace.
	Traces [][]byte `json:"traces"`
}

// BootGrant is that a boot got its token.
type BootGrant struct {
	BootID    string `json:"boot_id"`
	Site      string `json:"site"`
	AskSHA256 []byte `json:"ask_sha256"`
	TokenID   string `json:"token_id"`
	MachineID string `json:"machine_id,omitempty"`
	// Answer is the marshalled bcd.v1.Signed that was given. The token in it is
	// sealed, so that it is of no use here.
	Answer    []byte `json:"answer"`
	CreatedMS int64  `json:"created_ms"`
	ExpiresMS int64  `json:"expires_ms"`
}
