package main

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/better-compute/bcd/api/kinds"
	"github.com/better-compute/bcd/cmd/internal/clidocs"
)

// TestDocs compares docs/man and docs/kinds.md with the code; make docs writes
// them.
func TestDocs(t *testing.T) {
	t.Setenv("BCD_GATEWAY_DATA", "/var/lib/bcd-gateway") // the default shown must not depend on who runs the test
	clidocs.CheckMan(t, newRoot(), "../../docs/man")
	clidocs.CheckFile(t, "../../docs/kinds.md", []byte(kindsReference()))
}

// kindsReference is a page about every command kind, from the contract's
// table.
func kindsReference() string {
	var b strings.Builder
	b.WriteString("# Command kinds\n\nMade from `api/bcd/v1/kinds.proto` by `make docs`. `bcd-gateway send KIND --help` has the flags.\n")
	for _, k := range kinds.All() {
		var roles []string
		for _, r := range k.Roles {
			roles = append(roles, word(r))
		}
		fmt.Fprintf(&b, "\n## %s\n\n%s.\n\nRoles: %s. Lane: %s. Result: at most %d bytes.", k.GetName(), k.GetSummary(), strings.Join(roles, ", "), word(k.Lane), k.MaxResultBytes)
		if k.Resumable {
			b.WriteString(" An interrupted run may go on under the same key.")
		}
		b.WriteString("\n\n| body field | type |\n|---|---|\n")
		fieldRows(&b, k.Body.Descriptor(), "")
	}
	return b.String()
}

func fieldRows(b *strings.Builder, d protoreflect.MessageDescriptor, prefix string) {
	for i := range d.Fields().Len() {
		fd := d.Fields().Get(i)
		kind := fd.Kind().String()
		switch {
		case fd.IsMap():
			kind = "map"
		case fd.Kind() == protoreflect.MessageKind:
			fieldRows(b, fd.Message(), prefix+string(fd.Name())+".")
			continue
		case fd.Kind() == protoreflect.EnumKind:
			kind = string(fd.Enum().Name())
		}
		fmt.Fprintf(b, "| `%s%s` | %s |\n", prefix, fd.Name(), kind)
	}
}
