package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/api/bcd/v1/bcdv1connect"
	"github.com/better-compute/bcd/cmd/internal/cli"
	"github.com/better-compute/bcd/gateway"
	"github.com/better-compute/bcd/gateway/boltstore"
	"github.com/better-compute/bcd/gateway/keys"
)

// fleet is a gateway with its operators' socket, and those who join it.
type fleet struct {
	t    *testing.T
	data string
	url  string
	keys *keys.Set
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	// Unix socket paths are short; a test's own directory is not.
	data, err := os.MkdirTemp("", "gw")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(data) })
	store, err := boltstore.Open(filepath.Join(data, "state.db"))
	if err != nil {
		t.Fatal(err)
	}
	set, _, err := keys.LoadOrInit(filepath.Join(data, "keys"), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	network, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	local, err := gateway.ListenLocal(filepath.Join(data, "operator.sock"))
	if err != nil {
		t.Fatal(err)
	}
	f := &fleet{t: t, data: data, url: "https://" + network.Addr().String(), keys: set}
	g, err := gateway.New(gateway.Config{Store: store, Keys: set, Advertise: f.url, BlobDir: filepath.Join(data, "blobs")})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- g.Serve(ctx, network, local) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
		store.Close()
	})
	return f
}

// run runs a verb as a shell would.
func (f *fleet) run(args ...string) (code int, stdout, stderr string) {
	f.t.Helper()
	var out, errs bytes.Buffer
	code = cli.Main(newRoot(), append(args, "--data", f.data), &out, &errs)
	return code, out.String(), errs.String()
}

// says runs a verb that must succeed, and wants words in what it prints.
func (f *fleet) says(words []string, args ...string) string {
	f.t.Helper()
	code, stdout, stderr := f.run(args...)
	if code != 0 {
		f.t.Errorf("%q: exit code %d, %s", args, code, stderr)
	}
	for _, word := range words {
		if !strings.Contains(stdout+stderr, word) {
			f.t.Errorf("%q printed\n%s%s\nwithout %q", args, stdout, stderr, word)
		}
	}
	return stdout
}

func (f *fleet) fails(want int, word string, args ...string) {
	f.t.Helper()
	code, _, stderr := f.run(args...)
	if code != want || !strings.Contains(stderr, word) {
		f.t.Errorf("%q: exit code %d, %q; want %d with %q", args, code, stderr, want, word)
	}
}

// join joins with a token that the command line made.
func (f *fleet) join(name, token string, role bcdv1.Role, macs ...string) (nodeID string, client *http.Client) {
	t := f.t
	t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	csr, err := pki.NewCSR(key)
	if err != nil {
		t.Fatal(err)
	}
	plain, err := proto.Marshal(&bcdv1.JoinClaims{
		Token: strings.TrimSpace(token), Role: role, Hostname: name, HardwareKeyHash: bytes.Repeat([]byte(name[:1]), 32), BootId: "boot-1", Macs: macs, Csr: csr,
	})
	if err != nil {
		t.Fatal(err)
	}
	sealed, err := pki.Seal(&f.keys.Join.PublicKey, plain, "")
	if err != nil {
		t.Fatal(err)
	}
	dial := func(certificate func() (*tls.Certificate, error)) *http.Client {
		transport := &http.Transport{ForceAttemptHTTP2: true, TLSClientConfig: pki.ClientTLS(f.keys.Roots, certificate, time.Now)}
		t.Cleanup(transport.CloseIdleConnections)
		return &http.Client{Transport: transport}
	}
	answer, err := bcdv1connect.NewJoinServiceClient(dial(nil), f.url).Join(t.Context(), connect.NewRequest(&bcdv1.JoinRequest{Sealed: sealed}))
	if err != nil {
		t.Fatal(err)
	}
	return answer.Msg.GetNodeId(), dial(func() (*tls.Certificate, error) { return pki.TLSCertificate(answer.Msg.GetCertificateChain(), key) })
}

// TestSiteVerbs is a site from its token to a takeover, at the terminal.
func TestSiteVerbs(t *testing.T) {
	f := newFleet(t)
	f.says([]string{"no site is known yet", "token create --role site"}, "site", "list")
	f.fails(1, "--site NAME", "token", "create", "--role", "site")
	token := f.says(nil, "token", "create", "--role", "site", "--site", "lab")
	f.says([]string{"lab", "none yet", "free; the first agent that asks gets it"}, "site", "lab")
	f.fails(1, "site list", "site", "typo")

	// Artefacts, by the names of make images.
	uki := filepath.Join(t.TempDir(), "bcd-metal-amd64.uki.efi")
	if err := os.WriteFile(uki, []byte("MZ"), 0o600); err != nil {
		t.Fatal(err)
	}
	f.says([]string{"boot-image put"}, "boot-image", "list")
	f.says([]string{"uki for amd64", "bcd-metal-amd64.uki.efi"}, "boot-image", "put", uki, "--version", "7")
	f.says([]string{"UKI", "amd64", "7"}[1:], "boot-image", "list")
	f.fails(2, "--kind must be", "boot-image", "put", filepath.Join(t.TempDir(), "x"))
	f.fails(2, "--kind must be", "boot-image", "rm", "--kind", "tar", "--arch", "amd64")
	f.fails(1, "belongs to a kernel", "boot-image", "put", uki, "--cmdline", "quiet")

	node, client := f.join("box", token, bcdv1.Role_ROLE_SITE)
	sites := bcdv1connect.NewSiteServiceClient(client, f.url)
	sync := func(request *bcdv1.SyncRequest) *bcdv1.SyncResponse {
		answer, err := sites.Sync(context.Background(), connect.NewRequest(request))
		if err != nil {
			t.Error(err)
			return nil
		}
		return answer.Msg
	}
	const mac = "52:54:00:aa:00:01"
	sync(&bcdv1.SyncRequest{})
	machineToken := f.says(nil, "token", "create", "--role", "ramdisk", "--site", "lab")
	f.join("metal", machineToken, bcdv1.Role_ROLE_RAMDISK, mac)
	sync(&bcdv1.SyncRequest{
		Fence: 1, Lease: bcdv1.LeaseKind_LEASE_KIND_STANDING, Problems: []string{"port 67 is taken"}, Serving: []string{"10.0.0.1:67"},
		Traces: []*bcdv1.BootTrace{{
			Mac: mac, Architecture: "amd64", Firmware: "uefi", StartedMs: 1000, VerdictCode: "no-4011", Verdict: "the machine never came to port 4011",
			Steps: []*bcdv1.BootStep{{TimeMs: 1000, Type: "dhcp.discover", Count: 4}, {TimeMs: 2500, Type: "dhcp.offer", Message: "offered"}},
		}},
	})
	f.says([]string{"lab", "standing", node}, "site", "list")
	f.says([]string{node, "answers machines on a standing lease, fence 1", "bcd-metal-amd64.uki.efi (not yet)", "! port 67 is taken", "10.0.0.1:67", mac, "never came to port 4011"}, "site", "lab")
	f.says([]string{"network boot of " + mac, "×4", "+1.500 s", "dhcp.offer", "verdict: no-4011"}, "machine", mac)
	var shown struct {
		Site struct {
			Lease struct{ Kind, Holder string }
		}
	}
	if err := json.Unmarshal([]byte(f.says(nil, "site", "lab", "--json")), &shown); err != nil || shown.Site.Lease.Kind != "standing" || shown.Site.Lease.Holder != node {
		t.Errorf("site --json: %+v, %v", shown, err)
	}

	// Orders.
	f.says([]string{"boots ramdisk", "node.reboot metal"}, "boot", "metal", "ramdisk")
	f.says([]string{"ramdisk, as ordered"}, "machine", "metal")
	f.says([]string{"boots auto"}, "boot", "metal", "auto")
	f.fails(2, "ACTION must be", "boot", "metal", "disk")
	f.says([]string{"get nothing", "1 MACs"}, "site", "set", "lab", "--unknown", "nothing", "--full-dhcp", mac+"=10.0.0.7/24,router=10.0.0.1,dns=10.0.0.1")
	f.says([]string{"10.0.0.7/24", "nothing"}, "site", "lab")
	f.fails(2, "nothing to set", "site", "set", "lab")
	f.fails(2, "--full-dhcp is", "site", "set", "lab", "--full-dhcp", mac)
	f.fails(2, "--unknown must be", "site", "set", "lab", "--unknown", "local")
	f.fails(1, "IPv4 address", "site", "set", "lab", "--full-dhcp", mac+"=10.0.0.7")

	// Release waits for the holder's word.
	f.fails(1, "site takeover lab --to NODE --force", "site", "release", "lab", "--wait", "1ms")
	done := make(chan string, 1)
	go func() {
		_, stdout, stderr := f.run("site", "release", "lab")
		done <- stdout + stderr
	}()
	// The agent waits with a long Sync, as it does all the time.
	table := sync(&bcdv1.SyncRequest{Fence: 1, Lease: bcdv1.LeaseKind_LEASE_KIND_STANDING})
	if !table.GetLease().GetRelease() {
		t.Errorf("the agent was told %v", table.GetLease())
	}
	sync(&bcdv1.SyncRequest{ReleasedFence: 1})
	if said := <-done; !strings.Contains(said, node+" gave back the boot lease of site lab") {
		// It may have asked only after the lease was given back.
		if !strings.Contains(said, "nobody holds the boot lease") {
			t.Errorf("release said %q", said)
		}
	}
	f.fails(2, "--force is needed", "site", "takeover", "lab", "--to", node)
	f.fails(2, "--to NODE is needed", "site", "takeover", "lab", "--force")
	f.fails(1, "not an agent", "site", "takeover", "lab", "--to", "node_x", "--force")
	f.says([]string{"kept for " + node}, "site", "takeover", "lab", "--to", node, "--force")
	f.says([]string{"is not served any more"}, "boot-image", "rm", "--kind", "uki", "--arch", "amd64")
	f.fails(1, "boot-image list", "boot-image", "rm", "--kind", "uki", "--arch", "amd64")
}

func TestGuessArtefact(t *testing.T) {
	for name, want := range map[string]string{
		"bcd-metal-amd64.uki.efi": "uki amd64", "bcd-virtual-arm64.vmlinuz": "kernel arm64", "bcd-metal-amd64.initramfs": "initramfs amd64",
		"undionly.kpxe": "ipxe bios", "ipxe.efi": "ipxe ", "ipxe-arm64.efi": "ipxe arm64", "readme": " ",
	} {
		kind, arch := guessArtefact(name)
		if got := fmt.Sprint(kind, " ", arch); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}
