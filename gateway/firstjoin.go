package gateway

import (
	"context"
	"fmt"

	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// firstNote marks the tokens that FirstJoin made.
const firstNote = "printed when the gateway started"

// FirstJoin gives the one line that joins a first machine, with a token for
// one node, or "" once a machine is known. The line before it is taken out of
// use: a gateway that starts often does not leave open doors behind.
//
// The token goes through standard input: printf is part of the shell, so no
// process list ever shows it.
func (g *Gateway) FirstJoin(ctx context.Context) (string, error) {
	token, full, err := newToken(g.now(), bcdv1.Role_ROLE_NODE, "", 1, defaultTokenTTL)
	if err != nil {
		return "", err
	}
	token.Note = firstNote
	known := false
	err = g.update(ctx, func(tx Tx) error {
		known = false
		if err := tx.EachMachine(func(*Machine) error {
			known = true
			return nil
		}); err != nil {
			return err
		}
		var stale []*Token
		if err := tx.EachToken(func(t *Token) error {
			if t.Note == firstNote && t.Used == 0 && !t.Revoked {
				stale = append(stale, t)
			}
			return nil
		}); err != nil {
			return err
		}
		for _, t := range stale {
			if err := revokeToken(tx, t.ID); err != nil {
				return err
			}
		}
		if known {
			return nil
		}
		return tx.PutToken(token)
	})
	if err != nil || known {
		return "", err
	}
	return fmt.Sprintf("printf %%s %s | bcd join --server %s --root-sha256 %x", full, g.advertise, pki.Digest(g.keys.Roots.Certificates()[0])), nil
}
