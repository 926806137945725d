package dump

import (
	"context"
	"fmt"
	"io"

	"github.com/kvatlas/kvatlas/internal/node"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

// Dumped is what was dumped of one partition.
type Dumped struct {
	Partition events.Partition
	Known     bool             // the partition has a snapshot that can be used
	Seq       events.StreamSeq // the place in the log that it stands for
	Ranks     int
	Events    uint64
	Pending   int // blocks that wait for their parents, which are left out
}

// Write dumps all workers, or one, from the newest usable snapshots in the bucket, and tells of each partition. It
// needs the memory of one partition's image.
func Write(ctx context.Context, ns *jetstream.Namespace, worker events.WorkerID, out io.Writer,
	tell func(Dumped)) error {
	first, end := events.Partition(0), events.Partition(ns.Partitions())
	if worker != "" {
		p, err := ns.PartitionOf(worker)
		if err != nil {
			return err
		}
		first, end = p, p+1
	}
	for p := first; p < end; p++ {
		var image *Image
		var ranks []snapshot.RankState
		manifest, err := node.ReadSnapshot(ctx, ns, p,
			func(_ *snapshot.Manifest, states []snapshot.RankState) (snapshot.Sink, error) {
				image, ranks = NewImage(), states
				return image, nil
			})
		if err != nil {
			return fmt.Errorf("partition %d: %w", p, err)
		}
		d := Dumped{Partition: p}
		if manifest != nil {
			d.Known, d.Seq = true, manifest.Seq
			for i := range ranks {
				if worker == "" || events.WorkerID(ranks[i].Instance) == worker {
					if err := d.rank(image, i, &ranks[i], out); err != nil {
						return err
					}
				}
			}
		}
		tell(d)
	}
	return nil
}

// rank writes one rank's lines.
func (d *Dumped) rank(image *Image, i int, state *snapshot.RankState, out io.Writer) error {
	d.Ranks++
	var line []byte
	var id events.EventID
	pending, err := image.Events(i, func(e *events.Event, groups ...events.Event) error {
		id++
		if len(e.Locals) > 0 {
			e.Lookahead = state.Lookahead
		}
		line = events.AppendRouterEvent(line[:0], state.Key(), id, e, groups...)
		_, err := out.Write(line)
		return err
	})
	d.Events += uint64(id)
	d.Pending += pending
	return err
}
