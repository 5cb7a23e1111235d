// Package matrix boots machines from a network, firmware by firmware. The LAN
// is rig's; these tests take minutes each and are run by `make
// test-boot-matrix` beside, not in, `make test`.
//
// Here the LAN's servers are not ours, to show that LAN, firmware and image
// fit together: a fault in a test with our servers is then ours.
package matrix

import (
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/better-compute/bcd/qemu-tests/rig"
)

const (
	serverIP = "10.77.0.1"
	// linux is what the kernel says first: the firmware started the UKI.
	linux = "Linux version"
	// loss is the probability for a frame at the machine's port. A boot by
	// TFTP is some 30,000 frames; each lost one costs about two seconds, in
	// which the machine says nothing. The switch's seed makes it six of them.
	loss = 0.0002
)

// artefact gives the path of something that `make images` made.
func artefact(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("BCD_BUILD")
	if dir == "" {
		dir = "../../build"
	}
	path, err := filepath.Abs(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: run make images first", err)
	}
	return path
}

// customer is somebody else's network: a switch and a DHCP server.
type customer struct {
	dir    string
	lan    *rig.LAN
	server *rig.Namespace
}

func newCustomer(t *testing.T, options ...string) *customer {
	t.Helper()
	c := &customer{dir: rig.Folder(t), server: rig.RunNamespace(t)}
	c.lan = rig.RunLAN(t, c.dir, 1)
	if _, err := c.lan.Join(c.server, "lan0", serverIP+"/24"); err != nil {
		t.Fatal(err)
	}
	rig.RunDHCP(t, c.server, c.dir, append([]string{"--interface=lan0", "--dhcp-range=10.77.0.100,10.77.0.200,1h"}, options...)...)
	return c
}

// machine boots from the LAN. It has no gateway: it is enough that it starts.
func (c *customer) machine(t *testing.T, config rig.Config) (*rig.VM, *rig.Port) {
	t.Helper()
	port, err := c.lan.Port(config.Name)
	if err != nil {
		t.Fatal(err)
	}
	config.NICs = []rig.NIC{{Socket: port.Socket(), BootIndex: 1}}
	return rig.Run(t, c.dir, config), port
}

func awaitConsole(t *testing.T, vm *rig.VM, text string) {
	t.Helper()
	if err := vm.WaitConsole(rig.Context(t), text); err != nil {
		t.Fatal(err)
	}
}

// serve gives files by HTTP, by their paths, and an iPXE script.
func (c *customer) serve(t *testing.T, files map[string]string, script string) {
	t.Helper()
	var listen net.Listener
	if err := c.server.Do(func() (err error) { listen, err = net.Listen("tcp", serverIP+":80"); return err }); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	for path, name := range files {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/efi")
			http.ServeFile(w, r, name)
		})
	}
	mux.HandleFunc("/boot.ipxe", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, script) })
	server := &http.Server{Handler: mux}
	go server.Serve(listen)
	t.Cleanup(func() { server.Close() })
}

// tftp has dnsmasq serve one file as the boot file.
func tftp(file string) []string {
	return []string{"--enable-tftp", "--tftp-root=" + filepath.Dir(file), "--dhcp-boot=" + filepath.Base(file)}
}

// TestUEFIBootsByTFTP boots the UKI over a cable that loses frames.
func TestUEFIBootsByTFTP(t *testing.T) {
	c := newCustomer(t, tftp(artefact(t, "images/bcd-virtual-amd64.uki.efi"))...)
	port, err := c.lan.Port("machine")
	if err != nil {
		t.Fatal(err)
	}
	port.SetFaults(rig.Faults{Loss: loss})
	vm := rig.Run(t, c.dir, rig.Config{Name: "machine", NetworkBoot: rig.PXE, NICs: []rig.NIC{{Socket: port.Socket(), BootIndex: 1}}})
	awaitConsole(t, vm, linux)
	if n := port.Counts(); n.Lost == 0 {
		t.Errorf("nothing was lost: %+v", n)
	}
}

// TestUEFIBootsByHTTP boots the UKI by UEFI HTTP boot.
func TestUEFIBootsByHTTP(t *testing.T) {
	const uki = "images/bcd-virtual-amd64.uki.efi"
	c := newCustomer(t, "--dhcp-vendorclass=set:http,HTTPClient", "--dhcp-option-force=tag:http,60,HTTPClient", "--dhcp-boot=tag:http,http://"+serverIP+"/uki.efi")
	c.serve(t, map[string]string{"/uki.efi": artefact(t, uki)}, "")
	vm, _ := c.machine(t, rig.Config{Name: "machine", NetworkBoot: rig.HTTPBoot})
	awaitConsole(t, vm, linux)
}

// TestBIOSBootsAScript boots kernel and initramfs by the iPXE in a card's ROM.
func TestBIOSBootsAScript(t *testing.T) {
	c := newCustomer(t, "--dhcp-boot=http://"+serverIP+"/boot.ipxe")
	c.serve(t, map[string]string{
		"/kernel":    artefact(t, "images/bcd-virtual-amd64.vmlinuz"),
		"/initramfs": artefact(t, "images/bcd-virtual-amd64.initramfs"),
	}, "#!ipxe\nkernel http://"+serverIP+"/kernel initrd=initramfs console=ttyS0,115200\ninitrd http://"+serverIP+"/initramfs\nboot\n")
	vm, _ := c.machine(t, rig.Config{Name: "machine", Firmware: rig.BIOS})
	awaitConsole(t, vm, linux)
}

// TestSecureBoot boots the UKI when it is signed with a key that the firmware
// trusts. One changed byte, or no signature, and the firmware refuses it.
func TestSecureBoot(t *testing.T) {
	dir := t.TempDir()
	key, signed := filepath.Join(dir, "key.pem"), filepath.Join(dir, "signed.efi")
	image := artefact(t, "images/bcd-virtual-amd64.uki.efi")
	for _, c := range [][]string{
		{"openssl", "pkey", "-in", rig.SnakeoilKey, "-passin", "pass:snakeoil", "-out", key},
		{"sbsign", "--key", key, "--cert", rig.SnakeoilCertificate, "--output", signed, image},
	} {
		if out, err := exec.Command(c[0], c[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", c[0], err, out)
		}
	}
	good, err := os.ReadFile(signed)
	if err != nil {
		t.Fatal(err)
	}
	changed := filepath.Join(dir, "changed.efi")
	good[len(good)/2] ^= 1
	if err := os.WriteFile(changed, good, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, file, says string }{
		{"signed", signed, linux},
		{"changed", changed, "Access Denied"},
		{"unsigned", image, "Access Denied"},
	} {
		t.Run(c.name, func(t *testing.T) {
			network := newCustomer(t, tftp(c.file)...)
			vm, _ := network.machine(t, rig.Config{Name: c.name, Firmware: rig.SecureBoot, NetworkBoot: rig.PXE})
			awaitConsole(t, vm, c.says)
		})
	}
}
