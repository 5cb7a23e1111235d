package debian

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path"
	"strings"
)

// File is one file of a package. Name is clean and relative, as in
// "usr/lib/modules/…". Link is the target of a symbolic link, else empty.
type File struct {
	Name, Link string
	Size       int64
}

// Walk calls visit for each regular file, symbolic and hard link of a package
// file, in the package's own order. read must be used within the call. Nothing is
// written to disk.
func Walk(ctx context.Context, deb string, visit func(f File, read io.Reader) error) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cmd := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", deb)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("unpack %s: %w", deb, err)
	}
	if err := walkTar(out, visit); err != nil {
		cancel() // the child may be blocked on a pipe that nobody reads
		return errors.Join(fmt.Errorf("unpack %s: %w", deb, err), ignoreKill(cmd.Wait()))
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("unpack %s: %w: %s", deb, err, lastLines(stderr.String(), 3))
	}
	return nil
}

// ignoreKill drops the exit status of a child that we ended ourselves.
func ignoreKill(err error) error {
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return nil
	}
	return err
}

func walkTar(r io.Reader, visit func(f File, read io.Reader) error) error {
	for archive := tar.NewReader(r); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			// dpkg-deb pads the archive; leave it nothing to write.
			_, err := io.Copy(io.Discard, r)
			return err
		}
		if err != nil {
			return err
		}
		name := path.Clean(strings.TrimPrefix(header.Name, "./"))
		if path.IsAbs(name) || name == ".." || strings.HasPrefix(name, "../") {
			return fmt.Errorf("member %q lies outside the package", header.Name)
		}
		f := File{Name: name, Size: header.Size}
		switch header.Typeflag {
		case tar.TypeReg:
		case tar.TypeSymlink:
			f.Link = header.Linkname
		case tar.TypeLink:
			// Relative to the archive's root, unlike a symbolic link's target.
			f.Link = "/" + path.Clean(strings.TrimPrefix(header.Linkname, "./"))
		default:
			continue
		}
		if err := visit(f, archive); err != nil {
			return err
		}
	}
}
