package rig

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"time"
)

// LANCapture is the name of a LAN's capture in its folder.
const LANCapture = "lan.pcap"

const (
	// maxFrame is the longest frame: a whole IPv4 packet with segmentation
	// left to the device, its header and a VLAN tag.
	maxFrame = 65535 + headerLength + 4
	// snapLength is how much of a frame a capture keeps: headers, and DHCP.
	snapLength = 600
	// maxLANCapture bounds a capture: below what keepLogs takes for a disk image.
	maxLANCapture = 32 << 20
)

// stream is QEMU's side of "-netdev stream": each frame comes after its length
// as four bytes, most significant first.
type stream struct {
	conn io.ReadWriteCloser
	in   *bufio.Reader
	buf  []byte
}

func newStream(conn io.ReadWriteCloser) *stream {
	return &stream{conn: conn, in: bufio.NewReaderSize(conn, 64<<10), buf: make([]byte, maxFrame)}
}

func (s *stream) readFrame() ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(s.in, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > maxFrame {
		return nil, fmt.Errorf("a frame of %d bytes, over %d", n, maxFrame)
	}
	if _, err := io.ReadFull(s.in, s.buf[:n]); err != nil {
		return nil, err
	}
	return s.buf[:n], nil
}

func (s *stream) writeFrame(frame []byte) error {
	_, err := s.conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(frame))), frame...))
	return err
}

func (s *stream) Close() error { return s.conn.Close() }

// tapWire is a TAP device's file: a read or write is one frame.
type tapWire struct {
	file *os.File
	buf  []byte
}

func (w *tapWire) readFrame() ([]byte, error) {
	n, err := w.file.Read(w.buf)
	return w.buf[:n], err
}

func (w *tapWire) writeFrame(frame []byte) error {
	_, err := w.file.Write(frame)
	return err
}

func (w *tapWire) Close() error { return w.file.Close() }

// capture is a pcap file of Ethernet frames, bounded.
type capture struct {
	file *os.File
	size int
}

func newCapture(name string) (*capture, error) {
	f, err := os.Create(name)
	if err != nil {
		return nil, err
	}
	head := binary.LittleEndian.AppendUint32(nil, 0xa1b2c3d4) // microseconds
	head = binary.LittleEndian.AppendUint16(head, 2)
	head = binary.LittleEndian.AppendUint16(head, 4)
	head = append(head, make([]byte, 8)...)
	head = binary.LittleEndian.AppendUint32(head, snapLength)
	head = binary.LittleEndian.AppendUint32(head, 1) // Ethernet
	if _, err := f.Write(head); err != nil {
		f.Close()
		return nil, err
	}
	return &capture{file: f, size: len(head)}, nil
}

// add writes a frame down. A capture that cannot be written is no reason to
// stop a LAN: it ends there, as it does when it is full.
func (c *capture) add(frame []byte, at time.Time) {
	kept := frame[:min(len(frame), snapLength)]
	if c.size+16+len(kept) > maxLANCapture {
		return
	}
	rec := binary.LittleEndian.AppendUint32(nil, uint32(at.Unix()))
	rec = binary.LittleEndian.AppendUint32(rec, uint32(at.Nanosecond()/1000))
	rec = binary.LittleEndian.AppendUint32(rec, uint32(len(kept)))
	rec = binary.LittleEndian.AppendUint32(rec, uint32(len(frame)))
	if _, err := c.file.Write(append(rec, kept...)); err != nil {
		c.size = maxLANCapture
		return
	}
	c.size += 16 + len(kept)
}

func (c *capture) Close() error { return c.file.Close() }
