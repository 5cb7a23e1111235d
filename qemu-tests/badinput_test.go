package qemutests

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/bcd/agent/identity"
	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/qemu-tests/rig"
)

// joiner is a host that runs the real bcd join against a world's gateway.
type joiner struct {
	w      *world
	config string
	data   string
}

// newJoiner writes a configuration with the trust folder of some fleet.
func newJoiner(w *world, trust string) *joiner {
	w.t.Helper()
	dir := w.t.TempDir()
	j := &joiner{w: w, config: filepath.Join(dir, "config.toml"), data: filepath.Join(dir, "data")}
	text := fmt.Sprintf("gateway_url = \"https://%s\"\ndata_dir = %q\ntrust_dir = %q\n", w.Listen, j.data, trust)
	if err := os.WriteFile(j.config, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
	return j
}

// join gives bcd's exit code and all that it said.
func (j *joiner) join(token string) (int, string) {
	j.w.t.Helper()
	cmd := exec.CommandContext(j.w.ctx, artefact(j.w.t, "bcd"), "join", "--config", j.config)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	cmd.Stdin = strings.NewReader(token + "\n")
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		j.w.t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

// refused expects a sentence from bcd, one in the gateway's history, and
// nothing written.
func (j *joiner) refused(what, token, said, history string) {
	t := j.w.t
	t.Helper()
	code, out := j.join(token)
	if code != 1 || !strings.Contains(out, said) {
		t.Errorf("%s: exit %d and %q, want 1 and %q", what, code, out, said)
	}
	if events := j.w.events(); !strings.Contains(events, history) {
		t.Errorf("%s: the history has no %q:\n%s", what, history, events)
	}
	if _, secret, err := pki.SplitToken(token); err == nil && strings.Contains(out+j.w.events(), secret) {
		t.Errorf("%s: the token is shown", what)
	}
	if _, err := os.Stat(filepath.Join(j.data, "identity.json")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s: an identity was written (%v)", what, err)
	}
}

// events is the whole history as a person reads it.
func (w *world) events() string {
	w.t.Helper()
	out, err := w.Run(w.ctx, "events")
	if err != nil {
		w.t.Fatal(err)
	}
	return string(out)
}

// spend uses a token up, as a machine that is not the one under test.
func (w *world) spend(token string, role bcdv1.Role) {
	w.t.Helper()
	trust := artefact(w.t, "trust")
	roots, err := pki.LoadRoots(filepath.Join(trust, "roots.pem"))
	if err != nil {
		w.t.Fatal(err)
	}
	jwk, err := os.ReadFile(filepath.Join(trust, "join-encryption.jwk"))
	if err != nil {
		w.t.Fatal(err)
	}
	parsed, err := identity.ParseToken([]byte(token))
	if err != nil {
		w.t.Fatal(err)
	}
	hardware := sha256.Sum256([]byte("another machine " + token))
	_, err = identity.Join(w.ctx, identity.JoinOptions{
		Store: identity.Store{Dir: w.t.TempDir()}, GatewayURL: "https://" + w.Listen, Roots: roots, JoinKeyJWK: jwk, Token: parsed,
		Claims: &bcdv1.JoinClaims{Hostname: "another", SystemSerial: "OTHER-1", BootId: "1", HardwareKeyHash: hardware[:]},
		Role:   role,
		HTTP:   identity.HTTPClient(identity.ClientOptions{Roots: roots, Floor: time.Now}),
		Wall:   time.Now, Floor: time.Now,
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

// tokenID is the part of a token that may be shown.
func (w *world) tokenID(token string) string {
	w.t.Helper()
	id, _, err := pki.SplitToken(token)
	if err != nil {
		w.t.Fatal(err)
	}
	return id
}

// otherFleet is the trust folder of a fleet that is not the world's.
func (w *world) otherFleet() string {
	w.t.Helper()
	keys, trust := filepath.Join(w.t.TempDir(), "keys"), filepath.Join(w.t.TempDir(), "trust")
	for _, args := range [][]string{{"keys", "init", "--out", keys}, {"keys", "export-trust", trust, "--keys", keys}} {
		if _, err := w.Run(w.ctx, args...); err != nil {
			w.t.Fatal(err)
		}
	}
	return trust
}

// TestBadJoins runs the real bcd against the real gateway; no machine is
// needed to be refused.
func TestBadJoins(t *testing.T) {
	w := newWorld(t)
	j := newJoiner(w, artefact(t, "trust"))

	expiring := w.token("node", "--ttl", "1s")
	good := w.token("node")
	last := good[len(good)-1]
	wrong := good[:len(good)-1] + string("AB"[b2i(last == 'A')])
	j.refused("wrong token", wrong,
		"the gateway does not know this join token; check that it was copied whole, or make another with bcd-gateway token create",
		"this gateway never made that join token; make one with: bcd-gateway token create")
	j.refused("half a token", good[:12], "standard input: join token is not of the form bcjt_<id>_<secret>", "")

	used := w.token("node")
	w.spend(used, bcdv1.Role_ROLE_NODE)
	j.refused("used-up token", used, "this join token is used up; make another", "join token "+w.tokenID(used)+" was for 1 and has been used")

	revoked := w.token("node")
	if _, err := w.Run(w.ctx, "token", "revoke", w.tokenID(revoked)); err != nil {
		t.Fatal(err)
	}
	j.refused("revoked token", revoked, "this join token was revoked; make another", "join token "+w.tokenID(revoked)+" was revoked")

	ramdisk := w.token("ramdisk")
	j.refused("token for another role", ramdisk, "this join token is for another role; make one for this role with bcd-gateway token create --role",
		"join token "+w.tokenID(ramdisk)+" is for role ramdisk, the machine joins as node; make one with: bcd-gateway token create --role node")

	until(w.ctx, t, "the token has expired", func() bool {
		out, err := w.Run(w.ctx, "token", "list")
		return err == nil && strings.Contains(lineWith(string(out), w.tokenID(expiring)), "expired")
	})
	j.refused("expired token", expiring, "this join token has expired; make another", "join token "+w.tokenID(expiring)+" ended at ")

	stranger := newJoiner(w, w.otherFleet())
	stranger.refused("gateway with another CA", good, "the gateway there has another root than this machine trusts; compare roots.pem with the gateway's",
		"a machine at 127.0.0.1 hung up because it does not trust this gateway's root")

	// The good token was not touched by any of it.
	if code, out := j.join(good); code != 0 || !strings.Contains(out, "joined as") {
		t.Fatalf("a good token after all that: exit %d, %s", code, out)
	}
	// Now that the machine is known, a refusal is in its own history.
	code, out := j.join(ramdisk)
	if code != 1 {
		t.Errorf("exit %d, %s", code, out)
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	machine, err := w.Run(w.ctx, "machine", w.machineNamed(host))
	if err != nil || !strings.Contains(string(machine), "the machine joins as node") {
		t.Errorf("the machine's own history: %v\n%s", err, machine)
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// lineWith is the first line of text that has word in it.
func lineWith(text, word string) string {
	for line := range strings.Lines(text) {
		if strings.Contains(line, word) {
			return line
		}
	}
	return ""
}

// until waits for something that no machine does.
func until(ctx context.Context, t *testing.T, what string, holds func() bool) {
	t.Helper()
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for !holds() {
		select {
		case <-ctx.Done():
			t.Fatalf("waiting until %s: %v", what, context.Cause(ctx))
		case <-ticker.C:
		}
	}
}

// machineNamed is the id of the machine that joined from a host.
func (w *world) machineNamed(host string) string {
	w.t.Helper()
	var all struct {
		Machines []struct{ ID, Name string } `json:"machines"`
	}
	if err := w.RunJSON(w.ctx, &all, "machines"); err != nil {
		w.t.Fatal(err)
	}
	for _, m := range all.Machines {
		if m.Name != "another" {
			return m.ID
		}
	}
	w.t.Fatalf("no machine of host %s in %+v", host, all.Machines)
	return ""
}

// digest is the SHA-256 of a file.
func digest(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

// usedDisk is a disk with what somebody else left on it, and its digest.
func (w *world) usedDisk(name string, size int64) (path, sum string) {
	w.t.Helper()
	path, err := rig.NewFilledDisk(w.dir, name, size, 0xa5)
	if err != nil {
		w.t.Fatal(err)
	}
	return path, digest(w.t, path)
}

// TestConsoleOfRefusedMachines: three machines that cannot join say why on
// their consoles, again and again, and leave their disks alone.
func TestConsoleOfRefusedMachines(t *testing.T) {
	w := newWorld(t)
	other := &world{t: t, ctx: w.ctx, dir: rig.Folder(t)}
	other.Gateway = rig.RunGateway(t, artefact(t, "bcd-gateway"), other.dir) // makes keys of its own
	used := w.token("ramdisk")
	w.spend(used, bcdv1.Role_ROLE_RAMDISK)

	type machine struct {
		name   string
		smbios []string
		says   []string
		vm     *rig.VM
		disk   string
		sum    string
	}
	machines := []*machine{
		{name: "used-up", smbios: []string{"bcd.gateway=" + w.URL(), "bcd.token=" + used},
			says: []string{"this join token is used up; make another with bcd-gateway token create"}},
		{name: "stranger", smbios: []string{"bcd.gateway=" + other.URL(), "bcd.token=" + other.token("ramdisk")},
			says: []string{"the gateway there has another root than this machine trusts", other.URL()}},
		{name: "nowhere", says: []string{"nobody says where the gateway is: build the image with GATEWAY=https://HOST:PORT, or give the SMBIOS type 11 string bcd.gateway="}},
	}
	for _, m := range machines {
		m.disk, m.sum = w.usedDisk(m.name+".raw", 16<<20)
		m.vm = w.ramdisk(m.name, func(c *rig.Config) {
			c.SMBIOS, c.MemoryMiB = m.smbios, 320
			c.Disks = []rig.Disk{{Path: m.disk, Serial: "D-" + m.name}}
		})
		// One machine boots at a time; this one is up when it says something.
		if err := m.vm.WaitConsole(w.ctx, m.says[0]); err != nil {
			t.Fatal(err)
		}
	}
	for _, m := range machines {
		var mark rig.Mark
		for range 2 { // it goes on saying so between its tries
			for _, text := range m.says {
				var err error
				if mark, err = m.vm.WaitConsoleAfter(w.ctx, mark, text); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := m.vm.WaitConsoleAfter(w.ctx, mark, "again_in="); err != nil {
				t.Error(err)
			}
		}
		console, err := m.vm.Console(0)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range m.smbios {
			if token, ok := strings.CutPrefix(s, "bcd.token="); ok {
				if _, secret, err := pki.SplitToken(token); err != nil || strings.Contains(console, secret) {
					t.Errorf("%s: the token is on the console (%v)", m.name, err)
				}
			}
		}
		if got := digest(t, m.disk); got != m.sum {
			t.Errorf("%s: its disk was written to", m.name)
		}
		m.vm.Close()
	}
	if events := w.events(); !strings.Contains(events, "join token "+w.tokenID(used)+" was for 1 and has been used") {
		t.Errorf("the gateway's history:\n%s", events)
	}
	if events := other.events(); !strings.Contains(events, "hung up because it does not trust this gateway's root") {
		t.Errorf("the other gateway's history:\n%s", events)
	}
}

// TestWrongClocks: a clock that is off by decades keeps no machine out. Neither
// machine has a disk.
func TestWrongClocks(t *testing.T) {
	for _, rtc := range []string{"2011-02-03T04:05:06", "2070-02-03T04:05:06"} {
		w := newWorld(t)
		vm := w.ramdisk("rtc-"+rtc[:4], func(c *rig.Config) { c.RTC, c.MemoryMiB = rtc, 320 })
		joined := w.connected(vm, "ramdisk", nil)
		ping := w.ended(vm, w.send("send", "diag.ping", joined.ID).ID)
		if ping.Outcome.Status != "succeeded" {
			t.Errorf("clock at %s: diag.ping: %+v", rtc, ping.Outcome)
		}
		t.Logf("clock at %s: %s", rtc, strings.TrimSpace(lineWith(w.timeline(), "joined as ramdisk")))
		// The console says what was wrong, and what stands instead.
		console, err := vm.Console(0)
		if err != nil {
			t.Fatal(err)
		}
		if line := lineWith(console, "the clock was wrong and has been set"); !strings.Contains(line, "was="+rtc[:10]) || !strings.Contains(line, "build time of the image") {
			t.Errorf("clock at %s: the console says %q", rtc, line)
		}
		deploy := w.ended(vm, w.send("deploy", joined.ID, artefact(t, "images/bcd-virtual-amd64.node.raw.zst")).ID)
		const want = "no disk: the machine shows none: check that it has one, that its controller is enabled and that the image has its driver"
		if deploy.Outcome.Code != "NO_DISK" || !strings.Contains(deploy.Outcome.Message, want) || !strings.Contains(w.timeline(), want) {
			t.Errorf("deploy without a disk: %+v", deploy.Outcome)
		}
		if err := vm.WaitConsole(w.ctx, want); err != nil {
			t.Error(err)
		}
		vm.Close()
	}
}
