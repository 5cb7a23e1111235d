package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/better-compute/bcd/agent/config"
	"github.com/better-compute/bcd/agent/durable"
	"github.com/better-compute/bcd/agent/host"
	"github.com/better-compute/bcd/agent/identity"
	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/boot"
)

// place is where a daemon stands: whom it talks to and whom it trusts. A node
// reads it from its configuration file, the ramdisk from what the firmware,
// the command line and the image say.
type place struct {
	config.Config
	role    bcdv1.Role
	roots   *pki.Roots
	joinKey []byte
	// source says where the gateway's address came from, for doctor.
	source string
	// floor is a time that has certainly passed: when the image was made.
	floor time.Time
}

// maxJoinKey bounds join-encryption.jwk: a P-256 JWK has about 200 bytes.
const maxJoinKey = 16 << 10

// installedPlace is a node's, from its configuration file.
func installedPlace(path string, role bcdv1.Role) (*place, error) {
	c, err := config.Load(path)
	if err != nil {
		return nil, err
	}
	p := &place{Config: c, role: role, source: path}
	return p, p.trust(c.RootsPath(), c.JoinKeyPath())
}

// ramdiskPlace is that of a machine that has nothing but its RAM. The gateway
// may be missing from the answer's Config: then nothing can be reached.
func ramdiskPlace(root string) (*place, boot.Config, error) {
	told, err := boot.ReadConfig(os.DirFS(root))
	if err != nil {
		return nil, told, err
	}
	role, err := pki.ParseRole(told.Role)
	if err != nil {
		return nil, told, err
	}
	p := &place{Config: config.Default(), role: role, source: told.Sources["gateway"]}
	p.GatewayURL, p.Site = told.Gateway, told.Site
	if t, err := time.Parse(time.RFC3339, told.Image.BuildTime); err == nil {
		p.floor = t
	}
	if p.GatewayURL == "" {
		return nil, told, errors.New("nobody says where the gateway is: build the image with GATEWAY=https://HOST:PORT, or give the SMBIOS type 11 string bcd.gateway=https://HOST:PORT")
	}
	return p, told, p.trust(p.RootsPath(), filepath.Join(p.TrustDir, "join-encryption.jwk"))
}

func (p *place) trust(rootsPath, joinKeyPath string) error {
	var err error
	if p.roots, err = pki.LoadRoots(rootsPath); err != nil {
		return fmt.Errorf("trust roots: %w (bcd-gateway keys export-trust writes them)", err)
	}
	p.joinKey, err = durable.ReadFile(joinKeyPath, maxJoinKey)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("join key: %w", err)
	}
	return nil
}

func (p *place) store() identity.Store { return identity.Store{Dir: p.DataDir} }

// hardware is where this machine is read from.
func (p *place) hardware() host.Roots {
	roots := host.Live()
	roots.DataDir = p.DataDir
	return roots
}
