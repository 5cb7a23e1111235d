package modules

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
	"golang.org/x/sys/unix"

	"github.com/better-compute/bcd/supervisor"
)

// machine is a made-up one: devices that appear when their parents' drivers are
// loaded, and a kernel that takes modules.
type machine struct {
	mu      sync.Mutex
	present []string
	behind  map[string][]string // module -> modaliases that it brings up
	order   []string
	params  map[string]string
	fail    map[string]error
	events  chan any
}

func (m *machine) devices() ([]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.present), nil
}

func (m *machine) insert(file, params string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	name := nameOf(file)
	m.order = append(m.order, name)
	m.params[name] = params
	if err := m.fail[name]; err != nil {
		return err
	}
	m.present = append(m.present, m.behind[name]...)
	return nil
}

func (m *machine) next(ctx context.Context) (uevent, error) {
	select {
	case <-ctx.Done():
		return uevent{}, ctx.Err()
	case e := <-m.events:
		if err, ok := e.(error); ok {
			return uevent{}, err
		}
		return e.(uevent), nil
	}
}

func (m *machine) close() error { return nil }

func (m *machine) loaded(name string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := 0
	for _, o := range m.order {
		if o == name {
			n++
		}
	}
	return n
}

// run starts a supervisor with the service on the machine.
func run(t *testing.T, m *machine, o Options) (*Service, func()) {
	t.Helper()
	dir := t.TempDir()
	write := func(name, text string) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	m.params, m.events = map[string]string{}, make(chan any)
	o.Log = slog.New(slog.NewTextHandler(io.Discard, nil))
	s := NewService(o)
	s.index = func() (*Index, error) { return debian(t), nil }
	s.devices, s.insert = m.devices, m.insert
	s.listen = func() (eventSource, error) { return m, nil }
	s.list = write("modules", "# what no device asks for\nefivarfs\n vfat \nip-mi_si trydefaults=1 # spelled oddly\nnot-in-the-image\n")
	s.cmdline = write("cmdline", "quiet e1000e.IntMode=1 e1000e.Node=2 megaraid_sas.msix_disable bcd.gateway=x .y ro\n")
	sup := supervisor.New(supervisor.Options{Log: o.Log})
	if err := sup.Add(s); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- sup.Run(ctx) }()
	synctest.Wait()
	if st := sup.Snapshot()[0]; !st.Ready {
		t.Fatalf("not ready: %+v", st)
	}
	return s, func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

func TestColdplugAndHotplug(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{
			present: []string{
				"pci:v00001000d00000060sv00001000sd00001013bc01sc04i00", // a RAID controller
				"pci:v00008086d000010D3sv00008086sd00000000bc02sc00i00", // a NIC
				"pci:v00008086d000025ABsv00001AF4sd00001100bc08sc80i00", // a watchdog
				"pci:v00001234d00001111sv00001AF4sd00001100bc03sc00i00", // VGA: no module here
			},
			behind: map[string][]string{"megaraid_sas": {"scsi:t-0x00"}},
			fail:   map[string]error{"i6300esb": unix.ENOEXEC, "sd_mod": unix.ENODEV, "nls_ascii": os.ErrNotExist},
		}
		after := 0
		s, stop := run(t, m, Options{
			Deny:          []string{"nvme"},
			AfterColdplug: func() error { after++; return errors.New("no efi here") },
		})
		for _, want := range []string{"megaraid_sas", "scsi_mod", "sd_mod", "e1000e", "watchdog", "i6300esb", "efivarfs", "vfat", "fat"} {
			if n := m.loaded(want); n != 1 {
				t.Errorf("%s was loaded %d times, want once", want, n)
			}
		}
		if after != 1 {
			t.Errorf("AfterColdplug was called %d times", after)
		}
		for name, want := range map[string]string{"e1000e": "IntMode=1 Node=2", "megaraid_sas": "msix_disable", "vfat": ""} {
			if m.params[name] != want {
				t.Errorf("%s got the parameters %q, want %q", name, m.params[name], want)
			}
		}
		st := s.Status()
		if st.Failed["i6300esb"] == "" || len(st.Failed) != 1 ||
			slices.Contains(st.Loaded, "i6300esb") || slices.Contains(st.Loaded, "sd_mod") || !slices.Contains(st.Loaded, "e1000e") {
			t.Errorf("status %+v", st)
		}

		// Hot-plugged, removed, denied.
		m.events <- uevent{"add", "/devices/x", "virtio:d00000001v00001AF4"}
		m.events <- uevent{"remove", "/devices/y", "virtio:d00000002v00001AF4"}
		m.events <- uevent{"add", "/devices/z", "pci:v00001B36d00000010sv00001AF4sd00001100bc01sc08i02"}
		synctest.Wait()
		if m.loaded("virtio_net") != 1 || m.loaded("virtio_blk") != 0 || m.loaded("nvme") != 0 {
			t.Errorf("loaded %q", m.order)
		}
		// Lost events: everything is looked at again.
		m.mu.Lock()
		m.present = append(m.present, "virtio:d00000002v00001AF4")
		m.mu.Unlock()
		m.events <- errLost
		synctest.Wait()
		if m.loaded("virtio_blk") != 1 || m.loaded("e1000e") != 1 {
			t.Errorf("loaded %q", m.order)
		}
		// On request.
		if err := s.Load(t.Context(), "btrfs", "vfat"); err != nil || m.loaded("btrfs") != 1 {
			t.Errorf("load: %v, %q", err, m.order)
		}
		if err := s.Load(t.Context(), "nonsense"); err == nil || !strings.Contains(err.Error(), "nonsense") {
			t.Errorf("load nonsense: %v", err)
		}
		stop()
		if err := s.Load(t.Context(), "btrfs"); err == nil {
			t.Error("loaded by a service that has ended")
		}
	})
}

func TestModaliasesOfATree(t *testing.T) {
	root := t.TempDir()
	for path, text := range map[string]string{
		"pci0000:00/0000:00:01.0/modalias":         "pci:a\n",
		"pci0000:00/0000:00:02.0/virtio0/modalias": "virtio:b\n",
		"pci0000:00/0000:00:03.0/virtio1/modalias": "virtio:b\n",
		"platform/x/modalias":                      "\n",
		"platform/huge/modalias":                   strings.Repeat("x", maxModalias+1),
		"platform/x/other":                         "pci:c\n",
	} {
		p := filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := modaliases(root)
	if err != nil || !slices.Equal(got, []string{"pci:a", "virtio:b"}) {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := modaliases(filepath.Join(root, "absent")); err == nil {
		t.Error("no error for a tree that is not there")
	}
}

func TestDecompress(t *testing.T) {
	plain := bytes.Repeat([]byte("a module's bytes "), 1000)
	pack := map[string]func(io.Writer) (io.WriteCloser, error){
		"gzip": func(w io.Writer) (io.WriteCloser, error) { return gzip.NewWriter(w), nil },
		"xz":   func(w io.Writer) (io.WriteCloser, error) { return xz.NewWriter(w) },
		"zstd": func(w io.Writer) (io.WriteCloser, error) { return zstd.NewWriter(w) },
	}
	for algorithm, open := range pack {
		var packed bytes.Buffer
		w, err := open(&packed)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(plain); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		got, err := decompress(bytes.NewReader(packed.Bytes()), algorithm, 1<<20)
		if err != nil || !bytes.Equal(got, plain) {
			t.Errorf("%s: %d bytes, %v", algorithm, len(got), err)
		}
		if _, err := decompress(bytes.NewReader(packed.Bytes()), algorithm, 1000); err == nil {
			t.Errorf("%s: no limit", algorithm)
		}
		if _, err := decompress(bytes.NewReader(packed.Bytes()[:packed.Len()-9]), algorithm, 1<<20); err == nil {
			t.Errorf("%s: a file that is cut short passes", algorithm)
		}
	}
	if _, err := decompress(nil, "lzo", 1); err == nil {
		t.Error("lzo: no error")
	}
}
