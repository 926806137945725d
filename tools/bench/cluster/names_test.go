package cluster

import (
	"testing"

	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestNodeNames checks that none of the three nodes keeps all partitions with two copies, so every query needs another
// node.
func TestNodeNames(t *testing.T) {
	for partitions := uint32(3); partitions <= 64; partitions++ {
		kept := map[string]uint32{}
		for p := range events.Partition(partitions) {
			for _, owner := range cluster.Order(nodeNames(partitions, 2), nil, p)[:2] {
				kept[owner]++
			}
		}
		for name, n := range kept {
			if n == partitions {
				t.Errorf("of %d partitions %s keeps all", partitions, name)
			}
		}
	}
}
