package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/better-compute/bcd/cmd/internal/cli"
)

func blobCommand(to *target) *cobra.Command {
	cmd := &cobra.Command{Use: "blob", Short: "keep files in the gateway's content-addressed store"}
	var quiet bool
	put := &cobra.Command{
		Use:   "put FILE",
		Short: "store a file and print its SHA-256",
		Args:  cli.ExactArgs("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			op, err := to.dial()
			if err != nil {
				return err
			}
			digest, err := op.putBlob(cmd.Context(), args[0], progressTo(cmd, quiet))
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), digest)
			return nil
		},
	}
	put.Flags().BoolVar(&quiet, "quiet", false, "no progress bar")
	var output string
	get := &cobra.Command{
		Use:   "get SHA256",
		Short: "fetch a stored file, for example a log bundle",
		Args:  cli.ExactArgs("SHA256"),
		RunE: func(cmd *cobra.Command, args []string) error {
			op, err := to.dial()
			if err != nil {
				return err
			}
			return op.getBlob(cmd.Context(), args[0], output, cmd.OutOrStdout())
		},
	}
	get.Flags().StringVarP(&output, "output", "o", "", "write to this file instead of standard output")
	cmd.AddCommand(put, get)
	return cmd
}

// progressTo gives where a progress bar may be drawn: standard error when it
// is a terminal.
func progressTo(cmd *cobra.Command, quiet bool) io.Writer {
	if f, ok := cmd.ErrOrStderr().(*os.File); ok && !quiet && isTerminal(f) {
		return f
	}
	return nil
}

func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// putBlob stores the file at path under its digest; a file that is there
// already is not sent again.
func (op *operator) putBlob(ctx context.Context, path string, bars io.Writer) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	hash := sha256.New()
	length, err := io.Copy(hash, f)
	if err != nil {
		return "", fmt.Errorf("read %s: %w", path, err)
	}
	digest := hex.EncodeToString(hash.Sum(nil))
	url := op.base + "/v1/blobs/sha256/" + digest
	head, err := http.NewRequestWithContext(ctx, http.MethodHead, url, nil)
	if err != nil {
		return "", err
	}
	if answer, err := op.http.Do(head); err == nil {
		answer.Body.Close()
		if answer.StatusCode == http.StatusOK {
			return digest, nil
		}
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	var body io.Reader = f
	if bars != nil {
		progress := mpb.NewWithContext(ctx, mpb.WithOutput(bars))
		bar := progress.AddBar(length,
			mpb.PrependDecorators(decor.Name("upload "), decor.CountersKibiByte("% .1f / % .1f ")),
			mpb.AppendDecorators(decor.Percentage()))
		if body, err = bar.ProxyReader(f); err != nil {
			return "", err
		}
		defer progress.Wait()
		defer bar.Abort(false)
	}
	// Neither reader nor transport closes the file under us: f is closed once,
	// above.
	request, err := http.NewRequestWithContext(ctx, http.MethodPut, url, io.NopCloser(body))
	if err != nil {
		return "", err
	}
	request.ContentLength = length
	answer, err := op.http.Do(request)
	if err != nil {
		return "", fmt.Errorf("store %s: %w", path, err)
	}
	defer answer.Body.Close()
	if answer.StatusCode/100 != 2 {
		return "", fmt.Errorf("store %s: the gateway answered %s: %s", path, answer.Status, firstLine(answer.Body))
	}
	return digest, nil
}

func (op *operator) getBlob(ctx context.Context, digest, output string, stdout io.Writer) error {
	if len(digest) != 64 {
		return cli.Usagef("SHA256 is 64 hex digits")
	}
	if _, err := hex.DecodeString(digest); err != nil {
		return cli.Usagef("SHA256 is 64 hex digits")
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, op.base+"/v1/blobs/sha256/"+digest, nil)
	if err != nil {
		return err
	}
	answer, err := op.http.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("the gateway answered %s: %s", answer.Status, firstLine(answer.Body))
	}
	to, commit := stdout, func() error { return nil }
	if output != "" {
		temporary, err := os.CreateTemp(filepath.Dir(output), ".blob-*")
		if err != nil {
			return err
		}
		defer os.Remove(temporary.Name())
		defer temporary.Close()
		to = temporary
		commit = func() error {
			if err := temporary.Sync(); err != nil {
				return err
			}
			return os.Rename(temporary.Name(), output)
		}
	}
	hash := sha256.New()
	if _, err := io.Copy(io.MultiWriter(to, hash), answer.Body); err != nil {
		return fmt.Errorf("fetch: %w", err)
	}
	if got := hex.EncodeToString(hash.Sum(nil)); got != digest {
		return fmt.Errorf("what came has the SHA-256 %s, not the one asked for", got)
	}
	return commit()
}

// firstLine reads at most one line of an error body.
func firstLine(r io.Reader) string {
	b, _ := io.ReadAll(io.LimitReader(r, 1024))
	for i, c := range b {
		if c == '\n' {
			return string(b[:i])
		}
	}
	return string(b)
}
