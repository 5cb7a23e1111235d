package httpboot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"
)

const (
	// maxConnections is more machines than a provisioning LAN powers on at once;
	// further ones wait to be accepted.
	maxConnections = 1024
	// maxPerPeer is more than firmware, iPXE and a ramdisk with a resumed
	// download open; one more is closed at once, so that one machine cannot take
	// all connections.
	maxPerPeer = 32
	// maxHeader is what a request's header may have, in bytes.
	maxHeader = 8 << 10
	// headerWait is for a request's header to come, from its first byte.
	headerWait = 10 * time.Second
	// bodyWait is for all of a request, which has at most [MaxBody] bytes.
	bodyWait = 30 * time.Second
	// idleWait keeps a connection for the GET that follows a HEAD, also where
	// firmware shows a menu in between.
	idleWait = 2 * time.Minute
)

// Serve answers what comes to the listener until ctx ends, and closes it with
// all its connections. The error is nil when ctx ended it. A mount has 30 s to
// answer.
func Serve(ctx context.Context, listener net.Listener, handler *Handler) error {
	server := &http.Server{
		Handler:                      handler,
		MaxHeaderBytes:               maxHeader,
		ReadHeaderTimeout:            headerWait,
		ReadTimeout:                  bodyWait,
		WriteTimeout:                 sendWait,
		IdleTimeout:                  idleWait,
		DisableGeneralOptionsHandler: true,
		// What it would say is what clients do to it; the trace has it.
		ErrorLog:    log.New(io.Discard, "", 0),
		BaseContext: func(net.Listener) context.Context { return ctx },
	}
	stop := context.AfterFunc(ctx, func() { server.Close() })
	defer stop()
	defer server.Close()
	bounded := &bounded{Listener: listener, free: make(chan struct{}, maxConnections), closed: make(chan struct{}), peers: make(map[netip.Addr]int)}
	err := server.Serve(bounded)
	if ctx.Err() != nil && errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("boot HTTP on %s: %w", listener.Addr(), err)
}

// bounded is a listener with bounds on its open connections.
type bounded struct {
	net.Listener
	free   chan struct{} // one element for each that is open
	closed chan struct{}
	once   sync.Once

	mu    sync.Mutex
	peers map[netip.Addr]int
}

func (b *bounded) Close() error {
	b.once.Do(func() { close(b.closed) })
	return b.Listener.Close()
}

func (b *bounded) Accept() (net.Conn, error) {
	select {
	case b.free <- struct{}{}:
	case <-b.closed:
		return nil, net.ErrClosed
	}
	for {
		conn, err := b.Listener.Accept()
		if err != nil {
			<-b.free
			return nil, err
		}
		peer, _ := netip.ParseAddrPort(conn.RemoteAddr().String())
		if !b.admit(peer.Addr()) {
			conn.Close()
			continue
		}
		release := sync.OnceFunc(func() { b.release(peer.Addr()) })
		if tcp, ok := conn.(*net.TCPConn); ok {
			return tcpConn{tcp, release}, nil
		}
		return otherConn{conn, release}, nil
	}
}

func (b *bounded) admit(peer netip.Addr) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.peers[peer] >= maxPerPeer {
		return false
	}
	b.peers[peer]++
	return true
}

func (b *bounded) release(peer netip.Addr) {
	b.mu.Lock()
	if b.peers[peer]--; b.peers[peer] <= 0 {
		delete(b.peers, peer)
	}
	b.mu.Unlock()
	<-b.free
}

// tcpConn embeds the TCP connection itself, whose ReadFrom is sendfile(2).
type tcpConn struct {
	*net.TCPConn
	release func()
}

func (c tcpConn) Close() error {
	defer c.release()
	return c.TCPConn.Close()
}

type otherConn struct {
	net.Conn
	release func()
}

func (c otherConn) Close() error {
	defer c.release()
	return c.Conn.Close()
}
