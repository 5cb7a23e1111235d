package gateway_test

import (
	"crypto/tls"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/bcd/agent/pki"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/gateway/keys"
)

// TestMachineOfAnotherRoot: a machine that hangs up over our certificate is
// what an operator must learn of, once and not at each try.
func TestMachineOfAnotherRoot(t *testing.T) {
	w := newWorld(t)
	other, err := keys.Init(filepath.Join(t.TempDir(), "keys"), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		c, err := tls.Dial("tcp", strings.TrimPrefix(w.url, "https://"), pki.ClientTLS(other.Roots, nil, time.Now))
		if err == nil {
			c.Close()
			t.Fatal("a gateway of another root is trusted")
		}
	}
	told := 0
	w.waitFor("a join after the refusals", func(e *bcdv1.TimelineEntry) bool {
		if e.GetType() == "trust.refused" {
			told++
			if !strings.Contains(e.GetMessage(), "127.0.0.1") || !strings.Contains(e.GetMessage(), "keys export-trust") {
				t.Errorf("message %q", e.GetMessage())
			}
			// All three have hung up; what they caused comes before this.
			w.join("a", node)
		}
		return e.GetType() == "joined"
	})
	if told != 1 {
		t.Errorf("%d entries", told)
	}
}
