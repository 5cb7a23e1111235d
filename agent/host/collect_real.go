//go:build !fakehw

package host

import "context"

// Fake says whether this build makes its machine up.
const Fake = false

func readFacts(ctx context.Context, r Roots) Facts { return recordedFacts(ctx, r) }

// BootID returns the id of this boot, which changes with each boot and
// with nothing else.
func BootID(r Roots) (string, error) { return r.bootID() }

// SampleGPUs reads the GPUs' state. Errors are those of [GPUProbe.Sample];
// roots without a probe give [ErrNoNVIDIASMI].
func SampleGPUs(ctx context.Context, r Roots) (GPUSample, error) {
	if r.GPUs == nil {
		return GPUSample{}, ErrNoNVIDIASMI
	}
	return r.GPUs.Sample(ctx)
}

// KVM reports whether the machine can run virtual machines: /dev/kvm is there.
func KVM(r Roots) bool { return exists(r.Dev, "kvm") }

// IOMMUUnits counts the IOMMUs the kernel runs.
func IOMMUUnits(r Roots) int { return r.iommuUnits() }
