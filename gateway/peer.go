package gateway

import (
	"context"
	"crypto/ecdsa"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Peer is a node as its certificate names it.
type Peer struct {
	NodeID string
	Role   bcdv1.Role
	Site   string
	// Serial is the certificate's, hex.
	Serial   string
	NotAfter time.Time
	Key      *ecdsa.PublicKey
	Remote   string
	// InnerAuth: TLS ended before the gateway, and the node proved its key
	// inside the session.
	InnerAuth bool
}

// caller is who makes a request.
type caller struct {
	// peer is set for a node whose certificate verified; with expired, its
	// only flaw is that its time has passed.
	peer    *Peer
	expired error
	// fault says why a certificate that was shown does not count.
	fault error
	// operator: over the unix socket, or with an operator token.
	operator bool
	remote   string
	control  *http.ResponseController
}

type callerKey struct{}

func callerOf(ctx context.Context) *caller {
	if c, ok := ctx.Value(callerKey{}).(*caller); ok {
		return c
	}
	return &caller{}
}

// peerOf judges a chain, leaf first, at time now. An expired one gives the
// peer and an error that wraps pki.ErrExpired.
func peerOf(roots *pki.Roots, chain []*x509.Certificate, remote string, now time.Time) (*Peer, error) {
	name, err := pki.VerifyNode(roots, chain, now)
	if err != nil && !errors.Is(err, pki.ErrExpired) {
		return nil, err
	}
	if name.NodeID == "" {
		return nil, err
	}
	key, ok := chain[0].PublicKey.(*ecdsa.PublicKey)
	if !ok {
		return nil, fmt.Errorf("node %s: its key is %T, want ECDSA", name.NodeID, chain[0].PublicKey)
	}
	return &Peer{
		NodeID: name.NodeID, Role: name.Role, Site: name.Site, Serial: serialOf(chain[0]),
		NotAfter: chain[0].NotAfter, Key: key, Remote: remote,
	}, err
}

func serialOf(cert *x509.Certificate) string { return fmt.Sprintf("%x", cert.SerialNumber) }

// identify puts the caller into the request's context.
func (g *Gateway) identify(next http.Handler, local bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := &caller{operator: local || g.operatorToken(r), remote: r.RemoteAddr, control: http.NewResponseController(w)}
		if r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
			peer, err := peerOf(g.keys.Roots, r.TLS.PeerCertificates, r.RemoteAddr, g.now())
			switch {
			case errors.Is(err, pki.ErrExpired):
				c.peer, c.expired = peer, err
			case err != nil:
				c.fault = err
			default:
				c.peer = peer
			}
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), callerKey{}, c)))
	})
}
