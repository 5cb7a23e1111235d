package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/api/kinds"
	"github.com/better-compute/bcd/cmd/internal/cli"
)

// sendFlags are those of every verb that queues a command.
type sendFlags struct {
	ttl    time.Duration
	key    string
	noWait bool
	asJSON bool
	quiet  bool
}

func (s *sendFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.DurationVar(&s.ttl, "ttl", 15*time.Minute, "deadline from now, at most 168h; past it the command does not begin")
	f.StringVar(&s.key, "idempotency-key", "", "sending the same key again gives the first command back")
	f.BoolVar(&s.noWait, "no-wait", false, "do not wait for the outcome")
	f.BoolVar(&s.asJSON, "json", false, "print JSON")
	f.BoolVar(&s.quiet, "quiet", false, "no progress")
}

func sendCommand(to *target) *cobra.Command {
	cmd := &cobra.Command{Use: "send", Short: "queue a command for a machine and wait for its outcome"}
	for _, kind := range kinds.All() {
		cmd.AddCommand(sendKind(to, kind))
	}
	return cmd
}

func sendKind(to *target, kind kinds.Kind) *cobra.Command {
	var flags sendFlags
	var body *bodyFlags
	cmd := &cobra.Command{
		Use:   kind.GetName() + " MACHINE",
		Short: kind.GetSummary(),
		Args:  cli.ExactArgs("MACHINE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			m := kind.Body.New().Interface()
			if err := body.fill(cmd, m); err != nil {
				return err
			}
			raw, err := proto.Marshal(m)
			if err != nil {
				return err
			}
			op, err := to.dial()
			if err != nil {
				return err
			}
			answer, err := op.SendCommand(cmd.Context(), connect.NewRequest(&bcdv1.SendCommandRequest{
				Machine: args[0], Kind: kind.GetName(), Body: raw,
				TtlSeconds: int64(flags.ttl / time.Second), IdempotencyKey: flags.key,
			}))
			if err != nil {
				return plain(err)
			}
			return op.finish(cmd, answer.Msg.Command, flags)
		},
	}
	flags.add(cmd)
	body = newBodyFlags(cmd, kind.Body)
	return cmd
}

func cancelCommand(to *target) *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use:   "cancel COMMAND",
		Short: "take a queued command back, or interrupt a running one",
		Args:  cli.ExactArgs("COMMAND"),
		RunE: func(cmd *cobra.Command, args []string) error {
			op, err := to.dial()
			if err != nil {
				return err
			}
			answer, err := op.CancelCommand(cmd.Context(), connect.NewRequest(&bcdv1.CancelCommandRequest{Id: args[0], Reason: reason}))
			if err != nil {
				return plain(err)
			}
			c := answer.Msg.Command
			fmt.Fprintf(cmd.OutOrStdout(), "%s %s: %s\n", c.Id, c.Kind, commandWord(c))
			return nil
		},
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the timeline")
	return cmd
}

// commandWord is the state of a command, or how it ended.
func commandWord(c *bcdv1.CommandInfo) string {
	if c.State == bcdv1.CommandState_COMMAND_STATE_ENDED {
		return word(c.Outcome.GetStatus())
	}
	return word(c.State)
}

// finish waits for the outcome, unless told not to, prints it, and makes
// anything but success a failure.
func (op *operator) finish(cmd *cobra.Command, c *bcdv1.CommandInfo, flags sendFlags) error {
	if !flags.noWait {
		var bars io.Writer
		if !flags.asJSON {
			bars = progressTo(cmd, flags.quiet)
		}
		var err error
		if c, err = op.wait(cmd.Context(), c, bars); err != nil {
			return err
		}
	}
	if flags.asJSON {
		if err := cli.JSON(cmd.OutOrStdout(), plainJSON(c)); err != nil {
			return err
		}
	} else if err := printCommand(cmd.OutOrStdout(), c); err != nil {
		return err
	}
	if !flags.noWait && c.Outcome.GetStatus() != bcdv1.OutcomeStatus_OUTCOME_STATUS_SUCCEEDED {
		return cli.ErrSilent
	}
	return nil
}

func printCommand(w io.Writer, c *bcdv1.CommandInfo) error {
	fmt.Fprintf(w, "%s  %s  %s\n", c.Id, c.Kind, commandWord(c))
	if c.Outcome == nil {
		return nil
	}
	if c.Outcome.Message != "" {
		fmt.Fprintln(w, c.Outcome.Message)
	}
	kind, ok := kinds.ByName(c.Kind)
	if !ok || len(c.Outcome.Result) == 0 {
		return nil
	}
	return cli.JSON(w, decoded(kind.Result, c.Outcome.Result))
}

const (
	// pollInterval is short beside what a person notices.
	pollInterval = 500 * time.Millisecond
	// awayLimit is how long a gateway may be gone while we wait: it may be
	// restarted in the middle of a deploy.
	awayLimit = 2 * time.Minute
)

// wait asks until the command has ended. The gateway may go and come back
// meanwhile.
func (op *operator) wait(ctx context.Context, c *bcdv1.CommandInfo, bars io.Writer) (*bcdv1.CommandInfo, error) {
	var bar *transferBar
	if bars != nil {
		bar = newTransferBar(ctx, bars, c.Kind)
		defer bar.stop()
	}
	lastAnswer := time.Now()
	for c.State != bcdv1.CommandState_COMMAND_STATE_ENDED {
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("stopped waiting; the command %s goes on (bcd-gateway cancel takes it back)", c.Id)
		case <-time.After(pollInterval):
		}
		answer, err := op.GetCommand(ctx, connect.NewRequest(&bcdv1.GetCommandRequest{Id: c.Id}))
		if err != nil {
			var e *connect.Error
			if errors.As(err, &e) && e.Code() == connect.CodeUnavailable && time.Since(lastAnswer) < awayLimit || ctx.Err() != nil {
				continue
			}
			return nil, plain(err)
		}
		lastAnswer = time.Now()
		c = answer.Msg.Command
		if bar != nil {
			bar.show(c)
		}
	}
	return c, nil
}
