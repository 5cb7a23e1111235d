package netboot

import (
	"encoding/hex"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strconv"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Firmware is the kind of program that asks to be booted.
type Firmware string

// The words are those of BootTrace.firmware.
const (
	BIOS     Firmware = "bios"
	UEFI     Firmware = "uefi"
	UEFIHTTP Firmware = "uefi-http"
	IPXE     Firmware = "ipxe"
	// UBoot has an EFI of its own, and starts a UKI with it.
	UBoot Firmware = "u-boot"
)

// Machine is what a machine said of itself in a packet.
type Machine struct {
	// MAC is lower case, with colons.
	MAC string
	// UUID is lower case, "" when the packet has none; UUIDAsSent is the same in
	// the other byte order, since firmware differs in which it sends.
	UUID, UUIDAsSent string
	// Architectures are option 93's, in the packet's order (RFC 4578 section
	// 2.1, RFC 5970 section 3.3): a list, not one.
	Architectures []uint16
	Firmware      Firmware
	// OurIPXE says that this iPXE carries our marker. The word iPXE alone says
	// nothing: a board may have one of its own.
	OurIPXE bool
	// NoHTTP says of an iPXE that it cannot fetch by HTTP.
	NoHTTP bool
}

// Means is how a machine gets what it gets.
type Means string

const (
	// Nothing: no offer.
	Nothing Means = "nothing"
	// UKIByTFTP and UKIByHTTP are the whole operating system in one file.
	UKIByTFTP Means = "uki-tftp"
	UKIByHTTP Means = "uki-http"
	// IPXEBinary is an iPXE by TFTP, which then asks again and gets a script.
	IPXEBinary Means = "ipxe-binary"
	// Script is an iPXE script that boots the ramdisk.
	Script Means = "ipxe-script"
	// ScriptExit is an iPXE script that goes on to the next boot device.
	ScriptExit Means = "ipxe-exit"
)

// ScriptPath is where the iPXE script is, below the site's HTTP address. A
// query says for which machine: iPXE fetches it from any address.
const ScriptPath = "boot.ipxe"

// scriptFor is the script's path and query for one machine; ParseScript is its
// opposite.
func scriptFor(m Machine) string {
	q := url.Values{"mac": {m.MAC}}
	if m.UUID != "" {
		q.Set("uuid", m.UUID)
	}
	if m.UUIDAsSent != "" && m.UUIDAsSent != m.UUID {
		q.Set("sent", m.UUIDAsSent)
	}
	for _, a := range m.Architectures {
		q.Add("arch", strconv.Itoa(int(a)))
	}
	return ScriptPath + "?" + q.Encode()
}

var (
	macForm  = regexp.MustCompile(`^[0-9a-f]{2}(:[0-9a-f]{2}){5}$`)
	uuidForm = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
)

// ParseScript gives the machine that a script was advertised to.
func ParseScript(q url.Values) (Machine, error) {
	m := Machine{MAC: q.Get("mac"), UUID: q.Get("uuid"), UUIDAsSent: q.Get("sent"), Firmware: IPXE}
	if !macForm.MatchString(m.MAC) {
		return Machine{}, fmt.Errorf("mac is %.32q; want lower case with colons", m.MAC)
	}
	for _, uuid := range []string{m.UUID, m.UUIDAsSent} {
		if uuid != "" && !uuidForm.MatchString(uuid) {
			return Machine{}, fmt.Errorf("uuid is %.48q; want lower case with dashes", uuid)
		}
	}
	if len(q["arch"]) > maxArchitectures {
		return Machine{}, fmt.Errorf("%d architectures; at most %d are allowed", len(q["arch"]), maxArchitectures)
	}
	for _, word := range q["arch"] {
		n, err := strconv.ParseUint(word, 10, 16)
		if err != nil {
			return Machine{}, fmt.Errorf("arch is %.16q; want a number of DHCP option 93", word)
		}
		m.Architectures = append(m.Architectures, uint16(n))
	}
	return m, nil
}

// maxArchitectures bounds option 93's list: real ones have one or two.
const maxArchitectures = 8

// Decision is what a machine gets.
type Decision struct {
	Means  Means
	Action bcdv1.BootAction
	// Path is the advertised name, relative to the server's root; "" for
	// Nothing. ByHTTP says that it is to be given as a URL.
	Path   string
	ByHTTP bool
	// Files are all artefacts that this boot needs.
	Files []*bcdv1.BootArtefact
	// Architecture is as Go has it, "" when no entry of the list is known.
	Architecture string
	// EFI says that the firmware below, also of an iPXE, is UEFI.
	EFI       bool
	MachineID string
	// Reason is a sentence for the trace; never empty when Means is Nothing.
	Reason string
}

// architecture is one value of option 93.
type architecture struct {
	name string
	efi  bool
}

// architectures are the values of IANA's "Processor Architecture Types" that
// we have images for. 7 is EBC by RFC 4578 and x64 in every firmware (its
// errata 4625). 20 is BIOS that boots by HTTP.
var architectures = map[uint16]architecture{
	0: {"amd64", false}, 20: {"amd64", false},
	7: {"amd64", true}, 9: {"amd64", true}, 16: {"amd64", true},
	11: {"arm64", true}, 19: {"arm64", true},
	6: {"386", true}, 15: {"386", true},
	10: {"arm", true}, 18: {"arm", true},
	21: {"arm", true}, 22: {"arm64", true},
	27: {"riscv64", true}, 28: {"riscv64", true}, 39: {"loong64", true}, 40: {"loong64", true},
	// A Raspberry Pi 4 in its own boot loader, which starts no UKI.
	41: {"arm64", false},
}

// architectureOf gives the first of the list that is known; some ROMs list
// what they can emulate after what they are. An iPXE without option 93 is a
// BIOS one of before RFC 4578.
func architectureOf(m Machine) (architecture, bool) {
	for _, value := range m.Architectures {
		if a, ok := architectures[value]; ok {
			return a, true
		}
	}
	if len(m.Architectures) == 0 && (m.Firmware == IPXE || m.Firmware == BIOS) {
		return architectures[0], true
	}
	return architecture{}, false
}

// Decide says what m gets under table, of the artefacts that can be served
// now. It is pure and quick: a ROM waits two seconds for an answer and the
// gateway has no part in it. A nil table gives nothing to anyone.
func Decide(table *bcdv1.BootTable, serving []*bcdv1.BootArtefact, m Machine) Decision {
	d := Decision{Means: Nothing}
	arch, known := architectureOf(m)
	d.Architecture, d.EFI = arch.name, arch.efi
	if table == nil {
		d.Reason = "this site has no boot table yet: it has not reached its gateway since it was set up"
		return d
	}
	row, conflict := find(table, m)
	if conflict != "" {
		d.Reason = conflict
		return d
	}
	d.Action = table.GetUnknown()
	if row != nil {
		d.Action, d.MachineID = row.GetAction(), row.GetMachineId()
	}
	switch d.Action {
	case bcdv1.BootAction_BOOT_ACTION_RAMDISK:
		if !known {
			d.Reason = fmt.Sprintf("architectures %v of DHCP option 93 are none that there are images for", m.Architectures)
			return d
		}
		d.ramdisk(arch, serving, m)
	case bcdv1.BootAction_BOOT_ACTION_LOCAL:
		// UEFI without an offer tries its next boot entry. iPXE was started
		// by something that waits for its end.
		d.Reason = "the machine is to boot from its own disk"
		if m.Firmware == IPXE && !m.NoHTTP {
			d.Means, d.Path, d.ByHTTP = ScriptExit, scriptFor(m), true
		}
	default:
		d.Reason = "the boot table gives this machine nothing"
		if row == nil {
			d.Reason = "this machine is unknown and the site's policy gives unknown machines nothing"
		}
	}
	return d
}

func (d *Decision) ramdisk(arch architecture, serving []*bcdv1.BootArtefact, m Machine) {
	missing := func(what, arch string) {
		d.Means, d.Path, d.ByHTTP, d.Files = Nothing, "", false, nil
		d.Reason = fmt.Sprintf("there is no %s for %s here, or it is not fetched yet", what, arch)
	}
	uki := pick(serving, bcdv1.ArtefactKind_ARTEFACT_KIND_UKI, arch.name)
	switch {
	case m.Firmware == UEFIHTTP && arch.efi:
		if uki == nil {
			missing("UKI", arch.name)
			return
		}
		d.Means, d.Path, d.ByHTTP, d.Files = UKIByHTTP, ArtefactPath(uki), true, []*bcdv1.BootArtefact{uki}
	case m.Firmware == IPXE && (m.OurIPXE || !m.NoHTTP):
		d.Means, d.Path, d.ByHTTP = Script, scriptFor(m), true
		if arch.efi && uki != nil {
			// The firmware checks its signature, whoever loads it.
			d.Files = []*bcdv1.BootArtefact{uki}
			return
		}
		kernel := pick(serving, bcdv1.ArtefactKind_ARTEFACT_KIND_KERNEL, arch.name)
		initramfs := pick(serving, bcdv1.ArtefactKind_ARTEFACT_KIND_INITRAMFS, arch.name)
		if kernel == nil || initramfs == nil {
			missing("kernel and initramfs", arch.name)
			return
		}
		d.Files = []*bcdv1.BootArtefact{kernel, initramfs}
	case arch.efi && m.Firmware != IPXE:
		if uki == nil {
			missing("UKI", arch.name)
			return
		}
		d.Means, d.Path, d.Files = UKIByTFTP, ArtefactPath(uki), []*bcdv1.BootArtefact{uki}
	default:
		// BIOS, and an iPXE that cannot fetch by HTTP. What they are given
		// can, and so does not come back here: there is no loop to get into.
		want := "bios"
		if arch.efi || arch.name != "amd64" {
			want = arch.name
		}
		binary := pick(serving, bcdv1.ArtefactKind_ARTEFACT_KIND_IPXE, want)
		if binary == nil {
			missing("iPXE", want)
			return
		}
		d.Means, d.Path, d.Files = IPXEBinary, ArtefactPath(binary), []*bcdv1.BootArtefact{binary}
	}
}

// find gives the row of m; nil when there is none. Two rows for one machine
// are a reason to do nothing: one of them may be a wipe away from the other.
func find(table *bcdv1.BootTable, m Machine) (row *bcdv1.MachineBoot, conflict string) {
	for _, candidate := range table.GetMachines() {
		byMAC := m.MAC != "" && slices.Contains(candidate.GetMacs(), m.MAC)
		uuid := candidate.GetSystemUuid()
		byUUID := uuid != "" && (uuid == m.UUID || uuid == m.UUIDAsSent)
		if !byMAC && !byUUID {
			continue
		}
		if row != nil && row.GetMachineId() != candidate.GetMachineId() {
			return nil, fmt.Sprintf("two machines of the boot table claim it, %s and %s: by MAC address %s or system UUID %s", row.GetMachineId(), candidate.GetMachineId(), m.MAC, m.UUID)
		}
		if row != nil && row.GetAction() != candidate.GetAction() {
			return nil, fmt.Sprintf("the boot table has two rows for machine %s that say different things", row.GetMachineId())
		}
		row = candidate
	}
	return row, ""
}

// pick gives the first artefact of a kind and architecture, nil for none.
func pick(serving []*bcdv1.BootArtefact, kind bcdv1.ArtefactKind, arch string) *bcdv1.BootArtefact {
	for _, a := range serving {
		if a.GetKind() == kind && a.GetArchitecture() == arch {
			return a
		}
	}
	return nil
}

// artefactDir is the folder of artefacts on TFTP and HTTP.
const artefactDir = "a"

// ArtefactPath is the name that an artefact is advertised and served under,
// without a leading slash. It holds 16 digits of the digest: a machine that
// fetches in parts, or kernel and initramfs one after the other, never gets
// halves of two versions.
func ArtefactPath(a *bcdv1.BootArtefact) string {
	digest := hex.EncodeToString(a.GetSha256())
	return artefactDir + "/" + digest[:min(len(digest), 16)] + "/" + a.GetName()
}

var artefactName = regexp.MustCompile(`^[a-z0-9_-][a-z0-9._-]{0,63}$`)

// maxArtefactBytes bounds one file: an image in the RAM of a machine.
const maxArtefactBytes = 4 << 30

// checkArtefact says what is wrong with an artefact's entry in a table.
func checkArtefact(a *bcdv1.BootArtefact) error {
	switch {
	case len(a.GetSha256()) != 32:
		return fmt.Errorf("artefact %.64q: digest of %d bytes, want 32", a.GetName(), len(a.GetSha256()))
	case !artefactName.MatchString(a.GetName()):
		return fmt.Errorf("artefact name %.64q is not 1 to 64 of [a-z0-9._-]", a.GetName())
	case a.GetSize() <= 0 || a.GetSize() > maxArtefactBytes:
		return fmt.Errorf("artefact %s: size %d is not within 1 to %d", a.GetName(), a.GetSize(), int64(maxArtefactBytes))
	}
	return nil
}
