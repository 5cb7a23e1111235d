package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
)

// maxCapture bounds a file of testdata.
const maxCapture = 100 << 10

type frame struct {
	sec, usec uint32
	data      []byte
}

// readPcap reads QEMU's filter-dump, which is in the host's byte order. A last
// frame that is still being written is left out.
func readPcap(b []byte) ([]frame, error) {
	if len(b) < 24 || binary.LittleEndian.Uint32(b) != 0xa1b2c3d4 {
		return nil, errors.New("not a little-endian pcap file")
	}
	var frames []frame
	for b = b[24:]; len(b) >= 16; {
		n := binary.LittleEndian.Uint32(b[8:])
		if uint64(len(b)) < 16+uint64(n) {
			break
		}
		frames = append(frames, frame{binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:]), b[16 : 16+n]})
		b = b[16+n:]
	}
	return frames, nil
}

// writePcap writes the frames with the time since the first: a capture made
// again differs in less.
func writePcap(name string, frames []frame) error {
	var b bytes.Buffer
	head := make([]byte, 24)
	binary.LittleEndian.PutUint32(head, 0xa1b2c3d4)
	binary.LittleEndian.PutUint16(head[4:], 2)
	binary.LittleEndian.PutUint16(head[6:], 4)
	binary.LittleEndian.PutUint32(head[16:], 65536)
	binary.LittleEndian.PutUint32(head[20:], 1) // Ethernet
	b.Write(head)
	var zero int64
	for i, f := range frames {
		at := int64(f.sec)*1e6 + int64(f.usec)
		if i == 0 {
			zero = at
		}
		rec := make([]byte, 16)
		binary.LittleEndian.PutUint32(rec, uint32((at-zero)/1e6))
		binary.LittleEndian.PutUint32(rec[4:], uint32((at-zero)%1e6))
		binary.LittleEndian.PutUint32(rec[8:], uint32(len(f.data)))
		binary.LittleEndian.PutUint32(rec[12:], uint32(len(f.data)))
		b.Write(rec)
		b.Write(f.data)
	}
	if b.Len() > maxCapture {
		return fmt.Errorf("%s would have %d bytes, over %d", name, b.Len(), maxCapture)
	}
	return os.WriteFile(name, b.Bytes(), 0o644)
}

// transport gives the IPv4 protocol, ports and payload of a frame.
func transport(f []byte) (proto byte, src, dst uint16, payload []byte, ok bool) {
	if len(f) < 34 || binary.BigEndian.Uint16(f[12:]) != 0x0800 {
		return
	}
	p := f[14:]
	head, total := int(p[0]&15)*4, int(binary.BigEndian.Uint16(p[2:]))
	if head < 20 || total > len(p) || total < head+8 {
		return
	}
	proto, p = p[9], p[head:total]
	src, dst = binary.BigEndian.Uint16(p), binary.BigEndian.Uint16(p[2:])
	switch {
	case proto == 17:
		return proto, src, dst, p[8:], true
	case proto == 6 && len(p) >= 20 && int(p[12]>>4)*4 <= len(p):
		return proto, src, dst, p[p[12]>>4*4:], true
	}
	return
}

// maxTransfer is how many packets of TFTP transfers are kept: each kind of
// packet is among them.
const maxTransfer = 40

// keep leaves out what is no DHCP, TFTP or HTTP, and the rest of long
// transfers but for errors.
func keep(frames []frame) []frame {
	var kept []frame
	transfers := 0
	for _, f := range frames {
		proto, src, dst, _, ok := transport(f.data)
		if !ok {
			continue
		}
		if proto == 17 && src != 67 && dst != 67 && src != 4011 && dst != 4011 && dst != 69 {
			if transfers++; transfers > maxTransfer && kindOf(f.data) != "tftp.error" {
				continue
			}
		}
		kept = append(kept, f)
	}
	return kept
}

// kindsOf names what the machine has sent.
func kindsOf(frames []frame) []string {
	var kinds []string
	for _, f := range frames {
		kind := kindOf(f.data)
		if kind == "dhcp.discover" && slices.Contains(kinds, "tftp.ack") {
			kind = "dhcp.again"
		}
		if kind != "" && !slices.Contains(kinds, kind) {
			kinds = append(kinds, kind)
		}
	}
	return kinds
}

func kindOf(f []byte) string {
	proto, src, dst, p, ok := transport(f)
	switch {
	case !ok:
	case proto == 6 && dst == 80 && bytes.HasPrefix(p, []byte("GET ")):
		return "http.get"
	case proto == 6 && dst == 80 && bytes.HasPrefix(p, []byte("HEAD ")):
		return "http.head"
	case proto == 17 && dst == 67:
		switch messageType(p) {
		case 1:
			return "dhcp.discover"
		case 3:
			return "dhcp.request"
		}
	case proto == 17 && dst == 4011:
		return "dhcp.4011"
	case proto == 17 && src == 4011:
		return "dhcp.4011-ack"
	case proto == 17 && dst == 69 && len(p) > 2 && p[1] == 1:
		return "tftp.rrq"
	case proto == 17 && bytes.Equal(f[6:12], machineAddress) && len(p) >= 4 && p[0] == 0 && p[1] == 5:
		return "tftp.error"
	case proto == 17 && bytes.Equal(f[6:12], machineAddress) && len(p) == 4 && p[0] == 0 && p[1] == 4 && (p[2]|p[3]) != 0:
		return "tftp.ack"
	}
	return ""
}

// messageType gives DHCP option 53.
func messageType(p []byte) byte {
	for i := 240; i+2 < len(p); {
		switch p[i] {
		case 0:
			i++
			continue
		case 53:
			return p[i+2]
		}
		i += 2 + int(p[i+1])
	}
	return 0
}
