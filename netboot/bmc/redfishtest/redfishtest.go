// Package redfishtest is a Redfish service for tests: one machine whose power
// and boot device are calls of the test's, behind a BMC whose habits are
// switches. The habits are those of real ones (netboot-facts.md); what it
// serves has the shape of DMTF's DSP2046 schemas, in the part that bcd uses.
//
// Parties: the test, which owns the machine; the client, which is what is
// tested and is trusted with nothing; and this BMC between them.
package redfishtest

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
)

// Machine is what the BMC is wired to. Its calls come one at a time.
type Machine interface {
	// Power says whether the machine is on.
	Power() bool
	// Reset does what a ResetType says: On, ForceOff, GracefulShutdown,
	// ForceRestart, PowerCycle.
	Reset(resetType string) error
	// Override tells of a new boot override; it is for the next boot where
	// Enabled is "Once".
	Override(b Boot)
}

// Boot is a boot override in Redfish's words.
type Boot struct{ Target, Enabled, Mode, HTTPURI string }

// Quirks are habits. The zero value has none.
type Quirks struct {
	// Vendor is the service root's Vendor and the system's Manufacturer.
	Vendor string
	// ModeInEachPatch forgets BootSourceOverrideMode, for Legacy, unless a
	// PATCH has it (Supermicro).
	ModeInEachPatch bool
	// NoRepeats answers 400 to a PATCH with a member that is so already
	// (Dell).
	NoRepeats bool
	// HTTPDev1URI has the URI of HTTP boot as a BIOS attribute and not in Boot
	// (Dell).
	HTTPDev1URI bool
	// IgnoreOnce accepts a one-time override and does not keep it (iDRAC).
	IgnoreOnce bool
	// RequireETag answers 428 to a PATCH without If-Match.
	RequireETag bool
	// StaleETag answers 412 to the first PATCH.
	StaleETag bool
	// SettingsObject takes the override at a resource of its own, and shows it
	// at the system only after the next reset.
	SettingsObject bool
	// NoSessions has no session service: basic authentication alone.
	NoSessions bool
	// ResetTypes are the allowable values; nil is all five.
	ResetTypes []string
	// ResetTypesInActionInfo lists them in an ActionInfo instead.
	ResetTypesInActionInfo bool
	// LoseAnswer does what a reset asks and closes the connection.
	LoseAnswer bool
	// EchoPassword puts the password that it was given into every text.
	EchoPassword bool
	// TwoSystems shows a second system.
	TwoSystems bool
}

// BMC is the service.
type BMC struct {
	mu       sync.Mutex
	machine  Machine
	quirks   Quirks
	user     string
	password string
	sessions map[string]string // id to token
	boot     Boot
	pending  *Boot
	bios     map[string]string
	version  int
	stale    bool
	requests []string
	patches  []string
}

// New makes a BMC with one account.
func New(m Machine, q Quirks, user, password string) *BMC {
	return &BMC{
		machine: m, quirks: q, user: user, password: password, sessions: map[string]string{}, version: 1, stale: q.StaleETag,
		boot: Boot{Target: "None", Enabled: "Disabled", Mode: "UEFI"},
		bios: map[string]string{"HttpDev1Uri": "", "HttpDev1EnDis": "Disabled"},
	}
}

// Serve serves it over TLS on a loopback port, with a certificate of its own.
// digest is that certificate's SHA-256. The caller closes the server.
func (b *BMC) Serve() (server *httptest.Server, digest []byte) {
	server = httptest.NewUnstartedServer(b)
	server.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
	server.StartTLS()
	sum := sha256.Sum256(server.Certificate().Raw)
	return server, sum[:]
}

// Requests are the method and path of everything that was asked.
func (b *BMC) Requests() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.requests)
}

// Patches are the bodies of every PATCH.
func (b *BMC) Patches() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.patches)
}

// Sessions says how many sessions are open.
func (b *BMC) Sessions() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.sessions)
}

// BIOS gives a pending or current BIOS attribute.
func (b *BMC) BIOS(name string) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.bios[name]
}

// Boot is the override as it stands, also where it is pending.
func (b *BMC) Boot() Boot {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pending != nil {
		return *b.pending
	}
	return b.boot
}

// Booted ends a one-time override: the test calls it when its machine boots.
func (b *BMC) Booted() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pending != nil {
		b.boot, b.pending = *b.pending, nil
	}
	if b.boot.Enabled == "Once" {
		b.boot = Boot{Target: "None", Enabled: "Disabled", Mode: b.boot.Mode}
		b.version++
	}
}

const (
	root     = "/redfish/v1/"
	sessions = root + "SessionService/Sessions"
	systems  = root + "Systems"
	system   = systems + "/1"
	settings = system + "/Settings"
	bios     = system + "/Bios"
	pending  = bios + "/Settings"
	reset    = system + "/Actions/ComputerSystem.Reset"
	info     = system + "/ResetActionInfo"
	nics     = system + "/EthernetInterfaces"
	manager  = root + "Managers/1"
)

// maxBody bounds what a client sends.
const maxBody = 64 << 10

// ServeHTTP implements http.Handler.
func (b *BMC) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
	if err != nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.requests = append(b.requests, r.Method+" "+r.URL.Path)
	if r.URL.Path == root {
		b.answer(w, http.StatusOK, b.serviceRoot(), "")
		return
	}
	if r.URL.Path == sessions && r.Method == http.MethodPost {
		b.login(w, body)
		return
	}
	if !b.authenticated(r) {
		b.refuse(w, http.StatusUnauthorized, "the credentials are not accepted")
		return
	}
	switch r.Method {
	case http.MethodGet:
		b.get(w, r.URL.Path)
	case http.MethodDelete:
		delete(b.sessions, strings.TrimPrefix(r.URL.Path, sessions+"/"))
		w.WriteHeader(http.StatusNoContent)
	case http.MethodPatch:
		b.patches = append(b.patches, string(body))
		b.patch(w, r, body)
	case http.MethodPost:
		b.reset(w, r.URL.Path, body)
	default:
		b.refuse(w, http.StatusMethodNotAllowed, "no such method")
	}
}

type object map[string]any

func ref(path string) object { return object{"@odata.id": path} }

func refs(paths ...string) (all []object) {
	for _, p := range paths {
		all = append(all, ref(p))
	}
	return all
}

func (b *BMC) serviceRoot() object {
	o := object{"@odata.id": root, "RedfishVersion": "1.15.0", "Vendor": b.quirks.Vendor, "Systems": ref(systems)}
	if !b.quirks.NoSessions {
		o["Links"] = object{"Sessions": ref(sessions)}
	}
	return o
}

func (b *BMC) login(w http.ResponseWriter, body []byte) {
	var in struct{ UserName, Password string }
	if b.quirks.NoSessions {
		b.refuse(w, http.StatusNotFound, "there is no session service")
		return
	}
	if json.Unmarshal(body, &in) != nil || !b.account(in.UserName, in.Password) {
		b.refuse(w, http.StatusUnauthorized, "the credentials are not accepted: "+b.echo(in.Password))
		return
	}
	raw := make([]byte, 16)
	_, _ = rand.Read(raw) // never fails (crypto/rand)
	id, token := fmt.Sprint(len(b.requests)), hex.EncodeToString(raw)
	b.sessions[id] = token
	w.Header().Set("X-Auth-Token", token)
	w.Header().Set("Location", sessions+"/"+id)
	b.answer(w, http.StatusCreated, object{"@odata.id": sessions + "/" + id, "Id": id}, "")
}

func (b *BMC) account(user, password string) bool {
	return subtle.ConstantTimeCompare([]byte(user+"\x00"+password), []byte(b.user+"\x00"+b.password)) == 1
}

func (b *BMC) echo(given string) string {
	if b.quirks.EchoPassword {
		return given
	}
	return ""
}

func (b *BMC) authenticated(r *http.Request) bool {
	if user, password, ok := r.BasicAuth(); ok {
		return b.account(user, password)
	}
	token := r.Header.Get("X-Auth-Token")
	for _, t := range b.sessions {
		if token != "" && token == t {
			return true
		}
	}
	return false
}

func (b *BMC) answer(w http.ResponseWriter, code int, o object, etag string) {
	w.Header().Set("Content-Type", "application/json")
	if etag != "" {
		w.Header().Set("ETag", etag)
	}
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(o)
}

func (b *BMC) refuse(w http.ResponseWriter, code int, message string) {
	b.answer(w, code, object{"error": object{"code": "Base.1.8.GeneralError", "message": message, "@Message.ExtendedInfo": []object{
		{"MessageId": "Base.1.8.GeneralError", "Message": message},
	}}}, "")
}
