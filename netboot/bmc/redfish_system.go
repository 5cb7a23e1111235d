package bmc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// system is what is read of a ComputerSystem (DMTF DSP2046).
type system struct {
	ETag         string `json:"@odata.etag"`
	ID           string `json:"Id"`
	Manufacturer string `json:"Manufacturer"`
	Model        string `json:"Model"`
	Serial       string `json:"SerialNumber"`
	UUID         string `json:"UUID"`
	Power        string `json:"PowerState"`
	BIOS         string `json:"BiosVersion"`
	Boot         boot   `json:"Boot"`
	Settings     struct {
		Object link `json:"SettingsObject"`
	} `json:"@Redfish.Settings"`
	Actions struct {
		Reset struct {
			Target string    `json:"target"`
			Types  oneOrMore `json:"ResetType@Redfish.AllowableValues"`
			Info   string    `json:"@Redfish.ActionInfo"`
		} `json:"#ComputerSystem.Reset"`
	} `json:"Actions"`
	Ethernet link `json:"EthernetInterfaces"`
	Bios     link `json:"Bios"`
	Links    struct {
		ManagedBy []link `json:"ManagedBy"`
	} `json:"Links"`
}

type boot struct {
	Target  string    `json:"BootSourceOverrideTarget"`
	Enabled string    `json:"BootSourceOverrideEnabled"`
	Mode    string    `json:"BootSourceOverrideMode"`
	URI     string    `json:"HttpBootUri"`
	Targets oneOrMore `json:"BootSourceOverrideTarget@Redfish.AllowableValues"`
}

func (b boot) override() override {
	return override{Target: clip(b.Target, maxText), Enabled: clip(b.Enabled, maxText), Mode: clip(b.Mode, maxText), URI: clip(b.URI, maxText)}
}

func (r *redfish) system(ctx context.Context) (system, error) {
	var s system
	etag, err := r.get(ctx, r.systemPath, &s)
	if err != nil {
		return s, fmt.Errorf("read the system: %w", err)
	}
	if etag != "" {
		s.ETag = etag
	}
	return s, nil
}

// power implements machine.
func (r *redfish) power(ctx context.Context) (bcdv1.BmcPowerState, error) {
	s, err := r.system(ctx)
	if err != nil {
		return 0, err
	}
	return powerState(s.Power), nil
}

func powerState(s string) bcdv1.BmcPowerState {
	switch s {
	case "On":
		return bcdv1.BmcPowerState_BMC_POWER_STATE_ON
	case "Off":
		return bcdv1.BmcPowerState_BMC_POWER_STATE_OFF
	}
	return bcdv1.BmcPowerState_BMC_POWER_STATE_OTHER
}

// errUnsupported: the BMC has no such request; nothing was asked.
var errUnsupported = errors.New("the BMC cannot do that")

// resetTypes are the ResetType values for an action, the best first.
func resetTypes(a bcdv1.BmcPowerAction) []string {
	switch a {
	case bcdv1.BmcPowerAction_BMC_POWER_ACTION_ON:
		return []string{"On", "ForceOn"}
	case bcdv1.BmcPowerAction_BMC_POWER_ACTION_OFF:
		return []string{"ForceOff"}
	case bcdv1.BmcPowerAction_BMC_POWER_ACTION_GRACEFUL_OFF:
		return []string{"GracefulShutdown"}
	case bcdv1.BmcPowerAction_BMC_POWER_ACTION_CYCLE:
		return []string{"PowerCycle"}
	case bcdv1.BmcPowerAction_BMC_POWER_ACTION_RESET:
		return []string{"ForceRestart"}
	}
	return nil
}

// ask implements machine: ComputerSystem.Reset with a type that the BMC says
// it has, by its own list or by its ActionInfo.
func (r *redfish) ask(ctx context.Context, action bcdv1.BmcPowerAction) (string, error) {
	s, err := r.system(ctx)
	if err != nil {
		return "", notAsked(err)
	}
	allowed := []string(s.Actions.Reset.Types)
	if len(allowed) == 0 && s.Actions.Reset.Info != "" {
		var info struct {
			Parameters []struct {
				Name   string    `json:"Name"`
				Values oneOrMore `json:"AllowableValues"`
			} `json:"Parameters"`
		}
		if _, err := r.get(ctx, s.Actions.Reset.Info, &info); err != nil {
			return "", notAsked(fmt.Errorf("read what resets there are: %w", err))
		}
		for _, p := range info.Parameters {
			if p.Name == "ResetType" {
				allowed = p.Values
			}
		}
	}
	want := resetTypes(action)
	name := want[0]
	if len(allowed) > 0 {
		i := slices.IndexFunc(want, func(t string) bool { return slices.Contains(allowed, t) })
		if i < 0 {
			return "", fmt.Errorf("%w: it has the resets %.256q, and %s needs %q", errUnsupported, allowed, word(action), want)
		}
		name = want[i]
	}
	if localPath(s.Actions.Reset.Target, "") == "" {
		return "", fmt.Errorf("%w: the system names no reset action of its own", errUnsupported)
	}
	return name, r.send(ctx, http.MethodPost, s.Actions.Reset.Target, "", map[string]string{"ResetType": name})
}

// notAsked marks an error that came before anything was asked for.
func notAsked(err error) error { return &early{err} }

type early struct{ err error }

func (e *early) Error() string { return e.err.Error() }
func (e *early) Unwrap() error { return e.err }

// harmless says whether err proves that nothing has happened.
func harmless(err error) bool {
	var e *early
	if errors.As(err, &e) || errors.Is(err, errUnsupported) {
		return true
	}
	// No connection, so no request.
	var dial *net.OpError
	if errors.As(err, &dial) && dial.Op == "dial" {
		return true
	}
	var s *status
	return errors.As(err, &s) && s.code < 500
}

// boot implements machine.
func (r *redfish) boot(ctx context.Context) (override, error) {
	s, err := r.system(ctx)
	if err != nil {
		return override{}, err
	}
	return s.Boot.override(), nil
}

// place is where a boot override is written: on most BMCs the system itself,
// on some the resource with its settings for the next boot (DSP0266 section
// 9.10), if that has a Boot of its own.
func (r *redfish) place(ctx context.Context, s system) (path, etag string, _ error) {
	object := s.Settings.Object.ID
	if object == "" || object == r.systemPath {
		return r.systemPath, s.ETag, nil
	}
	var settings struct {
		ETag string `json:"@odata.etag"`
		Boot *boot  `json:"Boot"`
	}
	etag, err := r.get(ctx, object, &settings)
	if isStatus(err, http.StatusNotFound, http.StatusMethodNotAllowed) || err == nil && settings.Boot == nil {
		return r.systemPath, s.ETag, nil
	}
	if err != nil {
		return "", "", fmt.Errorf("read the system's settings: %w", err)
	}
	if etag == "" {
		etag = settings.ETag
	}
	return object, etag, nil
}

const (
	// lookEvery and looks: some BMCs show a setting only seconds after they
	// have accepted it.
	lookEvery = time.Second
	looks     = 8
)

// setBoot implements machine.
func (r *redfish) setBoot(ctx context.Context, want wish, before func() error) (bool, []string, error) {
	s, err := r.system(ctx)
	if err != nil {
		return false, nil, err
	}
	v := vendorOf(r.root.Vendor, s.Manufacturer)
	target := want.redfish()
	if len(s.Boot.Targets) > 0 && want.source != bcdv1.BmcBootSource_BMC_BOOT_SOURCE_NONE && !slices.Contains(s.Boot.Targets, target.Target) {
		return false, nil, fail("UNSUPPORTED", "the BMC boots from %.256q; %s needs %s", []string(s.Boot.Targets), word(want.source), target.Target)
	}
	bios, err := r.biosPatch(ctx, v, s, &target)
	if err != nil {
		return false, nil, err
	}
	if target.shownBy(s.Boot.override()) && bios.attributes == nil {
		return false, nil, nil
	}
	path, etag, err := r.place(ctx, s)
	if err != nil {
		return false, nil, err
	}
	if err := before(); err != nil {
		return false, nil, err
	}
	var notes []string
	if bios.attributes != nil {
		if err := r.changed(ctx, bios.path, bios.etag, bios.attributes); err != nil {
			return true, nil, effectFailed(err, "the BIOS attributes of HTTP boot")
		}
		notes = append(notes, "HTTP boot URI set as a BIOS attribute: it holds from the next restart on, and for every later HTTP boot")
	}
	lost := r.changed(ctx, path, etag, map[string]any{"Boot": bootPatch(v, s.Boot.override(), target, s.Boot.Targets)})
	if lost != nil && harmless(lost) {
		return len(notes) > 0, notes, effectFailed(lost, "the boot override")
	}
	return r.verify(ctx, path, target, notes, lost)
}

// verify reads back what was set: iDRACs have accepted a one-time override
// and gone on without it. lost is an answer that did not come.
func (r *redfish) verify(ctx context.Context, path string, target override, notes []string, lost error) (bool, []string, error) {
	var have override
	for look := range looks {
		if look > 0 {
			if err := r.wait(ctx, lookEvery); err != nil {
				break
			}
		}
		s, err := r.system(ctx)
		if err != nil {
			if lost == nil {
				lost = err
			}
			continue
		}
		lost = nil
		if have = s.Boot.override(); target.shownBy(have) {
			return true, notes, nil
		}
		if path != r.systemPath {
			var settings struct {
				Boot boot `json:"Boot"`
			}
			if _, err := r.get(ctx, path, &settings); err == nil && target.shownBy(settings.Boot.override()) {
				return true, append(notes, "the BMC keeps the override in its settings until the next boot"), nil
			}
		}
	}
	if lost != nil {
		return true, notes, unknown("NO_ANSWER", "the boot override was sent, and whether the BMC took it could not be read: %w", lost)
	}
	return true, notes, fail("OVERRIDE_IGNORED", "the BMC accepted the boot override %s and shows %s: it does not keep a one-time override; set the machine's own boot order, or try again once its last BIOS job has ended", target, have)
}

// changed makes one PATCH. Where the resource changed since it was read (412,
// RFC 9110 section 15.5.13) nothing was done, so it is read again and sent
// once more; some services want the tag without its weakness.
func (r *redfish) changed(ctx context.Context, path, etag string, body any) error {
	err := r.patch(ctx, path, etag, body)
	if !isStatus(err, http.StatusPreconditionFailed, http.StatusPreconditionRequired) {
		return err
	}
	var again struct {
		ETag string `json:"@odata.etag"`
	}
	fresh, second := r.get(ctx, path, &again)
	if second != nil {
		return notAsked(second)
	}
	if fresh == "" {
		fresh = again.ETag
	}
	if fresh == etag {
		fresh = strings.TrimPrefix(fresh, "W/")
	}
	return r.patch(ctx, path, fresh, body)
}

// effectFailed turns an error of a change into a failure that says whether it
// may have happened.
func effectFailed(err error, what string) error {
	if harmless(err) {
		return fail("REFUSED", "the BMC refuses %s: %w", what, err)
	}
	return unknown("NO_ANSWER", "%s: sent, and no answer came: %w", what, err)
}

// maxText bounds one text of a result.
const maxText = 256

// inventory implements machine.
func (r *redfish) inventory(ctx context.Context) (*bcdv1.BmcInventoryResult, error) {
	s, err := r.system(ctx)
	if err != nil {
		return nil, err
	}
	out := &bcdv1.BmcInventoryResult{
		Manufacturer: clip(s.Manufacturer, maxText), Model: clip(s.Model, maxText), Serial: clip(s.Serial, maxText),
		SystemUuid: strings.ToLower(clip(s.UUID, maxText)), Power: powerState(s.Power), BiosVersion: clip(s.BIOS, maxText),
		System: clip(s.ID, maxText), Protocol: r.protocol(), CertificateSha256: bytes.Clone(r.pin.met),
	}
	note := func(what string, err error) {
		out.Notes = append(out.Notes, clip(what+": "+err.Error(), maxText))
	}
	if s.Ethernet.ID != "" {
		if out.Macs, err = r.macs(ctx, s.Ethernet.ID); err != nil {
			note("network interfaces", err)
		}
	}
	if len(s.Links.ManagedBy) > 0 {
		var manager struct {
			Firmware string `json:"FirmwareVersion"`
			Model    string `json:"Model"`
		}
		if _, err := r.get(ctx, s.Links.ManagedBy[0].ID, &manager); err != nil {
			note("the BMC itself", err)
		}
		out.BmcFirmware, out.BmcModel = clip(manager.Firmware, maxText), clip(manager.Model, maxText)
	}
	return out, ctx.Err()
}

// macs reads the system's interfaces, as far as they can be read.
func (r *redfish) macs(ctx context.Context, path string) ([]string, error) {
	var interfaces struct {
		Members []link `json:"Members"`
	}
	if _, err := r.get(ctx, path, &interfaces); err != nil {
		return nil, err
	}
	var macs []string
	var failed error
	for _, m := range interfaces.Members[:min(len(interfaces.Members), maxMembers)] {
		var nic struct {
			MAC       string `json:"MACAddress"`
			Permanent string `json:"PermanentMACAddress"`
		}
		if _, err := r.get(ctx, m.ID, &nic); err != nil {
			failed = err
			continue
		}
		if nic.Permanent != "" {
			nic.MAC = nic.Permanent
		}
		if mac, err := net.ParseMAC(nic.MAC); err == nil {
			macs = append(macs, mac.String())
		}
	}
	slices.Sort(macs)
	return slices.Compact(macs), failed
}
