package kmod

import (
	"bytes"
	"encoding/binary"
	"slices"
	"strings"
	"testing"

	"github.com/ulikunitz/xz"
)

// ko makes a module: an ELF64 file whose .modinfo holds the fields.
func ko(fields ...string) []byte {
	info := []byte(strings.Join(fields, "\x00") + "\x00")
	names := []byte("\x00.modinfo\x00.shstrtab\x00")
	le := binary.LittleEndian
	b := make([]byte, 64)
	copy(b, "\x7fELF\x02\x01\x01")
	le.PutUint16(b[16:], 1)  // relocatable
	le.PutUint16(b[18:], 62) // x86-64
	le.PutUint32(b[20:], 1)
	le.PutUint16(b[52:], 64)
	le.PutUint16(b[58:], 64)
	le.PutUint16(b[60:], 3)
	le.PutUint16(b[62:], 2)
	infoAt := len(b)
	b = append(b, info...)
	namesAt := len(b)
	b = append(b, names...)
	le.PutUint64(b[40:], uint64(len(b)))
	section := func(name, kind uint32, at, size int) {
		s := make([]byte, 64)
		le.PutUint32(s, name)
		le.PutUint32(s[4:], kind)
		le.PutUint64(s[24:], uint64(at))
		le.PutUint64(s[32:], uint64(size))
		b = append(b, s...)
	}
	section(0, 0, 0, 0)
	section(1, 1, infoAt, len(info))
	section(10, 3, namesAt, len(names))
	return b
}

func packed(t testing.TB, data []byte) []byte {
	var out bytes.Buffer
	w, err := xz.NewWriter(&out)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func tree(t testing.TB) *Tree {
	t.Helper()
	tr, err := NewTree(map[string][]byte{
		"kernel/drivers/net/ethernet/big/big-nic.ko.xz": packed(t, ko("name=big_nic", "alias=pci:v1d2*", "depends=mdio,ptp_core", "firmware=big/fw-1.bin", "softdep=pre: helper-a post: missing")),
		"kernel/drivers/net/ethernet/big/vf.ko.xz":      packed(t, ko("name=vf", "alias=pci:v1d3*", "depends=")),
		"kernel/drivers/net/mdio.ko.xz":                 packed(t, ko("name=mdio", "depends=bus")),
		"kernel/drivers/ptp/ptp-core.ko.xz":             packed(t, ko("name=ptp_core", "depends=bus")),
		"kernel/lib/bus.ko.xz":                          packed(t, ko("name=bus", "depends=crc")),
		"kernel/lib/helper_a.ko":                        ko("name=helper_a", "alias=pci:v1d2*"),
		"kernel/sound/noise.ko.xz":                      packed(t, ko("name=noise", "depends=", "firmware=noise.bin")),
		"modules.builtin":                               []byte("kernel/lib/crc.ko\nkernel/fs/ext4/ext4.ko\n"),
		"modules.order":                                 []byte("kernel/lib/helper_a.ko\nkernel/drivers/net/ethernet/big/big-nic.ko\nkernel/sound/noise.ko\n"),
		"modules.builtin.modinfo":                       []byte("ext4.license=GPL\x00"),
	})
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

func paths(s *Selection) []string {
	var out []string
	for _, m := range s.Modules {
		out = append(out, m.Path)
	}
	return out
}

func TestSelectTakesWhatIsNeeded(t *testing.T) {
	s, err := tree(t).Select([]string{"drivers/net/ethernet/**", "-drivers/net/ethernet/big/vf", "fs/ext4/ext4", "?fs/no/such"})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"kernel/drivers/net/ethernet/big/big-nic.ko", "kernel/drivers/net/mdio.ko",
		"kernel/drivers/ptp/ptp-core.ko", "kernel/lib/bus.ko", "kernel/lib/helper_a.ko",
	}
	if got := paths(s); !slices.Equal(got, want) {
		t.Errorf("modules %q, want %q", got, want)
	}
	index := s.Index()
	dep := string(index["modules.dep"])
	line := "kernel/drivers/net/ethernet/big/big-nic.ko: kernel/drivers/net/mdio.ko kernel/drivers/ptp/ptp-core.ko kernel/lib/bus.ko\n"
	if !strings.Contains(dep, line) {
		t.Errorf("modules.dep:\n%swant the line %s(what is loaded first comes last)", dep, line)
	}
	for name, want := range map[string]string{
		// modules.order puts helper_a before the driver
		"modules.alias":   "alias pci:v1d2* helper_a\nalias pci:v1d2* big_nic\n",
		"modules.softdep": "softdep big_nic pre: helper-a post: missing\n",
		"modules.builtin": "kernel/fs/ext4/ext4.ko\n",
		"modules.order":   "kernel/lib/helper_a.ko\nkernel/drivers/net/ethernet/big/big-nic.ko\n",
	} {
		if got := string(index[name]); !strings.Contains(got, want) {
			t.Errorf("%s is %q, want it to hold %q", name, got, want)
		}
	}
	if strings.Contains(string(index["modules.alias"])+dep, "noise") || strings.Contains(dep, ".xz") {
		t.Error("index files name what the image does not have")
	}
	if fw := s.Firmware(); len(fw) != 1 || !slices.Equal(fw["big/fw-1.bin"], []string{"big_nic"}) {
		t.Errorf("firmware %v", fw)
	}
	for _, m := range s.Modules {
		if !bytes.HasPrefix(m.Data, []byte("\x7fELF")) {
			t.Errorf("%s is not decompressed", m.Path)
		}
	}
}

// TestEachModuleComesAfterItsNeeds loads modules as a loader does, from the end
// of the line, and demands that nothing is missing at any step.
func TestEachModuleComesAfterItsNeeds(t *testing.T) {
	s, err := tree(t).Select([]string{"drivers/**", "lib/*", "sound/*"})
	if err != nil {
		t.Fatal(err)
	}
	needs := map[string][]string{}
	for _, m := range s.Modules {
		for _, d := range m.Info.Depends {
			if d != "crc" {
				needs[moduleName(m.Path)] = append(needs[moduleName(m.Path)], d)
			}
		}
	}
	for line := range strings.Lines(string(s.Index()["modules.dep"])) {
		words := strings.Fields(strings.Replace(line, ":", "", 1))
		loaded := map[string]bool{}
		for _, file := range slices.Backward(words) {
			for _, need := range needs[moduleName(file)] {
				if !loaded[need] {
					t.Errorf("%q: %s is loaded before %s", line, file, need)
				}
			}
			loaded[moduleName(file)] = true
		}
	}
}

func TestWhatBreaksTheBuild(t *testing.T) {
	if _, err := tree(t).Select([]string{"drivers/net/renamed"}); err == nil || !strings.Contains(err.Error(), "matches nothing") {
		t.Errorf("a driver that is gone: %v", err)
	}
	broken := tree(t)
	delete(broken.byName, "bus")
	if _, err := broken.Select([]string{"drivers/net/mdio"}); err == nil || !strings.Contains(err.Error(), "needs bus") {
		t.Errorf("a dependency that is gone: %v", err)
	}
	if _, err := NewTree(map[string][]byte{"kernel/x.ko": nil}); err == nil {
		t.Error("a package without modules.builtin is accepted")
	}
	damaged := tree(t)
	damaged.files["kernel/lib/bus.ko.xz"] = []byte("not xz")
	if _, err := damaged.Select([]string{"lib/bus"}); err == nil || !strings.Contains(err.Error(), "bus.ko.xz") {
		t.Errorf("a damaged module: %v", err)
	}
}

func FuzzReadModinfo(f *testing.F) {
	f.Add(ko("name=x", "alias=pci:*", "depends=a,b", "softdep=pre: c", "firmware=f.bin"))
	f.Add([]byte("\x7fELF"))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := ReadModinfo(b)
		if err != nil {
			return
		}
		for _, line := range slices.Concat(m.Aliases, m.Softdeps, m.Firmware) {
			if strings.Contains(line, "\n") {
				t.Errorf("a field of two lines: %q", line)
			}
		}
	})
}
