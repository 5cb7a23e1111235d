// Package kinds reads the table of command kinds out of the contract: a kind
// is a message of bcd.v1 that carries the option (bcd.v1.kind). Daemon,
// gateway, command line and documentation read this one table.
package kinds

import (
	"fmt"
	"slices"
	"sort"
	"sync"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Kind is one row. Options are never nil; Result and Progress may be.
type Kind struct {
	*bcdv1.KindOptions
	Body     protoreflect.MessageType
	Result   protoreflect.MessageType
	Progress protoreflect.MessageType
}

// Allows says whether role accepts this kind.
func (k Kind) Allows(role bcdv1.Role) bool { return slices.Contains(k.Roles, role) }

// All gives every kind, by name. It panics when the contract contradicts
// itself, which a test of this package would have shown.
var All = sync.OnceValue(func() []Kind {
	var out []Kind
	protoregistry.GlobalTypes.RangeMessages(func(m protoreflect.MessageType) bool {
		options, ok := proto.GetExtension(m.Descriptor().Options(), bcdv1.E_Kind).(*bcdv1.KindOptions)
		if ok && options != nil && options.GetName() != "" {
			out = append(out, Kind{
				KindOptions: options,
				Body:        m,
				Result:      find(options, options.GetResult()),
				Progress:    find(options, options.GetProgress()),
			})
		}
		return true
	})
	sort.Slice(out, func(i, j int) bool { return out[i].GetName() < out[j].GetName() })
	return out
})

// ByName finds a kind; ok is false when there is none of that name.
func ByName(name string) (k Kind, ok bool) {
	for _, k := range All() {
		if k.GetName() == name {
			return k, true
		}
	}
	return Kind{}, false
}

func find(options *bcdv1.KindOptions, name string) protoreflect.MessageType {
	if name == "" {
		return nil
	}
	m, err := protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName(name))
	if err != nil {
		panic(fmt.Sprintf("kind %s names the message %s: %v", options.GetName(), name, err))
	}
	return m
}
