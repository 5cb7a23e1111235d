package bmc

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	redfishPort = 443
	// ipmiPort is RMCP's (IPMI 2.0 section 13.1.2).
	ipmiPort = 623
	// maxName is DNS's own bound (RFC 1035 section 2.3.4).
	maxName = 255
	// dialTime: a BMC is one or two switches away.
	dialTime = 10 * time.Second
)

func systemResolver(ctx context.Context, name string) ([]netip.Addr, error) {
	return net.DefaultResolver.LookupNetIP(ctx, "ip", name)
}

// locate turns an address or name, with or without a port, into the one
// address that the run will talk to. A name is resolved here and never again,
// so that what was checked is what is reached.
func (s *site) locate(ctx context.Context, address string, defaultPort uint16) (_ netip.AddrPort, named bool, _ error) {
	host, port := address, defaultPort
	if h, p, err := net.SplitHostPort(address); err == nil {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil || n == 0 {
			return netip.AddrPort{}, false, fail("MALFORMED", "address %.80q: the port is not between 1 and 65535", address)
		}
		host, port, named = h, uint16(n), true
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if host == "" || len(host) > maxName {
		return netip.AddrPort{}, false, fail("MALFORMED", "address %.80q is not an IP address or a name", address)
	}
	var found []netip.Addr
	if ip, err := netip.ParseAddr(host); err == nil {
		found = []netip.Addr{ip}
	} else {
		found, err = s.o.Resolve(ctx, host)
		if err != nil {
			return netip.AddrPort{}, false, fail("UNRESOLVED", "the name %.80q has no address: %w", host, err)
		}
	}
	for _, ip := range found {
		// A zone would lead to an interface that no prefix speaks of.
		if ip = ip.Unmap(); ip.Zone() == "" && slices.ContainsFunc(s.o.Networks, func(p netip.Prefix) bool { return p.Contains(ip) }) {
			return netip.AddrPortFrom(ip, port), named, nil
		}
	}
	return netip.AddrPort{}, false, fail("OUTSIDE_NETWORKS", "%.80q is %v, which is in none of this site's bmc_networks %v: add its network to [site] bmc_networks, or send the command to another site", host, found[:min(len(found), 4)], s.o.Networks)
}

// pin is what is asked of a certificate. A BMC's own is self-signed and names
// nobody, so its digest is the only thing that says anything.
type pin struct {
	sha256   []byte
	insecure bool
	// met is the digest of the certificate that was shown.
	met []byte
}

var errUntrusted = errors.New("certificate is not the pinned one")

func newPin(digest []byte, insecure bool) (*pin, error) {
	if n := len(digest); n != 0 && n != sha256.Size {
		return nil, fail("MALFORMED", "certificate_sha256 of %d bytes; a SHA-256 has %d", n, sha256.Size)
	}
	if len(digest) != 0 && insecure {
		return nil, fail("MALFORMED", "certificate_sha256 and insecure contradict each other: give one")
	}
	return &pin{sha256: digest, insecure: insecure}, nil
}

// config checks the certificate within the handshake, before a byte of a
// request is sent.
func (p *pin) config() *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS12,
		InsecureSkipVerify: true, // the digest decides, below
		VerifyConnection: func(state tls.ConnectionState) error {
			if len(state.PeerCertificates) == 0 {
				return errUntrusted
			}
			return p.check(state.PeerCertificates[0])
		},
	}
}

func (p *pin) check(c *x509.Certificate) error {
	sum := sha256.Sum256(c.Raw)
	p.met = sum[:]
	switch {
	case p.insecure, bytes.Equal(p.sha256, p.met):
		return nil
	case len(p.sha256) == 0:
		return fmt.Errorf("%w: none is pinned, and it shows %s: give that as certificate_sha256 if it is the right one, or say insecure", errUntrusted, hex.EncodeToString(p.met))
	}
	return fmt.Errorf("%w: it shows %s, pinned is %s", errUntrusted, hex.EncodeToString(p.met), hex.EncodeToString(p.sha256))
}

// dialer reaches one address, whatever name a URL has.
func dialer(to netip.AddrPort) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{Timeout: dialTime}).DialContext(ctx, "tcp", to.String())
	}
}

// credentials are USER:PASSWORD; a user name has no colon (RFC 7617 section 2).
type credentials struct{ user, password []byte }

func (s *site) credentials(ctx context.Context, j *job, reference string) (credentials, error) {
	if reference == "" {
		return credentials{}, fail("MALFORMED", "credentials_reference is empty: name the secret that has USER:PASSWORD")
	}
	j.phase("fetching credentials")
	v, err := s.o.Secrets.Fetch(ctx, reference, j.ID)
	if err != nil {
		return credentials{}, fail("SECRET_UNAVAILABLE", "credentials %.80q: %w", reference, err)
	}
	j.hidden.own(v)
	user, password, ok := bytes.Cut(bytes.TrimRight(v.Bytes(), "\r\n"), []byte{':'})
	if !ok || len(user) == 0 {
		return credentials{}, fail("SECRET_UNAVAILABLE", "the secret %.80q is not of the form USER:PASSWORD", reference)
	}
	j.hidden.keep(password)
	pair := bytes.Clone(bytes.TrimRight(v.Bytes(), "\r\n"))
	j.hidden.keep(pair)
	clear(pair)
	// The redactor of the daemon's log knows the pair; let it know the
	// password by itself too.
	if known, err := s.o.Registry.New(bytes.Clone(password)); err == nil {
		j.hidden.own(known)
	}
	return credentials{user: user, password: password}, nil
}

func word(v interface{ String() string }) string {
	name := v.String()
	for _, prefix := range []string{"BMC_POWER_ACTION_", "BMC_POWER_STATE_", "BMC_BOOT_SOURCE_", "BMC_PROTOCOL_"} {
		if rest, ok := strings.CutPrefix(name, prefix); ok {
			return strings.ReplaceAll(strings.ToLower(rest), "_", "-")
		}
	}
	return name
}

// machine is one system behind its BMC, in a session.
type machine interface {
	protocol() bcdv1.BmcProtocol
	// power reads the state.
	power(ctx context.Context) (bcdv1.BmcPowerState, error)
	// ask sends one power request, once, and returns its protocol's name for
	// it.
	ask(ctx context.Context, action bcdv1.BmcPowerAction) (string, error)
	// boot reads the override.
	boot(ctx context.Context) (override, error)
	// setBoot asks for one, once, unless it is there; before is called right
	// before.
	setBoot(ctx context.Context, want wish, before func() error) (changed bool, notes []string, err error)
	inventory(ctx context.Context) (*bcdv1.BmcInventoryResult, error)
	close(ctx context.Context)
}

// open reaches the target's BMC and logs in.
func (s *site) open(ctx context.Context, j *job, t *bcdv1.BmcTarget) (machine, error) {
	p, err := newPin(t.GetCertificateSha256(), t.GetInsecure())
	if err != nil {
		return nil, err
	}
	if t.GetProtocol() == bcdv1.BmcProtocol_BMC_PROTOCOL_IPMI {
		if len(p.sha256) != 0 {
			return nil, fail("MALFORMED", "certificate_sha256 is given and IPMI has no certificate: use Redfish, or leave it out")
		}
		return s.openIPMI(ctx, j, t)
	}
	to, named, err := s.locate(ctx, t.GetAddress(), redfishPort)
	if err != nil {
		return nil, err
	}
	j.phase("connecting to %s by Redfish", to)
	r, err := dialRedfish(ctx, to, p, s.wait)
	switch {
	case err == nil:
	case t.GetProtocol() == bcdv1.BmcProtocol_BMC_PROTOCOL_REDFISH, named, len(p.sha256) != 0, errors.Is(err, errUntrusted), ctx.Err() != nil:
		return nil, err
	default:
		m, second := s.openIPMI(ctx, j, t)
		if second != nil {
			return nil, fail("UNREACHABLE", "neither protocol works: Redfish: %w; IPMI: %w", err, second)
		}
		return m, nil
	}
	c, err := s.credentials(ctx, j, t.GetCredentialsReference())
	if err == nil {
		err = r.login(ctx, c, j.hidden)
	}
	if err == nil {
		err = r.findSystem(ctx, t.GetSystem())
	}
	if err != nil {
		s.leave(ctx, r)
		return nil, err
	}
	return r, nil
}

// leave ends a session also when the command's time is over.
func (s *site) leave(ctx context.Context, m machine) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTime)
	defer cancel()
	m.close(ctx)
}
