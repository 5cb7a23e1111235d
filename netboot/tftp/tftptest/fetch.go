// Package tftptest is a TFTP client for tests and measurements that can do what
// firmware does and libraries do not: windows (RFC 7440), a probe of the size
// that ends with ERROR 8, and each option in any spelling.
package tftptest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

const (
	// wait is how long the client waits before it says again what it said last.
	wait = 1 * time.Second
	// tries is how often in a row.
	tries = 30
	// maxPacket is the largest there is.
	maxPacket = 65468
)

// Ask is what to fetch, and how.
type Ask struct {
	Name    string
	Options []string // names and values in turn
	// Probe ends the transfer by ERROR 8 when the OACK has come.
	Probe bool
	// Wait replaces the wait of a second.
	Wait time.Duration
}

// Answer is what came.
type Answer struct {
	Options map[string]string // of the OACK, as spelled there
	Order   []string          // its names
	Bytes   int64
	From    net.Addr // that the transfer came from
	Again   int      // DATA packets that came more than once or out of order
}

// Refused is an ERROR packet of the server.
type Refused struct {
	Code    uint16
	Message string
}

func (r *Refused) Error() string { return fmt.Sprintf("error %d: %s", r.Code, r.Message) }

// Fetch fetches a file to out.
func Fetch(conn net.PacketConn, server net.Addr, ask Ask, out io.Writer) (Answer, error) {
	if ask.Wait == 0 {
		ask.Wait = wait
	}
	request := append([]byte{0, 1}, strings.Join(append([]string{ask.Name, "octet"}, ask.Options...), "\x00")+"\x00"...)
	answer := Answer{Options: map[string]string{}}
	block, window := 512, 1
	say, to := request, server
	var have, inWindow int64
	var gap bool
	buffer := make([]byte, maxPacket)
	for silent := 0; ; {
		if say != nil {
			if _, err := conn.WriteTo(say, to); err != nil {
				return answer, err
			}
			if err := conn.SetReadDeadline(time.Now().Add(ask.Wait)); err != nil {
				return answer, err
			}
		}
		say = nil
		n, from, err := conn.ReadFrom(buffer)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if silent++; silent > tries {
				return answer, fmt.Errorf("%s: the server fell silent after block %d", ask.Name, have)
			}
			say = ack(have)
			if answer.From == nil {
				say = request
			}
			inWindow, gap = 0, false
			continue
		} else if err != nil {
			return answer, err
		}
		packet := buffer[:n]
		if n < 4 || answer.From != nil && from.String() != answer.From.String() {
			continue
		}
		switch binary.BigEndian.Uint16(packet) {
		case 5:
			text, _, _ := bytes.Cut(packet[4:], []byte{0})
			return answer, &Refused{binary.BigEndian.Uint16(packet[2:]), string(text)}
		case 6:
			if have > 0 {
				continue
			}
			silent = 0
			answer.From, to, answer.Order = from, from, nil
			fields := strings.Split(strings.TrimSuffix(string(packet[2:]), "\x00"), "\x00")
			for i := 0; i+1 < len(fields); i += 2 {
				answer.Options[fields[i]] = fields[i+1]
				answer.Order = append(answer.Order, fields[i])
				value, _ := strconv.Atoi(fields[i+1])
				switch strings.ToLower(fields[i]) {
				case "blksize":
					block = value
				case "windowsize":
					window = value
				}
			}
			if ask.Probe {
				_, err := conn.WriteTo([]byte("\x00\x05\x00\x08User aborted the transfer\x00"), to)
				return answer, err
			}
			say = ack(0)
		case 3:
			answer.From, to = from, from
			if binary.BigEndian.Uint16(packet[2:]) != uint16(have+1) {
				answer.Again++
				// The first packet behind a gap says where to go on.
				if ahead := int16(binary.BigEndian.Uint16(packet[2:]) - uint16(have)); ahead > 0 && !gap {
					say, inWindow, gap = ack(have), 0, true
				} else if ahead <= 0 && window == 1 {
					say = ack(have) // its acknowledgement was lost
				}
				continue
			}
			silent, gap = 0, false
			have++
			inWindow++
			answer.Bytes += int64(n - 4)
			if _, err := out.Write(packet[4:]); err != nil {
				return answer, err
			}
			if n-4 < block {
				_, err := conn.WriteTo(ack(have), to)
				return answer, err
			}
			if inWindow == int64(window) {
				say, inWindow = ack(have), 0
			}
		}
	}
}

func ack(block int64) []byte { return []byte{0, 4, byte(block >> 8), byte(block)} }
