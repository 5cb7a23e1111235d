package gateway

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/intent"
	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// maxAskBytes bounds a BootConfigAsk: 64 MACs and a key fit four times.
	maxAskBytes   = 16 << 10
	askNonceBytes = 32
	// maxBootID is what fits into the protected header of the sealed token.
	maxBootID = 128
	// minBootID keeps boot ids that are not random from meeting.
	minBootID = 8
	// bootTokenTTL is how long a ramdisk has to join after it was told how: it
	// does so at once, and asks again when it could not.
	bootTokenTTL = 15 * time.Minute
	// grantKeep is how long a boot is remembered after its token has ended.
	grantKeep = time.Hour
	// bootAskRate bounds the tokens that the hosts of one site's network can
	// have made, and so the grants that are kept; the burst is a room of racks
	// that is switched on at once.
	bootAskRate  = 5
	bootAskBurst = 300
	// grantsAtOnce bounds one transaction that forgets old grants.
	grantsAtOnce = 1000
	// forgetEvery is how often that is done.
	forgetEvery = 10 * time.Minute
)

// parseAsk reads and bounds what a ramdisk asked. Everything in it was said by
// a host on the site's network that nobody knows yet.
func parseAsk(raw []byte) (*bcdv1.BootConfigAsk, *ecdsa.PublicKey, error) {
	if len(raw) == 0 || len(raw) > maxAskBytes {
		return nil, nil, fmt.Errorf("boot config ask: %d bytes; between 1 and %d are allowed", len(raw), maxAskBytes)
	}
	ask := new(bcdv1.BootConfigAsk)
	if err := proto.Unmarshal(raw, ask); err != nil {
		return nil, nil, errors.New("boot config ask: it is not a bcd.v1.BootConfigAsk")
	}
	if len(ask.GetMacs()) > maxMACs {
		return nil, nil, fmt.Errorf("boot config ask: %d MACs; at most %d are allowed", len(ask.GetMacs()), maxMACs)
	}
	for _, mac := range ask.GetMacs() {
		if len(mac) > 32 {
			return nil, nil, errors.New("boot config ask: a MAC of more than 32 bytes")
		}
	}
	for name, value := range map[string]string{"uuid": ask.GetSystemUuid(), "serial": ask.GetSystemSerial(), "version": ask.GetVersion()} {
		if len(value) > maxNameBytes || plainText(value, maxNameBytes) != value {
			return nil, nil, fmt.Errorf("boot config ask: the %s is longer than %d bytes or has control characters", name, maxNameBytes)
		}
	}
	id := ask.GetBootId()
	if !idLike(id) || len(id) < minBootID || len(id) > maxBootID {
		return nil, nil, fmt.Errorf("boot config ask: a boot id of %d bytes; it must be %d to %d printable characters", len(id), minBootID, maxBootID)
	}
	if len(ask.GetNonce()) != askNonceBytes {
		return nil, nil, fmt.Errorf("boot config ask: a nonce of %d bytes, want %d", len(ask.GetNonce()), askNonceBytes)
	}
	key, err := pki.ParseJWK([]byte(ask.GetJwk()))
	if err != nil {
		return nil, nil, fmt.Errorf("boot config ask: %w", err)
	}
	return ask, key, nil
}

// askingMachine finds the machine that asks by what its firmware and NICs say.
// That is no proof of anything: it decides what the asker is told, never who
// it is. nil is a machine that is not known.
func askingMachine(tx Tx, ask *bcdv1.BootConfigAsk) (*Machine, error) {
	uuid := cleanUUID(ask.GetSystemUuid())
	for _, mac := range cleanMACs(ask.GetMacs()) {
		m, err := tx.FindMachine("mac:" + mac)
		if errors.Is(err, ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if had := cleanUUID(m.UUID); uuid == "" || had == "" || had == uuid {
			return m, nil
		}
		// The NIC of one machine in another.
	}
	if uuid == "" || ask.GetSystemSerial() == "" {
		return nil, nil
	}
	// New NICs in a machine that is known. Vendors have given one UUID to many
	// boards, so the serial number has to agree.
	m, err := tx.FindMachine("uuid:" + uuid)
	if errors.Is(err, ErrNotFound) || err == nil && m.Serial != ask.GetSystemSerial() {
		return nil, nil
	}
	return m, err
}

// sameHardware says whether the machine asks with exactly the NICs and the
// UUID that it joined with: only then will its hardware key be the same, and a
// token may be bound to it.
func sameHardware(m *Machine, ask *bcdv1.BootConfigAsk) bool {
	had, has := cleanMACs(m.MACs), cleanMACs(ask.GetMacs())
	slices.Sort(had)
	slices.Sort(has)
	return len(had) > 0 && slices.Equal(had, has) && cleanUUID(m.UUID) == cleanUUID(ask.GetSystemUuid())
}

func notNow(format string, args ...any) error {
	return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf(format, args...))
}

// BootConfig gives a machine in its ramdisk what it needs to join, once in a
// boot: the same ask gets the same answer again, another one for the same boot
// does not.
func (s siteService) BootConfig(ctx context.Context, request *connect.Request[bcdv1.BootConfigRequest]) (*connect.Response[bcdv1.BootConfigResponse], error) {
	g, in := s.g, request.Msg
	peer, err := sitePeer(ctx)
	if err != nil {
		return nil, err
	}
	ask, key, err := parseAsk(in.GetAsk())
	if err != nil {
		return nil, invalid("%v", err)
	}
	if g.advertise == "" {
		return nil, notNow("the gateway does not know under which URL machines reach it; start it with --advertise URL")
	}
	memory := g.sites.of(peer.Site)
	if !memory.asks.AllowN(g.now(), 1) {
		return nil, connect.NewError(connect.CodeResourceExhausted, errors.New("the machines of this site ask too often; ask again in a few seconds"))
	}
	b := bootAsk{g: g, peer: peer, memory: memory, fence: in.GetFence(), raw: in.GetAsk(), ask: ask, key: key}
	log := g.log.With("site", peer.Site, "node", peer.NodeID, "boot", ask.GetBootId(), "remote", plainText(in.GetRemoteAddress(), 64))
	signed, err := b.answer(ctx)
	if err != nil {
		log.Warn("boot config refused", "reason", err)
		return nil, rpcError(err)
	}
	log.Info("boot config given", "machine", b.machine)
	return connect.NewResponse(&bcdv1.BootConfigResponse{Config: signed}), nil
}

// bootAsk is one ask on its way.
type bootAsk struct {
	g      *Gateway
	peer   *Peer
	memory *siteMemory
	fence  int64
	raw    []byte
	ask    *bcdv1.BootConfigAsk
	key    *ecdsa.PublicKey

	machine string
}

func (b *bootAsk) answer(ctx context.Context) (*bcdv1.Signed, error) {
	var out *bcdv1.Signed
	err := b.g.update(ctx, func(tx Tx) (err error) {
		out, err = b.decide(tx)
		return err
	})
	return out, err
}

// decide is the whole decision, in one transaction with what it leaves behind.
func (b *bootAsk) decide(tx Tx) (*bcdv1.Signed, error) {
	now := b.g.now()
	if _, err := trustedSite(tx, now, b.peer); err != nil {
		return nil, err
	}
	site, err := loadSite(tx, b.peer.Site)
	if err != nil {
		return nil, err
	}
	lease := b.memory.lease(b.g, site)
	switch {
	case lease.Holder != b.peer.NodeID:
		return nil, notNow("this agent does not hold the boot lease of site %s; %s does", site.Name, reasonOr(lease.Holder, "nobody"))
	case lease.Fence != b.fence:
		return nil, notNow("this agent acts on boot lease %d of site %s, which has %d; sync first", b.fence, site.Name, lease.Fence)
	case lease.Kind == bcdv1.LeaseKind_LEASE_KIND_EXPIRING && !now.Before(lease.Until):
		return nil, notNow("the boot lease of this agent has ended; sync first")
	}
	digest := sha256.Sum256(b.raw)
	grant, err := tx.BootGrant(b.ask.GetBootId())
	if err != nil && !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	if err == nil {
		again, err := b.repeated(tx, now, grant, digest[:])
		if again != nil || err != nil {
			return again, err
		}
	}
	m, err := askingMachine(tx, b.ask)
	if err != nil {
		return nil, err
	}
	if err := b.mayBoot(tx, site, m); err != nil {
		return nil, err
	}
	return b.grant(tx, now, site, m, digest[:])
}

// repeated answers an ask for a boot that was answered before. nil and nil is
// one whose token ended before it was used: it may have another.
func (b *bootAsk) repeated(tx Tx, now time.Time, grant *BootGrant, digest []byte) (*bcdv1.Signed, error) {
	if !bytes.Equal(grant.AskSHA256, digest) || grant.Site != b.peer.Site {
		return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("boot %s has its answer already, to another ask; a machine that lost it must restart", b.ask.GetBootId()))
	}
	token, err := tx.Token(grant.TokenID)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	switch {
	case err == nil && now.UnixMilli() < token.ExpiresMS && !token.Revoked:
		b.machine = grant.MachineID
		signed := new(bcdv1.Signed)
		if err := proto.Unmarshal(grant.Answer, signed); err != nil {
			return nil, fmt.Errorf("boot grant of %s: %w", grant.BootID, err)
		}
		return signed, nil
	case err != nil || token.Revoked || token.Used > 0:
		return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("boot %s has used its token, or an operator revoked it; the machine must restart to get another", b.ask.GetBootId()))
	}
	return nil, revokeToken(tx, token.ID)
}

// mayBoot refuses a machine that is not to be in the ramdisk.
func (b *bootAsk) mayBoot(tx Tx, site *Site, m *Machine) error {
	if m == nil {
		if site.Unknown != bootRamdisk {
			return notNow("site %s gives nothing to machines that are not known; bcd-gateway site set %s --unknown ramdisk changes that", site.Name, site.Name)
		}
		return nil
	}
	action, why, err := bootAction(tx, m)
	if err != nil {
		return err
	}
	if action != bootRamdisk {
		return notNow("machine %s is not to boot the ramdisk: %s; bcd-gateway boot %s ramdisk changes that", m.Name, why, m.Name)
	}
	return nil
}

// grant mints the token of this boot, seals it to the ask's key and signs what
// the machine is told.
func (b *bootAsk) grant(tx Tx, now time.Time, site *Site, m *Machine, digest []byte) (*bcdv1.Signed, error) {
	token, full, err := newToken(now, bcdv1.Role_ROLE_RAMDISK, site.Name, 1, bootTokenTTL)
	if err != nil {
		return nil, err
	}
	token.BootID, token.Note = b.ask.GetBootId(), "for a boot from site "+site.Name
	b.machine = ""
	if m != nil {
		b.machine, token.Note = m.ID, "for a boot of "+m.Name+" from site "+site.Name
		if sameHardware(m, b.ask) {
			token.MachineID = m.ID
		}
	}
	if err := tx.PutToken(token); err != nil {
		return nil, err
	}
	sealed, err := pki.Seal(b.key, []byte(full), b.ask.GetBootId())
	if err != nil {
		return nil, fmt.Errorf("boot config: %w", err)
	}
	signed, err := b.g.keys.Signer.Sign(intent.TypeBootConfig, &bcdv1.BootConfig{
		AskSha256: digest, GatewayUrl: b.g.advertise, Site: site.Name, Role: bcdv1.Role_ROLE_RAMDISK,
		SealedToken: sealed, ServerTimeMs: now.UnixMilli(), MachineId: b.machine,
	})
	if err != nil {
		return nil, err
	}
	encoded, err := proto.Marshal(signed)
	if err != nil {
		return nil, err
	}
	if err := tx.PutBootGrant(&BootGrant{
		BootID: b.ask.GetBootId(), Site: site.Name, AskSHA256: digest, TokenID: token.ID, MachineID: b.machine,
		Answer: encoded, CreatedMS: now.UnixMilli(), ExpiresMS: token.ExpiresMS,
	}); err != nil {
		return nil, err
	}
	if m == nil {
		return signed, nil
	}
	return signed, tx.AppendTimeline(&TimelineEntry{
		TimeMS: now.UnixMilli(), MachineID: m.ID, NodeID: b.peer.NodeID, Type: "boot-config",
		Message: fmt.Sprintf("its ramdisk asked site %s how to join, and was told", site.Name),
	})
}

// forgetGrants removes boots that are long over, and their tokens.
func (g *Gateway) forgetGrants(ctx context.Context) error {
	before := g.now().Add(-grantKeep).UnixMilli()
	old := func(tx Tx) (list []*BootGrant, err error) {
		err = tx.EachBootGrant(func(b *BootGrant) error {
			if b.ExpiresMS < before && len(list) < grantsAtOnce {
				list = append(list, b)
			}
			return nil
		})
		return list, err
	}
	var any bool
	err := g.store.View(ctx, func(tx Tx) error {
		list, err := old(tx)
		any = len(list) > 0
		return err
	})
	if err != nil || !any {
		return err
	}
	return g.update(ctx, func(tx Tx) error {
		list, err := old(tx)
		if err != nil {
			return err
		}
		for _, b := range list {
			if err := errors.Join(tx.DeleteBootGrant(b.BootID), tx.DeleteToken(b.TokenID)); err != nil {
				return err
			}
		}
		return nil
	})
}
