package secret

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// maxPending bounds the requests that wait at one time.
	maxPending = 32
	// maxRequestBytes bounds a SecretRequestBody.
	maxRequestBytes = 8 << 10
	// requestAge is how old, or young, a request may be at the gateway: a
	// captured one is of no use later, nor is it without its one-time key.
	requestAge = 10 * time.Minute
)

var referencePattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_./:-]{0,254}$`)

// Reasons that Requester.Answer and VerifyRequest wrap.
var (
	// ErrUnasked: no request of that id waits; a second answer ends here too.
	ErrUnasked = errors.New("no secret request of that id waits")
	// ErrBadRequest: malformed, stale, for another node, or wrongly signed.
	ErrBadRequest = errors.New("secret request is not acceptable")
)

// Requester asks for values over whatever carries its frames. It is safe for
// concurrent use.
type Requester struct {
	NodeID string
	// Key gives the node key that the session was opened with: the gateway
	// checks the signature against that session's certificate.
	Key func() crypto.Signer
	// Send gives a frame to the session; an error ends the request.
	Send func(ctx context.Context, request *bcdv1.SecretRequest) error
	// Now is server time.
	Now      func() time.Time
	Registry *Registry

	mu      sync.Mutex
	pending map[string]*pending
}

type pending struct {
	key      *ecdsa.PrivateKey
	answered chan answer // capacity 1
}

type answer struct {
	value *Value
	err   error
}

// Fetch gives the value that reference stands for, on behalf of a command. It
// waits until the answer comes or ctx ends. The caller destroys the value.
func (r *Requester) Fetch(ctx context.Context, reference, commandID string) (*Value, error) {
	if !referencePattern.MatchString(reference) {
		return nil, fmt.Errorf("secret reference %.80q is not of the form join/cmd_…", reference)
	}
	id, p, err := r.register()
	if err != nil {
		return nil, fmt.Errorf("secret %s: %w", reference, err)
	}
	defer r.forget(id, p)
	request, err := r.request(id, reference, commandID, p.key)
	if err != nil {
		return nil, fmt.Errorf("secret %s: %w", reference, err)
	}
	if err := r.Send(ctx, request); err != nil {
		return nil, fmt.Errorf("secret %s: %w", reference, err)
	}
	select {
	case a := <-p.answered:
		if a.err != nil {
			return nil, fmt.Errorf("secret %s: %w", reference, a.err)
		}
		return a.value, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("secret %s: no answer: %w", reference, ctx.Err())
	}
}

// Answer takes an answer in; the session's reader calls it. An answer nobody
// waits for is ErrUnasked; one that does not open ends its request all the
// same, so that nobody can try twice.
func (r *Requester) Answer(m *bcdv1.SecretAnswer) error {
	r.mu.Lock()
	p := r.pending[m.GetRequestId()]
	delete(r.pending, m.GetRequestId())
	r.mu.Unlock()
	if p == nil {
		return fmt.Errorf("%w: %.80q", ErrUnasked, m.GetRequestId())
	}
	if m.GetError() != "" {
		destroyKey(p.key)
		err := fmt.Errorf("the gateway answers: %.400q", m.GetError())
		p.answered <- answer{err: err}
		return nil
	}
	plain, err := pki.Open(p.key, m.GetSealed(), m.GetRequestId())
	destroyKey(p.key)
	if err != nil {
		p.answered <- answer{err: err}
		return err
	}
	value, err := r.Registry.New(plain)
	p.answered <- answer{value, err}
	return err
}

func (r *Requester) register() (string, *pending, error) {
	key, err := pki.NewKey()
	if err != nil {
		return "", nil, err
	}
	raw := make([]byte, 16)
	if _, err := rand.Read(raw); err != nil {
		return "", nil, err
	}
	id := "sreq_" + strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(raw))
	p := &pending{key: key, answered: make(chan answer, 1)}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.pending) >= maxPending {
		return "", nil, fmt.Errorf("%d requests wait already", len(r.pending))
	}
	if r.pending == nil {
		r.pending = map[string]*pending{}
	}
	r.pending[id] = p
	return id, p, nil
}

// forget ends a request. A value that came too late is destroyed.
func (r *Requester) forget(id string, p *pending) {
	r.mu.Lock()
	_, waiting := r.pending[id]
	delete(r.pending, id)
	r.mu.Unlock()
	if waiting {
		destroyKey(p.key)
		return
	}
	select {
	case a := <-p.answered:
		a.value.Destroy()
	default:
	}
}

func (r *Requester) request(id, reference, commandID string, key *ecdsa.PrivateKey) (*bcdv1.SecretRequest, error) {
	jwk, err := pki.MarshalJWK(&key.PublicKey)
	if err != nil {
		return nil, err
	}
	body, err := proto.Marshal(&bcdv1.SecretRequestBody{
		RequestId: id, NodeId: r.NodeID, Reference: reference, Jwk: string(jwk), TimeMs: r.Now().UnixMilli(), CommandId: commandID,
	})
	if err != nil {
		return nil, err
	}
	signature, err := pki.SignStatement(r.Key(), pki.DomainSecret, bodyDigest(body))
	if err != nil {
		return nil, err
	}
	return &bcdv1.SecretRequest{Body: body, Signature: signature}, nil
}

func bodyDigest(body []byte) []byte {
	sum := sha256.Sum256(body)
	return sum[:]
}

// destroyKey zeroes the private half as well as Go lets one.
func destroyKey(key *ecdsa.PrivateKey) {
	//lint:ignore SA1019 nothing else reaches the words, and the key is not used again
	clear(key.D.Bits())
}

// Request is a SecretRequest that VerifyRequest has checked.
type Request struct {
	Body *bcdv1.SecretRequestBody
	key  *ecdsa.PublicKey
}

// VerifyRequest is the gateway's check: pub is the public key of the session's
// node certificate, nodeID the node it names, now the gateway's time. Whether
// that node may have that reference is the caller's to decide. Errors wrap
// ErrBadRequest.
func VerifyRequest(pub crypto.PublicKey, nodeID string, m *bcdv1.SecretRequest, now time.Time) (*Request, error) {
	if n := len(m.GetBody()); n == 0 || n > maxRequestBytes {
		return nil, fmt.Errorf("%w: a body of %d bytes", ErrBadRequest, n)
	}
	if !pki.VerifyStatement(pub, pki.DomainSecret, bodyDigest(m.GetBody()), m.GetSignature()) {
		return nil, fmt.Errorf("%w: the signature is not this node's", ErrBadRequest)
	}
	body := &bcdv1.SecretRequestBody{}
	if err := proto.Unmarshal(m.GetBody(), body); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadRequest, err)
	}
	if body.GetNodeId() != nodeID {
		return nil, fmt.Errorf("%w: it is for node %.80q, this is %s", ErrBadRequest, body.GetNodeId(), nodeID)
	}
	if !referencePattern.MatchString(body.GetReference()) || body.GetRequestId() == "" || len(body.GetRequestId()) > 64 || len(body.GetCommandId()) > 64 {
		return nil, fmt.Errorf("%w: malformed reference or id", ErrBadRequest)
	}
	if age := now.Sub(time.UnixMilli(body.GetTimeMs())); age.Abs() > requestAge {
		return nil, fmt.Errorf("%w: it is %s old by the gateway's clock", ErrBadRequest, age.Round(time.Second))
	}
	key, err := pki.ParseJWK([]byte(body.GetJwk()))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadRequest, err)
	}
	return &Request{Body: body, key: key}, nil
}

// SealAnswer seals value for this request and no other. The caller zeroes
// value.
func (r *Request) SealAnswer(value []byte) (*bcdv1.SecretAnswer, error) {
	if len(value) > MaxValue {
		return nil, fmt.Errorf("secret %s: a value of %d bytes; at most %d are allowed", r.Body.GetReference(), len(value), MaxValue)
	}
	sealed, err := pki.Seal(r.key, value, r.Body.GetRequestId())
	if err != nil {
		return nil, fmt.Errorf("secret %s: %w", r.Body.GetReference(), err)
	}
	return &bcdv1.SecretAnswer{RequestId: r.Body.GetRequestId(), Sealed: sealed}, nil
}

// RefuseAnswer says why there is no value. why must not hold one.
func (r *Request) RefuseAnswer(why string) *bcdv1.SecretAnswer {
	return &bcdv1.SecretAnswer{RequestId: r.Body.GetRequestId(), Error: why}
}
