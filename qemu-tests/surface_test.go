package qemutests

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/better-compute/bcd/qemu-tests/rig"
)

// maxBundle bounds what a test unpacks.
const maxBundle = 256 << 20

// bundle is a machine's log bundle, file by file, and all of it in one.
type bundle struct {
	files map[string]string
	all   []byte
}

// collect has a machine make its log bundle and fetches it.
func (w *world) collect(vm *rig.VM, machine string) *bundle {
	w.t.Helper()
	c := w.ended(vm, w.send("send", "logs.collect", machine).ID)
	sum, _ := c.Outcome.Result["blob_sha256"].(string)
	if c.Outcome.Status != "succeeded" || sum == "" {
		w.t.Fatalf("logs.collect: %+v", c.Outcome)
	}
	packed, err := w.Run(w.ctx, "blob", "get", sum)
	if err != nil {
		w.t.Fatal(err)
	}
	z, err := zstd.NewReader(bytes.NewReader(packed), zstd.WithDecoderMaxMemory(maxBundle))
	if err != nil {
		w.t.Fatal(err)
	}
	defer z.Close()
	b := &bundle{files: map[string]string{}}
	if b.all, err = io.ReadAll(io.LimitReader(z, maxBundle)); err != nil {
		w.t.Fatal(err)
	}
	for r := tar.NewReader(bytes.NewReader(b.all)); ; {
		h, err := r.Next()
		if err == io.EOF {
			return b
		}
		if err != nil {
			w.t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			w.t.Fatal(err)
		}
		b.files[h.Name] = string(content)
	}
}

// socket is something that may wait on a machine for others to speak first, and
// why.
type socket struct{ line, why string }

const statusSocket = "the status socket"

// bcdSockets is what bcd itself may have anywhere. Of these only what receives
// LLDP can be reached over the network, and it answers nobody.
var bcdSockets = []socket{
	{`^unix /run/bcd/bcd\.sock mode 0600 in 0700$`, statusSocket},
	{`^unix /run/bcd/\.sock-\d+/s$`, "the same, by the name under which it was made"},
	{`^packet protocol 0x88[cC][cC] interface \d+$`, "LLDP, listening only (IEEE 802.1AB)"},
	{`^udp 10\.0\.2\.\d+:68$`, "a DHCP client's renewal (RFC 2131 section 4.4.5)"},
}

// ramdiskSockets is what a machine may have that bcd is init of.
var ramdiskSockets = slices.Concat(bcdSockets, []socket{
	{`^unix @\S*$`, "between init and supervisor, by descriptors and credentials"},
	{`^packet protocol 0x0800 interface \d+$`, "DHCP, before the machine has an address (RFC 2131 section 4.1)"},
})

// nodeSockets is what a machine may have that systemd is init of. None of it
// serves anybody on the network.
var nodeSockets = slices.Concat(bcdSockets, []socket{
	{`^unix /run/(systemd|dbus|udev)/`, "systemd's own and D-Bus, for this machine's processes"},
	{`^unix @`, "abstract, for this machine's processes"},
	{`^udp6 \[?fe80:[0-9a-f:]+(%\w+)?\]?:546$`, "networkd's DHCPv6 (RFC 8415 section 7.2)"},
	{`^raw6 .*58`, "networkd's router discovery (RFC 4861 section 6.3)"},
})

// checkSockets compares what waits on a machine with the list.
func checkSockets(t *testing.T, role string, b *bundle, allowed []socket) {
	t.Helper()
	sockets, ok := b.files["sockets.txt"]
	if !ok || !strings.Contains(b.files["bundle.json"], `"sockets.txt"`) {
		t.Fatalf("the bundle has no sockets.txt: %v", keysOf(b.files))
	}
	status := false
	for line := range strings.Lines(sockets) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "#") {
			continue
		}
		known := ""
		for _, a := range allowed {
			if regexp.MustCompile(a.line).MatchString(line) {
				known = a.why
				break
			}
		}
		if known == "" {
			t.Errorf("%s: nobody knows why this waits: %s", role, line)
		}
		if strings.HasPrefix(line, "tcp") {
			t.Errorf("%s: a TCP listener: %s", role, line)
		}
		status = status || known == statusSocket
	}
	if !status {
		t.Errorf("%s: the status socket is not in\n%s", role, sockets)
	}
	t.Logf("%s: %s", role, strings.ReplaceAll(strings.TrimSpace(sockets), "\n", "; "))
}

func keysOf(m map[string]string) string {
	var names []string
	for name := range m {
		names = append(names, name)
	}
	return fmt.Sprint(names)
}
