package qemutests

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/intent"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/gateway"
	"github.com/better-compute/bcd/gateway/boltstore"
	"github.com/better-compute/bcd/gateway/keys"
	"github.com/better-compute/bcd/image/cpio"
	"github.com/better-compute/bcd/qemu-tests/rig"
)

// TestBadDeploys sends one machine with two disks every deployment that must
// not be. The refusals are in an order in which both disks stay untouched for
// as long as possible.
func TestBadDeploys(t *testing.T) {
	w := newWorld(t)
	const diskSize = 64 << 20
	first, firstSum := w.usedDisk("first.raw", diskSize)
	second, secondSum := w.usedDisk("second.raw", diskSize)
	images, imagesCA := imageServer(t)
	strange, _ := imageServer(t)
	vm := w.ramdisk("bad-deploys", func(c *rig.Config) {
		c.MemoryMiB = 384
		c.Initrd = w.withImageRoots(c.Initrd, imagesCA)
		c.Disks = []rig.Disk{{Path: first, Serial: "FIRST"}, {Path: second, Serial: "SECOND"}}
	})
	m := w.connected(vm, "ramdisk", nil)

	image := artefact(t, "images/bcd-virtual-amd64.node.raw.zst")
	packed, err := os.ReadFile(image)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.Open(artefact(t, "images/bcd-virtual-amd64.node.raw"))
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	head := make([]byte, 4<<20)
	if _, err := io.ReadFull(raw, head); err != nil {
		t.Fatal(err)
	}
	sum := digest(t, image)
	nothing := hex.EncodeToString(make([]byte, 32))
	blobs := w.URL() + "/v1/blobs/sha256/"
	cut := w.file("cut.raw", head)
	large := w.file("large.raw.zst", tooLarge(t, 2*diskSize))
	cutPacked := w.file("cut.raw.zst", packed[:len(packed)/2])
	// A good image that is not the one above, which is cut off below: with an
	// empty skippable frame (RFC 8878 section 3.1.2) at its end.
	whole := w.file("whole.raw.zst", append(bytes.Clone(packed), 0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0))
	for _, file := range []string{image, whole} {
		if _, err := w.Run(w.ctx, "blob", "put", file); err != nil {
			t.Fatal(err)
		}
	}

	for _, c := range []struct {
		name string
		args []string
		// before changes the world for this deployment.
		before  func()
		code    string
		message []string
		// wrote says that the first disk may have been touched: it must then
		// have nothing on it that boots.
		wrote bool
	}{
		{name: "two disks that match", args: []string{image},
			code: "AMBIGUOUS_DISK", message: []string{"2 disks match the hints", "FIRST", "SECOND", "name one by serial, WWN or by-path"}},
		{name: "no disk that matches", args: []string{image, "--disk-serial", "THIRD"},
			code: "NO_DISK", message: []string{"THIRD", "FIRST"}},
		{name: "404 at the gateway", args: []string{blobs + nothing, "--image-sha256", nothing, "--disk-serial", "FIRST"},
			code: "HTTP_404", message: []string{blobs + nothing, "the image is not there: upload it (bcd-gateway blob put) or correct the URL"}},
		{name: "404 elsewhere", args: []string{images + "/image.raw", "--image-sha256", nothing, "--disk-serial", "FIRST"},
			code: "HTTP_404", message: []string{images + "/image.raw answers 404", "correct the URL"}},
		{name: "untrusted image server", args: []string{strange + "/image.raw", "--image-sha256", nothing, "--disk-serial", "FIRST"},
			code: "UNTRUSTED_SERVER", message: []string{strange + "/image.raw", "its certificate is not trusted here", "image-roots.pem"}},
		{name: "image cut off before it was uploaded", args: []string{cut, "--disk-serial", "FIRST"},
			code: "SIZE_MISMATCH", message: []string{"4194304 bytes", "the image was cut off before it was uploaded"}},
		{name: "image larger than the disk", args: []string{large, "--disk-serial", "FIRST"},
			code: "IMAGE_TOO_LARGE", message: []string{"134217728 bytes", "67108864", "choose a larger disk or build a smaller image"}},
		{name: "image shorter than the command says", args: []string{sum, "--disk-serial", "FIRST"},
			before: func() {
				if err := os.Truncate(filepath.Join(w.Data, "blobs", sum[:2], sum), int64(len(packed)/2)); err != nil {
					t.Fatal(err)
				}
			},
			code: "SIZE_MISMATCH", message: []string{"the command says"}},
		{name: "packed image cut off", args: []string{cutPacked, "--disk-serial", "FIRST"},
			code: "SHORT_BODY", message: []string{"the image ends in the middle of its zstd data: it was cut off before it was served; upload it again"}, wrote: true},
		{name: "wrong digest", args: []string{blobs + digest(t, whole), "--image-sha256", nothing, "--disk-serial", "FIRST"},
			code: "DIGEST_MISMATCH", message: []string{"the command says " + nothing, "it is damaged or another image; nothing bootable is left on the disk"}, wrote: true},
	} {
		t.Run(strings.ReplaceAll(c.name, " ", "-"), func(t *testing.T) {
			if c.before != nil {
				c.before()
			}
			outer := w.t
			w.t = t
			defer func() { w.t = outer }()
			args := append([]string{"deploy", m.ID}, c.args...)
			deploy := w.ended(vm, w.send(args...).ID)
			if deploy.Outcome.Status != "failed" || deploy.Outcome.Code != c.code {
				t.Errorf("outcome %+v, want %s", deploy.Outcome, c.code)
			}
			for _, text := range c.message {
				if !strings.Contains(deploy.Outcome.Message, text) {
					t.Errorf("message %q has no %q", deploy.Outcome.Message, text)
				}
			}
			told := deploy.Outcome.Message
			if !strings.Contains(w.timeline(), told) {
				t.Errorf("the machine's history has no %q", told)
			}
			if err := vm.WaitConsole(w.ctx, c.message[0]); err != nil {
				t.Error(err)
			}
			t.Log(told)
			if got := digest(t, second); got != secondSum {
				t.Error("the second disk was written to")
			}
			if !c.wrote {
				if got := digest(t, first); got != firstSum {
					t.Error("the first disk was written to")
				}
				return
			}
			w.notBootable(first)
			firstSum = digest(t, first)
		})
	}
}

// notBootable checks that a disk has neither an MBR nor a GPT, at its start or
// its end.
func (w *world) notBootable(path string) {
	w.t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		w.t.Fatal(err)
	}
	if b[510] == 0x55 && b[511] == 0xaa || bytes.Contains(b[:1<<20], []byte("EFI PART")) || bytes.Contains(b[len(b)-1<<20:], []byte("EFI PART")) {
		w.t.Errorf("%s has a partition table after a deployment that failed", path)
	}
}

func (w *world) file(name string, content []byte) string {
	w.t.Helper()
	path := filepath.Join(w.dir, name)
	if err := os.WriteFile(path, content, 0o600); err != nil {
		w.t.Fatal(err)
	}
	return path
}

// tooLarge is a packed disk image of size bytes that are zero but for the mark
// of a boot sector.
func tooLarge(t *testing.T, size int) []byte {
	t.Helper()
	var out bytes.Buffer
	z, err := zstd.NewWriter(&out)
	if err != nil {
		t.Fatal(err)
	}
	block := make([]byte, 1<<20)
	block[510], block[511] = 0x55, 0xaa
	for range size / len(block) {
		if _, err := z.Write(block); err != nil {
			t.Fatal(err)
		}
		block[510], block[511] = 0, 0
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// imageServer is an https server without any image, and its authority. It is
// the operator's own, beside the gateway.
func imageServer(t *testing.T) (url string, authority []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "images"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), IPAddresses: []net.IP{net.ParseIP(rig.HostAddress)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	t.Cleanup(server.Close)
	_, port, err := net.SplitHostPort(server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return "https://" + net.JoinHostPort(rig.HostAddress, port), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// withImageRoots is an initramfs as mkimage makes it from a trust folder that
// has image-roots.pem: the kernel unpacks one archive after the other.
func (w *world) withImageRoots(initrd string, authority []byte) string {
	w.t.Helper()
	whole, err := os.ReadFile(initrd)
	if err != nil {
		w.t.Fatal(err)
	}
	more, err := cpio.Marshal([]cpio.Entry{
		cpio.Dir("etc", 0o755), cpio.Dir("etc/bcd", 0o755), cpio.Dir("etc/bcd/trust", 0o755),
		cpio.File("etc/bcd/trust/image-roots.pem", 0o644, authority),
	}, 1)
	if err != nil {
		w.t.Fatal(err)
	}
	for len(whole)%4 != 0 { // an archive begins at a multiple of 4
		whole = append(whole, 0)
	}
	return w.file("initramfs", append(whole, more...))
}

// TestForgedCommands gives a real gateway commands that it would never have
// made, and shows that the machine runs none of them.
func TestForgedCommands(t *testing.T) {
	w := newWorld(t)
	vm := w.ramdisk("forged", func(c *rig.Config) { c.MemoryMiB = 320 })
	m := w.connected(vm, "ramdisk", nil)

	ours, err := keys.Load(artefact(t, "keys"))
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := keys.Init(filepath.Join(t.TempDir(), "keys"), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	forged := []struct {
		id, node  string
		sign      func(*bcdv1.Command) (*bcdv1.Signed, error)
		rejection string
		// console is what the machine says.
		console string
	}{
		{"cmd_unsigned", m.Current.ID, func(c *bcdv1.Command) (*bcdv1.Signed, error) {
			payload, err := proto.Marshal(c)
			return &bcdv1.Signed{Payload: payload, PayloadType: intent.TypeCommand}, err
		}, "unauthentic", "cmd_unsigned"},
		{"cmd_otherroot", m.Current.ID, func(c *bcdv1.Command) (*bcdv1.Signed, error) {
			return theirs.Signer.Sign(intent.TypeCommand, c)
		}, "unauthentic", "cmd_otherroot"},
		{"cmd_othernode", "node_other", func(c *bcdv1.Command) (*bcdv1.Signed, error) {
			return ours.Signer.Sign(intent.TypeCommand, c)
		}, "wrong node", "the command is for node node_other, this is " + m.Current.ID},
		{"cmd_changed", m.Current.ID, func(c *bcdv1.Command) (*bcdv1.Signed, error) {
			other := proto.CloneOf(c)
			other.IssuedBy = "somebody else"
			signed, err := ours.Signer.Sign(intent.TypeCommand, other)
			if err == nil {
				signed.Payload, err = proto.Marshal(c)
			}
			return signed, err
		}, "unauthentic", "cmd_changed"},
	}
	w.Stop()
	store, err := boltstore.Open(filepath.Join(w.Data, "state.db"))
	if err != nil {
		t.Fatal(err)
	}
	err = store.Update(w.ctx, func(tx gateway.Tx) error {
		now := time.Now()
		for _, f := range forged {
			signed, err := f.sign(&bcdv1.Command{
				Id: f.id, Kind: "node.reboot", NodeId: f.node, IdempotencyKey: f.id, IssuedBy: "operator",
				IssuedMs: now.UnixMilli(), DeadlineMs: now.Add(time.Hour).UnixMilli(),
			})
			if err != nil {
				return err
			}
			raw, err := proto.Marshal(signed)
			if err != nil {
				return err
			}
			err = tx.PutCommand(&gateway.Command{
				ID: f.id, NodeID: m.Current.ID, MachineID: m.ID, Kind: "node.reboot", Lane: bcdv1.Lane_LANE_CONTROL, Signed: raw,
				State: bcdv1.CommandState_COMMAND_STATE_QUEUED, QueuedMS: now.UnixMilli(), DeadlineMS: now.Add(time.Hour).UnixMilli(),
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	if err := w.Start(w.ctx); err != nil {
		t.Fatal(err)
	}
	for _, f := range forged {
		c := w.ended(vm, f.id)
		if c.Outcome.Status != "rejected" {
			t.Errorf("%s: %+v", f.id, c.Outcome)
		}
		line := lineWith(w.timeline(), "node.reboot rejected ("+f.rejection+"): "+c.Outcome.Message)
		if line == "" {
			t.Errorf("%s: the machine's history has no line for %q:\n%s", f.id, c.Outcome.Message, w.timeline())
		}
		if err := vm.WaitConsole(w.ctx, f.console); err != nil {
			t.Error(err)
		}
		t.Logf("%s: %s", f.id, c.Outcome.Message)
	}
	if ping := w.ended(vm, w.send("send", "diag.ping", m.ID).ID); ping.Outcome.Status != "succeeded" {
		t.Errorf("diag.ping afterwards: %+v", ping.Outcome)
	}
	after, err := w.only(context.WithoutCancel(w.ctx))
	if err != nil || after.Current.BootID != m.Current.BootID {
		t.Errorf("the machine restarted (%v)", err)
	}
}
