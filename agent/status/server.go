package status

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	requestTimeout = 15 * time.Second
	// maxAnswer bounds what a client reads.
	maxAnswer = 4 << 20
)

// Server answers on the socket.
type Server struct {
	// Path of the socket, for example /run/bcd/bcd.sock.
	Path string
	// Version is the daemon's.
	Version string
	// Status makes a snapshot; it must be quick and safe to call at any time.
	Status func(ctx context.Context) *Status
	// Doctor makes a report, any value that marshals to JSON; nil for none.
	Doctor func(ctx context.Context) (any, error)
	Log    *slog.Logger

	// allowed is for tests; nil is root and the daemon's own user.
	allowed func(uid uint32) bool
	// listening is for tests.
	listening func()
}

// Name is the service's.
func (s *Server) Name() string { return "status" }

// Run serves until ctx ends, whose error it returns. A socket that cannot be
// made is logged, and the daemon goes on without one: Run then waits for ctx.
func (s *Server) Run(ctx context.Context) error {
	listener, err := s.listen()
	if err != nil {
		s.Log.Error("no status socket; bcd status and bcd doctor see this daemon only from outside", "path", s.Path, "error", err)
		<-ctx.Done()
		return ctx.Err()
	}
	if s.listening != nil {
		s.listening()
	}
	defer listener.remove()
	server := &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: requestTimeout, WriteTimeout: 2 * requestTimeout,
		MaxHeaderBytes: 8 << 10,
		ErrorLog:       slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug),
		BaseContext:    func(net.Listener) context.Context { return ctx },
	}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	err = server.Serve(listener)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("status socket %s: %w", s.Path, err)
}

// listen binds in a private folder and renames into place: the name is never
// there with another mode than its own, and a stale socket of a daemon that
// was killed is replaced.
func (s *Server) listen() (*checked, error) {
	dir := filepath.Dir(s.Path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return nil, fmt.Errorf("%s is not a folder", dir)
	}
	// Never chmod: a socket_path of /run/x.sock would lock others out of /run.
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return nil, fmt.Errorf("others can enter %s (mode %04o); run chmod 700 %s, or give socket_path a folder of its own", dir, mode, dir)
	}
	if info, err := os.Lstat(s.Path); err == nil && info.Mode()&fs.ModeSocket == 0 {
		return nil, fmt.Errorf("%s is there and is not a socket", s.Path)
	}
	// A daemon that somebody started by mistake must not take this machine's
	// status away from the one that runs.
	if conn, err := net.DialTimeout("unix", s.Path, time.Second); err == nil {
		conn.Close()
		return nil, fmt.Errorf("another daemon answers on %s: is a second bcd running?", s.Path)
	}
	private, err := os.MkdirTemp(dir, ".sock-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(private)
	bound := filepath.Join(private, "s")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: bound, Net: "unix"})
	if err != nil {
		return nil, err
	}
	listener.SetUnlinkOnClose(false)
	var own fs.FileInfo
	if err = os.Chmod(bound, 0o600); err == nil {
		if own, err = os.Lstat(bound); err == nil {
			err = os.Rename(bound, s.Path)
		}
	}
	if err != nil {
		listener.Close()
		return nil, err
	}
	return &checked{Listener: listener, s: s, own: own}, nil
}

// checked lets in only who may.
type checked struct {
	net.Listener
	s   *Server
	own fs.FileInfo
}

// remove takes this socket's name away, and no other's: the listener's own
// clean-up would unlink the name it was bound to.
func (c *checked) remove() {
	if there, err := os.Lstat(c.s.Path); err == nil && os.SameFile(there, c.own) {
		_ = os.Remove(c.s.Path)
	}
}

func (c *checked) Accept() (net.Conn, error) {
	for {
		conn, err := c.Listener.Accept()
		if err != nil {
			return nil, err
		}
		uid, err := peerUID(conn)
		if err == nil && c.s.mayConnect(uid) {
			return conn, nil
		}
		c.s.Log.Warn("status socket: caller refused", "uid", uid, "error", err)
		conn.Close()
	}
}

func (s *Server) mayConnect(uid uint32) bool {
	if s.allowed != nil {
		return s.allowed(uid)
	}
	return uid == 0 || uid == uint32(os.Geteuid())
}

// peerUID asks the kernel who connected (SO_PEERCRED, unix(7)).
func peerUID(conn net.Conn) (uid uint32, err error) {
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return 0, fmt.Errorf("connection is %T", conn)
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, credErr
	}
	return cred.Uid, nil
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, r *http.Request) {
		status := s.Status(r.Context())
		status.Schema = Schema
		answer(w, status, nil)
	})
	mux.HandleFunc("GET /v1/version", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, Version{Schema: Schema, Version: s.Version}, nil)
	})
	mux.HandleFunc("GET /v1/doctor", func(w http.ResponseWriter, r *http.Request) {
		if s.Doctor == nil {
			http.Error(w, "this daemon has no doctor", http.StatusNotFound)
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), requestTimeout)
		defer cancel()
		report, err := s.Doctor(ctx)
		answer(w, report, err)
	})
	return mux
}

func answer(w http.ResponseWriter, v any, err error) {
	var data []byte
	if err == nil {
		data, err = json.Marshal(v)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(data, '\n'))
}

// ErrNotRunning: nobody answers on the socket.
var ErrNotRunning = errors.New("the bcd daemon is not running")

// Client asks a running daemon.
type Client struct{ Path string }

// Status asks for the status. Errors wrap ErrNotRunning, or fs.ErrPermission
// for a caller who is not root.
func (c Client) Status(ctx context.Context) (*Status, error) {
	out := &Status{}
	return out, c.Get(ctx, "/v1/status", out)
}

// Version asks for the version.
func (c Client) Version(ctx context.Context) (*Version, error) {
	out := &Version{}
	return out, c.Get(ctx, "/v1/version", out)
}

// Doctor asks for a report and unmarshals it into out.
func (c Client) Doctor(ctx context.Context, out any) error { return c.Get(ctx, "/v1/doctor", out) }

// Get asks for path and unmarshals the answer into out.
func (c Client) Get(ctx context.Context, path string, out any) error {
	ctx, cancel := context.WithTimeout(ctx, 2*requestTimeout)
	defer cancel()
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "unix", c.Path)
	}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://bcd"+path, nil)
	if err != nil {
		return err
	}
	response, err := (&http.Client{Transport: transport}).Do(request)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("status socket %s: only root may ask: %w", c.Path, fs.ErrPermission)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ECONNREFUSED):
		return fmt.Errorf("%w (nobody answers on %s); start it with systemctl start bcd", ErrNotRunning, c.Path)
	case err != nil:
		return fmt.Errorf("status socket %s: %w", c.Path, err)
	}
	defer response.Body.Close()
	body := http.MaxBytesReader(nil, response.Body, maxAnswer)
	if response.StatusCode != http.StatusOK {
		buffer := make([]byte, 400)
		n, _ := body.Read(buffer)
		return fmt.Errorf("status socket %s: %s: %s", c.Path, response.Status, strings.TrimSpace(clean(string(buffer[:n]))))
	}
	if err := json.NewDecoder(body).Decode(out); err != nil {
		return fmt.Errorf("status socket %s: %w", c.Path, err)
	}
	return nil
}
