package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"time"

	"github.com/better-compute/bcd/netboot/httpboot"
	"github.com/better-compute/bcd/netboot/tftp"
	"github.com/better-compute/bcd/netboot/tftp/tftptest"
)

// httpBuffer keeps the client from being what is measured.
const httpBuffer = 256 << 10

// serveOurs serves the files of a folder, as the site appliance does.
func serveOurs(ctx context.Context, protocol, dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	if protocol == "http" {
		listener, err := net.Listen("tcp4", net.JoinHostPort(serverAddr, "80"))
		if err != nil {
			return err
		}
		return httpboot.Serve(ctx, listener, httpboot.New(httpboot.Config{Open: func(name string, _ netip.AddrPort) (httpboot.File, error) {
			f, size, err := open(root, name)
			return httpboot.File{Content: f, Size: size}, err
		}}))
	}
	socket, err := tftp.Listen(netip.AddrPortFrom(netip.MustParseAddr("0.0.0.0"), tftp.Port), "boot0")
	if err != nil {
		return err
	}
	return tftp.New(tftp.Config{Open: func(name string, _ netip.AddrPort) (tftp.File, error) {
		f, size, err := open(root, name)
		return file{f, size}, err
	}}).Serve(ctx, socket)
}

func open(root *os.Root, name string) (*os.File, int64, error) {
	f, err := root.Open(name)
	if err != nil {
		return nil, 0, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, info.Size(), nil
}

type file struct {
	*os.File
	size int64
}

func (f file) Size() int64 { return f.size }

// fetchAll fetches a file by many clients at once, each from its own address,
// and prints how many seconds it took.
func fetchAll(protocol, name string, many, window, times int) error {
	ended := make(chan error, many)
	start := time.Now()
	for i := range many {
		go func() {
			var n int64
			var err error
			if protocol == "http" {
				n, err = fetchHTTP(clientAddr(i), name, times)
			} else {
				n, err = fetchTFTP(clientAddr(i), name, window)
			}
			want := map[string]int64{"file": fileSize, "crowd": crowdSize}[name] * int64(times)
			if err == nil && n != want {
				err = fmt.Errorf("%d bytes came, not %d", n, want)
			}
			ended <- err
		}()
	}
	var all []error
	for range many {
		all = append(all, <-ended)
	}
	fmt.Println(time.Since(start).Seconds())
	return errors.Join(all...)
}

func fetchTFTP(from, name string, window int) (int64, error) {
	conn, err := net.ListenPacket("udp4", net.JoinHostPort(from, "0"))
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	ask := tftptest.Ask{Name: name, Options: []string{"tsize", "0", "blksize", strconv.Itoa(block)}}
	if window > 1 {
		ask.Options = append(ask.Options, "windowsize", strconv.Itoa(window))
	}
	answer, err := tftptest.Fetch(conn, &net.UDPAddr{IP: net.ParseIP(serverAddr), Port: tftp.Port}, ask, io.Discard)
	return answer.Bytes, err
}

func fetchHTTP(from, name string, times int) (int64, error) {
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	transport := &http.Transport{DialContext: dialer.DialContext, DisableCompression: true, ReadBufferSize: httpBuffer}
	defer transport.CloseIdleConnections()
	client := http.Client{Transport: transport}
	buffer := make([]byte, httpBuffer)
	var all int64
	for range times {
		answer, err := client.Get("http://" + serverAddr + "/" + name)
		if err != nil {
			return all, err
		}
		n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, answer.Body, buffer)
		all += n
		if err := errors.Join(err, answer.Body.Close()); err != nil {
			return all, err
		}
		if answer.StatusCode != http.StatusOK {
			return all, errors.New(answer.Status)
		}
	}
	return all, nil
}
