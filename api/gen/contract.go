package main

import (
	"bufio"
	"fmt"
	"os"
	"sort"
	"strings"

	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
)

// A daemon of last year talks to a gateway of today, so what the contract once
// said it says for ever. api/contract.txt lists all of it, a line a fact;
// lines are only ever added. A line that the .proto files no longer bear out
// is a break, and generating refuses.

// facts lists every message field, enum value and method of package bcd.v1.
func facts(request *pluginpb.CodeGeneratorRequest) []string {
	var out []string
	for _, file := range request.ProtoFile {
		if file.GetPackage() != "bcd.v1" {
			continue
		}
		for _, m := range file.MessageType {
			out = append(out, messageFacts("bcd.v1."+m.GetName(), m)...)
		}
		for _, e := range file.EnumType {
			out = append(out, enumFacts("bcd.v1."+e.GetName(), e)...)
		}
		for _, s := range file.Service {
			for _, m := range s.Method {
				out = append(out, fmt.Sprintf("method bcd.v1.%s/%s %s%s -> %s%s", s.GetName(), m.GetName(),
					stream(m.GetClientStreaming()), m.GetInputType(), stream(m.GetServerStreaming()), m.GetOutputType()))
			}
		}
		for _, x := range file.Extension {
			out = append(out, fmt.Sprintf("extension %s %d %s of %s", x.GetName(), x.GetNumber(), fieldType(x), x.GetExtendee()))
		}
	}
	sort.Strings(out)
	return out
}

func stream(yes bool) string {
	if yes {
		return "stream "
	}
	return ""
}

func messageFacts(name string, m *descriptorpb.DescriptorProto) []string {
	var out []string
	for _, f := range m.Field {
		oneof := ""
		if f.OneofIndex != nil {
			oneof = " oneof " + m.OneofDecl[f.GetOneofIndex()].GetName()
		}
		out = append(out, fmt.Sprintf("field %s.%s %d %s%s", name, f.GetName(), f.GetNumber(), fieldType(f), oneof))
	}
	for _, nested := range m.NestedType {
		out = append(out, messageFacts(name+"."+nested.GetName(), nested)...)
	}
	for _, e := range m.EnumType {
		out = append(out, enumFacts(name+"."+e.GetName(), e)...)
	}
	return out
}

func fieldType(f *descriptorpb.FieldDescriptorProto) string {
	t := strings.ToLower(strings.TrimPrefix(f.GetType().String(), "TYPE_"))
	if f.GetTypeName() != "" {
		t = f.GetTypeName()
	}
	if f.GetLabel() == descriptorpb.FieldDescriptorProto_LABEL_REPEATED {
		t = "repeated " + t
	}
	return t
}

func enumFacts(name string, e *descriptorpb.EnumDescriptorProto) []string {
	var out []string
	for _, v := range e.Value {
		out = append(out, fmt.Sprintf("enum %s.%s %d", name, v.GetName(), v.GetNumber()))
	}
	return out
}

// broken gives the lines of recorded that are not among current.
func broken(recorded, current []string) []string {
	have := map[string]bool{}
	for _, line := range current {
		have[line] = true
	}
	var out []string
	for _, line := range recorded {
		if !have[line] {
			out = append(out, line)
		}
	}
	return out
}

// readFacts reads a list of facts; a missing file is an empty list.
func readFacts(path string) ([]string, error) {
	f, err := os.Open(path)
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var out []string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if line := strings.TrimSpace(lines.Text()); line != "" && !strings.HasPrefix(line, "#") {
			out = append(out, line)
		}
	}
	return out, lines.Err()
}

const factsHeader = "# What the contract has said; `make generate` adds lines and refuses to lose one.\n"

// recordFacts writes the facts, unless one that was recorded is gone.
func recordFacts(recorded, out string, request *pluginpb.CodeGeneratorRequest) error {
	old, err := readFacts(recorded)
	if err != nil {
		return err
	}
	current := facts(request)
	if lost := broken(old, current); len(lost) > 0 {
		return fmt.Errorf("the contract would break: a daemon in the field still relies on\n  %s\nkeep the old field or method and add a new one beside it", strings.Join(lost, "\n  "))
	}
	return os.WriteFile(out, []byte(factsHeader+strings.Join(current, "\n")+"\n"), 0o644)
}
