// Package pki makes and checks the certificates of a fleet.
//
// The parties: one offline root; below it an issuing authority, which makes
// the TLS certificates of gateways and nodes, and command-signing
// certificates. All keys are ECDSA P-256. What a certificate may do is said by
// its one URI name, never by its common name:
//
//	bcd://gateway/<name>
//	bcd://command-signer/<name>
//	bcd://node/<role>/<site>/<node id>
//
// A node's certificate therefore never passes as a gateway's or a signer's.
// The issuing authority is constrained to gateways and nodes (RFC 5280,
// section 4.2.1.10): whoever steals it from a gateway cannot sign commands.
//
// The package also holds the JWE that join tokens and secrets travel in.
package pki

import (
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	uriScheme   = "bcd"
	hostGateway = "gateway"
	hostSigner  = "command-signer"
	hostNode    = "node"
	// noSite stands for a node without a site; no site can be called so.
	noSite = "-"
)

// NodeName is what a node's certificate says of it.
type NodeName struct {
	Role bcdv1.Role
	// Site may be empty.
	Site   string
	NodeID string
}

var (
	nodeIDPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,63}$`)
	sitePattern   = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	namePattern   = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)
)

// ErrWrongPurpose is wrapped when a certificate is sound but is not for what
// its holder tries to be.
var ErrWrongPurpose = errors.New("certificate is for another purpose")

// RoleWord gives the word for a role: node, site or ramdisk; "" for others.
func RoleWord(role bcdv1.Role) string {
	switch role {
	case bcdv1.Role_ROLE_NODE:
		return "node"
	case bcdv1.Role_ROLE_SITE:
		return "site"
	case bcdv1.Role_ROLE_RAMDISK:
		return "ramdisk"
	}
	return ""
}

// ParseRole is the opposite of RoleWord.
func ParseRole(word string) (bcdv1.Role, error) {
	switch word {
	case "node":
		return bcdv1.Role_ROLE_NODE, nil
	case "site":
		return bcdv1.Role_ROLE_SITE, nil
	case "ramdisk":
		return bcdv1.Role_ROLE_RAMDISK, nil
	}
	return bcdv1.Role_ROLE_UNSPECIFIED, fmt.Errorf("role %.40q is not one of node, site, ramdisk", word)
}

// Check says what is wrong with the name, if anything.
func (n NodeName) Check() error {
	if RoleWord(n.Role) == "" {
		return fmt.Errorf("node name: role %d is not one of node, site, ramdisk", n.Role)
	}
	if n.Site != "" && !sitePattern.MatchString(n.Site) {
		return fmt.Errorf("node name: site %.80q must be lower-case letters, digits and '-', at most 63", n.Site)
	}
	if !nodeIDPattern.MatchString(n.NodeID) {
		return fmt.Errorf("node name: node id %.80q must be lower-case letters, digits, '_' and '-', at most 64", n.NodeID)
	}
	return nil
}

// NodeURI gives the URI of a node's certificate. The name must pass Check.
func NodeURI(n NodeName) *url.URL {
	site := n.Site
	if site == "" {
		site = noSite
	}
	return &url.URL{Scheme: uriScheme, Host: hostNode, Path: "/" + RoleWord(n.Role) + "/" + site + "/" + n.NodeID}
}

// ParseNodeURI reads a node's name out of its certificate. It does not verify
// the certificate; see VerifyNode.
func ParseNodeURI(cert *x509.Certificate) (NodeName, error) {
	parts, err := purpose(cert, hostNode)
	if err != nil {
		return NodeName{}, err
	}
	if len(parts) != 3 {
		return NodeName{}, fmt.Errorf("certificate of a node: its URI has %d parts, want role, site and node id", len(parts))
	}
	n := NodeName{Site: parts[1], NodeID: parts[2]}
	switch n.Site {
	case noSite:
		n.Site = ""
	case "":
		return NodeName{}, fmt.Errorf("certificate of a node: its URI %.120q has an empty site; no site is written \"-\"", cert.URIs[0].String())
	}
	if n.Role, err = ParseRole(parts[0]); err != nil {
		return NodeName{}, fmt.Errorf("certificate of a node: %w", err)
	}
	if err := n.Check(); err != nil {
		return NodeName{}, fmt.Errorf("certificate of a node: %w", err)
	}
	return n, nil
}

// purpose checks that cert has one URI and that it is bcd://host/..., and
// gives the parts of its path.
func purpose(cert *x509.Certificate, host string) ([]string, error) {
	if cert == nil {
		return nil, errors.New("no certificate")
	}
	if len(cert.URIs) != 1 {
		return nil, fmt.Errorf("%w: it has %d URI names, want one that begins with bcd://%s/", ErrWrongPurpose, len(cert.URIs), host)
	}
	u := cert.URIs[0]
	if u.Scheme != uriScheme || u.Host != host {
		return nil, fmt.Errorf("%w: it is %.120q, want one that begins with bcd://%s/", ErrWrongPurpose, u.String(), host)
	}
	if u.User != nil || u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || u.RawPath != "" || u.Opaque != "" {
		return nil, fmt.Errorf("%w: URI %.120q has more than a path", ErrWrongPurpose, u.String())
	}
	return strings.Split(strings.TrimPrefix(u.Path, "/"), "/"), nil
}

// singleName is purpose for the URIs with one part.
func singleName(cert *x509.Certificate, host string) (string, error) {
	parts, err := purpose(cert, host)
	if err != nil {
		return "", err
	}
	if len(parts) != 1 || !namePattern.MatchString(parts[0]) {
		return "", fmt.Errorf("%w: URI %.120q, want bcd://%s/NAME", ErrWrongPurpose, cert.URIs[0].String(), host)
	}
	return parts[0], nil
}
