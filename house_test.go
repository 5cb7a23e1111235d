// Package bcd holds the tests of the house itself: which room may use which.
package bcd

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"
)

const module = "github.com/better-compute/bcd/"

// allowed says, for each room, which rooms it may import. An import only ever
// points down. A room that is not a key here does not exist; "x" covers the
// folders below x that have no row of their own.
var allowed = map[string][]string{
	"api": {},

	// leaf rooms of the agent
	"agent/clock":      {},
	"agent/config":     {},
	"agent/durable":    {},
	"agent/pki":        {"api", "agent/durable"},
	"agent/intent":     {"api", "agent/pki"},
	"agent/identity":   {"api", "agent/pki", "agent/intent", "agent/durable", "agent/clock"},
	"agent/secret":     {"api", "agent/pki"},
	"agent/journal":    {"api", "agent/durable"},
	"agent/dispatch":   {"api", "agent/journal", "agent/clock"},
	"agent/session":    {"api", "agent/pki", "agent/clock", "agent/servertime"},
	"agent/servertime": {},
	"agent/converge":   {"api", "agent/durable", "agent/clock"},
	"agent/hostconf":   {"api", "agent/converge", "agent/durable"},
	"agent/host":       {},
	"agent/doctor":     {"agent/host"},
	"agent/status":     {},
	"agent/logs":       {"api", "agent/dispatch", "agent/secret", "agent/clock"},
	"agent/builtin":    {"api", "agent/dispatch", "agent/host"},

	// the agent, and what modes are made of
	"agent":      {"api", "agent/*"},
	"boot":       {"agent/*"},
	"deploy":     {"api", "agent/*", "boot"},
	"supervisor": {},

	// how other machines boot from us: each protocol by itself, and netboot,
	// which decides for all of them
	"netboot/dhcp":         {},
	"netboot/tftp":         {},
	"netboot/httpboot":     {},
	"netboot/bmc":          {"api", "agent/dispatch", "agent/secret", "agent/clock"},
	"netboot":              {"api", "agent/*", "netboot/*"},
	"netboot/benchnetboot": {"netboot/tftp", "netboot/httpboot"},

	"image": {},
	"mkosi": {"image"},

	"gateway":    {"api", "agent/intent", "agent/pki", "agent/secret"},
	"qemu-tests": {"api", "image", "gateway", "agent/*"},

	"cmd/internal/cli":     {},
	"cmd/internal/clidocs": {},
	"cmd/bcd":              {"api", "agent", "agent/*", "boot", "deploy", "netboot", "netboot/*", "supervisor", "cmd/internal/*"},
	"cmd/bcd-gateway":      {"api", "agent/intent", "agent/pki", "gateway", "cmd/internal/*"},
}

// room gives the row of allowed that a package belongs to, "" for none.
func room(pkg string) string {
	best := ""
	for name := range allowed {
		if (pkg == name || strings.HasPrefix(pkg, name+"/")) && len(name) > len(best) {
			best = name
		}
	}
	return best
}

func mayImport(from, to string) bool {
	if from == to {
		return true
	}
	for _, rule := range allowed[from] {
		if rule == to || strings.HasSuffix(rule, "/*") && strings.HasPrefix(to, strings.TrimSuffix(rule, "*")) {
			return true
		}
	}
	return false
}

func TestImportsPointDown(t *testing.T) {
	for _, tags := range []string{"", "fakehw,nonvml"} {
		out, err := exec.Command("go", "list", "-e", "-json=ImportPath,Imports", "-tags", tags, "./...").Output()
		if err != nil {
			t.Fatalf("go list: %v", err)
		}
		packages := 0
		for decoder := json.NewDecoder(strings.NewReader(string(out))); ; packages++ {
			var p struct {
				ImportPath string
				Imports    []string
			}
			if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			pkg, ours := strings.CutPrefix(p.ImportPath, module)
			if !ours {
				continue
			}
			from := room(pkg)
			if from == "" {
				t.Errorf("%s stands in no room of the house; give it a row in allowed", pkg)
				continue
			}
			for _, imported := range p.Imports {
				target, ours := strings.CutPrefix(imported, module)
				if ours && !mayImport(from, room(target)) {
					t.Errorf("%s imports %s: the room %s may use %v", pkg, target, from, allowed[from])
				}
			}
		}
		if packages < 10 {
			t.Errorf("go list named %d packages with tags %q; the table was not checked", packages, tags)
		}
	}
}

// TestTheTableBites shows that a wrong edge would be seen.
func TestTheTableBites(t *testing.T) {
	for _, edge := range [][2]string{
		{"agent", "boot"}, {"agent", "deploy"}, {"agent", "supervisor"}, {"agent/journal", "agent/session"},
		{"supervisor", "agent"}, {"gateway", "agent/journal"}, {"api", "agent"}, {"agent/host", "agent"},
		{"deploy", "agent"}, {"image", "supervisor"},
	} {
		if mayImport(room(edge[0]), room(edge[1])) {
			t.Errorf("%s may import %s", edge[0], edge[1])
		}
	}
	if !mayImport("deploy", room("agent/dispatch")) || !mayImport("cmd/bcd", room("supervisor/pid1")) {
		t.Error("an edge of the design is refused")
	}
}
