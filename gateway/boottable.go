package gateway

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/intent"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	bootNothing = bcdv1.BootAction_BOOT_ACTION_NOTHING
	bootRamdisk = bcdv1.BootAction_BOOT_ACTION_RAMDISK
	bootLocal   = bcdv1.BootAction_BOOT_ACTION_LOCAL

	// maxTableBytes bounds a table, because it travels as one signed payload.
	// It is reached at about 25,000 machines.
	maxTableBytes = intent.MaxPayload
	// maxGeneration bounds the generations that are believed.
	maxGeneration = 1 << 53
)

// placeholderUUIDs are what firmware has where nobody wrote a machine's own.
var placeholderUUIDs = map[string]bool{
	"00000000-0000-0000-0000-000000000000": true,
	"ffffffff-ffff-ffff-ffff-ffffffffffff": true,
	"03000200-0400-0500-0006-000700080009": true,
	"00020003-0004-0005-0006-000700080009": true,
	"12345678-1234-5678-90ab-cddeefaabbcc": true,
	"12345678-1234-1234-1234-123456789012": true,
}

// cleanUUID is an SMBIOS UUID in lower case, "" for a placeholder or what is
// not a UUID.
func cleanUUID(s string) string {
	s = strings.ToLower(strings.TrimSpace(s))
	if len(s) != 36 || placeholderUUIDs[s] {
		return ""
	}
	for i, r := range s {
		hyphen := i == 8 || i == 13 || i == 18 || i == 23
		if hyphen != (r == '-') || !hyphen && !strings.ContainsRune("0123456789abcdef", r) {
			return ""
		}
	}
	return s
}

// cleanMAC is a MAC-48 in lower case with colons, "" for what names no single
// NIC: all zeros, a group address, or something else altogether.
func cleanMAC(s string) string {
	mac, err := net.ParseMAC(strings.TrimSpace(s))
	if err != nil || len(mac) != 6 || mac[0]&1 != 0 || bytes.Equal(mac, make([]byte, 6)) {
		return ""
	}
	return mac.String()
}

func cleanMACs(list []string) []string {
	var out []string
	for _, s := range list {
		if mac := cleanMAC(s); mac != "" && !slices.Contains(out, mac) {
			out = append(out, mac)
		}
	}
	return out
}

// bootAction says what a machine is to boot, and why, in words that an error
// can end with.
func bootAction(tx Tx, m *Machine) (bcdv1.BootAction, string, error) {
	switch m.BootAction {
	case bootNothing:
		return bootNothing, "an operator wants it to be given nothing", nil
	case bootRamdisk:
		return bootRamdisk, "an operator wants it in the ramdisk once", nil
	case bootLocal:
		return bootLocal, "an operator wants it to start from its disk", nil
	}
	if m.CurrentNode == "" {
		return bootRamdisk, "it never joined", nil
	}
	current, err := tx.Node(m.CurrentNode)
	if errors.Is(err, ErrNotFound) {
		return bootRamdisk, "it never joined", nil
	}
	if err != nil {
		return 0, "", err
	}
	if current.Role != bcdv1.Role_ROLE_RAMDISK {
		// A revoked one too: whatever is on its disk is not ours to interrupt.
		return bootLocal, "it is installed", nil
	}
	if m.LastDeploy == "" {
		return bootRamdisk, "nothing was deployed to it", nil
	}
	deploy, err := tx.Command(m.LastDeploy)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return 0, "", err
	}
	if err == nil && deploy.outcome().GetStatus() == bcdv1.OutcomeStatus_OUTCOME_STATUS_SUCCEEDED {
		return bootLocal, "its image is on the disk", nil
	}
	return bootRamdisk, "its last deploy did not succeed", nil
}

// bootTable makes the content of a site's table: everything but generation and
// time.
func bootTable(tx Tx, site *Site) (*bcdv1.BootTable, error) {
	table := &bcdv1.BootTable{Site: site.Name, Unknown: site.Unknown, FullDhcp: fullDHCP(site)}
	err := tx.EachMachine(func(m *Machine) error {
		// A machine that was never told its site may stand anywhere.
		if m.Site != site.Name && m.Site != "" {
			return nil
		}
		row := &bcdv1.MachineBoot{MachineId: m.ID, Name: m.Name, Macs: cleanMACs(m.MACs), SystemUuid: cleanUUID(m.UUID)}
		if len(row.Macs) == 0 && row.SystemUuid == "" {
			return nil
		}
		var err error
		row.Action, _, err = bootAction(tx, m)
		table.Machines = append(table.Machines, row)
		return err
	})
	if err != nil {
		return nil, err
	}
	err = tx.EachArtefact(func(a *Artefact) error {
		table.Artefacts = append(table.Artefacts, a.proto())
		return nil
	})
	if err != nil {
		return nil, err
	}
	// The order of a store is its own; the same content is the same bytes.
	slices.SortFunc(table.Machines, func(a, b *bcdv1.MachineBoot) int { return strings.Compare(a.MachineId, b.MachineId) })
	slices.SortFunc(table.Artefacts, func(a, b *bcdv1.BootArtefact) int { return strings.Compare(a.Name, b.Name) })
	return table, nil
}

// errTableTooLarge is a table that cannot be sent.
type errTableTooLarge struct {
	site     string
	size     int
	machines int
}

func (e *errTableTooLarge) Error() string {
	return fmt.Sprintf("the boot table of site %s would be %d bytes with %d machines; at most %d are allowed, so its agents keep the last one: give some of the machines another site", e.site, e.size, e.machines, maxTableBytes)
}

// currentTable makes the site's table as it is to be now. A content that is
// new raises the generation in site, which says so by changed. have is the
// generation that an agent has: one above ours shows that the store is an
// older copy of itself, and the generation goes above it.
func currentTable(tx Tx, now time.Time, site *Site, have int64) (table *bcdv1.BootTable, changed bool, err error) {
	if table, err = bootTable(tx, site); err != nil {
		return nil, false, err
	}
	content, err := proto.MarshalOptions{Deterministic: true}.Marshal(table)
	if err != nil {
		return nil, false, fmt.Errorf("boot table of %s: %w", site.Name, err)
	}
	// Generation and time add less than 32 bytes.
	if len(content)+32 > maxTableBytes {
		return nil, false, &errTableTooLarge{site.Name, len(content), len(table.Machines)}
	}
	sum := sha256.Sum256(content)
	ahead := have > site.Generation && have < maxGeneration
	if !bytes.Equal(sum[:], site.TableSHA256) || ahead {
		if ahead {
			site.Generation = have
		}
		site.Generation, site.TableSHA256, site.IssuedMS, changed = site.Generation+1, sum[:], now.UnixMilli(), true
	}
	table.Generation, table.IssuedMs = site.Generation, site.IssuedMS
	return table, changed, nil
}

func fullDHCP(site *Site) []*bcdv1.FullDhcp {
	var out []*bcdv1.FullDhcp
	for _, f := range site.FullDHCP {
		out = append(out, &bcdv1.FullDhcp{Mac: f.MAC, Address: f.Address, Router: f.Router, Dns: f.DNS})
	}
	return out
}

func (a *Artefact) proto() *bcdv1.BootArtefact {
	return &bcdv1.BootArtefact{
		Kind: a.Kind, Architecture: a.Architecture, Sha256: a.SHA256, Size: a.Size, Name: a.Name, CommandLine: a.CommandLine, Version: a.Version,
	}
}

// bootedOnce ends an order to boot the ramdisk once, when the ramdisk of a new
// boot has its session. It changes m only.
func bootedOnce(m *Machine, role bcdv1.Role, bootID string) bool {
	if m.BootAction != bootRamdisk || role != bcdv1.Role_ROLE_RAMDISK || bootID == m.BootOrderedIn {
		return false
	}
	m.BootAction, m.BootOrderedIn = bcdv1.BootAction_BOOT_ACTION_UNSPECIFIED, ""
	return true
}
