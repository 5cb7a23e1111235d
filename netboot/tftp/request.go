package tftp

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
)

// Operation codes (RFC 1350 section 5, RFC 2347).
const (
	opRead  = 1
	opWrite = 2
	opData  = 3
	opAck   = 4
	opError = 5
	opOACK  = 6
)

// Error codes (RFC 1350 section 5, RFC 2347).
const (
	codeUndefined = 0
	codeNotFound  = 1
	codeAccess    = 2
	codeIllegal   = 4
	codeOption    = 8
)

const (
	// maxRequest is the largest request there is (RFC 2347, "Packet Formats").
	maxRequest = 512
	// maxName is more than any name that DHCP's option 67 can carry.
	maxName = 255

	defaultBlock = 512 // RFC 1350 section 2
	// Block sizes that may be agreed (RFC 2348). Less than minBlock is no block
	// size, and the option is then as if it were not there.
	minBlock = 8
	maxBlock = 65464
	// maxWindow is as many blocks as we send without an answer: past it the
	// receive buffers of firmware overflow, and nothing is gained on a LAN.
	maxWindow = 64
	// maxWindowBytes keeps a transfer's buffer, which holds one window, small:
	// all sessions there may be use 32 MiB at the most.
	maxWindowBytes = 64 << 10
)

// refusal is an answer that is an ERROR packet.
type refusal struct {
	code    uint16
	message string
}

func (r *refusal) Error() string { return r.message }

// request is a read request as it was sent.
type request struct {
	name    string
	options []option // in the client's order
}

type option struct{ name, value string }

// parseRequest reads a first packet. What is no request at all gives an error
// that is not a *refusal, and is to be dropped without an answer.
func parseRequest(packet []byte) (request, error) {
	if len(packet) < 2 || len(packet) > maxRequest {
		return request{}, fmt.Errorf("%d bytes are no request", len(packet))
	}
	switch op := int(packet[0])<<8 | int(packet[1]); op {
	case opRead:
	case opWrite:
		return request{}, &refusal{codeAccess, "this server is read-only"}
	default:
		return request{}, fmt.Errorf("operation %d does not begin a transfer", op)
	}
	fields := bytes.Split(packet[2:], []byte{0})
	// The last field ends with a NUL as well, so that Split gives an empty rest.
	if last := fields[len(fields)-1]; len(last) > 0 || len(fields) < 3 {
		return request{}, &refusal{codeIllegal, "a request is a name and a mode, each ended by a NUL"}
	}
	fields = fields[:len(fields)-1]
	if mode := string(fields[1]); !strings.EqualFold(mode, "octet") {
		return request{}, &refusal{codeIllegal, fmt.Sprintf("mode %.16q is not served; ask for octet", mode)}
	}
	name, err := cleanName(string(fields[0]))
	if err != nil {
		return request{}, err
	}
	r := request{name: name}
	// A name without a value ends the options: some firmware pads with NULs.
	for rest := fields[2:]; len(rest) >= 2 && len(rest[0]) > 0; rest = rest[2:] {
		r.options = append(r.options, option{string(rest[0]), string(rest[1])})
	}
	return r, nil
}

// cleanName brings a name to the one form that Open is asked for: elements
// divided by single slashes, none leading. Firmware writes the same file as
// "x.efi", "/x.efi", "//x.efi" and "\x.efi".
func cleanName(name string) (string, error) {
	if len(name) > maxName {
		return "", &refusal{codeAccess, fmt.Sprintf("the name has %d bytes; %d are allowed", len(name), maxName)}
	}
	var elements []string
	for element := range strings.SplitSeq(strings.ReplaceAll(name, `\`, "/"), "/") {
		switch element {
		case "", ".":
			continue
		case "..":
			return "", &refusal{codeAccess, "the name leads out of what is served"}
		}
		elements = append(elements, element)
	}
	if len(elements) == 0 {
		return "", &refusal{codeNotFound, "the request names no file"}
	}
	for i := range len(name) {
		if name[i] < ' ' || name[i] == 0x7f {
			return "", &refusal{codeAccess, "the name has control characters"}
		}
	}
	return strings.Join(elements, "/"), nil
}

// open tries the name as it was written and then in lower case: firmware that
// takes names from FAT asks in capitals.
func open(openFile func(string) (File, error), name string) (File, error) {
	file, err := openFile(name)
	if lower := strings.ToLower(name); errors.Is(err, fs.ErrNotExist) && lower != name {
		return openFile(lower)
	}
	return file, err
}

// terms are what client and server have agreed on.
type terms struct {
	block   int
	window  int // blocks
	timeout int // seconds; 0 when the client named none
	oack    []byte
}

// negotiate answers the options with an OACK that names only what was asked, in
// the client's spelling; oack is nil when there is nothing to agree on, and the
// transfer then begins with DATA. maxData is the largest block that fits the
// link.
func negotiate(options []option, size int64, maxData int) terms {
	t := terms{block: defaultBlock, window: 1}
	var oack []byte
	seen := make(map[string]bool, 4)
	accept := func(o option, value int64) {
		if oack == nil {
			oack = []byte{0, opOACK}
		}
		oack = append(append(oack, o.name...), 0)
		oack = append(strconv.AppendInt(oack, value, 10), 0)
	}
	window := option{}
	for _, o := range options {
		name := strings.ToLower(o.name)
		if seen[name] {
			continue
		}
		n, err := strconv.ParseInt(o.value, 10, 64)
		if err != nil || n < 0 {
			continue
		}
		switch name {
		case "blksize": // RFC 2348
			if n < minBlock {
				continue
			}
			t.block = int(min(n, int64(maxData), maxBlock))
			accept(o, int64(t.block))
		case "tsize": // RFC 2349
			accept(o, size)
		case "timeout": // RFC 2349: one to 255 seconds, as asked or not at all
			if n < 1 || n > 255 {
				continue
			}
			t.timeout = int(n)
			accept(o, n)
		case "windowsize": // RFC 7440
			if n < 1 || n > 65535 {
				continue
			}
			t.window, window = int(min(n, maxWindow)), o
		default:
			continue
		}
		seen[name] = true
	}
	// Last, because the bound depends on the block size, which may come later.
	if window.name != "" {
		t.window = max(1, min(t.window, maxWindowBytes/t.block))
		accept(window, int64(t.window))
	}
	t.oack = oack
	return t
}

// errorPacket is an ERROR with a message of at most 256 bytes.
func errorPacket(code uint16, message string) []byte {
	p := append([]byte{0, opError, byte(code >> 8), byte(code)}, shorten(message)...)
	return append(p, 0)
}
