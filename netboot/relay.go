package netboot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// BootConfigPath is where a ramdisk posts its question, below the site's
	// HTTP address.
	BootConfigPath = "boot-config"
	// bootConfigType is the content type of question and answer.
	bootConfigType = "application/x-protobuf"

	// maxAsk is BootConfigRequest's; an honest ask has about 600 bytes.
	maxAsk = 16 << 10
	// maxAskMACs is BootConfigAsk's.
	maxAskMACs = 64
	nonceBytes = 32
	// maxAskJWK: a P-256 JWK has about 200 bytes.
	maxAskJWK = 1024
	// maxAskWord bounds each of the ask's other texts.
	maxAskWord = 128

	// askEvery and askBurst are one machine's: a ramdisk asks once, and again
	// with a back-off while the gateway cannot be reached. maxAskers machines
	// are counted; one more is refused until the oldest have had their time.
	askEvery  = 2 * time.Second
	askBurst  = 4
	maxAskers = 1024
	// relayTimeout is shorter than a ramdisk waits for an answer.
	relayTimeout = 10 * time.Second
)

// parseAsk reads a ramdisk's question and holds it to its bounds.
func parseAsk(data []byte) (*bcdv1.BootConfigAsk, error) {
	if len(data) == 0 || len(data) > maxAsk {
		return nil, fmt.Errorf("boot config ask of %d bytes; 1 to %d are allowed", len(data), maxAsk)
	}
	ask := &bcdv1.BootConfigAsk{}
	if err := proto.Unmarshal(data, ask); err != nil {
		return nil, fmt.Errorf("boot config ask: %w", err)
	}
	if n := len(ask.GetMacs()); n == 0 || n > maxAskMACs {
		return nil, fmt.Errorf("boot config ask with %d MACs; 1 to %d are allowed", n, maxAskMACs)
	}
	for _, mac := range ask.GetMacs() {
		if !macForm.MatchString(mac) {
			return nil, fmt.Errorf("boot config ask: MAC %.32q is not lower case with colons", mac)
		}
	}
	if n := len(ask.GetNonce()); n != nonceBytes {
		return nil, fmt.Errorf("boot config ask: nonce of %d bytes, want %d", n, nonceBytes)
	}
	if n := len(ask.GetJwk()); n == 0 || n > maxAskJWK {
		return nil, fmt.Errorf("boot config ask: key of %d bytes; 1 to %d are allowed", n, maxAskJWK)
	}
	for _, word := range []string{ask.GetSystemUuid(), ask.GetSystemSerial(), ask.GetBootId(), ask.GetVersion()} {
		if len(word) > maxAskWord {
			return nil, fmt.Errorf("boot config ask: a text of %d bytes; at most %d are allowed", len(word), maxAskWord)
		}
	}
	return ask, nil
}

// Relay is the site's end of a ramdisk's question: it hands it to the gateway
// as it came, and the answer back as it came. It can read neither the token in
// it, which is sealed to the ramdisk's key, nor change a bit of it.
type Relay struct {
	// Fence gives the lease's fence while it is held.
	Fence func() (fence int64, holding bool)
	// Ask asks the gateway.
	Ask func(ctx context.Context, request *bcdv1.BootConfigRequest) (*bcdv1.BootConfigResponse, error)
	// Observe is told how it ended, for the trace.
	Observe func(Event)
	// Now is the wall clock, for the trace, with its monotonic part.
	Now func() time.Time
	Log *slog.Logger

	mu     sync.Mutex
	askers map[string]asker
}

type asker struct {
	tokens float64
	at     time.Time
}

// allow says whether mac may ask once more at now.
func (r *Relay) allow(mac string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	a, known := r.askers[mac]
	if !known {
		if len(r.askers) >= maxAskers {
			for other, b := range r.askers {
				if now.Sub(b.at) >= askBurst*askEvery {
					delete(r.askers, other)
				}
			}
		}
		if len(r.askers) >= maxAskers {
			return false
		}
		a = asker{tokens: askBurst, at: now}
	}
	a.tokens = min(askBurst, a.tokens+float64(now.Sub(a.at))/float64(askEvery))
	a.at = now
	allowed := a.tokens >= 1
	if allowed {
		a.tokens--
	}
	if r.askers == nil {
		r.askers = map[string]asker{}
	}
	r.askers[mac] = a
	return allowed
}

// ServeHTTP answers a POST of a BootConfigAsk with a Signed BootConfig, both
// as protobuf. 503 says to ask again, 403 that there is nothing for this
// machine.
func (r *Relay) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	if q.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		http.Error(w, "a boot config is asked for by POST", http.StatusMethodNotAllowed)
		return
	}
	data, err := io.ReadAll(io.LimitReader(q.Body, maxAsk+1))
	if err != nil {
		http.Error(w, "the question ended early", http.StatusBadRequest)
		return
	}
	ask, err := parseAsk(data)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	now := r.Now()
	// Each MAC has its own rate, so that a machine that claims another's does
	// not go unnoticed for long; the first is the one that counts.
	mac := ask.GetMacs()[0]
	event := Event{Time: now, MAC: mac, UUID: ask.GetSystemUuid(), Firmware: "", Type: EventBootConfigRefused}
	refuse := func(status int, why string) {
		if status == http.StatusServiceUnavailable || status == http.StatusTooManyRequests {
			w.Header().Set("Retry-After", "2")
		}
		event.Message = why
		r.Observe(event)
		http.Error(w, why, status)
	}
	if !r.allow(mac, now) {
		http.Error(w, "asked too often", http.StatusTooManyRequests)
		return
	}
	fence, holding := r.Fence()
	if !holding {
		refuse(http.StatusServiceUnavailable, "this site agent does not hold the boot lease")
		return
	}
	ctx, cancel := context.WithTimeout(q.Context(), relayTimeout)
	defer cancel()
	host, _, err := net.SplitHostPort(q.RemoteAddr)
	if err != nil {
		host = q.RemoteAddr
	}
	answer, err := r.Ask(ctx, &bcdv1.BootConfigRequest{Ask: data, Fence: fence, RemoteAddress: host})
	if err != nil {
		status, why := refusal(err)
		r.Log.Warn("no boot config for a machine", "mac", mac, "error", err)
		refuse(status, why)
		return
	}
	body, err := proto.Marshal(answer.GetConfig())
	if err != nil || answer.GetConfig() == nil {
		refuse(http.StatusServiceUnavailable, "the gateway's answer holds no boot config")
		return
	}
	event.Type, event.Message = EventBootConfig, "to "+host
	r.Observe(event)
	w.Header().Set("Content-Type", bootConfigType)
	w.Header().Set("Content-Length", fmt.Sprint(len(body)))
	// A machine that went away asks again.
	_, _ = w.Write(body)
}

// refusal gives the status and the sentence for the ramdisk's console. What
// may pass is 503.
func refusal(err error) (status int, why string) {
	var rpc *connect.Error
	if errors.As(err, &rpc) {
		switch rpc.Code() {
		case connect.CodeFailedPrecondition, connect.CodePermissionDenied, connect.CodeInvalidArgument, connect.CodeNotFound, connect.CodeAlreadyExists:
			return http.StatusForbidden, "the gateway refused: " + cutText(rpc.Message(), maxStepMessage)
		case connect.CodeResourceExhausted:
			return http.StatusServiceUnavailable, "the gateway has too much to do"
		}
	}
	return http.StatusServiceUnavailable, "the gateway cannot be reached from this site"
}
