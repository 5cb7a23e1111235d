package netboot

import (
	"fmt"
	"strings"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// ScriptText is the iPXE script for a decision. base is the site's HTTP
// address, for example http://10.0.0.2, without a slash at its end. A machine
// that gets nothing is sent on to its next boot device: iPXE would else stop
// at an error, with nobody to read it.
func ScriptText(d Decision, base string) string {
	var b strings.Builder
	b.WriteString("#!ipxe\n")
	if d.Means != Script {
		b.WriteString("exit\n")
		return b.String()
	}
	url := func(a *bcdv1.BootArtefact) string { return base + "/" + ArtefactPath(a) }
	if len(d.Files) == 1 {
		fmt.Fprintf(&b, "chain %s || exit 1\n", url(d.Files[0]))
		return b.String()
	}
	kernel, initramfs := d.Files[0], d.Files[1]
	// initrd= is what the EFI stub looks for, and does no harm to a BIOS.
	// BOOTIF is which of its NICs the machine was booted from, in pxelinux's
	// form.
	fmt.Fprintf(&b, "kernel %s initrd=%s%s BOOTIF=01-${netX/mac:hexhyp} || exit 1\n", url(kernel), initramfs.GetName(), commandLine(kernel))
	fmt.Fprintf(&b, "initrd --name %s %s || exit 1\n", initramfs.GetName(), url(initramfs))
	b.WriteString("boot || exit 1\n")
	return b.String()
}

// commandLine gives the kernel's command line with a leading space. What would
// end the line or begin a variable of iPXE's is left out.
func commandLine(a *bcdv1.BootArtefact) string {
	line := strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == '$' {
			return -1
		}
		return r
	}, a.GetCommandLine())
	// iPXE takes these for the end of a command when they stand alone.
	words := strings.Fields(line)
	kept := words[:0]
	for _, word := range words {
		if word != "||" && word != "&&" && !strings.HasPrefix(word, "#") {
			kept = append(kept, word)
		}
	}
	if len(kept) == 0 {
		return ""
	}
	return " " + strings.Join(kept, " ")
}
