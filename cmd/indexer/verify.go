package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/kvatlas/kvatlas/internal/api"
	"github.com/kvatlas/kvatlas/internal/cli"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// verifyRounds is how often the replicas of a partition are asked until they answer for one place. Each round names a place further ahead of where
// they are, so that one of them is beyond what the log grows by while the requests travel.
const verifyRounds = 6

// verifyReplicas compares what the nodes of a cluster hold. ask asks one node; at is where it is to reckon checksums.
func verifyReplicas(ctx context.Context, nodes []string, ask func(ctx context.Context, node string, at []api.PartitionSeq) (*api.Status, error)) ([]api.PartitionReplicas, error) {
	var done []api.PartitionReplicas
	open := map[events.Partition]bool{} // of those seen, which are not done
	var at []api.PartitionSeq
	for round := range verifyRounds {
		answers, failed := make([]*api.Status, len(nodes)), make([]error, len(nodes))
		var all sync.WaitGroup
		for i, node := range nodes {
			all.Go(func() { answers[i], failed[i] = ask(ctx, node, at) })
		}
		all.Wait()
		found := map[events.Partition]*api.PartitionReplicas{}
		last := map[events.Partition]events.StreamSeq{}
		for i, s := range answers {
			if failed[i] != nil {
				return nil, fmt.Errorf("node %s cannot be compared: %w", nodes[i], failed[i])
			}
			for _, p := range s.Partitions {
				if !open[p.Partition] && round > 0 || p.State != "serving" && p.State != "resync_needed" {
					continue
				}
				r := found[p.Partition]
				if r == nil {
					r = &api.PartitionReplicas{Partition: p.Partition, Equal: true}
					found[p.Partition] = r
				}
				r.Replicas = append(r.Replicas, api.ReplicaSum{Node: nodes[i], Seq: p.Seq, Checksum: p.Checksum})
				last[p.Partition] = max(last[p.Partition], p.Seq, p.LogLast)
			}
		}
		at = at[:0]
		clear(open)
		for p, r := range found {
			same := true
			for _, x := range r.Replicas {
				same = same && x.Seq == r.Replicas[0].Seq
				r.Equal = r.Equal && x == api.ReplicaSum{Node: x.Node, Seq: r.Replicas[0].Seq, Checksum: r.Replicas[0].Checksum}
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

// differing is the error of replicas that are not equal; nil if all are.
func differing(list []api.PartitionReplicas) error {
	var bad []events.Partition
	for i := range list {
		if !list[i].Equal {
			bad = append(bad, list[i].Partition)
		}
	}
	if len(bad) == 0 {
		return nil
	}
	return fmt.Errorf("replicas of partitions %s are not equal, or did not come to one place in the log", ranges(bad))
}

func printReplicas(w io.Writer, list []api.PartitionReplicas) error {
	var rows [][]any
	for i := range list {
		for _, r := range list[i].Replicas {
			verdict := "equal"
			switch first := list[i].Replicas[0]; {
			case len(list[i].Replicas) == 1:
				verdict = "the only one"
			case list[i].Equal:
			case r.Seq != first.Seq:
				verdict = "AT ANOTHER PLACE"
			case r.Checksum != first.Checksum:
				verdict = "DIFFERS"
			default:
				verdict = "others differ"
			}
			rows = append(rows, []any{list[i].Partition, r.Node, r.Seq, r.Checksum, verdict})
		}
	}
	fmt.Fprintln(w)
	return cli.Table(w, []string{"PARTITION", "NODE", "AT", "CHECKSUM", ""}, rows)
}
