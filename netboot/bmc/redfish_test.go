package bmc

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/bcd/agent/dispatch"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/netboot/bmc/redfishtest"
)

const (
	actStatus   = bcdv1.BmcPowerAction_BMC_POWER_ACTION_STATUS
	actOn       = bcdv1.BmcPowerAction_BMC_POWER_ACTION_ON
	actOff      = bcdv1.BmcPowerAction_BMC_POWER_ACTION_OFF
	actGraceful = bcdv1.BmcPowerAction_BMC_POWER_ACTION_GRACEFUL_OFF
	actCycle    = bcdv1.BmcPowerAction_BMC_POWER_ACTION_CYCLE
	actReset    = bcdv1.BmcPowerAction_BMC_POWER_ACTION_RESET
)

func TestRedfishPower(t *testing.T) {
	noCycle := redfishtest.Quirks{ResetTypes: []string{"ForceOn", "ForceOff"}}
	for _, c := range []struct {
		name   string
		quirks redfishtest.Quirks
		isOn   bool
		action bcdv1.BmcPowerAction
		asked  []string
		after  bcdv1.BmcPowerState
		code   string
	}{
		{name: "status", isOn: true, action: actStatus, after: on},
		{name: "on", action: actOn, asked: []string{"On"}, after: on},
		{name: "on already", isOn: true, action: actOn, after: on},
		{name: "off", isOn: true, action: actOff, asked: []string{"ForceOff"}, after: off},
		{name: "off already", action: actOff, after: off},
		{name: "graceful", isOn: true, action: actGraceful, asked: []string{"GracefulShutdown"}, after: off},
		{name: "cycle", isOn: true, action: actCycle, asked: []string{"PowerCycle"}, after: on},
		{name: "cycle of one that is off", action: actCycle, asked: []string{"On"}, after: on},
		{name: "cycle without a cycle", quirks: noCycle, isOn: true, action: actCycle, asked: []string{"ForceOff", "ForceOn"}, after: on},
		{name: "reset", isOn: true, action: actReset, asked: []string{"ForceRestart"}, after: on},
		{name: "reset of one that is off", action: actReset, code: "NOT_ON"},
		{name: "no such reset", quirks: noCycle, isOn: true, action: actReset, code: "UNSUPPORTED"},
		{name: "ActionInfo", quirks: redfishtest.Quirks{ResetTypes: []string{"ForceOn"}, ResetTypesInActionInfo: true}, action: actOn, asked: []string{"ForceOn"}, after: on},
		{name: "basic authentication", quirks: redfishtest.Quirks{NoSessions: true}, action: actOn, asked: []string{"On"}, after: on},
		{name: "unknown action", action: 99, code: "MALFORMED"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := &machineUnderTest{isOn: c.isOn}
			w, _, target := redfishWorld(t, c.quirks, m)
			r, failure := w.power(target, c.action)
			if !slices.Equal(m.resets, c.asked) {
				t.Errorf("asked %q, want %q", m.resets, c.asked)
			}
			if c.code != "" {
				wantCode(t, failure, c.code)
				return
			}
			if failure != nil {
				t.Fatal(failure)
			}
			if r.GetAfter() != c.after || r.GetChanged() != (c.asked != nil) || r.GetProtocol() != bcdv1.BmcProtocol_BMC_PROTOCOL_REDFISH {
				t.Errorf("%v, want %v after", r, c.after)
			}
		})
	}
}

// TestLostAnswer: an effect whose answer is lost is looked for, and never asked
// for again.
func TestLostAnswer(t *testing.T) {
	t.Run("on shows", func(t *testing.T) {
		m := &machineUnderTest{}
		w, _, target := redfishWorld(t, redfishtest.Quirks{LoseAnswer: true}, m)
		r, failure := w.power(target, actOn)
		if failure != nil || !r.GetChanged() || len(r.GetNotes()) != 1 || len(m.resets) != 1 {
			t.Errorf("%v, %v after the resets %q", r, failure, m.resets)
		}
	})
	t.Run("a reset does not", func(t *testing.T) {
		m := &machineUnderTest{isOn: true}
		w, _, target := redfishWorld(t, redfishtest.Quirks{LoseAnswer: true}, m)
		_, failure := w.power(target, actReset)
		if wantCode(t, failure, "NO_ANSWER", "unknown"); !failure.Indeterminate || len(m.resets) != 1 {
			t.Errorf("indeterminate %v after the resets %q", failure.Indeterminate, m.resets)
		}
	})
	t.Run("a machine that stays off", func(t *testing.T) {
		m := &machineUnderTest{stuck: true}
		w, _, target := redfishWorld(t, redfishtest.Quirks{}, m)
		_, failure := w.power(target, actOn)
		if wantCode(t, failure, "NOT_SEEN", "off"); !failure.Indeterminate || len(m.resets) != 1 {
			t.Errorf("indeterminate %v after the resets %q", failure.Indeterminate, m.resets)
		}
	})
	t.Run("a refusal is certain", func(t *testing.T) {
		m := &machineUnderTest{refuse: errors.New("the chassis is open")}
		w, _, target := redfishWorld(t, redfishtest.Quirks{}, m)
		_, failure := w.power(target, actOn)
		if wantCode(t, failure, "REFUSED", "the chassis is open"); failure.Indeterminate {
			t.Error("a refusal is indeterminate")
		}
	})
}

// TestInterrupted: a run that another process began looks, and asks for
// nothing.
func TestInterrupted(t *testing.T) {
	for _, c := range []struct {
		name    string
		isOn    bool
		action  bcdv1.BmcPowerAction
		recover dispatch.RecoveryAction
		code    string
	}{
		{"on, and it is", true, actOn, dispatch.Resume, ""},
		{"on, and it is not", false, actOn, dispatch.Resume, "INTERRUPTED"},
		{"off, and it is not", true, actOff, dispatch.Resume, "INTERRUPTED"},
		{"status", true, actStatus, dispatch.Resume, ""},
		{"cycle", true, actCycle, dispatch.Unknown, ""},
		{"reset", true, actReset, dispatch.Unknown, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := &machineUnderTest{isOn: c.isOn}
			w, _, target := redfishWorld(t, redfishtest.Quirks{}, m)
			body := &bcdv1.BmcPower{Target: target, Action: c.action}
			recovery, err := w.executors[PowerKind].Recover(t.Context(), w.command(PowerKind, body))
			if err != nil || recovery.Action != c.recover {
				t.Fatalf("%v, %v; want %v", recovery, err, c.recover)
			}
			if c.recover == dispatch.Unknown {
				return
			}
			_, failure := w.power(target, c.action)
			if len(m.resets) != 0 {
				t.Errorf("asked again: %q", m.resets)
			}
			if c.code == "" {
				if failure != nil {
					t.Error(failure)
				}
				return
			}
			if wantCode(t, failure, c.code); !failure.Indeterminate {
				t.Error("not indeterminate")
			}
		})
	}
}

func TestNotDueAsksNothing(t *testing.T) {
	m := &machineUnderTest{}
	w, b, target := redfishWorld(t, redfishtest.Quirks{}, m)
	w.due = fmt.Errorf("%w: too late", dispatch.ErrNotDue)
	_, failure := w.power(target, actOn)
	if failure == nil || !errors.Is(failure, dispatch.ErrNotDue) || len(m.resets) != 0 {
		t.Errorf("%v after the resets %q", failure, m.resets)
	}
	if _, failure := w.run(BootDeviceKind, &bcdv1.BmcBootDevice{Target: target, Source: pxe}); failure == nil || !errors.Is(failure, dispatch.ErrNotDue) || len(b.Patches()) != 0 {
		t.Errorf("%v after the patches %q", failure, b.Patches())
	}
}

const (
	none    = bcdv1.BmcBootSource_BMC_BOOT_SOURCE_NONE
	pxe     = bcdv1.BmcBootSource_BMC_BOOT_SOURCE_PXE
	uefi    = bcdv1.BmcBootSource_BMC_BOOT_SOURCE_HTTP
	disk    = bcdv1.BmcBootSource_BMC_BOOT_SOURCE_DISK
	bootURI = "http://10.0.0.1/uki.efi"
)

func TestRedfishBootDevice(t *testing.T) {
	dellQuirks := redfishtest.Quirks{Vendor: "Dell Inc.", NoRepeats: true, HTTPDev1URI: true}
	for _, c := range []struct {
		name    string
		quirks  redfishtest.Quirks
		body    *bcdv1.BmcBootDevice
		want    redfishtest.Boot
		patches int
	}{
		{"pxe", redfishtest.Quirks{}, &bcdv1.BmcBootDevice{Source: pxe}, redfishtest.Boot{Target: "Pxe", Enabled: "Once", Mode: "UEFI"}, 1},
		{"legacy", redfishtest.Quirks{}, &bcdv1.BmcBootDevice{Source: pxe, Legacy: true}, redfishtest.Boot{Target: "Pxe", Enabled: "Once", Mode: "Legacy"}, 1},
		{"disk", redfishtest.Quirks{}, &bcdv1.BmcBootDevice{Source: disk}, redfishtest.Boot{Target: "Hdd", Enabled: "Once", Mode: "UEFI"}, 1},
		{"none already", redfishtest.Quirks{}, &bcdv1.BmcBootDevice{Source: none}, redfishtest.Boot{Target: "None", Enabled: "Disabled", Mode: "UEFI"}, 0},
		{"http", redfishtest.Quirks{}, &bcdv1.BmcBootDevice{Source: uefi, HttpUri: bootURI}, redfishtest.Boot{Target: "UefiHttp", Enabled: "Once", Mode: "UEFI", HTTPURI: bootURI}, 1},
		{"supermicro forgets the mode", redfishtest.Quirks{Vendor: "Supermicro", ModeInEachPatch: true}, &bcdv1.BmcBootDevice{Source: pxe}, redfishtest.Boot{Target: "Pxe", Enabled: "Once", Mode: "UEFI"}, 1},
		{"dell refuses repeats", dellQuirks, &bcdv1.BmcBootDevice{Source: pxe}, redfishtest.Boot{Target: "Pxe", Enabled: "Once", Mode: "UEFI"}, 1},
		{"dell has a BIOS attribute", dellQuirks, &bcdv1.BmcBootDevice{Source: uefi, HttpUri: bootURI}, redfishtest.Boot{Target: "UefiHttp", Enabled: "Once", Mode: "UEFI"}, 2},
		{"ETag required", redfishtest.Quirks{RequireETag: true}, &bcdv1.BmcBootDevice{Source: pxe}, redfishtest.Boot{Target: "Pxe", Enabled: "Once", Mode: "UEFI"}, 1},
		{"ETag stale", redfishtest.Quirks{StaleETag: true}, &bcdv1.BmcBootDevice{Source: pxe}, redfishtest.Boot{Target: "Pxe", Enabled: "Once", Mode: "UEFI"}, 2},
		{"settings object", redfishtest.Quirks{SettingsObject: true, RequireETag: true}, &bcdv1.BmcBootDevice{Source: pxe}, redfishtest.Boot{Target: "Pxe", Enabled: "Once", Mode: "UEFI"}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := &machineUnderTest{}
			w, b, target := redfishWorld(t, c.quirks, m)
			c.body.Target = target
			result, failure := w.run(BootDeviceKind, c.body)
			if failure != nil {
				t.Fatalf("%v after %q", failure, b.Patches())
			}
			if got := b.Boot(); got != c.want {
				t.Errorf("the override is %+v, want %+v", got, c.want)
			}
			if got := b.Patches(); len(got) != c.patches {
				t.Errorf("the patches are %q, want %d", got, c.patches)
			}
			r := result.Body.(*bcdv1.BmcBootDeviceResult)
			if r.GetChanged() != (c.patches > 0) || !c.quirks.SettingsObject && r.GetTarget() != c.want.Target {
				t.Errorf("%v", r)
			}
			if c.quirks.HTTPDev1URI && c.body.HttpUri != "" && (b.BIOS("HttpDev1Uri") != bootURI || b.BIOS("HttpDev1EnDis") != "Enabled") {
				t.Errorf("HttpDev1Uri is %q", b.BIOS("HttpDev1Uri"))
			}
			if len(m.resets) != 0 {
				t.Errorf("the machine was reset: %q", m.resets)
			}
			if !c.quirks.SettingsObject {
				// Asked a second time, there is nothing to do.
				if _, failure := w.run(BootDeviceKind, c.body); failure != nil || len(b.Patches()) != c.patches {
					t.Errorf("a second time: %v, %q", failure, b.Patches())
				}
			}
		})
	}
}

// TestOverrideTakenBack: an override of once is changed and taken back, in
// Supermicro's and Dell's way too.
func TestOverrideTakenBack(t *testing.T) {
	for _, q := range []redfishtest.Quirks{{}, {Vendor: "Supermicro", ModeInEachPatch: true}, {Vendor: "Dell", NoRepeats: true}} {
		w, b, target := redfishWorld(t, q, &machineUnderTest{})
		for _, source := range []bcdv1.BmcBootSource{disk, pxe, none} {
			if _, failure := w.run(BootDeviceKind, &bcdv1.BmcBootDevice{Target: target, Source: source}); failure != nil {
				t.Fatalf("%q, %v: %v", q.Vendor, source, failure)
			}
		}
		if got := b.Boot(); got.Enabled != "Disabled" || got.Mode != "UEFI" {
			t.Errorf("%q: %+v", q.Vendor, got)
		}
	}
}

// TestIgnoredOverride is the iDRAC that accepts a one-time override and goes on
// without it.
func TestIgnoredOverride(t *testing.T) {
	w, _, target := redfishWorld(t, redfishtest.Quirks{Vendor: "Dell", IgnoreOnce: true}, &machineUnderTest{})
	_, failure := w.run(BootDeviceKind, &bcdv1.BmcBootDevice{Target: target, Source: pxe})
	wantCode(t, failure, "OVERRIDE_IGNORED", "Once Pxe", "Disabled None")
}

func TestInterruptedBootDevice(t *testing.T) {
	w, b, target := redfishWorld(t, redfishtest.Quirks{}, &machineUnderTest{})
	body := &bcdv1.BmcBootDevice{Target: target, Source: pxe}
	again := func() *dispatch.Failure {
		if r, err := w.executors[BootDeviceKind].Recover(t.Context(), w.command(BootDeviceKind, body)); err != nil || r.Action != dispatch.Resume {
			t.Fatal(r, err)
		}
		_, failure := w.run(BootDeviceKind, body)
		return failure
	}
	if failure := again(); failure == nil || !failure.Indeterminate || len(b.Patches()) != 0 {
		t.Errorf("not set: %v, %q", failure, b.Patches())
	}
	if _, failure := w.run(BootDeviceKind, body); failure != nil {
		t.Fatal(failure)
	}
	if failure := again(); failure != nil || len(b.Patches()) != 1 {
		t.Errorf("set: %v, %q", failure, b.Patches())
	}
}

func TestMalformedBootDevice(t *testing.T) {
	w := newWorld(t, nil)
	for _, body := range []*bcdv1.BmcBootDevice{
		{}, {Source: 9}, {Source: pxe, HttpUri: bootURI}, {Source: uefi, Legacy: true}, {Source: uefi, HttpUri: "ftp://x/"},
		{Source: uefi, HttpUri: "http://u:p@x/"}, {Source: uefi, HttpUri: "http://x/" + strings.Repeat("a", 255)},
	} {
		_, failure := w.run(BootDeviceKind, body)
		wantCode(t, failure, "MALFORMED")
	}
}

func TestRedfishInventory(t *testing.T) {
	w, _, target := redfishWorld(t, redfishtest.Quirks{Vendor: "Example", EchoPassword: true}, &machineUnderTest{isOn: true})
	result, failure := w.run(InventoryKind, &bcdv1.BmcInventory{Target: target})
	if failure != nil {
		t.Fatal(failure)
	}
	r := result.Body.(*bcdv1.BmcInventoryResult)
	if !slices.Equal(r.GetMacs(), []string{"52:54:00:aa:bb:01", "52:54:00:aa:bb:02"}) {
		t.Errorf("MACs %q", r.GetMacs())
	}
	got := []string{r.GetManufacturer(), r.GetModel(), r.GetSerial(), r.GetSystemUuid(), r.GetBiosVersion(), r.GetBmcFirmware(), r.GetBmcModel(), r.GetSystem()}
	want := []string{"Example", "M1", "S-1[redacted]", "6a5f8f3c-0000-4000-8000-00000000000a", "2.1", "7.10[redacted]", "test BMC", "1"}
	if !slices.Equal(got, want) || r.GetPower() != on || !bytes.Equal(r.GetCertificateSha256(), target.GetCertificateSha256()) || len(r.GetNotes()) != 0 {
		t.Errorf("%q, want %q: %v", got, want, r)
	}
}

func TestTwoSystems(t *testing.T) {
	w, _, target := redfishWorld(t, redfishtest.Quirks{TwoSystems: true}, &machineUnderTest{})
	_, failure := w.power(target, actStatus)
	wantCode(t, failure, "NO_SYSTEM", "target.system", `"2"`)
	target.System = "1"
	if _, failure := w.power(target, actStatus); failure != nil {
		t.Error(failure)
	}
}

// TestTrust: no request, and so no password, goes to who is not pinned.
func TestTrust(t *testing.T) {
	w, b, target := redfishWorld(t, redfishtest.Quirks{}, &machineUnderTest{})
	right := target.GetCertificateSha256()
	target.CertificateSha256 = nil
	_, failure := w.power(target, actStatus)
	wantCode(t, failure, "UNTRUSTED_BMC", hex.EncodeToString(right), "certificate_sha256", "insecure")
	target.CertificateSha256 = bytes.Repeat([]byte{7}, 32)
	_, failure = w.power(target, actStatus)
	wantCode(t, failure, "UNTRUSTED_BMC", hex.EncodeToString(right), "0707")
	if asked := b.Requests(); len(asked) != 0 {
		t.Errorf("asked %q of a BMC that is not trusted", asked)
	}
	target.Insecure = true
	_, failure = w.power(target, actStatus)
	wantCode(t, failure, "MALFORMED", "contradict")
	target.CertificateSha256 = nil
	if _, failure := w.power(target, actStatus); failure != nil {
		t.Error(failure)
	}
	target.CertificateSha256, target.Insecure = []byte{1}, false
	_, failure = w.power(target, actStatus)
	wantCode(t, failure, "MALFORMED", "32")
}

func TestNetworks(t *testing.T) {
	var asked []string
	answers := map[string][]netip.Addr{
		"inside": {netip.MustParseAddr("192.0.2.9"), netip.MustParseAddr("127.0.0.1")}, "outside": {netip.MustParseAddr("192.0.2.9")},
		"mapped": {netip.MustParseAddr("::ffff:127.0.0.1")},
	}
	w := newWorld(t, func(o *Options) {
		o.Resolve = func(_ context.Context, name string) ([]netip.Addr, error) {
			asked = append(asked, name)
			if found, ok := answers[name]; ok {
				return found, nil
			}
			return nil, errors.New("no such host")
		}
	})
	site := w.executors[PowerKind].(*executor).site
	for _, c := range []struct{ address, want, code string }{
		{"127.0.0.1", "127.0.0.1:443", ""},
		{"127.0.0.1:8443", "127.0.0.1:8443", ""},
		{"inside", "127.0.0.1:443", ""},
		{"inside:99", "127.0.0.1:99", ""},
		{"mapped", "127.0.0.1:443", ""},
		{"[::ffff:127.0.0.1]:5", "127.0.0.1:5", ""},
		{"outside", "", "OUTSIDE_NETWORKS"},
		{"192.0.2.9", "", "OUTSIDE_NETWORKS"},
		{"::1", "", "OUTSIDE_NETWORKS"},
		{"fe80::1%lo", "", "OUTSIDE_NETWORKS"},
		{"nowhere", "", "UNRESOLVED"},
		{"", "", "MALFORMED"},
		{"127.0.0.1:0", "", "MALFORMED"},
		{"127.0.0.1:x", "", "MALFORMED"},
	} {
		got, _, err := site.locate(t.Context(), c.address, 443)
		var failure *dispatch.Failure
		if errors.As(err, &failure); c.code != "" {
			wantCode(t, failure, c.code)
		} else if err != nil || got.String() != c.want {
			t.Errorf("%q: %v, %v; want %s", c.address, got, err, c.want)
		}
	}
	asked = nil
	if _, failure := w.power(&bcdv1.BmcTarget{Address: "outside", CredentialsReference: "bmc/1"}, actOn); failure == nil || !strings.Contains(failure.Message, "bmc_networks") || len(asked) != 1 {
		t.Errorf("%v after the look-ups %q", failure, asked)
	}
	none := newWorld(t, func(o *Options) { o.Networks = nil })
	_, failure := none.power(&bcdv1.BmcTarget{Address: "127.0.0.1"}, actOn)
	wantCode(t, failure, "OUTSIDE_NETWORKS")
}

func TestLogin(t *testing.T) {
	w, _, target := redfishWorld(t, redfishtest.Quirks{EchoPassword: true}, &machineUnderTest{})
	w.secrets.values["bmc/wrong"] = user + ":" + canary + "x"
	target.CredentialsReference = "bmc/wrong"
	_, failure := w.power(target, actStatus)
	wantCode(t, failure, "LOGIN_REFUSED", "401", redacted)
	for reference, value := range map[string]string{"bmc/none": "", "": "", "bmc/form": canary} {
		if value != "" {
			w.secrets.values[reference] = value
		}
		target.CredentialsReference = reference
		if _, failure = w.power(target, actStatus); failure == nil || failure.Code != "SECRET_UNAVAILABLE" && failure.Code != "MALFORMED" {
			t.Errorf("%q: %v", reference, failure)
		}
	}
	w, _, target = redfishWorld(t, redfishtest.Quirks{NoSessions: true}, &machineUnderTest{})
	w.secrets.values["bmc/wrong"] = user + ":wrong"
	target.CredentialsReference = "bmc/wrong"
	_, failure = w.power(target, actStatus)
	wantCode(t, failure, "LOGIN_REFUSED", "401")
}

func TestUnreachable(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	w := newWorld(t, nil)
	// Nobody answers: the deadline ends it.
	w.deadline = time.Now().Add(200 * time.Millisecond)
	_, failure := w.power(&bcdv1.BmcTarget{Address: address, CredentialsReference: "bmc/1", Insecure: true}, actOn)
	if failure == nil || failure.Indeterminate || !errors.Is(failure, context.DeadlineExceeded) {
		t.Errorf("silence: %v", failure)
	}
	w.deadline = time.Time{}
	listener.Close()
	_, failure = w.power(&bcdv1.BmcTarget{Address: address, CredentialsReference: "bmc/1", Insecure: true}, actOn)
	wantCode(t, failure, "UNREACHABLE", "refused")
}

// TestHostileAnswers: what a BMC says is bounded and stays on this BMC.
func TestHostileAnswers(t *testing.T) {
	elsewhere := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t.Errorf("followed to %s", r.URL)
	}))
	defer elsewhere.Close()
	rootJSON := `{"Systems":{"@odata.id":"/redfish/v1/Systems"},"Links":{"Sessions":{"@odata.id":"/redfish/v1/S"}}}`
	for name, c := range map[string]struct {
		answers map[string]string
		words   string
	}{
		"huge":             {map[string]string{"/redfish/v1/": `{"x":"` + strings.Repeat("a", maxRedfish) + `"}`}, "longer than"},
		"deep":             {map[string]string{"/redfish/v1/": strings.Repeat("[", 100)}, "deeper"},
		"cut":              {map[string]string{"/redfish/v1/": `{"Systems":`}, "not the JSON"},
		"type":             {map[string]string{"/redfish/v1/": `{"Systems":7}`}, "not the JSON"},
		"empty":            {map[string]string{"/redfish/v1/": `{}`}, "names no Systems"},
		"redirect":         {map[string]string{"/redfish/v1/": "302 " + elsewhere.URL}, "302"},
		"systems away":     {map[string]string{"/redfish/v1/": `{"Systems":{"@odata.id":"` + elsewhere.URL + `/redfish/v1/Systems"}}`}, "not a path of its own"},
		"sessions away":    {map[string]string{"/redfish/v1/": `{"Systems":{"@odata.id":"/redfish/v1/Systems"},"Links":{"Sessions":{"@odata.id":"//127.0.0.1/redfish/"}}}`}, "not a path of its own"},
		"user info":        {map[string]string{"/redfish/v1/": `{"Systems":{"@odata.id":"@127.0.0.2/redfish/"}}`}, "not a path of its own"},
		"no members":       {map[string]string{"/redfish/v1/": rootJSON, "/redfish/v1/S": "{}", "/redfish/v1/Systems": `{}`}, "systems"},
		"member elsewhere": {map[string]string{"/redfish/v1/": rootJSON, "/redfish/v1/S": "{}", "/redfish/v1/Systems": `{"Members":[{"@odata.id":"https://x/redfish/v1/Systems/1"}]}`}, "not a path of its own"},
		"reset elsewhere": {map[string]string{"/redfish/v1/": rootJSON, "/redfish/v1/S": "{}", "/redfish/v1/Systems": `{"Members":[{"@odata.id":"/redfish/v1/Systems/1"}]}`,
			"/redfish/v1/Systems/1": `{"PowerState":"Off","Actions":{"#ComputerSystem.Reset":{"target":"` + elsewhere.URL + `"}}}`}, "no reset action of its own"},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				answer, ok := c.answers[r.URL.Path]
				if to, redirect := strings.CutPrefix(answer, "302 "); redirect {
					http.Redirect(w, r, to, http.StatusFound)
				} else if ok {
					fmt.Fprint(w, answer)
				} else {
					http.NotFound(w, r)
				}
			}))
			defer server.Close()
			w := newWorld(t, nil)
			_, failure := w.power(&bcdv1.BmcTarget{Address: server.Listener.Addr().String(), CredentialsReference: "bmc/1", Insecure: true}, actOn)
			if failure == nil || !strings.Contains(failure.Message, c.words) || failure.Indeterminate {
				t.Errorf("%v; want %q", failure, c.words)
			}
			if failure != nil && len(failure.Message) > 2000 {
				t.Errorf("an error of %d bytes", len(failure.Message))
			}
		})
	}
}

// FuzzRedfishAnswers reads what a BMC may say, in every shape that is read.
func FuzzRedfishAnswers(f *testing.F) {
	for _, seed := range []string{
		`{"Systems":{"@odata.id":"/redfish/v1/Systems"}}`,
		`{"Boot":{"BootSourceOverrideTarget":"Pxe","BootSourceOverrideTarget@Redfish.AllowableValues":"Pxe"},"Actions":{"#ComputerSystem.Reset":{"target":"/redfish/v1/x","ResetType@Redfish.AllowableValues":["On"]}}}`,
		`{"error":{"message":"x","@Message.ExtendedInfo":[{"Message":"no","MessageId":"Base.1"}]}}`,
		`[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[`, `"\`, `{"a":"\"[["}`, "\xff\xfe", `null`, ``,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var s system
		if err := decodeJSON(raw, &s); err == nil {
			if localPath(s.Actions.Reset.Target, "") != "" && !strings.HasPrefix(s.Actions.Reset.Target, "/redfish/") {
				t.Errorf("reset goes to %q", s.Actions.Reset.Target)
			}
			o := s.Boot.override()
			for _, v := range []vendor{generic, dell, supermicro} {
				for _, source := range []bcdv1.BmcBootSource{none, pxe, uefi, disk} {
					bootPatch(v, o, wish{source: source}.redfish(), s.Boot.Targets)
				}
			}
			if len(o.Target) > maxText {
				t.Errorf("a text of %d bytes", len(o.Target))
			}
		}
		if text := extendedInfo(raw); len(text) > maxInfo || strings.ContainsAny(text, "\n\r\x1b") {
			t.Errorf("%q", text)
		}
	})
}
