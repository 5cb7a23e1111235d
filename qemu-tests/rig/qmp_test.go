package rig

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
)

// fakeQEMU answers on the other end of a pipe as script says.
func fakeQEMU(t *testing.T, script func(in *bufio.Scanner, out io.Writer)) (*qmp, error) {
	t.Helper()
	ours, theirs := net.Pipe()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer theirs.Close()
		script(bufio.NewScanner(theirs), theirs)
	}()
	t.Cleanup(func() { ours.Close(); <-ended })
	return newQMP(t.Context(), ours)
}

// say answers the next command with lines; %d is its id.
func say(in *bufio.Scanner, out io.Writer, lines ...string) bool {
	if !in.Scan() {
		return false
	}
	var command struct{ ID uint64 }
	json.Unmarshal(in.Bytes(), &command)
	for _, line := range lines {
		fmt.Fprintln(out, strings.ReplaceAll(line, "%d", fmt.Sprint(command.ID)))
	}
	return true
}

const (
	hello = `{"QMP": {"version": {"qemu": {"major": 7}}, "capabilities": ["oob"]}}`
	okay  = `{"return": {}, "id": %d}`
)

func TestEventsBetweenCommandAndReply(t *testing.T) {
	q, err := fakeQEMU(t, func(in *bufio.Scanner, out io.Writer) {
		fmt.Fprintln(out, hello)
		say(in, out, `{"event": "NIC_RX_FILTER_CHANGED", "data": {}}`, okay)
		say(in, out, `{"timestamp": {"seconds": 1}, "event": "RESET", "data": {"guest": true}}`, `{"return": {"late": true}, "id": 99}`, `{"return": {"status": "running"}, "id": %d}`)
		in.Scan()
	})
	if err != nil {
		t.Fatal(err)
	}
	got, err := q.Do(t.Context(), "query-status", nil)
	if err != nil || string(got) != `{"status": "running"}` {
		t.Fatalf("got %s, %v: a reply belongs to the command of its id", got, err)
	}
	for _, want := range []string{"NIC_RX_FILTER_CHANGED", "RESET"} {
		if e := <-q.events; e.Name != want {
			t.Errorf("event %s, want %s", e.Name, want)
		}
	}
}

func TestErrorReply(t *testing.T) {
	q, err := fakeQEMU(t, func(in *bufio.Scanner, out io.Writer) {
		fmt.Fprintln(out, hello)
		say(in, out, okay)
		say(in, out, `{"id": %d, "error": {"class": "DeviceNotFound", "desc": "Device 'net7' not found"}}`)
		in.Scan()
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := q.Do(t.Context(), "set_link", map[string]any{"name": "net7"}); err == nil || !strings.Contains(err.Error(), "net7") {
		t.Fatalf("got %v", err)
	}
}

func TestQEMUDiesBeforeItsReply(t *testing.T) {
	q, err := fakeQEMU(t, func(in *bufio.Scanner, out io.Writer) {
		fmt.Fprintln(out, hello)
		say(in, out, okay)
		in.Scan()
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := q.Do(t.Context(), "stop", nil); !errors.Is(err, io.EOF) {
		t.Fatalf("got %v, want the end of the connection", err)
	}
}

func TestMoreEventsThanAnyoneReads(t *testing.T) {
	q, err := fakeQEMU(t, func(in *bufio.Scanner, out io.Writer) {
		fmt.Fprintln(out, hello)
		say(in, out, okay)
		if !in.Scan() {
			return
		}
		for i := range 3 * maxEvents {
			fmt.Fprintf(out, `{"event": "E%d"}`+"\n", i)
		}
		fmt.Fprintln(out, `{"return": {}, "id": 2}`)
		in.Scan()
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := q.Do(t.Context(), "cont", nil); err != nil {
		t.Fatal(err)
	}
	if e := <-q.events; e.Name != fmt.Sprintf("E%d", 2*maxEvents) {
		t.Errorf("oldest event kept is %s", e.Name)
	}
}

func TestNoGreeting(t *testing.T) {
	for name, line := range map[string]string{
		"not json": "hello",
		"too long": strings.Repeat("x", maxQMPLine+10),
		"empty":    "{}",
	} {
		if _, err := fakeQEMU(t, func(_ *bufio.Scanner, out io.Writer) { fmt.Fprintln(out, line) }); err == nil {
			t.Errorf("%s: taken for a greeting", name)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	ours, theirs := net.Pipe()
	defer theirs.Close()
	if _, err := newQMP(ctx, ours); !errors.Is(err, context.Canceled) {
		t.Errorf("silent QEMU: %v", err)
	}
}

func FuzzMessage(f *testing.F) {
	for _, s := range []string{hello, `{"return": {}, "id": 1}`, `{"error": {"class": "x", "desc": "y"}, "id": 18446744073709551615}`, `{"event": "STOP"}`, `{"id": {}, "return": 1}`, `null`, `[]`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		m, kind, id, err := parseMessage(line)
		if err != nil {
			return
		}
		if kind == event && m.Event == "" || kind == reply && m.Return == nil && m.Error == nil || kind != reply && id != 0 {
			t.Errorf("%q is taken for kind %d with id %d", line, kind, id)
		}
	})
}
