package survey

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Failure returns the error of a status with problems; nil without problems.
func Failure(problems []string) error {
	switch len(problems) {
	case 0:
		return nil
	case 1:
		return errors.New(problems[0])
	}
	return fmt.Errorf("%d problems, the first: %s", len(problems), problems[0])
}

// Unequal returns an error with the partitions of unequal replicas; nil if all replicas are equal.
func Unequal(list []api.PartitionReplicas) error {
	var bad cluster.Set
	for i := range list {
		if !list[i].Equal {
			bad.Add(list[i].Partition)
		}
	}
	if bad.Len() == 0 {
		return nil
	}
	return fmt.Errorf("replicas of partitions %s are not equal, or did not reach the same position in the log", bad)
}

// Unwritten returns an error with the partitions without a new snapshot; nil if all snapshots are written.
func Unwritten(list *api.SnapshotList) error {
	if len(list.Missing) == 0 {
		return nil
	}
	return fmt.Errorf("no node has written a snapshot of partitions %s", cluster.SetOf(list.Missing...))
}

// Damaged returns an error with the number of snapshots that differ from the written data; nil without such snapshots.
func Damaged(list *api.GenerationList) error {
	bad := 0
	for _, g := range list.Generations {
		if g.Bad {
			bad++
		}
	}
	if bad == 0 {
		return nil
	}
	return fmt.Errorf("%d of %d snapshots differ from the written data", bad, len(list.Generations))
}

// Unserved returns an error with the partitions that no node serves; nil if nodes serve all partitions.
func Unserved(c *api.ClusterStatus) error {
	if len(c.Unserved) == 0 {
		return nil
	}
	return fmt.Errorf("no node serves partitions %s", cluster.SetOf(c.Unserved...))
}

// Cluster returns the cluster in the view of the node that answers.
func Cluster(ctx context.Context, c *client.Client) (*api.ClusterStatus, error) {
	status, err := c.Status(ctx)
	if err != nil {
		return nil, err
	}
	return clusterOf(status), nil
}

// clusterOf returns the cluster in a status. The status of an older node with a NATS server of its own has no cluster:
// clusterOf derives the cluster from the node's partitions.
func clusterOf(s *api.Status) *api.ClusterStatus {
	if s.Cluster != nil {
		return s.Cluster
	}
	n := api.NodeStatus{Node: s.Node, Build: s.Version, Answers: true, Ready: []events.Partition{},
		Behind: []events.Partition{}, Releasing: []events.Partition{}}
	c := &api.ClusterStatus{Copies: 1}
	for _, p := range s.Partitions {
		if p.State.Serves() {
			n.Ready = append(n.Ready, p.Partition)
		} else {
			c.Short, c.Unserved = append(c.Short, p.Partition), append(c.Unserved, p.Partition)
		}
	}
	c.Nodes = []api.NodeStatus{n}
	return c
}
