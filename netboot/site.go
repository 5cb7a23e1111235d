package netboot

import (
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"time"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/netboot/dhcp"
	"github.com/better-compute/bcd/netboot/httpboot"
	"github.com/better-compute/bcd/netboot/tftp"
)

// Site joins table, artefacts and traces to the protocol rooms: its methods
// are the functions that those ask for. All of them are quick and local.
type Site struct {
	Table     *Table
	Artefacts *Artefacts
	Traces    *Traces
	Relay     *Relay
	// HTTPPort is where boot is served by HTTP.
	HTTPPort uint16
	// News is called after each event of a machine; may be nil.
	News func()
	// Fetched is told of each machine that fetches something; may be nil.
	Fetched func(mac string)
	// Now is the wall clock.
	Now func() time.Time
}

func (s *Site) base(local netip.Addr) string {
	if s.HTTPPort == 80 {
		return "http://" + httpHost(local)
	}
	return fmt.Sprintf("http://%s:%d", httpHost(local), s.HTTPPort)
}

func httpHost(a netip.Addr) string {
	if a = a.Unmap(); a.Is6() {
		return "[" + a.String() + "]"
	}
	return a.String()
}

// machineOf is what the decision needs of a client. Its firmware's words are
// ours for everything that boots.
func machineOf(c dhcp.Client) Machine {
	return Machine{
		MAC: c.MAC, UUID: c.UUID, UUIDAsSent: c.UUIDAsSent, Architectures: c.Architectures,
		Firmware: Firmware(c.Firmware), OurIPXE: c.Ours, NoHTTP: !c.HTTP,
	}
}

// DHCP is dhcp.Options.Decide.
func (s *Site) DHCP(c dhcp.Client) dhcp.Boot {
	table := s.Table.Get()
	b := dhcp.Boot{}
	var leaseFault string
	for _, full := range table.GetFullDhcp() {
		if full.GetMac() == c.MAC {
			if b.Lease, leaseFault = leaseOf(full); leaseFault != "" {
				b.Reason = leaseFault
				return b
			}
			break
		}
	}
	switch c.Firmware {
	case dhcp.OtherClient:
		b.Reason = "not a client that boots"
		return b
	case dhcp.Ramdisk:
		// Which files there are plays no part: it runs already.
		row, conflict := find(table, machineOf(c))
		action := table.GetUnknown()
		if row != nil {
			action = row.GetAction()
		}
		if b.Reason = conflict; conflict == "" && action == bcdv1.BootAction_BOOT_ACTION_RAMDISK {
			b.Kind, b.URL = dhcp.Config, s.base(c.Local)+"/"+BootConfigPath
		} else if conflict == "" {
			b.Reason = "the boot table does not let this machine run the ramdisk"
		}
		return b
	}
	d := Decide(table, s.Artefacts.Serving(), machineOf(c))
	b.Reason = d.Reason
	switch {
	case d.Means == Nothing:
		return b
	case d.Means == ScriptExit:
		b.Kind = dhcp.Exit
	default:
		b.Kind = dhcp.File
	}
	if d.ByHTTP {
		b.URL = s.base(c.Local) + "/" + d.Path
	} else {
		b.Name = d.Path
	}
	return b
}

func leaseOf(full *bcdv1.FullDhcp) (*dhcp.Lease, string) {
	address, err := netip.ParsePrefix(full.GetAddress())
	if err != nil {
		return nil, fmt.Sprintf("the address %.64q that the boot table lists for it is not one with a prefix length", full.GetAddress())
	}
	l := &dhcp.Lease{Address: address}
	if full.GetRouter() != "" {
		if l.Router, err = netip.ParseAddr(full.GetRouter()); err != nil {
			return nil, fmt.Sprintf("the router %.64q that the boot table lists for it is no address", full.GetRouter())
		}
	}
	for _, server := range full.GetDns() {
		a, err := netip.ParseAddr(server)
		if err != nil {
			return nil, fmt.Sprintf("the name server %.64q that the boot table lists for it is no address", server)
		}
		l.DNS = append(l.DNS, a)
	}
	return l, ""
}

// observe adds what was decided about a machine to an event of it.
func (s *Site) observe(e Event) {
	if e.MAC == "" {
		return
	}
	if row, conflict := find(s.Table.Get(), Machine{MAC: e.MAC, UUID: e.UUID}); row != nil {
		e.Action, e.MachineID = row.GetAction(), row.GetMachineId()
	} else if conflict == "" {
		e.Action = s.Table.Get().GetUnknown()
	}
	s.Traces.Observe(e)
	if s.News != nil {
		s.News()
	}
}

// ObserveDHCP is dhcp.Options.Observe. Clients that boot nothing leave no
// trace: they are other people's.
func (s *Site) ObserveDHCP(e dhcp.Event) {
	if e.Firmware == dhcp.OtherClient && e.Type != dhcp.EventForeign && e.Type != dhcp.EventNotHonoured {
		return
	}
	s.observe(Event{
		Time: e.Time, Type: e.Type, Message: e.Message, MAC: e.MAC, UUID: e.UUID,
		Architecture: e.Architecture, Firmware: string(e.Firmware), Address: e.Address,
	})
}

// mayFetch refuses a machine that is known to be there for something else: a
// file is not given to whom it was not offered. An address that nobody knows
// is let through, since what is served is no secret.
func (s *Site) mayFetch(peer netip.AddrPort) error {
	mac := s.Traces.MACOf(peer.Addr())
	if mac == "" {
		return nil
	}
	if action := s.Traces.actionOf(mac); action != bcdv1.BootAction_BOOT_ACTION_RAMDISK && action != bcdv1.BootAction_BOOT_ACTION_UNSPECIFIED {
		return fmt.Errorf("%s is not to boot from here: %w", mac, fs.ErrPermission)
	}
	return nil
}

// OpenTFTP is tftp.Config.Open.
func (s *Site) OpenTFTP(name string, peer netip.AddrPort) (tftp.File, error) {
	if err := s.mayFetch(peer); err != nil {
		return nil, err
	}
	f, err := s.Artefacts.Open(name)
	if err != nil {
		return nil, err
	}
	return f, nil
}

// ObserveTFTP is tftp.Config.Observe.
func (s *Site) ObserveTFTP(e tftp.Event) {
	s.fetch(e.Type, e.Name, e.Message, e.Peer)
}

func (s *Site) fetch(kind, name, message string, peer netip.AddrPort) {
	mac := s.Traces.MACOf(peer.Addr())
	if mac == "" {
		return
	}
	if s.Fetched != nil {
		s.Fetched(mac)
	}
	if message != "" {
		message = ": " + message
	}
	s.observe(Event{Time: s.Now(), Type: kind, Message: name + message, MAC: mac})
}

// HTTP is the configuration of the HTTP boot server.
func (s *Site) HTTP() httpboot.Config {
	return httpboot.Config{
		Open: func(name string, peer netip.AddrPort) (httpboot.File, error) {
			if err := s.mayFetch(peer); err != nil {
				return httpboot.File{}, err
			}
			f, err := s.Artefacts.Open(name)
			if err != nil {
				return httpboot.File{}, err
			}
			file := httpboot.File{Content: f.File, Size: f.Size(), SHA256: [32]byte(f.Artefact().GetSha256())}
			if f.Artefact().GetKind() == bcdv1.ArtefactKind_ARTEFACT_KIND_UKI {
				file.Type = "application/efi"
			}
			return file, nil
		},
		Mounts: map[string]http.Handler{ScriptPath: http.HandlerFunc(s.script), BootConfigPath: s.Relay},
		Observe: func(e httpboot.Event) {
			// Script and boot config have events of their own.
			if e.Name != ScriptPath && e.Name != BootConfigPath {
				s.fetch(e.Type, e.Name, e.Message, e.Peer)
			}
		},
	}
}

// script answers with what is decided now, which may be more than when the
// script was advertised: a command may have come between.
func (s *Site) script(w http.ResponseWriter, r *http.Request) {
	m, err := ParseScript(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	local, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if !ok {
		http.Error(w, "no local address", http.StatusInternalServerError)
		return
	}
	at, err := netip.ParseAddrPort(local.String())
	if err != nil {
		http.Error(w, "no local address", http.StatusInternalServerError)
		return
	}
	d := Decide(s.Table.Get(), s.Artefacts.Serving(), m)
	if r.Method == http.MethodGet {
		message := string(d.Means)
		if d.Reason != "" {
			message += ": " + d.Reason
		}
		s.observe(Event{Time: s.Now(), Type: EventScript, Message: message, MAC: m.MAC, UUID: m.UUID})
		if s.Fetched != nil {
			s.Fetched(m.MAC)
		}
	}
	w.Header().Set("Content-Type", "text/plain")
	_, _ = w.Write([]byte(ScriptText(d, s.base(at.Addr()))))
}
