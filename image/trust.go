package image

import (
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/better-compute/bcd/image/cpio"
)

// maxTrustFile bounds each file of the trust folder; real ones have 1 kB.
const maxTrustFile = 1 << 20

// trustFile is one file of the trust folder.
type trustFile struct {
	name string
	data []byte
}

// readTrust reads the roots and the public key to which join tokens are
// sealed, and refuses private keys: an image is served to anyone who asks.
func readTrust(dir string) ([]trustFile, error) {
	if dir == "" {
		return nil, errors.New("no trust folder: give -trust DIR with roots.pem and join-encryption.jwk, as `bcd-gateway keys init` makes them")
	}
	var out []trustFile
	for _, f := range []struct {
		name     string
		check    func([]byte) error
		optional bool
	}{
		// The last one has the certificate authorities of https servers with
		// images, for a fleet that has such servers beside its gateway.
		{"join-encryption.jwk", checkJWK, false}, {"roots.pem", checkRoots, false}, {"image-roots.pem", checkRoots, true},
	} {
		name := filepath.Join(dir, f.name)
		info, err := os.Stat(name)
		if f.optional && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("trust folder: %w", err)
		}
		if info.Size() > maxTrustFile {
			return nil, fmt.Errorf("trust folder: %s has %d bytes, more than %d", name, info.Size(), maxTrustFile)
		}
		data, err := os.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("trust folder: %w", err)
		}
		if err := f.check(data); err != nil {
			return nil, fmt.Errorf("trust folder: %s: %w", name, err)
		}
		out = append(out, trustFile{f.name, data})
	}
	return out, nil
}

func checkRoots(data []byte) error {
	count := 0
	for {
		block, rest := pem.Decode(data)
		if block == nil {
			break
		}
		data = rest
		if block.Type != "CERTIFICATE" {
			return fmt.Errorf("holds a %s: only root certificates may go into an image", block.Type)
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return fmt.Errorf("certificate %d: %w", count+1, err)
		}
		count++
	}
	if count == 0 {
		return errors.New("holds no certificate")
	}
	return nil
}

func checkJWK(data []byte) error {
	var key map[string]any
	if err := json.Unmarshal(data, &key); err != nil {
		return fmt.Errorf("is not a JWK: %w", err)
	}
	for _, private := range []string{"d", "p", "q", "dp", "dq", "qi", "k"} {
		if _, ok := key[private]; ok {
			return fmt.Errorf("holds a private key (member %q): give the public JWK", private)
		}
	}
	if key["kty"] != "EC" && key["kty"] != "OKP" {
		return fmt.Errorf("has kty %v: want an EC key for ECDH-ES+A256KW", key["kty"])
	}
	return nil
}

// trustEntries is the second archive segment: what differs between operators.
func (o Options) trustEntries(trust []trustFile) ([]cpio.Entry, error) {
	facts, err := json.Marshal(struct {
		Version   string `json:"version"`
		Profile   string `json:"profile"`
		BuildTime string `json:"build_time"`
		Gateway   string `json:"gateway"`
	}{o.Version, o.Profile, o.buildTime(), o.Gateway})
	if err != nil {
		return nil, err
	}
	out := []cpio.Entry{
		cpio.Dir("etc", 0o755), cpio.Dir("etc/bcd", 0o755),
		cpio.File("etc/bcd/image.json", 0o644, append(facts, '\n')),
		cpio.Dir("etc/bcd/trust", 0o755),
	}
	for _, f := range trust {
		out = append(out, cpio.File("etc/bcd/trust/"+f.name, 0o644, f.data))
	}
	return out, nil
}
