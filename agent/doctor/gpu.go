package doctor

import (
	"context"
	"fmt"
	"strings"

	"github.com/better-compute/bcd/agent/host"
)

// gpu gives one line for each GPU.
func (in Inputs) gpu(ctx context.Context) Outcome {
	s, err := in.GPUs(ctx)
	if err != nil {
		return Outcome{} // the nvml line says it
	}
	var o Outcome
	for _, g := range s.GPUs {
		o.Lines = append(o.Lines, gpuLine(g))
	}
	return o
}

func gpuLine(g host.GPUState) Line {
	l := Line{ID: "gpu/" + g.UUID, Name: "gpu", Status: OK}
	l.Detail = fmt.Sprintf("%s %s: %s busy, %s, %s W, %s GiB", g.UUID, g.Name,
		unit(g.BusyPercent, "%"), unit(g.TemperatureC, " C"),
		pair(g.PowerMilliwatts, g.LimitMilliwatts, watts), pair(g.MemoryUsedMiB, g.MemoryTotalMiB, gib))

	var failures, warnings []string
	if n, ok := g.RemapFailed.Get(); ok && n != 0 {
		failures = append(failures, "row remapping failed")
	}
	if n, ok := g.UncorrectableECC.Get(); ok && n > 0 {
		failures = append(failures, fmt.Sprintf("%s since the driver loaded", plural(int(n), "uncorrectable ECC error")))
	}
	if n, ok := g.RemapPending.Get(); ok && n != 0 {
		warnings = append(warnings, "a row remap waits for a GPU reset")
	}
	if g.MIGPending != "" && g.MIG != "" && g.MIGPending != g.MIG {
		warnings = append(warnings, "a MIG mode change waits for a GPU reset")
	}
	if a := g.RecoveryAction; a != "" && a != "None" {
		warnings = append(warnings, "the driver advises: "+a)
	}
	for _, r := range []struct {
		what string
		host.Reading
	}{{"temperature", g.TemperatureC}, {"ECC errors", g.UncorrectableECC}, {"row remapping", g.RemapFailed}} {
		if r.State == host.Failed {
			warnings = append(warnings, "the driver cannot read its "+r.what)
		}
	}
	switch {
	case len(failures) > 0:
		l.Status, l.Remedy = Fail, "nvidia-smi -q -i "+g.UUID
	case len(warnings) > 0:
		l.Status, l.Remedy = Warn, "nvidia-smi --gpu-reset -i "+g.UUID
		if g.RecoveryAction == "Reboot" {
			l.Remedy = "reboot"
		}
	}
	for _, text := range append(failures, warnings...) {
		l.Detail += "; " + text
	}
	return l
}

func unit(r host.Reading, suffix string) string {
	n, ok := r.Get()
	if !ok {
		return missing(r) + strings.TrimLeft(suffix, "%")
	}
	return fmt.Sprintf("%d%s", n, suffix)
}

func pair(a, b host.Reading, print func(int64) string) string {
	one := func(r host.Reading) string {
		if n, ok := r.Get(); ok {
			return print(n)
		}
		return missing(r)
	}
	return one(a) + "/" + one(b)
}

func missing(r host.Reading) string {
	if r.State == host.Failed {
		return "error"
	}
	return "n/a"
}

func watts(milliwatts int64) string { return fmt.Sprintf("%d", (milliwatts+500)/1000) }

func gib(mib int64) string { return fmt.Sprintf("%.1f", float64(mib)/1024) }
