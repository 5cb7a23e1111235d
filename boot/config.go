// Package boot is about how this machine boots: what it was told by kernel
// command line, SMBIOS and its image, and the firmware's own boot entries.
//
// Parties: the firmware or hypervisor (SMBIOS type 11 strings, DMI identity,
// EFI variables), whoever made the image (command line inside the UKI,
// /etc/bcd/image.json) and bcd, which reads all of them and writes only EFI
// variables. Nothing read here is trusted: a gateway address is checked again
// by the pinned roots when it is dialled, a token by the gateway that made it.
package boot

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
)

const (
	// maxFactFile bounds every file read here. The largest honest one, a
	// type 11 structure, is limited to 64 KiB by the SMBIOS table itself.
	maxFactFile = 64 << 10
	// maxURL is what curl, iPXE and proxies take without trouble.
	maxURL = 2048
	// maxSite keeps a site name usable as a DNS label and certificate part.
	maxSite = 63
)

// The keys of docs/architecture.md, "SMBIOS type 11 strings".
const (
	keyGateway = "bcd.gateway"
	keyToken   = "bcd.token"
	keyRole    = "bcd.role"
	keySite    = "bcd.site"
)

// Roles that bcd.role takes. DefaultRole applies when nothing says otherwise:
// an image that knows nothing is a ramdisk.
const (
	RoleRamdisk = "ramdisk"
	RoleSite    = "site"
	RoleNode    = "node"
	DefaultRole = RoleRamdisk
)

// ErrTokenOnCommandLine says that a join token was put on the kernel command
// line, which every process and every boot log can read.
var ErrTokenOnCommandLine = errors.New("bcd.token is refused on the kernel command line because every user and boot log can read it: give it as the SMBIOS type 11 string bcd.token=bcjt_…, and revoke this one")

// Image is /etc/bcd/image.json: what the image says of itself.
type Image struct {
	Version   string `json:"version"`
	Profile   string `json:"profile"`
	BuildTime string `json:"build_time"`
	Gateway   string `json:"gateway"`
}

// Config is what this machine was told. Only the token is secret.
type Config struct {
	// Gateway is an https URL without trailing slash, or empty.
	Gateway string
	// Role is one of the Role constants, never empty.
	Role string
	// Site is the site's name, or empty.
	Site string
	// Token is the join token; its zero value means that there is none.
	Token Token
	// Image is empty when /etc/bcd/image.json does not exist.
	Image Image
	// UUID is the SMBIOS system UUID, lower case, and Serial the system's
	// serial number; both empty when the firmware has only a placeholder.
	UUID, Serial string
	// Sources says where each key was found, for status and doctor.
	Sources map[string]string
	// Unknown lists bcd.* keys that nobody knows: most likely misspelt.
	Unknown []string
}

// Token is a join token that does not print itself.
type Token struct{ value []byte }

// NewToken checks the form bcjt_<id>_<secret>. The error never has the value.
func NewToken(s string) (Token, error) {
	if !tokenForm.MatchString(s) {
		return Token{}, fmt.Errorf("join token (%d characters) has not the form bcjt_<id>_<secret>: copy it again from `bcd-gateway token create`", len(s))
	}
	return Token{value: []byte(s)}, nil
}

var (
	tokenForm = regexp.MustCompile(`^bcjt_[A-Za-z0-9]{1,64}_[A-Za-z0-9_-]{16,256}$`)
	siteForm  = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`)
	uuidForm  = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
)

// Present reports whether there is a token.
func (t Token) Present() bool { return len(t.value) > 0 }

// Reveal is the token itself, for the one request that needs it.
func (t Token) Reveal() []byte { return t.value }

// Zero overwrites the token. Copies made of Reveal's bytes are the caller's.
func (t Token) Zero() { clear(t.value) }

// String is never the value.
func (t Token) String() string {
	if !t.Present() {
		return "none"
	}
	return "redacted"
}

// Format covers every fmt verb, %x and %#v too.
func (t Token) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, t.String()) }

// MarshalText covers JSON and slog's text handler.
func (t Token) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// ReadConfig reads the boot configuration below a file-system root
// (os.DirFS("/") on a machine). A key given by SMBIOS wins over the kernel
// command line, which wins over the image: the nearer to this one machine, the
// stronger. A value that is present but wrong is an error, never ignored: a
// machine must not fall back to another gateway because of a typing mistake.
func ReadConfig(root fs.FS) (Config, error) {
	c := Config{Sources: map[string]string{}}
	values := map[string]string{}
	set := func(key, value, source string) {
		if _, taken := values[key]; !taken {
			values[key], c.Sources[key] = value, source
		}
	}

	strs, err := smbiosStrings(root)
	if err != nil {
		return Config{}, err
	}
	found, err := c.keyed(strs, "an SMBIOS type 11 string")
	if err != nil {
		return Config{}, err
	}
	for k, v := range found {
		set(k, v, "smbios")
	}

	line, err := readOptional(root, "proc/cmdline")
	if err != nil {
		return Config{}, err
	}
	found, err = c.keyed(splitCommandLine(string(line)), "the kernel command line")
	if err != nil {
		return Config{}, err
	}
	if _, has := found[keyToken]; has {
		return Config{}, ErrTokenOnCommandLine
	}
	for k, v := range found {
		set(k, v, "cmdline")
	}

	if c.Image, err = readImage(root); err != nil {
		return Config{}, err
	}
	if c.Image.Gateway != "" {
		set(keyGateway, c.Image.Gateway, "image")
	}

	if err := c.apply(values); err != nil {
		return Config{}, err
	}
	c.UUID, c.Serial, err = readDMI(root)
	return c, err
}

// keyed picks the bcd.* words out of key=value words. The same key twice with
// different values is an error that does not print the values: one of them
// may be a token.
func (c *Config) keyed(words []string, where string) (map[string]string, error) {
	out := map[string]string{}
	for _, w := range words {
		key, value, _ := strings.Cut(w, "=")
		if !strings.HasPrefix(key, "bcd.") {
			continue
		}
		switch key {
		case keyGateway, keyToken, keyRole, keySite:
			if old, twice := out[key]; twice && old != value {
				return nil, fmt.Errorf("%s is given twice with different values in %s: leave one", key, where)
			}
			out[key] = value
		case "bcd.rescue": // init's own, see supervisor/pid1
		default:
			// Only a short, printable key is repeated: anything may stand here.
			if len(key) <= 32 && siteForm.MatchString(strings.ReplaceAll(key[len("bcd."):], ".", "-")) && !slices.Contains(c.Unknown, key) && len(c.Unknown) < 16 {
				c.Unknown = append(c.Unknown, key)
			}
		}
	}
	return out, nil
}

func (c *Config) apply(values map[string]string) error {
	wrap := func(key string, err error) error {
		return fmt.Errorf("%s from %s: %w", key, c.Sources[key], err)
	}
	if v, ok := values[keyGateway]; ok {
		u, err := CheckGateway(v)
		if err != nil {
			return wrap(keyGateway, err)
		}
		c.Gateway = u
	}
	c.Role = DefaultRole
	if v, ok := values[keyRole]; ok {
		switch v {
		case RoleRamdisk, RoleSite, RoleNode:
			c.Role = v
		default:
			return wrap(keyRole, fmt.Errorf("role %q is unknown: use ramdisk, site or node", shorten(v)))
		}
	}
	if v, ok := values[keySite]; ok {
		if len(v) > maxSite || !siteForm.MatchString(v) {
			return wrap(keySite, fmt.Errorf("site %q is not a name of 1 to %d lower-case letters, digits and inner hyphens", shorten(v), maxSite))
		}
		c.Site = v
	}
	if v, ok := values[keyToken]; ok {
		t, err := NewToken(v)
		if err != nil {
			return wrap(keyToken, err)
		}
		c.Token = t
	}
	return nil
}

// CheckGateway returns the canonical form of a gateway URL: https, a host, and
// nothing that would be sent along unnoticed (user, query, fragment).
func CheckGateway(s string) (string, error) {
	if len(s) > maxURL {
		return "", fmt.Errorf("gateway URL of %d characters is over the limit of %d", len(s), maxURL)
	}
	u, err := url.Parse(s)
	if err != nil {
		// url.Error repeats the input, which may hold a password.
		return "", errors.New("gateway is not a URL: use https://HOST[:PORT]")
	}
	switch {
	case u.User != nil || u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return "", errors.New("gateway URL must have no user, query or fragment: use https://HOST[:PORT]")
	case u.Scheme != "https":
		return "", fmt.Errorf("gateway URL %q is not https: use https://HOST[:PORT]", shorten(s))
	case u.Hostname() == "" || u.Opaque != "":
		return "", fmt.Errorf("gateway URL %q has no host: use https://HOST[:PORT]", shorten(s))
	}
	return strings.TrimRight(u.String(), "/"), nil
}

func readImage(root fs.FS) (Image, error) {
	var img Image
	b, err := readOptional(root, "etc/bcd/image.json")
	if err != nil || b == nil {
		return img, err
	}
	if err := json.Unmarshal(b, &img); err != nil {
		return Image{}, fmt.Errorf("/etc/bcd/image.json is damaged: %w; build the image again", err)
	}
	return img, nil
}

// readDMI reads the machine's identity. Placeholders that whole product lines
// share identify nothing and are dropped.
func readDMI(root fs.FS) (uuid, serial string, err error) {
	b, err := readOptional(root, "sys/class/dmi/id/product_uuid")
	if err != nil {
		return "", "", err
	}
	uuid = strings.ToLower(strings.TrimSpace(string(b)))
	switch {
	case !uuidForm.MatchString(uuid),
		strings.Trim(uuid, "0-") == "", strings.Trim(uuid, "f-") == "",
		uuid == "03000200-0400-0500-0006-000700080009": // the reference BIOS's, on many white-box boards
		uuid = ""
	}
	if b, err = readOptional(root, "sys/class/dmi/id/product_serial"); err != nil {
		return "", "", err
	}
	serial = strings.TrimSpace(string(b))
	switch strings.ToLower(serial) {
	case "to be filled by o.e.m.", "not specified", "default string", "none", "n/a", "system serial number", "0", "123456789", "0123456789":
		serial = ""
	}
	if len(serial) > 128 || strings.ContainsFunc(serial, func(r rune) bool { return r < ' ' || r > '~' }) {
		serial = ""
	}
	return uuid, serial, nil
}

func smbiosStrings(root fs.FS) ([]string, error) {
	dirs, err := fs.Glob(root, "sys/firmware/dmi/entries/11-*")
	if err != nil {
		return nil, fmt.Errorf("list SMBIOS type 11 structures: %w", err)
	}
	var out []string
	for _, d := range dirs {
		b, err := readOptional(root, path.Join(d, "raw"))
		if err != nil {
			return nil, err
		}
		s, err := ParseOEMStrings(b)
		if err != nil {
			return nil, fmt.Errorf("/%s/raw: %w", d, err)
		}
		out = append(out, s...)
	}
	return out, nil
}

// readOptional returns nil for a file that is not there: no machine has all.
func readOptional(root fs.FS, name string) ([]byte, error) {
	f, err := root.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read boot facts: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFactFile+1))
	if err != nil {
		return nil, fmt.Errorf("read boot facts from /%s: %w", name, err)
	}
	if len(b) > maxFactFile {
		return nil, fmt.Errorf("/%s is over %d bytes, which no honest one is", name, maxFactFile)
	}
	return b, nil
}

// splitCommandLine splits as the kernel does: blanks outside double quotes
// separate, and the quotes themselves are dropped.
func splitCommandLine(s string) []string {
	var out []string
	var word strings.Builder
	quoted, inWord := false, false
	flush := func() {
		if inWord {
			out = append(out, word.String())
			word.Reset()
			inWord = false
		}
	}
	for _, r := range s {
		switch {
		case r == '"':
			quoted, inWord = !quoted, true
		case !quoted && (r == ' ' || r == '\t' || r == '\n' || r == '\r'):
			flush()
		default:
			word.WriteRune(r)
			inWord = true
		}
	}
	flush()
	return out
}

func shorten(s string) string {
	if len(s) > 80 {
		return strings.ToValidUTF8(s[:80], "") + "…"
	}
	return s
}
