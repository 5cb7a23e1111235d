//go:build fakehw

package doctor

import (
	"context"
	"strings"
	"testing"

	"github.com/better-compute/bcd/agent/host"
)

func TestFakeMachineIsHealthy(t *testing.T) {
	var out strings.Builder
	r := Run(context.Background(), FromHost(host.Roots{Seed: 7}))
	if err := r.WriteText(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"ok    nvml      driver 570.172.08, 8 GPUs\n", "ok    hardware  fakehw: 8 GPUs, 13 inventory sections hashed\n",
		"ok    kvm       /dev/kvm present\n", "ok    iommu     16 IOMMU units\n", " NVIDIA H100 80GB HBM3: 0% busy, ", " C, 72/700 W, 0.0/79.6 GiB\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("lacks %q:\n%s", want, &out)
		}
	}
}
