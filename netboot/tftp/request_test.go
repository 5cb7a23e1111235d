package tftp

import (
	"bytes"
	"errors"
	"io/fs"
	"strings"
	"testing"
)

// First packets: such as firmware sends them, and such as it should not.
var requests = map[string]string{
	"UEFI probe":     "\x00\x01bcd.efi\x00octet\x00tsize\x000\x00blksize\x001468\x00",
	"UEFI read":      "\x00\x01bcd.efi\x00octet\x00blksize\x001468\x00windowsize\x004\x00",
	"iPXE":           "\x00\x01/boot/bcd.efi\x00octet\x00blksize\x001432\x00tsize\x000\x00",
	"shim":           "\x00\x01//grubx64.efi\x00octet\x00",
	"backslash":      "\x00\x01\\EFI\\BOOT\\BOOTX64.EFI\x00OCTET\x00",
	"padded":         "\x00\x01a\x00octet\x00\x00\x00\x00\x00",
	"write":          "\x00\x02a\x00octet\x00",
	"netascii":       "\x00\x01a\x00netascii\x00",
	"no NUL":         "\x00\x01a\x00octet",
	"no mode":        "\x00\x01a\x00",
	"no name":        "\x00\x01\x00octet\x00",
	"up":             "\x00\x01../etc/passwd\x00octet\x00",
	"up, backslash":  "\x00\x01a\\..\\..\\etc\x00octet\x00",
	"control":        "\x00\x01a\nb\x00octet\x00",
	"data":           "\x00\x03\x00\x01abc",
	"empty":          "",
	"too long":       "\x00\x01" + strings.Repeat("a", 600) + "\x00octet\x00",
	"name too long":  "\x00\x01" + strings.Repeat("a", 300) + "\x00octet\x00",
	"option, no end": "\x00\x01a\x00octet\x00blksize\x00",
}

func TestRequests(t *testing.T) {
	for what, want := range map[string]struct {
		name    string
		code    int // -1: no answer; -2: none wanted, it is a request
		options int
	}{
		"UEFI probe":     {"bcd.efi", -2, 2},
		"UEFI read":      {"bcd.efi", -2, 2},
		"iPXE":           {"boot/bcd.efi", -2, 2},
		"shim":           {"grubx64.efi", -2, 0},
		"backslash":      {"EFI/BOOT/BOOTX64.EFI", -2, 0},
		"padded":         {"a", -2, 0},
		"option, no end": {"a", -2, 0},
		"write":          {"", codeAccess, 0},
		"netascii":       {"", codeIllegal, 0},
		"no NUL":         {"", codeIllegal, 0},
		"no mode":        {"", codeIllegal, 0},
		"no name":        {"", codeNotFound, 0},
		"up":             {"", codeAccess, 0},
		"up, backslash":  {"", codeAccess, 0},
		"control":        {"", codeAccess, 0},
		"name too long":  {"", codeAccess, 0},
		"data":           {"", -1, 0},
		"empty":          {"", -1, 0},
		"too long":       {"", -1, 0},
	} {
		r, err := parseRequest([]byte(requests[what]))
		code := -2
		if refused := (*refusal)(nil); errors.As(err, &refused) {
			code = int(refused.code)
		} else if err != nil {
			code = -1
		}
		if code != want.code || r.name != want.name || len(r.options) != want.options {
			t.Errorf("%s: %+v, %v", what, r, err)
		}
	}
}

func TestNegotiate(t *testing.T) {
	const size, mtu = 40_000_000, 1468
	for _, c := range []struct {
		asked         string // names and values, by spaces
		oack          string
		block, window int
		timeout       int
	}{
		{"", "", 512, 1, 0},
		{"tsize 0", "tsize 40000000", 512, 1, 0},
		{"TSIZE 0 BlkSize 1024", "TSIZE 40000000 BlkSize 1024", 1024, 1, 0},
		{"blksize 1468", "blksize 1468", 1468, 1, 0},
		{"blksize 9000", "blksize 1468", 1468, 1, 0},
		{"blksize 99999999999999999999", "", 512, 1, 0},
		{"blksize 65535", "blksize 1468", 1468, 1, 0},
		{"blksize 8", "blksize 8", 8, 1, 0},
		{"blksize 7", "", 512, 1, 0},
		{"blksize -1", "", 512, 1, 0},
		{"blksize many", "", 512, 1, 0},
		{"blksize 1000 blksize 500", "blksize 1000", 1000, 1, 0},
		{"timeout 3", "timeout 3", 512, 1, 3},
		{"timeout 0", "", 512, 1, 0},
		{"timeout 256", "", 512, 1, 0},
		{"windowsize 4 blksize 1468", "blksize 1468 windowsize 4", 1468, 4, 0},
		{"windowsize 1", "windowsize 1", 512, 1, 0},
		{"windowsize 0", "", 512, 1, 0},
		{"windowsize 65536", "", 512, 1, 0},
		{"windowsize 65535 blksize 1468", "blksize 1468 windowsize 44", 1468, 44, 0},
		{"windowsize 65535", "windowsize 64", 512, 64, 0},
		{"multicast 1 rollover 0", "", 512, 1, 0},
	} {
		var options []option
		fields := strings.Fields(c.asked)
		for i := 0; i < len(fields); i += 2 {
			options = append(options, option{fields[i], fields[i+1]})
		}
		got := negotiate(options, size, mtu)
		oack := ""
		if c.oack != "" {
			oack = "\x00\x06" + strings.ReplaceAll(c.oack, " ", "\x00") + "\x00"
		}
		if string(got.oack) != oack || got.block != c.block || got.window != c.window || got.timeout != c.timeout {
			t.Errorf("%q: %+v, OACK %q", c.asked, got, got.oack)
		}
	}
}

func TestNamesInCapitals(t *testing.T) {
	var asked []string
	exists := func(names ...string) func(string) (File, error) {
		asked = nil
		return func(name string) (File, error) {
			asked = append(asked, name)
			for _, n := range names {
				if n == name {
					return memory(name), nil
				}
			}
			return nil, fs.ErrNotExist
		}
	}
	for _, c := range []struct {
		ask, there, want string
	}{
		{"BCD.EFI", "bcd.efi", "BCD.EFI bcd.efi"},
		{"BCD.EFI", "BCD.EFI", "BCD.EFI"},
		{"bcd.efi", "", "bcd.efi"},
	} {
		file, err := open(exists(c.there), c.ask)
		if strings.Join(asked, " ") != c.want || (err == nil) != (c.there != "") || err == nil && string(file.(memory)) != c.there {
			t.Errorf("%+v: asked %q, %v", c, asked, err)
		}
	}
}

func FuzzTFTPRequest(f *testing.F) {
	for _, r := range requests {
		f.Add([]byte(r))
	}
	f.Fuzz(func(t *testing.T, packet []byte) {
		r, err := parseRequest(packet)
		if err != nil {
			if refused := (*refusal)(nil); errors.As(err, &refused) && len(errorPacket(refused.code, refused.message)) > maxRequest {
				t.Fatalf("an ERROR of %d bytes", len(refused.message))
			}
			return
		}
		if r.name == "" || len(r.name) > maxName || strings.ContainsAny(r.name, "\\\x00\n") || strings.HasPrefix(r.name, "/") ||
			strings.Contains(r.name, "//") || strings.Contains("/"+r.name+"/", "/../") {
			t.Fatalf("name %q", r.name)
		}
	})
}

func FuzzTFTPOptions(f *testing.F) {
	f.Add("blksize", "1468", "windowsize", "4", int64(1000))
	f.Add("TSIZE", "0", "timeout", "255", int64(0))
	f.Add("blksize", "-9223372036854775808", "windowsize", "65535", int64(1)<<40)
	f.Fuzz(func(t *testing.T, name1, value1, name2, value2 string, size int64) {
		if size < 0 {
			return
		}
		got := negotiate([]option{{name1, value1}, {name2, value2}}, size, 1468)
		if got.block < minBlock || got.block > 1468 || got.window < 1 || got.window > maxWindow || got.window*got.block > maxWindowBytes || got.timeout < 0 || got.timeout > 255 {
			t.Fatalf("%+v", got)
		}
		if got.oack != nil && (!bytes.HasPrefix(got.oack, []byte{0, opOACK}) || !bytes.HasSuffix(got.oack, []byte{0}) || bytes.Contains(got.oack, []byte{0, 0})) {
			t.Fatalf("OACK %q", got.oack)
		}
		if x := newTransfer(size, got); x.blocks < 1 || (x.blocks-1)*int64(got.block) > size {
			t.Fatalf("%d blocks of %d for %d bytes", x.blocks, got.block, size)
		}
	})
}
