package gateway

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"connectrpc.com/connect"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// maxFullDHCP bounds the addresses of one site: a /22.
	maxFullDHCP = 1024
	maxDNS      = 4
	// maxCommandLine is the least that kernels of today take (x86: 2048 bytes
	// with the final zero).
	maxCommandLine = 2047
)

var (
	artefactName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,63}$`)
	// architectures of artefacts, by kind.
	kernelArchitectures = []string{"amd64", "arm64"}
	ipxeArchitectures   = []string{"amd64", "arm64", "386", "bios"}
)

// knownSite gets a site that exists: a token named it.
func knownSite(tx Tx, name string) (*Site, error) {
	site, err := tx.Site(name)
	if errors.Is(err, ErrNotFound) {
		return nil, fmt.Errorf("site %.80q: %w; bcd-gateway site list shows those that are known, and bcd-gateway token create --role site --site NAME begins another", name, ErrNotFound)
	}
	return site, err
}

// nameSite makes a site's record with the first token that names it.
func nameSite(tx Tx, name string) error {
	if name == "" {
		return nil
	}
	if _, err := tx.Site(name); !errors.Is(err, ErrNotFound) {
		return err
	}
	site, err := loadSite(tx, name)
	if err != nil {
		return err
	}
	return tx.PutSite(site)
}

// describeSite is a site as operators see it.
func (g *Gateway) describeSite(tx Tx, site *Site) (*bcdv1.Site, error) {
	m := g.sites.of(site.Name)
	lease := m.lease(g, site)
	m.mu.Lock()
	defer m.mu.Unlock()
	out := &bcdv1.Site{
		Name: site.Name, Unknown: site.Unknown, TableGeneration: site.Generation, FullDhcp: fullDHCP(site),
		Lease: &bcdv1.Lease{Kind: lease.Kind, Fence: lease.Fence, Holder: lease.Holder, Release: lease.Asked != "", Message: lease.sentence()},
	}
	if out.GetLease().GetKind() == bcdv1.LeaseKind_LEASE_KIND_UNSPECIFIED {
		out.Lease.Kind = bcdv1.LeaseKind_LEASE_KIND_NONE
	}
	if lease.Kind == bcdv1.LeaseKind_LEASE_KIND_EXPIRING {
		out.Lease.TtlMs = int32(max(0, lease.Until.Sub(g.now()).Milliseconds()))
	}
	if m.fault != "" {
		out.Lease.Message += "; " + m.fault
	}
	agents, err := siteAgents(tx, g.now(), site)
	if err != nil {
		return nil, err
	}
	for _, id := range agents {
		node, err := tx.Node(id)
		if err != nil {
			return nil, err
		}
		described, err := g.describeNode(tx, node)
		if err != nil {
			return nil, err
		}
		agent := &bcdv1.SiteAgent{Node: described}
		if a := m.agents[id]; a != nil {
			agent.SeenMs, agent.TableGeneration, agent.Fence, agent.Lease = a.seen.UnixMilli(), a.said.GetTableGeneration(), a.said.GetFence(), a.said.GetLease()
			agent.Problems, agent.Serving, agent.Artefacts = a.said.GetProblems(), a.said.GetServing(), a.said.GetArtefacts()
		}
		out.Agents = append(out.Agents, agent)
	}
	return out, nil
}

func (o operatorService) ListSites(ctx context.Context, _ *connect.Request[bcdv1.ListSitesRequest]) (*connect.Response[bcdv1.ListSitesResponse], error) {
	out := &bcdv1.ListSitesResponse{}
	err := o.g.store.View(ctx, func(tx Tx) error {
		return tx.EachSite(func(s *Site) error {
			described, err := o.g.describeSite(tx, s)
			out.Sites = append(out.Sites, described)
			return err
		})
	})
	return connect.NewResponse(out), rpcError(err)
}

func (o operatorService) GetSite(ctx context.Context, request *connect.Request[bcdv1.GetSiteRequest]) (*connect.Response[bcdv1.GetSiteResponse], error) {
	out := &bcdv1.GetSiteResponse{}
	err := o.g.store.View(ctx, func(tx Tx) error {
		site, err := knownSite(tx, request.Msg.GetName())
		if err != nil {
			return err
		}
		if out.Site, err = o.g.describeSite(tx, site); err != nil {
			return err
		}
		out.Boots, err = siteTraces(tx, site.Name)
		return err
	})
	return connect.NewResponse(out), rpcError(err)
}

// siteDescribed is describeSite after a change.
func (g *Gateway) siteDescribed(ctx context.Context, name string) (out *bcdv1.Site, err error) {
	err = g.store.View(ctx, func(tx Tx) error {
		site, err := knownSite(tx, name)
		if err != nil {
			return err
		}
		out, err = g.describeSite(tx, site)
		return err
	})
	return out, err
}

func (o operatorService) SetSite(ctx context.Context, request *connect.Request[bcdv1.SetSiteRequest]) (*connect.Response[bcdv1.SetSiteResponse], error) {
	in := request.Msg
	if u := in.GetUnknown(); u != bcdv1.BootAction_BOOT_ACTION_UNSPECIFIED && u != bootRamdisk && u != bootNothing {
		return nil, invalid("machines that are not known get ramdisk or nothing, not %s", word(u))
	}
	var put []FullDHCP
	for _, f := range in.GetPutFullDhcp() {
		checked, err := checkFullDHCP(f)
		if err != nil {
			return nil, err
		}
		put = append(put, checked)
	}
	err := o.g.update(ctx, func(tx Tx) error {
		site, err := knownSite(tx, in.GetName())
		if err != nil {
			return err
		}
		if in.GetUnknown() != bcdv1.BootAction_BOOT_ACTION_UNSPECIFIED {
			site.Unknown = in.GetUnknown()
		}
		for _, mac := range in.GetRemoveFullDhcp() {
			at := slices.IndexFunc(site.FullDHCP, func(f FullDHCP) bool { return f.MAC == cleanMAC(mac) })
			if at < 0 {
				return connect.NewError(connect.CodeNotFound, fmt.Errorf("site %s gives no address to %.40q; bcd-gateway site %s lists those that it does", site.Name, mac, site.Name))
			}
			site.FullDHCP = slices.Delete(site.FullDHCP, at, at+1)
		}
		for _, f := range put {
			site.FullDHCP = slices.DeleteFunc(site.FullDHCP, func(old FullDHCP) bool { return old.MAC == f.MAC })
			for _, other := range site.FullDHCP {
				if netip.MustParsePrefix(other.Address).Addr() == netip.MustParsePrefix(f.Address).Addr() {
					return invalid("address %s is given to %s already; take it away first", f.Address, other.MAC)
				}
			}
			site.FullDHCP = append(site.FullDHCP, f)
		}
		if len(site.FullDHCP) > maxFullDHCP {
			return invalid("%d addresses for site %s; at most %d are allowed", len(site.FullDHCP), site.Name, maxFullDHCP)
		}
		slices.SortFunc(site.FullDHCP, func(a, b FullDHCP) int { return cmp.Compare(a.MAC, b.MAC) })
		return tx.PutSite(site)
	})
	if err != nil {
		return nil, rpcError(err)
	}
	site, err := o.g.siteDescribed(ctx, in.GetName())
	return connect.NewResponse(&bcdv1.SetSiteResponse{Site: site}), rpcError(err)
}

// checkFullDHCP wants a MAC and an IPv4 address that a host may have, with its
// prefix length; router and DNS servers are IPv4 too, and the router is in the
// same network (RFC 2132 sections 3.5 and 3.8).
func checkFullDHCP(in *bcdv1.FullDhcp) (FullDHCP, error) {
	out := FullDHCP{MAC: cleanMAC(in.GetMac()), Router: in.GetRouter(), DNS: in.GetDns()}
	if out.MAC == "" {
		return out, invalid("full DHCP: %.40q is not the MAC of a NIC", in.GetMac())
	}
	prefix, err := netip.ParsePrefix(in.GetAddress())
	if err != nil || !prefix.Addr().Is4() || prefix.Bits() == 0 || prefix.Addr().IsUnspecified() || prefix.Addr().IsMulticast() || prefix.Addr().IsLoopback() {
		return out, invalid("full DHCP: %.40q is not an IPv4 address with its prefix length, as in 10.0.0.7/24", in.GetAddress())
	}
	if prefix.Bits() < 31 && prefix.Addr() == prefix.Masked().Addr() {
		return out, invalid("full DHCP: %s is the network's own address, not one for a machine", prefix)
	}
	out.Address = prefix.String()
	if out.Router != "" {
		router, err := netip.ParseAddr(out.Router)
		if err != nil || !router.Is4() || !prefix.Contains(router) || router == prefix.Addr() {
			return out, invalid("full DHCP: router %.40q is not another address in the network of %s", out.Router, prefix)
		}
	}
	if len(out.DNS) > maxDNS {
		return out, invalid("full DHCP: %d DNS servers; at most %d are allowed", len(out.DNS), maxDNS)
	}
	for _, server := range out.DNS {
		if a, err := netip.ParseAddr(server); err != nil || !a.Is4() || a.IsUnspecified() {
			return out, invalid("full DHCP: DNS server %.40q is not an IPv4 address", server)
		}
	}
	return out, nil
}

func (o operatorService) MoveLease(ctx context.Context, request *connect.Request[bcdv1.MoveLeaseRequest]) (*connect.Response[bcdv1.MoveLeaseResponse], error) {
	g, in := o.g, request.Msg
	if in.GetForce() && in.GetNodeId() == "" {
		return nil, invalid("taking the boot lease by force needs the agent that gets it")
	}
	memory := g.sites.of(in.GetSite())
	memory.steps.Lock()
	var state leaseState
	err := g.update(ctx, func(tx Tx) error {
		now := g.now()
		site, err := knownSite(tx, in.GetSite())
		if err != nil {
			return err
		}
		agents, err := siteAgents(tx, now, site)
		if err != nil {
			return err
		}
		before := memory.lease(g, site)
		switch {
		case in.GetNodeId() != "" && !slices.Contains(agents, in.GetNodeId()):
			return invalid("%.80q is not an agent of site %s; its agents are %s", in.GetNodeId(), site.Name, reasonOr(strings.Join(agents, ", "), "none yet"))
		case in.GetNodeId() != "" && before.Holder == in.GetNodeId() && before.Asked == "":
			return notNow("%s holds the boot lease of site %s already", in.GetNodeId(), site.Name)
		case before.Holder == "" && in.GetNodeId() == "":
			return notNow("nobody holds the boot lease of site %s; the first agent that asks gets it", site.Name)
		}
		state, _ = leaseStep(now, before, agents, leaseMove{To: in.GetNodeId(), Force: in.GetForce()})
		site.Lease = state.BootLease
		if err := tx.PutSite(site); err != nil || !in.GetForce() {
			return err
		}
		node, err := tx.Node(in.GetNodeId())
		if err != nil {
			return err
		}
		return tx.AppendTimeline(&TimelineEntry{
			TimeMS: now.UnixMilli(), MachineID: node.MachineID, NodeID: node.ID, Type: "lease", Severity: "warn",
			Message: fmt.Sprintf("an operator took the boot lease of site %s from %s by force", site.Name, reasonOr(before.Holder, "nobody")),
		})
	})
	if err == nil {
		memory.stepped(state)
	}
	memory.steps.Unlock()
	if err != nil {
		return nil, rpcError(err)
	}
	site, err := g.siteDescribed(ctx, in.GetSite())
	return connect.NewResponse(&bcdv1.MoveLeaseResponse{Site: site}), rpcError(err)
}

func (o operatorService) SetMachineBoot(ctx context.Context, request *connect.Request[bcdv1.SetMachineBootRequest]) (*connect.Response[bcdv1.SetMachineBootResponse], error) {
	g, action := o.g, request.Msg.GetAction()
	if _, known := bcdv1.BootAction_name[int32(action)]; !known {
		return nil, invalid("boot action %d is not one of ramdisk, local, nothing, auto", action)
	}
	out := &bcdv1.SetMachineBootResponse{}
	err := g.update(ctx, func(tx Tx) error {
		m, err := findMachine(tx, request.Msg.GetMachine())
		if err != nil {
			return err
		}
		m.BootAction, m.BootOrderedIn = action, ""
		said := word(action)
		switch action {
		case bcdv1.BootAction_BOOT_ACTION_UNSPECIFIED:
			said = "what its state says"
		case bootRamdisk:
			said = "the ramdisk, once"
			if m.CurrentNode != "" {
				n, err := tx.Node(m.CurrentNode)
				if err != nil && !errors.Is(err, ErrNotFound) {
					return err
				}
				if err == nil && n.Role == bcdv1.Role_ROLE_RAMDISK {
					// The boot that it is in now is not the one that is meant.
					m.BootOrderedIn = n.BootID
				}
			}
		}
		if err := tx.PutMachine(m); err != nil {
			return err
		}
		if err := tx.AppendTimeline(&TimelineEntry{TimeMS: g.now().UnixMilli(), MachineID: m.ID, Type: "boot", Message: "an operator has it boot " + said}); err != nil {
			return err
		}
		out.Machine, err = g.describe(tx, m, false)
		return err
	})
	return connect.NewResponse(out), rpcError(err)
}

func (o operatorService) PutBootArtefact(ctx context.Context, request *connect.Request[bcdv1.PutBootArtefactRequest]) (*connect.Response[bcdv1.PutBootArtefactResponse], error) {
	in := request.Msg.GetArtefact()
	if err := checkArtefact(in); err != nil {
		return nil, err
	}
	a := &Artefact{
		ArtefactName: ArtefactName{in.GetKind(), in.GetArchitecture()}, SHA256: in.GetSha256(), Name: in.GetName(),
		CommandLine: in.GetCommandLine(), Version: in.GetVersion(), PutMS: o.g.now().UnixMilli(),
	}
	err := o.g.update(ctx, func(tx Tx) error {
		sum := hex.EncodeToString(in.GetSha256())
		blob, err := tx.Blob(sum)
		if errors.Is(err, ErrNotFound) {
			return connect.NewError(connect.CodeNotFound, fmt.Errorf("blob %s is not in the blob store; bcd-gateway boot-image put FILE puts it there first", sum))
		}
		if err != nil {
			return err
		}
		if in.GetSize() != 0 && in.GetSize() != blob.Size {
			return invalid("blob %s has %d bytes, not %d", sum, blob.Size, in.GetSize())
		}
		a.Size = blob.Size
		if blob.NodeID != "" {
			// What a node sent may be dropped to make room for the next.
			blob.NodeID = ""
			if err := tx.PutBlob(blob); err != nil {
				return err
			}
		}
		err = tx.EachArtefact(func(other *Artefact) error {
			if other.Name == a.Name && other.ArtefactName != a.ArtefactName {
				return invalid("the name %s is that of the %s for %s; give this one another with --name", a.Name, word(other.Kind), other.Architecture)
			}
			return nil
		})
		if err != nil {
			return err
		}
		return tx.PutArtefact(a)
	})
	return connect.NewResponse(&bcdv1.PutBootArtefactResponse{Artefact: a.proto()}), rpcError(err)
}

func checkArtefact(a *bcdv1.BootArtefact) error {
	allowed := kernelArchitectures
	switch a.GetKind() {
	case bcdv1.ArtefactKind_ARTEFACT_KIND_UKI, bcdv1.ArtefactKind_ARTEFACT_KIND_KERNEL, bcdv1.ArtefactKind_ARTEFACT_KIND_INITRAMFS:
	case bcdv1.ArtefactKind_ARTEFACT_KIND_IPXE:
		allowed = ipxeArchitectures
	default:
		return invalid("boot artefact: kind %d is not one of uki, kernel, initramfs, ipxe", a.GetKind())
	}
	switch {
	case !slices.Contains(allowed, a.GetArchitecture()):
		return invalid("boot artefact: architecture %.40q of a %s is not one of %s", a.GetArchitecture(), word(a.GetKind()), strings.Join(allowed, ", "))
	case len(a.GetSha256()) != sha256.Size:
		return invalid("boot artefact: a digest of %d bytes; a SHA-256 has %d", len(a.GetSha256()), sha256.Size)
	case !artefactName.MatchString(a.GetName()):
		return invalid("boot artefact: name %.80q must be 1 to 64 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit", a.GetName())
	case a.GetCommandLine() != "" && a.GetKind() != bcdv1.ArtefactKind_ARTEFACT_KIND_KERNEL:
		return invalid("boot artefact: a command line belongs to a kernel; a %s has none of its own", word(a.GetKind()))
	case len(a.GetCommandLine()) > maxCommandLine || plainText(a.GetCommandLine(), maxCommandLine) != a.GetCommandLine():
		return invalid("boot artefact: the command line is longer than %d bytes or has control characters", maxCommandLine)
	case strings.Contains(a.GetCommandLine(), "bcd.token"), strings.Contains(a.GetCommandLine(), "bcjt_"):
		return invalid("boot artefact: a join token does not belong on a command line, which everybody on the network can read; the site seals one for each boot")
	case len(a.GetVersion()) > maxNoteBytes || plainText(a.GetVersion(), maxNoteBytes) != a.GetVersion():
		return invalid("boot artefact: the version is longer than %d bytes or has control characters", maxNoteBytes)
	}
	return nil
}

func (o operatorService) ListBootArtefacts(ctx context.Context, _ *connect.Request[bcdv1.ListBootArtefactsRequest]) (*connect.Response[bcdv1.ListBootArtefactsResponse], error) {
	out := &bcdv1.ListBootArtefactsResponse{}
	err := o.g.store.View(ctx, func(tx Tx) error {
		return tx.EachArtefact(func(a *Artefact) error {
			out.Artefacts = append(out.Artefacts, a.proto())
			return nil
		})
	})
	return connect.NewResponse(out), rpcError(err)
}

func (o operatorService) RemoveBootArtefact(ctx context.Context, request *connect.Request[bcdv1.RemoveBootArtefactRequest]) (*connect.Response[bcdv1.RemoveBootArtefactResponse], error) {
	name := ArtefactName{request.Msg.GetKind(), request.Msg.GetArchitecture()}
	err := o.g.update(ctx, func(tx Tx) error {
		if _, err := tx.Artefact(name); err != nil {
			return fmt.Errorf("%s for %.40q: %w; bcd-gateway boot-image list shows what is served", word(name.Kind), name.Architecture, ErrNotFound)
		}
		return tx.DeleteArtefact(name)
	})
	return connect.NewResponse(&bcdv1.RemoveBootArtefactResponse{}), rpcError(err)
}
