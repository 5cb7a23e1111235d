package deploy

import (
	"context"
	"errors"
	"fmt"

	"github.com/better-compute/bcd/deploy/disk"
)

// Code is a word for programs that says why a deployment failed.
type Code string

// The codes. HTTP answers have their own: "HTTP_404".
const (
	BadRequest         Code = "BAD_REQUEST"
	NoDisk             Code = "NO_DISK"
	AmbiguousDisk      Code = "AMBIGUOUS_DISK"
	DiskMismatch       Code = "DISK_MISMATCH"
	DiskBusy           Code = "DISK_BUSY"
	DiskIO             Code = "DISK_IO"
	ImageTooLarge      Code = "IMAGE_TOO_LARGE"
	ImageInvalid       Code = "IMAGE_INVALID"
	ImageChanged       Code = "IMAGE_CHANGED"
	ImageUnreachable   Code = "IMAGE_UNREACHABLE"
	UntrustedServer    Code = "UNTRUSTED_SERVER"
	FormatMismatch     Code = "FORMAT_MISMATCH"
	SectorSize         Code = "SECTOR_SIZE"
	ShortBody          Code = "SHORT_BODY"
	SizeMismatch       Code = "SIZE_MISMATCH"
	DigestMismatch     Code = "DIGEST_MISMATCH"
	ReadbackMismatch   Code = "READBACK_MISMATCH"
	InsufficientMemory Code = "INSUFFICIENT_MEMORY"
	NoESP              Code = "NO_ESP"
	LoaderMissing      Code = "LOADER_MISSING"
	SeedFailed         Code = "SEED_FAILED"
	BootEntryFailed    Code = "BOOT_ENTRY_FAILED"
	Cancelled          Code = "CANCELLED"
	DeadlineExceeded   Code = "DEADLINE_EXCEEDED"
	Failed             Code = "FAILED"
)

// Error is how a deployment fails: Message is a sentence with the value and
// what to do, Phase is where, Wrote says whether the disk was touched. Where
// it was, and Phase is PhaseCommit or earlier, the disk has no partition table:
// the machine goes on to its next boot device, and the deployment can be sent
// again.
type Error struct {
	Code    Code
	Message string
	Phase   Phase
	Wrote   bool
	Err     error
}

func (e *Error) Error() string { return e.Message }
func (e *Error) Unwrap() error { return e.Err }

// fail makes an Error; a %w in the format is kept for errors.Is.
func fail(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Message: err.Error(), Err: errors.Unwrap(err)}
}

// asError gives any error its code.
func asError(ctx context.Context, err error, fallback Code) *Error {
	var e *Error
	switch {
	case errors.As(err, &e):
		return e
	case ctx.Err() != nil && errors.Is(ctx.Err(), context.DeadlineExceeded):
		return fail(DeadlineExceeded, "the deadline passed before the deployment was done: give it more time (%w)", err)
	case ctx.Err() != nil:
		return fail(Cancelled, "the deployment was cancelled (%w)", err)
	case errors.Is(err, disk.ErrNone):
		return fail(NoDisk, "%w", err)
	case errors.Is(err, disk.ErrAmbiguous):
		return fail(AmbiguousDisk, "%w", err)
	case errors.Is(err, disk.ErrMismatch):
		return fail(DiskMismatch, "%w", err)
	case errors.Is(err, disk.ErrBusy):
		return fail(DiskBusy, "%w", err)
	}
	return fail(fallback, "%w", err)
}
