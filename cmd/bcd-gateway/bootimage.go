package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/cmd/internal/cli"
)

func bootImageCommand(to *target) *cobra.Command {
	cmd := &cobra.Command{Use: "boot-image", Short: "keep the files that sites serve to booting machines"}
	cmd.AddCommand(bootImagePut(to), bootImageList(to), bootImageRemove(to))
	return cmd
}

func parseArtefactKind(name string) (bcdv1.ArtefactKind, error) {
	for _, kind := range []bcdv1.ArtefactKind{
		bcdv1.ArtefactKind_ARTEFACT_KIND_UKI, bcdv1.ArtefactKind_ARTEFACT_KIND_KERNEL, bcdv1.ArtefactKind_ARTEFACT_KIND_INITRAMFS, bcdv1.ArtefactKind_ARTEFACT_KIND_IPXE,
	} {
		if word(kind) == name {
			return kind, nil
		}
	}
	return 0, cli.Usagef("--kind must be uki, kernel, initramfs or ipxe")
}

func bootImagePut(to *target) *cobra.Command {
	var kind, arch, name, cmdline, version string
	var quiet, asJSON bool
	cmd := &cobra.Command{
		Use:   "put FILE",
		Short: "store a file and have every site serve it",
		Long: `Stores a file and has every site serve it, in place of the one before of the same
kind and architecture. The names that make images gives its files, and those of
iPXE, say kind and architecture by themselves. UEFI machines boot the uki; BIOS machines and iPXE boot
kernel and initramfs; ipxe is for firmware that has no HTTP: ipxe.efi for an
architecture, and undionly.kpxe for --arch bios.`,
		Args: cli.ExactArgs("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			base := strings.ToLower(filepath.Base(args[0]))
			likely, at := guessArtefact(base)
			if kind == "" {
				kind = likely
			}
			if arch == "" {
				arch = at
			}
			k, err := parseArtefactKind(kind)
			if err != nil {
				return err
			}
			if arch == "" {
				return cli.Usagef("--arch is needed: amd64, arm64, or bios for an undionly.kpxe")
			}
			if name == "" {
				name = base
			}
			op, err := to.dial()
			if err != nil {
				return err
			}
			a := &bcdv1.BootArtefact{Kind: k, Architecture: arch, Name: name, CommandLine: cmdline, Version: version}
			stored, err := op.putArtefact(cmd.Context(), args[0], a, progressTo(cmd, quiet))
			if err != nil {
				return err
			}
			if asJSON {
				return cli.JSON(cmd.OutOrStdout(), plainJSON(stored))
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s for %s: %s, %s, SHA-256 %x\n", word(stored.GetKind()), stored.GetArchitecture(), stored.GetName(), size(stored.GetSize()), stored.GetSha256())
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&kind, "kind", "", "uki, kernel, initramfs or ipxe")
	f.StringVar(&arch, "arch", "", "amd64 or arm64; for ipxe also 386 and bios")
	f.StringVar(&name, "name", "", "name under which it is served (default: the file's, in lower case)")
	f.StringVar(&cmdline, "cmdline", "", "command line of a kernel")
	f.StringVar(&version, "version", "", "its version, for people")
	f.BoolVar(&quiet, "quiet", false, "no progress bar")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// guessArtefact reads kind and architecture from a file's name, as far as it
// has them.
func guessArtefact(name string) (kind, arch string) {
	for _, known := range [][2]string{{".uki.efi", "uki"}, {".vmlinuz", "kernel"}, {".initramfs", "initramfs"}, {".kpxe", "ipxe"}} {
		if strings.HasSuffix(name, known[0]) {
			kind = known[1]
			break
		}
	}
	if kind == "" && (strings.HasPrefix(name, "ipxe") || strings.HasPrefix(name, "snponly")) {
		kind = "ipxe"
	}
	if strings.HasSuffix(name, ".kpxe") {
		return kind, "bios"
	}
	for _, known := range []string{"amd64", "arm64"} {
		if strings.Contains(name, known) {
			arch = known
		}
	}
	return kind, arch
}

// putArtefact stores the file at path as a blob and makes it an artefact.
func (op *operator) putArtefact(ctx context.Context, path string, a *bcdv1.BootArtefact, bars io.Writer) (*bcdv1.BootArtefact, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a file; name one, for example bcd-metal-amd64.uki.efi in it", path)
	}
	digest, err := op.putBlob(ctx, path, bars)
	if err != nil {
		return nil, err
	}
	if a.Sha256, err = hex.DecodeString(digest); err != nil {
		return nil, fmt.Errorf("digest of %s: %w", path, err)
	}
	answer, err := op.PutBootArtefact(ctx, connect.NewRequest(&bcdv1.PutBootArtefactRequest{Artefact: a}))
	if err != nil {
		return nil, plain(err)
	}
	return answer.Msg.GetArtefact(), nil
}

func bootImageList(to *target) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "list the files that sites serve",
		Args:  cli.NoArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			op, err := to.dial()
			if err != nil {
				return err
			}
			answer, err := op.ListBootArtefacts(cmd.Context(), connect.NewRequest(&bcdv1.ListBootArtefactsRequest{}))
			if err != nil {
				return plain(err)
			}
			if asJSON {
				return cli.JSON(cmd.OutOrStdout(), plainJSON(answer.Msg))
			}
			if len(answer.Msg.GetArtefacts()) == 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "nothing is served yet; bcd-gateway boot-image put FILE --kind uki --arch amd64 adds one")
			}
			rows := [][]string{{"KIND", "ARCH", "NAME", "SIZE", "VERSION", "SHA256", "COMMAND LINE"}}
			for _, a := range answer.Msg.GetArtefacts() {
				rows = append(rows, []string{word(a.GetKind()), a.GetArchitecture(), a.GetName(), size(a.GetSize()), orDash(a.GetVersion()), fmt.Sprintf("%.12s", hex.EncodeToString(a.GetSha256())), orDash(a.GetCommandLine())})
			}
			return cli.Table(cmd.OutOrStdout(), rows)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func bootImageRemove(to *target) *cobra.Command {
	var kind, arch string
	cmd := &cobra.Command{
		Use:   "rm --kind KIND --arch ARCH",
		Short: "have sites serve a file no more; its blob stays",
		Args:  cli.NoArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			k, err := parseArtefactKind(kind)
			if err != nil {
				return err
			}
			op, err := to.dial()
			if err != nil {
				return err
			}
			if _, err := op.RemoveBootArtefact(cmd.Context(), connect.NewRequest(&bcdv1.RemoveBootArtefactRequest{Kind: k, Architecture: arch})); err != nil {
				return plain(err)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "the %s for %s is not served any more\n", word(k), arch)
			return nil
		},
	}
	cmd.Flags().StringVar(&kind, "kind", "", "uki, kernel, initramfs or ipxe")
	cmd.Flags().StringVar(&arch, "arch", "", "its architecture")
	return cmd
}
