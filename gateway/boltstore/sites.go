package boltstore

import (
	"strconv"

	"github.com/better-compute/bcd/gateway"
)

func (t *txn) Site(name string) (*gateway.Site, error) {
	return getRecord[gateway.Site](t, sites, key(name))
}

func (t *txn) PutSite(site *gateway.Site) error { return putRecord(t, sites, key(site.Name), site) }

func (t *txn) EachSite(fn func(*gateway.Site) error) error { return eachRecord(t, sites, fn) }

func artefactKey(name gateway.ArtefactName) []byte {
	return key(strconv.Itoa(int(name.Kind)), name.Architecture)
}

func (t *txn) Artefact(name gateway.ArtefactName) (*gateway.Artefact, error) {
	return getRecord[gateway.Artefact](t, artefacts, artefactKey(name))
}

func (t *txn) PutArtefact(artefact *gateway.Artefact) error {
	return putRecord(t, artefacts, artefactKey(artefact.ArtefactName), artefact)
}

func (t *txn) DeleteArtefact(name gateway.ArtefactName) error {
	return t.remove(artefacts, artefactKey(name))
}

func (t *txn) EachArtefact(fn func(*gateway.Artefact) error) error {
	return eachRecord(t, artefacts, fn)
}

func (t *txn) Boots(site, mac string) (*gateway.Boots, error) {
	return getRecord[gateway.Boots](t, boots, key(site, mac))
}

func (t *txn) PutBoots(b *gateway.Boots) error { return putRecord(t, boots, key(b.Site, b.MAC), b) }

func (t *txn) DeleteBoots(site, mac string) error { return t.remove(boots, key(site, mac)) }

func (t *txn) EachBoots(site string, fn func(*gateway.Boots) error) error {
	within := prefix(site)
	return t.forward(boots, within, within, func(k, v []byte) (bool, error) {
		b, err := decode[gateway.Boots](boots, k, v)
		if err == nil {
			err = fn(b)
		}
		return true, err
	})
}

func (t *txn) BootGrant(bootID string) (*gateway.BootGrant, error) {
	return getRecord[gateway.BootGrant](t, grants, key(bootID))
}

func (t *txn) PutBootGrant(grant *gateway.BootGrant) error {
	return putRecord(t, grants, key(grant.BootID), grant)
}

func (t *txn) DeleteBootGrant(bootID string) error { return t.remove(grants, key(bootID)) }

func (t *txn) EachBootGrant(fn func(*gateway.BootGrant) error) error {
	return eachRecord(t, grants, fn)
}
