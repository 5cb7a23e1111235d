// Package config reads /etc/bcd/config.toml. It is strict: a key that is not
// known, or a value that is not allowed, is an error that names file, line,
// column and, where there is one, the nearest right key. An agent that starts
// with half of what its operator wrote is worse than one that does not start.
package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/pelletier/go-toml/v2"
)

// DefaultPath is where the file is unless --config says otherwise.
const DefaultPath = "/etc/bcd/config.toml"

// maxBytes bounds the file: a real one has a few hundred bytes.
const maxBytes = 1 << 20

// Config is the file. The doc tags are its reference page (docs/config.md).
type Config struct {
	GatewayURL        string   `toml:"gateway_url" doc:"Where the gateway is, as an https URL. The only address the daemon ever dials by itself." example:"https://gw.eu-1.example.com"`
	Site              string   `toml:"site" doc:"Name of the site this machine stands at: lower-case letters, digits and '-', at most 63." example:"fsn1"`
	DataDir           string   `toml:"data_dir" doc:"Identity, journal and last spec. Absolute; made with mode 0700." default:"/var/lib/bcd"`
	SocketPath        string   `toml:"socket_path" doc:"The root-only status socket. Absolute; its directory is made with mode 0700, and must not be open to others." default:"/run/bcd/bcd.sock"`
	TrustDir          string   `toml:"trust_dir" doc:"Folder with roots.pem, and with join-encryption.jwk unless that file is beside config.toml. Absolute." default:"/etc/bcd/trust"`
	CommandRootSHA256 []string `toml:"command_root_sha256" doc:"SHA-256 (hex) of the root certificates under which commands and specs may be signed. Empty: the roots that the signed join record names." example:"[\"9f86d081…\"]"`
	LogLevel          string   `toml:"log_level" doc:"debug, info, warn or error." default:"info"`
	LogFormat         string   `toml:"log_format" doc:"text or json." default:"text"`

	// Path is the file this came from.
	Path string `toml:"-"`
}

// Default is a Config with every default filled in.
func Default() Config {
	return Config{
		DataDir:    "/var/lib/bcd",
		SocketPath: "/run/bcd/bcd.sock",
		TrustDir:   "/etc/bcd/trust",
		LogLevel:   "info",
		LogFormat:  "text",
	}
}

// Error is one mistake in the file.
type Error struct {
	Path         string
	Line, Column int // from 1; 0 when the mistake has no place
	Message      string
}

func (e *Error) Error() string {
	if e.Line == 0 {
		return fmt.Sprintf("%s: %s", e.Path, e.Message)
	}
	return fmt.Sprintf("%s:%d:%d: %s", e.Path, e.Line, e.Column, e.Message)
}

// Load reads and checks the file at path. A missing file is an error that
// satisfies errors.Is(err, fs.ErrNotExist).
func Load(path string) (Config, error) {
	f, err := os.Open(path)
	if err != nil {
		return Config{}, fmt.Errorf("config: %w (write it, or name another with --config)", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxBytes+1))
	if err != nil {
		return Config{}, fmt.Errorf("config: read %s: %w", path, err)
	}
	return Parse(path, data)
}

// Parse checks data as the content of path.
func Parse(path string, data []byte) (Config, error) {
	if len(data) > maxBytes {
		return Config{}, &Error{Path: path, Message: fmt.Sprintf("is larger than %d bytes", maxBytes)}
	}
	c := Default()
	decoder := toml.NewDecoder(bytes.NewReader(data)).DisallowUnknownFields()
	if err := decoder.Decode(&c); err != nil {
		return Config{}, explain(path, err)
	}
	c.Path = path
	if err := c.check(data); err != nil {
		return Config{}, err
	}
	return c, nil
}

// explain turns the decoder's error into one with a place and, for an unknown
// key, the nearest known one.
func explain(path string, err error) error {
	var missing *toml.StrictMissingError
	if errors.As(err, &missing) && len(missing.Errors) > 0 {
		first := missing.Errors[0]
		line, column := first.Position()
		key := strings.Join(first.Key(), ".")
		message := fmt.Sprintf("unknown key %q", key)
		if near := nearest(key, keys()); near != "" {
			message += fmt.Sprintf("; did you mean %q?", near)
		} else {
			message += "; the keys are " + strings.Join(keys(), ", ")
		}
		return &Error{Path: path, Line: line, Column: column, Message: message}
	}
	var decode *toml.DecodeError
	if errors.As(err, &decode) {
		line, column := decode.Position()
		return &Error{Path: path, Line: line, Column: column, Message: strings.TrimPrefix(decode.Error(), "toml: ")}
	}
	return &Error{Path: path, Message: strings.TrimPrefix(err.Error(), "toml: ")}
}

var (
	siteName  = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	sha256Hex = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// CheckGatewayURL says whether raw can be a gateway's address.
func CheckGatewayURL(raw string) error {
	u, err := url.Parse(raw)
	switch {
	case err != nil:
		return fmt.Errorf("is not a URL: %w", err)
	case u.Scheme != "https":
		return fmt.Errorf("must begin with https://, got %q", raw)
	case u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return fmt.Errorf("must be https://HOST[:PORT], got %q", u.Redacted())
	}
	return nil
}

// CheckSite says whether name can be a site's name.
func CheckSite(name string) error {
	if !siteName.MatchString(name) {
		return fmt.Errorf("must be lower-case letters, digits and '-', at most 63, got %q", name)
	}
	return nil
}

func (c *Config) check(data []byte) error {
	fail := func(key, format string, args ...any) error {
		line, column := place(data, key)
		return &Error{Path: c.Path, Line: line, Column: column, Message: key + " " + fmt.Sprintf(format, args...)}
	}
	if c.GatewayURL == "" {
		return fail("gateway_url", "is missing; add a line like gateway_url = \"https://gw.eu-1.example.com\"")
	}
	if err := CheckGatewayURL(c.GatewayURL); err != nil {
		return fail("gateway_url", "%v", err)
	}
	if c.Site != "" {
		if err := CheckSite(c.Site); err != nil {
			return fail("site", "%v", err)
		}
	}
	for key, dir := range map[string]string{"data_dir": c.DataDir, "socket_path": c.SocketPath, "trust_dir": c.TrustDir} {
		if !filepath.IsAbs(dir) || filepath.Clean(dir) == "/" {
			return fail(key, "must be an absolute path below /, got %q", dir)
		}
	}
	for _, digest := range c.CommandRootSHA256 {
		if !sha256Hex.MatchString(digest) {
			return fail("command_root_sha256", "must hold 64 lower-case hex digits each, got %q", digest)
		}
	}
	if !oneOf(c.LogLevel, "debug", "info", "warn", "error") {
		return fail("log_level", "must be debug, info, warn or error, got %q", c.LogLevel)
	}
	if !oneOf(c.LogFormat, "text", "json") {
		return fail("log_format", "must be text or json, got %q", c.LogFormat)
	}
	return nil
}

// JoinKeyPath is where join-encryption.jwk is: beside the config file, else
// in the trust folder.
func (c *Config) JoinKeyPath() string {
	beside := filepath.Join(filepath.Dir(c.Path), "join-encryption.jwk")
	if _, err := os.Stat(beside); err == nil {
		return beside
	}
	return filepath.Join(c.TrustDir, "join-encryption.jwk")
}

// RootsPath is where roots.pem is.
func (c *Config) RootsPath() string { return filepath.Join(c.TrustDir, "roots.pem") }

func oneOf(value string, allowed ...string) bool {
	for _, a := range allowed {
		if value == a {
			return true
		}
	}
	return false
}

// place finds the line of a top-level key, for errors about its value.
func place(data []byte, key string) (line, column int) {
	for i, text := range strings.Split(string(data), "\n") {
		trimmed := strings.TrimLeft(text, " \t")
		if strings.HasPrefix(trimmed, "[") {
			break
		}
		rest, ok := strings.CutPrefix(trimmed, key)
		if ok && strings.HasPrefix(strings.TrimLeft(rest, " \t"), "=") {
			return i + 1, len(text) - len(trimmed) + 1
		}
	}
	return 0, 0
}
