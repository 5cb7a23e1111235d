package gateway

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// keptBootTraces of one MAC: what is wrong now, and what was different
	// before.
	keptBootTraces = 3
	// maxBootMACs of one site are remembered; beyond, the one that was seen
	// longest ago is forgotten. A host that makes up MACs fills this and no
	// more.
	maxBootMACs   = 1024
	maxBootSteps  = 64
	maxStepBytes  = 256
	maxListedBoot = 256
	// bootSlack is how far the agent's clock, with which a trace begins, may
	// run ahead of ours: it has server time with every answer.
	bootSlack = 5 * time.Second
)

// plainText makes a text of a machine's fit for a terminal and for a bound.
func plainText(s string, most int) string {
	return clip(strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s), most)
}

func plainLines(lines []string) []string {
	out := make([]string, 0, len(lines))
	for _, line := range lines {
		out = append(out, plainText(line, maxSyncLine))
	}
	return out
}

// cleanTrace brings a trace within its bounds; nil when its MAC is none.
func cleanTrace(site string, in *bcdv1.BootTrace) *bcdv1.BootTrace {
	mac := cleanMAC(in.GetMac())
	if mac == "" {
		return nil
	}
	out := &bcdv1.BootTrace{
		Mac: mac, SystemUuid: cleanUUID(in.GetSystemUuid()), Architecture: plainText(in.GetArchitecture(), 32), Firmware: plainText(in.GetFirmware(), 32),
		StartedMs: in.GetStartedMs(), VerdictCode: plainText(in.GetVerdictCode(), 64), Verdict: plainText(in.GetVerdict(), 2*maxStepBytes),
		Action: in.GetAction(), BootedMs: in.GetBootedMs(), MachineId: plainText(in.GetMachineId(), 64), Site: site,
	}
	steps := in.GetSteps()
	if len(steps) > maxBootSteps {
		// The oldest in the middle go: how it began and how it ended stay.
		steps = append(slices.Clone(steps[:maxBootSteps/4]), steps[len(steps)-maxBootSteps*3/4:]...)
	}
	for _, s := range steps {
		out.Steps = append(out.Steps, &bcdv1.BootStep{
			TimeMs: s.GetTimeMs(), Type: plainText(s.GetType(), 64), Message: plainText(s.GetMessage(), maxStepBytes), Count: s.GetCount(),
		})
	}
	return out
}

// recordTraces stores what changed. A trace with the start of one that is
// there takes its place.
func recordTraces(tx Tx, now time.Time, site string, traces []*bcdv1.BootTrace) error {
	fresh := false
	for _, t := range traces {
		trace := cleanTrace(site, t)
		if trace == nil {
			continue
		}
		boots, err := tx.Boots(site, trace.GetMac())
		if errors.Is(err, ErrNotFound) {
			boots, fresh = &Boots{Site: site, MAC: trace.GetMac()}, true
		} else if err != nil {
			return err
		}
		encoded, err := proto.Marshal(trace)
		if err != nil {
			return fmt.Errorf("boot trace of %s: %w", trace.GetMac(), err)
		}
		kept := [][]byte{encoded}
		for _, old := range boots.Traces {
			had := new(bcdv1.BootTrace)
			if err := proto.Unmarshal(old, had); err != nil {
				return fmt.Errorf("boot trace of %s: %w", trace.GetMac(), err)
			}
			if had.GetStartedMs() != trace.GetStartedMs() && len(kept) < keptBootTraces {
				kept = append(kept, old)
			}
		}
		boots.Traces, boots.SeenMS = kept, now.UnixMilli()
		if err := tx.PutBoots(boots); err != nil {
			return err
		}
	}
	if !fresh {
		return nil
	}
	var all []*Boots
	if err := tx.EachBoots(site, func(b *Boots) error {
		all = append(all, &Boots{Site: b.Site, MAC: b.MAC, SeenMS: b.SeenMS})
		return nil
	}); err != nil {
		return err
	}
	slices.SortFunc(all, func(a, b *Boots) int { return int(b.SeenMS - a.SeenMS) })
	for _, b := range all[min(len(all), maxBootMACs):] {
		if err := tx.DeleteBoots(b.Site, b.MAC); err != nil {
			return err
		}
	}
	return nil
}

// newestTrace is a MAC's last boot on a site, nil for none.
func newestTrace(tx Tx, site, mac string) (*bcdv1.BootTrace, error) {
	boots, err := tx.Boots(site, mac)
	if errors.Is(err, ErrNotFound) || err == nil && len(boots.Traces) == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	trace := new(bcdv1.BootTrace)
	if err := proto.Unmarshal(boots.Traces[0], trace); err != nil {
		return nil, fmt.Errorf("boot trace of %s: %w", mac, err)
	}
	return trace, nil
}

// machineTraces is how each of a machine's MACs fared the last time, on
// whichever site that was.
func machineTraces(tx Tx, m *Machine) ([]*bcdv1.BootTrace, error) {
	var names []string
	if err := tx.EachSite(func(s *Site) error {
		names = append(names, s.Name)
		return nil
	}); err != nil {
		return nil, err
	}
	var out []*bcdv1.BootTrace
	for _, mac := range cleanMACs(m.MACs) {
		var newest *bcdv1.BootTrace
		for _, site := range names {
			trace, err := newestTrace(tx, site, mac)
			if err != nil {
				return nil, err
			}
			if trace != nil && (newest == nil || trace.GetStartedMs() > newest.GetStartedMs()) {
				newest = trace
			}
		}
		if newest != nil {
			out = append(out, newest)
		}
	}
	return out, nil
}

// siteTraces are the newest boots of a site, the newest first.
func siteTraces(tx Tx, site string) ([]*bcdv1.BootTrace, error) {
	var all []*Boots
	if err := tx.EachBoots(site, func(b *Boots) error {
		all = append(all, b)
		return nil
	}); err != nil {
		return nil, err
	}
	slices.SortFunc(all, func(a, b *Boots) int { return int(b.SeenMS - a.SeenMS) })
	var out []*bcdv1.BootTrace
	for _, b := range all[:min(len(all), maxListedBoot)] {
		trace, err := newestTrace(tx, site, b.MAC)
		if err != nil {
			return nil, err
		}
		if trace != nil {
			out = append(out, trace)
		}
	}
	return out, nil
}

// booted says which of the MACs belong to a machine whose ramdisk has a
// session now, in a boot that began after the MAC's newest trace did.
func (g *Gateway) booted(tx Tx, site string, waiting []string) ([]*bcdv1.BootedMachine, error) {
	var out []*bcdv1.BootedMachine
	for _, mac := range cleanMACs(waiting) {
		m, err := tx.FindMachine("mac:" + mac)
		if errors.Is(err, ErrNotFound) || err == nil && m.CurrentNode == "" {
			continue
		}
		if err != nil {
			return nil, err
		}
		node, err := tx.Node(m.CurrentNode)
		if errors.Is(err, ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if node.Role != bcdv1.Role_ROLE_RAMDISK || node.Revoked || !g.hub.connected(node.ID) {
			continue
		}
		trace, err := newestTrace(tx, site, mac)
		if err != nil {
			return nil, err
		}
		if trace != nil && node.BootMS < trace.GetStartedMs()-bootSlack.Milliseconds() {
			continue
		}
		out = append(out, &bcdv1.BootedMachine{Mac: mac, MachineId: m.ID, BootId: node.BootID, TimeMs: node.BootMS})
	}
	return out, nil
}
