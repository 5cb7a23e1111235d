package identity

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/better-compute/bcd/agent/pki"
)

func TestReadToken(t *testing.T) {
	credentials := t.TempDir()
	if err := os.WriteFile(filepath.Join(credentials, "join-token"), []byte("bcjt_credential_aaaaaaaaaaaaaaaa\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	env := func(value string) func(string) (string, bool) {
		return func(name string) (string, bool) { return value, name == TokenEnv }
	}
	stdin := "bcjt_stdin_aaaaaaaaaaaaaaaa\nmore\n"
	for _, test := range []struct {
		name, credentials string
		env               func(string) (string, bool)
		stdin             string
		want              string
	}{
		{"all three", credentials, env("bcjt_env_aaaaaaaaaaaaaaaa"), stdin, "credential"},
		{"environment", t.TempDir(), env("bcjt_env_aaaaaaaaaaaaaaaa"), stdin, "env"},
		{"empty variable", "", env(" "), stdin, "stdin"},
		{"standard input", "", nil, stdin, "stdin"},
		{"no newline", "", nil, strings.TrimSpace(stdin[:28]), "stdin"},
		{"nothing", "", nil, "", ""},
		{"only white space", "", env(""), " \n", ""},
	} {
		scrubbed := 0
		token, err := ReadToken(TokenSources{CredentialsDir: test.credentials, LookupEnv: test.env, Stdin: strings.NewReader(test.stdin),
			Scrub: func(string) error { scrubbed++; return nil }})
		if test.want == "" {
			if !errors.Is(err, ErrNoToken) {
				t.Errorf("%s: %v", test.name, err)
			}
		} else if err != nil || token.ID() != test.want {
			t.Errorf("%s: %v, %v", test.name, token, err)
		}
		if test.env != nil && scrubbed != 1 {
			t.Errorf("%s: scrubbed %d times", test.name, scrubbed)
		}
	}
	for _, bad := range []string{"hunter2", "bcjt_", "bcjt_id_short", "bcjt_id_aaaaaaaaaaaaaaaa bcjt_id_aaaaaaaaaaaaaaaa", "bcjt_id_" + strings.Repeat("a", 5000)} {
		_, err := ReadToken(TokenSources{Stdin: strings.NewReader(bad)})
		if err == nil || strings.Contains(err.Error(), bad[5:]) && len(bad) > 5 || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%.20q: %v", bad, err)
		}
	}
	fresh := must(pki.NewToken("jt_01"))
	if token := must(ParseToken([]byte(fresh))); token.ID() != "jt_01" {
		t.Errorf("id %q", token.ID())
	}
}

func TestTokenNeverPrints(t *testing.T) {
	raw := []byte(testToken + "\n")
	token := must(ParseToken(raw))
	if bytes.Contains(raw, []byte("canary")) {
		t.Error("what it was read from is not zeroed")
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, "%v %+v %#v %s %q %x %d", token, token, token, token, token, token, token)
	slog.New(slog.NewTextHandler(&out, nil)).Info("x", "token", token)
	slog.New(slog.NewJSONHandler(&out, nil)).Info("x", "token", token)
	must(0, json.NewEncoder(&out).Encode(map[string]any{"token": token}))
	fmt.Fprintln(&out, fmt.Errorf("x: %v", token))
	if strings.Contains(out.String(), "canary") || strings.Contains(out.String(), "63616e") {
		t.Error(out.String())
	}
	value := token.Reveal()
	token.Destroy()
	if bytes.Contains(value, []byte("canary")) || token.ID() != "" {
		t.Error("not destroyed")
	}
	(*Token)(nil).Destroy()
}

// TestScrubEnv runs in a process that was really started with the variable.
func TestScrubEnv(t *testing.T) {
	if os.Getenv("BCD_TEST_SCRUB") == "child" {
		token, err := ReadToken(SystemTokenSources(nil))
		if err != nil {
			fmt.Println("error", err)
			os.Exit(3)
		}
		environ, _ := os.ReadFile("/proc/self/environ")
		inherited, _ := exec.Command("/bin/sh", "-c", "tr '\\0' '\\n' </proc/$$/environ; tr '\\0' '\\n' </proc/$PPID/environ").Output()
		fmt.Printf("read=%t kept=%t own=%t inherited=%t\n", token.ID() == "jt01", bytes.Contains(environ, []byte("BCD_TEST_SCRUB=child")),
			bytes.Contains(environ, []byte("canary")), bytes.Contains(inherited, []byte("canary")))
		os.Exit(0)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestScrubEnv$")
	cmd.Env = append(os.Environ(), "BCD_TEST_SCRUB=child", TokenEnv+"="+testToken, "LAST=1")
	out, err := cmd.CombinedOutput()
	if err != nil || strings.TrimSpace(string(out)) != "read=true kept=true own=false inherited=false" {
		t.Errorf("%v: %s", err, out)
	}
}

func FuzzScrubParsers(f *testing.F) {
	f.Add([]byte("1 (a) b) S 1 1"), "X")
	f.Add([]byte("A=1\x00BCD_JOIN_TOKEN=x\x00"), TokenEnv)
	f.Fuzz(func(t *testing.T, data []byte, name string) {
		_, _ = envStart(data)
		offset, length := findVariable(data, name)
		if offset < 0 || length < 0 || offset+length > len(data) {
			t.Errorf("%d+%d of %d", offset, length, len(data))
		}
		_, _ = ParseToken(data)
	})
}

func TestSeed(t *testing.T) {
	g := newGateway()
	esp, etc := t.TempDir(), t.TempDir()
	to := SeedTarget{ConfigPath: filepath.Join(etc, "bcd", "config.toml"), TrustDir: filepath.Join(etc, "bcd", "trust"), DataDir: filepath.Join(etc, "data")}
	if _, err := ImportSeed(esp, to); !errors.Is(err, ErrNoSeed) {
		t.Fatalf("no seed: %v", err)
	}
	seed := filepath.Join(esp, SeedDir)
	files := map[string]string{
		"config.toml": "gateway_url = \"https://gw\"\n", "roots.pem": string(g.roots.PEM()),
		"join-encryption.jwk": string(must(pki.MarshalJWK(&g.joinKey.PublicKey))), "join-token": testToken + "\n", "user-data": "#cloud-config\n",
	}
	plant := func(change func(map[string]string)) {
		_ = os.RemoveAll(seed)
		_ = os.MkdirAll(seed, 0o755)
		all := map[string]string{}
		for k, v := range files {
			all[k] = v
		}
		change(all)
		for name, content := range all {
			if err := os.WriteFile(filepath.Join(seed, name), []byte(content), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, change := range map[string]func(map[string]string){
		"no config": func(m map[string]string) { delete(m, "config.toml") }, "no roots": func(m map[string]string) { delete(m, "roots.pem") },
		"bad roots": func(m map[string]string) { m["roots.pem"] = "x" }, "bad key": func(m map[string]string) { m["join-encryption.jwk"] = "{}" },
		"no key": func(m map[string]string) { delete(m, "join-encryption.jwk") }, "bad token": func(m map[string]string) { m["join-token"] = "canary" },
		"huge user data": func(m map[string]string) { m["user-data"] = strings.Repeat("a", maxUserData+1) },
		"bad config":     func(m map[string]string) { m["config.toml"] = "nonsense" },
	} {
		plant(change)
		bad := to
		bad.CheckConfig = func(data []byte) error {
			if string(data) == "nonsense" {
				return errors.New("config.toml:1:1: unknown key")
			}
			return nil
		}
		if _, err := ImportSeed(esp, bad); err == nil || errors.Is(err, ErrNoSeed) || strings.Contains(err.Error(), "canary") {
			t.Errorf("%s: %v", name, err)
		}
		if left, _ := os.ReadDir(etc); len(left) != 0 {
			t.Fatalf("%s: installed all the same: %v", name, left)
		}
	}
	plant(func(map[string]string) {})
	for range 2 { // a second import, as after a crash, is the same
		got, err := ImportSeed(esp, to)
		if err != nil || got.Token.ID() != "jt01" || len(got.Installed) != 4 || got.Installed[3] != to.ConfigPath {
			t.Fatalf("%+v, %v", got, err)
		}
		if data := must(os.ReadFile(got.UserData)); string(data) != files["user-data"] || must(os.Stat(got.UserData)).Mode() != 0o600 {
			t.Errorf("user data %q", data)
		}
	}
	if err := RemoveToken(esp); err != nil {
		t.Fatal(err)
	}
	if got := names(t, seed); fmt.Sprint(got) != "[config.toml join-encryption.jwk roots.pem]" {
		t.Errorf("left on the ESP: %v", got)
	}
	if _, err := ImportSeed(esp, to); !errors.Is(err, ErrNoSeed) {
		t.Errorf("a seed that served its purpose: %v", err)
	}
	if err := RemoveToken(esp); err != nil {
		t.Errorf("again: %v", err)
	}
	plant(func(m map[string]string) { m["join-token"] = string(make([]byte, len(testToken))) })
	if _, err := ImportSeed(esp, to); !errors.Is(err, ErrNoSeed) {
		t.Errorf("an overwritten token: %v", err)
	}
}
