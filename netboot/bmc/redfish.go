package bmc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"time"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// maxRedfish bounds one answer. A ComputerSystem with everything that
	// vendors add is below 64 KiB; a BIOS resource has been seen with 300.
	maxRedfish = 1 << 20
	// maxRedfishHeader bounds an answer's header.
	maxRedfishHeader = 32 << 10
	// requestTime bounds one request; BMCs take seconds, some ten.
	requestTime = 40 * time.Second
	// maxMembers bounds how much of a collection is read.
	maxMembers = 64
	// maxPath bounds the length of a path that a BMC names.
	maxPath = 512
)

// redfish is one session with a Redfish service (DMTF DSP0266), reached at one
// address only.
type redfish struct {
	base   string
	client *http.Client
	pin    *pin

	root struct {
		Vendor  string `json:"Vendor"`
		Systems link   `json:"Systems"`
		Links   struct {
			Sessions link `json:"Sessions"`
		} `json:"Links"`
	}
	// token is the session's; without one, user and password go with each
	// request.
	token   string
	session string
	auth    credentials
	basic   bool

	systemPath string
	// wait waits between two looks.
	wait func(context.Context, time.Duration) error
}

// link is a reference to another resource (DSP0266 section 9.5).
type link struct {
	ID string `json:"@odata.id"`
}

// status is an HTTP answer that is not a success.
type status struct {
	code   int
	method string
	path   string
	text   string
}

func (s *status) Error() string {
	text := fmt.Sprintf("%s %s: %d %s", s.method, s.path, s.code, http.StatusText(s.code))
	if s.text != "" {
		text += ": " + s.text
	}
	return text
}

func isStatus(err error, codes ...int) bool {
	var s *status
	if !errors.As(err, &s) {
		return false
	}
	for _, code := range codes {
		if s.code == code {
			return true
		}
	}
	return false
}

// dialRedfish reads the service root, which needs no login (DSP0266 section
// 13.3.4.2).
func dialRedfish(ctx context.Context, to netip.AddrPort, p *pin, wait func(context.Context, time.Duration) error) (*redfish, error) {
	r := &redfish{base: "https://" + to.String(), pin: p, wait: wait, client: boundedClient(to, p, requestTime)}
	if _, err := r.get(ctx, "/redfish/v1/", &r.root); err != nil {
		r.client.CloseIdleConnections()
		code := "UNREACHABLE"
		if errors.Is(err, errUntrusted) {
			code = "UNTRUSTED_BMC"
		}
		return nil, fail(code, "Redfish at %s: %w", to, err)
	}
	if r.root.Systems.ID == "" {
		r.client.CloseIdleConnections()
		return nil, fail("UNREACHABLE", "Redfish at %s: the service root names no Systems", to)
	}
	return r, nil
}

// boundedClient makes requests to one address: no proxy, no redirect, no name
// that is resolved again.
func boundedClient(to netip.AddrPort, p *pin, each time.Duration) *http.Client {
	return &http.Client{
		Timeout:       each,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			DialContext:            dialer(to),
			TLSClientConfig:        p.config(),
			TLSHandshakeTimeout:    dialTime,
			MaxResponseHeaderBytes: maxRedfishHeader,
			MaxConnsPerHost:        1,
			DisableCompression:     true,
		},
	}
}

// login opens a session (DSP0266 section 13.3.4). A service without sessions
// gets user and password with each request instead.
func (r *redfish) login(ctx context.Context, c credentials, h *hidden) error {
	path := r.root.Links.Sessions.ID
	if path == "" {
		path = "/redfish/v1/SessionService/Sessions"
	}
	body, err := json.Marshal(map[string]string{"UserName": string(c.user), "Password": string(c.password)})
	if err != nil {
		return err
	}
	defer clear(body)
	header, err := r.do(ctx, http.MethodPost, path, "", body, nil)
	switch {
	case err == nil && header.Get("X-Auth-Token") != "":
		r.token = header.Get("X-Auth-Token")
		h.keep([]byte(r.token))
		// The answer names the session to end; one elsewhere is none.
		r.session = localPath(header.Get("Location"), r.base)
		return nil
	case err == nil, isStatus(err, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotImplemented):
		r.basic, r.auth = true, c
		return nil
	case isStatus(err, http.StatusUnauthorized, http.StatusForbidden, http.StatusBadRequest):
		return fail("LOGIN_REFUSED", "the BMC refuses user and password: %w", err)
	}
	return fail("UNREACHABLE", "log in: %w", err)
}

// close implements machine.
func (r *redfish) close(ctx context.Context) {
	if r.session != "" {
		// What fails here ends by the BMC's own time-out.
		_, _ = r.do(ctx, http.MethodDelete, r.session, "", nil, nil)
	}
	r.token, r.session, r.auth = "", "", credentials{}
	r.client.CloseIdleConnections()
}

func (*redfish) protocol() bcdv1.BmcProtocol { return bcdv1.BmcProtocol_BMC_PROTOCOL_REDFISH }

// get reads a resource and gives its ETag, from the header or the body.
func (r *redfish) get(ctx context.Context, path string, into any) (etag string, err error) {
	header, err := r.do(ctx, http.MethodGet, path, "", nil, into)
	if err != nil {
		return "", err
	}
	return header.Get("ETag"), nil
}

// do makes one request; it is never repeated here.
func (r *redfish) do(ctx context.Context, method, path, etag string, body []byte, into any) (http.Header, error) {
	if localPath(path, "") == "" {
		return nil, fmt.Errorf("the BMC names %.80q, which is not a path of its own", path)
	}
	var reader io.Reader
	if body != nil {
		reader = bytes.NewReader(body)
	}
	request, err := http.NewRequestWithContext(ctx, method, r.base+path, reader)
	if err != nil {
		return nil, fmt.Errorf("%s %.80q: %w", method, path, err)
	}
	// The session's own connection, never one that was retried behind our back.
	request.GetBody = nil
	request.Header.Set("Accept", "application/json")
	request.Header.Set("OData-Version", "4.0")
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	if etag != "" {
		request.Header.Set("If-Match", etag)
	}
	if r.token != "" {
		request.Header.Set("X-Auth-Token", r.token)
	} else if r.basic {
		request.SetBasicAuth(string(r.auth.user), string(r.auth.password))
	}
	response, err := r.client.Do(request)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", method, path, err)
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(response.Body, maxRedfish+1))
	if err != nil {
		return nil, fmt.Errorf("%s %s: read the answer: %w", method, path, err)
	}
	if len(raw) > maxRedfish {
		return nil, fmt.Errorf("%s %s: the answer is longer than %d bytes", method, path, maxRedfish)
	}
	if response.StatusCode < 200 || response.StatusCode > 299 {
		return response.Header, &status{response.StatusCode, method, path, extendedInfo(raw)}
	}
	if into != nil {
		if err := decodeJSON(raw, into); err != nil {
			return nil, fmt.Errorf("%s %s: %w", method, path, err)
		}
	}
	return response.Header, nil
}

func (r *redfish) patch(ctx context.Context, path, etag string, body any) error {
	return r.send(ctx, http.MethodPatch, path, etag, body)
}

func (r *redfish) send(ctx context.Context, method, path, etag string, body any) error {
	raw, err := json.Marshal(body)
	if err != nil {
		return err
	}
	_, err = r.do(ctx, method, path, etag, raw, nil)
	return err
}

// localPath gives the path of a reference that stays on this service, "" for
// every other. base may be given in front of it, as some do in Location.
func localPath(reference, base string) string {
	if base != "" {
		reference = strings.TrimPrefix(reference, base)
	}
	if !strings.HasPrefix(reference, "/redfish/") || len(reference) > maxPath || strings.Contains(reference, "..") {
		return ""
	}
	for _, c := range []byte(reference) {
		if c <= ' ' || c >= 0x7f || c == '\\' {
			return ""
		}
	}
	return reference
}

// findSystem chooses the ComputerSystem.
func (r *redfish) findSystem(ctx context.Context, id string) error {
	var systems struct {
		Members []link `json:"Members"`
	}
	if _, err := r.get(ctx, r.root.Systems.ID, &systems); err != nil {
		if isStatus(err, http.StatusUnauthorized, http.StatusForbidden) {
			return fail("LOGIN_REFUSED", "the BMC refuses user and password: %w", err)
		}
		return fail("UNREACHABLE", "systems behind the BMC: %w", err)
	}
	members := systems.Members[:min(len(systems.Members), maxMembers)]
	var ids []string
	for _, m := range members {
		last := lastElement(m.ID)
		if id != "" && last == id || id == "" && len(members) == 1 {
			r.systemPath = m.ID
			return nil
		}
		ids = append(ids, last)
	}
	return fail("NO_SYSTEM", "the BMC has the systems %.256q: name one of them as target.system", ids)
}

func lastElement(path string) string {
	path = strings.TrimRight(path, "/")
	return path[strings.LastIndexByte(path, '/')+1:]
}
