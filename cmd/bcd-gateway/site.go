package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/cmd/internal/cli"
)

const (
	// releaseWait is how long release waits for the holder's word; an agent
	// that is connected gives it within a second.
	releaseWait = time.Minute
	releasePoll = 300 * time.Millisecond
)

func siteCommand(to *target) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "site NAME",
		Short: "show a site: its agents, who boots its machines, and how they fared",
		Long: `Shows a site: its agents, which of them holds the boot lease, what they serve
and what is wrong, and how the machines fared that booted there last.

A site begins with the first token that names it:
  bcd-gateway token create --role site --site NAME`,
		Args: cli.ExactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			op, err := to.dial()
			if err != nil {
				return err
			}
			answer, err := op.GetSite(cmd.Context(), connect.NewRequest(&bcdv1.GetSiteRequest{Name: args[0]}))
			if err != nil {
				return plain(err)
			}
			if asJSON {
				return cli.JSON(cmd.OutOrStdout(), plainJSON(answer.Msg))
			}
			artefacts, err := op.ListBootArtefacts(cmd.Context(), connect.NewRequest(&bcdv1.ListBootArtefactsRequest{}))
			if err != nil {
				return plain(err)
			}
			return printSite(cmd.OutOrStdout(), answer.Msg, artefacts.Msg.GetArtefacts(), time.Now())
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.AddCommand(siteList(to), siteSet(to), siteRelease(to), siteTakeover(to))
	return cmd
}

func siteList(to *target) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "list the sites and who boots the machines of each",
		Args:  cli.NoArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			op, err := to.dial()
			if err != nil {
				return err
			}
			answer, err := op.ListSites(cmd.Context(), connect.NewRequest(&bcdv1.ListSitesRequest{}))
			if err != nil {
				return plain(err)
			}
			if asJSON {
				return cli.JSON(cmd.OutOrStdout(), plainJSON(answer.Msg))
			}
			if len(answer.Msg.GetSites()) == 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "no site is known yet; bcd-gateway token create --role site --site NAME begins one")
			}
			return cli.Table(cmd.OutOrStdout(), siteRows(answer.Msg.GetSites(), time.Now()))
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func siteRows(sites []*bcdv1.Site, now time.Time) [][]string {
	rows := [][]string{{"NAME", "AGENTS", "LEASE", "HOLDER", "HEARD", "UNKNOWN", "TABLE", "PROBLEMS"}}
	for _, s := range sites {
		problems := 0
		heard := int64(0)
		for _, a := range s.GetAgents() {
			problems += len(a.GetProblems())
			if a.GetNode().GetId() == s.GetLease().GetHolder() {
				heard = a.GetSeenMs()
			}
		}
		rows = append(rows, []string{s.GetName(), fmt.Sprint(len(s.GetAgents())), word(s.GetLease().GetKind()), orDash(s.GetLease().GetHolder()),
			ago(now, heard), word(s.GetUnknown()), fmt.Sprint(s.GetTableGeneration()), fmt.Sprint(problems)})
	}
	return rows
}

func printSite(w io.Writer, answer *bcdv1.GetSiteResponse, artefacts []*bcdv1.BootArtefact, now time.Time) error {
	site := answer.GetSite()
	lease := site.GetLease()
	err := cli.Table(w, [][]string{
		{"site", site.GetName()},
		{"boot lease", fmt.Sprintf("%s, fence %d, holder %s", word(lease.GetKind()), lease.GetFence(), orDash(lease.GetHolder()))},
		{"", lease.GetMessage()},
		{"unknown machines", word(site.GetUnknown())},
		{"boot table", fmt.Sprintf("generation %d", site.GetTableGeneration())},
	})
	if err != nil {
		return err
	}
	fmt.Fprintln(w, "\nagents")
	if len(site.GetAgents()) == 0 {
		fmt.Fprintf(w, "  none yet; bcd-gateway token create --role site --site %s makes a token for the first\n", site.GetName())
	}
	for _, a := range site.GetAgents() {
		fmt.Fprintf(w, "  %s  %s, bcd %s, heard %s\n", a.GetNode().GetId(), orDash(a.GetNode().GetHostname()), orDash(a.GetNode().GetVersion()), ago(now, a.GetSeenMs()))
		if a.GetSeenMs() == 0 {
			continue
		}
		acts := "answers no machine"
		if a.GetFence() != 0 {
			acts = fmt.Sprintf("answers machines on a %s lease, fence %d", word(a.GetLease()), a.GetFence())
		}
		fmt.Fprintf(w, "    %s; has table %d\n", acts, a.GetTableGeneration())
		fmt.Fprintf(w, "    serves on %s\n", orDash(strings.Join(a.GetServing(), ", ")))
		fmt.Fprintf(w, "    artefacts: %s\n", presence(artefacts, a.GetArtefacts()))
		for _, p := range a.GetProblems() {
			fmt.Fprintf(w, "    ! %s\n", p)
		}
	}
	if len(site.GetFullDhcp()) > 0 {
		fmt.Fprintln(w, "\naddresses given")
		rows := [][]string{{"  MAC", "ADDRESS", "ROUTER", "DNS"}}
		for _, f := range site.GetFullDhcp() {
			rows = append(rows, []string{"  " + f.GetMac(), f.GetAddress(), orDash(f.GetRouter()), orDash(strings.Join(f.GetDns(), " "))})
		}
		if err := cli.Table(w, rows); err != nil {
			return err
		}
	}
	fmt.Fprintln(w, "\nboots (UTC)")
	if len(answer.GetBoots()) == 0 {
		fmt.Fprintln(w, "  none seen yet")
		return nil
	}
	rows := [][]string{{"  BEGAN", "MAC", "FIRMWARE", "ACTION", "MACHINE", "VERDICT"}}
	for _, b := range answer.GetBoots() {
		rows = append(rows, []string{"  " + clock(b.GetStartedMs()), b.GetMac(), orDash(strings.TrimSpace(b.GetArchitecture() + " " + b.GetFirmware())),
			orDash(word(b.GetAction())), orDash(b.GetMachineId()), orDash(b.GetVerdict())})
	}
	return cli.Table(w, rows)
}

// presence says which of the artefacts an agent can serve now.
func presence(want []*bcdv1.BootArtefact, has [][]byte) string {
	if len(want) == 0 {
		return "none are served; bcd-gateway boot-image put FILE --kind uki --arch amd64 adds one"
	}
	have := map[string]bool{}
	for _, sum := range has {
		have[hex.EncodeToString(sum)] = true
	}
	var parts []string
	for _, a := range want {
		part := a.GetName()
		if !have[hex.EncodeToString(a.GetSha256())] {
			part += " (not yet)"
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, ", ")
}

// printBoots shows how a machine fared the last time on each of its NICs.
func printBoots(w io.Writer, boots []*bcdv1.BootTrace) error {
	for _, b := range boots {
		fmt.Fprintf(w, "\nnetwork boot of %s on site %s, %s UTC: %s %s\n", b.GetMac(), orDash(b.GetSite()), clock(b.GetStartedMs()), orDash(b.GetArchitecture()), b.GetFirmware())
		var rows [][]string
		for _, s := range b.GetSteps() {
			count := ""
			if s.GetCount() > 1 {
				count = fmt.Sprintf("×%d ", s.GetCount())
			}
			rows = append(rows, []string{fmt.Sprintf("  +%.3f s", float64(s.GetTimeMs()-b.GetStartedMs())/1000), s.GetType(), count + s.GetMessage()})
		}
		if b.GetBootedMs() != 0 {
			rows = append(rows, []string{fmt.Sprintf("  +%.3f s", float64(b.GetBootedMs()-b.GetStartedMs())/1000), "booted", "its ramdisk has a session"})
		}
		if err := cli.Table(w, rows); err != nil {
			return err
		}
		fmt.Fprintf(w, "  verdict: %s\n", orDash(strings.TrimSpace(b.GetVerdictCode()+"  "+b.GetVerdict())))
	}
	return nil
}

func siteSet(to *target) *cobra.Command {
	var unknown string
	var give, take []string
	cmd := &cobra.Command{
		Use:   "set NAME",
		Short: "say what machines that are not known get, and who gets an address",
		Args:  cli.ExactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			request := &bcdv1.SetSiteRequest{Name: args[0], RemoveFullDhcp: take}
			switch unknown {
			case "":
			case "ramdisk":
				request.Unknown = bcdv1.BootAction_BOOT_ACTION_RAMDISK
			case "nothing":
				request.Unknown = bcdv1.BootAction_BOOT_ACTION_NOTHING
			default:
				return cli.Usagef("--unknown must be ramdisk or nothing")
			}
			for _, entry := range give {
				f, err := parseFullDHCP(entry)
				if err != nil {
					return err
				}
				request.PutFullDhcp = append(request.PutFullDhcp, f)
			}
			if unknown == "" && len(give) == 0 && len(take) == 0 {
				return cli.Usagef("nothing to set; give --unknown, --full-dhcp or --no-full-dhcp")
			}
			op, err := to.dial()
			if err != nil {
				return err
			}
			answer, err := op.SetSite(cmd.Context(), connect.NewRequest(request))
			if err != nil {
				return plain(err)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "site %s: unknown machines get %s; %d MACs get an address\n", answer.Msg.GetSite().GetName(), word(answer.Msg.GetSite().GetUnknown()), len(answer.Msg.GetSite().GetFullDhcp()))
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&unknown, "unknown", "", "what a machine gets that is not known: ramdisk or nothing")
	f.StringArrayVar(&give, "full-dhcp", nil, "on a network without a DHCP server, give this MAC an address: MAC=ADDRESS/BITS[,router=ADDRESS][,dns=ADDRESS]...")
	f.StringArrayVar(&take, "no-full-dhcp", nil, "give this MAC no address any more")
	return cmd
}

// parseFullDHCP reads MAC=ADDRESS/BITS[,router=A][,dns=A]...; the gateway
// judges the addresses.
func parseFullDHCP(entry string) (*bcdv1.FullDhcp, error) {
	usage := cli.Usagef("--full-dhcp is MAC=ADDRESS/BITS[,router=ADDRESS][,dns=ADDRESS], for example 52:54:00:12:34:56=10.0.0.7/24,router=10.0.0.1")
	mac, rest, ok := strings.Cut(entry, "=")
	if !ok {
		return nil, usage
	}
	parts := strings.Split(rest, ",")
	out := &bcdv1.FullDhcp{Mac: mac, Address: parts[0]}
	for _, part := range parts[1:] {
		key, value, _ := strings.Cut(part, "=")
		switch {
		case key == "router" && value != "" && out.GetRouter() == "":
			out.Router = value
		case key == "dns" && value != "":
			out.Dns = append(out.Dns, value)
		default:
			return nil, usage
		}
	}
	return out, nil
}

func siteRelease(to *target) *cobra.Command {
	var node string
	var wait time.Duration
	cmd := &cobra.Command{
		Use:   "release NAME",
		Short: "have the holder of a site's boot lease give it back, and wait until it did",
		Long: `Asks the agent that holds the boot lease to stop answering machines and to give
the lease back, and waits for its word. For a minute it does not get it again,
so another agent of the site can take it, or the one that --to names.`,
		Args: cli.ExactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			op, err := to.dial()
			if err != nil {
				return err
			}
			before, err := op.GetSite(cmd.Context(), connect.NewRequest(&bcdv1.GetSiteRequest{Name: args[0]}))
			if err != nil {
				return plain(err)
			}
			if _, err := op.MoveLease(cmd.Context(), connect.NewRequest(&bcdv1.MoveLeaseRequest{Site: args[0], NodeId: node})); err != nil {
				return plain(err)
			}
			return op.awaitRelease(cmd.Context(), cmd.OutOrStdout(), before.Msg.GetSite(), wait)
		},
	}
	cmd.Flags().StringVar(&node, "to", "", "the node id of the agent that is to get it")
	cmd.Flags().DurationVar(&wait, "wait", releaseWait, "how long to wait for the holder's word")
	return cmd
}

func (op *operator) awaitRelease(ctx context.Context, w io.Writer, before *bcdv1.Site, wait time.Duration) error {
	held := before.GetLease()
	if held.GetHolder() == "" {
		fmt.Fprintf(w, "nobody held the boot lease of site %s\n", before.GetName())
		return nil
	}
	limit := time.NewTimer(wait)
	defer limit.Stop()
	tick := time.NewTicker(releasePoll)
	defer tick.Stop()
	for {
		answer, err := op.GetSite(ctx, connect.NewRequest(&bcdv1.GetSiteRequest{Name: before.GetName()}))
		if err != nil {
			return plain(err)
		}
		lease := answer.Msg.GetSite().GetLease()
		if lease.GetHolder() != held.GetHolder() || lease.GetFence() != held.GetFence() {
			fmt.Fprintf(w, "%s gave back the boot lease of site %s; it is now: %s\n", held.GetHolder(), before.GetName(), reason(lease))
			return nil
		}
		select {
		case <-tick.C:
		case <-limit.C:
			return fmt.Errorf("%s did not give back the boot lease of site %s within %v, and is still asked to; if you know that it is off: bcd-gateway site takeover %s --to NODE --force", held.GetHolder(), before.GetName(), wait, before.GetName())
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func reason(lease *bcdv1.Lease) string {
	if lease.GetHolder() == "" {
		return lease.GetMessage()
	}
	return "held by " + lease.GetHolder()
}

func siteTakeover(to *target) *cobra.Command {
	var node string
	var force bool
	cmd := &cobra.Command{
		Use:   "takeover NAME",
		Short: "give a site's boot lease to another agent because its holder is known to be off",
		Long: `Takes the boot lease from its holder without its word and keeps it for the agent
NODE. Do this only when you know that the holder is off: one that is merely cut
off goes on answering machines, and two agents then answer at once.`,
		Args: cli.ExactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if node == "" {
				return cli.Usagef("--to NODE is needed: the node id of the agent that gets the lease")
			}
			if !force {
				return cli.Usagef("--force is needed: say that the holder is known to be off; site release asks it instead")
			}
			op, err := to.dial()
			if err != nil {
				return err
			}
			answer, err := op.MoveLease(cmd.Context(), connect.NewRequest(&bcdv1.MoveLeaseRequest{Site: args[0], NodeId: node, Force: true}))
			if err != nil {
				return plain(err)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "the boot lease of site %s is %s\n", answer.Msg.GetSite().GetName(), reason(answer.Msg.GetSite().GetLease()))
			return nil
		},
	}
	cmd.Flags().StringVar(&node, "to", "", "the node id of the agent that gets it")
	cmd.Flags().BoolVar(&force, "force", false, "the holder is known to be off")
	return cmd
}

func bootCommand(to *target) *cobra.Command {
	return &cobra.Command{
		Use:   "boot MACHINE ACTION",
		Short: "say what a machine boots the next time over its site's network",
		Long: `Says what a machine is given when it boots over its site's network. ACTION is
  ramdisk  the ramdisk, once: the order ends when that ramdisk has a session
  local    its own disk
  nothing  no answer at all
  auto     what its state says: the ramdisk until a system is installed, then
           its own disk`,
		Args: cli.ExactArgs("MACHINE", "ACTION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			action, ok := map[string]bcdv1.BootAction{
				"ramdisk": bcdv1.BootAction_BOOT_ACTION_RAMDISK, "local": bcdv1.BootAction_BOOT_ACTION_LOCAL,
				"nothing": bcdv1.BootAction_BOOT_ACTION_NOTHING, "auto": bcdv1.BootAction_BOOT_ACTION_UNSPECIFIED,
			}[args[1]]
			if !ok {
				return cli.Usagef("ACTION must be ramdisk, local, auto or nothing")
			}
			op, err := to.dial()
			if err != nil {
				return err
			}
			answer, err := op.SetMachineBoot(cmd.Context(), connect.NewRequest(&bcdv1.SetMachineBootRequest{Machine: args[0], Action: action}))
			if err != nil {
				return plain(err)
			}
			m := answer.Msg.GetMachine()
			next := ""
			if action == bcdv1.BootAction_BOOT_ACTION_RAMDISK {
				next = "; restart it now: bcd-gateway send node.reboot " + m.GetName()
			}
			fmt.Fprintf(cmd.OutOrStdout(), "machine %s boots %s%s\n", m.GetName(), args[1], next)
			return nil
		},
	}
}
