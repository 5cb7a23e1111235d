package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/qemu-tests/rig"
)

// What make build image-virtual image-node left in the build folder.
const (
	gatewayProgram = "bcd-gateway"
	keyFolder      = "keys"
	ramdiskImage   = "images/bcd-virtual-amd64.uki.efi"
	nodeImage      = "images/bcd-node-virtual.raw"
	packed         = ".zst"
)

const (
	memoryMiB = 1024
	diskBytes = 2 << 30
	// diskFile has the installed node's keys, and goes at the end.
	diskFile = "disk.raw"
)

// spec is what the installed node shall be: one of each thing that the host
// section manages.
var spec = &bcdv1.NodeSpec{Host: &bcdv1.HostSpec{
	Sysctl:     map[string]string{"vm.swappiness": "10"},
	Modules:    []string{"dummy"},
	BcdService: &bcdv1.ServiceDropIn{MemoryMax: "1G"},
}}

// story is one run of the demo.
type story struct {
	view       *view
	build, dir string
	keep       bool

	// step is what is being done, for the sentence that tells of a failure.
	step    string
	gateway *rig.Gateway
	vm      *rig.VM
	op      operator
	pid     int
	took    []string

	end      context.CancelFunc
	watchers sync.WaitGroup
}

// longest is how long the whole story may take: eight times what it takes on
// two busy cores without KVM, so that a machine that is neither silent nor
// getting on ends it.
const longest = 40 * time.Minute

// whole tells the story; the sentence is how it ended.
func (s *story) whole(ctx context.Context, build, dir string) (sentence string, err error) {
	ctx, s.end = context.WithTimeout(ctx, longest)
	s.step = "looking for what make demo builds"
	if err := s.prepare(build, dir); err != nil {
		return "", err
	}
	var image []byte
	if err := s.stage("starting a gateway", func() error {
		if image, err = digestOf(filepath.Join(s.build, nodeImage)); err != nil {
			return err
		}
		return s.startGateway(ctx)
	}); err != nil {
		return "", err
	}
	var ramdisk, node *bcdv1.GetMachineResponse
	if err := s.stage("switching on a machine with an empty disk, until our image has joined from memory", func() error {
		if err := s.powerOn(ctx); err != nil {
			return err
		}
		ramdisk, err = s.connected(ctx, bcdv1.Role_ROLE_RAMDISK, "")
		return err
	}); err != nil {
		return "", err
	}
	var deployed *bcdv1.DeployImageResult
	if err := s.stage("deploying Debian with bcd to its disk", func() error {
		deployed, err = s.deploy(ctx, ramdisk, image)
		return err
	}); err != nil {
		return "", err
	}
	if err := s.stage("waiting until the machine comes back from its disk", func() error {
		node, err = s.connected(ctx, bcdv1.Role_ROLE_NODE, ramdisk.Machine.Current.BootId)
		return err
	}); err != nil {
		return "", err
	}
	if err := s.stage("checking that it is what was deployed", func() error {
		return s.check(ramdisk, node, deployed, image)
	}); err != nil {
		return "", err
	}
	if err := s.stage("giving the node a specification and using it", func() error {
		return s.use(ctx, node)
	}); err != nil {
		return "", err
	}
	s.step = "showing the machine's history"
	if err := s.history(ctx, node); err != nil {
		return "", err
	}
	m := node.Machine
	return fmt.Sprintf("machine %s is installed and joined as node %s, in %s from power-on%s",
		m.Id, m.Current.Id, elapsed(time.Since(s.view.begin)), s.where()), nil
}

// stage does one part of the story and says how long it took.
func (s *story) stage(what string, do func() error) error {
	s.step = what
	s.view.heading(what)
	begin := time.Now()
	if err := do(); err != nil {
		return err
	}
	s.took = append(s.took, fmt.Sprintf("%6.1f s  %s", time.Since(begin).Seconds(), what))
	return nil
}

func (s *story) startGateway(ctx context.Context) error {
	var err error
	if s.gateway, err = rig.NewGateway(filepath.Join(s.build, gatewayProgram), s.dir); err != nil {
		return err
	}
	s.gateway.Args = append(s.gateway.Args, "--keys", filepath.Join(s.build, keyFolder))
	begin := time.Now()
	if err := s.gateway.Start(ctx); err != nil {
		return err
	}
	s.view.line("gateway", fmt.Sprintf("ready after %.1f s at %s; machines reach it at %s", time.Since(begin).Seconds(), s.gateway.Listen, s.gateway.URL()))
	s.op = dialOperator(s.gateway.Data)
	s.follow(func() error {
		return s.op.watch(ctx, s.tell, s.view.transfer)
	})
	return nil
}

// follow runs something that tells what happens, beside the story.
func (s *story) follow(do func() error) {
	s.watchers.Go(func() {
		if err := do(); err != nil {
			s.view.line("demo", err.Error())
		}
	})
}

func (s *story) tell(e *bcdv1.TimelineEntry) {
	text := e.Message
	if !strings.HasPrefix(text, e.Type) {
		text = e.Type + ": " + text
	}
	if e.Severity != "" {
		text = strings.ToUpper(e.Severity) + " " + text
	}
	s.view.line("gateway", text)
}

// powerOn makes the machine: an empty disk, and a network card whose DHCP
// offers our image. The image knows whom to trust; where the gateway is and
// the token to join with come by SMBIOS.
func (s *story) powerOn(ctx context.Context) error {
	token, err := s.op.CreateToken(ctx, connect.NewRequest(&bcdv1.CreateTokenRequest{Role: bcdv1.Role_ROLE_RAMDISK, Note: "demo"}))
	if err != nil {
		return err
	}
	disk, err := rig.NewDisk(s.dir, diskFile, diskBytes)
	if err != nil {
		return err
	}
	accel, why := rig.Accelerator()
	s.view.line("machine", fmt.Sprintf("%d MiB, empty disk of %s, UEFI; %s (%s)", memoryMiB, size(diskBytes), accel, why))
	image := filepath.Join(s.build, ramdiskImage)
	config := rig.Config{
		Name: "demo", Dir: s.dir, MemoryMiB: memoryMiB, Accel: accel,
		SMBIOS: []string{"bcd.gateway=" + s.gateway.URL(), "bcd.token=" + token.Msg.Token},
		NICs:   []rig.NIC{{TFTPDir: filepath.Dir(image), BootFile: filepath.Base(image), BootIndex: 1}},
		Disks:  []rig.Disk{{Path: disk, Serial: "demo-disk", BootIndex: 2}},
	}
	if s.vm, err = rig.Start(ctx, config); err != nil {
		return err
	}
	s.pid = s.vm.PID()
	s.view.line("machine", fmt.Sprintf("is on: QEMU is process %d, and stays the same to the end", s.pid))
	s.follow(func() error { return followConsole(ctx, s.vm.ConsolePath(), s.view.line) })
	return nil
}

// connected waits until the machine is connected in a role, in another boot
// than before.
func (s *story) connected(ctx context.Context, role bcdv1.Role, before string) (*bcdv1.GetMachineResponse, error) {
	var found *bcdv1.GetMachineResponse
	word := strings.ToLower(strings.TrimPrefix(role.String(), "ROLE_"))
	err := s.vm.Until(ctx, "the machine to be connected as "+word, func(ctx context.Context) (bool, error) {
		m, err := s.op.machine(ctx)
		if err != nil || m == nil {
			return false, err
		}
		found = m
		current := m.Machine.GetCurrent()
		whole := false
		for _, section := range m.Inventory {
			whole = whole || section.Name == "boot"
		}
		return current.GetConnected() && current.GetRole() == role && current.GetBootId() != before && whole, nil
	})
	return found, err
}

// ended waits for a command's outcome, which must be success.
func (s *story) ended(ctx context.Context, c *bcdv1.CommandInfo) (*bcdv1.Outcome, error) {
	err := s.vm.Until(ctx, c.Kind+" to end", func(ctx context.Context) (bool, error) {
		now, err := s.op.command(ctx, c.Id)
		if err != nil {
			return false, err
		}
		c = now
		return c.Outcome != nil, nil
	})
	if err != nil {
		return nil, err
	}
	if c.Outcome.Status != bcdv1.OutcomeStatus_OUTCOME_STATUS_SUCCEEDED {
		return nil, fmt.Errorf("%s: %s: %s", c.Kind, c.Outcome.Code, c.Outcome.Message)
	}
	return c.Outcome, nil
}

func (s *story) deploy(ctx context.Context, m *bcdv1.GetMachineResponse, raw []byte) (*bcdv1.DeployImageResult, error) {
	path := filepath.Join(s.build, nodeImage+packed)
	out, err := s.gateway.Run(ctx, "blob", "put", path)
	if err != nil {
		return nil, err
	}
	blob := string(bytes.TrimSpace(out))
	if info, err := os.Stat(path); err == nil {
		s.view.line("operator", fmt.Sprintf("put %s into the gateway's store: %s, SHA-256 %.12s…", filepath.Base(path), size(info.Size()), blob))
	}
	answer, err := s.op.Deploy(ctx, connect.NewRequest(&bcdv1.DeployRequest{
		Machine: m.Machine.Id, Image: blob, ImageRef: &bcdv1.ImageRef{RawSha256: raw},
	}))
	if err != nil {
		return nil, err
	}
	defer s.view.transferred()
	outcome, err := s.ended(ctx, answer.Msg.Command)
	if err != nil {
		return nil, err
	}
	result := &bcdv1.DeployImageResult{}
	if err := proto.Unmarshal(outcome.Result, result); err != nil {
		return nil, fmt.Errorf("deploy.image: result: %w", err)
	}
	return result, nil
}

// check compares what came back with what was sent.
func (s *story) check(ramdisk, node *bcdv1.GetMachineResponse, deployed *bcdv1.DeployImageResult, raw []byte) error {
	if pid := s.vm.PID(); pid != s.pid || s.vm.Events("SHUTDOWN") > 0 {
		return fmt.Errorf("QEMU was process %d and is %d, or was switched off meanwhile", s.pid, pid)
	}
	s.good("one QEMU process from power-on to now, %d, with %d reset", s.pid, s.vm.Events("RESET"))
	if node.Machine.Id != ramdisk.Machine.Id || len(node.Machine.Nodes) != 2 {
		return fmt.Errorf("the ramdisk was machine %s, the node is machine %s with %d identities", ramdisk.Machine.Id, node.Machine.Id, len(node.Machine.Nodes))
	}
	s.good("one machine, %s, with a ramdisk's and a node's identity", node.Machine.Id)
	current, label, err := bootOf(node)
	if err != nil {
		return err
	}
	before, beforeLabel, err := bootOf(ramdisk)
	if err != nil {
		return err
	}
	if current != deployed.BootEntry || current == before {
		return fmt.Errorf("the machine came back by boot entry %q (%s); the deployer wrote %q, the network's is %q", current, label, deployed.BootEntry, before)
	}
	s.good("BootCurrent is %s %q, which the deployer wrote; before it was %s %q", current, label, before, beforeLabel)
	if !bytes.Equal(deployed.RawSha256, raw) || !bytes.Equal(deployed.ReadbackSha256, raw) {
		return fmt.Errorf("the image has the SHA-256 %x; written was %x, read back from the disk %x", raw, deployed.RawSha256, deployed.ReadbackSha256)
	}
	s.good("the disk read back as the image: SHA-256 %.12x…, %s", raw, size(deployed.RawBytes))
	image, err := readLayout(filepath.Join(s.build, nodeImage))
	if err != nil {
		return err
	}
	disk, err := readLayout(filepath.Join(s.dir, diskFile))
	if err != nil {
		return err
	}
	if err := sameLayout(image, disk); err != nil {
		return err
	}
	s.good("the disk file on this host has the image's %d partitions and its boot loader, SHA-256 %.12x…", len(disk.parts), disk.loader)
	return nil
}

// good tells a check that passed.
func (s *story) good(format string, args ...any) {
	s.view.line("check", "ok: "+fmt.Sprintf(format, args...))
}

// use has the node converge a specification, answer, and hand its logs over.
func (s *story) use(ctx context.Context, node *bcdv1.GetMachineResponse) error {
	applied, err := s.op.ApplySpec(ctx, connect.NewRequest(&bcdv1.ApplySpecRequest{Machine: node.Machine.Id, Spec: spec}))
	if err != nil {
		return err
	}
	generation := applied.Msg.Spec.GetGeneration()
	s.view.line("operator", fmt.Sprintf("set specification generation %d: a kernel parameter, a module, a limit of bcd.service", generation))
	var sections []*bcdv1.SectionStatus
	err = s.vm.Until(ctx, "the specification to be observed", func(ctx context.Context) (bool, error) {
		got, err := s.op.GetSpec(ctx, connect.NewRequest(&bcdv1.GetSpecRequest{Machine: node.Machine.Id}))
		if err != nil {
			return false, err
		}
		sections = got.Msg.Status.GetSections()
		for _, section := range sections {
			if section.State == bcdv1.SectionState_SECTION_STATE_FAILED {
				return false, fmt.Errorf("section %s failed: %s", section.Name, section.Message)
			}
		}
		return got.Msg.Status.GetObservedGeneration() == generation, nil
	})
	if err != nil {
		return err
	}
	for _, section := range sections {
		if section.State != bcdv1.SectionState_SECTION_STATE_CONVERGED {
			return fmt.Errorf("section %s has not converged: %s %s", section.Name, section.State, section.Message)
		}
	}
	s.good("generation %d is observed, %d sections converged", generation, len(sections))

	begin := time.Now()
	body, err := proto.Marshal(&bcdv1.DiagPing{Payload: []byte("hello")})
	if err != nil {
		return err
	}
	if _, err := s.send(ctx, node, "diag.ping", body); err != nil {
		return err
	}
	s.good("diag.ping answered after %s", time.Since(begin).Round(time.Millisecond))

	outcome, err := s.send(ctx, node, "logs.collect", nil)
	if err != nil {
		return err
	}
	result := &bcdv1.LogsCollectResult{}
	if err := proto.Unmarshal(outcome.Result, result); err != nil {
		return fmt.Errorf("logs.collect: result: %w", err)
	}
	bundle := filepath.Join(s.dir, "bundle.tar.zst")
	if _, err := s.gateway.Run(ctx, "blob", "get", result.BlobSha256, "-o", bundle); err != nil {
		return err
	}
	s.good("the node's log bundle is here")
	return nil
}

func (s *story) send(ctx context.Context, node *bcdv1.GetMachineResponse, kind string, body []byte) (*bcdv1.Outcome, error) {
	answer, err := s.op.SendCommand(ctx, connect.NewRequest(&bcdv1.SendCommandRequest{Machine: node.Machine.Id, Kind: kind, Body: body}))
	if err != nil {
		return nil, err
	}
	return s.ended(ctx, answer.Msg.Command)
}

// history shows the machine as the gateway's own command line does.
func (s *story) history(ctx context.Context, node *bcdv1.GetMachineResponse) error {
	out, err := s.gateway.Run(ctx, "machine", node.Machine.Id)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(s.dir, "history.txt"), out, 0o644); err != nil {
		return err
	}
	s.view.heading("bcd-gateway machine " + node.Machine.Id)
	s.view.text(string(out))
	s.view.heading("how long each part took")
	s.view.text(strings.Join(s.took, "\n"))
	return nil
}

// where says where this run's files are.
func (s *story) where() string {
	if s.dir == "" {
		return ""
	}
	return "; console, gateway log, history and bundle are in " + s.dir
}

// consoleTail is the end of the machine's console, without its colours.
func (s *story) consoleTail() string {
	if s.vm == nil {
		return "(the machine was not switched on)"
	}
	const lines = 25
	text, err := s.vm.Console(max(0, s.vm.ConsoleMark()-8000))
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimSpace(strings.ReplaceAll(escapes.ReplaceAllString(text, ""), "\r", "")), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// cleanUp ends everything that the demo started. Logs stay; the disk and the
// gateway's data, which have keys, go.
func (s *story) cleanUp() {
	s.view.transferred()
	if s.end != nil {
		s.end()
	}
	s.watchers.Wait()
	var err error
	if s.vm != nil {
		err = s.vm.Close()
	}
	if s.gateway != nil {
		s.gateway.Stop()
	}
	if s.dir != "" && !s.keep {
		err = errors.Join(err, os.Remove(filepath.Join(s.dir, diskFile)))
		if s.gateway != nil {
			err = errors.Join(err, os.RemoveAll(s.gateway.Data))
		}
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		s.view.line("demo", "cleaning up: "+err.Error())
	}
}
