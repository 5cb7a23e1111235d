package redfishtest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
)

func (b *BMC) etag() string { return fmt.Sprintf(`W/"%d"`, b.version) }

func (b *BMC) get(w http.ResponseWriter, path string) {
	o, etag := object{}, ""
	switch path {
	case systems:
		members := refs(system)
		if b.quirks.TwoSystems {
			members = append(members, ref(systems+"/2"))
		}
		o["Members"] = members
	case system:
		o, etag = b.system(), b.etag()
	case settings:
		if b.quirks.SettingsObject {
			o["Boot"] = b.bootObject(b.pending)
			etag = b.etag()
		}
	case bios:
		o["Attributes"] = b.attributes()
		o["@Redfish.Settings"] = object{"SettingsObject": ref(pending)}
	case pending:
		o["Attributes"], etag = object{}, b.etag()
	case info:
		o["Parameters"] = []object{{"Name": "ResetType", "AllowableValues": b.resetTypes()}}
	case nics:
		o["Members"] = refs(nics+"/1", nics+"/2")
	case nics + "/1":
		o["MACAddress"] = "52:54:00:AA:BB:01"
	case nics + "/2":
		o["MACAddress"], o["PermanentMACAddress"] = "00:00:00:00:00:00", "52:54:00:aa:bb:02"
	case manager:
		o["FirmwareVersion"], o["Model"] = "7.10"+b.echo(b.password), "test BMC"
	default:
		b.refuse(w, http.StatusNotFound, "there is no "+path)
		return
	}
	o["@odata.id"] = path
	b.answer(w, http.StatusOK, o, etag)
}

func (b *BMC) attributes() object {
	o := object{"BootMode": "Uefi"}
	if b.quirks.HTTPDev1URI {
		for name, value := range b.bios {
			o[name] = value
		}
	}
	return o
}

func (b *BMC) resetTypes() []string {
	if b.quirks.ResetTypes != nil {
		return b.quirks.ResetTypes
	}
	return []string{"On", "ForceOff", "GracefulShutdown", "ForceRestart", "PowerCycle"}
}

func (b *BMC) bootObject(of *Boot) object {
	if of == nil {
		of = &b.boot
	}
	o := object{
		"BootSourceOverrideTarget": of.Target, "BootSourceOverrideEnabled": of.Enabled, "BootSourceOverrideMode": of.Mode,
		"BootSourceOverrideTarget@Redfish.AllowableValues": []string{"None", "Pxe", "Hdd", "UefiHttp"},
	}
	if !b.quirks.HTTPDev1URI {
		o["HttpBootUri"] = of.HTTPURI
	}
	return o
}

func (b *BMC) system() object {
	power := "Off"
	if b.machine.Power() {
		power = "On"
	}
	action := object{"target": reset}
	if b.quirks.ResetTypesInActionInfo {
		action["@Redfish.ActionInfo"] = info
	} else {
		action["ResetType@Redfish.AllowableValues"] = b.resetTypes()
	}
	o := object{
		"Id": "1", "Manufacturer": b.quirks.Vendor, "Model": "M1", "SerialNumber": "S-1" + b.echo(b.password),
		"UUID": "6A5F8F3C-0000-4000-8000-00000000000A", "PowerState": power, "BiosVersion": "2.1",
		"Boot": b.bootObject(nil), "Actions": object{"#ComputerSystem.Reset": action},
		"EthernetInterfaces": ref(nics), "Bios": ref(bios), "Links": object{"ManagedBy": refs(manager)},
	}
	if b.quirks.SettingsObject {
		o["@Redfish.Settings"] = object{"SettingsObject": ref(settings)}
	}
	return o
}

func (b *BMC) patch(w http.ResponseWriter, r *http.Request, body []byte) {
	match := r.Header.Get("If-Match")
	switch {
	case b.quirks.RequireETag && match == "":
		b.refuse(w, http.StatusPreconditionRequired, "If-Match is required")
		return
	case b.stale, match != "" && match != b.etag():
		b.stale = false
		b.version++
		b.refuse(w, http.StatusPreconditionFailed, "the resource has changed")
		return
	}
	switch want := (map[bool]string{false: system, true: settings})[b.quirks.SettingsObject]; {
	case r.URL.Path == pending && b.quirks.HTTPDev1URI:
		b.patchBIOS(w, body)
	case r.URL.Path == want:
		b.patchBoot(w, body)
	default:
		b.refuse(w, http.StatusMethodNotAllowed, "PATCH is for "+want)
	}
}

func (b *BMC) patchBIOS(w http.ResponseWriter, body []byte) {
	var in struct{ Attributes map[string]string }
	if err := json.Unmarshal(body, &in); err != nil {
		b.refuse(w, http.StatusBadRequest, "attributes are texts")
		return
	}
	for name, value := range in.Attributes {
		b.bios[name] = value
	}
	w.WriteHeader(http.StatusNoContent)
}

func (b *BMC) patchBoot(w http.ResponseWriter, body []byte) {
	var in struct{ Boot map[string]string }
	if err := json.Unmarshal(body, &in); err != nil || len(in.Boot) == 0 {
		b.refuse(w, http.StatusBadRequest, "a PATCH of nothing")
		return
	}
	next := b.boot
	if b.quirks.ModeInEachPatch {
		next.Mode = "Legacy"
	}
	fields := map[string]*string{
		"BootSourceOverrideTarget": &next.Target, "BootSourceOverrideEnabled": &next.Enabled,
		"BootSourceOverrideMode": &next.Mode, "HttpBootUri": &next.HTTPURI,
	}
	for name, value := range in.Boot {
		field := fields[name]
		if field == nil || name == "HttpBootUri" && b.quirks.HTTPDev1URI {
			b.refuse(w, http.StatusBadRequest, "there is no "+name)
			return
		}
		if b.quirks.NoRepeats && *field == value {
			b.refuse(w, http.StatusBadRequest, name+" is "+value+" already")
			return
		}
		*field = value
	}
	b.version++
	switch {
	case b.quirks.IgnoreOnce && next.Enabled == "Once":
	case b.quirks.SettingsObject:
		b.pending = &next
		b.machine.Override(next)
	default:
		b.boot = next
		b.machine.Override(next)
	}
	w.WriteHeader(http.StatusNoContent)
}

func (b *BMC) reset(w http.ResponseWriter, path string, body []byte) {
	var in struct{ ResetType string }
	if path != reset || json.Unmarshal(body, &in) != nil || !slices.Contains(b.resetTypes(), in.ResetType) {
		b.refuse(w, http.StatusBadRequest, "there is no such reset")
		return
	}
	if err := b.machine.Reset(in.ResetType); err != nil {
		b.refuse(w, http.StatusConflict, err.Error())
		return
	}
	if b.quirks.LoseAnswer {
		panic(http.ErrAbortHandler)
	}
	w.WriteHeader(http.StatusNoContent)
}
