package kinds

import (
	"testing"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

func TestTableIsWhole(t *testing.T) {
	seen := map[string]bool{}
	for _, k := range All() {
		name := k.GetName()
		if seen[name] {
			t.Errorf("%s is there twice", name)
		}
		seen[name] = true
		if len(k.Roles) == 0 || k.Lane == bcdv1.Lane_LANE_UNSPECIFIED || k.Result == nil || k.Summary == "" {
			t.Errorf("%s lacks roles, lane, result or summary: %v", name, k.KindOptions)
		}
		if k.MaxResultBytes == 0 || k.MaxResultBytes > 64<<10 {
			t.Errorf("%s: max_result_bytes is %d, want 1 to 65536", name, k.MaxResultBytes)
		}
	}
	for _, name := range []string{"diag.ping", "inventory.refresh", "node.reboot", "logs.collect", "deploy.image"} {
		if !seen[name] {
			t.Errorf("%s is missing", name)
		}
	}
	if k, ok := ByName("deploy.image"); !ok || k.Allows(bcdv1.Role_ROLE_NODE) || !k.Allows(bcdv1.Role_ROLE_RAMDISK) {
		t.Error("deploy.image is the ramdisk's alone")
	}
	if _, ok := ByName("no.such"); ok {
		t.Error("found a kind that does not exist")
	}
}
