package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/cmd/internal/cli"
)

func eventsCommand(to *target) *cobra.Command {
	var machine string
	var follow, asJSON bool
	var after int64
	cmd := &cobra.Command{
		Use:   "events",
		Short: "print what happened, and with --follow what happens",
		Args:  cli.NoArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			op, err := to.dial()
			if err != nil {
				return err
			}
			stream, err := op.Watch(cmd.Context(), connect.NewRequest(&bcdv1.WatchRequest{Machine: machine, AfterSequence: after, NoFollow: !follow}))
			if err != nil {
				return plain(err)
			}
			defer stream.Close()
			out := cmd.OutOrStdout()
			for stream.Receive() {
				entry := stream.Msg().GetEntry()
				if entry == nil {
					continue
				}
				if asJSON {
					// One object a line, so that a pipe can read them as they come.
					line, err := json.Marshal(plainJSON(entry))
					if err != nil {
						return err
					}
					fmt.Fprintf(out, "%s\n", line)
					continue
				}
				fmt.Fprintln(out, strings.Join(append([]string{fmt.Sprintf("%6d", entry.Sequence)}, timelineRow(entry)...), "  "))
			}
			if err := stream.Err(); err != nil && cmd.Context().Err() == nil {
				return plain(err)
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&machine, "machine", "", "only this machine's")
	f.BoolVar(&follow, "follow", false, "go on printing as things happen")
	f.Int64Var(&after, "after", 0, "start after this sequence number")
	f.BoolVar(&asJSON, "json", false, "print one JSON object a line")
	return cmd
}
