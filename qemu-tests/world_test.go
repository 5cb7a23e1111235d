// Package qemutests boots whole images in virtual machines against a real
// gateway. Each test reads like the story it tells; what it needs of machines
// and gateways is in rig, and the artefacts it boots are made by `make images`.
package qemutests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/better-compute/bcd/qemu-tests/rig"
)

// world is one test's gateway and machines.
type world struct {
	t   *testing.T
	ctx context.Context
	dir string
	*rig.Gateway
}

// artefact gives the path of something that `make images` made.
func artefact(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("BCD_BUILD")
	if dir == "" {
		dir = "../build"
	}
	path, err := filepath.Abs(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: run make images first (make test does)", err)
	}
	return path
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, ctx: rig.Context(t), dir: rig.Folder(t)}
	w.Gateway = rig.RunGateway(t, artefact(t, "bcd-gateway"), w.dir, "--keys", artefact(t, "keys"))
	return w
}

// machine is a virtual server that is told the gateway and a token by SMBIOS
// and starts our ramdisk's kernel directly, which saves the firmware's time
// where firmware is not what the story is about.
func (w *world) ramdisk(name string, change func(*rig.Config)) *rig.VM {
	w.t.Helper()
	c := rig.Config{
		Name: name, MemoryMiB: 512,
		Kernel: artefact(w.t, "images/bcd-virtual-amd64.vmlinuz"),
		Initrd: artefact(w.t, "images/bcd-virtual-amd64.initramfs"),
		// What the profile's UKI has on its command line.
		Cmdline: "console=ttyS0,115200 panic=30 printk.devkmsg=on",
		SMBIOS:  []string{"bcd.gateway=" + w.URL(), "bcd.token=" + w.token("ramdisk")},
		NICs:    []rig.NIC{{}},
	}
	if change != nil {
		change(&c)
	}
	return rig.Run(w.t, w.dir, c)
}

// token makes a join token.
func (w *world) token(role string, more ...string) string {
	w.t.Helper()
	out, err := w.Run(w.ctx, append([]string{"token", "create", "--role", role}, more...)...)
	if err != nil {
		w.t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// machineInfo is what the gateway says of a machine.
type machineInfo struct {
	ID, Name, State, StateMessage string
	Current                       struct {
		ID, Role, Version, BootID string
		Connected                 bool
	}
	Nodes []struct{ ID, Role string }
}

// UnmarshalJSON takes the field names of the contract.
func (m *machineInfo) UnmarshalJSON(raw []byte) error {
	var v struct {
		ID           string `json:"id"`
		Name         string `json:"name"`
		State        string `json:"state"`
		StateMessage string `json:"state_message"`
		Current      *struct {
			ID        string `json:"id"`
			Role      string `json:"role"`
			Version   string `json:"version"`
			BootID    string `json:"boot_id"`
			Connected bool   `json:"connected"`
		} `json:"current"`
		Nodes []struct {
			ID   string `json:"id"`
			Role string `json:"role"`
		} `json:"nodes"`
	}
	if err := json.Unmarshal(raw, &v); err != nil {
		return err
	}
	m.ID, m.Name, m.State, m.StateMessage = v.ID, v.Name, v.State, v.StateMessage
	if v.Current != nil {
		m.Current.ID, m.Current.Role, m.Current.Version = v.Current.ID, v.Current.Role, v.Current.Version
		m.Current.BootID, m.Current.Connected = v.Current.BootID, v.Current.Connected
	}
	for _, n := range v.Nodes {
		m.Nodes = append(m.Nodes, struct{ ID, Role string }{n.ID, n.Role})
	}
	return nil
}

// only gives the one machine that the gateway knows.
func (w *world) only(ctx context.Context) (*machineInfo, error) {
	var all struct {
		Machines []*machineInfo `json:"machines"`
	}
	if err := w.RunJSON(ctx, &all, "machines"); err != nil {
		return nil, err
	}
	if len(all.Machines) != 1 {
		return nil, fmt.Errorf("%d machines, not one", len(all.Machines))
	}
	var whole struct {
		Machine *machineInfo `json:"machine"`
	}
	if err := w.RunJSON(ctx, &whole, "machine", all.Machines[0].ID); err != nil {
		return nil, err
	}
	return whole.Machine, nil
}

// connected waits until the one machine is connected in a role, as another
// node or in another boot than before where that is given.
func (w *world) connected(vm *rig.VM, role string, before *machineInfo) *machineInfo {
	w.t.Helper()
	var found *machineInfo
	err := vm.Until(w.ctx, "the machine is connected as "+role, func(ctx context.Context) (bool, error) {
		m, err := w.only(ctx)
		if err != nil {
			return false, nil // not joined yet, or the gateway is being restarted
		}
		found = m
		fresh := before == nil || m.Current.BootID != before.Current.BootID
		return m.Current.Connected && m.Current.Role == role && fresh, nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	vm.Booted()
	return found
}

// command is a command as the gateway tells it.
type command struct {
	ID      string `json:"id"`
	Kind    string `json:"kind"`
	State   string `json:"state"`
	Outcome *struct {
		Status  string         `json:"status"`
		Code    string         `json:"code"`
		Message string         `json:"message"`
		Result  map[string]any `json:"result"`
	} `json:"outcome"`
	Progress *struct {
		Body map[string]any `json:"body"`
	} `json:"progress"`
}

// ended waits for a command's outcome.
func (w *world) ended(vm *rig.VM, id string) *command {
	w.t.Helper()
	var c *command
	err := vm.Until(w.ctx, "the command ends", func(ctx context.Context) (bool, error) {
		c = w.command(ctx, id)
		return c != nil && c.Outcome != nil, nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

// command finds a command by id, nil when the gateway does not answer.
func (w *world) command(ctx context.Context, id string) *command {
	m, err := w.only(ctx)
	if err != nil {
		return nil
	}
	var info struct {
		Commands []*command `json:"commands"`
	}
	if w.RunJSON(ctx, &info, "machine", m.ID) != nil {
		return nil
	}
	for _, c := range info.Commands {
		if c.ID == id {
			return c
		}
	}
	return nil
}

// send queues a command or a deploy and gives it back at once.
func (w *world) send(args ...string) *command {
	w.t.Helper()
	c := &command{}
	if err := w.RunJSON(w.ctx, c, append(args, "--no-wait")...); err != nil {
		w.t.Fatal(err)
	}
	if c.ID == "" {
		w.t.Fatal(errors.New("the command has no id"))
	}
	return c
}

// timeline is the machine's history, a line an entry, as a person reads it.
func (w *world) timeline() string {
	w.t.Helper()
	m, err := w.only(w.ctx)
	if err != nil {
		w.t.Fatal(err)
	}
	out, err := w.Run(w.ctx, "machine", m.ID)
	if err != nil {
		w.t.Fatal(err)
	}
	return string(out)
}
