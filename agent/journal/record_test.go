package journal

import (
	"testing"
)

func FuzzDecode(f *testing.F) {
	f.Add("cmd_a", encodeJSON("cmd_a", Entry{ID: "cmd_a", State: Accepted}))
	f.Add(metaKey, encodeJSON(metaKey, meta{ID: "jrnl_1", NextEvent: 1}))
	f.Add("", []byte{1, 2, 3})
	f.Fuzz(func(t *testing.T, key string, value []byte) {
		if e, err := decodeEntry(key, value); err == nil && (e.ID != key || e.State < Accepted || e.State > Acknowledged) {
			t.Fatalf("decoded an impossible entry %+v", e)
		}
		// The checksum keeps random bytes out: what is behind it must hold too.
		sealed := seal(key, value)
		if body, err := open(key, sealed); err != nil || string(body) != string(value) {
			t.Fatalf("seal and open: %q, %v", body, err)
		}
		if e, err := decodeEntry(key, sealed); err == nil && e.ID != key {
			t.Fatalf("decoded %+v under %q", e, key)
		}
		if m, err := decodeMeta(seal(metaKey, value)); err == nil && (m.ID == "" || m.AckedEvent >= m.NextEvent) {
			t.Fatalf("decoded an impossible meta record %+v", m)
		}
		if _, err := eventSequence([]byte(key)); err == nil {
			_ = checkEvent([]byte(key), value)
		}
	})
}
