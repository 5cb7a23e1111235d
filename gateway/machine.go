package gateway

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// maxShortName bounds the names that machines get: they go into tables.
const maxShortName = 24

// genericNames are host names that say nothing about the machine.
var genericNames = map[string]bool{
	"": true, "localhost": true, "none": true, "bcd": true, "ramdisk": true, "debian": true, "linux": true, "node": true, "unknown": true, "default": true,
}

// newMachine makes the record of hardware met for the first time.
func newMachine(tx Tx, now time.Time, claims *bcdv1.JoinClaims) (*Machine, error) {
	m := &Machine{
		ID: newID("mach"), HardwareHash: hashHex(claims.GetHardwareKeyHash()), Serial: claims.GetSystemSerial(),
		UUID: claims.GetSystemUuid(), MACs: claims.GetMacs(), FirstSeenMS: now.UnixMilli(),
	}
	var err error
	m.Name, err = freeName(tx, claims)
	return m, err
}

// freeName gives a short name that no machine has: from the host name, the
// serial number, or the hardware key, whichever first says something.
func freeName(tx Tx, claims *bcdv1.JoinClaims) (string, error) {
	host, _, _ := strings.Cut(claims.GetHostname(), ".")
	base := shortName(host)
	if genericNames[base] || strings.HasPrefix(base, "bcd-") {
		base = shortName(claims.GetSystemSerial())
	}
	if genericNames[base] {
		base = "m-" + hashHex(claims.GetHardwareKeyHash())[:8]
	}
	for n := 1; ; n++ {
		name := base
		if n > 1 {
			name = fmt.Sprintf("%s-%d", base, n)
		}
		_, err := tx.FindMachine("name:" + name)
		if errors.Is(err, ErrNotFound) {
			return name, nil
		}
		if err != nil {
			return "", err
		}
	}
}

// shortName keeps lower-case letters, digits and inner hyphens.
func shortName(s string) string {
	var out strings.Builder
	for _, r := range strings.ToLower(s) {
		switch {
		case r >= 'a' && r <= 'z' || r >= '0' && r <= '9':
			out.WriteRune(r)
		case out.Len() > 0 && !strings.HasSuffix(out.String(), "-"):
			out.WriteByte('-')
		}
		if out.Len() >= maxShortName {
			break
		}
	}
	return strings.Trim(out.String(), "-")
}

// findMachine resolves what an operator typed: an id, a name, a serial number,
// a MAC address, an SMBIOS UUID, or the id of one of its nodes.
func findMachine(tx Tx, name string) (*Machine, error) {
	if name == "" {
		return nil, invalid("a machine is needed: its id, name, serial number, MAC address, or the id of a node")
	}
	m, err := tx.Machine(name)
	if !errors.Is(err, ErrNotFound) {
		return m, err
	}
	if n, err := tx.Node(name); err == nil {
		return tx.Machine(n.MachineID)
	} else if !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	for _, kind := range []string{"name:", "serial:", "mac:", "uuid:"} {
		m, err := tx.FindMachine(kind + name)
		if !errors.Is(err, ErrNotFound) {
			return m, err
		}
	}
	return nil, fmt.Errorf("machine %.80q: %w; bcd-gateway machines lists those that are known", name, ErrNotFound)
}

// The parts of the inventory that the gateway itself reads; see agent/host for
// the whole.
type systemSection struct {
	Vendor  string `json:"vendor"`
	Product string `json:"product"`
	Serial  string `json:"serial"`
	UUID    string `json:"uuid"`
}

type diskSection struct {
	Block []disk `json:"block"`
}

type disk struct {
	WWN        string `json:"wwn"`
	Serial     string `json:"serial"`
	Model      string `json:"model"`
	SizeBytes  int64  `json:"size_bytes"`
	Rotational bool   `json:"rotational"`
	Removable  bool   `json:"removable"`
	ReadOnly   bool   `json:"read_only"`
	Transport  string `json:"transport"`
	Path       string `json:"path"`
}

// section decodes a node's inventory section into v; false when there is none
// that can be read.
func section(tx Tx, node *Node, name string, v any) (bool, error) {
	hash := node.Inventory[name]
	if len(hash) == 0 {
		return false, nil
	}
	raw, err := tx.Section(hash)
	if errors.Is(err, ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return json.Unmarshal(raw, v) == nil, nil
}

// describeMachine takes what the inventory says into the machine's record.
func describeMachine(tx Tx, m *Machine, node *Node) error {
	var system systemSection
	ok, err := section(tx, node, "system", &system)
	if err != nil || !ok {
		return err
	}
	before := *m
	m.Vendor, m.Product = clip(system.Vendor, maxNameBytes), clip(system.Product, maxNameBytes)
	if system.Serial != "" {
		m.Serial = clip(system.Serial, maxNameBytes)
	}
	if system.UUID != "" {
		m.UUID = clip(system.UUID, maxNameBytes)
	}
	if before.Vendor == m.Vendor && before.Product == m.Product && before.Serial == m.Serial && before.UUID == m.UUID {
		return nil
	}
	return tx.PutMachine(m)
}

// describe is a machine as operators see it.
func (g *Gateway) describe(tx Tx, m *Machine, allNodes bool) (*bcdv1.Machine, error) {
	out := &bcdv1.Machine{
		Id: m.ID, Name: m.Name, Site: m.Site, SystemSerial: m.Serial, SystemUuid: m.UUID, Macs: m.MACs,
		FirstSeenMs: m.FirstSeenMS, Vendor: m.Vendor, Product: m.Product, BootAction: m.BootAction,
	}
	var current *Node
	if m.CurrentNode != "" {
		var err error
		if current, err = tx.Node(m.CurrentNode); err != nil && !errors.Is(err, ErrNotFound) {
			return nil, err
		}
	}
	if current != nil {
		described, err := g.describeNode(tx, current)
		if err != nil {
			return nil, err
		}
		out.Current = described
	}
	if allNodes {
		nodes, err := tx.NodesOf(m.ID)
		if err != nil {
			return nil, err
		}
		for _, n := range nodes {
			described, err := g.describeNode(tx, n)
			if err != nil {
				return nil, err
			}
			out.Nodes = append(out.Nodes, described)
		}
	}
	var deploy *Command
	if m.LastDeploy != "" {
		var err error
		if deploy, err = tx.Command(m.LastDeploy); err != nil && !errors.Is(err, ErrNotFound) {
			return nil, err
		}
	}
	out.State, out.StateMessage = machineState(current, deploy, current != nil && g.hub.connected(current.ID))
	return out, nil
}

// machineState is one word for a table, and the sentence behind it.
func machineState(current *Node, deploy *Command, connected bool) (state, message string) {
	seen := func() string {
		if current.LastSeenMS == 0 {
			return "joined, and not connected yet"
		}
		return "not connected; last seen " + time.UnixMilli(current.LastSeenMS).UTC().Format(time.RFC3339)
	}
	switch {
	case current == nil:
		return "discovered", "known, but it never joined"
	case current.Revoked:
		return "failed", "its node was revoked: " + current.RevokeReason
	case current.Role != bcdv1.Role_ROLE_RAMDISK:
		if connected {
			return "installed", fmt.Sprintf("runs as %s, version %s", word(current.Role), current.Version)
		}
		if current.LastSeenMS == 0 {
			return "discovered", seen()
		}
		return "lost", seen()
	}
	// In the ramdisk, what counts is the deploy that was sent to it.
	if deploy != nil && deploy.NodeID == current.ID {
		outcome := deploy.outcome()
		switch {
		case outcome == nil && connected:
			return "deploying", fmt.Sprintf("%s is %s", deploy.ID, word(deploy.State))
		case outcome == nil:
			return "deploying", fmt.Sprintf("%s is %s; %s", deploy.ID, word(deploy.State), seen())
		case outcome.GetStatus() == bcdv1.OutcomeStatus_OUTCOME_STATUS_SUCCEEDED && !connected:
			return "deployed", "the image is on the disk; the installed system has not joined yet"
		case outcome.GetStatus() == bcdv1.OutcomeStatus_OUTCOME_STATUS_SUCCEEDED:
			return "deployed", "the image is on the disk; the machine is still in the ramdisk"
		case outcome.GetStatus() != bcdv1.OutcomeStatus_OUTCOME_STATUS_CANCELLED:
			return "failed", fmt.Sprintf("%s %s: %s", deploy.ID, word(outcome.GetStatus()), outcome.GetMessage())
		}
	}
	if connected {
		return "ramdisk", "waits in the ramdisk for a deploy"
	}
	if current.LastSeenMS == 0 {
		return "discovered", seen()
	}
	return "lost", seen()
}

func (g *Gateway) describeNode(tx Tx, n *Node) (*bcdv1.Node, error) {
	out := &bcdv1.Node{
		Id: n.ID, MachineId: n.MachineID, Role: n.Role, Hostname: n.Hostname, Version: n.Version, BootId: n.BootID,
		Connected: g.hub.connected(n.ID), JoinedMs: n.JoinedMS, LastSeenMs: n.LastSeenMS, CertificateExpiresMs: n.CertExpiresMS,
		Revoked: n.Revoked, Epoch: n.Epoch, JournalId: n.JournalID, Kinds: n.Kinds, RemoteAddress: n.Remote,
	}
	if out.GetConnected() {
		out.LastSeenMs = g.now().UnixMilli()
	}
	spec, err := tx.Spec(n.ID)
	if errors.Is(err, ErrNotFound) {
		return out, nil
	}
	if err != nil {
		return nil, err
	}
	out.Spec = new(bcdv1.SpecStatus)
	if err := proto.Unmarshal(spec.Status, out.Spec); err != nil {
		return nil, fmt.Errorf("spec status of %s: %w", n.ID, err)
	}
	return out, nil
}

// describeCommand is a command as operators see it.
func (g *Gateway) describeCommand(c *Command) (*bcdv1.CommandInfo, error) {
	signed, command := new(bcdv1.Signed), new(bcdv1.Command)
	if err := proto.Unmarshal(c.Signed, signed); err != nil {
		return nil, fmt.Errorf("command %s: %w", c.ID, err)
	}
	if err := proto.Unmarshal(signed.GetPayload(), command); err != nil {
		return nil, fmt.Errorf("command %s: %w", c.ID, err)
	}
	return &bcdv1.CommandInfo{
		Id: c.ID, Kind: c.Kind, NodeId: c.NodeID, MachineId: c.MachineID, Lane: c.Lane, State: c.State, QueuedMs: c.QueuedMS,
		DeadlineMs: c.DeadlineMS, Outcome: c.outcome(), Progress: g.hub.progressOf(c.ID), Body: command.GetBody(), IssuedBy: c.IssuedBy,
	}, nil
}
