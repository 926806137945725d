package main

import (
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestReplicasThatDiffer are told of, and end a command with an error.
func TestReplicasThatDiffer(t *testing.T) {
	for _, lost := range []bool{false, true} {
		list := []api.PartitionReplicas{{Partition: 3, Equal: !lost,
			Replicas: []api.ReplicaSum{{Node: "a", Seq: 7, Checksum: "x"}, {Node: "b", Seq: 7, Checksum: "x"}}}}
		if lost {
			list[0].Replicas[1].Checksum = "y"
		}
		if err := differing(list); (err != nil) != lost {
			t.Errorf("lost: %v: %v", lost, err)
		}
		var b strings.Builder
		if printReplicas(&b, list); strings.Contains(b.String(), "DIFFERS") != lost {
			t.Errorf("lost: %v:\n%s", lost, &b)
		}
	}
}
