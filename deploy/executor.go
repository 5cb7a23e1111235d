package deploy

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/dispatch"
	"github.com/better-compute/bcd/agent/durable"
	"github.com/better-compute/bcd/agent/secret"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/deploy/disk"
)

// Kind is the command that an Executor runs.
const Kind = "deploy.image"

// Codes that only a command can have.
const (
	WrongMachine      Code = "WRONG_MACHINE"
	SecretUnavailable Code = "SECRET_UNAVAILABLE"
)

// Secrets fetches what a command refers to; *secret.Requester is the real one.
type Secrets interface {
	Fetch(ctx context.Context, reference, commandID string) (*secret.Value, error)
}

// ExecutorOptions say what an Executor needs beside the command.
type ExecutorOptions struct {
	// MachineID is this machine's, as its identity has it.
	MachineID func() string
	// Gateway gives the base URL of the gateway's blob store and a client
	// that it accepts, on connections of its own.
	Gateway func() (base string, client *http.Client, err error)
	// External reads images from elsewhere; nil is a plain client with the
	// system's roots.
	External *http.Client
	Secrets  Secrets
	// StateDir is on a file system that lives as long as the journal does:
	// /run/bcd/deploy in the ramdisk. A file there says that a command began
	// to write, or how it ended.
	StateDir string
	// Deps are the deployer's; Client, BeforeWrite and Progress are set here.
	Deps Deps
}

// Executor runs deploy.image.
type Executor struct{ o ExecutorOptions }

// NewExecutor checks the options and makes the state directory.
func NewExecutor(o ExecutorOptions) (*Executor, error) {
	if o.MachineID == nil || o.Gateway == nil || o.Secrets == nil || o.StateDir == "" {
		return nil, errors.New("deploy executor needs a machine id, a gateway, secrets and a state directory")
	}
	if err := os.MkdirAll(o.StateDir, 0o700); err != nil {
		return nil, fmt.Errorf("deploy state: %w", err)
	}
	return &Executor{o}, nil
}

// Kind implements dispatch.Executor.
func (*Executor) Kind() string { return Kind }

// Run implements dispatch.Executor. The machine restarts only after the
// outcome was acknowledged.
func (x *Executor) Run(ctx context.Context, cmd dispatch.Command, progress dispatch.Progress) (dispatch.Result, error) {
	body := new(bcdv1.DeployImage)
	if err := proto.Unmarshal(cmd.Body, body); err != nil {
		return dispatch.Result{}, failure(fail(BadRequest, "the body is no bcd.v1.DeployImage: %w", err), nil)
	}
	if want, have := body.GetMachineId(), x.o.MachineID(); want == "" || want != have {
		return dispatch.Result{}, failure(fail(WrongMachine, "the command is for machine %q, this is %q: nothing was written", want, have), nil)
	}
	marker, err := x.marker(cmd.ID)
	if err != nil {
		return dispatch.Result{}, err
	}
	req, deps, err := x.request(body)
	if err != nil {
		return dispatch.Result{}, failure(asError(ctx, err, Failed), nil)
	}
	seed, done, err := x.seed(ctx, body, cmd.ID)
	defer done()
	if req.Seed = seed; err != nil {
		return dispatch.Result{}, failure(asError(ctx, err, SecretUnavailable), nil)
	}
	var notDue error
	deps.BeforeWrite = func(d disk.Disk) error {
		if cmd.StillDue != nil {
			if notDue = cmd.StillDue(); notDue != nil {
				return notDue
			}
		}
		return durable.WriteFile(marker, []byte("writing to "+d.Node+"\n"), 0o600)
	}
	deps.Progress = func(p Progress) {
		eta := int64(-1)
		if p.ETA >= 0 {
			eta = int64(p.ETA / time.Second)
		}
		progress(&bcdv1.TransferProgress{Phase: string(p.Phase), BytesDone: p.Done, BytesTotal: p.Total, BytesPerSecond: p.Rate, EtaSeconds: eta})
	}
	res, err := Run(ctx, req, deps)
	message := resultMessage(res)
	if notDue != nil {
		return dispatch.Result{}, notDue
	}
	if err != nil {
		return dispatch.Result{}, failure(asError(ctx, err, Failed), message)
	}
	out := result(body, res, message)
	// Written so that a crash before the journal has the result does not make
	// a finished deployment an unknown one.
	if b, err := proto.Marshal(message); err == nil {
		if err := durable.WriteFile(marker+".done", b, 0o600); err != nil {
			message.Notes = append(message.Notes, "the result could not be kept for a restart of the agent: "+err.Error())
		}
	}
	return out, nil
}

func result(body *bcdv1.DeployImage, res Result, message *bcdv1.DeployImageResult) dispatch.Result {
	out := dispatch.Result{Body: message, After: dispatch.AfterReboot,
		Message: fmt.Sprintf("image %s written to %s and read back", shortDigest(message.GetRawSha256()), message.GetDisk())}
	if res.BootEntry != "" {
		out.Message += "; the next boot is " + res.BootEntry
	}
	if body.GetNoReboot() {
		out.After = dispatch.AfterNothing
	}
	return out
}

// Recover implements dispatch.Executor. Nothing written: the command may run.
// Finished: its result is known. Anything else is unknown, and the disk has no
// partition table or the whole image.
func (x *Executor) Recover(_ context.Context, cmd dispatch.Command) (dispatch.Recovery, error) {
	marker, err := x.marker(cmd.ID)
	if err != nil {
		return dispatch.Recovery{}, err
	}
	b, err := durable.ReadFile(marker+".done", dispatch.MaxResult)
	if err == nil {
		message, body := new(bcdv1.DeployImageResult), new(bcdv1.DeployImage)
		if err := errors.Join(proto.Unmarshal(b, message), proto.Unmarshal(cmd.Body, body)); err != nil {
			return dispatch.Recovery{}, fmt.Errorf("kept result of %s: %w", cmd.ID, err)
		}
		return dispatch.Recovery{Action: dispatch.Done, Result: result(body, Result{BootEntry: message.GetBootEntry()}, message),
			Message: "the agent restarted after the image was written and read back"}, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return dispatch.Recovery{}, err
	}
	switch _, err := os.Lstat(marker); {
	case errors.Is(err, fs.ErrNotExist):
		return dispatch.Recovery{Action: dispatch.Resume, Message: "interrupted before anything was written"}, nil
	case err != nil:
		return dispatch.Recovery{}, fmt.Errorf("deploy state: %w", err)
	}
	return dispatch.Recovery{Action: dispatch.Unknown,
		Message: "interrupted while the disk was written: it has no partition table, or the whole image; deploy again"}, nil
}

var idForm = regexp.MustCompile(`^[A-Za-z0-9_]{1,64}$`)

func (x *Executor) marker(id string) (string, error) {
	if !idForm.MatchString(id) {
		return "", fail(BadRequest, "command id %q is not of the form cmd_…", id)
	}
	return filepath.Join(x.o.StateDir, id), nil
}

// request translates the command's body.
func (x *Executor) request(body *bcdv1.DeployImage) (Request, Deps, error) {
	format, ok := map[bcdv1.ImageFormat]Format{
		bcdv1.ImageFormat_IMAGE_FORMAT_UNSPECIFIED: Unknown, bcdv1.ImageFormat_IMAGE_FORMAT_RAW: Raw,
		bcdv1.ImageFormat_IMAGE_FORMAT_ZSTD: Zstd, bcdv1.ImageFormat_IMAGE_FORMAT_GZIP: Gzip, bcdv1.ImageFormat_IMAGE_FORMAT_XZ: Xz,
	}[body.GetFormat()]
	if !ok {
		return Request{}, Deps{}, fail(BadRequest, "image format %d is unknown to this version: use raw, zstd, gzip or xz", body.GetFormat())
	}
	address, client, err := x.locate(body.GetImageUrl())
	if err != nil {
		return Request{}, Deps{}, err
	}
	deps := x.o.Deps
	deps.Client = client
	h := body.GetDisk()
	return Request{
		URL: address, Format: format,
		ImageDigest: body.GetImageSha256(), RawDigest: body.GetRawSha256(),
		ImageSize: body.GetImageSize(), RawSize: body.GetRawSize(),
		Disk: disk.Hints{
			MinBytes: h.GetMinBytes(), MaxBytes: h.GetMaxBytes(), Model: h.GetModel(), Serial: h.GetSerial(), WWN: h.GetWwn(),
			ByPath: h.GetByPath(), Rotational: h.GetRotational(), Transport: h.GetTransport(), Smallest: h.GetSmallest(), First: h.GetFirst(),
		},
		Binding: disk.Binding{Serial: body.GetDiskSerial(), WWN: body.GetDiskWwn()},
		Label:   body.GetBootLabel(), Loader: body.GetBootLoader(),
	}, deps, nil
}

// locate tells the gateway's own blobs, which need this node's certificate,
// from images elsewhere, which must never see it.
func (x *Executor) locate(image string) (string, *http.Client, error) {
	u, err := url.Parse(image)
	if err != nil || image == "" {
		return "", nil, fail(BadRequest, "image URL is not a URL: use https://HOST/PATH or a path of the gateway's blob store")
	}
	base, client, err := x.o.Gateway()
	if err != nil {
		return "", nil, fail(ImageUnreachable, "the gateway's address is not known: %w", err)
	}
	g, err := url.Parse(base)
	if err != nil || g.Host == "" {
		return "", nil, fail(ImageUnreachable, "the gateway's address is not a URL")
	}
	own := *client
	own.CheckRedirect = sameHost
	switch {
	case u.Scheme == "" && u.Host == "" && strings.HasPrefix(u.Path, "/"):
		return g.ResolveReference(u).String(), &own, nil
	case u.Scheme != "https" || u.Host == "":
		return "", nil, fail(BadRequest, "image URL %s must be https, or a path of the gateway's blob store", redact(image))
	case u.Scheme == g.Scheme && u.Host == g.Host:
		return image, &own, nil
	}
	return image, x.o.External, nil
}

// sameHost keeps a redirect of the gateway from taking the node's certificate
// elsewhere.
func sameHost(req *http.Request, via []*http.Request) error {
	if len(via) > 5 || req.URL.Host != via[0].URL.Host || req.URL.Scheme != via[0].URL.Scheme {
		return fail(ImageUnreachable, "the gateway redirects to %s, where this node's certificate must not go", redact(req.URL.String()))
	}
	return nil
}

// seed fetches join material and user data. The files are parts of the values
// themselves, never copies; done destroys them.
func (x *Executor) seed(ctx context.Context, body *bcdv1.DeployImage, id string) (files map[string][]byte, done func(), err error) {
	files = map[string][]byte{}
	var values []*secret.Value
	done = func() {
		for _, v := range values {
			v.Destroy()
		}
	}
	fetch := func(what, reference string) ([]byte, error) {
		v, err := x.o.Secrets.Fetch(ctx, reference, id)
		if err != nil {
			return nil, asError(ctx, fmt.Errorf("%s could not be fetched from the gateway: %w: nothing was written", what, err), SecretUnavailable)
		}
		values = append(values, v)
		return v.Bytes(), nil
	}
	if ref := body.GetJoinReference(); ref != "" {
		b, err := fetch("the join material", ref)
		if err == nil {
			err = joinFiles(b, files)
		}
		if err != nil {
			return nil, done, err
		}
	}
	if ref := body.GetUserDataReference(); ref != "" {
		if files["user-data"], err = fetch("the user data", ref); err != nil {
			return nil, done, err
		}
	}
	return files, done, nil
}

// joinFiles takes a bcd.v1.JoinMaterial apart by hand: the generated code
// would make a string of the token, which nobody can overwrite.
func joinFiles(b []byte, files map[string][]byte) error {
	names := map[protowire.Number]string{1: "config.toml", 2: "roots.pem", 3: "join-encryption.jwk", 4: "join-token"}
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return fail(SecretUnavailable, "the join material is malformed: nothing was written")
		}
		b = b[n:]
		name, known := names[num]
		if !known || typ != protowire.BytesType {
			if n = protowire.ConsumeFieldValue(num, typ, b); n < 0 {
				return fail(SecretUnavailable, "the join material is malformed: nothing was written")
			}
			b = b[n:]
			continue
		}
		value, n := protowire.ConsumeBytes(b)
		if n < 0 {
			return fail(SecretUnavailable, "the join material is malformed: nothing was written")
		}
		files[name] = value
		b = b[n:]
	}
	if len(files["config.toml"]) == 0 || len(files["join-token"]) == 0 {
		return fail(SecretUnavailable, "the join material has no config.toml or no join token: nothing was written")
	}
	return nil
}

// maxNoteBytes keeps a note to a sentence or two.
const maxNoteBytes = 400

func resultMessage(r Result) *bcdv1.DeployImageResult {
	m := &bcdv1.DeployImageResult{
		Disk: r.Disk.Node, DiskSerial: r.Disk.Serial, DiskWwn: r.Disk.WWN, DiskBytes: r.Disk.SizeBytes,
		RawBytes: r.RawBytes, ImageSha256: r.ImageDigest, RawSha256: r.RawDigest, ReadbackSha256: r.ReadbackDigest,
		BootEntry: r.BootEntry, EspPartitionGuid: r.ESP, PhaseMs: map[string]int64{},
	}
	for _, p := range r.Phases {
		m.PhaseMs[string(p.Phase)] += p.Duration.Milliseconds()
	}
	for _, n := range r.Notes {
		if len(n) > maxNoteBytes {
			n = n[:maxNoteBytes] + "…"
		}
		m.Notes = append(m.Notes, strings.ToValidUTF8(n, ""))
	}
	return m
}

func failure(e *Error, body *bcdv1.DeployImageResult) *dispatch.Failure {
	f := &dispatch.Failure{Code: string(e.Code), Message: e.Message, Err: e}
	if body != nil {
		f.Body = body
	}
	if e.Wrote && e.Phase != PhaseRescan && e.Phase != PhaseBoot {
		f.Message += " (the disk has no partition table now; correct it and deploy again)"
	}
	return f
}

func shortDigest(b []byte) string {
	s := Digest(b).String()
	return s[:min(12, len(s))]
}
