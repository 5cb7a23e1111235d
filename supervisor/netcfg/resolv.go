package netcfg

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// resolvConf is resolv.conf(5) for leases in the order of their interfaces:
// three servers and six search domains at most, as its readers take no more.
func resolvConf(leases []Lease) []byte {
	var servers []netip.Addr
	var domains []string
	for _, l := range leases {
		for _, s := range l.DNS {
			if !slices.Contains(servers, s) && len(servers) < 3 {
				servers = append(servers, s)
			}
		}
		for _, d := range l.Search {
			if !slices.Contains(domains, d) && len(domains) < maxSearch {
				domains = append(domains, d)
			}
		}
	}
	var b bytes.Buffer
	b.WriteString("# written by bcd from its DHCP leases\n")
	if len(domains) > 0 {
		fmt.Fprintf(&b, "search %s\n", strings.Join(domains, " "))
	}
	for _, s := range servers {
		fmt.Fprintf(&b, "nameserver %s\n", s)
	}
	return b.Bytes()
}

// replaceFile makes path hold data, at once or not at all. It lies in RAM, where
// there is nothing to sync.
func replaceFile(path string, data []byte) error {
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, data) {
		return nil
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".resolv-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer os.Remove(f.Name()) // of no effect once it has its name
	_, err = f.Write(data)
	if err := errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
