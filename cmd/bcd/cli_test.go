package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// asCommand makes the test binary play bcd, so that exit codes are real.
const asCommand = "BCD_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main()
	}
	os.Exit(m.Run())
}

type ran struct {
	code           int
	stdout, stderr string
}

// bcd runs the command with an environment that has nothing of ours.
func bcd(t *testing.T, stdin string, args ...string) ran {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, args...)
	cmd.Env = []string{asCommand + "=1", "PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir(),
		"GORACE=atexit_sleep_ms=0"} // else each run under the race detector ends a second late
	cmd.Stdin = strings.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return ran{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

func TestExitCodes(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	missing := filepath.Join(dir, "missing.toml")
	misspelt := write("misspelt.toml", "# a comment\ngatewayurl = \"https://gw.example\"\n")
	wrong := write("wrong.toml", "gateway_url = \"http://gw.example\"\n")
	broken := write("broken.toml", "gateway_url = \"https://gw.example\"\nsite = \n")
	socket := filepath.Join(dir, "none.sock")
	const token = "bcjt_jt01_abcdefghijklmnopqrstuvwxyz0123456789ABCDEFG"
	for _, c := range []struct {
		name  string
		stdin string
		args  []string
		code  int
		// stdout and stderr are texts that must be there.
		stdout, stderr string
	}{
		{name: "nothing", code: 0, stdout: "Available Commands"},
		{name: "help", args: []string{"help"}, code: 0, stdout: "join"},
		{name: "help of a verb", args: []string{"help", "join"}, code: 0, stdout: "--reset"},
		{name: "help of nothing", args: []string{"help", "nothing"}, code: 2, stderr: "the commands are"},
		{name: "unknown verb", args: []string{"nothing"}, code: 2, stderr: "the commands are"},
		{name: "unknown flag", args: []string{"status", "--nothing"}, code: 2, stderr: "try bcd status --help"},
		{name: "version", args: []string{"version"}, code: 0, stdout: "bcd " + version},
		{name: "--version", args: []string{"--version"}, code: 0, stdout: version},
		{name: "hardware", args: []string{"hardware"}, code: 0, stdout: "cpu"},
		{name: "join, no token", args: []string{"join", "--config", missing}, code: 1, stderr: "BCD_JOIN_TOKEN"},
		{name: "join, no config", stdin: token, args: []string{"join", "--config", missing}, code: 1, stderr: missing},
		{name: "join, role", args: []string{"join", "--role", "ramdisk"}, code: 2, stderr: "--role must be node or site"},
		{name: "join, reset alone", args: []string{"join", "--reset"}, code: 2, stderr: "add --yes"},
		{name: "join, argument", args: []string{"join", "positional"}, code: 2, stderr: "bcd join: takes no positional arguments\n" + joinHint},
		{name: "join, server without pin", stdin: token, args: []string{"join", "--config", missing, "--server", "https://gw.example"}, code: 2, stderr: "--root-sha256 must be 64 hex digits"},
		{name: "join, server in clear", stdin: token, args: []string{"join", "--config", missing, "--server", "http://gw.example"}, code: 2, stderr: "https"},
		{name: "node, no config", args: []string{"node", "--config", missing}, code: 1, stderr: missing},
		{name: "node, misspelt key", args: []string{"node", "--config", misspelt}, code: 1, stderr: misspelt + `:2:1: unknown key "gatewayurl"; did you mean "gateway_url"?`},
		{name: "node, wrong value", args: []string{"node", "--config", wrong}, code: 1, stderr: wrong + ":1:"},
		{name: "node, no TOML", args: []string{"node", "--config", broken}, code: 1, stderr: broken + ":2:"},
		{name: "ramdisk, no gateway", args: []string{"ramdisk"}, code: 1, stderr: "nobody says where the gateway is"},
		{name: "status, no daemon", args: []string{"status", "--socket", socket}, code: 1, stderr: socket},
		{name: "doctor, no config", args: []string{"doctor", "--offline", "--config", missing}, code: 0, stdout: "warn  config    " + missing},
		{name: "doctor, misspelt key", args: []string{"doctor", "--offline", "--config", misspelt}, code: 1, stdout: "fail  config    " + misspelt + ":2:1"},
		{name: "supervise by hand", args: []string{"supervise"}, code: 1, stderr: "bcd supervise: "},
		{name: "probe of nothing", args: []string{probeVerb, filepath.Join(dir, "none.db")}, code: 10, stderr: "none.db"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := bcd(t, c.stdin, c.args...)
			if got.code != c.code || !strings.Contains(got.stdout, c.stdout) || !strings.Contains(got.stderr, c.stderr) {
				t.Errorf("bcd %q: %+v\nwant code %d, %q on stdout and %q on stderr", c.args, got, c.code, c.stdout, c.stderr)
			}
			if strings.Contains(got.stdout+got.stderr, token) {
				t.Errorf("bcd %q: the token is shown: %+v", c.args, got)
			}
		})
	}
}

// TestNoTokenEcho puts a token in the wrong places of each verb there is,
// hidden ones as well.
func TestNoTokenEcho(t *testing.T) {
	const secret = "topsecretabcdefghijklmnopqrstuvwxyz0123456"
	const token = "bcjt_jt01_" + secret
	var paths [][]string
	var walk func(cmd *cobra.Command, path []string)
	walk = func(cmd *cobra.Command, path []string) {
		paths = append(paths, path)
		for _, sub := range cmd.Commands() {
			walk(sub, append(append([]string(nil), path...), sub.Name()))
		}
	}
	walk(newRoot(), nil)
	paths = append(paths, []string{"help"}, []string{"completion"}, []string{"completion", "bash"}, []string{"__complete"}, []string{"__complete", "join"})
	if len(paths) < 12 {
		t.Fatalf("only %d verbs were found", len(paths))
	}
	for _, path := range paths {
		for _, more := range [][]string{{token}, {"--" + token}, {"--config", token}, {"--json=" + token}, {"-" + token}, {token, token}} {
			got := bcd(t, "", append(append([]string(nil), path...), more...)...)
			if strings.Contains(got.stdout+got.stderr, secret) {
				t.Errorf("bcd %q: %+v", append(path, more...), got)
			}
			// A doctor without a configuration only warns.
			if got.code == 0 && len(path) > 0 && path[0] != "__complete" && path[0] != "doctor" {
				t.Errorf("bcd %q: exit 0", append(path, more...))
			}
		}
	}
	// Where it belongs, in the wrong form: neither is that echoed.
	for _, stdin := range []string{token + " " + token, "xx" + token, token[:20] + "\x00" + token} {
		if got := bcd(t, stdin, "join"); got.code != 1 || strings.Contains(got.stdout+got.stderr, secret) {
			t.Errorf("join with a malformed token: %+v", got)
		}
	}
}

func TestJSON(t *testing.T) {
	wrong := filepath.Join(t.TempDir(), "wrong.toml")
	if err := os.WriteFile(wrong, []byte("nothing = 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		code int
	}{
		{[]string{"version", "--json"}, 0},
		{[]string{"hardware", "--json"}, 0},
		{[]string{"doctor", "--offline", "--json", "--config", wrong}, 1},
	} {
		got := bcd(t, "", c.args...)
		var value map[string]any
		if err := json.Unmarshal([]byte(got.stdout), &value); err != nil || len(value) == 0 || got.code != c.code || got.stderr != "" {
			t.Errorf("bcd %q: %v, exit %d, %d keys, stderr %q", c.args, err, got.code, len(value), got.stderr)
		}
	}
}

func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if got := bcd(t, "", "completion", shell); got.code != 0 || !strings.Contains(got.stdout, "__complete") {
			t.Errorf("completion %s: exit %d, %.80q", shell, got.code, got.stdout)
		}
	}
	got := bcd(t, "", "__complete", "")
	for _, verb := range []string{"node", "ramdisk", "join", "status", "doctor", "hardware", "version"} {
		if !strings.Contains(got.stdout, verb+"\t") {
			t.Errorf("%s is not offered in %q", verb, got.stdout)
		}
	}
	for _, hidden := range []string{"supervise", probeVerb} {
		if strings.Contains(got.stdout, hidden) {
			t.Errorf("%s is offered", hidden)
		}
	}
}
