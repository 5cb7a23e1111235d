package bmc

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// vendor is a family of BMCs that wants something its own way.
type vendor string

const (
	generic vendor = ""
	// supermicro forgets BootSourceOverrideMode unless each PATCH has it
	// (DMTF/Redfishtool#106).
	supermicro vendor = "Supermicro"
	// dell fares better when a PATCH repeats nothing that is so already
	// (ironcore-dev/metal-operator#107), and takes the URI of HTTP boot as the
	// BIOS attribute HttpDev1Uri (NVIDIA/libredfish#75).
	dell vendor = "Dell"
)

func vendorOf(names ...string) vendor {
	for _, name := range names {
		for _, v := range []vendor{supermicro, dell} {
			if strings.Contains(strings.ToLower(name), strings.ToLower(string(v))) {
				return v
			}
		}
	}
	return generic
}

// override is where a machine boots from the next time, in Redfish's words
// (DSP2046, ComputerSystem.Boot).
type override struct{ Target, Enabled, Mode, URI string }

func (o override) String() string {
	text := fmt.Sprintf("%s %s", o.Enabled, o.Target)
	if o.Mode != "" {
		text += " " + o.Mode
	}
	if o.URI != "" {
		text += " " + o.URI
	}
	return text
}

// wish is what a command asks for.
type wish struct {
	source bcdv1.BmcBootSource
	legacy bool
	uri    string
}

func (w wish) redfish() override {
	o := override{Enabled: "Once", Mode: "UEFI", URI: w.uri}
	if w.legacy {
		o.Mode = "Legacy"
	}
	switch w.source {
	case bcdv1.BmcBootSource_BMC_BOOT_SOURCE_PXE:
		o.Target = "Pxe"
	case bcdv1.BmcBootSource_BMC_BOOT_SOURCE_HTTP:
		o.Target = "UefiHttp"
	case bcdv1.BmcBootSource_BMC_BOOT_SOURCE_DISK:
		o.Target = "Hdd"
	default:
		return override{Enabled: "Disabled", Target: "None"}
	}
	return o
}

// shownBy says whether a BMC that shows have does what o asks. One that shows
// no mode has only one.
func (o override) shownBy(have override) bool {
	if o.Enabled == "Disabled" {
		return have.Enabled == "Disabled" || have.Enabled == "" || have.Target == "None"
	}
	return have.Target == o.Target && have.Enabled == o.Enabled && (have.Mode == o.Mode || have.Mode == "") && (o.URI == "" || have.URI == o.URI)
}

// bootPatch is the Boot object of the PATCH that brings a BMC from have to
// want.
func bootPatch(v vendor, have, want override, targets []string) map[string]string {
	patch := map[string]string{}
	set := func(name, have, want string, always bool) {
		if want != "" && (always || have != want) {
			patch[name] = want
		}
	}
	always := v != dell
	set("BootSourceOverrideEnabled", have.Enabled, want.Enabled, always)
	if want.Enabled == "Disabled" {
		if slices.Contains(targets, "None") {
			set("BootSourceOverrideTarget", have.Target, want.Target, always)
		}
		if v == supermicro {
			set("BootSourceOverrideMode", "", have.Mode, true)
		}
		return patch
	}
	set("BootSourceOverrideTarget", have.Target, want.Target, always)
	// Others have refused a mode that they cannot change, also the one they
	// are in; a BMC that shows none has none.
	if v == supermicro {
		set("BootSourceOverrideMode", have.Mode, want.Mode, true)
	} else if have.Mode != "" {
		set("BootSourceOverrideMode", have.Mode, want.Mode, false)
	}
	set("HttpBootUri", have.URI, want.URI, always)
	return patch
}

// biosChange is a PATCH of BIOS attributes; nil attributes is none.
type biosChange struct {
	path, etag string
	attributes map[string]any
}

// biosPatch moves the URI of HTTP boot out of target and into the BIOS
// attributes where the vendor has it there.
func (r *redfish) biosPatch(ctx context.Context, v vendor, s system, target *override) (biosChange, error) {
	if v != dell || target.URI == "" {
		return biosChange{}, nil
	}
	var bios struct {
		Attributes struct {
			URI    *string `json:"HttpDev1Uri"`
			Enable string  `json:"HttpDev1EnDis"`
		} `json:"Attributes"`
		Settings struct {
			Object link `json:"SettingsObject"`
		} `json:"@Redfish.Settings"`
	}
	if s.Bios.ID == "" {
		return biosChange{}, fail("UNSUPPORTED", "this BMC shows no BIOS attributes, where it would have the URI of HTTP boot: let DHCP give the URI")
	}
	if _, err := r.get(ctx, s.Bios.ID, &bios); err != nil {
		return biosChange{}, fmt.Errorf("read the BIOS attributes: %w", err)
	}
	if bios.Attributes.URI == nil || bios.Settings.Object.ID == "" {
		return biosChange{}, fail("UNSUPPORTED", "this BIOS has no attribute HttpDev1Uri that can be set: let DHCP give the URI")
	}
	uri := target.URI
	target.URI = ""
	changes := map[string]string{}
	if *bios.Attributes.URI != uri {
		changes["HttpDev1Uri"] = uri
	}
	if bios.Attributes.Enable != "Enabled" {
		changes["HttpDev1EnDis"] = "Enabled"
	}
	if len(changes) == 0 {
		return biosChange{}, nil
	}
	var pending struct {
		ETag string `json:"@odata.etag"`
	}
	etag, err := r.get(ctx, bios.Settings.Object.ID, &pending)
	if err != nil && !isStatus(err, http.StatusNotFound, http.StatusMethodNotAllowed) {
		return biosChange{}, fmt.Errorf("read the BIOS settings: %w", err)
	}
	if etag == "" {
		etag = pending.ETag
	}
	return biosChange{path: bios.Settings.Object.ID, etag: etag, attributes: map[string]any{
		"Attributes": changes, "@Redfish.SettingsApplyTime": map[string]string{"ApplyTime": "OnReset"},
	}}, nil
}
