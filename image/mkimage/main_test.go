package main

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSizes(t *testing.T) {
	dir := t.TempDir()
	for name, size := range map[string]int{
		"bcd-amd64": 10, "bcd-gateway-amd64": 11, "bcd-linux-arm64": 12, "bcd-virtual-amd64.uki.efi": 20, "bcd-virtual-amd64.initramfs": 21,
		"bcd-metal-amd64.uki.efi": 30, "bcd-metal-arm64.uki.efi": 31, "bcd-metal-amd64.manifest.json": 40, "other.uki.efi": 50,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), make([]byte, size), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	if err := printSizes(&out, dir, "amd64"); err != nil {
		t.Fatal(err)
	}
	want := "bcd 10\nbcd-gateway 11\nmetal-uki 30\nvirtual-initramfs 21\nvirtual-uki 20\n"
	if out.String() != want {
		t.Errorf("got\n%swant\n%s", out.String(), want)
	}
	if err := printSizes(&out, t.TempDir(), "amd64"); err == nil || !strings.Contains(err.Error(), "holds no image") {
		t.Errorf("an empty folder: %v", err)
	}
}

// TestArgumentsAreNotEchoed: someone may have put a secret in the wrong place.
func TestArgumentsAreNotEchoed(t *testing.T) {
	err := run(t.Context(), []string{"bcjt_secret_secretsecretsecret"})
	if !errors.Is(err, errUsage) || strings.Contains(err.Error(), "secretsecret") {
		t.Errorf("error %v", err)
	}
	if err := run(t.Context(), []string{"-h"}); !errors.Is(err, flag.ErrHelp) {
		t.Errorf("help: %v", err)
	}
}

func TestBuildTime(t *testing.T) {
	t.Setenv("SOURCE_DATE_EPOCH", "1767323045")
	if n, err := defaultEpoch(t.Context()); err != nil || n != 1767323045 {
		t.Errorf("%d, %v", n, err)
	}
	t.Setenv("SOURCE_DATE_EPOCH", "yesterday")
	if _, err := defaultEpoch(t.Context()); err == nil || !strings.Contains(err.Error(), "not seconds since 1970") {
		t.Errorf("error %v", err)
	}
}
