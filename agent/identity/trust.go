package identity

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/better-compute/bcd/agent/durable"
	"github.com/better-compute/bcd/agent/pki"
)

// TrustPath is where a gateway hands out what is public about it: roots.pem
// and join-encryption.jwk below it.
const TrustPath = "/v1/trust/"

// Trust is what a machine must know of its gateways before it can join.
type Trust struct {
	// RootsPEM holds the pinned root alone.
	RootsPEM []byte
	JoinKey  []byte
}

// FetchTrust gets the trust of the gateway at server (https://HOST[:PORT]).
// The root certificate counts only if the SHA-256 of its DER is pin; the join
// key comes over a connection that this root vouches for. So whoever stands
// between can cut the exchange, and nothing else.
func FetchTrust(ctx context.Context, server string, pin [32]byte) (*Trust, error) {
	server = strings.TrimSuffix(server, "/")
	// Nobody can be verified before there is a root. What comes back is public
	// and is judged by the pin.
	unverified := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true}}}
	offered, err := fetchTrustFile(ctx, unverified, server, "roots.pem")
	if err != nil {
		return nil, err
	}
	certificates, err := pki.DecodeCertificates(offered, pki.MaxRoots)
	if err != nil {
		return nil, fmt.Errorf("roots.pem of %s: %w", server, err)
	}
	t := &Trust{}
	for _, c := range certificates {
		if pki.Digest(c) == pin {
			t.RootsPEM = pki.EncodeCertificates([][]byte{c.Raw})
		}
	}
	if t.RootsPEM == nil {
		return nil, fmt.Errorf("the gateway at %s does not have the root certificate with the SHA-256 %x: it is another gateway, or somebody stands between; compare with the line that bcd-gateway serve printed", server, pin)
	}
	roots, err := pki.ParseRoots(t.RootsPEM)
	if err != nil {
		return nil, err
	}
	verified := HTTPClient(ClientOptions{Roots: roots, Floor: time.Now})
	if t.JoinKey, err = fetchTrustFile(ctx, verified, server, "join-encryption.jwk"); err != nil {
		return nil, err
	}
	if _, err := pki.ParseJWK(t.JoinKey); err != nil {
		return nil, fmt.Errorf("join-encryption.jwk of %s: %w", server, err)
	}
	return t, nil
}

func fetchTrustFile(ctx context.Context, client *http.Client, server, name string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, server+TrustPath+name, nil)
	if err != nil {
		return nil, err
	}
	answer, err := client.Do(request)
	if err != nil {
		return nil, fmt.Errorf("fetch %s: %w", name, err)
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("fetch %s from %s: the answer was %s; is that a bcd gateway?", name, server, answer.Status)
	}
	data, err := io.ReadAll(io.LimitReader(answer.Body, maxSeedFile+1))
	if err != nil {
		return nil, fmt.Errorf("fetch %s: %w", name, err)
	}
	if len(data) > maxSeedFile {
		return nil, errors.New(name + " is larger than a trust file can be")
	}
	return data, nil
}

// Install writes the trust below trustDir and then, when it is not there yet,
// the configuration file.
func (t *Trust) Install(configPath, trustDir string, config []byte) error {
	for _, dir := range []string{trustDir, filepath.Dir(configPath)} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	for path, data := range map[string][]byte{
		filepath.Join(trustDir, "roots.pem"):           t.RootsPEM,
		filepath.Join(trustDir, "join-encryption.jwk"): t.JoinKey,
	} {
		if err := durable.WriteFile(path, data, 0o644); err != nil {
			return err
		}
	}
	return durable.WriteFile(configPath, config, 0o640)
}
