// Benchnetboot measures our TFTP and boot HTTP beside dnsmasq, tftpd-hpa and
// nginx: the same file, over the same link, fetched by the same client, in turn.
//
//	go run ./netboot/benchnetboot
//
// It needs root: the link is a veth pair between two network namespaces of its
// own, which are removed at the end. tftpd-hpa and nginx are unpacked into a
// folder and never installed, so that no service is left behind. Each line
// begins with its name; "ratio N.NN" is our throughput over the other's, the
// medians of runs that take turns.
package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	fileSize  = 64 << 20
	crowdSize = 4 << 20 // what each of many clients fetches
	clients   = 200
	// block is what UEFI asks for on Ethernet, and so is window.
	block  = 1468
	window = 4
	// httpTimes is how often one run fetches the file by HTTP, on one connection:
	// once would be over in some 40 ms.
	httpTimes = 16
	// aim is the ratio that is good.
	aim = 1.0

	serverAddr = "10.78.0.1"
	netmask    = "/16"
	// readyWait is for a server to open its port.
	readyWait = 10 * time.Second
)

// clientAddr is the address of the i-th client, from 0.
func clientAddr(i int) string { return fmt.Sprintf("10.78.1.%d", 1+i) }

func main() {
	runs := flag.Int("runs", 5, "runs of each, of which the median counts")
	serve := flag.String("serve", "", "serve the folder -dir as one of our servers: tftp or http (used by itself)")
	fetch := flag.String("fetch", "", "fetch by tftp or http (used by itself)")
	dir := flag.String("dir", "", "the folder to serve")
	name := flag.String("name", "file", "the file to fetch")
	many := flag.Int("clients", 1, "how many fetch at once")
	asked := flag.Int("window", window, "blocks in a window")
	times := flag.Int("times", 1, "how often each fetches the file")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	switch {
	case *serve != "":
		err = serveOurs(ctx, *serve, *dir)
	case *fetch != "":
		err = fetchAll(*fetch, *name, *many, *asked, *times)
	default:
		err = run(ctx, *runs)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "benchnetboot:", err)
		os.Exit(1)
	}
}

// bench is the link and what is served over it.
type bench struct {
	ctx              context.Context
	self             string
	server, client   string // namespaces
	dir, root, peers string
}

func run(ctx context.Context, runs int) (err error) {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "benchnetboot")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	// Workers of nginx and dnsmasq are not root.
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	id := strconv.Itoa(os.Getpid())
	b := &bench{ctx: ctx, self: self, server: "bcd-bench-s" + id, client: "bcd-bench-c" + id,
		dir: dir, root: filepath.Join(dir, "root"), peers: filepath.Join(dir, "peers")}
	if err := b.files(); err != nil {
		return err
	}
	if err := unpackPeers(ctx, b.peers); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.removeLink()) }()
	if err := b.makeLink(); err != nil {
		return err
	}
	fmt.Printf("link       veth between two namespaces, MTU 1500; %d MiB, medians of %d runs in turn\n", fileSize>>20, runs)
	for _, c := range []struct {
		name, ours, theirs string
		window             int
	}{
		{"tftp", "tftp", "dnsmasq", window},
		{"tftp-hpa", "tftp", "tftpd-hpa", window},
		{"tftp-lockstep", "tftp", "dnsmasq", 1},
		{"tftp-lockstep-hpa", "tftp", "tftpd-hpa", 1},
		{"http", "http", "nginx", 0},
	} {
		if err := b.compare(c.name, c.ours, c.theirs, c.window, runs); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	for _, protocol := range []string{"tftp", "http"} {
		if err := b.crowd(protocol); err != nil {
			return fmt.Errorf("%s, %d clients: %w", protocol, clients, err)
		}
	}
	return nil
}

func (b *bench) files() error {
	if err := os.MkdirAll(b.root, 0o755); err != nil {
		return err
	}
	for name, size := range map[string]int64{"file": fileSize, "crowd": crowdSize} {
		f, err := os.Create(filepath.Join(b.root, name))
		if err != nil {
			return err
		}
		_, err = io.CopyN(f, rand.Reader, size)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) makeLink() error {
	steps := [][]string{
		{"netns", "add", b.server},
		{"netns", "add", b.client},
		{"-n", b.server, "link", "add", "boot0", "type", "veth", "peer", "name", "boot0", "netns", b.client},
		{"-n", b.server, "addr", "add", serverAddr + netmask, "dev", "boot0"},
		{"-n", b.server, "link", "set", "lo", "up"},
		{"-n", b.server, "link", "set", "boot0", "up"},
		{"-n", b.client, "link", "set", "boot0", "up"},
	}
	for i := range clients {
		steps = append(steps, []string{"-n", b.client, "addr", "add", clientAddr(i) + netmask, "dev", "boot0"})
	}
	for _, step := range steps {
		if out, err := exec.CommandContext(b.ctx, "ip", step...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s; it needs root", strings.Join(step, " "), err, out)
		}
	}
	return nil
}

func (b *bench) removeLink() error {
	var all []error
	for _, name := range []string{b.server, b.client} {
		if out, err := exec.Command("ip", "netns", "del", name).CombinedOutput(); err != nil {
			all = append(all, fmt.Errorf("ip netns del %s: %w: %s", name, err, out))
		}
	}
	return errors.Join(all...)
}

// start runs a server in its namespace until stop is called.
func (b *bench) start(command *peerCommand) (pid int, stop func() error, err error) {
	cmd := exec.Command("ip", append([]string{"netns", "exec", b.server}, command.arguments...)...)
	cmd.Env = append(os.Environ(), command.environment...)
	var said strings.Builder
	cmd.Stdout, cmd.Stderr = &said, &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return 0, nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	stop = func() error {
		// The group: nginx has a worker of its own.
		if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM); err != nil {
			return fmt.Errorf("%s ended early: %w: %s", command.arguments[0], err, said.String())
		}
		<-ended
		return nil
	}
	deadline := time.Now().Add(readyWait)
	for b.fetch(command.protocol, "crowd") != nil {
		select {
		case err := <-ended:
			return 0, nil, fmt.Errorf("%s: %w: %s", strings.Join(command.arguments, " "), err, said.String())
		case <-time.After(50 * time.Millisecond):
		}
		if time.Now().After(deadline) || b.ctx.Err() != nil {
			return 0, nil, errors.Join(fmt.Errorf("%s does not serve after %v", command.arguments[0], readyWait), b.ctx.Err(), stop())
		}
	}
	return cmd.Process.Pid, stop, nil
}

// fetch has a client in its namespace fetch a file.
func (b *bench) fetch(protocol, name string) error {
	_, err := b.timed(protocol, name, 1, window, 1)
	return err
}

// timed gives the seconds that the fetch took, without the start of its process.
func (b *bench) timed(protocol, name string, many, window, times int) (float64, error) {
	cmd := exec.CommandContext(b.ctx, "ip", "netns", "exec", b.client, b.self, "-fetch", protocol, "-name", name,
		"-clients", strconv.Itoa(many), "-window", strconv.Itoa(window), "-times", strconv.Itoa(times))
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return 0, fmt.Errorf("%w: %s", err, strings.TrimSpace(said.String()))
	}
	return strconv.ParseFloat(strings.TrimSpace(string(out)), 64)
}

// once gives MB/s of one fetch from a server that is started for it.
func (b *bench) once(server string, window int) (rate float64, err error) {
	command := b.command(server)
	_, stop, err := b.start(command)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	times := 1
	if command.protocol == "http" {
		times = httpTimes
	}
	took, err := b.timed(command.protocol, "file", 1, window, times)
	return float64(times) * fileSize / 1e6 / took, err
}

func (b *bench) compare(name, ours, theirs string, window, runs int) error {
	var our, their []float64
	for range runs {
		for _, s := range []struct {
			server string
			rates  *[]float64
		}{{ours, &our}, {theirs, &their}} {
			rate, err := b.once(s.server, window)
			if err != nil {
				return fmt.Errorf("%s: %w", s.server, err)
			}
			*s.rates = append(*s.rates, rate)
		}
	}
	ratio := median(our) / median(their)
	how := fmt.Sprintf(", the file %d times on one connection", httpTimes)
	switch {
	case window > 1:
		how = fmt.Sprintf(", blksize %d and windowsize %d asked", block, window)
	case window == 1:
		how = fmt.Sprintf(", blksize %d and no window asked", block)
	}
	verdict := ""
	if ratio < aim {
		verdict = fmt.Sprintf(" (aim %.1f)", aim)
	}
	fmt.Printf("%-10s ours %.0f MB/s, %s %.0f MB/s%s: ratio %.2f%s\n", name, median(our), theirs, median(their), how, ratio, verdict)
	return nil
}

func median(rates []float64) float64 {
	sorted := slices.SortedFunc(slices.Values(rates), cmp.Compare)
	return sorted[len(sorted)/2]
}

// crowd has many clients fetch at once from one of our servers, twice, and
// compares the memory after the first time with that after the second.
func (b *bench) crowd(protocol string) (err error) {
	pid, stop, err := b.start(b.command(protocol))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	var memory []string
	took := 0.0
	for range 3 {
		rss, err := resident(pid)
		if err != nil {
			return err
		}
		memory = append(memory, fmt.Sprintf("%d MiB", rss>>20))
		if len(memory) == 3 {
			break
		}
		if took, err = b.timed(protocol, "crowd", clients, window, 1); err != nil {
			return err
		}
	}
	fmt.Printf("%-10s %d clients: all finished, %d MiB each in %.1f s, %.0f MB/s in all; memory %s before, %s after, %s after the same again\n",
		protocol, clients, crowdSize>>20, took, clients*crowdSize/1e6/took, memory[0], memory[1], memory[2])
	return nil
}

// resident is the memory of a process in bytes, without the files it maps.
func resident(pid int) (int64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			kib, err := strconv.ParseInt(strings.Fields(value)[0], 10, 64)
			return kib << 10, err
		}
	}
	return 0, errors.New("no RssAnon in the process's status")
}
