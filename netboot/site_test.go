package netboot

import (
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"path/filepath"
	"strings"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/netboot/dhcp"
	"github.com/better-compute/bcd/netboot/httpboot"
)

var siteAddress = netip.MustParseAddr("127.0.0.1")

// servedSite is a site with every artefact, and its HTTP side on loopback.
func servedSite(t *testing.T, b *bcdv1.BootTable) *Site {
	t.Helper()
	store, _ := filledArtefacts(t)
	s := &Site{
		Table: &Table{table: b}, Artefacts: store, Traces: &Traces{}, Now: nowT0,
		Relay: newRelay(newControl(t)).relay,
	}
	// The handler's bounds are its own room's to test; here it is mounted.
	server := httptest.NewServer(httpboot.New(s.HTTP()))
	t.Cleanup(server.Close)
	s.HTTPPort = uint16(server.Listener.Addr().(*net.TCPAddr).Port)
	return s
}

// requests gives the DHCP requests of one capture of real firmware.
func requests(t *testing.T, path string) (out [][]byte) {
	t.Helper()
	data := readFile(t, path)
	for data = data[24:]; len(data) > 16; {
		n := int(binary.LittleEndian.Uint32(data[8:]))
		frame := data[16 : 16+n]
		data = data[16+n:]
		if len(frame) < 42 || frame[12] != 8 || frame[13] != 0 || frame[23] != 17 {
			continue
		}
		udp := frame[14+4*int(frame[14]&15):]
		if port := binary.BigEndian.Uint16(udp[2:]); port == dhcp.ServerPort || port == dhcp.BINLPort {
			out = append(out, udp[8:binary.BigEndian.Uint16(udp[4:])])
		}
	}
	return out
}

// TestWhatRealFirmwareIsToldIsServed goes from captured packets of firmware to
// the bytes that it would fetch.
func TestWhatRealFirmwareIsToldIsServed(t *testing.T) {
	captures, err := filepath.Glob("testdata/*.pcap")
	if err != nil || len(captures) < 10 {
		t.Fatalf("%d captures, %v", len(captures), err)
	}
	s := servedSite(t, table(ramdiskAction))
	local := servedSite(t, table(localAction))
	byTFTP, byHTTP, exits := 0, 0, 0
	for _, capture := range captures {
		t.Run(filepath.Base(capture), func(t *testing.T) {
			answered := 0
			for _, packet := range requests(t, capture) {
				at := dhcp.Arrival{From: netip.MustParseAddrPort("0.0.0.0:68"), Port: dhcp.ServerPort, Interface: "eth0", Local: siteAddress}
				c, err := dhcp.Parse(packet, at)
				if err != nil || c.Message != dhcpv4.MessageTypeDiscover {
					continue
				}
				b := s.DHCP(c)
				if _, err := dhcp.Answer(c, b); err != nil {
					t.Errorf("%s: %v", c.String(), err)
					continue
				}
				answered++
				if b.Name != "" {
					f, err := s.OpenTFTP(b.Name, netip.AddrPort{})
					if err != nil {
						t.Errorf("%s is told %s: %v", c.String(), b.Name, err)
						continue
					}
					f.Close()
					byTFTP++
				}
				if b.URL != "" {
					fetchURL(t, b.URL)
					byHTTP++
				}
				// The same machine, installed: no offer, or a script that ends.
				switch b := local.DHCP(c); {
				case c.Firmware == dhcp.IPXE && c.HTTP:
					if b.Kind != dhcp.Exit || fetchURL(t, b.URL) != "#!ipxe\nexit\n" {
						t.Errorf("installed, %s is told %+v", c.String(), b)
					}
					exits++
				case b.Kind != dhcp.Nothing || b.Reason == "":
					t.Errorf("installed, %s is told %+v", c.String(), b)
				}
			}
			if answered == 0 {
				t.Error("no packet of it was answered")
			}
		})
	}
	if byTFTP == 0 || byHTTP == 0 || exits == 0 {
		t.Errorf("%d by TFTP, %d by HTTP, %d exits", byTFTP, byHTTP, exits)
	}
}

// fetchURL fetches a URL and, of a script, all files in it.
func fetchURL(t *testing.T, u string) string {
	t.Helper()
	response, err := http.Get(u)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK || int64(len(body)) != response.ContentLength {
		t.Errorf("%s: %s, %d bytes of %d, %v", u, response.Status, len(body), response.ContentLength, err)
	}
	if strings.HasSuffix(must(url.Parse(u)).Path, ".efi") && response.Header.Get("Content-Type") != "application/efi" {
		t.Errorf("%s has the type %q", u, response.Header.Get("Content-Type"))
	}
	if strings.HasPrefix(string(body), "#!ipxe") {
		for _, word := range strings.Fields(string(body)) {
			if strings.HasPrefix(word, "http://") {
				fetchURL(t, word)
			}
		}
	}
	return string(body)
}

func TestTheRamdiskIsToldWhereToAsk(t *testing.T) {
	for _, test := range []struct {
		name  string
		table *bcdv1.BootTable
		want  dhcp.Kind
	}{
		{"to be booted", table(nothingAction, row("mach_a", ramdiskAction, "", macA)), dhcp.Config},
		{"unknown, by policy", table(ramdiskAction), dhcp.Config},
		{"unknown, by policy not", table(nothingAction), dhcp.Nothing},
		{"installed", table(ramdiskAction, row("mach_a", localAction, "", macA)), dhcp.Nothing},
		{"two rows", table(ramdiskAction, row("mach_a", ramdiskAction, "", macA), row("mach_b", ramdiskAction, "", macA)), dhcp.Nothing},
		{"no table", nil, dhcp.Nothing},
	} {
		s := &Site{Table: &Table{table: test.table}, Artefacts: &Artefacts{}, HTTPPort: 80}
		b := s.DHCP(dhcp.Client{MAC: macA, Firmware: dhcp.Ramdisk, Local: siteAddress})
		if b.Kind != test.want || (b.URL == "http://127.0.0.1/boot-config") != (test.want == dhcp.Config) || b.Kind == dhcp.Nothing && b.Reason == "" {
			t.Errorf("%s: %+v", test.name, b)
		}
	}
}

func TestListedAddresses(t *testing.T) {
	b := table(nothingAction)
	b.FullDhcp = []*bcdv1.FullDhcp{
		{Mac: macA, Address: "10.0.0.7/24", Router: "10.0.0.1", Dns: []string{"10.0.0.1"}},
		{Mac: macB, Address: "10.0.0.8"},
	}
	s := &Site{Table: &Table{table: b}, Artefacts: &Artefacts{}}
	if got := s.DHCP(dhcp.Client{MAC: macA}); got.Lease == nil || got.Lease.Address.String() != "10.0.0.7/24" || got.Lease.Router.String() != "10.0.0.1" || len(got.Lease.DNS) != 1 {
		t.Errorf("%+v", got)
	}
	if got := s.DHCP(dhcp.Client{MAC: macB}); got.Lease != nil || !strings.Contains(got.Reason, `"10.0.0.8"`) {
		t.Errorf("%+v", got)
	}
}

func TestAFileIsNotGivenToWhomItWasNotOffered(t *testing.T) {
	s := servedSite(t, table(nothingAction, row("mach_a", ramdiskAction, "", macA)))
	name := ArtefactPath(s.Artefacts.Serving()[0])
	for i, mac := range []string{macA, macB} {
		address := netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)})
		s.ObserveDHCP(dhcp.Event{Type: dhcp.EventDiscover, Time: t0, MAC: mac, Firmware: dhcp.UEFI, Address: address})
		_, err := s.OpenTFTP(name, netip.AddrPortFrom(address, 2000))
		if (mac == macA) != (err == nil) || err != nil && !errors.Is(err, fs.ErrPermission) {
			t.Errorf("%s: %v", mac, err)
		}
	}
	if f, err := s.OpenTFTP("nothing", netip.AddrPort{}); !errors.Is(err, fs.ErrNotExist) || f != nil {
		t.Errorf("%v, %v", f, err)
	}
}

func TestPacketsAndFetchesMakeOneTrace(t *testing.T) {
	s := servedSite(t, table(nothingAction, row("mach_a", ramdiskAction, "", macA)))
	news := 0
	s.News = func() { news++ }
	s.ObserveDHCP(dhcp.Event{Type: dhcp.EventDiscover, Time: t0, MAC: macA, Firmware: dhcp.UEFIHTTP, Architecture: "amd64", Address: siteAddress})
	s.ObserveDHCP(dhcp.Event{Type: dhcp.EventDiscover, Time: t0, MAC: macB, Firmware: dhcp.OtherClient})
	s.ObserveDHCP(dhcp.Event{Type: dhcp.EventServing, Time: t0})
	request := httptest.NewRequest(http.MethodGet, "/"+ArtefactPath(s.Artefacts.Serving()[0]), nil)
	request.RemoteAddr = "127.0.0.1:2000"
	httpboot.New(s.HTTP()).ServeHTTP(httptest.NewRecorder(), request)
	traces := s.Traces.All(t0)
	if len(traces) != 1 || traces[0].MachineId != "mach_a" || traces[0].Action != ramdiskAction || traces[0].Firmware != "uefi-http" || news == 0 {
		t.Fatalf("%v, news %d", traces, news)
	}
	var kinds []string
	for _, step := range traces[0].Steps {
		kinds = append(kinds, step.Type)
	}
	if got := strings.Join(kinds, " "); got != "dhcp.discover http.get http.done" {
		t.Errorf("steps %s", got)
	}
}
