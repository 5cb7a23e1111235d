// Package keys makes and loads the keys of a gateway, or of several that share
// one set.
//
// A set is a directory (0700) with
//
//	roots.pem             the root certificate that every node pins
//	offline/root.key      its key: needed only to make the two below again;
//	                      move it to where nobody can reach it
//	issuer.crt, .key      issues node and gateway TLS certificates
//	signer.crt, .key      signs commands, specs and join records
//	join.key              opens what machines seal when they join
//	join-encryption.jwk   its public half, for images and nodes
//	operator.token        lets an operator in over TLS
package keys

import (
	"crypto/ecdsa"
	"crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/better-compute/bcd/agent/intent"
	"github.com/better-compute/bcd/agent/pki"
)

const (
	rootsFile     = "roots.pem"
	rootKeyFile   = "offline/root.key"
	issuerCert    = "issuer.crt"
	issuerKey     = "issuer.key"
	signerCert    = "signer.crt"
	signerKey     = "signer.key"
	joinKeyFile   = "join.key"
	joinJWKFile   = "join-encryption.jwk"
	operatorFile  = "operator.token"
	maxTokenBytes = 256
)

// ErrNone is returned by Load for a directory without a key set.
var ErrNone = errors.New("no key set")

// Set is what a gateway needs of the keys; the root's is not among it.
type Set struct {
	Dir    string
	Roots  *pki.Roots
	Issuer *pki.Authority
	Signer *intent.Signer
	// SignerExpires is when commands can no longer be signed.
	SignerExpires time.Time
	Join          *ecdsa.PrivateKey
	JoinJWK       []byte
	// JoinThumbprint is that of RFC 7638, as JoinRequest carries it.
	JoinThumbprint string
	OperatorToken  string
}

// Init makes a new set in dir, whole or not at all. It never replaces one:
// every node that pins the old root would be lost.
func Init(dir string, now time.Time) (*Set, error) {
	if _, err := os.Stat(filepath.Join(dir, rootsFile)); err == nil {
		return nil, fmt.Errorf("keys %s: there is a key set already, and every node pins its root; use it, or name another directory", dir)
	}
	parent := filepath.Dir(dir)
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return nil, fmt.Errorf("keys: %w", err)
	}
	temp, err := os.MkdirTemp(parent, "."+filepath.Base(dir)+".new-")
	if err != nil {
		return nil, fmt.Errorf("keys: %w", err)
	}
	defer os.RemoveAll(temp)
	if err := write(temp, now); err != nil {
		return nil, fmt.Errorf("keys %s: %w", dir, err)
	}
	// An empty directory that stands ready is replaced, anything else is not.
	if err := os.Rename(temp, dir); err != nil {
		return nil, fmt.Errorf("keys %s: %w; it must not exist, or be empty", dir, err)
	}
	if err := syncDir(parent); err != nil {
		return nil, err
	}
	return Load(dir)
}

func write(dir string, now time.Time) error {
	if err := os.Mkdir(filepath.Join(dir, "offline"), 0o700); err != nil {
		return err
	}
	root, err := pki.NewRoot("fleet", now)
	if err != nil {
		return err
	}
	issuer, err := root.NewIssuer("gateway", now)
	if err != nil {
		return err
	}
	signer, err := pki.NewKey()
	if err != nil {
		return err
	}
	signerChain, err := root.IssueCommandSigner("gateway", signer.Public(), now, pki.MaxLeafLifetime)
	if err != nil {
		return err
	}
	join, err := pki.GenerateJoinKey()
	if err != nil {
		return err
	}
	jwk, err := pki.MarshalJWK(&join.PublicKey)
	if err != nil {
		return err
	}
	secret := make([]byte, 32)
	rand.Read(secret)
	token := "bcop_" + strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(secret))
	in := func(name string) string { return filepath.Join(dir, name) }
	return errors.Join(
		pki.SaveKey(in(rootKeyFile), root.Key),
		issuer.Save(in(issuerCert), in(issuerKey)),
		pki.SaveCertificates(in(signerCert), signerChain),
		pki.SaveKey(in(signerKey), signer),
		pki.SaveKey(in(joinKeyFile), join),
		writeFile(in(joinJWKFile), jwk, 0o644),
		writeFile(in(operatorFile), []byte(token+"\n"), 0o600),
		pki.SaveCertificates(in(rootsFile), [][]byte{root.Certificate.Raw}),
	)
}

// Load reads a set and checks that its parts belong together.
func Load(dir string) (*Set, error) {
	in := func(name string) string { return filepath.Join(dir, name) }
	if _, err := os.Stat(in(rootsFile)); errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("keys %s: %w; make one with: bcd-gateway keys init --out %s", dir, ErrNone, dir)
	}
	s := &Set{Dir: dir}
	var err error
	if s.Roots, err = pki.LoadRoots(in(rootsFile)); err != nil {
		return nil, fmt.Errorf("keys: %w", err)
	}
	if s.Issuer, err = pki.LoadAuthority(in(issuerCert), in(issuerKey)); err != nil {
		return nil, fmt.Errorf("keys: %w", err)
	}
	certs, err := pki.LoadCertificates(in(signerCert), pki.MaxChain)
	if err != nil {
		return nil, fmt.Errorf("keys: %w", err)
	}
	key, err := pki.LoadKey(in(signerKey))
	if err != nil {
		return nil, fmt.Errorf("keys: %w", err)
	}
	if !key.PublicKey.Equal(certs[0].PublicKey) {
		return nil, fmt.Errorf("keys: %s is not the key of %s", in(signerKey), in(signerCert))
	}
	s.Signer = &intent.Signer{Key: key}
	for _, cert := range certs {
		s.Signer.Chain = append(s.Signer.Chain, cert.Raw)
	}
	s.SignerExpires = certs[0].NotAfter
	if s.Join, err = pki.LoadKey(in(joinKeyFile)); err != nil {
		return nil, fmt.Errorf("keys: %w", err)
	}
	if s.JoinJWK, err = pki.MarshalJWK(&s.Join.PublicKey); err != nil {
		return nil, fmt.Errorf("keys: %w", err)
	}
	if s.JoinThumbprint, err = pki.Thumbprint(&s.Join.PublicKey); err != nil {
		return nil, fmt.Errorf("keys: %w", err)
	}
	token, err := os.ReadFile(in(operatorFile))
	if err != nil {
		return nil, fmt.Errorf("keys: operator token: %w", err)
	}
	s.OperatorToken = strings.TrimSpace(string(token))
	if len(s.OperatorToken) < 32 || len(s.OperatorToken) > maxTokenBytes {
		return nil, fmt.Errorf("keys: %s must hold one token of 32 to %d characters", in(operatorFile), maxTokenBytes)
	}
	return s, nil
}

// LoadOrInit loads the set in dir, or makes it the first time.
func LoadOrInit(dir string, now time.Time) (s *Set, made bool, err error) {
	s, err = Load(dir)
	if !errors.Is(err, ErrNone) {
		return s, false, err
	}
	s, err = Init(dir, now)
	return s, err == nil, err
}

// ExportTrust writes what images and nodes need, and nothing secret: roots.pem
// and join-encryption.jwk.
func (s *Set) ExportTrust(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("export trust: %w", err)
	}
	err := errors.Join(
		writeFile(filepath.Join(dir, rootsFile), s.Roots.PEM(), 0o644),
		writeFile(filepath.Join(dir, joinJWKFile), s.JoinJWK, 0o644),
	)
	if err != nil {
		return fmt.Errorf("export trust: %w", err)
	}
	return nil
}

// writeFile replaces path whole or not at all.
func writeFile(path string, data []byte, mode os.FileMode) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
