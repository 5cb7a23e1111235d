package pki

import (
	"crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// TokenPrefix begins every join token, so that scanners and redactors find it.
const TokenPrefix = "bcjt_"

var tokenPattern = regexp.MustCompile(`^bcjt_[A-Za-z0-9_-]{0,63}[A-Za-z0-9]_[A-Za-z0-9-]{16,128}$`)

// NewToken makes a join token, bcjt_<id>_<secret>, with 256 random bits.
func NewToken(id string) (token string, err error) {
	raw := make([]byte, 32)
	if _, err := rand.Read(raw); err != nil {
		return "", fmt.Errorf("new join token: %w", err)
	}
	defer clear(raw)
	token = TokenPrefix + id + "_" + strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(raw))
	_, _, err = SplitToken(token)
	return token, err
}

// SplitToken checks the form of a join token and gives its parts. Its errors
// never hold the token.
func SplitToken(token string) (id, secret string, err error) {
	if !tokenPattern.MatchString(token) {
		return "", "", errors.New("join token is not of the form bcjt_<id>_<secret>")
	}
	at := strings.LastIndexByte(token, '_')
	return token[len(TokenPrefix):at], token[at+1:], nil
}
