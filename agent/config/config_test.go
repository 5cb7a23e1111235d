package config

import (
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	c, err := Parse("/etc/bcd/config.toml", []byte("gateway_url = \"https://gw.example:7443\"\nsite = \"fsn1\"\n"))
	if err != nil {
		t.Fatal(err)
	}
	if c.DataDir != "/var/lib/bcd" || c.SocketPath != "/run/bcd/bcd.sock" || c.LogLevel != "info" || c.Site != "fsn1" {
		t.Errorf("defaults or values are lost: %+v", c)
	}
}

func TestMistakesNameTheirPlace(t *testing.T) {
	const url = "gateway_url = \"https://gw.example\"\n"
	for _, c := range []struct{ name, text, want string }{
		{"unknown key", url + "sit = \"a\"\n", `c.toml:2:1: unknown key "sit"; did you mean "site"?`},
		{"nearest key", "gateway_ur1 = \"https://gw\"\n", `c.toml:1:1: unknown key "gateway_ur1"; did you mean "gateway_url"?`},
		{"far from every key", url + "zebra = 1\n", `c.toml:2:1: unknown key "zebra"; the keys are command_root_sha256, data_dir, gateway_url`},
		{"unknown table", url + "[boot]\nlisten = \"x\"\n", `unknown key "boot`},
		{"wrong type", url + "site = 3\n", "c.toml:2:8: "},
		{"syntax", url + "site = \n", "c.toml:2:"},
		{"twice", url + url, "c.toml:2:"},
		{"http", "gateway_url = \"http://gw\"\n", `c.toml:1:1: gateway_url must begin with https://, got "http://gw"`},
		{"no host", "gateway_url = \"https://\"\n", "c.toml:1:1: gateway_url must be https://HOST[:PORT]"},
		{"missing", "site = \"a\"\n", "c.toml: gateway_url is missing"},
		{"relative", url + "  data_dir = \"x\"\n", `c.toml:2:3: data_dir must be an absolute path below /, got "x"`},
		{"site", url + "site = \"A B\"\n", `c.toml:2:1: site must be lower-case`},
		{"digest", url + "command_root_sha256 = [\"12\"]\n", `c.toml:2:1: command_root_sha256 must hold 64`},
		{"level", url + "log_level = \"loud\"\n", `c.toml:2:1: log_level must be debug, info, warn or error, got "loud"`},
		{"format", url + "log_format = \"xml\"\n", `c.toml:2:1: log_format must be text or json, got "xml"`},
		{"too large", url + strings.Repeat("#", maxBytes), "is larger than"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Parse("c.toml", []byte(c.text))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q in it", err, c.want)
			}
		})
	}
}

func TestReferenceNamesEveryKey(t *testing.T) {
	text := Reference()
	for _, key := range keys() {
		if !strings.Contains(text, "| `"+key+"` |") {
			t.Errorf("the reference lacks %s", key)
		}
	}
	if strings.Contains(text, "|  |\n") {
		t.Error("a key has no text")
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("gateway_url = \"https://gw\"\n[a.b]\nc = [1,2]\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse("f", data)
		if err == nil && (CheckGatewayURL(c.GatewayURL) != nil || c.DataDir == "") {
			t.Errorf("accepted %+v", c)
		}
	})
}
