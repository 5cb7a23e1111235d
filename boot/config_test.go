package boot

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"testing/fstest"
)

const canary = "bcjt_abc234_canarycanarycanary"

func oem(strs ...string) []byte {
	b := []byte{11, 5, 0x00, 0x0e, byte(len(strs))}
	for _, s := range strs {
		b = append(append(b, s...), 0)
	}
	return append(b, 0)
}

func machine(cmdline string, strs ...string) fstest.MapFS {
	m := fstest.MapFS{
		"proc/cmdline":                    {Data: []byte(cmdline + "\n")},
		"etc/bcd/image.json":              {Data: []byte(`{"version":"1.2.3","profile":"virtual","build_time":"2026-01-02T03:04:05Z","gateway":"https://image.example:7443"}`)},
		"sys/class/dmi/id/product_uuid":   {Data: []byte("4C4C4544-0042-3510-8051-B4C04F4D3332\n")},
		"sys/class/dmi/id/product_serial": {Data: []byte("SN123\n")},
	}
	if strs != nil {
		m["sys/firmware/dmi/entries/11-0/raw"] = &fstest.MapFile{Data: oem(strs...)}
	}
	return m
}

func TestReadConfigSourcesAndPrecedence(t *testing.T) {
	c, err := ReadConfig(machine(`ro bcd.gateway=https://line.example/ bcd.site="berlin-1" bcd.rescue bcd.gatway=x`,
		"unrelated", "bcd.gateway=https://smbios.example:8443", "bcd.token="+canary, "bcd.role=site"))
	if err != nil {
		t.Fatal(err)
	}
	if c.Gateway != "https://smbios.example:8443" || c.Role != RoleSite || c.Site != "berlin-1" || string(c.Token.Reveal()) != canary {
		t.Fatalf("config: %+v", c)
	}
	if c.UUID != "4c4c4544-0042-3510-8051-b4c04f4d3332" || c.Serial != "SN123" || c.Image.Profile != "virtual" {
		t.Fatalf("identity: %+v", c)
	}
	want := map[string]string{keyGateway: "smbios", keyToken: "smbios", keyRole: "smbios", keySite: "cmdline"}
	if !reflect.DeepEqual(c.Sources, want) {
		t.Errorf("sources = %v, want %v", c.Sources, want)
	}
	if !reflect.DeepEqual(c.Unknown, []string{"bcd.gatway"}) {
		t.Errorf("unknown = %v", c.Unknown)
	}
}

func TestReadConfigOnAnEmptyMachine(t *testing.T) {
	c, err := ReadConfig(fstest.MapFS{})
	if err != nil || c.Role != RoleRamdisk || c.Gateway != "" || c.Token.Present() {
		t.Fatalf("%+v, %v", c, err)
	}
	c, err = ReadConfig(machine("quiet"))
	if err != nil || c.Gateway != "https://image.example:7443" || c.Sources[keyGateway] != "image" {
		t.Fatalf("%+v, %v", c, err)
	}
}

func TestReadConfigRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		fs   fstest.MapFS
		want string
	}{
		"token on the command line": {machine("bcd.token=" + canary), "refused on the kernel command line"},
		"http":                      {machine("bcd.gateway=http://x"), "not https"},
		"no host":                   {machine("bcd.gateway=https://"), "no host"},
		"password":                  {machine("bcd.gateway=https://u:" + canary + "@x"), "no user"},
		"query":                     {machine("bcd.gateway=https://x/?t=" + canary), "no user, query"},
		"unparsable":                {machine("bcd.gateway=https://x:" + canary), "not a URL"},
		"role":                      {machine("", "bcd.role=root"), `role "root" is unknown`},
		"site":                      {machine("", "bcd.site=Berlin!"), "lower-case"},
		"token form":                {machine("", "bcd.token=x"+canary), "bcjt_<id>_<secret>"},
		"two tokens":                {machine("", "bcd.token="+canary, "bcd.token="+canary+"2"), "twice"},
		"long URL":                  {machine("bcd.gateway=https://" + strings.Repeat("a", 3000)), "over the limit"},
		"cut structure":             {fstest.MapFS{"sys/firmware/dmi/entries/11-0/raw": {Data: []byte("\x0b\x05\x00\x00\x02bcd.token=" + canary)}}, "cut off"},
		"huge file":                 {fstest.MapFS{"proc/cmdline": {Data: bytes.Repeat([]byte("a "), maxFactFile)}}, "no honest one"},
		"damaged image.json":        {fstest.MapFS{"etc/bcd/image.json": {Data: []byte("{")}}, "damaged"},
	} {
		c, err := ReadConfig(tc.fs)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: err = %v, want %q", name, err, tc.want)
			continue
		}
		if strings.Contains(err.Error(), "canary") || strings.Contains(fmt.Sprintf("%+v", c), "canary") {
			t.Errorf("%s: the token is in %q", name, err)
		}
	}
	if _, err := ReadConfig(machine("bcd.token=" + canary)); !errors.Is(err, ErrTokenOnCommandLine) {
		t.Errorf("token on command line: %v", err)
	}
}

func TestPlaceholdersIdentifyNothing(t *testing.T) {
	for _, id := range [][2]string{
		{"00000000-0000-0000-0000-000000000000", "To Be Filled By O.E.M."},
		{"FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF", "Not Specified"},
		{"03000200-0400-0500-0006-000700080009", "Default string"},
		{"nonsense", "bad\x01serial"},
	} {
		c, err := ReadConfig(fstest.MapFS{
			"sys/class/dmi/id/product_uuid":   {Data: []byte(id[0])},
			"sys/class/dmi/id/product_serial": {Data: []byte(id[1])},
		})
		if err != nil || c.UUID != "" || c.Serial != "" {
			t.Errorf("%q: uuid %q serial %q err %v", id, c.UUID, c.Serial, err)
		}
	}
}

func TestTokenNeverPrintsItself(t *testing.T) {
	c, err := ReadConfig(machine("", "bcd.token="+canary))
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		fmt.Fprintf(&out, verb, c)
		fmt.Fprintf(&out, verb, c.Token)
		fmt.Fprintf(&out, verb, &c)
	}
	j, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	out.Write(j)
	slog.New(slog.NewTextHandler(&out, nil)).Info("x", "config", c, "token", c.Token)
	slog.New(slog.NewJSONHandler(&out, nil)).Info("x", "config", c, "token", c.Token)
	hexed := fmt.Sprintf("%x", canary)
	if s := out.String(); strings.Contains(s, "canary") || strings.Contains(s, hexed) || strings.Contains(s, "99 97 110") {
		t.Errorf("token printed: %s", s)
	}
	b := c.Token.Reveal()
	c.Token.Zero()
	if strings.Trim(string(b), "\x00") != "" {
		t.Error("Zero left the token in memory")
	}
}

func FuzzParseOEMStrings(f *testing.F) {
	f.Add(oem("bcd.gateway=https://x", "b"))
	f.Add([]byte{11, 5, 0, 0, 255, 'a', 0, 0})
	f.Add([]byte{11, 200, 0, 0, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		strs, err := ParseOEMStrings(b)
		if err != nil {
			return
		}
		n := 0
		for _, s := range strs {
			n += len(s) + 1
		}
		if n > len(b) || len(strs) > maxOEMStrings {
			t.Fatalf("%d bytes in %d strings from %d", n, len(strs), len(b))
		}
	})
}

func FuzzReadConfig(f *testing.F) {
	f.Add(`bcd.gateway=https://x bcd.role="site"`)
	f.Fuzz(func(t *testing.T, line string) {
		c, err := ReadConfig(fstest.MapFS{"proc/cmdline": {Data: []byte(line)}})
		if err == nil && c.Gateway != "" {
			again, err := CheckGateway(c.Gateway)
			if err != nil || again != c.Gateway {
				t.Fatalf("gateway %q is not canonical: %q, %v", c.Gateway, again, err)
			}
		}
	})
}
