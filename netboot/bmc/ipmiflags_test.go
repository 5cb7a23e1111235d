package bmc

import (
	"context"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/bougou/go-ipmi/pkg/bmc"
	"github.com/bougou/go-ipmi/pkg/clock"
	"github.com/bougou/go-ipmi/pkg/hal/mock"
	"github.com/bougou/go-ipmi/pkg/server"
	"github.com/bougou/go-ipmi/pkg/transport/udp"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// TestIPMIBootFlags: ipmi_sim keeps no more of the boot flags than the device,
// so here is a BMC that keeps them whole, and ipmitool tells what is in them.
func TestIPMIBootFlags(t *testing.T) {
	b := bmc.New(bmc.DeviceInfo{DeviceID: 32, IPMIVersion: 0x20}, [16]byte{1}, mock.New(), bmc.WithClock(clock.Real))
	account, err := b.Users.Add(2, user)
	if err != nil {
		t.Fatal(err)
	}
	account.SetPassword([]byte(simPassword))
	account.Enabled = true
	account.ChannelAccess[1] = bmc.UserChannelAccess{MaxPrivilege: bmc.PrivilegeLevelAdministrator, Enabled: true}
	conn, err := udp.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	srv := server.NewServer(b, conn)
	go func() { _ = srv.Serve(context.Background()); close(served) }()
	t.Cleanup(func() { srv.Close(); <-served })
	address := netip.MustParseAddrPort(conn.LocalAddr().String())
	tool := func(args ...string) string {
		t.Helper()
		c := exec.Command("ipmitool", append([]string{"-I", "lanplus", "-C", "17", "-H", "127.0.0.1", "-p", strings.Split(address.String(), ":")[1], "-U", user, "-E"}, args...)...)
		c.Env = []string{"IPMI_PASSWORD=" + simPassword, "PATH=/usr/bin:/bin"}
		out, err := c.CombinedOutput()
		if err != nil {
			t.Errorf("ipmitool %q: %v: %s", args, err, out)
		}
		return string(out)
	}
	w, target := ipmiWorld(t, address.String())
	for _, c := range []struct {
		body *bcdv1.BmcBootDevice
		data string
	}{
		// Valid and EFI, for the next boot only; then the device (IPMI 2.0
		// table 28-14, parameter 5).
		{&bcdv1.BmcBootDevice{Source: pxe}, "a004000000"},
		{&bcdv1.BmcBootDevice{Source: disk}, "a008000000"},
		{&bcdv1.BmcBootDevice{Source: pxe, Legacy: true}, "8004000000"},
		{&bcdv1.BmcBootDevice{Source: none}, "8000000000"},
	} {
		c.body.Target = target
		result, failure := w.run(BootDeviceKind, c.body)
		if failure != nil {
			t.Fatal(failure)
		}
		if out := tool("chassis", "bootparam", "get", "5"); !strings.Contains(out, "data: "+c.data) {
			t.Errorf("%s: ipmitool reads %s", word(c.body.GetSource()), out)
		}
		if notes := strings.Join(result.Body.(*bcdv1.BmcBootDeviceResult).GetNotes(), " "); strings.Contains(notes, "asked for") || strings.Contains(notes, "valid") {
			t.Errorf("notes %q", notes)
		}
	}
	tool("chassis", "bootdev", "pxe", "options=efiboot")
	if result, failure := w.run(BootDeviceKind, &bcdv1.BmcBootDevice{Target: target, Source: pxe}); failure != nil || result.Body.(*bcdv1.BmcBootDeviceResult).GetChanged() {
		t.Errorf("ipmitool set it, and it is set again: %v, %v", result, failure)
	}
}
