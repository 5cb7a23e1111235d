// Capture records what real firmware says on a network when it boots, as
// testdata for the packages below netboot.
//
// The parties are a machine (QEMU) with the firmware of the variant, a DHCP and
// TFTP server that is not ours (dnsmasq), in some variants a second dnsmasq as
// proxy DHCP server with an address of its own, and an HTTP server. All live in
// network namespaces that end with this program. None of it is our encoder:
// what a file holds is what those programs sent.
//
//	go run ./qemu-tests/capture -out netboot/testdata [-only NAME,NAME]
//
// It needs root, and the packages that scripts/setup and the README beside the
// captures name.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// The network: the DHCP server, and the proxy of the variants that have one.
const (
	serverIP = "10.77.0.1"
	proxyIP  = "10.77.0.2"
	bridge   = "br0"
	tap      = "tap0"
)

// linger is for how many seconds more is recorded once all is there: repeats,
// and what follows.
const linger = 3

// inside marks the process that is in the namespace.
const inside = "BCD_CAPTURE_INSIDE"

func main() {
	out := flag.String("out", "netboot/testdata", "folder for the captures")
	only := flag.String("only", "", "names of variants, with commas; all when empty")
	flag.Parse()
	if err := run(*out, *only); err != nil {
		fmt.Fprintln(os.Stderr, "capture:", err)
		os.Exit(1)
	}
}

func run(out, only string) error {
	if os.Getuid() != 0 {
		return errors.New("namespaces and TAP devices need root")
	}
	if os.Getenv(inside) != "" {
		// The process numbers of this namespace, for ip and nsenter.
		if err := errors.Join(syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""), syscall.Mount("proc", "/proc", "proc", 0, "")); err != nil {
			return fmt.Errorf("own /proc: %w", err)
		}
		for _, v := range variants {
			if v.name == only {
				return v.record(out)
			}
		}
		return fmt.Errorf("no variant %q", only)
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	var failed []error
	for _, v := range variants {
		if only != "" && !slices.Contains(strings.Split(only, ","), v.name) {
			continue
		}
		fmt.Println(v.name)
		// A namespace for each variant: it takes its devices with it, and
		// the death of this process kills all that is in it.
		c := exec.Command(self, "-out", out, "-only", v.name)
		c.Env = append(os.Environ(), inside+"=1")
		c.Stdout, c.Stderr = os.Stdout, os.Stderr
		c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWPID | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
		if err := c.Run(); err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", v.name, err))
		}
	}
	return errors.Join(failed...)
}

// record boots the variant until everything that it wants was seen.
func (v variant) record(out string) error {
	dir, err := os.MkdirTemp("", "bcd-capture-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithTimeout(context.Background(), v.limit)
	defer cancel()

	for _, line := range []string{
		"link set lo up",
		"link add " + bridge + " type bridge forward_delay 0",
		"addr add " + serverIP + "/24 dev " + bridge,
		"link set " + bridge + " up",
		"tuntap add dev " + tap + " mode tap",
		"link set " + tap + " master " + bridge + " up",
	} {
		if err := ip(line); err != nil {
			return err
		}
	}
	files := filepath.Join(dir, "files")
	if err := os.Mkdir(files, 0o755); err != nil {
		return err
	}
	if err := v.writeFiles(files); err != nil {
		return err
	}
	go http.ListenAndServe(serverIP+":80", http.FileServer(http.Dir(files)))

	server := append([]string{"--dhcp-range=10.77.0.100,10.77.0.200,255.255.255.0,1h", "--enable-tftp", "--tftp-root=" + files, "--interface=" + bridge}, v.dhcp...)
	if err := dnsmasq(ctx, dir, "dhcp", nil, server); err != nil {
		return err
	}
	if len(v.proxy) > 0 {
		if err := startProxy(ctx, dir, files, v.proxy); err != nil {
			return err
		}
	}

	dump := filepath.Join(dir, "all.pcap")
	args := append(slices.Clone(v.qemu(dir)), "-display", "none", "-nodefaults", "-serial", "file:"+filepath.Join(dir, "console.log"),
		"-netdev", "tap,id=n0,ifname="+tap+",script=no,downscript=no,vnet_hdr=off", "-object", "filter-dump,id=f0,netdev=n0,file="+dump, "-uuid", machineUUID)
	var said strings.Builder
	machine := exec.CommandContext(ctx, v.program, args...)
	machine.Stdout, machine.Stderr = &said, &said
	if err := machine.Start(); err != nil {
		return err
	}
	defer func() { machine.Process.Kill(); machine.Wait() }()

	for complete := 0; ; {
		select {
		case <-ctx.Done():
			raw, _ := os.ReadFile(dump)
			frames, _ := readPcap(raw)
			console, _ := os.ReadFile(filepath.Join(dir, "console.log"))
			return fmt.Errorf("of %v only %v was seen; QEMU said %q; console ends %q", v.wants, kindsOf(frames), said.String(), console[max(0, len(console)-1500):])
		case <-time.After(time.Second):
		}
		raw, err := os.ReadFile(dump)
		if err != nil {
			continue
		}
		frames, err := readPcap(raw)
		if err != nil {
			continue
		}
		seen := kindsOf(frames)
		if !slices.ContainsFunc(v.wants, func(k string) bool { return !slices.Contains(seen, k) }) {
			if complete++; complete < linger {
				continue
			}
			kept := keep(frames)
			fmt.Printf("  %d packets, %v\n", len(kept), seen)
			return writePcap(filepath.Join(out, v.name+".pcap"), kept)
		}
	}
}

func startProxy(ctx context.Context, dir, files string, options []string) error {
	holder := exec.CommandContext(ctx, "unshare", "-n", "sleep", "infinity")
	if err := holder.Start(); err != nil {
		return err
	}
	pid := fmt.Sprint(holder.Process.Pid)
	if err := waitForNamespace(pid); err != nil {
		return err
	}
	for _, line := range []string{
		"link add proxy0 type veth peer name proxy1",
		"link set proxy0 master " + bridge + " up",
		"link set proxy1 netns " + pid,
	} {
		if err := ip(line); err != nil {
			return err
		}
	}
	enter := []string{"nsenter", "-t", pid, "-n"}
	for _, line := range []string{"addr add " + proxyIP + "/24 dev proxy1", "link set proxy1 up", "link set lo up"} {
		if b, err := exec.Command(enter[0], append(slices.Clone(enter[1:]), append([]string{"ip"}, strings.Fields(line)...)...)...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", line, err, b)
		}
	}
	return dnsmasq(ctx, dir, "proxy", enter, append([]string{"--dhcp-range=10.77.0.0,proxy", "--enable-tftp", "--tftp-root=" + files, "--interface=proxy1"}, options...))
}

// waitForNamespace returns when the process has left this one's namespace.
func waitForNamespace(pid string) error {
	ours, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return err
	}
	for range 100 {
		theirs, err := os.Readlink("/proc/" + pid + "/ns/net")
		if err == nil && theirs != ours {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("process %s did not get a network namespace", pid)
}

func dnsmasq(ctx context.Context, dir, name string, enter, options []string) error {
	args := append(slices.Clone(enter), "dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--port=0", "--user=root", "--group=root", "--pid-file=", "--no-resolv", "--no-hosts", "--no-ping",
		"--dhcp-leasefile="+filepath.Join(dir, name+".leases"), "--log-facility="+filepath.Join(dir, name+".log"), "--log-dhcp")
	c := exec.CommandContext(ctx, args[0], append(args[1:], options...)...)
	c.Stderr = os.Stderr
	return c.Start()
}

func ip(line string) error {
	b, err := exec.Command("ip", strings.Fields(line)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", line, err, b)
	}
	return nil
}
