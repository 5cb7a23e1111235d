package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/api/kinds"
)

func TestPlainJSON(t *testing.T) {
	body, err := proto.Marshal(&bcdv1.DiagPing{Payload: []byte{1, 2}})
	if err != nil {
		t.Fatal(err)
	}
	result, err := proto.Marshal(&bcdv1.DiagPingResult{Version: "1.2", UptimeMs: 7})
	if err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(plainJSON(&bcdv1.CommandInfo{
		Id: "cmd_x", Kind: "diag.ping", Lane: bcdv1.Lane_LANE_CONTROL, QueuedMs: 5, Body: body,
		Outcome: &bcdv1.Outcome{Status: bcdv1.OutcomeStatus_OUTCOME_STATUS_SUCCEEDED, Result: result},
	}))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"lane":"control"`, `"queued_ms":5`, `"body":{"payload":"0102"}`, `"status":"succeeded"`, `"version":"1.2"`, `"progress":null`, `"state":""`} {
		if !strings.Contains(string(raw), want) {
			t.Errorf("%s lacks %s", raw, want)
		}
	}
	raw, err = json.Marshal(plainJSON(&bcdv1.InventorySection{Name: "cpu", CanonicalJson: []byte(`{"a":1}`), Sha256: []byte{0xab}}))
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"canonical_json":{"a":1},"error":"","name":"cpu","sha256":"ab"}`; string(raw) != want {
		t.Errorf("got %s, want %s", raw, want)
	}
}

func TestWords(t *testing.T) {
	if got := word(bcdv1.OutcomeStatus_OUTCOME_STATUS_INDETERMINATE); got != "indeterminate" {
		t.Errorf("got %q", got)
	}
	if got := word(bcdv1.Role(99)); got != "99" {
		t.Errorf("an unknown value is %q", got)
	}
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 64 << 20: "64.0 MiB", 3 << 40: "3.0 TiB"} {
		if got := size(n); got != want {
			t.Errorf("size(%d) = %q, want %q", n, got, want)
		}
	}
	for d, want := range map[time.Duration]string{-time.Second: "0s", 90 * time.Second: "90s", 3 * time.Minute: "3m", 5 * time.Hour: "5h", 72 * time.Hour: "3d"} {
		if got := short(d); got != want {
			t.Errorf("short(%v) = %q, want %q", d, got, want)
		}
	}
}

func TestBodyFlags(t *testing.T) {
	m := &bcdv1.DeployImage{}
	err := fillFrom(t, "deploy.image", m, "--disk.model", "Samsung*", "--format", "zstd", "--no-reboot", "--raw-size", "9", "--image-sha256", "base64:qrs=")
	if err != nil {
		t.Fatal(err)
	}
	if m.GetDisk().GetModel() != "Samsung*" || m.Format != bcdv1.ImageFormat_IMAGE_FORMAT_ZSTD || !m.NoReboot || m.RawSize != 9 || len(m.ImageSha256) != 2 {
		t.Errorf("flags gave %v", m)
	}
	for _, wrong := range [][]string{{"--format", "rar"}, {"--raw-size", "many"}, {"--no-reboot=maybe"}} {
		if err := fillFrom(t, "deploy.image", &bcdv1.DeployImage{}, wrong...); err == nil || !strings.Contains(err.Error(), "must be") {
			t.Errorf("%v: %v", wrong, err)
		}
	}
}

// fillFrom parses args as the body flags of kind and fills m.
func fillFrom(t *testing.T, kind string, m proto.Message, args ...string) error {
	t.Helper()
	k, ok := kinds.ByName(kind)
	if !ok {
		t.Fatalf("no kind %s", kind)
	}
	cmd := &cobra.Command{Use: "x"}
	b := newBodyFlags(cmd, k.Body)
	if err := cmd.ParseFlags(args); err != nil {
		t.Fatal(err)
	}
	return b.fill(cmd, m)
}

// TestOutcomeWithoutResult: a refused command has a result of null, so that
// what reads it need not expect a text where others have an object.
func TestOutcomeWithoutResult(t *testing.T) {
	out, ok := plainJSON(&bcdv1.CommandInfo{Kind: "node.reboot", Outcome: &bcdv1.Outcome{Status: bcdv1.OutcomeStatus_OUTCOME_STATUS_REJECTED}}).(map[string]any)
	if !ok {
		t.Fatal("no object")
	}
	outcome, ok := out["outcome"].(map[string]any)
	if !ok || outcome["result"] != nil || outcome["status"] != "rejected" {
		t.Errorf("outcome %v", out["outcome"])
	}
}
