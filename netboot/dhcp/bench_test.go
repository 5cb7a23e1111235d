package dhcp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

// BenchmarkAnswer is one DISCOVER read and answered, without sockets.
func BenchmarkAnswer(b *testing.B) {
	p := sent{flags: 0x8000, opts: ovmf(discover, 7)}.bytes()
	b.ReportAllocs()
	for b.Loop() {
		c, err := Parse(p, on67(nobody))
		if err != nil {
			b.Fatal(err)
		}
		if _, err := Answer(c, ukiBoot); err != nil {
			b.Fatal(err)
		}
	}
}

const (
	// benchClients ask one after another: more than the rate of one MAC allows,
	// less than are remembered.
	benchClients = 2000
	// benchWindow questions are on their way at once, as when a rack is switched on.
	benchWindow = 32
)

// BenchmarkProxyAnswers asks port 4011 over a veth pair between two namespaces
// and reports answers/s and p99-us, from the question's leaving to the answer's
// coming. It needs root.
func BenchmarkProxyAnswers(b *testing.B) {
	if os.Getenv(insideVariable) == "" {
		ctx, cancel := context.WithTimeout(b.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, "/proc/self/exe", "-test.run=^$", "-test.bench=^BenchmarkProxyAnswers$", "-test.benchtime=1x")
		cmd.Env = append(os.Environ(), insideVariable+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
		out, err := cmd.CombinedOutput()
		if err != nil {
			b.Fatalf("in its namespace: %v\n%s", err, out)
		}
		for _, unit := range []string{"answers/s", "p99-us", "asked-again"} {
			m := regexp.MustCompile(`([0-9.]+) ` + unit).FindSubmatch(out)
			if m == nil {
				b.Fatalf("no %s in:\n%s", unit, out)
			}
			v, err := strconv.ParseFloat(string(m[1]), 64)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(v, unit)
		}
		b.ReportMetric(0, "ns/op")
		return
	}
	lan := newLAN(b)
	lan.plug(-1, "eth0", "10.77.0.2/24")
	clientNS := newNS(b)
	lan.plug(int(clientNS), "cl0", "")
	s := startServer(b, always(ukiBoot))
	s.wait(b, EventServing)
	go func() { // what it tells is not looked at
		for range s.events {
		}
	}()
	var conn *net.UDPConn
	var err error
	inNS(b, clientNS, func() {
		var link netlink.Link
		if link, err = netlink.LinkByName("cl0"); err != nil {
			return
		}
		if err = netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: leased.Addr().AsSlice(), Mask: net.CIDRMask(24, 32)}}); err != nil {
			return
		}
		conn, err = net.DialUDP("udp4", net.UDPAddrFromAddrPort(leased), &net.UDPAddr{IP: ourAddr.AsSlice(), Port: BINLPort})
	})
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()

	asked := make([]time.Time, benchClients)
	took := make([]time.Duration, 0, benchClients)
	answered := make([]bool, benchClients)
	send := func(i int) {
		p := sent{mac: fmt.Sprintf("52540001%04x", i), ciaddr: leased.Addr().String(), opts: ovmf(request, 7)}.bytes()
		binary.BigEndian.PutUint32(p[4:], uint32(i))
		if _, err := conn.Write(p); err != nil {
			b.Fatal(err)
		}
	}
	ask := func(i int) {
		asked[i] = time.Now()
		send(i)
	}
	if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		b.Fatal(err)
	}
	buf := make([]byte, 2000)
	ask(0) // ARP is not what is measured
	if _, err := conn.Read(buf); err != nil {
		b.Fatal(err)
	}
	begin := time.Now()
	next, again := 0, 0
	for ; next < benchWindow; next++ {
		ask(next)
	}
	for len(took) < benchClients {
		// An answer that would be late is not sent, and firmware asks again.
		if err := conn.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
			b.Fatal(err)
		}
		n, err := conn.Read(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) && time.Since(begin) < patience {
			for i := range next {
				if !answered[i] {
					send(i)
					again++
				}
			}
			continue
		}
		if err != nil || n < 300 {
			b.Fatalf("after %d answers: %d bytes, %v", len(took), n, err)
		}
		i := binary.BigEndian.Uint32(buf[4:])
		if answered[i] {
			continue
		}
		answered[i] = true
		took = append(took, time.Since(asked[i]))
		if next < benchClients {
			ask(next)
			next++
		}
	}
	b.ReportMetric(benchClients/time.Since(begin).Seconds(), "answers/s")
	b.ReportMetric(float64(again), "asked-again")
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-us")
}
