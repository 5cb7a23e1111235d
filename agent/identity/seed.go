package identity

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/better-compute/bcd/agent/durable"
	"github.com/better-compute/bcd/agent/pki"
)

// SeedDir is the folder of the seed on the EFI system partition.
const SeedDir = "bcd/seed"

const (
	// maxSeedFile bounds config.toml, roots.pem and the join key.
	maxSeedFile = 1 << 20
	// maxUserData is what a deploy can carry as user data.
	maxUserData = 1 << 20
)

// SeedTarget says where a seed's files go.
type SeedTarget struct {
	// ConfigPath is /etc/bcd/config.toml, TrustDir /etc/bcd/trust, DataDir
	// /var/lib/bcd.
	ConfigPath, TrustDir, DataDir string
	// CheckConfig judges config.toml before anything is installed; may be nil.
	CheckConfig func(data []byte) error
}

// Seed is what an import found.
type Seed struct {
	// Installed are the paths written.
	Installed []string
	// Token is the join token, nil when the seed has none.
	Token *Token
	// UserData is the path of the user data, "" when there are none.
	UserData string
}

// ErrNoSeed: there is nothing to import, because nobody left a seed or because
// it served its purpose.
var ErrNoSeed = errors.New("no seed")

// ImportSeed installs what the deployer left below esp (the mounted EFI system
// partition). A seed is alive as long as it holds its join token: an import
// that was cut off is done again, and one that ended in a join never touches
// the machine's files again. Everything is checked before anything is
// installed; each file appears whole; config.toml is the last.
func ImportSeed(esp string, to SeedTarget) (*Seed, error) {
	root, err := os.OpenRoot(filepath.Join(esp, SeedDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrNoSeed
	}
	if err != nil {
		return nil, fmt.Errorf("seed: %w", err)
	}
	defer root.Close()

	rawToken, err := durable.ReadIn(root, credentialName, maxToken)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrNoSeed
	}
	if err != nil {
		return nil, fmt.Errorf("seed: %w", err)
	}
	if len(bytes.Trim(rawToken, "\x00 \r\n\t")) == 0 {
		// RemoveToken was cut off between overwriting and unlinking.
		return nil, ErrNoSeed
	}
	token, err := sourced(rawToken, "seed: "+credentialName)
	if err != nil {
		return nil, err
	}
	seed := &Seed{Token: token}
	if err := seed.install(root, to); err != nil {
		token.Destroy()
		return nil, fmt.Errorf("seed: %w", err)
	}
	return seed, nil
}

func (s *Seed) install(root *os.Root, to SeedTarget) error {
	config, err := durable.ReadIn(root, "config.toml", maxSeedFile)
	if err != nil {
		return err
	}
	if to.CheckConfig != nil {
		if err := to.CheckConfig(config); err != nil {
			return err
		}
	}
	roots, err := durable.ReadIn(root, "roots.pem", maxSeedFile)
	if err != nil {
		return err
	}
	if _, err := pki.ParseRoots(roots); err != nil {
		return fmt.Errorf("roots.pem: %w", err)
	}
	jwk, err := durable.ReadIn(root, "join-encryption.jwk", maxSeedFile)
	if err != nil {
		return err
	}
	if _, err := pki.ParseJWK(jwk); err != nil {
		return fmt.Errorf("join-encryption.jwk: %w", err)
	}
	userData, err := durable.ReadIn(root, "user-data", maxUserData)
	hasUserData := err == nil
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	defer clear(userData)

	type target struct {
		path string
		data []byte
		mode fs.FileMode
	}
	targets := []target{
		{filepath.Join(to.TrustDir, "roots.pem"), roots, 0o644},
		{filepath.Join(to.TrustDir, "join-encryption.jwk"), jwk, 0o644},
	}
	if hasUserData {
		// User data may hold passwords.
		s.UserData = filepath.Join(to.DataDir, "user-data")
		targets = append(targets, target{s.UserData, userData, 0o600})
	}
	targets = append(targets, target{to.ConfigPath, config, 0o640})
	for dir, mode := range map[string]fs.FileMode{to.DataDir: 0o700, to.TrustDir: 0o755, filepath.Dir(to.ConfigPath): 0o755} {
		if err := os.MkdirAll(dir, mode); err != nil {
			return err
		}
	}
	for _, t := range targets {
		if err := durable.WriteFile(t.path, t.data, t.mode); err != nil {
			return err
		}
		s.Installed = append(s.Installed, t.path)
	}
	return nil
}

// RemoveToken ends the seed's life: the join token below esp, and the user
// data, which may hold secrets too and have been installed, are overwritten,
// unlinked and synced. It is called once the join is durable and at every
// later start, and is no error when there is nothing left. The token goes
// first: without it no half-overwritten user data are ever imported again.
func RemoveToken(esp string) error {
	for _, name := range []string{credentialName, "user-data"} {
		if err := durable.Shred(filepath.Join(esp, SeedDir, name)); err != nil {
			return fmt.Errorf("seed: %w", err)
		}
	}
	return nil
}
