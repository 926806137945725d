package survey

import (
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestVerdicts: each function returns an error with the affected partitions or the first problem, and nil without any.
func TestVerdicts(t *testing.T) {
	replicas := func(equal bool) []api.PartitionReplicas {
		return []api.PartitionReplicas{{Partition: 1, Equal: true}, {Partition: 3, Equal: equal},
			{Partition: 4, Equal: equal}}
	}
	missing := []events.Partition{1, 3}
	for want, err := range map[string]error{
		"disk full": Failure([]string{"disk full"}), "2 problems, the first: a": Failure([]string{"a", "b"}),
		"replicas of partitions 3-4 are not equal": Unequal(replicas(false)),
		"a snapshot of partitions 1,3":             Unwritten(&api.SnapshotList{Missing: missing}),
		"no node serves partitions 1,3":            Unserved(&api.ClusterStatus{Unserved: missing}),
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	for i, err := range []error{Failure(nil), Unequal(replicas(true)), Unwritten(&api.SnapshotList{}),
		Unserved(&api.ClusterStatus{})} {
		if err != nil {
			t.Errorf("%d: %v", i, err)
		}
	}
}

// TestClusterOf: the cluster of a status without one is a single node with the partitions of the status.
func TestClusterOf(t *testing.T) {
	s := &api.Status{Node: "a", Partitions: []api.PartitionDetail{
		{PartitionStatus: api.PartitionStatus{Partition: 0}, State: api.PartitionServing},
		{PartitionStatus: api.PartitionStatus{Partition: 1}, State: api.PartitionRestoring}}}
	c := clusterOf(s)
	if len(c.Nodes) != 1 || len(c.Nodes[0].Ready) != 1 || len(c.Unserved) != 1 || c.Unserved[0] != 1 {
		t.Errorf("%+v", c)
	}
	s.Cluster = &api.ClusterStatus{Copies: 7}
	if clusterOf(s) != s.Cluster {
		t.Error("the cluster of the status is ignored")
	}
}

// TestDamaged: only snapshots that differ from the written data count.
func TestDamaged(t *testing.T) {
	list := &api.GenerationList{Generations: []api.GenerationInfo{{}, {Bad: true}, {}}}
	if err := Damaged(list); err == nil || !strings.HasPrefix(err.Error(), "1 of 3 ") {
		t.Errorf("a damaged snapshot: %v", err)
	}
	if err := Damaged(&api.GenerationList{Generations: list.Generations[:1]}); err != nil {
		t.Errorf("intact snapshots: %v", err)
	}
}
