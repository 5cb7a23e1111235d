package gateway

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"sort"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	deployKind = "deploy.image"
	// maxUserData bounds user data; it travels as a sealed secret.
	maxUserData = 1 << 20
)

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}

// Deploy queues a deploy.image for the machine's ramdisk, with everything that
// binds it filled in: the machine, its disk where there is only one, the
// image's digests, and references to the secrets it will ask for.
func (o operatorService) Deploy(ctx context.Context, request *connect.Request[bcdv1.DeployRequest]) (*connect.Response[bcdv1.DeployResponse], error) {
	g, in := o.g, request.Msg
	ttl, err := ttlOf(in.GetTtlSeconds(), deployTTL)
	if err != nil {
		return nil, err
	}
	hints := new(bcdv1.DiskHints)
	if err := proto.Unmarshal(in.GetDiskHints(), hints); err != nil {
		return nil, invalid("the disk hints are not a bcd.v1.DiskHints: %v", err)
	}
	if site := (pki.NodeName{Role: bcdv1.Role_ROLE_NODE, Site: in.GetSite(), NodeID: "node"}); site.Check() != nil {
		return nil, invalid("deploy: %v", site.Check())
	}
	if len(in.GetUserData()) > maxUserData {
		return nil, invalid("user data of %d bytes; at most %d are allowed", len(in.GetUserData()), maxUserData)
	}
	if g.advertise == "" {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("the gateway does not know under which URL machines reach it; start it with --advertise URL"))
	}
	var c *Command
	err = g.update(ctx, func(tx Tx) error {
		m, err := findMachine(tx, in.GetMachine())
		if err != nil {
			return err
		}
		if in.GetIdempotencyKey() != "" {
			first, err := tx.CommandByKey(m.ID, in.GetIdempotencyKey())
			if err == nil && first.Kind == deployKind {
				c = first
				return nil
			}
			if err != nil && !errors.Is(err, ErrNotFound) {
				return err
			}
		}
		n, err := currentNode(tx, m)
		if err != nil {
			return err
		}
		if n.Role != bcdv1.Role_ROLE_RAMDISK {
			return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("machine %s runs its installed system; boot it into the ramdisk first, then deploy", m.Name))
		}
		if err := nothingOpen(tx, n, m); err != nil {
			return err
		}
		id := newID("cmd")
		body := &bcdv1.DeployImage{MachineId: m.ID, Disk: hints, JoinReference: joinReference + id, NoReboot: in.GetNoReboot()}
		if len(in.GetUserData()) > 0 {
			body.UserDataReference = userDataReference + id
			if err := tx.PutSecret(&Secret{Reference: body.UserDataReference, NodeID: n.ID, Value: in.GetUserData(), CreatedMS: g.now().UnixMilli()}); err != nil {
				return err
			}
		}
		if err := setImage(tx, body, in); err != nil {
			return err
		}
		if err := bindDisk(tx, body, n); err != nil {
			return err
		}
		encoded, err := proto.Marshal(body)
		if err != nil {
			return err
		}
		c, _, err = g.queue(tx, m, order{kind: deployKind, body: encoded, ttl: ttl, key: in.GetIdempotencyKey(), issuedBy: "operator", id: id})
		if err != nil {
			return err
		}
		c.UserData, c.DeploySite = body.GetUserDataReference() != "", reasonOr(in.GetSite(), n.Site)
		if err := tx.PutCommand(c); err != nil {
			return err
		}
		m.LastDeploy = c.ID
		return tx.PutMachine(m)
	})
	if err != nil {
		return nil, rpcError(err)
	}
	g.hub.wake(c.NodeID)
	info, err := g.describeCommand(c)
	return connect.NewResponse(&bcdv1.DeployResponse{Command: info}), rpcError(err)
}

// nothingOpen refuses a second deploy while the first may be writing.
func nothingOpen(tx Tx, n *Node, m *Machine) error {
	open, err := tx.OpenCommands(n.ID)
	if err != nil {
		return err
	}
	for _, c := range open {
		if c.Kind == deployKind {
			return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("machine %s has a deploy already (%s, %s); wait for it or cancel it first: bcd-gateway cancel %s", m.Name, c.ID, word(c.State), c.ID))
		}
	}
	return nil
}

// setImage says where the image is and what it must be. What the operator
// gives outright wins over what the blob store knows.
func setImage(tx Tx, body *bcdv1.DeployImage, in *bcdv1.DeployRequest) error {
	ref := in.GetImageRef()
	body.ImageSha256, body.RawSha256 = ref.GetImageSha256(), ref.GetRawSha256()
	body.ImageSize, body.RawSize = ref.GetImageSize(), ref.GetRawSize()
	for _, digest := range [][]byte{body.GetImageSha256(), body.GetRawSha256()} {
		if len(digest) != 0 && len(digest) != 32 {
			return invalid("an image digest of %d bytes; a SHA-256 has 32", len(digest))
		}
	}
	if strings.Contains(in.GetImage(), "/") {
		u, err := url.Parse(in.GetImage())
		if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil {
			return invalid("image %.200q is neither the SHA-256 of a blob nor an http or https URL without a password", in.GetImage())
		}
		if len(body.GetImageSha256()) == 0 && len(body.GetRawSha256()) == 0 {
			return invalid("an image by URL needs its SHA-256, so that the machine can tell what it wrote")
		}
		body.ImageUrl = in.GetImage()
		return nil
	}
	sum, err := hex.DecodeString(in.GetImage())
	if err != nil || len(sum) != 32 {
		return invalid("image %.80q is neither the SHA-256 of a blob (64 hex digits) nor an http or https URL", in.GetImage())
	}
	blob, err := tx.Blob(hex.EncodeToString(sum))
	if errors.Is(err, ErrNotFound) {
		return connect.NewError(connect.CodeNotFound, fmt.Errorf("image %s is not in the blob store; put it there with: bcd-gateway blob put FILE", hex.EncodeToString(sum)))
	}
	if err != nil {
		return err
	}
	body.ImageUrl = blobPath + blob.SHA256
	body.Format = blob.Format
	if len(body.GetImageSha256()) == 0 {
		body.ImageSha256 = sum
	}
	if body.GetImageSize() == 0 {
		body.ImageSize = blob.Size
	}
	if len(body.GetRawSha256()) == 0 {
		body.RawSha256 = blob.RawSHA256
	}
	if body.GetRawSize() == 0 {
		body.RawSize = blob.RawSize
	}
	return nil
}

// bindDisk names the disk in the command when the inventory leaves no choice.
// Where it does, the machine itself refuses what is ambiguous.
func bindDisk(tx Tx, body *bcdv1.DeployImage, n *Node) error {
	var inventory diskSection
	ok, err := section(tx, n, "block", &inventory)
	if err != nil || !ok {
		return err
	}
	var fit []disk
	for _, d := range inventory.Block {
		if !d.Removable && !d.ReadOnly && d.SizeBytes > 0 && hintsAllow(body.GetDisk(), d) {
			fit = append(fit, d)
		}
	}
	if len(fit) != 1 {
		return nil
	}
	// One name is enough, and the serial number is the one that both ends read
	// from the same place.
	if body.DiskSerial = fit[0].Serial; body.DiskSerial == "" {
		body.DiskWwn = fit[0].WWN
	}
	return nil
}

// hintsAllow applies the hints that the inventory can answer; see DiskHints.
func hintsAllow(h *bcdv1.DiskHints, d disk) bool {
	rotational := map[bool]string{true: "yes", false: "no"}[d.Rotational]
	switch {
	case h.GetMinBytes() > 0 && d.SizeBytes < h.GetMinBytes(),
		h.GetMaxBytes() > 0 && d.SizeBytes > h.GetMaxBytes(),
		h.GetModel() != "" && !starMatch(strings.TrimSpace(h.GetModel()), strings.TrimSpace(d.Model)),
		h.GetSerial() != "" && strings.TrimSpace(h.GetSerial()) != strings.TrimSpace(d.Serial),
		h.GetRotational() != "" && h.GetRotational() != rotational,
		h.GetTransport() != "" && !strings.EqualFold(h.GetTransport(), d.Transport):
		return false
	}
	// WWN and path have several spellings; only the machine compares them.
	return true
}

// starMatch is exact, but for '*' at either end.
func starMatch(pattern, s string) bool {
	head, tail := strings.HasPrefix(pattern, "*"), strings.HasSuffix(pattern, "*")
	inner := strings.Trim(pattern, "*")
	switch {
	case head && tail:
		return strings.Contains(s, inner)
	case head:
		return strings.HasSuffix(s, inner)
	case tail:
		return strings.HasPrefix(s, inner)
	}
	return s == pattern
}
