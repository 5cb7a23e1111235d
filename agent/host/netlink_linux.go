package host

import (
	"fmt"
	"net"
	"syscall"
)

// attributePermanentAddress is IFLA_PERM_ADDRESS (linux/if_link.h, since
// Linux 5.6).
const attributePermanentAddress = 54

// PermanentMACs asks the kernel for the permanent hardware address of each
// interface (rtnetlink(7), RTM_GETLINK). Interfaces without one are not in
// the answer. It needs no privilege.
func PermanentMACs() (map[string]net.HardwareAddr, error) {
	rib, err := syscall.NetlinkRIB(syscall.RTM_GETLINK, syscall.AF_UNSPEC)
	if err != nil {
		return nil, fmt.Errorf("rtnetlink: %w", err)
	}
	messages, err := syscall.ParseNetlinkMessage(rib)
	if err != nil {
		return nil, fmt.Errorf("rtnetlink: %w", err)
	}
	macs := map[string]net.HardwareAddr{}
	for i := range messages {
		if messages[i].Header.Type != syscall.RTM_NEWLINK {
			continue
		}
		attributes, err := syscall.ParseNetlinkRouteAttr(&messages[i])
		if err != nil {
			return nil, fmt.Errorf("rtnetlink: %w", err)
		}
		var name string
		var mac net.HardwareAddr
		for _, a := range attributes {
			switch a.Attr.Type {
			case syscall.IFLA_IFNAME:
				name = string(a.Value[:max(len(a.Value)-1, 0)])
			case attributePermanentAddress:
				mac = net.HardwareAddr(a.Value)
			}
		}
		if name != "" && len(mac) > 0 {
			macs[name] = mac
		}
	}
	return macs, nil
}
