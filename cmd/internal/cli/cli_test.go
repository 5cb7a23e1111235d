package cli

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

func run(args ...string) (code int, stdout, stderr string) {
	root := &cobra.Command{Use: "tool", Short: "a tool"}
	join := &cobra.Command{Use: "join", Args: NoArgs("tool join reads the token from stdin"), RunE: func(c *cobra.Command, _ []string) error { return nil }}
	join.Flags().Int("count", 0, "")
	group := &cobra.Command{Use: "token"}
	group.AddCommand(&cobra.Command{Use: "list", Args: NoArgs(""), RunE: func(*cobra.Command, []string) error { return errors.New("no gateway at bcjt_id_topsecret") }})
	group.AddCommand(&cobra.Command{Use: "revoke", Args: ExactArgs("ID"), RunE: func(*cobra.Command, []string) error { return ErrSilent }})
	root.AddCommand(join, group)
	var out, err bytes.Buffer
	code = Main(root, args, &out, &err)
	return code, out.String(), err.String()
}

func TestExitCodesAndNoEcho(t *testing.T) {
	const token = "bcjt_jt01_topsecret"
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"join"}, OK, ""},
		{[]string{"join", token}, Usage, "tool join: takes no positional arguments\ntool join reads the token from stdin\n"},
		{[]string{"join", "--" + token}, Usage, "tool join: unknown flag: --bcjt_[redacted]"},
		{[]string{"join", "--count", token}, Usage, "tool join: invalid argument"},
		{[]string{"join", "-" + token}, Usage, "tool join: "},
		{[]string{token}, Usage, "tool: unknown command; the commands are "},
		{[]string{"token", token}, Usage, "tool token: unknown command; the commands are list, revoke"},
		{[]string{"token", "list"}, Failure, "tool token list: no gateway at bcjt_[redacted]"},
		{[]string{"token", "revoke"}, Usage, "tool token revoke: takes ID, got 0 arguments"},
		{[]string{"token", "revoke", "x"}, Failure, ""},
		{[]string{"help", token}, Usage, "tool help: unknown command; the commands are "},
		{[]string{"help", "join", token}, Usage, "tool help: unknown command; tool join has none below it"},
		{[]string{"help", "token"}, OK, ""},
		{[]string{"completion", token}, Usage, "tool completion: "},
		{[]string{"completion", "bash", token}, Usage, "tool completion bash: "},
		{[]string{"token"}, OK, ""},
		{nil, OK, ""},
	} {
		code, stdout, stderr := run(c.args...)
		if code != c.code || !strings.Contains(stderr, c.want) {
			t.Errorf("%v: exit %d and %q, want %d and %q", c.args, code, stderr, c.code, c.want)
		}
		if strings.Contains(stdout+stderr, "topsecret") {
			t.Errorf("%v: the secret is echoed: %q %q", c.args, stdout, stderr)
		}
	}
}
