package bmc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/better-compute/bcd/agent/dispatch"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	maxProxyURL     = 2048
	maxProxyHeaders = 32
	maxProxyHeader  = 4 << 10
	maxProxyBody    = 256 << 10
	// maxProxyAnswer and maxAnswerHeader leave room for each other in a
	// result of 64 KiB.
	maxProxyAnswer   = 48 << 10
	maxAnswerHeader  = 8 << 10
	maxAnswerHeaders = 64
	proxyTime        = 30 * time.Second
	maxProxyTime     = 120 * time.Second
)

var proxyMethods = []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}

func readsOnly(method string) bool { return method == http.MethodGet || method == http.MethodHead }

// ownHeaders are net/http's to set: by them one request could be made two.
var ownHeaders = []string{"Host", "Content-Length", "Transfer-Encoding", "Connection", "Upgrade", "Te", "Trailer", "Keep-Alive", "Proxy-Connection", "Expect"}

// httpProxy is site.httpProxy.
func (s *site) httpProxy(ctx context.Context, j *job) (dispatch.Result, error) {
	body := new(bcdv1.SiteHttpProxy)
	if err := decode(j.Command, body); err != nil {
		return dispatch.Result{}, err
	}
	u, err := checkProxy(body)
	if err != nil {
		return dispatch.Result{}, err
	}
	p, err := newPin(body.GetCertificateSha256(), body.GetInsecure())
	if err != nil {
		return dispatch.Result{}, err
	}
	port := uint16(443)
	if u.Scheme == "http" {
		port = 80
	}
	address := u.Host
	if u.Port() == "" {
		address = u.Hostname()
	}
	to, _, err := s.locate(ctx, address, port)
	if err != nil {
		return dispatch.Result{}, err
	}
	request, err := http.NewRequestWithContext(ctx, body.GetMethod(), u.String(), bytes.NewReader(body.GetContent()))
	if err != nil {
		return dispatch.Result{}, fail("MALFORMED", "the request cannot be made: %w", err)
	}
	for _, h := range body.GetHeaders() {
		request.Header.Add(h.GetName(), h.GetValue())
	}
	for _, h := range body.GetSecretHeaders() {
		value, err := s.secretHeader(ctx, j, h)
		if err != nil {
			return dispatch.Result{}, err
		}
		request.Header.Add(h.GetName(), value)
	}
	if err := j.due(); err != nil {
		return dispatch.Result{}, err
	}
	limit := proxyTime
	if ms := body.GetTimeoutMs(); ms != 0 {
		limit = time.Duration(ms) * time.Millisecond
	}
	j.phase("%s to %s", body.GetMethod(), to)
	return roundTrip(request, to, p, limit)
}

// secretHeader fetches a header's value. net/http wants a string, so a copy
// outlives the value's own memory until it is collected.
func (s *site) secretHeader(ctx context.Context, j *job, h *bcdv1.SecretHeader) (string, error) {
	v, err := s.o.Secrets.Fetch(ctx, h.GetReference(), j.ID)
	if err != nil {
		return "", fail("SECRET_UNAVAILABLE", "secret header %s: %w", h.GetName(), err)
	}
	j.hidden.own(v)
	value := bytes.TrimRight(v.Bytes(), "\r\n")
	j.hidden.keep(value)
	// What follows a scheme is the secret proper: "Bearer TOKEN".
	if _, token, ok := bytes.Cut(value, []byte{' '}); ok {
		j.hidden.keep(token)
	}
	if len(value) > maxProxyHeader || !httpguts.ValidHeaderFieldValue(string(value)) {
		return "", fail("SECRET_UNAVAILABLE", "the value of secret header %s is longer than %d bytes, or no header value", h.GetName(), maxProxyHeader)
	}
	return string(value), nil
}

func checkProxy(body *bcdv1.SiteHttpProxy) (*url.URL, error) {
	if !slices.Contains(proxyMethods, body.GetMethod()) {
		return nil, fail("MALFORMED", "method %.20q is not one of %v", body.GetMethod(), proxyMethods)
	}
	u, err := url.Parse(body.GetUrl())
	if err != nil || len(body.GetUrl()) > maxProxyURL || u.Host == "" || u.User != nil || u.Scheme != "https" && u.Scheme != "http" {
		return nil, fail("MALFORMED", "url is not an http or https URL of at most %d bytes, without user information", maxProxyURL)
	}
	if u.Scheme == "http" && !body.GetInsecure() {
		return nil, fail("MALFORMED", "url is http, where anybody on the way reads along: use https, or say insecure")
	}
	if n := len(body.GetContent()); n > maxProxyBody {
		return nil, fail("TOO_LARGE", "a body of %d bytes; at most %d are allowed", n, maxProxyBody)
	}
	if ms := body.GetTimeoutMs(); ms < 0 || time.Duration(ms)*time.Millisecond > maxProxyTime {
		return nil, fail("MALFORMED", "timeout_ms %d is not between 0 and %d", ms, maxProxyTime.Milliseconds())
	}
	if n := len(body.GetHeaders()) + len(body.GetSecretHeaders()); n > maxProxyHeaders {
		return nil, fail("TOO_LARGE", "%d headers; at most %d are allowed", n, maxProxyHeaders)
	}
	name := func(name string) error {
		if len(name) > 128 || !httpguts.ValidHeaderFieldName(name) || slices.Contains(ownHeaders, http.CanonicalHeaderKey(name)) {
			return fail("MALFORMED", "header %.80q cannot be given: it is no header name, or follows from the request", name)
		}
		return nil
	}
	for _, h := range body.GetHeaders() {
		if err := name(h.GetName()); err != nil {
			return nil, err
		}
		if len(h.GetValue()) > maxProxyHeader || !httpguts.ValidHeaderFieldValue(h.GetValue()) {
			return nil, fail("MALFORMED", "the value of header %s is longer than %d bytes, or no header value", h.GetName(), maxProxyHeader)
		}
	}
	for _, h := range body.GetSecretHeaders() {
		if err := name(h.GetName()); err != nil {
			return nil, err
		}
	}
	return u, nil
}

func roundTrip(request *http.Request, to netip.AddrPort, p *pin, limit time.Duration) (dispatch.Result, error) {
	// A request that net/http would send a second time could act twice.
	request.GetBody = nil
	client := boundedClient(to, p, limit)
	defer client.CloseIdleConnections()
	response, err := client.Do(request)
	if err != nil {
		return dispatch.Result{}, proxyFailed(request, to, err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(response.Body, maxProxyAnswer+1))
	if err != nil {
		return dispatch.Result{}, proxyFailed(request, to, fmt.Errorf("%s, and then its body ended early: %w", response.Status, err))
	}
	r := &bcdv1.SiteHttpProxyResult{Status: int32(response.StatusCode), Body: answer[:min(len(answer), maxProxyAnswer)], Truncated: len(answer) > maxProxyAnswer}
	r.Headers = answerHeaders(response.Header)
	message := fmt.Sprintf("%s %s: %s, %d bytes", request.Method, to, clip(response.Status, 80), len(r.Body))
	if r.Truncated {
		message += " and more, which were left out"
	}
	return dispatch.Result{Body: r, Message: message}, nil
}

func proxyFailed(request *http.Request, to netip.AddrPort, err error) error {
	switch {
	case errors.Is(err, errUntrusted):
		return fail("UNTRUSTED_SERVICE", "%s: %w", to, err)
	case harmless(err) || readsOnly(request.Method):
		return fail("UNREACHABLE", "%s %s: %w", request.Method, to, err)
	}
	return unknown("NO_ANSWER", "%s %s was sent, and no whole answer came: %w", request.Method, to, err)
}

// answerHeaders takes what there is room for, in the order of names.
func answerHeaders(all http.Header) (out []*bcdv1.HttpHeader) {
	var names []string
	for name := range all {
		names = append(names, name)
	}
	slices.Sort(names)
	room := maxAnswerHeader
	for _, name := range names {
		for _, value := range all[name] {
			value = strings.ToValidUTF8(value, "?")
			if room -= len(name) + len(value); room < 0 || len(out) == maxAnswerHeaders {
				return out
			}
			out = append(out, &bcdv1.HttpHeader{Name: strings.ToValidUTF8(name, "?"), Value: value})
		}
	}
	return out
}
