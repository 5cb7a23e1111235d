package main

import (
	"encoding/json"
	"fmt"
	"io"
	"sort"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/cmd/internal/cli"
)

func machinesCommand(to *target) *cobra.Command {
	var asJSON bool
	var site string
	cmd := &cobra.Command{
		Use:   "machines",
		Short: "list the machines and how each is doing",
		Args:  cli.NoArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			op, err := to.dial()
			if err != nil {
				return err
			}
			answer, err := op.ListMachines(cmd.Context(), connect.NewRequest(&bcdv1.ListMachinesRequest{Site: site}))
			if err != nil {
				return plain(err)
			}
			if asJSON {
				return cli.JSON(cmd.OutOrStdout(), plainJSON(answer.Msg))
			}
			if len(answer.Msg.Machines) == 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "no machine has joined yet; bcd-gateway token create makes a token for the first")
			}
			now := time.Now()
			rows := [][]string{{"NAME", "STATE", "ROLE", "CONNECTED", "SEEN", "SITE", "PRODUCT", "ID"}}
			for _, m := range answer.Msg.Machines {
				rows = append(rows, []string{m.Name, m.State, orDash(word(m.Current.GetRole())), yes(m.Current.GetConnected()),
					ago(now, m.Current.GetLastSeenMs()), orDash(m.Site), orDash(strings.TrimSpace(m.Vendor + " " + m.Product)), m.Id})
			}
			return cli.Table(cmd.OutOrStdout(), rows)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().StringVar(&site, "site", "", "only the machines of this site")
	return cmd
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func machineCommand(to *target) *cobra.Command {
	var asJSON, inventory bool
	var entries int32
	cmd := &cobra.Command{
		Use:   "machine NAME",
		Short: "show one machine: what it is, its conditions and its whole history",
		Long:  "NAME is a machine's name, id, serial number or MAC, or the id of one of its nodes.",
		Args:  cli.ExactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			op, err := to.dial()
			if err != nil {
				return err
			}
			answer, err := op.GetMachine(cmd.Context(), connect.NewRequest(&bcdv1.GetMachineRequest{Name: args[0], TimelineEntries: entries}))
			if err != nil {
				return plain(err)
			}
			if asJSON {
				return cli.JSON(cmd.OutOrStdout(), plainJSON(answer.Msg))
			}
			return printMachine(cmd.OutOrStdout(), answer.Msg, inventory, time.Now())
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&inventory, "inventory", false, "print every inventory section whole")
	cmd.Flags().Int32Var(&entries, "entries", 200, "how many timeline entries at most")
	return cmd
}

func printMachine(w io.Writer, m *bcdv1.GetMachineResponse, inventory bool, now time.Time) error {
	machine, node := m.Machine, m.Machine.GetCurrent()
	rows := [][]string{
		{"machine", machine.GetName() + "  " + machine.GetId()},
		{"state", strings.TrimSpace(machine.GetState() + "  " + machine.GetStateMessage())},
		{"hardware", orDash(strings.TrimSpace(machine.GetVendor()+" "+machine.GetProduct())) + "  serial " + orDash(machine.GetSystemSerial())},
		{"macs", orDash(strings.Join(machine.GetMacs(), " "))},
		{"first seen", clock(machine.GetFirstSeenMs()) + " UTC"},
	}
	if action := machine.GetBootAction(); action != bcdv1.BootAction_BOOT_ACTION_UNSPECIFIED {
		rows = append(rows, []string{"boots", word(action) + ", as ordered"})
	}
	if node != nil {
		connection := "not connected, seen " + ago(now, node.LastSeenMs)
		if node.Connected {
			connection = "connected from " + orDash(node.RemoteAddress)
		}
		rows = append(rows,
			[]string{"node", fmt.Sprintf("%s  role %s, bcd %s, %s", node.Id, word(node.Role), orDash(node.Version), connection)},
			[]string{"certificate", "until " + clock(node.CertificateExpiresMs) + " UTC"})
		if s := node.Spec; s.GetAcceptedGeneration() > 0 {
			rows = append(rows, []string{"spec", fmt.Sprintf("generation %d accepted, %d observed", s.AcceptedGeneration, s.ObservedGeneration)})
		}
	}
	if err := cli.Table(w, rows); err != nil {
		return err
	}
	for _, s := range node.GetSpec().GetSections() {
		fmt.Fprintf(w, "  %-10s %s  %s\n", s.Name, word(s.State), s.Message)
	}

	fmt.Fprintln(w, "\nconditions")
	if len(m.Conditions) == 0 {
		fmt.Fprintln(w, "  none")
	}
	for _, c := range m.Conditions {
		fmt.Fprintf(w, "  %s=%s  %s  %s\n", c.Type, word(c.Status), c.Reason, c.Message)
	}

	fmt.Fprintln(w, "\ninventory")
	sort.Slice(m.Inventory, func(i, j int) bool { return m.Inventory[i].Name < m.Inventory[j].Name })
	for _, s := range m.Inventory {
		detail := size(int64(len(s.CanonicalJson)))
		if s.Error != "" {
			detail += "  " + s.Error
		}
		fmt.Fprintf(w, "  %-10s %.12s  %s\n", s.Name, fmt.Sprintf("%x", s.Sha256), detail)
		if inventory {
			var value any
			if json.Unmarshal(s.CanonicalJson, &value) == nil {
				if err := cli.JSON(w, value); err != nil {
					return err
				}
			}
		}
	}

	if err := printBoots(w, m.GetBoots()); err != nil {
		return err
	}
	fmt.Fprintln(w, "\ntimeline (UTC)")
	return printTimeline(w, m.Timeline)
}

func printTimeline(w io.Writer, entries []*bcdv1.TimelineEntry) error {
	var rows [][]string
	for _, e := range entries {
		rows = append(rows, timelineRow(e))
	}
	return cli.Table(w, rows)
}

func timelineRow(e *bcdv1.TimelineEntry) []string {
	mark := " "
	switch e.Severity {
	case "warn":
		mark = "!"
	case "error":
		mark = "E"
	}
	return []string{mark + " " + clock(e.TimeMs), e.Type, e.Message}
}
