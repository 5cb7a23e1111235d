package bmc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"
	"unsafe"

	"github.com/bougou/go-ipmi/pkg/client"
	"github.com/bougou/go-ipmi/pkg/command/chassis"
	"github.com/bougou/go-ipmi/pkg/types"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// Bounds of IPMI 2.0 (section 13.28, and 22.30 for 20-byte passwords).
	maxIPMIUser     = 16
	maxIPMIPassword = 20
	// ipmiTime and ipmiRetries bound one request: datagrams get lost.
	ipmiTime    = 2 * time.Second
	ipmiRetries = 3
	// ipmiAskTime is for the one request that is not repeated: some BMCs
	// answer it when the machine has switched.
	ipmiAskTime = 10 * time.Second
)

// ipmi is a session over RMCP+. What the library lacks in caution is around
// it: see guard and guardedConn.
type ipmi struct {
	client   *client.Client
	password []byte
	askTime  time.Duration
}

// openIPMI connects and logs in as administrator, with cipher suite 17, or 3
// where the BMC is older: both check and encrypt what is sent.
func (s *site) openIPMI(ctx context.Context, j *job, t *bcdv1.BmcTarget) (machine, error) {
	if t.GetSystem() != "" {
		return nil, fail("MALFORMED", "target.system is Redfish's: an IPMI address is one machine")
	}
	to, _, err := s.locate(ctx, t.GetAddress(), ipmiPort)
	if err != nil {
		return nil, err
	}
	c, err := s.credentials(ctx, j, t.GetCredentialsReference())
	if err != nil {
		return nil, err
	}
	if len(c.user) > maxIPMIUser || len(c.password) > maxIPMIPassword {
		return nil, fail("LOGIN_REFUSED", "IPMI has user names of at most %d bytes and passwords of at most %d; these are longer", maxIPMIUser, maxIPMIPassword)
	}
	j.phase("connecting to %s by IPMI", to)
	return dialIPMI(ctx, to, c, s.ipmiAskTime)
}

func dialIPMI(ctx context.Context, to netip.AddrPort, c credentials, askTime time.Duration) (machine, error) {
	// The library wants a string. This one is over bytes of our own, which
	// close zeroes once the library is done with them.
	m := &ipmi{password: bytes.Clone(c.password), askTime: askTime}
	password := unsafe.String(unsafe.SliceData(m.password), len(m.password))
	lan, err := client.NewClient(to.Addr().String(), int(to.Port()), string(c.user), password)
	if err != nil {
		return nil, fail("UNREACHABLE", "IPMI at %s: %w", to, err)
	}
	dialer := &guardedDialer{to: to, client: lan}
	m.client = lan.WithTimeout(ipmiTime).WithRetry(ipmiRetries).
		WithCipherSuiteID(types.CipherSuiteID17, types.CipherSuiteID3).WithUDPProxy(dialer)
	if err := guard(func() error { return m.client.Connect(ctx) }); err != nil {
		// The library leaves its socket open, and would ask for a session to be
		// ended that there is none of.
		dialer.close()
		m.forget()
		var rmcp *types.RmcpStatusError
		if errors.Is(err, client.ErrRAKPAuthentication) || errors.As(err, &rmcp) || strings.Contains(err.Error(), client.ErrRAKPAuthentication.Error()) {
			return nil, fail("LOGIN_REFUSED", "IPMI at %s refuses user and password: %w", to, oneLine(err))
		}
		return nil, fail("UNREACHABLE", "IPMI at %s: %w", to, oneLine(err))
	}
	return m, nil
}

// oneLine keeps an error of the library short; what it wraps is not kept.
func oneLine(err error) error { return errors.New(clip(err.Error(), maxInfo)) }

// forget zeroes the password.
func (m *ipmi) forget() {
	clear(m.password)
	m.password = nil
}

// close implements machine.
func (m *ipmi) close(ctx context.Context) {
	m.client.WithRetry(0)
	_ = guard(func() error { return m.client.Close(ctx) })
	m.forget()
}

func (*ipmi) protocol() bcdv1.BmcProtocol { return bcdv1.BmcProtocol_BMC_PROTOCOL_IPMI }

// guard turns a panic into an error: the library indexes answers before it has
// measured them.
func guard(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("the BMC's answer cannot be read: %v", r)
		}
	}()
	return f()
}

// guardedDialer gives the library its connection. It implements
// golang.org/x/net/proxy.Dialer.
type guardedDialer struct {
	to     netip.AddrPort
	client *client.Client
	conn   *guardedConn
}

func (d *guardedDialer) Dial(string, string) (net.Conn, error) {
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(d.to))
	if err != nil {
		return nil, err
	}
	d.conn = &guardedConn{UDPConn: conn, client: d.client}
	return d.conn, nil
}

func (d *guardedDialer) close() {
	if d.conn != nil {
		_ = d.conn.Close()
	}
}

// guardedConn drops datagrams that the library would panic at. It reads
// answers on goroutines of its own, where no caller could recover, and it
// decrypts before it checks who wrote: one datagram of a stranger on the LAN
// could end the whole daemon.
type guardedConn struct {
	*net.UDPConn
	client *client.Client
}

func (c *guardedConn) Read(b []byte) (int, error) {
	for {
		n, err := c.UDPConn.Read(b)
		if err != nil {
			return n, err
		}
		if guard(func() error {
			// Parsing changes nothing; what it makes of the datagram is left
			// to the library's own second look.
			_ = c.client.ParseRmcpResponse(context.Background(), bytes.Clone(b[:n]), types.Command{}, nothing{})
			return nil
		}) == nil {
			return n, nil
		}
	}
}

// nothing is a response that takes any bytes.
type nothing struct{}

func (nothing) Unpack([]byte) error { return nil }
func (nothing) Format() string      { return "" }

func (m *ipmi) power(ctx context.Context) (state bcdv1.BmcPowerState, err error) {
	err = guard(func() error {
		status, err := m.client.GetChassisStatus(ctx)
		if err != nil {
			return fmt.Errorf("read the power state: %w", oneLine(err))
		}
		state = off
		if status.PowerIsOn {
			state = on
		}
		return nil
	})
	return state, err
}

// ask implements machine: one datagram, never sent again. An answer that is
// lost is not a reason to press the button twice.
func (m *ipmi) ask(ctx context.Context, action bcdv1.BmcPowerAction) (string, error) {
	control, name := chassis.ChassisControlPowerUp, "power up"
	switch action {
	case bcdv1.BmcPowerAction_BMC_POWER_ACTION_OFF:
		control, name = chassis.ChassisControlPowerDown, "power down"
	case bcdv1.BmcPowerAction_BMC_POWER_ACTION_GRACEFUL_OFF:
		control, name = chassis.ChassisControlSoftShutdown, "soft shutdown"
	case bcdv1.BmcPowerAction_BMC_POWER_ACTION_CYCLE:
		control, name = chassis.ChassisControlPowerCycle, "power cycle"
	case bcdv1.BmcPowerAction_BMC_POWER_ACTION_RESET:
		control, name = chassis.ChassisControlHardReset, "hard reset"
	}
	m.client.WithRetry(0).WithTimeout(m.askTime)
	defer func() { m.client.WithRetry(ipmiRetries).WithTimeout(ipmiTime) }()
	err := guard(func() error {
		_, err := m.client.ChassisControl(ctx, control)
		return answered(err)
	})
	return name, err
}

// answered marks an error that is the BMC's own "no".
func answered(err error) error {
	if err == nil {
		return nil
	}
	if no, ok := types.IsResponseError(err); ok && no.CompletionCode() != 0 {
		return notAsked(oneLine(err))
	}
	return oneLine(err)
}

// boot implements machine.
func (m *ipmi) boot(ctx context.Context) (override, error) {
	flags, err := m.flags(ctx)
	return flagsOverride(flags), err
}

func (m *ipmi) flags(ctx context.Context) (*types.BootOptionParam_BootFlags, error) {
	flags := new(types.BootOptionParam_BootFlags)
	err := guard(func() error { return m.client.GetSystemBootOptionsParamFor(ctx, flags) })
	if err != nil {
		return nil, fmt.Errorf("read the boot flags: %w", answered(err))
	}
	return flags, nil
}

// selectors are the boot devices of IPMI 2.0 table 28-14 in Redfish's words.
var selectors = map[string]types.BootDeviceSelector{
	"None": types.BootDeviceSelectorNoOverride, "Pxe": types.BootDeviceSelectorForcePXE, "Hdd": types.BootDeviceSelectorForceHardDrive,
}

func flagsOverride(f *types.BootOptionParam_BootFlags) override {
	if f == nil {
		return override{}
	}
	o := override{Target: fmt.Sprintf("device %d", f.BootDeviceSelector), Enabled: "Once", Mode: "Legacy"}
	for name, s := range selectors {
		if s == f.BootDeviceSelector {
			o.Target = name
		}
	}
	if f.BIOSBootType == types.BIOSBootTypeEFI {
		o.Mode = "UEFI"
	}
	switch {
	case o.Target == "None":
		o.Enabled, o.Mode = "Disabled", ""
	case f.Persist:
		o.Enabled = "Continuous"
	}
	return o
}

// setBoot implements machine: boot flags (parameter 5), valid, for one boot.
// There is no HTTP boot in IPMI.
func (m *ipmi) setBoot(ctx context.Context, want wish, before func() error) (bool, []string, error) {
	target := want.redfish()
	selector, ok := selectors[target.Target]
	if !ok {
		return false, nil, fail("UNSUPPORTED", "IPMI has no boot from %s: use pxe, or Redfish", word(want.source))
	}
	// Some have nothing to show before the first time that it is set.
	have, err := m.flags(ctx)
	if err != nil && !harmless(err) {
		return false, nil, err
	}
	if err == nil && target.shownBy(flagsOverride(have)) && (have.BootFlagsValid || target.Target == "None") {
		return false, nil, nil
	}
	if err := before(); err != nil {
		return false, nil, err
	}
	lost := guard(func() error {
		return answered(m.client.SetBootDevice(ctx, selector, types.BIOSBootType(!want.legacy && target.Target != "None"), false))
	})
	if lost != nil && harmless(lost) {
		return false, nil, effectFailed(lost, "the boot flags")
	}
	have, err = m.flags(ctx)
	if err != nil {
		return true, nil, unknown("NO_ANSWER", "the boot flags were sent, and whether the BMC took them could not be read: %w", err)
	}
	got := flagsOverride(have)
	if got.Target != target.Target || got.Enabled != target.Enabled {
		return true, nil, fail("OVERRIDE_IGNORED", "the BMC accepted the boot override %s and shows %s: it does not keep a one-time override", target, got)
	}
	var notes []string
	if target.Target != "None" {
		if got.Mode != target.Mode {
			notes = append(notes, "the BMC shows "+got.Mode+" boot, "+target.Mode+" was asked for")
		}
		if !have.BootFlagsValid {
			notes = append(notes, "the BMC does not show the flags as valid, and may not heed them")
		}
		notes = append(notes, "many BMCs forget boot flags after 60 s without a power command (IPMI 2.0 table 28-14, parameter 3)")
	}
	return true, notes, nil
}

// inventory implements machine. The FRU has names and serials; BIOS version
// and MACs are nothing that IPMI knows of.
func (m *ipmi) inventory(ctx context.Context) (*bcdv1.BmcInventoryResult, error) {
	state, err := m.power(ctx)
	if err != nil {
		return nil, err
	}
	out := &bcdv1.BmcInventoryResult{Power: state, Protocol: m.protocol(), Notes: []string{"IPMI knows neither the BIOS version nor MACs"}}
	try := func(what string, f func() error) {
		if err := guard(f); err != nil {
			out.Notes = append(out.Notes, clip(what+": "+err.Error(), maxText))
		}
	}
	try("the BMC itself", func() error {
		id, err := m.client.GetDeviceID(ctx)
		if err == nil {
			out.BmcFirmware = fmt.Sprintf("%d.%02d", id.MajorFirmwareRevision, id.MinorFirmwareRevision)
			out.BmcModel = fmt.Sprintf("manufacturer %d product %d", id.ManufacturerID, id.ProductID)
		}
		return err
	})
	try("system GUID", func() error {
		guid, err := m.client.GetSystemGUID(ctx)
		if err == nil {
			g := guid.GUID
			// As SMBIOS has it (DSP0134 section 7.2.1), which is what most
			// BMCs copy there.
			out.SystemUuid = fmt.Sprintf("%x-%x-%x-%x-%x", []byte{g[3], g[2], g[1], g[0]}, []byte{g[5], g[4]}, []byte{g[7], g[6]}, g[8:10], g[10:16])
		}
		return err
	})
	try("FRU", func() error {
		fru, err := m.client.GetFRU(ctx, 0, "")
		if err != nil {
			return err
		}
		if b := fru.BoardInfoArea; b != nil {
			out.Manufacturer, out.Model, out.Serial = fruText(b.Manufacturer), fruText(b.ProductName), fruText(b.SerialNumber)
		}
		if p := fru.ProductInfoArea; p != nil {
			for _, f := range []struct {
				to   *string
				from []byte
			}{{&out.Manufacturer, p.Manufacturer}, {&out.Model, p.Name}, {&out.Serial, p.SerialNumber}} {
				if text := fruText(f.from); text != "" {
					*f.to = text
				}
			}
		}
		return nil
	})
	return out, ctx.Err()
}

func fruText(b []byte) string { return clip(strings.TrimRight(string(b), "\x00 "), maxText) }
