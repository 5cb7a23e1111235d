package gateway

import (
	"context"
	"crypto/x509"
	"errors"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// proofWindow is how far the time in a renewal's proof may be from ours. What
// a replayed proof could get is a certificate for a key that only the node
// has, so this guards little; it tells a node that its clock is off.
const proofWindow = 15 * time.Minute

type identityService struct{ g *Gateway }

// Renew gives a node its next certificate. It is called with the current one,
// or, within renewGrace after that ended, with proof of its key.
func (s identityService) Renew(ctx context.Context, request *connect.Request[bcdv1.RenewRequest]) (*connect.Response[bcdv1.RenewResponse], error) {
	g := s.g
	response, err := g.renew(ctx, callerOf(ctx), request.Msg)
	var refusal *joinRefusal
	if errors.As(err, &refusal) {
		g.log.Warn("renewal refused", "node", clip(request.Msg.GetNodeId(), 64), "code", word(refusal.code), "reason", refusal.message)
		return nil, g.joinError(refusal)
	}
	if err != nil {
		return nil, rpcError(err)
	}
	return connect.NewResponse(response), nil
}

func (g *Gateway) renew(ctx context.Context, c *caller, in *bcdv1.RenewRequest) (*bcdv1.RenewResponse, error) {
	if _, err := pki.CheckCSR(in.GetCsr()); err != nil {
		return nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_MALFORMED, "%v", err)
	}
	peer, err := g.renewPeer(c, in)
	if err != nil {
		return nil, err
	}
	if in.GetNodeId() != "" && in.GetNodeId() != peer.NodeID {
		return nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_MALFORMED, "the request is for node %.80q, the certificate is %s's", in.GetNodeId(), peer.NodeID)
	}
	now := g.now()
	if late := now.Sub(peer.NotAfter); late > renewGrace {
		return nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_IDENTITY_EXPIRED, "the certificate of %s ended %s ago, and %s are allowed; join again with a new token", peer.NodeID, roughly(late), roughly(renewGrace))
	}
	var response *bcdv1.RenewResponse
	err = g.update(ctx, func(tx Tx) error {
		node, err := tx.Node(peer.NodeID)
		if errors.Is(err, ErrNotFound) {
			return refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_REVOKED, "node %s is not known to this gateway; join again with a new token", peer.NodeID)
		}
		if err != nil {
			return err
		}
		judged := *peer
		judged.NotAfter = now.Add(time.Second)
		if reject, err := stillTrusted(tx, now, &judged, node); err != nil {
			return err
		} else if reject != nil {
			return refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_REVOKED, "%s", reject.GetDetail())
		}
		chain, err := g.issue(tx, now, node, in.GetCsr())
		if err != nil {
			return err
		}
		record, err := g.joinRecord(now, node)
		if err != nil {
			return err
		}
		response = &bcdv1.RenewResponse{CertificateChain: chain, ServerTimeMs: now.UnixMilli(), JoinRecord: record}
		return nil
	})
	return response, err
}

// renewPeer finds out who asks. TLS has proved the key of a certificate that
// was shown in the handshake, expired or not.
func (g *Gateway) renewPeer(c *caller, in *bcdv1.RenewRequest) (*Peer, error) {
	if c.peer != nil {
		return c.peer, nil
	}
	if len(in.GetExpiredCertificate()) == 0 {
		if c.fault != nil {
			return nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_MALFORMED, "%v", c.fault)
		}
		return nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_MALFORMED, "a renewal needs the current certificate, or the expired one with proof of its key")
	}
	chain := [][]byte{in.GetExpiredCertificate(), g.keys.Issuer.Certificate.Raw}
	parsed, err := pki.ParseChain(chain)
	if err != nil {
		return nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_MALFORMED, "%v", err)
	}
	peer, err := peerOf(g.keys.Roots, []*x509.Certificate{parsed[0], parsed[1]}, c.remote, g.now())
	if peer == nil {
		return nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_MALFORMED, "%v", err)
	}
	at := time.UnixMilli(in.GetProofTimeMs())
	if !pki.VerifyStatement(peer.Key, pki.DomainRenew, pki.RenewMessage(in.GetCsr(), at), in.GetProof()) {
		return nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_MALFORMED, "the proof is not by the key of the certificate of %s", peer.NodeID)
	}
	if off := at.Sub(g.now()); off.Abs() > proofWindow {
		return nil, refuse(bcdv1.JoinErrorCode_JOIN_ERROR_CODE_CLOCK_SKEW, "the proof was made at %s, and it is %s here", at.UTC().Format(time.RFC3339), g.now().UTC().Format(time.RFC3339))
	}
	return peer, nil
}
