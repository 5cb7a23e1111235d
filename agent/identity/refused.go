package identity

import (
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// maxSkew is the difference between this machine's clock and the gateway's
// from which on a message says so.
const maxSkew = 5 * time.Minute

// Refused is a join or renewal that the gateway answered with no.
type Refused struct {
	Code bcdv1.JoinErrorCode
	// Message is the gateway's own sentence; may be empty.
	Message string
	// ServerTime is the gateway's clock; zero when it did not say.
	ServerTime time.Time
	// Skew is how far this machine's clock is ahead of the gateway's; zero
	// when not known.
	Skew time.Duration
	Err  error
}

// Error is a sentence for the console, with what to do.
func (r *Refused) Error() string {
	text := joinTexts[r.Code]
	if text == "" {
		text = "the gateway refused"
	}
	if r.Message != "" {
		text += " (the gateway says: " + printable(r.Message) + ")"
	}
	if note := SkewNote(r.Skew); note != "" {
		text += "; " + note
	}
	return text
}

func (r *Refused) Unwrap() error { return r.Err }

// Retryable says whether the same request may pass later.
func (r *Refused) Retryable() bool {
	return r.Code == bcdv1.JoinErrorCode_JOIN_ERROR_CODE_BUSY || r.Code == bcdv1.JoinErrorCode_JOIN_ERROR_CODE_CLOCK_SKEW
}

var joinTexts = map[bcdv1.JoinErrorCode]string{
	bcdv1.JoinErrorCode_JOIN_ERROR_CODE_MALFORMED:        "the gateway could not read the request; bcd and bcd-gateway may be too far apart in version",
	bcdv1.JoinErrorCode_JOIN_ERROR_CODE_UNKNOWN_TOKEN:    "the gateway does not know this join token; check that it was copied whole, or make another with bcd-gateway token create",
	bcdv1.JoinErrorCode_JOIN_ERROR_CODE_TOKEN_USED_UP:    "this join token is used up; make another with bcd-gateway token create (--uses N for several machines)",
	bcdv1.JoinErrorCode_JOIN_ERROR_CODE_TOKEN_EXPIRED:    "this join token has expired; make another with bcd-gateway token create",
	bcdv1.JoinErrorCode_JOIN_ERROR_CODE_TOKEN_REVOKED:    "this join token was revoked; make another with bcd-gateway token create",
	bcdv1.JoinErrorCode_JOIN_ERROR_CODE_WRONG_ROLE:       "this join token is for another role; make one for this role with bcd-gateway token create --role",
	bcdv1.JoinErrorCode_JOIN_ERROR_CODE_WRONG_MACHINE:    "this join token is bound to another machine; make one for this machine with bcd-gateway token create",
	bcdv1.JoinErrorCode_JOIN_ERROR_CODE_WRONG_JOIN_KEY:   "join-encryption.jwk is not this gateway's; copy the gateway's own file here again",
	bcdv1.JoinErrorCode_JOIN_ERROR_CODE_BUSY:             "the gateway is busy; it is tried again",
	bcdv1.JoinErrorCode_JOIN_ERROR_CODE_IDENTITY_EXPIRED: "the certificate expired longer ago than the gateway allows; " + WayBack,
	bcdv1.JoinErrorCode_JOIN_ERROR_CODE_REVOKED:          "this node was revoked by an operator; if that was a mistake, " + WayBack,
	bcdv1.JoinErrorCode_JOIN_ERROR_CODE_CLOCK_SKEW:       "the proof carried a time too far from the gateway's; it is tried again with the gateway's time",
}

// SkewNote is a sentence about this machine's clock being ahead of (positive)
// or behind the gateway's; "" when the difference is small.
func SkewNote(skew time.Duration) string {
	if skew.Abs() < maxSkew {
		return ""
	}
	direction := "ahead of"
	if skew < 0 {
		direction = "behind"
	}
	return fmt.Sprintf("this machine's clock is %s %s the gateway's; set it (timedatectl set-ntp true, or the firmware's clock)", longDuration(skew.Abs()), direction)
}

func longDuration(d time.Duration) string {
	const day, year = 24 * time.Hour, 8766 * time.Hour
	switch {
	case d >= 2*year:
		return fmt.Sprintf("%d years", d/year)
	case d >= 2*day:
		return fmt.Sprintf("%d days", d/day)
	case d >= 2*time.Hour:
		return fmt.Sprintf("%d hours", d/time.Hour)
	default:
		return fmt.Sprintf("%d minutes", d/time.Minute)
	}
}

// explain turns a client's error into one for people: a Refused when the
// gateway said no, else what is wrong on the way there.
func explain(err error, wall time.Time) error {
	var ce *connect.Error
	if errors.As(err, &ce) {
		for _, detail := range ce.Details() {
			value, valueErr := detail.Value()
			if joinError, ok := value.(*bcdv1.JoinError); ok && valueErr == nil {
				r := &Refused{Code: joinError.GetCode(), Message: joinError.GetMessage(), Err: err}
				if ms := joinError.GetServerTimeMs(); ms > 0 {
					r.ServerTime = time.UnixMilli(ms)
					r.Skew = wall.Sub(r.ServerTime)
				}
				return r
			}
		}
	}
	switch {
	case errors.Is(err, pki.ErrUntrusted):
		return fmt.Errorf("the gateway there has another root than this machine trusts; compare roots.pem with the gateway's, and the address in gateway_url: %w", err)
	case errors.Is(err, pki.ErrWrongPurpose):
		return fmt.Errorf("what answers there is not a gateway; check gateway_url: %w", err)
	case errors.Is(err, pki.ErrExpired):
		return fmt.Errorf("the gateway's own certificate has expired; renew it there (bcd-gateway keys init): %w", err)
	}
	return err
}

// printable keeps a gateway's words from playing with a console.
func printable(s string) string {
	const most = 512
	out := make([]rune, 0, min(len(s), most))
	for _, r := range s {
		if len(out) == most {
			break
		}
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			r = ' '
		}
		out = append(out, r)
	}
	return string(out)
}
