package gateway_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/intent"
	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/api/bcd/v1/bcdv1connect"
)

const (
	standing = bcdv1.LeaseKind_LEASE_KIND_STANDING
	expiring = bcdv1.LeaseKind_LEASE_KIND_EXPIRING
	noLease  = bcdv1.LeaseKind_LEASE_KIND_NONE

	nothing = bcdv1.BootAction_BOOT_ACTION_NOTHING
	local   = bcdv1.BootAction_BOOT_ACTION_LOCAL
	disk    = bcdv1.BootAction_BOOT_ACTION_RAMDISK
)

// appliance is a site agent: what it has, and its calls.
type appliance struct {
	m     *member
	sites bcdv1connect.SiteServiceClient

	table *bcdv1.BootTable
	fence int64
	lease bcdv1.LeaseKind
}

func (w *world) appliance(name, site string) *appliance {
	w.t.Helper()
	token := w.token(&bcdv1.CreateTokenRequest{Role: bcdv1.Role_ROLE_SITE, Site: site})
	m, err := w.tryJoin(claimsOf(name, token, bcdv1.Role_ROLE_SITE))
	if err != nil {
		w.t.Fatal(err)
	}
	a := &appliance{m: m}
	a.dial()
	return a
}

// dial is needed again after the gateway restarted.
func (a *appliance) dial() {
	a.sites = bcdv1connect.NewSiteServiceClient(a.m.w.client(a.m), a.m.w.url)
}

// sync asks with what the appliance has, and takes what it is told.
func (a *appliance) sync(change func(*bcdv1.SyncRequest)) *bcdv1.SyncResponse {
	t := a.m.w.t
	t.Helper()
	out, err := a.trySync(t.Context(), change)
	if err != nil {
		t.Fatalf("sync of %s: %v", a.m.name, err)
	}
	return out
}

func (a *appliance) trySync(ctx context.Context, change func(*bcdv1.SyncRequest)) (*bcdv1.SyncResponse, error) {
	t := a.m.w.t
	t.Helper()
	request := &bcdv1.SyncRequest{TableGeneration: a.table.GetGeneration(), Fence: a.fence, Lease: a.lease}
	if change != nil {
		change(request)
	}
	answer, err := a.sites.Sync(ctx, connect.NewRequest(request))
	if err != nil {
		return nil, err
	}
	out := answer.Msg
	if out.GetTable() != nil {
		table, err := intent.FromRoots(a.m.w.keys.Roots).BootTable(out.GetTable(), a.m.w.now())
		if err != nil {
			t.Fatal(err)
		}
		if table.GetGeneration() <= a.table.GetGeneration() {
			t.Errorf("table generation %d after %d", table.GetGeneration(), a.table.GetGeneration())
		}
		a.table = table
	}
	a.lease, a.fence = out.GetLease().GetKind(), out.GetLease().GetFence()
	if a.lease != standing && a.lease != expiring {
		a.fence = 0
	}
	return out, nil
}

func waitMS(ms int32) func(*bcdv1.SyncRequest) {
	return func(r *bcdv1.SyncRequest) { r.WaitMs = ms }
}

func (a *appliance) row(machineID string) *bcdv1.MachineBoot {
	for _, row := range a.table.GetMachines() {
		if row.GetMachineId() == machineID {
			return row
		}
	}
	return nil
}

// joinAt joins a machine with hardware that a site can recognise.
func (w *world) joinAt(name, site string, role bcdv1.Role, mac, uuid string) *member {
	w.t.Helper()
	claims := claimsOf(name, w.token(&bcdv1.CreateTokenRequest{Role: role, Site: site}), role)
	claims.Macs, claims.SystemUuid = []string{mac}, uuid
	m, err := w.tryJoin(claims)
	if err != nil {
		w.t.Fatal(err)
	}
	return m
}

func codeOf(t *testing.T, err error, want connect.Code, words ...string) {
	t.Helper()
	if connect.CodeOf(err) != want {
		t.Errorf("error %v, want %v", err, want)
		return
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error %q does not say %q", err, word)
		}
	}
}

func (w *world) setBoot(machine string, action bcdv1.BootAction) {
	w.t.Helper()
	if _, err := w.op.SetMachineBoot(w.t.Context(), connect.NewRequest(&bcdv1.SetMachineBootRequest{Machine: machine, Action: action})); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) site(name string) *bcdv1.GetSiteResponse {
	w.t.Helper()
	answer, err := w.op.GetSite(w.t.Context(), connect.NewRequest(&bcdv1.GetSiteRequest{Name: name}))
	if err != nil {
		w.t.Fatal(err)
	}
	return answer.Msg
}

// TestSiteTable: an appliance gets the lease and a table of what it shall do,
// and each change of a machine's state, or an order, comes as a new one.
func TestSiteTable(t *testing.T) {
	w := newWorld(t)
	a := w.appliance("box", "lab")
	bare := w.joinAt("bare", "lab", ramdisk, "52:54:00:AA:00:01", "11111111-2222-3333-4444-555555555501")
	installed := w.joinAt("installed", "lab", node, "52:54:00:aa:00:02", "03000200-0400-0500-0006-000700080009")
	elsewhere := w.joinAt("elsewhere", "paris", node, "52:54:00:aa:00:03", "")
	nowhere := w.joinAt("nowhere", "", node, "52:54:00:aa:00:04", "")

	out := a.sync(waitMS(20000))
	if a.lease != standing || a.fence != 1 || out.GetLease().GetHolder() != a.m.nodeID {
		t.Errorf("the only agent got %v", out.GetLease())
	}
	if a.table.GetSite() != "lab" || a.table.GetUnknown() != disk || a.table.GetGeneration() != 1 {
		t.Errorf("table %v", a.table)
	}
	if row := a.row(bare.machineID); row.GetAction() != disk || row.GetMacs()[0] != "52:54:00:aa:00:01" || row.GetSystemUuid() == "" {
		t.Errorf("bare machine: %v", row)
	}
	if row := a.row(installed.machineID); row.GetAction() != local || row.GetSystemUuid() != "" {
		t.Errorf("installed machine with a placeholder for a UUID: %v", row)
	}
	if a.row(elsewhere.machineID) != nil || a.row(nowhere.machineID).GetAction() != local {
		t.Errorf("rows %v; want those of the site and of no site", a.table.GetMachines())
	}

	// An order reaches an appliance that waits.
	told := make(chan *bcdv1.SyncResponse, 1)
	go func() {
		out, _ := a.trySync(t.Context(), waitMS(20000))
		told <- out
	}()
	w.setBoot("installed", disk)
	<-told
	if a.row(installed.machineID).GetAction() != disk || a.table.GetGeneration() != 2 {
		t.Errorf("after the order: generation %d, %v", a.table.GetGeneration(), a.row(installed.machineID))
	}
	if got := w.machine("installed").GetMachine().GetBootAction(); got != disk {
		t.Errorf("machine says %v", got)
	}

	// Its own system coming back does not use the order up; its ramdisk does.
	installed.connect(nil).close()
	a.sync(nil)
	if a.row(installed.machineID).GetAction() != disk {
		t.Error("the order ended without a ramdisk")
	}
	claims := claimsOf("installed", w.token(&bcdv1.CreateTokenRequest{Role: ramdisk, Site: "lab"}), ramdisk)
	claims.Macs = []string{"52:54:00:aa:00:02"}
	again, err := w.tryJoin(claims)
	if err != nil {
		t.Fatal(err)
	}
	d := again.connect(func(h *bcdv1.Hello) { h.BootId = "boot-2" })
	if got := w.machine("installed").GetMachine().GetBootAction(); got != bcdv1.BootAction_BOOT_ACTION_UNSPECIFIED {
		t.Errorf("the order stands after the ramdisk came: %v", got)
	}
	// An order while it is in the ramdisk is for the next boot.
	w.setBoot("installed", disk)
	d.close()
	d = again.connect(func(h *bcdv1.Hello) { h.BootId = "boot-2" })
	if got := w.machine("installed").GetMachine().GetBootAction(); got != disk {
		t.Error("a session of the same boot used up the order for the next")
	}
	d.close()
	again.connect(func(h *bcdv1.Hello) { h.BootId = "boot-3" })
	if got := w.machine("installed").GetMachine().GetBootAction(); got != bcdv1.BootAction_BOOT_ACTION_UNSPECIFIED {
		t.Error("the next boot did not use up the order")
	}
	for _, action := range []bcdv1.BootAction{nothing, local} {
		w.setBoot("bare", action)
		if a.sync(nil); a.row(bare.machineID).GetAction() != action {
			t.Errorf("ordered %v: %v", action, a.row(bare.machineID))
		}
	}
}

// TestSiteTableOfADeploy: once the image is on the disk, the machine starts
// from it, before anything of it has joined.
func TestSiteTableOfADeploy(t *testing.T) {
	w := newWorld(t)
	a := w.appliance("box", "lab")
	bare := w.joinAt("bare", "lab", ramdisk, "52:54:00:aa:00:01", "")
	d := bare.connect(nil)
	sum := sha256.Sum256([]byte("image"))
	answer, err := w.op.Deploy(t.Context(), connect.NewRequest(&bcdv1.DeployRequest{
		Machine: "bare", Image: "http://images.example/x.raw", ImageRef: &bcdv1.ImageRef{ImageSha256: sum[:]},
	}))
	if err != nil {
		t.Fatal(err)
	}
	id := answer.Msg.GetCommand().GetId()
	d.command()
	d.accept(id)
	d.started(id)
	d.heartbeat()
	if a.sync(nil); a.row(bare.machineID).GetAction() != disk {
		t.Errorf("while it is deployed: %v", a.row(bare.machineID))
	}
	d.outcome(id, bcdv1.OutcomeStatus_OUTCOME_STATUS_SUCCEEDED, "")
	d.acked(id)
	if a.sync(nil); a.row(bare.machineID).GetAction() != local {
		t.Errorf("after the deploy: %v", a.row(bare.machineID))
	}
}

// TestSiteRefusals: nobody but a trusted agent of a site gets anything.
func TestSiteRefusals(t *testing.T) {
	w := newWorld(t)
	a := w.appliance("box", "lab")
	_, err := bcdv1connect.NewSiteServiceClient(w.client(nil), w.url).Sync(t.Context(), connect.NewRequest(&bcdv1.SyncRequest{}))
	codeOf(t, err, connect.CodeUnauthenticated, "token create --role site")
	_, err = bcdv1connect.NewSiteServiceClient(w.client(w.join("n", node)), w.url).Sync(t.Context(), connect.NewRequest(&bcdv1.SyncRequest{}))
	codeOf(t, err, connect.CodePermissionDenied, "role node")
	_, err = w.op.CreateToken(t.Context(), connect.NewRequest(&bcdv1.CreateTokenRequest{Role: bcdv1.Role_ROLE_SITE}))
	codeOf(t, err, connect.CodeInvalidArgument, "--site NAME")
	for _, wrong := range []*bcdv1.SyncRequest{
		{WaitMs: -1}, {Fence: -1}, {Traces: make([]*bcdv1.BootTrace, 65)}, {WaitingMacs: make([]string, 257)}, {Problems: make([]string, 17)}, {Artefacts: make([][]byte, 257)},
	} {
		for i := range wrong.GetTraces() {
			wrong.Traces[i] = &bcdv1.BootTrace{}
		}
		_, err := a.sites.Sync(t.Context(), connect.NewRequest(wrong))
		codeOf(t, err, connect.CodeInvalidArgument, "sync:")
	}

	// One that waits learns at once that it is not trusted any more.
	a.sync(nil)
	failed := make(chan error, 1)
	go func() {
		_, err := a.trySync(t.Context(), waitMS(20000))
		failed <- err
	}()
	w.waitSyncs(a)
	if _, err := w.op.RevokeNode(t.Context(), connect.NewRequest(&bcdv1.RevokeNodeRequest{NodeId: a.m.nodeID, Reason: "stolen"})); err != nil {
		t.Fatal(err)
	}
	codeOf(t, <-failed, connect.CodePermissionDenied, "stolen")
}

// waitSyncs waits until the gateway has heard the appliance's Sync: it shows
// what that said.
func (w *world) waitSyncs(a *appliance) {
	w.t.Helper()
	w.until("the Sync was heard", func() bool {
		return slices.ContainsFunc(w.site("lab").GetSite().GetAgents(), func(agent *bcdv1.SiteAgent) bool {
			return agent.GetNode().GetId() == a.m.nodeID && agent.GetTableGeneration() == a.table.GetGeneration() && agent.GetFence() == a.fence
		})
	})
}

// until asks again and again, for what gives no sign when it is there.
func (w *world) until(what string, there func() bool) {
	w.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for limit := time.After(patience); !there(); {
		select {
		case <-tick.C:
		case <-limit:
			w.t.Fatalf("never: %s", what)
		}
	}
}

// TestOneSyncOfAnAgent: a second Sync ends the first, and a cancelled one
// leaves nothing behind.
func TestOneSyncOfAnAgent(t *testing.T) {
	w := newWorld(t)
	a := w.appliance("box", "lab")
	a.sync(nil)
	first := make(chan error, 1)
	go func() {
		_, err := a.trySync(t.Context(), waitMS(20000))
		first <- err
	}()
	w.waitSyncs(a)
	ctx, cancel := context.WithCancel(t.Context())
	second := make(chan error, 1)
	go func() {
		_, err := a.trySync(ctx, waitMS(20000))
		second <- err
	}()
	codeOf(t, <-first, connect.CodeAborted, "later Sync")
	cancel()
	codeOf(t, <-second, connect.CodeCanceled)
	w.until("nobody waits any more", func() bool { return w.g.Watchers() == 0 })
}

// TestLeaseMovesOnce: a second agent turns the standing lease into an expiring
// one, but only when the holder has given it back.
func TestLeaseMovesOnce(t *testing.T) {
	w := newWorld(t)
	a, b := w.appliance("a", "lab"), w.appliance("b", "lab")
	a.sync(nil)
	if out := b.sync(nil); b.lease != noLease || out.GetLease().GetHolder() != a.m.nodeID {
		t.Fatalf("the second agent got %v while the first holds it standing", out.GetLease())
	}
	if out := a.sync(nil); a.lease != standing || !out.GetLease().GetRelease() {
		t.Fatalf("the holder was told %v, want to give it back", out.GetLease())
	}
	w.advance(time.Hour)
	if b.sync(nil); b.lease != noLease {
		t.Fatal("an hour of silence moved a standing lease")
	}
	released := a.fence
	out := a.sync(func(r *bcdv1.SyncRequest) { r.ReleasedFence, r.Fence, r.Lease = released, 0, noLease })
	if a.lease != expiring || a.fence <= released || out.GetLease().GetTtlMs() <= 0 || out.GetLease().GetTtlMs() > 20000 {
		t.Fatalf("after it was given back: %v", out.GetLease())
	}
	if b.sync(nil); b.lease != noLease {
		t.Fatal("two hold the lease")
	}
	// Restarted, the gateway does not know when it was last renewed.
	w.stop()
	w.start()
	a.dial()
	b.dial()
	w.advance(19 * time.Second)
	if b.sync(nil); b.lease != noLease {
		t.Fatal("the restarted gateway gave the lease away before its time")
	}
	w.advance(3 * time.Second)
	if b.sync(nil); b.lease != expiring || b.fence <= a.fence {
		t.Fatalf("the silent holder's lease: %v %d, want it moved with a higher fence", b.lease, b.fence)
	}
	if a.sync(nil); a.lease != noLease {
		t.Fatal("the old holder still has it")
	}
	site := w.site("lab").GetSite()
	if site.GetLease().GetHolder() != b.m.nodeID || len(site.GetAgents()) != 2 {
		t.Errorf("site %v", site)
	}
}

// TestOperatorMovesLease: release asks, and waits for the holder's word;
// takeover does not.
func TestOperatorMovesLease(t *testing.T) {
	w := newWorld(t)
	a := w.appliance("a", "lab")
	move := func(to string, force bool) error {
		_, err := w.op.MoveLease(t.Context(), connect.NewRequest(&bcdv1.MoveLeaseRequest{Site: "lab", NodeId: to, Force: force}))
		return err
	}
	codeOf(t, move("", false), connect.CodeFailedPrecondition, "nobody holds")
	a.sync(nil)
	codeOf(t, move(a.m.nodeID, false), connect.CodeFailedPrecondition, "already")
	codeOf(t, move("node_x", true), connect.CodeInvalidArgument, "not an agent")
	codeOf(t, move("", true), connect.CodeInvalidArgument, "by force")
	if err := move("", false); err != nil {
		t.Fatal(err)
	}
	if out := a.sync(waitMS(20000)); a.lease != standing || !out.GetLease().GetRelease() {
		t.Fatalf("asked to give back: %v", out.GetLease())
	}
	fence := a.fence
	if a.sync(func(r *bcdv1.SyncRequest) { r.ReleasedFence = fence }); a.lease != noLease {
		t.Fatal("the lease came back to who gave it back on an operator's word")
	}
	b := w.appliance("b", "lab")
	if b.sync(nil); b.lease != expiring {
		t.Fatalf("the other agent got %v", b.lease)
	}
	if err := move(a.m.nodeID, true); err != nil {
		t.Fatal(err)
	}
	if b.sync(nil); b.lease != noLease {
		t.Fatal("the old holder kept it against force")
	}
	if a.sync(nil); a.lease != expiring || a.fence <= b.fence+fence {
		t.Fatalf("taken by force: %v %d", a.lease, a.fence)
	}
	// A revoked holder's lease ends with its time.
	if _, err := w.op.RevokeNode(t.Context(), connect.NewRequest(&bcdv1.RevokeNodeRequest{NodeId: a.m.nodeID})); err != nil {
		t.Fatal(err)
	}
	if b.sync(nil); b.lease != noLease {
		t.Fatal("moved before the revoked holder's time was over")
	}
	w.advance(22 * time.Second)
	if b.sync(nil); b.lease != standing {
		t.Fatalf("the last agent got %v, want the lease standing", b.lease)
	}
}

// ask makes a ramdisk's question.
func askOf(t *testing.T, change func(*bcdv1.BootConfigAsk)) (raw []byte, open func(*bcdv1.BootConfig) string) {
	t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	jwk, err := pki.MarshalJWK(&key.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	ask := &bcdv1.BootConfigAsk{
		Macs: []string{"52:54:00:aa:00:01"}, SystemUuid: "11111111-2222-3333-4444-555555555501", SystemSerial: "SN-bare",
		BootId: rand.Text(), Jwk: string(jwk), Version: "test", Nonce: bytes.Repeat([]byte{7}, 32),
	}
	if change != nil {
		change(ask)
	}
	if raw, err = proto.Marshal(ask); err != nil {
		t.Fatal(err)
	}
	return raw, func(c *bcdv1.BootConfig) string {
		t.Helper()
		token, err := pki.Open(key, c.GetSealedToken(), ask.GetBootId())
		if err != nil {
			t.Fatal(err)
		}
		return string(token)
	}
}

func (a *appliance) bootConfig(raw []byte) (*bcdv1.BootConfig, error) {
	t := a.m.w.t
	t.Helper()
	answer, err := a.sites.BootConfig(t.Context(), connect.NewRequest(&bcdv1.BootConfigRequest{Ask: raw, Fence: a.fence, RemoteAddress: "10.0.0.9"}))
	if err != nil {
		return nil, err
	}
	return intent.FromRoots(a.m.w.keys.Roots).BootConfig(answer.Msg.GetConfig(), a.m.w.now())
}

// TestBootConfig: a machine on the site's network learns how to join, once in
// a boot, and nobody else can use what it is told.
func TestBootConfig(t *testing.T) {
	w := newWorld(t)
	a := w.appliance("box", "lab")
	boot := func(id string) func(*bcdv1.BootConfigAsk) {
		return func(r *bcdv1.BootConfigAsk) { r.BootId = id }
	}
	raw, open := askOf(t, boot("boot-one"))
	_, err := a.bootConfig(raw)
	codeOf(t, err, connect.CodeFailedPrecondition, "does not hold the boot lease")
	a.sync(nil)

	config, err := a.bootConfig(raw)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(raw)
	if !bytes.Equal(config.GetAskSha256(), sum[:]) || config.GetGatewayUrl() != w.url || config.GetSite() != "lab" || config.GetRole() != ramdisk || config.GetMachineId() != "" {
		t.Errorf("boot config %v", config)
	}
	// The answer was lost: the same ask gets the same token.
	again, err := a.bootConfig(raw)
	if err != nil || open(again) != open(config) {
		t.Errorf("the same ask again: %v", err)
	}
	// Another key for the same boot gets nothing.
	other, _ := askOf(t, boot("boot-one"))
	_, err = a.bootConfig(other)
	codeOf(t, err, connect.CodeAlreadyExists, "another ask")

	// The token is for that boot.
	claims := claimsOf("bare", open(config), ramdisk)
	claims.Macs, claims.SystemUuid, claims.BootId = []string{"52:54:00:aa:00:01"}, "11111111-2222-3333-4444-555555555501", "boot-two"
	if _, err := w.tryJoin(claims); joinCode(err) != bcdv1.JoinErrorCode_JOIN_ERROR_CODE_WRONG_MACHINE {
		t.Errorf("another boot with the token: %v", err)
	}
	claims.BootId = "boot-one"
	bare, err := w.tryJoin(claims)
	if err != nil {
		t.Fatal(err)
	}
	if got := w.machine("bare").GetMachine().GetSite(); got != "lab" {
		t.Errorf("the machine's site is %q", got)
	}
	stranger := claimsOf("stranger", open(config), ramdisk)
	stranger.BootId = "boot-one"
	if _, err := w.tryJoin(stranger); joinCode(err) != bcdv1.JoinErrorCode_JOIN_ERROR_CODE_TOKEN_USED_UP {
		t.Errorf("a second machine with the token: %v", err)
	}

	// Known now: the next boot's token is bound to the machine.
	raw, open = askOf(t, boot("boot-two"))
	if config, err = a.bootConfig(raw); err != nil || config.GetMachineId() != bare.machineID {
		t.Fatalf("a known machine: %v, %v", config, err)
	}
	stranger.Token, stranger.BootId = open(config), "boot-two"
	if _, err := w.tryJoin(stranger); joinCode(err) != bcdv1.JoinErrorCode_JOIN_ERROR_CODE_WRONG_MACHINE {
		t.Errorf("another machine with the token of a known one: %v", err)
	}
	first := open(config)
	// It ended unused; the same ask gets one more, and only one is good.
	w.advance(16 * time.Minute)
	a.sync(nil)
	if config, err = a.bootConfig(raw); err != nil || open(config) == first {
		t.Fatalf("after the token ended: %v", err)
	}
	claims.Token, claims.BootId = open(config), "boot-two"
	if _, err := w.tryJoin(claims); err != nil {
		t.Fatal(err)
	}
	w.advance(16 * time.Minute)
	a.sync(nil)
	_, err = a.bootConfig(raw)
	codeOf(t, err, connect.CodeAlreadyExists, "restart")

	// What the table says counts here too.
	for action, said := range map[bcdv1.BootAction]string{local: "from its disk", nothing: "given nothing"} {
		w.setBoot("bare", action)
		raw, _ = askOf(t, nil)
		_, err = a.bootConfig(raw)
		codeOf(t, err, connect.CodeFailedPrecondition, said, "bcd-gateway boot bare ramdisk")
	}
	// The same NIC in another box is another machine, by policy.
	unknown := func(r *bcdv1.BootConfigAsk) { r.SystemUuid = "99999999-2222-3333-4444-555555555501" }
	raw, _ = askOf(t, unknown)
	if config, err = a.bootConfig(raw); err != nil || config.GetMachineId() != "" {
		t.Errorf("a known NIC in another box: %v, %v", config, err)
	}
	if _, err := w.op.SetSite(t.Context(), connect.NewRequest(&bcdv1.SetSiteRequest{Name: "lab", Unknown: nothing})); err != nil {
		t.Fatal(err)
	}
	raw, _ = askOf(t, unknown)
	_, err = a.bootConfig(raw)
	codeOf(t, err, connect.CodeFailedPrecondition, "--unknown ramdisk")
	// An older fence has no effect.
	a.fence++
	_, err = a.bootConfig(raw)
	codeOf(t, err, connect.CodeFailedPrecondition, "sync first")
	if strings.Contains(w.logs.String(), "bcjt_") {
		t.Error("a token is in the log")
	}
}

func TestBootConfigRefusesWhatIsOutOfBounds(t *testing.T) {
	w := newWorld(t)
	a := w.appliance("box", "lab")
	a.sync(nil)
	for name, change := range map[string]func(*bcdv1.BootConfigAsk){
		"no boot id":      func(r *bcdv1.BootConfigAsk) { r.BootId = "" },
		"short boot id":   func(r *bcdv1.BootConfigAsk) { r.BootId = "1" },
		"long boot id":    func(r *bcdv1.BootConfigAsk) { r.BootId = strings.Repeat("x", 129) },
		"boot id in two":  func(r *bcdv1.BootConfigAsk) { r.BootId = "boot one\n" },
		"no nonce":        func(r *bcdv1.BootConfigAsk) { r.Nonce = nil },
		"no key":          func(r *bcdv1.BootConfigAsk) { r.Jwk = "" },
		"not a key":       func(r *bcdv1.BootConfigAsk) { r.Jwk = "{}" },
		"too many MACs":   func(r *bcdv1.BootConfigAsk) { r.Macs = make([]string, 65) },
		"long MAC":        func(r *bcdv1.BootConfigAsk) { r.Macs = []string{strings.Repeat("0", 33)} },
		"long serial":     func(r *bcdv1.BootConfigAsk) { r.SystemSerial = strings.Repeat("s", 257) },
		"escape sequence": func(r *bcdv1.BootConfigAsk) { r.Version = "\x1b[2J" },
		"17 KiB":          func(r *bcdv1.BootConfigAsk) { r.Jwk = strings.Repeat("x", 17<<10) },
	} {
		raw, _ := askOf(t, change)
		_, err := a.bootConfig(raw)
		if connect.CodeOf(err) != connect.CodeInvalidArgument || !strings.Contains(err.Error(), "boot config ask:") {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err := a.bootConfig([]byte{0xff})
	codeOf(t, err, connect.CodeInvalidArgument, "not a bcd.v1.BootConfigAsk")
}

// TestBootedByProof: a machine has booted when its ramdisk has a session, in a
// boot that began after the trace did.
func TestBootedByProof(t *testing.T) {
	w := newWorld(t)
	a := w.appliance("box", "lab")
	const mac = "52:54:00:aa:00:01"
	m := w.joinAt("bare", "lab", ramdisk, mac, "")
	a.sync(nil)
	trace := func(started time.Time, steps int) *bcdv1.BootTrace {
		out := &bcdv1.BootTrace{Mac: strings.ToUpper(mac), Architecture: "amd64", Firmware: "uefi", StartedMs: started.UnixMilli(), VerdictCode: "running", Verdict: "the file\x1b was fetched"}
		for i := range steps {
			out.Steps = append(out.Steps, &bcdv1.BootStep{TimeMs: started.UnixMilli() + int64(i), Type: "dhcp.discover", Message: strings.Repeat("m", 300)})
		}
		return out
	}
	waiting := func(t *bcdv1.BootTrace) func(*bcdv1.SyncRequest) {
		return func(r *bcdv1.SyncRequest) {
			if r.WaitMs, r.WaitingMacs = 20000, []string{mac}; t != nil {
				r.Traces, r.WaitMs = []*bcdv1.BootTrace{t}, 0
			}
		}
	}
	began := w.now()
	if out := a.sync(waiting(trace(began, 100))); len(out.GetBooted()) != 0 {
		t.Fatalf("booted without a session: %v", out.GetBooted())
	}
	boots := w.machine("bare").GetBoots()
	if len(boots) != 1 || len(boots[0].GetSteps()) != 64 || len(boots[0].GetSteps()[0].GetMessage()) != 256 || boots[0].GetMac() != mac || boots[0].GetVerdict() != "the file  was fetched" || boots[0].GetSite() != "lab" {
		t.Fatalf("boots of the machine: %v", boots)
	}
	if last := boots[0].GetSteps()[63]; last.GetTimeMs() != began.UnixMilli()+99 {
		t.Errorf("the last step was lost")
	}
	told := make(chan *bcdv1.SyncResponse, 1)
	go func() {
		out, _ := a.trySync(t.Context(), waiting(nil))
		told <- out
	}()
	d := m.connect(func(h *bcdv1.Hello) { h.BootId = "boot-x" })
	out := <-told
	if len(out.GetBooted()) != 1 || out.GetBooted()[0].GetMac() != mac || out.GetBooted()[0].GetMachineId() != m.machineID || out.GetBooted()[0].GetBootId() != "boot-x" {
		t.Fatalf("booted: %v", out.GetBooted())
	}
	// It starts again: the session that is still there proves nothing of this
	// boot.
	w.advance(time.Minute)
	if out := a.sync(waiting(trace(w.now(), 1))); len(out.GetBooted()) != 0 {
		t.Fatalf("an old session was taken for a boot: %v", out.GetBooted())
	}
	d.close()
	for i := range 5 {
		a.sync(waiting(trace(w.now().Add(time.Duration(i)*time.Minute), 1)))
	}
	if boots := w.site("lab").GetBoots(); len(boots) != 1 || boots[0].GetStartedMs() < began.Add(5*time.Minute).UnixMilli() {
		t.Errorf("boots of the site: %v", boots)
	}
}

// TestSiteShowsItsAgents: what an agent says is what an operator sees.
func TestSiteShowsItsAgents(t *testing.T) {
	w := newWorld(t)
	a := w.appliance("box", "lab")
	sum := sha256.Sum256([]byte("uki"))
	a.sync(func(r *bcdv1.SyncRequest) {
		r.Problems, r.Serving, r.Artefacts = []string{"port 67 is taken\n", strings.Repeat("x", 600)}, []string{"10.0.0.1:67"}, [][]byte{sum[:]}
	})
	agents := w.site("lab").GetSite().GetAgents()
	if len(agents) != 1 || agents[0].GetProblems()[0] != "port 67 is taken " || len(agents[0].GetProblems()[1]) != 512 || agents[0].GetServing()[0] != "10.0.0.1:67" || !bytes.Equal(agents[0].GetArtefacts()[0], sum[:]) {
		t.Errorf("agents %v", agents)
	}
	list, err := w.op.ListSites(t.Context(), connect.NewRequest(&bcdv1.ListSitesRequest{}))
	if err != nil || len(list.Msg.GetSites()) != 1 || list.Msg.GetSites()[0].GetName() != "lab" {
		t.Errorf("sites %v, %v", list, err)
	}
	_, err = w.op.GetSite(t.Context(), connect.NewRequest(&bcdv1.GetSiteRequest{Name: "typo"}))
	codeOf(t, err, connect.CodeNotFound, "site list")
}

func TestSetSite(t *testing.T) {
	w := newWorld(t)
	a := w.appliance("box", "lab")
	set := func(r *bcdv1.SetSiteRequest) error {
		r.Name = "lab"
		_, err := w.op.SetSite(t.Context(), connect.NewRequest(r))
		return err
	}
	good := &bcdv1.FullDhcp{Mac: "52:54:00:AA:00:01", Address: "10.0.0.7/24", Router: "10.0.0.1", Dns: []string{"10.0.0.1"}}
	if err := set(&bcdv1.SetSiteRequest{PutFullDhcp: []*bcdv1.FullDhcp{good}, Unknown: nothing}); err != nil {
		t.Fatal(err)
	}
	if a.sync(nil); a.table.GetUnknown() != nothing || len(a.table.GetFullDhcp()) != 1 || a.table.GetFullDhcp()[0].GetMac() != "52:54:00:aa:00:01" {
		t.Errorf("table %v", a.table)
	}
	for name, wrong := range map[string]*bcdv1.FullDhcp{
		"not a MAC":         {Mac: "x", Address: "10.0.0.8/24"},
		"group MAC":         {Mac: "01:00:5e:00:00:01", Address: "10.0.0.8/24"},
		"no prefix":         {Mac: "52:54:00:aa:00:02", Address: "10.0.0.8"},
		"IPv6":              {Mac: "52:54:00:aa:00:02", Address: "2001:db8::1/64"},
		"network's own":     {Mac: "52:54:00:aa:00:02", Address: "10.0.0.0/24"},
		"router outside":    {Mac: "52:54:00:aa:00:02", Address: "10.0.0.8/24", Router: "10.0.1.1"},
		"DNS is a name":     {Mac: "52:54:00:aa:00:02", Address: "10.0.0.8/24", Dns: []string{"dns.example"}},
		"another's address": {Mac: "52:54:00:aa:00:02", Address: "10.0.0.7/24"},
	} {
		if err := set(&bcdv1.SetSiteRequest{PutFullDhcp: []*bcdv1.FullDhcp{wrong}}); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
	codeOf(t, set(&bcdv1.SetSiteRequest{Unknown: local}), connect.CodeInvalidArgument, "ramdisk or nothing")
	codeOf(t, set(&bcdv1.SetSiteRequest{RemoveFullDhcp: []string{"52:54:00:aa:00:09"}}), connect.CodeNotFound)
	if err := set(&bcdv1.SetSiteRequest{RemoveFullDhcp: []string{"52:54:00:AA:00:01"}}); err != nil {
		t.Fatal(err)
	}
	if a.sync(nil); len(a.table.GetFullDhcp()) != 0 {
		t.Errorf("table %v", a.table)
	}
}

// TestBootArtefacts: what sites serve is in the blob store, one of each kind
// and architecture, and in every table.
func TestBootArtefacts(t *testing.T) {
	w := newWorld(t)
	a := w.appliance("box", "lab")
	content := []byte("MZ a unified kernel image")
	sum := sha256.Sum256(content)
	put := func(artefact *bcdv1.BootArtefact) error {
		_, err := w.op.PutBootArtefact(t.Context(), connect.NewRequest(&bcdv1.PutBootArtefactRequest{Artefact: artefact}))
		return err
	}
	uki := func(change func(*bcdv1.BootArtefact)) *bcdv1.BootArtefact {
		out := &bcdv1.BootArtefact{Kind: bcdv1.ArtefactKind_ARTEFACT_KIND_UKI, Architecture: "amd64", Sha256: sum[:], Name: "bcd-amd64.efi", Version: "1"}
		if change != nil {
			change(out)
		}
		return out
	}
	codeOf(t, put(uki(nil)), connect.CodeNotFound, "boot-image put")
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "http://operator/v1/blobs/sha256/"+hex.EncodeToString(sum[:]), bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	answer, err := w.http.Do(request)
	if err != nil || answer.StatusCode != http.StatusCreated {
		t.Fatalf("put blob: %v, %v", answer, err)
	}
	answer.Body.Close()
	for name, change := range map[string]func(*bcdv1.BootArtefact){
		"no kind":           func(a *bcdv1.BootArtefact) { a.Kind = 0 },
		"architecture":      func(a *bcdv1.BootArtefact) { a.Architecture = "x86" },
		"a path":            func(a *bcdv1.BootArtefact) { a.Name = "../x" },
		"size":              func(a *bcdv1.BootArtefact) { a.Size = 1 },
		"digest":            func(a *bcdv1.BootArtefact) { a.Sha256 = sum[:31] },
		"a UKI's own line":  func(a *bcdv1.BootArtefact) { a.CommandLine = "quiet" },
		"a token in a line": func(a *bcdv1.BootArtefact) { a.Kind, a.CommandLine = 2, "bcd.token=x" },
		"a line in two":     func(a *bcdv1.BootArtefact) { a.Kind, a.CommandLine = 2, "a\nb" },
	} {
		if err := put(uki(change)); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := put(uki(nil)); err != nil {
		t.Fatal(err)
	}
	codeOf(t, put(uki(func(a *bcdv1.BootArtefact) { a.Architecture = "arm64" })), connect.CodeInvalidArgument, "--name")
	a.sync(nil)
	if list := a.table.GetArtefacts(); len(list) != 1 || list[0].GetSize() != int64(len(content)) || list[0].GetVersion() != "1" {
		t.Fatalf("artefacts in the table: %v", list)
	}
	// The agent fetches it with its certificate.
	fetched, err := w.client(a.m).Get(w.url + "/v1/blobs/sha256/" + hex.EncodeToString(sum[:]))
	if err != nil || fetched.StatusCode != http.StatusOK {
		t.Fatalf("the agent's fetch: %v, %v", fetched, err)
	}
	fetched.Body.Close()
	if err := put(uki(func(a *bcdv1.BootArtefact) { a.Version = "2" })); err != nil {
		t.Fatal(err)
	}
	list, err := w.op.ListBootArtefacts(t.Context(), connect.NewRequest(&bcdv1.ListBootArtefactsRequest{}))
	if err != nil || len(list.Msg.GetArtefacts()) != 1 || list.Msg.GetArtefacts()[0].GetVersion() != "2" {
		t.Errorf("artefacts %v, %v", list, err)
	}
	remove := func() error {
		_, err := w.op.RemoveBootArtefact(t.Context(), connect.NewRequest(&bcdv1.RemoveBootArtefactRequest{Kind: bcdv1.ArtefactKind_ARTEFACT_KIND_UKI, Architecture: "amd64"}))
		return err
	}
	if err := remove(); err != nil {
		t.Fatal(err)
	}
	codeOf(t, remove(), connect.CodeNotFound, "boot-image list")
	if a.sync(nil); len(a.table.GetArtefacts()) != 0 {
		t.Errorf("removed, and still in the table: %v", a.table.GetArtefacts())
	}
}

// TestSyncHoldsItsTime: with nothing new, Sync waits as long as it was asked.
func TestSyncHoldsItsTime(t *testing.T) {
	w := newWorld(t)
	a := w.appliance("box", "lab")
	a.sync(nil)
	began := time.Now()
	out := a.sync(waitMS(300))
	if waited := time.Since(began); waited < 300*time.Millisecond || out.GetTable() != nil || !slices.Contains([]bcdv1.LeaseKind{standing}, out.GetLease().GetKind()) {
		t.Errorf("after %v: %v", waited, out)
	}
	w.join("x", node)
	if out := a.sync(nil); out.GetTable() != nil {
		t.Error(fmt.Sprint("a machine without a MAC or UUID made a new table: ", out.GetTable()))
	}
}

// TestWhatHostsCanFillIsBounded: MACs that a host makes up push out the oldest,
// and boots that are long over are forgotten with their tokens.
func TestWhatHostsCanFillIsBounded(t *testing.T) {
	w := newWorld(t)
	a := w.appliance("box", "lab")
	a.sync(nil)
	for batch := range 17 {
		a.sync(func(r *bcdv1.SyncRequest) {
			for i := range 64 {
				r.Traces = append(r.Traces, &bcdv1.BootTrace{Mac: fmt.Sprintf("52:54:00:00:%02x:%02x", batch, i), StartedMs: 1})
			}
		})
		w.advance(time.Second)
	}
	raw, _ := askOf(t, nil)
	if _, err := a.bootConfig(raw); err != nil {
		t.Fatal(err)
	}
	macs, grants, err := w.g.BootsKept(t.Context(), "lab")
	if err != nil || macs != 1024 || grants != 1 {
		t.Errorf("%d MACs, %d grants, %v; want 1024 and 1", macs, grants, err)
	}
	boots := w.site("lab").GetBoots()
	if len(boots) != 256 || !strings.HasPrefix(boots[0].GetMac(), "52:54:00:00:10:") {
		t.Errorf("%d boots are listed, the first of %s; want the newest 256", len(boots), boots[0].GetMac())
	}
	for hours, want := range []int{1, 0} {
		w.advance(time.Duration(hours) * 2 * time.Hour)
		if err := w.g.ForgetGrants(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, grants, err = w.g.BootsKept(t.Context(), "lab"); err != nil || grants != want {
			t.Errorf("after %d × 2 h: %d grants, %v; want %d", hours, grants, err, want)
		}
	}
	tokens, err := w.op.ListTokens(t.Context(), connect.NewRequest(&bcdv1.ListTokensRequest{}))
	if err != nil || len(tokens.Msg.GetTokens()) != 1 {
		t.Errorf("tokens %v, %v; want the appliance's only", tokens.Msg.GetTokens(), err)
	}
}
