package rig

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestStringsStayOutOfTheCommandLine(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a,b")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	const token = "bcd.token=bcjt_abc_s3cret"
	got, err := writeSMBIOS(dir, []string{"bcd.gateway=https://10.0.2.2:7443", token})
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 4 || strings.Contains(strings.Join(got, " "), "s3cret") {
		t.Fatalf("options %q", got)
	}
	// A comma in a path is doubled.
	if want := "type=11,path=" + strings.ReplaceAll(filepath.Join(dir, "smbios", "2"), ",", ",,"); got[3] != want {
		t.Errorf("got %q, want %q", got[3], want)
	}
	file := filepath.Join(dir, "smbios", "2")
	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("mode %v, %v", info.Mode(), err)
	}
	if text, _ := os.ReadFile(file); string(text) != token {
		t.Errorf("file has %q", text)
	}
}

func TestStringsThatCannotBe(t *testing.T) {
	for _, s := range []string{"", "a\x00b", "a\nb", strings.Repeat("x", maxSMBIOSString+1)} {
		if _, err := writeSMBIOS(t.TempDir(), []string{s}); err == nil {
			t.Errorf("%.10q was taken", s)
		}
	}
}

func FuzzQuote(f *testing.F) {
	f.Add("a,b")
	f.Add(",,")
	f.Fuzz(func(t *testing.T, s string) {
		// QEMU's own rule, read backwards.
		var back strings.Builder
		q := quote(s)
		for i := 0; i < len(q); i++ {
			if q[i] == ',' {
				if i+1 == len(q) || q[i+1] != ',' {
					t.Fatalf("%q ends an option value", q)
				}
				i++
			}
			back.WriteByte(q[i])
		}
		if back.String() != s {
			t.Fatalf("%q became %q", s, back.String())
		}
	})
}

func TestCommandLine(t *testing.T) {
	c, err := Config{
		Name: "m1", Dir: "/d", RTC: "1970-01-02T00:00:00", Watchdog: true, Results: true,
		NICs: []NIC{{Model: "e1000e", TFTPDir: "/t", BootFile: "bcd.efi", BootIndex: 1, Capture: true}, {}},
		Disks: []Disk{{Path: "/x.raw", Serial: "S1", BootIndex: 2}, {Path: "/y", Bus: "nvme", Serial: "N", SectorSize: 4096},
			{Path: "nbd:unix:/s,1", Bus: "ahci"}, {Path: "/z", Bus: "megasas", ReadOnly: true}},
	}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	args, err := c.args(TCG, "/q", "/code", nil)
	if err != nil {
		t.Fatal(err)
	}
	line := strings.Join(args, " ")
	for _, want := range []string{
		"-accel tcg,thread=multi", "-cpu max", "-nodefaults", "-no-user-config", "-uuid " + c.UUID, "base=1970-01-02T00:00:00",
		"tftp=/t,bootfile=bcd.efi", "e1000e,netdev=net0,mac=" + c.NICs[0].MAC + ",bootindex=1", "netdev=net1,mac=" + c.NICs[1].MAC + ",romfile=",
		"filter-dump,id=dump0,netdev=net0", "i6300esb", "watchdog=reset", "virtio-blk-pci,drive=disk0,serial=S1,bootindex=2",
		"nvme,drive=disk1,serial=N,logical_block_size=4096,physical_block_size=4096", "file=nbd:unix:/s,,1", "scsi-hd,bus=sas3.0", "readonly=on",
	} {
		if !strings.Contains(line, want) {
			t.Errorf("no %q in %s", want, line)
		}
	}
	if slices.Contains(args, "-kernel") {
		t.Error("a firmware boot has -kernel")
	}
	c.Keyboard = true
	if args, err = c.args(TCG, "/q", "/code", nil); err != nil || !slices.Contains(args, "stdio,id=console,signal=off") {
		t.Errorf("a console with a keyboard: %v, %v", args, err)
	}
	if c.NICs[0].MAC == c.NICs[1].MAC {
		t.Error("two cards have the same address")
	}
}

func TestConfigThatCannotBe(t *testing.T) {
	for name, c := range map[string]Config{
		"name":      {Name: "a b", Dir: "/d"},
		"no folder": {Name: "a"},
		"uuid":      {Name: "a", Dir: "/d", UUID: "1"},
		"serial":    {Name: "a", Dir: "/d", Disks: []Disk{{Path: "/x", Serial: "a,b"}}},
		"card":      {Name: "a", Dir: "/d", NICs: []NIC{{Model: "ne2000"}}},
		"sectors":   {Name: "a", Dir: "/d", Disks: []Disk{{Path: "/x", SectorSize: 520}}},
		"boot file": {Name: "a", Dir: "/d", NICs: []NIC{{BootFile: "x"}}},
	} {
		if _, err := c.withDefaults(); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
}

func TestVigil(t *testing.T) {
	at := time.Unix(0, 0)
	v := vigil{limit: Patience(time.Minute)}
	step := func(after time.Duration, s signs, fails bool) {
		t.Helper()
		at = at.Add(after)
		if err := v.step(at, s); (err != nil) != fails {
			t.Errorf("at %s: %v", at.Sub(time.Unix(0, 0)), err)
		}
	}
	step(0, signs{}, false)
	step(time.Minute, signs{}, false)
	step(time.Second, signs{console: 1}, false)
	step(time.Minute, signs{console: 1, blocks: 5}, false) // silent console, busy disk
	step(time.Minute, signs{console: 1, blocks: 5}, false)
	step(time.Second, signs{console: 1, blocks: 5}, true)
}

func TestSearchAcrossReads(t *testing.T) {
	file := filepath.Join(t.TempDir(), ConsoleLog)
	s := search{want: []byte("node joined")}
	look := func(want bool) {
		t.Helper()
		if ok, err := s.look(file); ok != want || err != nil {
			t.Fatalf("got %v, %v", ok, err)
		}
	}
	look(false) // no file yet
	text := "boot\nnode joined\n and again: node joined."
	for n := 1; n < len("boot\nnode joined"); n++ {
		if err := os.WriteFile(file, []byte(text[:n]), 0o600); err != nil {
			t.Fatal(err)
		}
		look(false)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	look(true)
	if s.at != int64(len("boot\nnode joined")) {
		t.Errorf("the mark is at %d", s.at)
	}
	look(true)
	look(false)
}

func TestHardwareVirtualisation(t *testing.T) {
	for text, want := range map[string]bool{
		"flags\t\t: fpu vme svm lm\n":                   true,
		"vendor: x\nflags : fpu vmx\n":                  true,
		"flags\t: fpu vme svm_lock lm vmx_y\n":          false,
		"model name : svm\nflags : hypervisor fpu\n":    false,
		"vmx flags : vnmi preemption_timer\nflags: fpu": false,
	} {
		if got := hardwareVirtualisation([]byte(text)); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
}
