package deploy

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/dispatch"
	"github.com/better-compute/bcd/agent/secret"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/deploy/faultdisk"
)

// vault answers references from a map.
type vault struct {
	registry secret.Registry
	values   map[string][]byte
	given    []*secret.Value
	commands []string
}

func (v *vault) Fetch(_ context.Context, reference, commandID string) (*secret.Value, error) {
	v.commands = append(v.commands, commandID)
	b, ok := v.values[reference]
	if !ok {
		return nil, errors.New("the reference is unknown or used up")
	}
	s, err := v.registry.New(bytes.Clone(b))
	v.given = append(v.given, s)
	return s, err
}

type executorRig struct {
	*rig
	s     *server
	vault *vault
	body  *bcdv1.DeployImage
	x     *Executor
	cmd   dispatch.Command
	steps []*bcdv1.TransferProgress
}

const canary = "bcjt_id_canarycanary"

func newExecutorRig(t *testing.T, raw []byte) *executorRig {
	t.Helper()
	packed := pack(t, raw, Zstd)
	s := serve(t, packed)
	e := &executorRig{rig: newRig(t, s, faultdisk.New(28*mib, 512, 0xAA)), s: s}
	join, err := proto.Marshal(&bcdv1.JoinMaterial{ConfigToml: []byte("role = 'node'\n"), RootsPem: []byte("pem"), JoinEncryptionJwk: []byte("{}"), JoinToken: canary})
	if err != nil {
		t.Fatal(err)
	}
	e.vault = &vault{values: map[string][]byte{"join/cmd_1": join, "userdata/cmd_1": []byte("#cloud-config\n")}}
	e.body = &bcdv1.DeployImage{
		MachineId: "mach_1", ImageUrl: "/v1/blobs/sha256/ab", Format: bcdv1.ImageFormat_IMAGE_FORMAT_ZSTD,
		ImageSha256: sum(packed), RawSha256: sum(raw), ImageSize: int64(len(packed)), RawSize: int64(len(raw)),
		Disk: &bcdv1.DiskHints{Serial: "SERIAL1"}, DiskSerial: "SERIAL1",
		JoinReference: "join/cmd_1", UserDataReference: "userdata/cmd_1", BootLabel: "bcd node",
	}
	e.x, err = NewExecutor(ExecutorOptions{
		MachineID: func() string { return "mach_1" },
		Gateway:   func() (string, *http.Client, error) { return s.URL, s.Client(), nil },
		Secrets:   e.vault, StateDir: t.TempDir() + "/deploy", Deps: e.deps,
	})
	if err != nil {
		t.Fatal(err)
	}
	e.cmd = dispatch.Command{ID: "cmd_1", Kind: Kind, StillDue: func() error { return nil }}
	return e
}

func (e *executorRig) run() (dispatch.Result, error) {
	e.t.Helper()
	b, err := proto.Marshal(e.body)
	if err != nil {
		e.t.Fatal(err)
	}
	e.cmd.Body = b
	return e.x.Run(context.Background(), e.cmd, func(m proto.Message) { e.steps = append(e.steps, m.(*bcdv1.TransferProgress)) })
}

func (e *executorRig) recover() dispatch.Recovery {
	e.t.Helper()
	r, err := e.x.Recover(context.Background(), e.cmd)
	if err != nil {
		e.t.Fatal(err)
	}
	return r
}

func TestExecutor(t *testing.T) {
	raw := makeImage(t, imageSize, 512)
	e := newExecutorRig(t, raw)
	if e.x.Kind() != "deploy.image" {
		t.Errorf("kind %s", e.x.Kind())
	}
	if r := e.recover(); r.Action != dispatch.Resume {
		t.Errorf("before anything was written: %+v", r)
	}
	res, err := e.run()
	if err != nil {
		t.Fatal(err)
	}
	deployed(t, e.disk.Bytes(), raw, 512, map[string]string{"config.toml": "role = 'node'\n", "roots.pem": "pem",
		"join-encryption.jwk": "{}", "join-token": canary, "user-data": "#cloud-config\n"})
	m := res.Body.(*bcdv1.DeployImageResult)
	if res.After != dispatch.AfterReboot || m.GetBootEntry() != "Boot0000" || !bytes.Equal(m.GetReadbackSha256(), sum(raw)) || m.GetDiskSerial() != "SERIAL1" || m.GetPhaseMs()["stream"] <= 0 {
		t.Errorf("result %+v: %v", res, m)
	}
	if proto.Size(m) > 16384 || strings.Contains(m.String()+res.Message, "canary") {
		t.Errorf("result of %d bytes: %v", proto.Size(m), m)
	}
	if len(e.steps) == 0 || e.steps[len(e.steps)-1].GetPhase() != "boot" {
		t.Errorf("progress %v", e.steps)
	}
	for _, v := range e.vault.given {
		if v.Bytes() != nil {
			t.Error("a secret was not destroyed")
		}
	}
	// The agent dies before its journal has the result.
	r := e.recover()
	if r.Action != dispatch.Done || r.Result.After != dispatch.AfterReboot || !proto.Equal(r.Result.Body, m) {
		t.Errorf("recovered %+v", r)
	}
	e = newExecutorRig(t, raw)
	e.body.NoReboot = true
	if res, err := e.run(); err != nil || res.After != dispatch.AfterNothing {
		t.Errorf("no reboot: %+v %v", res, err)
	}
	if r := e.recover(); r.Result.After != dispatch.AfterNothing {
		t.Errorf("no reboot, recovered: %+v", r)
	}
}

func TestInterruptedWhileWritingIsUnknown(t *testing.T) {
	e := newExecutorRig(t, makeImage(t, imageSize, 512))
	e.disk.CutAfter = 3
	if _, err := e.run(); err == nil {
		t.Fatal("deployed without power")
	}
	if r := e.recover(); r.Action != dispatch.Unknown || !strings.Contains(r.Message, "deploy again") {
		t.Errorf("recovered %+v", r)
	}
}

func TestExecutorRefuses(t *testing.T) {
	raw := makeImage(t, imageSize, 512)
	for name, tc := range map[string]struct {
		change func(*executorRig)
		code   Code
		says   string
	}{
		"another machine": {func(e *executorRig) { e.body.MachineId = "mach_2" }, WrongMachine, `"mach_2"`},
		"no machine":      {func(e *executorRig) { e.body.MachineId = "" }, WrongMachine, "nothing was written"},
		"used-up join":    {func(e *executorRig) { e.body.JoinReference = "join/gone" }, SecretUnavailable, "used up"},
		"no user data":    {func(e *executorRig) { e.body.UserDataReference = "userdata/gone" }, SecretUnavailable, "user data"},
		"empty join":      {func(e *executorRig) { e.vault.values["join/cmd_1"] = nil }, SecretUnavailable, "no join token"},
		"broken join":     {func(e *executorRig) { e.vault.values["join/cmd_1"] = []byte{0x0a, 0xff} }, SecretUnavailable, "malformed"},
		"plain http":      {func(e *executorRig) { e.body.ImageUrl = "http://elsewhere/x?sig=canary" }, BadRequest, "must be https"},
		"no URL":          {func(e *executorRig) { e.body.ImageUrl = "" }, BadRequest, "not a URL"},
		"relative URL":    {func(e *executorRig) { e.body.ImageUrl = "blobs/x" }, BadRequest, "must be https"},
		"unknown format":  {func(e *executorRig) { e.body.Format = 99 }, BadRequest, "format 99"},
		"disk of another": {func(e *executorRig) { e.body.DiskSerial = "OTHER"; e.body.Disk = nil }, DiskMismatch, "SERIAL1"},
		"no image": {func(e *executorRig) {
			e.s.handle = func(w http.ResponseWriter, _ *http.Request, _ int) bool { w.WriteHeader(404); return true }
		}, "HTTP_404", "blob put"},
		"id like a path": {func(e *executorRig) { e.cmd.ID = "../x" }, BadRequest, "not of the form"},
		"no gateway known": {func(e *executorRig) {
			e.x.o.Gateway = func() (string, *http.Client, error) { return "", nil, errors.New("not joined") }
		}, ImageUnreachable, "not joined"},
	} {
		t.Run(name, func(t *testing.T) {
			e := newExecutorRig(t, raw)
			tc.change(e)
			_, err := e.run()
			var f *dispatch.Failure
			var typed *Error
			if !errors.As(err, &f) && !errors.As(err, &typed) {
				t.Fatalf("%T: %v", err, err)
			}
			code, message := Code(""), err.Error()
			if f != nil {
				code = Code(f.Code)
			} else {
				code = typed.Code
			}
			if code != tc.code || !strings.Contains(message, tc.says) || strings.Contains(message, "canary") {
				t.Errorf("%s: %s; want %s with %q", code, message, tc.code, tc.says)
			}
			if e.disk.Writes() != 0 || (f != nil && f.Indeterminate) {
				t.Errorf("%d writes, %+v", e.disk.Writes(), f)
			}
			for _, v := range e.vault.given {
				if v != nil && v.Bytes() != nil {
					t.Error("a secret was not destroyed")
				}
			}
		})
	}
}

func TestGatewayRedirectsStayAtHome(t *testing.T) {
	e := newExecutorRig(t, makeImage(t, imageSize, 512))
	elsewhere := serve(t, e.s.content)
	e.s.handle = func(w http.ResponseWriter, q *http.Request, _ int) bool {
		http.Redirect(w, q, elsewhere.URL+"/image?sig=canary", http.StatusFound)
		return true
	}
	_, err := e.run()
	var f *dispatch.Failure
	if !errors.As(err, &f) || !strings.Contains(f.Message, "must not go") || strings.Contains(f.Message, "canary") || elsewhere.requests != 0 {
		t.Errorf("%v", err)
	}
	// Within the gateway it is followed.
	e = newExecutorRig(t, makeImage(t, imageSize, 512))
	e.s.handle = func(w http.ResponseWriter, q *http.Request, n int) bool {
		if n == 1 {
			http.Redirect(w, q, "/other", http.StatusFound)
		}
		return n == 1
	}
	if _, err := e.run(); err != nil {
		t.Error(err)
	}
}

// The deadline passed while the image's head was fetched: not a byte is
// written, and the dispatcher learns why.
func TestDeadlineRightBeforeTheFirstWrite(t *testing.T) {
	e := newExecutorRig(t, makeImage(t, imageSize, 512))
	e.cmd.StillDue = func() error { return dispatch.ErrNotDue }
	if _, err := e.run(); !errors.Is(err, dispatch.ErrNotDue) || e.disk.Writes() != 0 {
		t.Errorf("%v after %d writes", err, e.disk.Writes())
	}
	if r := e.recover(); r.Action != dispatch.Resume {
		t.Errorf("recovered %+v", r)
	}
}

// A late failure says in what state the disk is.
func TestExecutorFailureSaysWhatIsOnTheDisk(t *testing.T) {
	e := newExecutorRig(t, makeImage(t, imageSize, 512))
	e.body.RawSha256 = make([]byte, 32)
	_, err := e.run()
	var f *dispatch.Failure
	if !errors.As(err, &f) || f.Code != string(DigestMismatch) || !strings.Contains(f.Message, "deploy again") || f.Body.(*bcdv1.DeployImageResult).GetDisk() != "/dev/vda" {
		t.Errorf("%+v", err)
	}
	noTable(t, e.disk.Bytes())
}

// A node's certificate goes to its gateway and to nobody else.
func TestLocate(t *testing.T) {
	own, other := &http.Client{Transport: &http.Transport{}}, &http.Client{Transport: http.DefaultTransport}
	x := &Executor{ExecutorOptions{External: other, Gateway: func() (string, *http.Client, error) { return "https://gw.example:7443", own, nil }}}
	for image, want := range map[string]struct {
		url    string
		client *http.Client
	}{
		"/v1/blobs/sha256/ab":                           {"https://gw.example:7443/v1/blobs/sha256/ab", own},
		"https://gw.example:7443/v1/blobs/sha256/ab":    {"https://gw.example:7443/v1/blobs/sha256/ab", own},
		"https://gw.example/v1/blobs/sha256/ab":         {"https://gw.example/v1/blobs/sha256/ab", other},
		"https://gw.example:7443.evil.example/v1/blobs": {"", nil},
		"//evil.example/v1/blobs":                       {"", nil},
		"https://images.example/x":                      {"https://images.example/x", other},
	} {
		got, client, err := x.locate(image)
		if got != want.url || (client == nil) != (want.client == nil) || client != nil && client.Transport != want.client.Transport || (err == nil) != (want.url != "") {
			t.Errorf("%s: %s, %v", image, got, err)
		}
	}
}

func FuzzJoinFiles(f *testing.F) {
	b, err := proto.Marshal(&bcdv1.JoinMaterial{ConfigToml: []byte("c"), JoinToken: "t"})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		files := map[string][]byte{}
		if err := joinFiles(b, files); err != nil {
			return
		}
		m := new(bcdv1.JoinMaterial)
		if err := proto.Unmarshal(b, m); err != nil {
			return // not UTF-8, which bytes on a disk need not be
		}
		if string(files["join-token"]) != m.GetJoinToken() || !bytes.Equal(files["config.toml"], m.GetConfigToml()) {
			t.Fatalf("%q and %v", files, m)
		}
	})
}
