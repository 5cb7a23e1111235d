package host

import (
	"bytes"
	"encoding/json"
	"testing"
)

func TestCanonical(t *testing.T) {
	for _, test := range []struct {
		name string
		in   any
		want string // empty: refused
	}{
		{"keys are sorted", map[string]any{"b": 1, "a": []any{true, nil, "x"}, "B": -7}, `{"B":-7,"a":[true,null,"x"],"b":1}`},
		{"escapes are the shortest", "\"\\\b\t\n\f\r\x01<>&é\u2028", `"\"\\\b\t\n\f\r\u0001<>&é` + "\u2028" + `"`},
		{"bad UTF-8 is replaced", "a\xffb", "\"a\ufffdb\""},
		{"empty", struct{}{}, `{}`},
		{"largest integer", int64(1<<53 - 1), `9007199254740991`},
		{"larger integer", int64(1 << 53), ""},
		{"fraction", 1.5, ""},
		{"exponent", 1e300, ""},
		{"key outside ASCII", map[string]int{"é": 1}, ""},
	} {
		got, err := Canonical(test.in)
		if string(got) != test.want || (err == nil) != (test.want != "") {
			t.Errorf("%s: %s, %v; want %s", test.name, got, err, test.want)
		}
	}
}

func FuzzCanonical(f *testing.F) {
	f.Add([]byte(`{"b":[1,2,{"x":"\u0000é"}],"a":null}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var v any
		dec := json.NewDecoder(bytes.NewReader(b))
		dec.UseNumber()
		if dec.Decode(&v) != nil {
			return
		}
		once, err := Canonical(v)
		if err != nil {
			return
		}
		twice, err := Canonical(json.RawMessage(once))
		if err != nil || !bytes.Equal(once, twice) {
			t.Errorf("not a fixed point: %s, then %s, %v", once, twice, err)
		}
	})
}
