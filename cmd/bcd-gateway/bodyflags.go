package main

import (
	"encoding/base64"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/better-compute/bcd/cmd/internal/cli"
)

// bodyFlags gives a command one flag for each scalar field of its body
// message, named after it (disk_serial is --disk-serial, a field of a nested
// message --disk.model), and --body for a file with the whole of it.
type bodyFlags struct {
	file   string
	values map[string]*string
	fields map[string][]protoreflect.FieldDescriptor
}

func newBodyFlags(cmd *cobra.Command, t protoreflect.MessageType) *bodyFlags {
	b := &bodyFlags{values: map[string]*string{}, fields: map[string][]protoreflect.FieldDescriptor{}}
	cmd.Flags().StringVar(&b.file, "body", "", "file with the body as JSON; flags are set on top of it")
	b.add(cmd, t.Descriptor(), nil)
	return b
}

func (b *bodyFlags) add(cmd *cobra.Command, d protoreflect.MessageDescriptor, path []protoreflect.FieldDescriptor) {
	fields := d.Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		here := append(append([]protoreflect.FieldDescriptor{}, path...), fd)
		if fd.IsList() || fd.IsMap() {
			continue // only by --body
		}
		if fd.Kind() == protoreflect.MessageKind {
			if len(path) == 0 {
				b.add(cmd, fd.Message(), here)
			}
			continue
		}
		var words []string
		for _, f := range here {
			words = append(words, strings.ReplaceAll(string(f.Name()), "_", "-"))
		}
		name := strings.Join(words, ".")
		usage := fd.Kind().String()
		if fd.Kind() == protoreflect.BytesKind {
			usage = "text, @FILE, or base64:…"
		}
		value := new(string)
		cmd.Flags().StringVar(value, name, "", usage)
		if fd.Kind() == protoreflect.BoolKind {
			cmd.Flags().Lookup(name).NoOptDefVal = "true"
		}
		b.values[name], b.fields[name] = value, here
	}
}

// fill sets on m what the file and the flags say.
func (b *bodyFlags) fill(cmd *cobra.Command, m proto.Message) error {
	if b.file != "" {
		raw, err := os.ReadFile(b.file)
		if err != nil {
			return err
		}
		if err := protojson.Unmarshal(raw, m); err != nil {
			return fmt.Errorf("%s is not the body of this kind: %w", b.file, err)
		}
	}
	for name, value := range b.values {
		if !cmd.Flags().Changed(name) {
			continue
		}
		target := m.ProtoReflect()
		path := b.fields[name]
		for _, fd := range path[:len(path)-1] {
			target = target.Mutable(fd).Message()
		}
		fd := path[len(path)-1]
		v, err := scalar(fd, *value)
		if err != nil {
			return cli.Usagef("--%s: %v", name, err)
		}
		target.Set(fd, v)
	}
	return nil
}

func scalar(fd protoreflect.FieldDescriptor, text string) (protoreflect.Value, error) {
	switch fd.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(text), nil
	case protoreflect.BoolKind:
		v, err := strconv.ParseBool(text)
		if err != nil {
			return protoreflect.Value{}, fmt.Errorf("must be true or false")
		}
		return protoreflect.ValueOfBool(v), nil
	case protoreflect.Int32Kind:
		v, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			return protoreflect.Value{}, fmt.Errorf("must be a whole number below 2^31")
		}
		return protoreflect.ValueOfInt32(int32(v)), nil
	case protoreflect.Int64Kind:
		v, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return protoreflect.Value{}, fmt.Errorf("must be a whole number")
		}
		return protoreflect.ValueOfInt64(v), nil
	case protoreflect.EnumKind:
		values := fd.Enum().Values()
		var words []string
		for i := range values.Len() {
			word := trimEnum(string(fd.Enum().Name()), string(values.Get(i).Name()))
			if word == text {
				return protoreflect.ValueOfEnum(values.Get(i).Number()), nil
			}
			words = append(words, word)
		}
		return protoreflect.Value{}, fmt.Errorf("must be one of %s", strings.Join(words[1:], ", "))
	case protoreflect.BytesKind:
		raw, err := bytesArgument(text)
		return protoreflect.ValueOfBytes(raw), err
	}
	return protoreflect.Value{}, fmt.Errorf("cannot be given by a flag; use --body")
}

func bytesArgument(text string) ([]byte, error) {
	if path, ok := strings.CutPrefix(text, "@"); ok {
		return os.ReadFile(path)
	}
	if encoded, ok := strings.CutPrefix(text, "base64:"); ok {
		return base64.StdEncoding.DecodeString(encoded)
	}
	return []byte(text), nil
}
