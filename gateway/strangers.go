package gateway

import (
	"context"
	"fmt"
	"net"
	"regexp"
	"sync"
	"time"
)

const (
	// strangerEvery is how long an address that does not trust this gateway is
	// not written down again, while it tries and tries.
	strangerEvery = 10 * time.Minute
	// maxStrangers bounds the addresses that are remembered. Past it they are
	// in the log at debug level only, until the oldest are due again.
	maxStrangers = 256
)

// untrusting matches net/http's line about a client that ended the handshake
// because of the gateway's certificate (RFC 8446 section 6.2).
var untrusting = regexp.MustCompile(`^http: TLS handshake error from (\S+): remote error: tls: (?:bad certificate|unknown certificate(?: authority)?)`)

// strangers takes what net/http says about connections. A machine that trusts
// another root hangs up before it says anything, so this is the only trace of
// it, and it tells an operator why that machine never joins.
type strangers struct {
	g    *Gateway
	mu   sync.Mutex
	seen map[string]time.Time
}

func (s *strangers) Write(line []byte) (int, error) {
	s.g.log.Debug(clip(string(line), maxMessageBytes))
	m := untrusting.FindSubmatch(line)
	if m == nil {
		return len(line), nil
	}
	host, _, err := net.SplitHostPort(string(m[1]))
	if err != nil || !s.fresh(host, s.g.now()) {
		return len(line), nil
	}
	message := fmt.Sprintf("a machine at %s hung up because it does not trust this gateway's root: its image or roots.pem was made for another gateway; build it with this one's trust: bcd-gateway keys export-trust", host)
	s.g.log.Warn("not trusted by a machine", "remote", host)
	err = s.g.update(context.Background(), func(tx Tx) error {
		return tx.AppendTimeline(&TimelineEntry{TimeMS: s.g.now().UnixMilli(), Type: "trust.refused", Severity: "error", Message: message})
	})
	if err != nil {
		s.g.log.Error("untrusting machine not recorded", "error", err)
	}
	return len(line), nil
}

// fresh says whether host is to be written down now.
func (s *strangers) fresh(host string, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.seen == nil {
		s.seen = map[string]time.Time{}
	}
	if last, ok := s.seen[host]; ok && now.Sub(last) < strangerEvery {
		return false
	}
	if _, ok := s.seen[host]; !ok && len(s.seen) >= maxStrangers {
		for old, last := range s.seen {
			if now.Sub(last) >= strangerEvery {
				delete(s.seen, old)
			}
		}
		if len(s.seen) >= maxStrangers {
			return false
		}
	}
	s.seen[host] = now
	return true
}
