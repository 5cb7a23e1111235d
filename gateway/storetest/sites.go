package storetest

import (
	"errors"
	"slices"
	"testing"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/gateway"
)

// sites: what site appliances live by outlives the process, fences above all.
func sites(t *testing.T, mk Maker) {
	uki := gateway.ArtefactName{Kind: bcdv1.ArtefactKind_ARTEFACT_KIND_UKI, Architecture: "amd64"}
	kernel := gateway.ArtefactName{Kind: bcdv1.ArtefactKind_ARTEFACT_KIND_KERNEL, Architecture: "amd64"}
	s := mk(t)
	update(t, s, func(tx gateway.Tx) error {
		return errors.Join(
			tx.PutSite(&gateway.Site{Name: "a", Generation: 4, Lease: gateway.BootLease{Fence: 3, Holder: "n1", Kind: bcdv1.LeaseKind_LEASE_KIND_STANDING}}),
			tx.PutSite(&gateway.Site{Name: "a-b", FullDHCP: []gateway.FullDHCP{{MAC: "m", DNS: []string{"1.1.1.1"}}}}),
			tx.PutArtefact(&gateway.Artefact{ArtefactName: uki, Name: "first"}),
			tx.PutArtefact(&gateway.Artefact{ArtefactName: uki, Name: "second"}),
			tx.PutArtefact(&gateway.Artefact{ArtefactName: kernel, Name: "vmlinuz"}),
			tx.PutBoots(&gateway.Boots{Site: "a", MAC: "m1", Traces: [][]byte{{1}, {2}}}),
			tx.PutBoots(&gateway.Boots{Site: "a", MAC: "m2"}),
			tx.PutBoots(&gateway.Boots{Site: "a-b", MAC: "m3"}),
			tx.PutBootGrant(&gateway.BootGrant{BootID: "b1", TokenID: "t"}),
			tx.PutBootGrant(&gateway.BootGrant{BootID: "b2"}),
			tx.PutToken(&gateway.Token{ID: "t"}),
		)
	})
	update(t, s, func(tx gateway.Tx) error {
		return errors.Join(tx.DeleteArtefact(kernel), tx.DeleteBoots("a", "m2"), tx.DeleteBootGrant("b2"), tx.DeleteToken("t"))
	})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	view(t, open(t, mk), func(tx gateway.Tx) error {
		site, err := tx.Site("a")
		if err != nil || site.Lease.Fence != 3 || site.Lease.Holder != "n1" || site.Generation != 4 {
			t.Errorf("site a: %+v, %v", site, err)
		}
		var names []string
		err = tx.EachSite(func(s *gateway.Site) error { names = append(names, s.Name); return nil })
		if slices.Sort(names); err != nil || !slices.Equal(names, []string{"a", "a-b"}) {
			t.Errorf("sites %v, %v", names, err)
		}
		var files []string
		err = tx.EachArtefact(func(a *gateway.Artefact) error { files = append(files, a.Name); return nil })
		if err != nil || !slices.Equal(files, []string{"second"}) {
			t.Errorf("artefacts %v, %v; want the second UKI only", files, err)
		}
		if boots, err := tx.Boots("a", "m1"); err != nil || len(boots.Traces) != 2 || boots.Traces[1][0] != 2 {
			t.Errorf("boots of m1: %+v, %v", boots, err)
		}
		var macs []string
		err = tx.EachBoots("a", func(b *gateway.Boots) error { macs = append(macs, b.MAC); return nil })
		if err != nil || !slices.Equal(macs, []string{"m1"}) {
			t.Errorf("boots of site a: %v, %v; want those of m1, and none of another site", macs, err)
		}
		var boots []string
		err = tx.EachBootGrant(func(g *gateway.BootGrant) error { boots = append(boots, g.BootID+g.TokenID); return nil })
		if err != nil || !slices.Equal(boots, []string{"b1t"}) {
			t.Errorf("grants %v, %v", boots, err)
		}
		if grant, err := tx.BootGrant("b1"); err != nil || grant.TokenID != "t" {
			t.Errorf("grant b1: %+v, %v", grant, err)
		}
		if _, err := tx.Token("t"); !errors.Is(err, gateway.ErrNotFound) {
			t.Errorf("deleted token: %v", err)
		}
		return nil
	})
}
