//go:build !nonvml

package host

// gpuReading says whether this build reads GPUs through nvidia-smi.
const gpuReading = true
