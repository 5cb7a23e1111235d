package main

import (
	"fmt"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/cmd/internal/cli"
)

func tokenCommand(to *target) *cobra.Command {
	cmd := &cobra.Command{Use: "token", Short: "make, list and revoke join tokens"}
	cmd.AddCommand(tokenCreate(to), tokenList(to), tokenRevoke(to))
	return cmd
}

func tokenCreate(to *target) *cobra.Command {
	var role, site, machine, note string
	var uses int32
	var ttl time.Duration
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "create",
		Short: "make a join token and print it, once",
		Args:  cli.NoArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := parseRole(role)
			if err != nil {
				return err
			}
			op, err := to.dial()
			if err != nil {
				return err
			}
			answer, err := op.CreateToken(cmd.Context(), connect.NewRequest(&bcdv1.CreateTokenRequest{
				Role: r, Site: site, Uses: uses, TtlSeconds: int64(ttl / time.Second), MachineId: machine, Note: note,
			}))
			if err != nil {
				return plain(err)
			}
			if asJSON {
				return cli.JSON(cmd.OutOrStdout(), plainJSON(answer.Msg))
			}
			// The token alone on standard output, so that it can be piped.
			fmt.Fprintln(cmd.OutOrStdout(), answer.Msg.Token)
			fmt.Fprintf(cmd.ErrOrStderr(), "role %s, %d uses, until %s UTC; give it to bcd join on standard input or in BCD_JOIN_TOKEN\n",
				role, answer.Msg.Info.GetUses(), clock(answer.Msg.Info.GetExpiresMs()))
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&role, "role", "ramdisk", "node, site or ramdisk")
	f.StringVar(&site, "site", "", "site of the machines that join with it")
	f.Int32Var(&uses, "uses", 1, "how many machines may join with it")
	f.DurationVar(&ttl, "ttl", 24*time.Hour, "how long it is good for, at most 720h")
	f.StringVar(&machine, "machine", "", "bind it to the machine with this id")
	f.StringVar(&note, "note", "", "what it is for")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func parseRole(name string) (bcdv1.Role, error) {
	switch name {
	case "node":
		return bcdv1.Role_ROLE_NODE, nil
	case "site":
		return bcdv1.Role_ROLE_SITE, nil
	case "ramdisk":
		return bcdv1.Role_ROLE_RAMDISK, nil
	}
	return 0, cli.Usagef("--role must be node, site or ramdisk")
}

func tokenList(to *target) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "list join tokens, without their secrets",
		Args:  cli.NoArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			op, err := to.dial()
			if err != nil {
				return err
			}
			answer, err := op.ListTokens(cmd.Context(), connect.NewRequest(&bcdv1.ListTokensRequest{}))
			if err != nil {
				return plain(err)
			}
			if asJSON {
				return cli.JSON(cmd.OutOrStdout(), plainJSON(answer.Msg))
			}
			now := time.Now()
			rows := [][]string{{"ID", "ROLE", "SITE", "USED", "STATE", "EXPIRES (UTC)", "MACHINE", "NOTE"}}
			for _, t := range answer.Msg.Tokens {
				state := "good"
				switch {
				case t.Revoked:
					state = "revoked"
				case t.ExpiresMs <= now.UnixMilli():
					state = "expired"
				case t.Used >= t.Uses:
					state = "used up"
				}
				rows = append(rows, []string{t.Id, word(t.Role), orDash(t.Site), fmt.Sprintf("%d/%d", t.Used, t.Uses), state, clock(t.ExpiresMs), orDash(t.MachineId), orDash(t.Note)})
			}
			return cli.Table(cmd.OutOrStdout(), rows)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func tokenRevoke(to *target) *cobra.Command {
	return &cobra.Command{
		Use:   "revoke ID",
		Short: "make a join token useless",
		Args:  cli.ExactArgs("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			op, err := to.dial()
			if err != nil {
				return err
			}
			answer, err := op.RevokeToken(cmd.Context(), connect.NewRequest(&bcdv1.RevokeTokenRequest{Id: args[0]}))
			if err != nil {
				return plain(err)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "token %s is revoked; %d of %d uses were taken\n", answer.Msg.Info.GetId(), answer.Msg.Info.GetUsed(), answer.Msg.Info.GetUses())
			return nil
		},
	}
}
