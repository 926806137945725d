package upkeep

import (
	"context"
	"crypto/rand"
	"errors"

	"github.com/kvatlas/kvatlas/internal/base/usage"
	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Resynced lists the shims that answered a request for a resync, in the form of the JSON output.
type Resynced struct {
	Shims []control.Shim `json:"shims"`
}

// Failure returns an error if no shim answered.
func (r *Resynced) Failure() error {
	if len(r.Shims) == 0 {
		return errors.New("no shim answered")
	}
	return nil
}

// Resync requests a new incarnation from the shims of a worker, or of a partition if worker is empty. It returns the
// shims that answered.
func Resync(ctx context.Context, ns *jetstream.Namespace, partition uint32, worker events.WorkerID) (*Resynced,
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
	shims, err := control.ResyncAll(ctx, ns, p, worker, control.ResyncRequest{ID: rand.Text()})
	return &Resynced{append([]control.Shim{}, shims...)}, err
}
