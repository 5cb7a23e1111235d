package host

import (
	"context"
	"errors"
	"fmt"
)

// recordedFacts reads a machine from its roots.
func recordedFacts(ctx context.Context, r Roots) Facts {
	var f Facts
	var err error
	dmi, err := r.readSMBIOS()
	// What the table did not give is missing in each section made of it.
	for _, section := range []string{"system", "firmware", "memory"} {
		f.fail(section, err)
	}
	f.System = r.readSystem(dmi)
	f.Firmware = r.readFirmware(dmi)
	f.Boot = r.readBoot(f.Firmware)
	f.CPU, err = r.readCPU()
	f.fail("cpu", err)
	f.Memory, err = r.readMemory(dmi)
	f.fail("memory", err)
	f.NUMA, err = r.readNUMA()
	f.fail("numa", err)
	f.PCI, err = r.readPCI()
	f.fail("pci", err)
	f.Block, err = r.readBlock()
	f.fail("block", err)
	f.Net, f.Link, err = r.readNet()
	f.fail("net", err)
	f.TPM = r.readTPM(dmi)
	f.Kernel, err = r.readKernel()
	f.fail("kernel", err)
	f.GPU, err = r.readGPUs(ctx, f.PCI)
	f.fail("gpu", err)
	return f
}

func (r Roots) readGPUs(ctx context.Context, pci []PCI) (GPUs, error) {
	g := GPUs{PCICount: countPCIGPUs(pci), Reader: "none", Devices: []GPU{}}
	if r.GPUs == nil {
		return g, nil
	}
	sample, err := r.GPUs.Sample(ctx)
	switch {
	case errors.Is(err, ErrNoGPUReader), errors.Is(err, ErrNoNVIDIASMI):
		return g, nil
	case errors.Is(err, ErrNoDevices), errors.Is(err, ErrDriverNotLoaded):
		if g.PCICount == 0 {
			return g, nil // a driver and no GPU is a machine without GPUs
		}
		g.Reader = "failed"
		return g, err
	case err != nil:
		g.Reader = "failed"
		return g, err
	}
	g.Reader, g.Driver = "nvidia-smi", sample.Driver
	for _, d := range sample.GPUs {
		g.Devices = append(g.Devices, d.GPU)
	}
	if len(g.Devices) != g.PCICount {
		return g, fmt.Errorf("the PCI bus shows %s, nvidia-smi %d", count(g.PCICount, "GPU"), len(g.Devices))
	}
	return g, nil
}
