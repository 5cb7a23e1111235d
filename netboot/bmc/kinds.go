package bmc

import (
	"context"
	"errors"
	"net/url"
	"time"

	"github.com/better-compute/bcd/agent/dispatch"
	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

const (
	// pollEvery: a BMC answers slowly, and power takes seconds.
	pollEvery = 2 * time.Second
	// switchTime is for a machine that is turned on or off at once.
	switchTime = 90 * time.Second
	// shutdownTime is for an operating system that is asked to go.
	shutdownTime = 8 * time.Minute
	// maxBootURI is what DHCP's option 67 could carry, and BIOS fields hold.
	maxBootURI = 255
)

const (
	on    = bcdv1.BmcPowerState_BMC_POWER_STATE_ON
	off   = bcdv1.BmcPowerState_BMC_POWER_STATE_OFF
	other = bcdv1.BmcPowerState_BMC_POWER_STATE_OTHER
)

// power is bmc.power.
func (s *site) power(ctx context.Context, j *job) (dispatch.Result, error) {
	body := new(bcdv1.BmcPower)
	if err := decode(j.Command, body); err != nil {
		return dispatch.Result{}, err
	}
	action := body.GetAction()
	if action <= 0 || action > bcdv1.BmcPowerAction_BMC_POWER_ACTION_RESET {
		return dispatch.Result{}, fail("MALFORMED", "power action %d is unknown to this version: use status, on, off, graceful-off, cycle or reset", action)
	}
	m, err := s.open(ctx, j, body.GetTarget())
	if err != nil {
		return dispatch.Result{}, err
	}
	defer s.leave(ctx, m)
	before, err := m.power(ctx)
	if err != nil {
		return dispatch.Result{}, err
	}
	r := &bcdv1.BmcPowerResult{Before: before, After: before, Protocol: m.protocol()}
	wanted := map[bcdv1.BmcPowerAction]bcdv1.BmcPowerState{
		bcdv1.BmcPowerAction_BMC_POWER_ACTION_ON: on, bcdv1.BmcPowerAction_BMC_POWER_ACTION_OFF: off,
		bcdv1.BmcPowerAction_BMC_POWER_ACTION_GRACEFUL_OFF: off, bcdv1.BmcPowerAction_BMC_POWER_ACTION_CYCLE: on,
	}[action]
	switch {
	case action == bcdv1.BmcPowerAction_BMC_POWER_ACTION_STATUS:
		return dispatch.Result{Body: r, Message: "the machine is " + word(before)}, nil
	case j.lookOnly && before == wanted:
		return dispatch.Result{Body: r, Message: "the machine is " + word(before) + ", as was asked for before the interruption"}, nil
	case j.lookOnly:
		f := unknown("INTERRUPTED", "interrupted around %s, and the machine is %s: whether it was asked is unknown, and it is not asked again", word(action), word(before))
		f.Body = r
		return dispatch.Result{}, f
	case action == bcdv1.BmcPowerAction_BMC_POWER_ACTION_RESET && before != on:
		return dispatch.Result{}, fail("NOT_ON", "the machine is %s, and only one that is on can be reset: use on or cycle", word(before))
	case action == bcdv1.BmcPowerAction_BMC_POWER_ACTION_CYCLE && before == off:
		action = bcdv1.BmcPowerAction_BMC_POWER_ACTION_ON
		r.Notes = append(r.Notes, "the machine was off, so the cycle is to turn it on")
	case action != bcdv1.BmcPowerAction_BMC_POWER_ACTION_CYCLE && before == wanted:
		return dispatch.Result{Body: r, Message: "the machine is " + word(before) + " already; nothing was asked"}, nil
	}
	if err := j.due(); err != nil {
		return dispatch.Result{}, err
	}
	if err := s.switchPower(ctx, j, m, action, wanted, r); err != nil {
		return dispatch.Result{}, err
	}
	return dispatch.Result{Body: r, Message: word(body.GetAction()) + ": the machine was " + word(before) + " and is " + word(r.After)}, nil
}

// switchPower asks, and waits until the BMC shows wanted (0 waits for
// nothing). It fills in r.
func (s *site) switchPower(ctx context.Context, j *job, m machine, action bcdv1.BmcPowerAction, wanted bcdv1.BmcPowerState, r *bcdv1.BmcPowerResult) error {
	j.phase("asking for %s", word(action))
	name, err := m.ask(ctx, action)
	if errors.Is(err, errUnsupported) && action == bcdv1.BmcPowerAction_BMC_POWER_ACTION_CYCLE {
		r.Notes = append(r.Notes, "the BMC has no cycle of its own: turned off, then on")
		if err := s.switchPower(ctx, j, m, bcdv1.BmcPowerAction_BMC_POWER_ACTION_OFF, off, r); err != nil {
			return err
		}
		// Off it is; whatever fails from here on has changed something.
		if err := s.switchPower(ctx, j, m, bcdv1.BmcPowerAction_BMC_POWER_ACTION_ON, on, r); err != nil {
			return unknown("HALF_DONE", "the machine was turned off for the cycle, and turning it on failed: %w", err)
		}
		return nil
	}
	if errors.Is(err, errUnsupported) {
		return fail("UNSUPPORTED", "%w", err)
	}
	if err != nil && harmless(err) {
		return fail("REFUSED", "%s was not done: %w", word(action), err)
	}
	r.Changed = true
	if err != nil && (wanted == 0 || action == bcdv1.BmcPowerAction_BMC_POWER_ACTION_CYCLE) {
		return unknown("NO_ANSWER", "%s was sent, and no answer came: whether the machine was restarted is unknown: %w", word(action), err)
	}
	if err != nil {
		r.Notes = append(r.Notes, "the BMC's answer was lost; its state was read instead")
	} else {
		j.phase("%s accepted", name)
	}
	if wanted == 0 {
		// A reset never shows as off; what is read here is only for the record.
		if state, err := m.power(ctx); err == nil {
			r.After = state
		} else {
			r.After = other
		}
		return nil
	}
	limit := switchTime
	if action == bcdv1.BmcPowerAction_BMC_POWER_ACTION_GRACEFUL_OFF {
		limit = shutdownTime
	}
	j.phase("waiting for %s", word(wanted))
	r.After, err = s.await(ctx, m, wanted, limit)
	if err != nil {
		f := unknown("NOT_SEEN", "%s was asked for, and the BMC shows %s: %w", word(action), word(r.After), err)
		f.Body = r
		return f
	}
	return nil
}

// await reads the state until it is wanted, for at most limit.
func (s *site) await(ctx context.Context, m machine, wanted bcdv1.BmcPowerState, limit time.Duration) (bcdv1.BmcPowerState, error) {
	began, last := s.o.Clock.Now(), other
	for {
		state, err := m.power(ctx)
		if err == nil {
			last = state
		}
		if err == nil && state == wanted {
			return state, nil
		}
		if s.o.Clock.Now().Sub(began) >= limit {
			if err == nil {
				err = errors.New("not there after " + limit.String())
			}
			return last, err
		}
		if err := s.wait(ctx, pollEvery); err != nil {
			return last, err
		}
	}
}

// bootDevice is bmc.boot-device.
func (s *site) bootDevice(ctx context.Context, j *job) (dispatch.Result, error) {
	body := new(bcdv1.BmcBootDevice)
	if err := decode(j.Command, body); err != nil {
		return dispatch.Result{}, err
	}
	want := wish{source: body.GetSource(), legacy: body.GetLegacy(), uri: body.GetHttpUri()}
	if err := want.check(); err != nil {
		return dispatch.Result{}, err
	}
	m, err := s.open(ctx, j, body.GetTarget())
	if err != nil {
		return dispatch.Result{}, err
	}
	defer s.leave(ctx, m)
	r := &bcdv1.BmcBootDeviceResult{Protocol: m.protocol()}
	if !j.lookOnly {
		j.phase("setting the boot device")
		r.Changed, r.Notes, err = m.setBoot(ctx, want, j.due)
		if err != nil {
			return dispatch.Result{}, err
		}
	}
	have, err := m.boot(ctx)
	if err != nil && r.Changed {
		r.Notes = append(r.Notes, "set and read back, and then the BMC answered no more")
	} else if err != nil {
		return dispatch.Result{}, err
	}
	r.Target, r.Enabled, r.Mode, r.HttpUri = have.Target, have.Enabled, have.Mode, have.URI
	if j.lookOnly {
		asked := want.redfish()
		asked.URI = ""
		if !asked.shownBy(have) {
			f := unknown("INTERRUPTED", "interrupted while the boot device was set, and the BMC shows %s: it may have been set and used up since, and is not set again", have)
			f.Body = r
			return dispatch.Result{}, f
		}
	}
	return dispatch.Result{Body: r, Message: "the next boot: " + have.String()}, nil
}

func (w wish) check() error {
	http := bcdv1.BmcBootSource_BMC_BOOT_SOURCE_HTTP
	switch {
	case w.source <= 0 || w.source > bcdv1.BmcBootSource_BMC_BOOT_SOURCE_DISK:
		return fail("MALFORMED", "boot source %d is unknown to this version: use none, pxe, http or disk", w.source)
	case w.uri != "" && w.source != http:
		return fail("MALFORMED", "http_uri is for the boot source http alone")
	case w.legacy && w.source == http:
		return fail("MALFORMED", "HTTP boot is UEFI's alone: leave legacy out")
	case len(w.uri) > maxBootURI:
		return fail("MALFORMED", "http_uri has %d bytes; at most %d are allowed", len(w.uri), maxBootURI)
	}
	if w.uri != "" {
		u, err := url.Parse(w.uri)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil {
			return fail("MALFORMED", "http_uri is not an http or https URL without user information")
		}
	}
	return nil
}

// inventory is bmc.inventory.
func (s *site) inventory(ctx context.Context, j *job) (dispatch.Result, error) {
	body := new(bcdv1.BmcInventory)
	if err := decode(j.Command, body); err != nil {
		return dispatch.Result{}, err
	}
	m, err := s.open(ctx, j, body.GetTarget())
	if err != nil {
		return dispatch.Result{}, err
	}
	defer s.leave(ctx, m)
	j.phase("reading")
	r, err := m.inventory(ctx)
	if err != nil {
		return dispatch.Result{}, err
	}
	return dispatch.Result{Body: r, Message: clip(r.GetManufacturer()+" "+r.GetModel(), maxText) + ", serial " + r.GetSerial() + ", " + word(r.GetPower())}, nil
}
