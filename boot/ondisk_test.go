package boot

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// sysfs lays out class/block the way the kernel does: links into devices.
func sysfs(t *testing.T, partitions map[string]string) string {
	t.Helper()
	sys := t.TempDir()
	class := filepath.Join(sys, "class/block")
	if err := os.MkdirAll(class, 0o755); err != nil {
		t.Fatal(err)
	}
	for path, uevent := range partitions {
		dir := filepath.Join(sys, "devices", path)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "uevent"), []byte(uevent), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(dir, filepath.Join(class, filepath.Base(path))); err != nil {
			t.Fatal(err)
		}
	}
	return sys
}

func TestOwnPartitions(t *testing.T) {
	const (
		disk  = "MAJOR=254\nDEVNAME=vda\nDEVTYPE=disk\n"
		first = "DEVNAME=vda1\nDEVTYPE=partition\nPARTN=1\nPARTNAME=EFI system partition\n"
		data  = "DEVNAME=vda2\nDEVTYPE=partition\nPARTN=2\nPARTNAME=bcd-data\n"
	)
	sys := sysfs(t, map[string]string{"vda": disk, "vda/vda1": first, "vda/vda2": data, "vdb": "DEVNAME=vdb\n"})
	d, e, err := ownPartitions(sys)
	if err != nil || d != "vda2" || e != "vda1" {
		t.Errorf("got %q, %q, %v", d, e, err)
	}
	if _, _, err := ownPartitions(sysfs(t, map[string]string{"vda": disk, "vda/vda1": first})); !errors.Is(err, ErrNoDataPartition) {
		t.Errorf("without a data partition: %v", err)
	}
	two := sysfs(t, map[string]string{"vda": disk, "vda/vda1": first, "vda/vda2": data,
		"vdb/vdb2": strings.ReplaceAll(data, "vda", "vdb"), "vdb/vdb1": strings.ReplaceAll(first, "vda", "vdb")})
	if _, _, err := ownPartitions(two); err == nil || !strings.Contains(err.Error(), "both named") {
		t.Errorf("with two disks: %v", err)
	}
	alone := sysfs(t, map[string]string{"vda": disk, "vda/vda2": data})
	if _, _, err := ownPartitions(alone); err == nil || !strings.Contains(err.Error(), "no first partition") {
		t.Errorf("without a first partition: %v", err)
	}
}
