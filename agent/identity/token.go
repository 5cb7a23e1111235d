package identity

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/better-compute/bcd/agent/durable"
	"github.com/better-compute/bcd/agent/pki"
)

const (
	// TokenEnv is the variable that may hold the join token.
	TokenEnv = "BCD_JOIN_TOKEN"
	// credentialName is the file below $CREDENTIALS_DIRECTORY (systemd's
	// LoadCredential=).
	credentialName = "join-token"
	// maxToken bounds what is read of a token source.
	maxToken = 4 << 10
)

// ErrNoToken: no source holds a join token.
var ErrNoToken = errors.New("there is no join token: set " + TokenEnv + " or give it on standard input; bcd-gateway token create makes one")

// Token is a join token in memory. It prints as [redacted] everywhere.
type Token struct{ value []byte }

// ParseToken takes a token by its form. White space around it is ignored;
// data is zeroed. Errors never hold it.
func ParseToken(data []byte) (*Token, error) {
	defer clear(data)
	trimmed := bytes.TrimSpace(data)
	if _, _, err := pki.SplitToken(string(trimmed)); err != nil {
		return nil, err
	}
	return &Token{value: bytes.Clone(trimmed)}, nil
}

// Destroy zeroes the token.
func (t *Token) Destroy() {
	if t != nil {
		clear(t.value)
		t.value = nil
	}
}

// ID is the token's public part, for messages: it names the token at the
// gateway. The secret part stays.
func (t *Token) ID() string {
	id, _, err := pki.SplitToken(string(t.value))
	if err != nil {
		return ""
	}
	return id
}

// Reveal gives the token itself: for the sealed claims, and for a redactor.
func (t *Token) Reveal() []byte { return t.value }

const redacted = "[redacted]"

func (t *Token) String() string             { return redacted }
func (t *Token) GoString() string           { return redacted }
func (t *Token) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, redacted) }
func (t *Token) LogValue() slog.Value       { return slog.StringValue(redacted) }
func (t *Token) MarshalText() ([]byte, error) {
	return []byte(redacted), nil
}

// TokenSources are the places a join token comes from, in this order. Empty
// ones are left out. A command-line argument is not among them: it would
// stand in process lists and shell histories.
type TokenSources struct {
	// CredentialsDir is $CREDENTIALS_DIRECTORY.
	CredentialsDir string
	// LookupEnv is os.LookupEnv; Scrub is ScrubEnv, called once the variable
	// was read, whatever it held.
	LookupEnv func(string) (string, bool)
	Scrub     func(name string) error
	// Stdin is read up to the first line's end.
	Stdin io.Reader
}

// SystemTokenSources are the process's own. stdin is nil where a person would
// be kept waiting.
func SystemTokenSources(stdin io.Reader) TokenSources {
	return TokenSources{CredentialsDir: os.Getenv("CREDENTIALS_DIRECTORY"), LookupEnv: os.LookupEnv, Scrub: ScrubEnv, Stdin: stdin}
}

// ReadToken takes the join token from the first source that has one.
// ErrNoToken when none has.
func ReadToken(s TokenSources) (*Token, error) {
	var fromEnv []byte
	if s.LookupEnv != nil {
		if value, ok := s.LookupEnv(TokenEnv); ok {
			fromEnv = []byte(value)
			if s.Scrub != nil {
				// Scrubbed first: whatever becomes of the join, no child and no
				// reader of /proc shall find it.
				if err := s.Scrub(TokenEnv); err != nil {
					return nil, fmt.Errorf("scrub %s from the environment: %w", TokenEnv, err)
				}
			}
		}
	}
	if s.CredentialsDir != "" {
		data, err := durable.ReadFile(filepath.Join(s.CredentialsDir, credentialName), maxToken)
		if err == nil {
			return sourced(data, "the credential "+credentialName)
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("credential %s: %w", credentialName, err)
		}
	}
	if len(bytes.TrimSpace(fromEnv)) > 0 {
		return sourced(fromEnv, TokenEnv)
	}
	if s.Stdin != nil {
		line, err := bufio.NewReaderSize(io.LimitReader(s.Stdin, maxToken), maxToken).ReadBytes('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("read the join token from standard input: %w", err)
		}
		if len(bytes.TrimSpace(line)) > 0 {
			return sourced(line, "standard input")
		}
	}
	return nil, ErrNoToken
}

func sourced(data []byte, source string) (*Token, error) {
	t, err := ParseToken(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", source, err)
	}
	return t, nil
}

// ScrubEnv removes a variable from the process's environment, and overwrites
// the copy that the kernel shows in /proc/<pid>/environ, which os.Unsetenv
// leaves as it was at exec.
func ScrubEnv(name string) error {
	if err := os.Unsetenv(name); err != nil {
		return err
	}
	return scrubStack(name)
}
