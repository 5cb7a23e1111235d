package bmc

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/bcd/agent/clock"
	"github.com/better-compute/bcd/agent/dispatch"
	"github.com/better-compute/bcd/agent/secret"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/netboot/bmc/redfishtest"
)

const (
	user = "root"
	// canary must appear nowhere. It has what JSON escapes, and fits IPMI.
	canary = `cAn"ry<9&7xQ`
)

var loopback = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}

// quick is a clock on which every wait is over at once.
type quick struct {
	mu  sync.Mutex
	now time.Time
}

func (q *quick) Now() time.Time {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.now
}

type quickTimer struct{ c chan time.Time }

func (t quickTimer) C() <-chan time.Time      { return t.c }
func (quickTimer) Reset(d time.Duration) bool { return false }
func (quickTimer) Stop() bool                 { return true }

func (q *quick) NewTimer(d time.Duration) clock.Timer {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.now = q.now.Add(d)
	t := quickTimer{make(chan time.Time, 1)}
	t.c <- q.now
	return t
}

// secrets answers from a map.
type secrets struct {
	registry secret.Registry
	values   map[string]string
}

func (s *secrets) Fetch(_ context.Context, reference, _ string) (*secret.Value, error) {
	v, ok := s.values[reference]
	if !ok {
		return nil, errors.New("there is no such secret")
	}
	return s.registry.New([]byte(v))
}

// alive says how many secret values were not destroyed.
func (s *secrets) alive() (n int) {
	s.registry.View(func(needles [][]byte) { n = len(needles) })
	return n
}

// world is a site with its executors.
type world struct {
	t         *testing.T
	secrets   *secrets
	executors map[string]dispatch.Executor
	phases    []string
	due       error
	deadline  time.Time
}

func newWorld(t *testing.T, change func(*Options)) *world {
	w := &world{t: t, secrets: &secrets{values: map[string]string{"bmc/1": user + ":" + canary}}, executors: map[string]dispatch.Executor{}}
	o := Options{Networks: loopback, Secrets: w.secrets, Registry: &w.secrets.registry, Clock: &quick{now: time.Unix(1e9, 0)}, Now: time.Now}
	if change != nil {
		change(&o)
	}
	all, err := Executors(o)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range all {
		w.executors[x.Kind()] = x
	}
	t.Cleanup(func() {
		if n := w.secrets.alive(); n != 0 {
			t.Errorf("%d secret values were not destroyed", n)
		}
	})
	return w
}

func (w *world) command(kind string, body proto.Message) dispatch.Command {
	raw, err := proto.Marshal(body)
	if err != nil {
		w.t.Fatal(err)
	}
	return dispatch.Command{ID: "cmd_1", Kind: kind, Body: raw, Deadline: w.deadline, StillDue: func() error { return w.due }}
}

// run runs a command and looks for the canary in everything that comes out.
func (w *world) run(kind string, body proto.Message) (dispatch.Result, *dispatch.Failure) {
	w.t.Helper()
	w.phases = nil
	result, err := w.executors[kind].Run(w.t.Context(), w.command(kind, body), func(m proto.Message) {
		w.phases = append(w.phases, m.(*bcdv1.BmcProgress).GetPhase())
	})
	var failure *dispatch.Failure
	texts := []string{result.Message, strings.Join(w.phases, "\n")}
	if err != nil {
		if !errors.As(err, &failure) {
			failure = &dispatch.Failure{Code: "PLAIN", Message: err.Error(), Err: err}
		}
		texts = append(texts, err.Error())
		for inner := err; inner != nil; inner = errors.Unwrap(inner) {
			texts = append(texts, inner.Error())
		}
		if failure.Body != nil {
			texts = append(texts, protojson.Format(failure.Body))
		}
	}
	if result.Body != nil {
		raw, _ := proto.Marshal(result.Body)
		texts = append(texts, protojson.Format(result.Body), string(raw))
	}
	for _, text := range texts {
		if strings.Contains(text, canary) || strings.Contains(text, `cAn\"ry`) {
			w.t.Errorf("the password is in %q", text)
		}
	}
	return result, failure
}

func (w *world) power(target *bcdv1.BmcTarget, action bcdv1.BmcPowerAction) (*bcdv1.BmcPowerResult, *dispatch.Failure) {
	w.t.Helper()
	result, failure := w.run(PowerKind, &bcdv1.BmcPower{Target: target, Action: action})
	r, _ := result.Body.(*bcdv1.BmcPowerResult)
	return r, failure
}

// wantCode fails the test unless f has the code and the words.
func wantCode(t *testing.T, f *dispatch.Failure, code string, words ...string) {
	t.Helper()
	if f == nil {
		t.Fatalf("succeeded; want %s", code)
	}
	if f.Code != code {
		t.Fatalf("%s: %s; want %s", f.Code, f.Message, code)
	}
	for _, word := range words {
		if !strings.Contains(f.Message, word) {
			t.Errorf("%q does not say %q", f.Message, word)
		}
	}
}

// machineUnderTest is on or off, and remembers what was done to it.
type machineUnderTest struct {
	mu     sync.Mutex
	isOn   bool
	resets []string
	boots  []redfishtest.Boot
	refuse error
	stuck  bool
}

func (m *machineUnderTest) Power() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.isOn
}

func (m *machineUnderTest) Reset(kind string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.refuse != nil {
		return m.refuse
	}
	m.resets = append(m.resets, kind)
	if m.stuck {
		return nil
	}
	m.isOn = kind != "ForceOff" && kind != "GracefulShutdown"
	return nil
}

func (m *machineUnderTest) Override(b redfishtest.Boot) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.boots = append(m.boots, b)
}

// redfishWorld is a world with one Redfish BMC.
func redfishWorld(t *testing.T, q redfishtest.Quirks, m *machineUnderTest) (*world, *redfishtest.BMC, *bcdv1.BmcTarget) {
	b := redfishtest.New(m, q, user, canary)
	server, digest := b.Serve()
	t.Cleanup(server.Close)
	w := newWorld(t, nil)
	t.Cleanup(func() {
		if n := b.Sessions(); n != 0 {
			t.Errorf("%d sessions were left open on the BMC", n)
		}
	})
	return w, b, &bcdv1.BmcTarget{Address: server.Listener.Addr().String(), CredentialsReference: "bmc/1", CertificateSha256: digest}
}
