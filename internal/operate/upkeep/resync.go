package upkeep

import (
	"context"
	"crypto/rand"

	"github.com/kvatlas/kvatlas/internal/base/usage"
	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Resync requests a new incarnation from the shims of a worker, or of a partition if worker is empty. It returns the
// shims that answered.
func Resync(ctx context.Context, ns *jetstream.Namespace, partition uint32, worker events.WorkerID) ([]control.Shim,
	error) {
	p := events.Partition(partition)
	if worker != "" {
		var err error
		if p, err = ns.PartitionOf(worker); err != nil {
			return nil, err
		}
	} else if partition >= ns.Partitions() {
		return nil, usage.Errorf("there is no partition %d: there are %d, from 0", partition, ns.Partitions())
	}
	return control.ResyncAll(ctx, ns, p, worker, control.ResyncRequest{ID: rand.Text()})
}
