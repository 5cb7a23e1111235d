package httpboot

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"
)

// pipes is a listener in memory.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	select {
	case <-p.closed:
	default:
		close(p.closed)
	}
	return nil
}

func (p *pipes) Addr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.MustParseAddrPort("10.0.0.1:80"))
}

// from is a connection that says where it comes from.
type from struct {
	net.Conn
	addr string
}

func (f from) RemoteAddr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(f.addr))
}

func (p *pipes) dial(addr string) net.Conn {
	client, server := net.Pipe()
	p.conns <- from{server, addr}
	return client
}

// inBubble serves in a bubble whose time is its own.
func inBubble(t *testing.T, test func(t *testing.T, x *world, p *pipes)) {
	synctest.Test(t, func(t *testing.T) {
		x := newWorld(t)
		p := &pipes{conns: make(chan net.Conn), closed: make(chan struct{})}
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan error)
		go func() { ended <- Serve(ctx, p, x.handler) }()
		test(t, x, p)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		// net/http lingers for half a second where it answered before it had
		// read all; time of the bubble.
		time.Sleep(time.Second)
	})
}

// closedAfter is how long the server keeps the connection from now on.
func closedAfter(t *testing.T, conn net.Conn) time.Duration {
	t.Helper()
	start := time.Now()
	if err := conn.SetReadDeadline(start.Add(time.Hour)); errors.Is(err, io.ErrClosedPipe) {
		return 0
	} else if err != nil {
		t.Fatal(err)
	}
	// It may say 408 before it closes.
	if _, err := io.Copy(io.Discard, conn); err != nil {
		t.Fatal(err)
	}
	return time.Since(start)
}

// TestSlowClients: a header that never ends, a body that never comes, and a
// reader that has stopped each end with their connection.
func TestSlowClients(t *testing.T) {
	inBubble(t, func(t *testing.T, x *world, p *pipes) {
		slow := p.dial("10.0.0.9:1")
		io.WriteString(slow, "GET /bcd.efi HTTP/1.1\r\nHost: ")
		if took := closedAfter(t, slow); took > headerWait {
			t.Errorf("half a header was kept for %v", took)
		}

		post := p.dial("10.0.0.9:2")
		io.WriteString(post, "POST /boot/config HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nabc")
		if took := closedAfter(t, post); took > bodyWait+sendWait {
			t.Errorf("a request without its body was kept for %v", took)
		}

		idle := p.dial("10.0.0.9:3")
		io.WriteString(idle, "HEAD /bcd.efi HTTP/1.1\r\nHost: a\r\n\r\n")
		in := bufio.NewReader(idle)
		answer, err := http.ReadResponse(in, &http.Request{Method: "HEAD"})
		if err != nil || answer.StatusCode != 200 {
			t.Fatal(err)
		}
		time.Sleep(idleWait - time.Second) // of the bubble
		io.WriteString(idle, "GET /initramfs HTTP/1.1\r\nHost: a\r\n\r\n")
		if answer, err = http.ReadResponse(in, nil); err != nil || answer.StatusCode != 200 {
			t.Fatalf("a GET long after its HEAD: %v", err)
		}
		if _, err := io.ReadAll(answer.Body); err != nil {
			t.Fatal(err)
		}
		idle.Close()

		stalled := p.dial("10.0.0.9:4")
		io.WriteString(stalled, "GET /bcd.efi HTTP/1.1\r\nHost: a\r\n\r\n")
		time.Sleep(sendWait + time.Second)
		synctest.Wait()
		x.mu.Lock()
		last := x.events[len(x.events)-1]
		x.mu.Unlock()
		if last.Type != EventAborted || last.Bytes >= last.Size {
			t.Errorf("a reader that has stopped: %+v", last)
		}
		stalled.Close()
	})
}

// TestOneMachineCannotTakeAll: what one address opens above its bound is closed
// at once, others are served, and what was closed counts no more.
func TestOneMachineCannotTakeAll(t *testing.T) {
	inBubble(t, func(t *testing.T, x *world, p *pipes) {
		var conns []net.Conn
		for range maxPerPeer {
			conns = append(conns, p.dial("10.0.0.9:1"))
		}
		if took := closedAfter(t, p.dial("10.0.0.9:1")); took != 0 {
			t.Errorf("one too many was kept for %v", took)
		}
		get := func(addr string) {
			t.Helper()
			conn := p.dial(addr)
			defer conn.Close()
			io.WriteString(conn, "GET /initramfs HTTP/1.1\r\nHost: a\r\n\r\n")
			if answer, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil || answer.StatusCode != 200 {
				t.Errorf("%s: %v", addr, err)
			}
		}
		get("10.0.0.10:1")
		for _, c := range conns {
			c.Close()
		}
		synctest.Wait()
		get("10.0.0.9:1")
	})
}

func TestHeaderIsBounded(t *testing.T) {
	inBubble(t, func(t *testing.T, x *world, p *pipes) {
		conn := p.dial("10.0.0.9:1")
		go func() {
			io.WriteString(conn, "GET / HTTP/1.1\r\nHost: a\r\n")
			for range 1000 {
				if _, err := io.WriteString(conn, "X-A: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n"); err != nil {
					return
				}
			}
		}()
		answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || answer.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
			t.Errorf("%v", err)
		}
		conn.Close()
	})
}
