package main

import (
	"fmt"
	"io"
	"os"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/cmd/internal/cli"
)

// maxSpec is the contract's bound on a desired-state body.
const maxSpec = 4 << 20

func specCommand(to *target) *cobra.Command {
	cmd := &cobra.Command{Use: "spec", Short: "read and set what a machine shall be"}
	var asJSON bool
	get := &cobra.Command{
		Use:   "get MACHINE",
		Short: "print a machine's NodeSpec and how far it has converged",
		Args:  cli.ExactArgs("MACHINE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			op, err := to.dial()
			if err != nil {
				return err
			}
			answer, err := op.GetSpec(cmd.Context(), connect.NewRequest(&bcdv1.GetSpecRequest{Machine: args[0]}))
			if err != nil {
				return plain(err)
			}
			if asJSON {
				return cli.JSON(cmd.OutOrStdout(), plainJSON(answer.Msg))
			}
			// What get prints, apply takes.
			spec, err := protojson.MarshalOptions{Multiline: true, Indent: "  ", UseProtoNames: true}.Marshal(answer.Msg.Spec)
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s\n", spec)
			status := answer.Msg.Status
			fmt.Fprintf(cmd.ErrOrStderr(), "generation %d accepted, %d observed\n", status.GetAcceptedGeneration(), status.GetObservedGeneration())
			for _, s := range status.GetSections() {
				fmt.Fprintf(cmd.ErrOrStderr(), "  %-10s %s  %s\n", s.Name, word(s.State), s.Message)
			}
			return nil
		},
	}
	get.Flags().BoolVar(&asJSON, "json", false, "print JSON, the status too")

	var expected int64
	apply := &cobra.Command{
		Use:   "apply MACHINE FILE",
		Short: "set a machine's NodeSpec from a JSON file (- is standard input)",
		Args:  cli.ExactArgs("MACHINE", "FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			raw, err := readSpec(cmd, args[1])
			if err != nil {
				return err
			}
			spec := &bcdv1.NodeSpec{}
			if err := protojson.Unmarshal(raw, spec); err != nil {
				return fmt.Errorf("%s is not a NodeSpec: %w", args[1], err)
			}
			op, err := to.dial()
			if err != nil {
				return err
			}
			answer, err := op.ApplySpec(cmd.Context(), connect.NewRequest(&bcdv1.ApplySpecRequest{Machine: args[0], Spec: spec, ExpectedGeneration: expected}))
			if err != nil {
				return plain(err)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "generation %d is set; bcd-gateway spec get shows how far the machine has come\n", answer.Msg.Spec.GetGeneration())
			return nil
		},
	}
	apply.Flags().Int64Var(&expected, "expected-generation", 0, "fail unless this is the current generation")
	cmd.AddCommand(get, apply)
	return cmd
}

func readSpec(cmd *cobra.Command, path string) ([]byte, error) {
	in := cmd.InOrStdin()
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	}
	raw, err := io.ReadAll(io.LimitReader(in, maxSpec+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if len(raw) > maxSpec {
		return nil, fmt.Errorf("%s is larger than %d bytes", path, maxSpec)
	}
	return raw, nil
}
