package gateway

import (
	"context"
	"errors"

	"connectrpc.com/connect"

	bcdv1 "github.com/better-compute/bcd/api/bcd/v1"
)

// Watch sends what is stored, then what comes. It holds no queue: each round
// reads the store from where the last one ended, so a slow watcher costs
// nothing and delays nobody.
func (o operatorService) Watch(ctx context.Context, request *connect.Request[bcdv1.WatchRequest], stream *connect.ServerStream[bcdv1.WatchResponse]) error {
	g, in := o.g, request.Msg
	changed, stop := g.hub.watch()
	defer stop()
	after, machineID := in.GetAfterSequence(), ""
	err := g.store.View(ctx, func(tx Tx) (err error) {
		if in.GetMachine() != "" {
			m, err := findMachine(tx, in.GetMachine())
			if err != nil {
				return err
			}
			machineID = m.ID
		}
		if after < 0 {
			after, err = tx.LastTimeline()
		}
		return err
	})
	if err != nil {
		return rpcError(err)
	}
	// Headers now: a client waits for them before it knows that it watches.
	if err := stream.Send(nil); err != nil {
		return err
	}
	version := int64(0)
	for {
		var page []*TimelineEntry
		err := g.store.View(ctx, func(tx Tx) (err error) {
			page, err = tx.Timeline(machineID, after, watchPage)
			return err
		})
		if err != nil {
			return rpcError(err)
		}
		for _, e := range page {
			after = e.Sequence
			if err := stream.Send(&bcdv1.WatchResponse{Body: &bcdv1.WatchResponse_Entry{Entry: e.proto()}}); err != nil {
				return err
			}
		}
		if in.GetProgress() {
			if version, err = o.sendProgress(ctx, stream, version, machineID); err != nil {
				return err
			}
		}
		if len(page) == watchPage {
			continue
		}
		if in.GetNoFollow() {
			return nil
		}
		select {
		case <-changed:
		case <-g.stopped:
			return nil
		case <-ctx.Done():
			return nil
		}
	}
}

func (o operatorService) sendProgress(ctx context.Context, stream *connect.ServerStream[bcdv1.WatchResponse], version int64, machineID string) (int64, error) {
	list, at := o.g.hub.progressSince(version, machineID)
	for _, p := range list {
		var c *Command
		err := o.g.store.View(ctx, func(tx Tx) (err error) {
			c, err = tx.Command(p.GetCommandId())
			return err
		})
		if errors.Is(err, ErrNotFound) {
			continue
		}
		if err != nil {
			return at, rpcError(err)
		}
		info := &bcdv1.CommandInfo{Id: c.ID, Kind: c.Kind, NodeId: c.NodeID, MachineId: c.MachineID, Lane: c.Lane, State: c.State, DeadlineMs: c.DeadlineMS, Progress: p}
		if err := stream.Send(&bcdv1.WatchResponse{Body: &bcdv1.WatchResponse_Progress{Progress: info}}); err != nil {
			return at, err
		}
	}
	return at, nil
}
