// Package httpboot serves what machines boot over HTTP: UEFI's HTTP boot, iPXE,
// and the ramdisk.
//
// The parties:
//
//   - The client is firmware, iPXE or a ramdisk on the provisioning network. It
//     is not trusted, and neither is anybody else who can connect.
//   - The [Handler] serves files by name, and what the caller mounts: the boot
//     configuration that is posted for, scripts that depend on the query.
//   - The caller says what a name stands for ([Config.Open]) and is told what
//     happens ([Config.Observe]).
//   - [Serve] is the HTTP server around it, with its bounds.
//
// Firmware is easily lost, and each of these has stopped machines somewhere:
// a redirect (so there is no http.ServeMux here, which makes them of doubled
// slashes), an answer without Content-Length, a header with an empty value, a
// connection that is closed between HEAD and GET, a type that is not
// application/efi. Nothing here does any of them.
package httpboot

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/netip"
	"os"
	"path"
	"strings"
	"time"
)

const (
	// maxName is more than any boot URL that DHCP's option 67 can carry.
	maxName = 255
	// maxMessage is the most of an Event's message, in bytes.
	maxMessage = 256
	// sendChunk has to go out within sendWait: a client that takes less than
	// 35 kB/s has stalled, and its connection is wanted by others.
	sendChunk = 1 << 20
	sendWait  = 30 * time.Second
)

// File is what a name stands for.
type File struct {
	// Content has Size bytes. An *os.File is sent by sendfile(2), and must be at
	// nobody else's hands. An io.Closer is closed when the request has ended.
	Content io.ReaderAt
	Size    int64
	// SHA256 is the digest of Content, which is its ETag; none when zero.
	SHA256 [32]byte
	// Type is its media type; by the name's suffix when "".
	Type string
}

// Types of an [Event].
const (
	EventHead    = "http.head"    // HEAD was answered
	EventGet     = "http.get"     // GET, or a mount's method, begins
	EventDone    = "http.done"    // what was asked for was sent in full
	EventAborted = "http.aborted" // the client went away, or the file could not be read
	EventRefused = "http.refused" // the answer was an error: no such file, method or path
)

// Event is something that happened to one request.
type Event struct {
	Type    string
	Message string // at most 256 bytes; what the client sent is quoted in it
	Peer    netip.AddrPort
	Name    string // as Open was asked for it
	Status  int    // of the answer; 0 when it begins
	Size    int64  // of the file, in bytes
	Bytes   int64  // of the body that were sent
}

// Config is what a [Handler] works with.
type Config struct {
	// Open gives the file of a name, which has single slashes and no leading
	// one; a name in capitals that does not exist (fs.ErrNotExist) is asked for
	// once more in lower case. fs.ErrPermission says that this client does not
	// get it; other errors that it cannot be read now. It is called by many
	// goroutines at once.
	Open func(name string, peer netip.AddrPort) (File, error)
	// Mounts are handlers by the exact name they serve, with all methods they
	// care for. What they read of a body ends with an error after [MaxBody]
	// bytes; what they answer is sent with its length, and is at most
	// [MaxMountAnswer] bytes; a redirect is an error.
	Mounts map[string]http.Handler
	// Observe is told of each Event, by many goroutines at once; it must be
	// quick. It may be nil.
	Observe func(Event)
}

// Handler answers requests. Use [New].
type Handler struct{ config Config }

// New makes a handler.
func New(c Config) *Handler {
	if c.Observe == nil {
		c.Observe = func(Event) {}
	}
	return &Handler{config: c}
}

func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	peer, _ := netip.ParseAddrPort(r.RemoteAddr)
	event := Event{Peer: peer}
	name, err := cleanName(r.URL.Path)
	if err != nil {
		h.refuse(w, event, http.StatusBadRequest, err.Error(), nil)
		return
	}
	event.Name = name
	if mount, ok := h.mount(name); ok {
		h.serveMount(w, r, mount, event)
		return
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		h.refuse(w, event, http.StatusMethodNotAllowed, "files are read with GET or HEAD", fmt.Errorf("method %.20q", r.Method))
		return
	}
	if name == "" {
		h.refuse(w, event, http.StatusNotFound, "the path names no file", nil)
		return
	}
	file, err := h.config.Open(name, peer)
	if lower := strings.ToLower(name); errors.Is(err, fs.ErrNotExist) && lower != name {
		event.Name = lower
		file, err = h.config.Open(lower, peer)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		h.refuse(w, event, http.StatusNotFound, "there is no file of this name here", err)
	case errors.Is(err, fs.ErrPermission):
		h.refuse(w, event, http.StatusForbidden, "this file is not for this machine", err)
	case err != nil:
		h.refuse(w, event, http.StatusServiceUnavailable, "the file cannot be read now", err)
	default:
		h.serveFile(w, r, file, event)
	}
}

func (h *Handler) serveFile(w http.ResponseWriter, r *http.Request, file File, event Event) {
	if closer, ok := file.Content.(io.Closer); ok {
		defer closer.Close()
	}
	content, err := seeker(file)
	if err != nil {
		h.refuse(w, event, http.StatusServiceUnavailable, "the file cannot be read now", err)
		return
	}
	event.Size = file.Size
	header := w.Header()
	header.Set("Content-Type", file.Type)
	if file.Type == "" {
		header.Set("Content-Type", typeOf(event.Name))
	}
	if file.SHA256 != [32]byte{} {
		header.Set("ETag", `"`+hex.EncodeToString(file.SHA256[:])+`"`)
	}
	if strings.Contains(r.Header.Get("Range"), ",") {
		// Several ranges would make a multipart answer; a server may ignore them
		// (RFC 9110 section 14.2).
		r.Header.Del("Range")
	}
	if r.Method == http.MethodGet {
		h.observe(event, EventGet, r.Header.Get("Range"))
	}
	counting := &writer{ResponseWriter: w, control: http.NewResponseController(w)}
	http.ServeContent(counting, r, "", time.Time{}, content)
	event.Status, event.Bytes = counting.status, counting.sent
	switch {
	case r.Method == http.MethodHead:
		h.observe(event, EventHead, "")
	case counting.status >= 400:
		h.observe(event, EventRefused, fmt.Sprintf("range %.60q of %d bytes", r.Header.Get("Range"), file.Size))
	case counting.err != nil:
		h.observe(event, EventAborted, counting.err.Error())
	case counting.sent < counting.length():
		h.observe(event, EventAborted, "the file is shorter than it was said to be")
	default:
		h.observe(event, EventDone, "")
	}
}

// seeker gives the content as http.ServeContent wants it: an *os.File as it is,
// so that the kernel can send it.
func seeker(file File) (io.ReadSeeker, error) {
	onDisk, ok := file.Content.(*os.File)
	if !ok {
		return io.NewSectionReader(file.Content, 0, file.Size), nil
	}
	info, err := onDisk.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() != file.Size {
		return nil, fmt.Errorf("%s has %d bytes, not %d", onDisk.Name(), info.Size(), file.Size)
	}
	return onDisk, nil
}

func (h *Handler) refuse(w http.ResponseWriter, event Event, status int, sentence string, err error) {
	body := sentence + "\n"
	header := w.Header()
	header.Set("Content-Type", "text/plain; charset=utf-8")
	header.Set("Content-Length", fmt.Sprint(len(body)))
	w.WriteHeader(status)
	// To a client that has gone nothing can be said.
	_, _ = io.WriteString(w, body)
	event.Status = status
	if err != nil {
		sentence = fmt.Sprintf("%s: %v", sentence, err)
	}
	h.observe(event, EventRefused, sentence)
}

func (h *Handler) observe(e Event, kind, message string) {
	e.Type, e.Message = kind, message[:min(len(message), maxMessage)]
	h.config.Observe(e)
}

// cleanName brings a path to the one form that Open is asked for. Firmware and
// what builds URLs for it write the same file as "/x", "//x", "/./x" and "\x".
func cleanName(urlPath string) (string, error) {
	if len(urlPath) > maxName {
		return "", fmt.Errorf("the path has %d bytes; %d are allowed", len(urlPath), maxName)
	}
	var elements []string
	for element := range strings.SplitSeq(strings.ReplaceAll(urlPath, `\`, "/"), "/") {
		switch element {
		case "", ".":
			continue
		case "..":
			return "", errors.New("the path leads out of what is served")
		}
		elements = append(elements, element)
	}
	for i := range len(urlPath) {
		if urlPath[i] < ' ' || urlPath[i] == 0x7f {
			return "", errors.New("the path has control characters")
		}
	}
	return strings.Join(elements, "/"), nil
}

// typeOf is the media type that firmware goes by (UEFI 2.10 section 24.7.3.1).
func typeOf(name string) string {
	switch strings.ToLower(path.Ext(name)) {
	case ".efi":
		return "application/efi"
	case ".iso":
		return "application/vnd.efi-iso"
	case ".img":
		return "application/vnd.efi-img"
	case ".ipxe", ".txt", ".cfg":
		return "text/plain; charset=utf-8"
	}
	return "application/octet-stream"
}
