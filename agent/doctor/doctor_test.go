package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func say(id string, status Status, detail string, needs ...Need) Check {
	return Check{ID: id, DependsOn: needs, Run: func(context.Context) Outcome {
		return Outcome{Lines: []Line{{Status: status, Detail: detail}}}
	}}
}

func TestTextLayout(t *testing.T) {
	r := RunChecks(context.Background(), []Check{
		say("config", OK, "/etc/bcd/config.toml: gateway https://gw.eu-1.example.com, site fsn1"),
		say("kubernetes", OK, "1 allowed clusters"),
		{ID: "kvm", Run: func(context.Context) Outcome { return warned("no\nkvm", "modprobe kvm") }},
		{ID: "identity", Run: func(context.Context) Outcome { return failed("broken; "+wayBack, "bcd join --reset --yes") }},
	})
	var out bytes.Buffer
	if err := r.WriteText(&out); err != nil {
		t.Fatal(err)
	}
	const want = `ok    config    /etc/bcd/config.toml: gateway https://gw.eu-1.example.com, site fsn1
ok    kubernetes 1 allowed clusters
warn  kvm       no kvm; run: modprobe kvm
fail  identity  broken; join again as root: bcd join --reset --yes, then bcd join
`
	if out.String() != want {
		t.Errorf("got\n%swant\n%s", &out, want)
	}
	if !r.Failed {
		t.Error("a failing line and the report has not failed")
	}
}

func TestReportJSON(t *testing.T) {
	r := RunChecks(context.Background(), []Check{
		{ID: "a", Run: func(context.Context) Outcome { return warned("x", "y").without("thing") }},
		say("b", OK, "", Need{"a", "thing"}),
	})
	var out bytes.Buffer
	if err := r.WriteJSON(&out); err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(out.Bytes(), &back); err != nil {
		t.Fatal(err)
	}
	want := Report{SchemaVersion: 1, Lines: []Line{{ID: "a", Name: "a", Status: Warn, Detail: "x", Remedy: "y"}}, Skipped: []Skipped{{ID: "b", Because: "a"}}}
	if !reflect.DeepEqual(back, want) || r.Failed {
		t.Errorf("got %+v\nwant %+v", back, want)
	}
}

// One cause is one line, also through a chain; what does not need the missing
// thing runs.
func TestOneCauseIsOneLine(t *testing.T) {
	r := RunChecks(context.Background(), []Check{
		{ID: "config", Run: func(context.Context) Outcome { return failed("line 3: bad", "").without("gateway") }},
		say("gateway", OK, "up", Need{"config", "gateway"}),
		say("session", OK, "up", Need{"gateway", "connection"}),
		say("disk", OK, "free", Need{"config", "data directory"}),
	})
	if len(r.Lines) != 2 || r.Lines[0].ID != "config" || r.Lines[1].ID != "disk" {
		t.Errorf("lines %+v", r.Lines)
	}
	if want := []Skipped{{"gateway", "config"}, {"session", "gateway"}}; !reflect.DeepEqual(r.Skipped, want) {
		t.Errorf("skipped %+v", r.Skipped)
	}
}

// Checks run at the same time; one that hangs and one that panics cost
// neither the report nor its order.
func TestHangAndPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		start := time.Now()
		r := RunChecks(context.Background(), []Check{
			{ID: "hung", Run: func(context.Context) Outcome { <-hang; return good("late") }},
			{ID: "hung2", Run: func(context.Context) Outcome { <-hang; return good("late") }},
			{ID: "broken", Run: func(context.Context) Outcome { panic("oops") }},
			say("after", OK, "never said", Need{"broken", "anything"}),
			say("fine", OK, "fine"),
		})
		if took := time.Since(start); took != CheckDeadline {
			t.Errorf("took %s, want %s", took, CheckDeadline)
		}
		var got []string
		for _, l := range r.Lines {
			got = append(got, string(l.Status)+" "+l.ID+" "+l.Detail)
		}
		want := []string{"fail hung no answer within 6s", "fail hung2 no answer within 6s", "fail broken the check itself broke: oops", "ok fine fine"}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got %q\nwant %q", got, want)
		}
		close(hang)
	})
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	hang := make(chan struct{})
	defer close(hang)
	r := RunChecks(ctx, []Check{{ID: "slow", Run: func(context.Context) Outcome { <-hang; return Outcome{} }}})
	if len(r.Lines) != 1 || r.Lines[0].Detail != "interrupted" || !r.Failed {
		t.Errorf("%+v", r)
	}
}

func TestWriteErrors(t *testing.T) {
	r := Report{Lines: []Line{{Status: OK, Name: "a"}}}
	if err := r.WriteText(failingWriter{}); !errors.Is(err, errWrite) {
		t.Error(err)
	}
	if err := r.WriteJSON(failingWriter{}); !errors.Is(err, errWrite) {
		t.Error(err)
	}
}

var errWrite = errors.New("pipe is closed")

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, errWrite }

func TestNothingToCheck(t *testing.T) {
	r := Run(context.Background(), Inputs{})
	b, err := json.Marshal(r)
	if err != nil || !strings.Contains(string(b), `"lines":[]`) || r.Failed {
		t.Errorf("%s %v", b, err)
	}
}
