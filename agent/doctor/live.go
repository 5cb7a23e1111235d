package doctor

import (
	"context"
	"fmt"
	"syscall"

	"github.com/better-compute/bcd/agent/host"
)

// FromHost fills in the inputs that the machine itself answers: GPUs,
// inventory, /dev/kvm, IOMMUs, clock and TPM. The caller adds configuration,
// identity, disk and journal. The inventory is read once for one Inputs, so an
// agent that reports again makes new ones.
func FromHost(r host.Roots) Inputs {
	facts := once(func(ctx context.Context) (host.Facts, error) { return host.Read(ctx, r) })
	return Inputs{
		GPUs: func(ctx context.Context) (host.GPUSample, error) { return host.SampleGPUs(ctx, r) },
		Hardware: func(ctx context.Context) (Hardware, error) {
			f, err := facts(ctx)
			return Hardware{Sections: f.Sections(), PCIGPUs: f.GPU.PCICount}, err
		},
		KVM:        func() bool { return host.KVM(r) },
		IOMMUUnits: func() int { return host.IOMMUUnits(r) },
		Clock:      host.ReadClock,
		TPM: func(ctx context.Context) (host.TPM, error) {
			f, err := facts(ctx)
			return f.TPM, err
		},
	}
}

// StatDisk measures the file system that path is on.
func StatDisk(path string) (Disk, error) {
	var s syscall.Statfs_t
	if err := syscall.Statfs(path, &s); err != nil {
		return Disk{}, fmt.Errorf("free space of %s: %w", path, err)
	}
	size := int64(s.Bsize)
	return Disk{Path: path, FreeBytes: int64(s.Bavail) * size, TotalBytes: int64(s.Blocks) * size}, nil
}
