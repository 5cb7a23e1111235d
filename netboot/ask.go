package netboot

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/intent"
	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// maxConfigAnswer is a Signed BootConfig with its chain: about 4 KiB.
	maxConfigAnswer = 64 << 10
	// askTimeout bounds one try at one address.
	askTimeout = 15 * time.Second
	// askRetryFirst and askRetryMax bound the wait between rounds. There is
	// nothing else for a ramdisk to do: it asks until it is answered.
	askRetryFirst = time.Second
	askRetryMax   = 30 * time.Second
	// maxAskURLs bounds what a hostile LAN can make us walk through in one
	// round.
	maxAskURLs = 16
)

// Asker is a ramdisk's end of the question for its boot config. Nothing on its
// network is trusted: an address from DHCP is only somewhere to ask, and an
// answer counts only when it is signed under the image's roots, for this very
// question, and its token was sealed to the key that was made for it. Whoever
// else answers gets to know what stands on the machine's case, no more.
type Asker struct {
	// Roots are those of the image.
	Roots *intent.Roots
	// Floor is a time that has certainly passed: when the image was made.
	Floor time.Time
	// URLs gives the addresses to ask now, one for each answer of DHCP. It is
	// called anew for each round.
	URLs func(ctx context.Context) []string
	// Machine is what to say of this machine; key and nonce are filled in.
	Machine *bcdv1.BootConfigAsk
	// HTTP must follow no redirect and use no proxy.
	HTTP  *http.Client
	Clock clock.Clock
	Log   *slog.Logger
}

// Answer is what a ramdisk was told.
type Answer struct {
	Config *bcdv1.BootConfig
	// Token is the join token. The caller zeroes it.
	Token []byte
}

// Ask asks until it is answered or ctx ends, whose error it returns. Key and
// nonce are made here, once for a boot, and are in memory only. Every try is
// the same question to the byte: a gateway gives one token in a boot, and the
// answer to the same question again when that was lost on its way.
func (a *Asker) Ask(ctx context.Context) (*Answer, error) {
	key, err := pki.NewKey()
	if err != nil {
		return nil, err
	}
	jwk, err := pki.MarshalJWK(&key.PublicKey)
	if err != nil {
		return nil, err
	}
	ask := proto.CloneOf(a.Machine)
	ask.Jwk, ask.Nonce = string(jwk), make([]byte, nonceBytes)
	if _, err := rand.Read(ask.Nonce); err != nil {
		return nil, err
	}
	question, err := proto.Marshal(ask)
	if err != nil {
		return nil, err
	}
	for wait := askRetryFirst; ; wait = min(2*wait, askRetryMax) {
		urls := a.URLs(ctx)
		slices.Sort(urls)
		urls = slices.Compact(urls)
		if len(urls) == 0 {
			a.Log.Info("no site appliance answers on this network; asking again", "wait", wait)
		}
		for _, url := range urls[:min(len(urls), maxAskURLs)] {
			answer, err := a.once(ctx, url, question, key)
			if err == nil {
				return answer, nil
			}
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			a.Log.Warn("no boot config from a site appliance; asking again", "url", cutText(url, maxStepMessage), "error", err)
		}
		timer := a.Clock.NewTimer(wait)
		select {
		case <-timer.C():
		case <-ctx.Done():
			timer.Stop()
			return nil, ctx.Err()
		}
	}
}

func (a *Asker) once(ctx context.Context, url string, question []byte, key *ecdsa.PrivateKey) (*Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(question))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", bootConfigType)
	response, err := a.HTTP.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	data, err := io.ReadAll(io.LimitReader(response.Body, maxConfigAnswer+1))
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %.200q", response.Status, strings.TrimSpace(string(data[:min(len(data), 200)])))
	}
	return openConfig(data, question, a.Roots, a.Floor, key, a.Machine.GetBootId())
}

// openConfig takes an answer to the question ask, or says why it is none. It is
// all that stands between a hostile network and this machine.
func openConfig(data, ask []byte, roots *intent.Roots, floor time.Time, key *ecdsa.PrivateKey, bootID string) (*Answer, error) {
	if len(data) > maxConfigAnswer {
		return nil, fmt.Errorf("an answer of more than %d bytes", maxConfigAnswer)
	}
	signed := &bcdv1.Signed{}
	if err := proto.Unmarshal(data, signed); err != nil {
		return nil, fmt.Errorf("boot config: %w", err)
	}
	// The clock of a machine that just started is worth nothing. The answer
	// says what time it is, and is judged at that time, which must not be
	// before the image was made.
	claimed := &bcdv1.BootConfig{}
	if err := proto.Unmarshal(signed.GetPayload(), claimed); err != nil {
		return nil, fmt.Errorf("boot config: %w", err)
	}
	at := time.UnixMilli(claimed.GetServerTimeMs())
	if at.Before(floor) {
		return nil, fmt.Errorf("boot config says that it is of %s, and this image was made at %s", at.UTC().Format(time.RFC3339), floor.UTC().Format(time.RFC3339))
	}
	config, err := roots.BootConfig(signed, at)
	if err != nil {
		return nil, err
	}
	if sum := sha256.Sum256(ask); !bytes.Equal(config.GetAskSha256(), sum[:]) {
		return nil, errors.New("boot config answers another question")
	}
	token, err := pki.Open(key, config.GetSealedToken(), bootID)
	if err != nil {
		return nil, fmt.Errorf("boot config: token: %w", err)
	}
	return &Answer{Config: config, Token: token}, nil
}

// AskClient is the HTTP client for Asker: no redirect, no proxy, no connection
// kept.
func AskClient() *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DisableKeepAlives: true, MaxResponseHeaderBytes: 16 << 10, ResponseHeaderTimeout: askTimeout,
			DisableCompression: true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}
