package main

import (
	"encoding/hex"
	"fmt"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/cmd/internal/cli"
)

func deployCommand(to *target) *cobra.Command {
	var flags sendFlags
	var userData, imageSHA, rawSHA, site string
	var noReboot bool
	var hints bcdv1.DiskHints
	cmd := &cobra.Command{
		Use:   "deploy MACHINE IMAGE",
		Short: "write an operating system image to a machine's disk and boot it",
		Long: `IMAGE is a file (raw, zstd, gzip or xz; it is put into the gateway's blob store
first), the SHA-256 of a blob that is there, or an https URL with its digest in
--image-sha256 or --raw-sha256. The machine must be in the ramdisk.`,
		Args: cli.ExactArgs("MACHINE", "IMAGE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			request := &bcdv1.DeployRequest{
				Machine: args[0], Image: args[1], NoReboot: noReboot, Site: site,
				TtlSeconds: int64(flags.ttl / time.Second), IdempotencyKey: flags.key,
			}
			var err error
			if request.DiskHints, err = proto.Marshal(&hints); err != nil {
				return err
			}
			if request.ImageRef, err = imageRef(imageSHA, rawSHA); err != nil {
				return err
			}
			if userData != "" {
				if request.UserData, err = os.ReadFile(userData); err != nil {
					return err
				}
			}
			op, err := to.dial()
			if err != nil {
				return err
			}
			if !strings.HasPrefix(request.Image, "https://") && !isDigest(request.Image) {
				if request.Image, err = op.putBlob(cmd.Context(), args[1], progressTo(cmd, flags.quiet)); err != nil {
					return err
				}
			}
			answer, err := op.Deploy(cmd.Context(), connect.NewRequest(request))
			if err != nil {
				return plain(err)
			}
			return op.finish(cmd, answer.Msg.Command, flags)
		},
	}
	flags.add(cmd)
	cmd.Flags().Lookup("ttl").DefValue = "2h0m0s"
	flags.ttl = 2 * time.Hour
	f := cmd.Flags()
	f.StringVar(&userData, "user-data", "", "file handed to the installed system; it travels as a secret")
	f.StringVar(&imageSHA, "image-sha256", "", "SHA-256 of the image as it travels, for an https URL")
	f.StringVar(&rawSHA, "raw-sha256", "", "SHA-256 of the raw image")
	f.StringVar(&site, "site", "", "site of the installed node; the machine's own when empty")
	f.BoolVar(&noReboot, "no-reboot", false, "stay in the ramdisk afterwards")
	f.StringVar(&hints.Serial, "disk-serial", "", "the disk with this serial number")
	f.StringVar(&hints.Wwn, "disk-wwn", "", "the disk with this WWN")
	f.StringVar(&hints.Model, "disk-model", "", "a disk of this model; * at either end matches anything")
	f.StringVar(&hints.ByPath, "disk-by-path", "", "the disk at this /dev/disk/by-path name")
	f.StringVar(&hints.Transport, "disk-transport", "", "a disk of this transport: nvme, sata, sas, virtio")
	f.StringVar(&hints.Rotational, "disk-rotational", "", "yes or no")
	f.Int64Var(&hints.MinBytes, "disk-min-bytes", 0, "a disk of at least this size")
	f.Int64Var(&hints.MaxBytes, "disk-max-bytes", 0, "a disk of at most this size")
	f.BoolVar(&hints.Smallest, "disk-smallest", false, "the smallest of those that match")
	f.BoolVar(&hints.First, "disk-first", false, "the first of those that match, by path")
	return cmd
}

func isDigest(s string) bool {
	_, err := hex.DecodeString(s)
	return err == nil && len(s) == 64
}

func imageRef(imageSHA, rawSHA string) (*bcdv1.ImageRef, error) {
	ref := &bcdv1.ImageRef{}
	for _, d := range []struct {
		name, text string
		to         *[]byte
	}{{"image-sha256", imageSHA, &ref.ImageSha256}, {"raw-sha256", rawSHA, &ref.RawSha256}} {
		if d.text == "" {
			continue
		}
		if !isDigest(d.text) {
			return nil, cli.Usagef("--%s must be 64 hex digits", d.name)
		}
		raw, err := hex.DecodeString(d.text)
		if err != nil {
			return nil, fmt.Errorf("--%s: %w", d.name, err)
		}
		*d.to = raw
	}
	return ref, nil
}
