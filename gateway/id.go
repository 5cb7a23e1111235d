package gateway

import (
	"encoding/base32"
	"strings"

	"github.com/google/uuid"
)

var idEncoding = base32.StdEncoding.WithPadding(base32.NoPadding)

// newID makes "prefix_" and a base32 UUIDv7 (RFC 9562), so that ids made later
// sort later.
func newID(prefix string) string {
	id := uuid.Must(uuid.NewV7())
	return prefix + "_" + strings.ToLower(idEncoding.EncodeToString(id[:]))
}
