package server

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Nodes get the assignment of snapshots with a heartbeat. In between, no node may feel responsible for a partition.
const (
	snapshotRounds = 3
	snapshotPause  = time.Second
)

// snapshotAll makes all nodes write their own snapshots, and repeats while some are missing.
func snapshotAll(ctx context.Context, partitions uint32, nodes func() []string,
	write func(ctx context.Context, node string) (*api.SnapshotList, error)) (*api.SnapshotList, error) {
	written := map[events.Partition]api.SnapshotInfo{}
	for round := range snapshotRounds {
		if round > 0 {
			if !loop.Wait(ctx, snapshotPause) {
				return nil, ctx.Err()
			}
		}
		lists, err := collectAll(nodes(), "", func(node string) (*api.SnapshotList, error) { return write(ctx, node) })
		if err != nil {
			return nil, err
		}
		for _, list := range lists {
			for _, s := range list.answer.Snapshots {
				if s.Generation >= written[s.Partition].Generation { // two nodes may have written the partition
					written[s.Partition] = s
				}
			}
		}
		if len(written) == int(partitions) {
			break
		}
	}
	list := &api.SnapshotList{Snapshots: []api.SnapshotInfo{}}
	for p := range events.Partition(partitions) {
		if s, ok := written[p]; ok {
			list.Snapshots = append(list.Snapshots, s)
		} else {
			list.Missing = append(list.Missing, p)
		}
	}
	return list, nil
}

// verifyRounds is the number of attempts to get the checksums of a partition's replicas at the same position. Every
// round requests a later position, so that a position is ahead of the log's growth during the requests.
const verifyRounds = 6

// verifyReplicas compares the replicas of a cluster. ask queries a node; at are the positions for the checksums.
func verifyReplicas(ctx context.Context, nodes []string, ask func(ctx context.Context, node string,
	at []api.PartitionSeq) (*api.Status, error)) ([]api.PartitionReplicas, error) {
	var done []api.PartitionReplicas
	open := map[events.Partition]bool{} // seen but incomplete partitions
	var at []api.PartitionSeq
	for round := range verifyRounds {
		answers, err := collectAll(nodes, " cannot be compared",
			func(node string) (*api.Status, error) { return ask(ctx, node, at) })
		if err != nil {
			return nil, err
		}
		found := map[events.Partition]*api.PartitionReplicas{}
		last := map[events.Partition]events.StreamSeq{}
		for _, s := range answers {
			for _, p := range s.answer.Partitions {
				if !open[p.Partition] && round > 0 || !p.State.Serves() {
					continue
				}
				r := found[p.Partition]
				if r == nil {
					r = &api.PartitionReplicas{Partition: p.Partition, Equal: true}
					found[p.Partition] = r
				}
				r.Replicas = append(r.Replicas, api.ReplicaSum{Node: s.node, Seq: p.Seq, Checksum: p.Checksum})
				last[p.Partition] = max(last[p.Partition], p.Seq, p.LogLast)
			}
		}
		at = at[:0]
		clear(open)
		for p, r := range found {
			same := true
			for _, x := range r.Replicas {
				same = same && x.Seq == r.Replicas[0].Seq
				r.Equal = r.Equal && x == api.ReplicaSum{Node: x.Node, Seq: r.Replicas[0].Seq,
					Checksum: r.Replicas[0].Checksum}
			}
			if same || round == verifyRounds-1 {
				done = append(done, *r)
				continue
			}
			open[p] = true
			at = append(at, api.PartitionSeq{Partition: p, Seq: last[p] + 64<<(2*round)})
		}
		if len(open) == 0 {
			break
		}
	}
	slices.SortFunc(done, func(a, b api.PartitionReplicas) int { return cmp.Compare(a.Partition, b.Partition) })
	return done, nil
}
