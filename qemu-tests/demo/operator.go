package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
	"github.com/better-compute/bcd/api/bcd/v1/bcdv1connect"
)

// operator speaks to the gateway as its operator does, over the unix socket in
// the gateway's data directory.
type operator struct {
	bcdv1connect.OperatorServiceClient
}

func dialOperator(data string) operator {
	client := &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", filepath.Join(data, "operator.sock"))
		},
	}}
	return operator{bcdv1connect.NewOperatorServiceClient(client, "http://operator")}
}

// watch tells each timeline entry and each progress of a transfer as it comes,
// until ctx ends.
func (o operator) watch(ctx context.Context, tell func(*bcdv1.TimelineEntry), transfer func(*bcdv1.TransferProgress)) error {
	stream, err := o.Watch(ctx, connect.NewRequest(&bcdv1.WatchRequest{Progress: true}))
	if err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	defer stream.Close()
	for stream.Receive() {
		if e := stream.Msg().GetEntry(); e != nil {
			tell(e)
		}
		c := stream.Msg().GetProgress()
		var p bcdv1.TransferProgress
		if c != nil && c.Outcome == nil && c.Kind == "deploy.image" && proto.Unmarshal(c.Progress.GetBody(), &p) == nil && p.Phase != "" {
			transfer(&p)
		}
	}
	if err := stream.Err(); err != nil && ctx.Err() == nil {
		return fmt.Errorf("watch: %w", err)
	}
	return nil
}

// machine gives the one machine of the gateway; nil when none has joined.
func (o operator) machine(ctx context.Context) (*bcdv1.GetMachineResponse, error) {
	list, err := o.ListMachines(ctx, connect.NewRequest(&bcdv1.ListMachinesRequest{}))
	if err != nil {
		return nil, err
	}
	switch n := len(list.Msg.Machines); n {
	case 0:
		return nil, nil
	case 1:
	default:
		return nil, fmt.Errorf("the gateway knows %d machines, and there is one", n)
	}
	whole, err := o.GetMachine(ctx, connect.NewRequest(&bcdv1.GetMachineRequest{Name: list.Msg.Machines[0].Id}))
	if err != nil {
		return nil, err
	}
	return whole.Msg, nil
}

// command gives a command as it stands.
func (o operator) command(ctx context.Context, id string) (*bcdv1.CommandInfo, error) {
	answer, err := o.GetCommand(ctx, connect.NewRequest(&bcdv1.GetCommandRequest{Id: id}))
	if err != nil {
		return nil, err
	}
	return answer.Msg.Command, nil
}

// bootOf reads the inventory's section of the boot.
func bootOf(m *bcdv1.GetMachineResponse) (current, label string, err error) {
	for _, s := range m.Inventory {
		if s.Name != "boot" {
			continue
		}
		var boot struct{ Current, Label string }
		if err := json.Unmarshal(s.CanonicalJson, &boot); err != nil {
			return "", "", fmt.Errorf("inventory section boot: %w", err)
		}
		return boot.Current, boot.Label, nil
	}
	return "", "", errors.New("the inventory has no section boot")
}
