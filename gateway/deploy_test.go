package gateway_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/secret"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const canary = "canary-user-data-7f3a"

// report sends an inventory with these disks, as JSON.
func (d *daemon) report(disks string) {
	d.t.Helper()
	section := func(name, content string) *bcdv1.InventorySection {
		sum := sha256.Sum256([]byte(content))
		return &bcdv1.InventorySection{Name: name, CanonicalJson: []byte(content), Sha256: sum[:]}
	}
	d.send(&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_Inventory{Inventory: &bcdv1.InventoryReport{Sections: []*bcdv1.InventorySection{
		section("block", `{"block":[`+disks+`]}`), section("system", `{"product":"R1","vendor":"ACME"}`),
	}}}})
	d.heartbeat()
}

func diskJSON(serial string, size int64) string {
	return fmt.Sprintf(`{"model":"M","serial":%q,"size_bytes":%d,"transport":"nvme","wwn":"naa.%s"}`, serial, size, serial)
}

// fetch asks for a secret as a daemon does.
func (d *daemon) fetch(reference, command string) ([]byte, error) {
	d.t.Helper()
	registry := &secret.Registry{}
	requester := &secret.Requester{
		NodeID: d.m.nodeID, Key: func() crypto.Signer { return d.m.key }, Now: d.m.w.now, Registry: registry,
		Send: func(_ context.Context, r *bcdv1.SecretRequest) error {
			d.send(&bcdv1.ClientFrame{Body: &bcdv1.ClientFrame_SecretRequest{SecretRequest: r}})
			return nil
		},
	}
	ctx, cancel := context.WithTimeout(d.t.Context(), patience)
	defer cancel()
	type result struct {
		value *secret.Value
		err   error
	}
	done := make(chan result, 1)
	go func() {
		v, err := requester.Fetch(ctx, reference, command)
		done <- result{v, err}
	}()
	answer := expect(d, "a secret answer", func(f *bcdv1.ServerFrame) (*bcdv1.SecretAnswer, bool) {
		return f.GetSecretAnswer(), f.GetSecretAnswer() != nil
	})
	if err := requester.Answer(answer); err != nil {
		d.t.Fatal(err)
	}
	r := <-done
	if r.err != nil {
		return nil, r.err
	}
	defer r.value.Destroy()
	return bytes.Clone(r.value.Bytes()), nil
}

func TestDeploy(t *testing.T) {
	w := newWorld(t)
	packed, raw := image(t, 1<<20)
	if got := w.put(w.http, "http://operator", packed); got != 201 {
		t.Fatal(got)
	}
	m := w.join("bare", ramdisk)
	d := m.connect(nil)
	d.report(diskJSON("S1", 1<<40) + `,{"serial":"CD","size_bytes":1,"removable":true},` + diskJSON("SMALL", 1<<20))
	request := &bcdv1.DeployRequest{Machine: "bare", Image: digestOf(packed), UserData: []byte(canary), IdempotencyKey: "deploy-1", Site: "fra1"}
	hints, err := proto.Marshal(&bcdv1.DiskHints{MinBytes: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	request.DiskHints = hints
	if _, err := w.op.Deploy(t.Context(), connect.NewRequest(request)); err != nil {
		t.Fatal(err)
	}
	c := d.command()
	body := new(bcdv1.DeployImage)
	if err := proto.Unmarshal(c.GetBody(), body); err != nil {
		t.Fatal(err)
	}
	rawSum := sha256.Sum256(raw)
	if body.GetMachineId() != m.machineID || body.GetDiskSerial() != "S1" || hex.EncodeToString(body.GetImageSha256()) != digestOf(packed) ||
		!bytes.Equal(body.GetRawSha256(), rawSum[:]) || body.GetRawSize() != int64(len(raw)) || body.GetImageSize() != int64(len(packed)) ||
		body.GetFormat() != bcdv1.ImageFormat_IMAGE_FORMAT_ZSTD || body.GetImageUrl() != "/v1/blobs/sha256/"+digestOf(packed) {
		t.Errorf("deploy.image %v", body)
	}
	if again, err := w.op.Deploy(t.Context(), connect.NewRequest(request)); err != nil || again.Msg.GetCommand().GetId() != c.GetId() {
		t.Errorf("the same idempotency key: %v, %v", again, err)
	}
	other := proto.CloneOf(request)
	other.IdempotencyKey = ""
	if _, err := w.op.Deploy(t.Context(), connect.NewRequest(other)); connect.CodeOf(err) != connect.CodeFailedPrecondition || !strings.Contains(err.Error(), "cancel") {
		t.Errorf("a second deploy at once: %v", err)
	}
	if got := w.machine("bare").GetMachine(); got.GetState() != "deploying" || got.GetVendor() != "ACME" {
		t.Errorf("machine %v", got)
	}
	d.accept(c.GetId())
	d.started(c.GetId())

	// Secrets: only this node, only for this command, only while it runs.
	userData, err := d.fetch(body.GetUserDataReference(), c.GetId())
	if err != nil || string(userData) != canary {
		t.Errorf("user data %q, %v", userData, err)
	}
	if _, err := d.fetch(body.GetUserDataReference(), "cmd_other"); err == nil {
		t.Error("user data for another command")
	}
	stranger := w.join("stranger", ramdisk).connect(nil)
	if _, err := stranger.fetch(body.GetJoinReference(), c.GetId()); err == nil {
		t.Error("another node got the join material")
	}
	first := d.material(body.GetJoinReference(), c.GetId())
	material := d.material(body.GetJoinReference(), c.GetId())
	if want := fmt.Sprintf("gateway_url = %q\nsite = \"fra1\"\n", w.url); !strings.HasSuffix(string(material.GetConfigToml()), want) {
		t.Errorf("config %q, want it to end with %q", material.GetConfigToml(), want)
	}
	if !bytes.Equal(material.GetRootsPem(), w.keys.Roots.PEM()) || !bytes.Equal(material.GetJoinEncryptionJwk(), w.keys.JoinJWK) {
		t.Error("the material's trust is not the gateway's")
	}
	d.outcome(c.GetId(), succeeded, "written")
	d.acked(c.GetId())
	d.close()
	if _, err := w.tryJoin(claimsOf("stranger", material.GetJoinToken(), node)); joinCode(err) != bcdv1.JoinErrorCode_JOIN_ERROR_CODE_WRONG_MACHINE {
		t.Errorf("another machine with the material: %v", err)
	}
	if _, err := w.tryJoin(claimsOf("bare", first.GetJoinToken(), node)); joinCode(err) != bcdv1.JoinErrorCode_JOIN_ERROR_CODE_TOKEN_REVOKED {
		t.Errorf("the material of the first answer: %v", err)
	}
	w.waitFor("lost", func(e *bcdv1.TimelineEntry) bool { return e.GetType() == "lost" })
	if got := w.machine("bare").GetMachine(); got.GetState() != "deployed" {
		t.Errorf("after the deploy the machine is %s: %s", got.GetState(), got.GetStateMessage())
	}
	installed, err := w.tryJoin(claimsOf("bare", material.GetJoinToken(), node))
	if err != nil || installed.machineID != m.machineID {
		t.Fatalf("the installed system: %v, %v", installed, err)
	}
	installed.connect(nil)
	if got := w.machine("bare").GetMachine(); got.GetState() != "installed" || len(got.GetNodes()) != 2 {
		t.Errorf("the machine at the end: %v", got)
	}
	if logs := w.logs.String(); strings.Contains(logs, canary) || strings.Contains(logs, material.GetJoinToken()) {
		t.Error("the log holds a secret")
	}
}

func (d *daemon) material(reference, command string) *bcdv1.JoinMaterial {
	d.t.Helper()
	value, err := d.fetch(reference, command)
	if err != nil {
		d.t.Fatal(err)
	}
	m := new(bcdv1.JoinMaterial)
	if err := proto.Unmarshal(value, m); err != nil {
		d.t.Fatal(err)
	}
	return m
}

// TestNewInstallationReplacesTheOld: what was on the disk before is not this
// machine any more.
func TestNewInstallationReplacesTheOld(t *testing.T) {
	w := newWorld(t)
	packed, _ := image(t, 1<<16)
	w.put(w.http, "http://operator", packed)
	old := w.join("m", node)
	oldSession := old.connect(nil)
	m := w.join("m", ramdisk)
	d := m.connect(nil)
	if _, err := w.op.Deploy(t.Context(), connect.NewRequest(&bcdv1.DeployRequest{Machine: "m", Image: digestOf(packed)})); err != nil {
		t.Fatal(err)
	}
	c := d.command()
	d.accept(c.GetId())
	d.heartbeat()
	material := d.material("join/"+c.GetId(), c.GetId())
	d.outcome(c.GetId(), succeeded, "")
	d.acked(c.GetId())
	fresh, err := w.tryJoin(claimsOf("m", material.GetJoinToken(), node))
	if err != nil || fresh.nodeID == old.nodeID {
		t.Fatalf("the new installation: %v, %v", fresh, err)
	}
	expect(oldSession, "Revoked", func(f *bcdv1.ServerFrame) (bool, bool) { return true, f.GetRevoked() != nil })
	again, err := w.tryJoin(claimsOf("m", material.GetJoinToken(), node))
	if err != nil || again.nodeID != fresh.nodeID {
		t.Errorf("a repeated join of the new installation: %v, %v", again, err)
	}
}

func TestDeployIsRefused(t *testing.T) {
	w := newWorld(t)
	packed, _ := image(t, 1<<16)
	w.put(w.http, "http://operator", packed)
	w.join("bare", ramdisk).connect(nil)
	w.join("installed", node).connect(nil)
	good := digestOf(packed)
	for _, test := range []struct {
		name string
		code connect.Code
		say  string
		r    *bcdv1.DeployRequest
	}{
		{"no machine", connect.CodeInvalidArgument, "needed", &bcdv1.DeployRequest{Image: good}},
		{"unknown machine", connect.CodeNotFound, "bcd-gateway machines", &bcdv1.DeployRequest{Machine: "none", Image: good}},
		{"not in the ramdisk", connect.CodeFailedPrecondition, "ramdisk", &bcdv1.DeployRequest{Machine: "installed", Image: good}},
		{"no such blob", connect.CodeNotFound, "blob put", &bcdv1.DeployRequest{Machine: "bare", Image: digestOf([]byte("none"))}},
		{"not a digest", connect.CodeInvalidArgument, "64 hex digits", &bcdv1.DeployRequest{Machine: "bare", Image: "debian13"}},
		{"URL without digest", connect.CodeInvalidArgument, "SHA-256", &bcdv1.DeployRequest{Machine: "bare", Image: "https://images/x.zst"}},
		{"file URL", connect.CodeInvalidArgument, "http", &bcdv1.DeployRequest{Machine: "bare", Image: "file:///etc/passwd"}},
		{"far deadline", connect.CodeInvalidArgument, "7 days", &bcdv1.DeployRequest{Machine: "bare", Image: good, TtlSeconds: 8 * 24 * 3600}},
		{"bad site", connect.CodeInvalidArgument, "site", &bcdv1.DeployRequest{Machine: "bare", Image: good, Site: "A B"}},
	} {
		_, err := w.op.Deploy(t.Context(), connect.NewRequest(test.r))
		if connect.CodeOf(err) != test.code || !strings.Contains(err.Error(), test.say) {
			t.Errorf("%s: %v, want %v with %q", test.name, err, test.code, test.say)
		}
	}
}

func TestSendIsRefused(t *testing.T) {
	w := newWorld(t)
	w.join("a", node).connect(nil)
	w.join("r", ramdisk)
	for _, test := range []struct {
		name string
		say  string
		r    *bcdv1.SendCommandRequest
	}{
		{"unknown kind", "diag.ping", &bcdv1.SendCommandRequest{Machine: "a", Kind: "make.coffee"}},
		{"wrong role", "is for ramdisk", &bcdv1.SendCommandRequest{Machine: "a", Kind: "deploy.image", Body: []byte("\x0a\x01x")}},
		{"body of another type", "not a bcd.v1.DiagPing", &bcdv1.SendCommandRequest{Machine: "a", Kind: "diag.ping", Body: []byte{0xff}}},
		{"unbound deploy", "use deploy", &bcdv1.SendCommandRequest{Machine: "r", Kind: "deploy.image"}},
		{"too large", "at most 1048576", &bcdv1.SendCommandRequest{Machine: "a", Kind: "diag.ping", Body: make([]byte, 1<<20+1)}},
		{"past 7 days", "7 days", &bcdv1.SendCommandRequest{Machine: "a", Kind: "diag.ping", TtlSeconds: int64((8 * 24 * time.Hour).Seconds())}},
	} {
		if _, err := w.op.SendCommand(t.Context(), connect.NewRequest(test.r)); err == nil || !strings.Contains(err.Error(), test.say) {
			t.Errorf("%s: %v, want %q", test.name, err, test.say)
		}
	}
}
