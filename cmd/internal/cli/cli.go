// Package cli is what both commands of this project share at the terminal:
// exit codes, usage errors that never echo an argument, tables and JSON.
//
// Exit codes are 0 for success, 1 for a failure and 2 for a usage error.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

// Exit codes.
const (
	OK      = 0
	Failure = 1
	Usage   = 2
)

// UsageError is a mistake in how a command was called. More lines may follow
// the first; each is printed as it is.
type UsageError struct{ Message string }

func (e *UsageError) Error() string { return e.Message }

// Usagef makes a UsageError.
func Usagef(format string, args ...any) error {
	return &UsageError{Message: fmt.Sprintf(format, args...)}
}

// ErrSilent is a failure that has already been told; only the exit code is left.
var ErrSilent = errors.New("failed")

// secret matches what must not reach a terminal's scroll-back or a log, even
// where somebody put it in the wrong place.
var secret = regexp.MustCompile(`bcjt_[A-Za-z0-9_-]+`)

const secretGone = "bcjt_[redacted]"

// WithoutTokens is w without the join tokens that are written to it, each
// within one write.
func WithoutTokens(w io.Writer) io.Writer { return withoutTokens{w} }

type withoutTokens struct{ w io.Writer }

func (t withoutTokens) Write(p []byte) (int, error) {
	if _, err := t.w.Write(secret.ReplaceAll(p, []byte(secretGone))); err != nil {
		return 0, err
	}
	return len(p), nil
}

// NoArgs refuses positional arguments without echoing them. The hint, if any,
// is a line of its own.
func NoArgs(hint string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		message := "takes no positional arguments"
		if hint != "" {
			message += "\n" + hint
		}
		return Usagef("%s", message)
	}
}

// ExactArgs wants one argument for each name and echoes none.
func ExactArgs(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == len(names) {
			return nil
		}
		return Usagef("takes %s, got %d arguments; try %s --help", strings.Join(names, " "), len(args), cmd.CommandPath())
	}
}

// Main runs root with args until it ends or SIGINT or SIGTERM comes, prints
// what went wrong, and gives the exit code. Nothing on stderr has a join token.
func Main(root *cobra.Command, args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	root.SetArgs(args)
	root.SetOut(stdout)
	// cobra adds these two when it runs, too late for prepare; as they come
	// they echo what they do not know.
	root.SetHelpCommand(helpCommand(root))
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd(args...)
	prepare(root)
	stderr = WithoutTokens(stderr)
	root.SetErr(stderr)
	ran, err := root.ExecuteContextC(ctx)
	if err == nil {
		return OK
	}
	if errors.Is(err, ErrSilent) {
		return Failure
	}
	name := root.Name()
	if ran != nil {
		name = ran.CommandPath()
	}
	fmt.Fprintf(stderr, "%s: %s\n", name, err)
	var usage *UsageError
	if errors.As(err, &usage) {
		return Usage
	}
	return Failure
}

// helpCommand is cobra's help without its echo of an unknown topic.
func helpCommand(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use:   "help [command]",
		Short: "say how a command is used",
		RunE: func(_ *cobra.Command, args []string) error {
			cmd := root
			for _, name := range args {
				i := slices.IndexFunc(cmd.Commands(), func(c *cobra.Command) bool { return c.Name() == name })
				if i < 0 {
					return unknownCommand(cmd)
				}
				cmd = cmd.Commands()[i]
			}
			cmd.InitDefaultHelpFlag()
			return cmd.Help()
		},
	}
}

func unknownCommand(parent *cobra.Command) error {
	var names []string
	for _, sub := range parent.Commands() {
		if sub.IsAvailableCommand() {
			names = append(names, sub.Name())
		}
	}
	if len(names) == 0 {
		return Usagef("unknown command; %s has none below it", parent.CommandPath())
	}
	return Usagef("unknown command; the commands are %s", strings.Join(names, ", "))
}

// prepare makes every command below cmd quiet about usage on failures, turns
// flag mistakes into usage errors, and gives groups an answer that names their
// commands instead of echoing the unknown one.
func prepare(cmd *cobra.Command) {
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.DisableSuggestions = true
	cmd.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return Usagef("%s; try %s --help", err, c.CommandPath())
	})
	if cmd.HasSubCommands() && !cmd.Runnable() {
		cmd.Args = cobra.ArbitraryArgs
		cmd.RunE = func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return c.Help()
			}
			return unknownCommand(c)
		}
	}
	// Plain cobra validators name what they refuse; ours are UsageErrors.
	if check := cmd.Args; check != nil {
		cmd.Args = func(c *cobra.Command, args []string) error {
			err := check(c, args)
			var usage *UsageError
			if err == nil || errors.As(err, &usage) {
				return err
			}
			return Usagef("the arguments are not what it takes; try %s --help", c.CommandPath())
		}
	}
	for _, sub := range cmd.Commands() {
		prepare(sub)
	}
}

// JSON writes value, indented, and a newline.
func JSON(w io.Writer, value any) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(value)
}

// Table writes aligned columns; the first row is the heading.
func Table(w io.Writer, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	for _, row := range rows {
		if _, err := fmt.Fprintln(tw, strings.Join(row, "\t")); err != nil {
			return err
		}
	}
	return tw.Flush()
}
