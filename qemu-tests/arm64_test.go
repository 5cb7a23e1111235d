package qemutests

import (
	"debug/elf"
	"debug/pe"
	"encoding/binary"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// emulator runs a program of another architecture (package qemu-user-static).
const emulator = "qemu-aarch64-static"

// TestARM64 runs the cross-built programs under user-mode emulation and looks
// at what the images are made for.
func TestARM64(t *testing.T) {
	run := func(wantCode int, program string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), emulator, append([]string{artefact(t, program)}, args...)...)
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir()}
		out, err := cmd.Output()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatalf("%v; it is in the package qemu-user-static", err)
		}
		if code := cmd.ProcessState.ExitCode(); code != wantCode {
			stderr := ""
			if exit != nil {
				stderr = string(exit.Stderr)
			}
			t.Errorf("%s %q: exit %d, want %d; %s", program, args, code, wantCode, stderr)
		}
		return string(out)
	}
	object := func(wantCode int, program string, args ...string) map[string]any {
		t.Helper()
		var value map[string]any
		out := run(wantCode, program, args...)
		if err := json.Unmarshal([]byte(out), &value); err != nil {
			t.Errorf("%s %q: %v in %.200q", program, args, err, out)
		}
		return value
	}

	if text := run(0, "bcd-arm64", "version"); !strings.Contains(text, "linux/arm64") {
		t.Errorf("bcd version: %q", text)
	}
	if v := object(0, "bcd-arm64", "version", "--json"); v["platform"] != "linux/arm64" {
		t.Errorf("bcd version --json: %v", v)
	}
	if text := run(0, "bcd-gateway-arm64", "--version"); !strings.HasPrefix(text, "bcd-gateway version ") {
		t.Errorf("bcd-gateway --version: %q", text)
	}
	if text := run(0, "bcd-arm64", "hardware"); !strings.Contains(text, "cpu") || !strings.Contains(text, "memory") {
		t.Errorf("bcd hardware: %q", text)
	}
	first, second := object(0, "bcd-arm64", "hardware", "--json"), object(0, "bcd-arm64", "hardware", "--json")
	if first["hardware_key"] == nil || first["hardware_key"] != second["hardware_key"] {
		t.Errorf("bcd hardware --json: keys %v and %v", first["hardware_key"], second["hardware_key"])
	}
	missing := filepath.Join(t.TempDir(), "config.toml")
	if text := run(0, "bcd-arm64", "doctor", "--offline", "--config", missing); !strings.Contains(text, "warn  config    "+missing) {
		t.Errorf("bcd doctor: %q", text)
	}
	wrong := filepath.Join(t.TempDir(), "wrong.toml")
	if err := os.WriteFile(wrong, []byte("nothing = 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if text := run(1, "bcd-arm64", "doctor", "--offline", "--config", wrong); !strings.Contains(text, "fail  config    "+wrong+":1:1") {
		t.Errorf("bcd doctor with a wrong configuration: %q", text)
	}
	run(2, "bcd-arm64", "join", "argument")

	for _, program := range []string{"bcd-arm64", "bcd-gateway-arm64"} {
		f, err := elf.Open(artefact(t, program))
		if err != nil {
			t.Fatal(err)
		}
		if f.Machine != elf.EM_AARCH64 || f.Section(".interp") != nil {
			t.Errorf("%s is for %v, or is not static", program, f.Machine)
		}
		f.Close()
	}
	checkARM64Images(t)
}

func checkARM64Images(t *testing.T) {
	t.Helper()
	uki, err := pe.Open(artefact(t, "images/bcd-virtual-arm64.uki.efi"))
	if err != nil {
		t.Fatal(err)
	}
	defer uki.Close()
	if uki.Machine != pe.IMAGE_FILE_MACHINE_ARM64 {
		t.Errorf("the UKI is for machine %#x", uki.Machine)
	}
	for _, name := range []string{".linux", ".initrd", ".cmdline", ".uname", ".osrel"} {
		if s := uki.Section(name); s == nil || s.Size == 0 {
			t.Errorf("the UKI has no section %s", name)
		}
	}
	kernel, err := os.ReadFile(artefact(t, "images/bcd-virtual-arm64.vmlinuz"))
	if err != nil {
		t.Fatal(err)
	}
	// Documentation/arch/arm64/booting.rst: "ARM\x64" at 56.
	const magic = 0x644d5241
	if len(kernel) < 64 || binary.LittleEndian.Uint32(kernel[56:]) != magic {
		t.Error("the kernel is no arm64 Image")
	}
	initramfs, err := os.Stat(artefact(t, "images/bcd-virtual-arm64.initramfs"))
	if err != nil {
		t.Fatal(err)
	}
	if initramfs.Size() < 4<<20 {
		t.Errorf("the initramfs has %d bytes", initramfs.Size())
	}
	var manifest struct {
		Architecture string `json:"architecture"`
	}
	raw, err := os.ReadFile(artefact(t, "images/bcd-virtual-arm64.manifest.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, &manifest); err != nil || manifest.Architecture != "arm64" {
		t.Errorf("the manifest is for %q (%v)", manifest.Architecture, err)
	}
}
